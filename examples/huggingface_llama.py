"""A Hugging Face Llama on this library: the same logits and tokens as with torch SDPA, prefill and generation.

    python examples/huggingface_llama.py                                 a small model on the CPU, a larger one on a GPU
    python examples/huggingface_llama.py --dtype float16 --hidden 2048   head dimension 64 (2048 / 32 heads)

The model is built from a configuration with random weights: nothing is downloaded. A second copy with the same weights
in higher precision says what the logits should be. This library may be at most twice as far from it as torch SDPA is.
Exit code 1 if it is farther.

Unmodified models get this library with

    from cutlass_kernels.integrations.transformers import register
    model.set_attn_implementation(register())

and a cache in pages with ``PagedCache`` of ``cutlass_kernels.integrations.paged_cache``. Both are compared here.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch

import cutlass_kernels

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError as missing:
    raise SystemExit(f"This example needs {missing.name}: pip install transformers typer rich") from None

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CPU_DEFAULTS = {"dtype": "float32", "layers": 2, "hidden": 256, "heads": 8, "kv_heads": 2, "prompt": 48, "tokens": 16}
GPU_DEFAULTS = {
    "dtype": "bfloat16",
    "layers": 8,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "prompt": 1024,
    "tokens": 64,
}
FACTOR = 2.0  # our error may be this many times SDPA's ...
FLOOR = 1.0  # ... plus this many units in the last place of the largest logit

console = Console()


@dataclass
class Generation:
    """Logits of the prompt ``[batch, prompt, vocab]`` and of each new token but the last, and the new tokens."""

    prompt_logits: torch.Tensor
    step_logits: torch.Tensor
    tokens: torch.Tensor


def build(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> LlamaForCausalLM:
    """A Llama with random weights, the same on every call."""
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


Attention = Callable[[LlamaForCausalLM, int, int], tuple[str, Cache]]  # of a model, a batch and so many tokens


def contiguous(implementation: str) -> Attention:
    """An attention that is given all keys and values, from transformers' own cache."""
    return lambda model, batch, tokens: (implementation, DynamicCache(config=model.config))


def paged(model: LlamaForCausalLM, batch: int, tokens: int) -> tuple[str, Cache]:
    """This library on a cache in pages."""
    from cutlass_kernels.integrations.paged_cache import PagedCache

    cache = PagedCache(model.config, batch, tokens, model.device, model.dtype)
    return cache.register(), cache


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM,
    attention: Attention,
    prompt: torch.Tensor,
    count: int,
    forced: torch.Tensor | None = None,
    all_logits: bool = True,
) -> Generation:
    """Prefill, then ``count`` greedy tokens one by one on a KV cache.

    With ``forced`` tokens the model reads those instead of its own, so that two runs can be compared step by step.
    Without ``all_logits`` the prefill computes those of the last token only, as serving does.
    """
    implementation, cache = attention(model, prompt.size(0), prompt.size(1) + count)
    model.set_attn_implementation(implementation)
    logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=0 if all_logits else 1).logits
    prompt_logits, steps = logits, []
    tokens = [logits[:, -1].argmax(-1)]
    for step in range(count - 1):
        token = tokens[-1] if forced is None else forced[:, step]
        logits = model(token[:, None], past_key_values=cache, use_cache=True).logits
        steps.append(logits[:, -1])
        tokens.append(logits[:, -1].argmax(-1))
    no_steps = prompt_logits[:, :0]
    return Generation(prompt_logits, torch.stack(steps, 1) if steps else no_steps, torch.stack(tokens, 1))


@torch.inference_mode()
def truth(model: LlamaForCausalLM, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of prompt and tokens by the same weights in higher precision, in one pass without a cache."""
    dtype = torch.float64 if model.dtype == torch.float32 else torch.float32
    exact = copy.deepcopy(model).to(dtype)
    exact.set_attn_implementation("sdpa")
    return exact(torch.cat([prompt, tokens[:, :-1]], 1), use_cache=False).logits


def report_logits(label: str, ours: Generation, sdpa: Generation, exact: torch.Tensor) -> bool:
    """Prints errors against the higher precision; whether ours are within the bound."""
    prompt = sdpa.prompt_logits.size(1)
    unit = torch.finfo(sdpa.prompt_logits.dtype).eps
    table = Table(
        title=f"Logits, {label}: max abs error against higher precision",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for name in ("", "|logit|", "SDPA", "ours", "ratio", "bound", "ours-SDPA", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    fine = True
    for name, a, b, e in (
        (f"prefill ({prompt})", ours.prompt_logits, sdpa.prompt_logits, exact[:, :prompt]),
        (f"cached steps ({ours.step_logits.size(1)})", ours.step_logits, sdpa.step_logits, exact[:, prompt:]),
    ):
        if a.size(1) == 0:
            continue
        largest = float(e.abs().max())
        our_error, sdpa_error = (float((x.to(e.dtype) - e).abs().max()) for x in (a, b))
        bound = FACTOR * sdpa_error + FLOOR * unit * largest
        good = our_error <= bound  # False for NaN
        fine &= good
        difference = float((a.to(e.dtype) - b.to(e.dtype)).abs().max())
        figures = [f"{x:.1e}" for x in (sdpa_error, our_error, bound, difference)]
        figures.insert(2, f"{our_error / max(sdpa_error, 1e-30):.2f}")
        table.add_row(name, f"{largest:.2f}", *figures, "[green]ok[/]" if good else "[red]too large[/]")
    console.print()
    console.print(table)
    return fine


def report_tokens(label: str, ours: torch.Tensor, sdpa: Generation) -> None:
    """Prints whether free generation gave the same tokens, and how close the choice was where it did not."""
    differs = ours != sdpa.tokens
    equal = f"{int((~differs).sum())} of {differs.numel()}"
    console.print(f"\nGreedy tokens equal to SDPA's, {label}: {equal}", highlight=False)
    for sequence in differs.any(1).nonzero().flatten().tolist():
        step = int(differs[sequence].int().argmax())
        logits = sdpa.step_logits[sequence, step - 1] if step else sdpa.prompt_logits[sequence, -1]
        best, chosen = logits.float().max(), logits[ours[sequence, step]].float()
        console.print(
            f"  sequence {sequence} parts at new token {step}, where SDPA's logits of the two choices differ by "
            f"{float(best - chosen):.3g}: later tokens follow from that one.",
            highlight=False,
        )


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median wall time of ``call`` with the device idle before and after."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def report_times(model: LlamaForCausalLM, names: dict[str, Attention], prompt: torch.Tensor, count: int) -> None:
    """Prints the time of a prefill and of one generated token, for each implementation."""
    device, batch = prompt.device, prompt.size(0)
    table = Table(title="Times of the whole model", title_justify="left", box=None, pad_edge=False)
    for name in ("attention", "prefill ms", "prompt tokens/s", "ms per step", "new tokens/s"):
        table.add_column(name, justify="left" if name == "attention" else "right")
    repeats = 5 if device.type == "cuda" else 3
    for label, attention in names.items():
        run = functools.partial(generate, model, attention, prompt, all_logits=False)
        run(1)
        prefill = seconds(functools.partial(run, 1), device, repeats)
        step = max(seconds(functools.partial(run, count), device, repeats) - prefill, 1e-9) / max(count - 1, 1)
        row = [f"{1e3 * prefill:.2f}", f"{prompt.numel() / prefill:,.0f}"]
        row += [f"{1e3 * step:.2f}", f"{batch / step:,.0f}"] if count > 1 else ["", ""]
        table.add_row(label, *row)
    console.print()
    console.print(table)


def main(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)} (cpu: float32, cuda: bfloat16).")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers (cpu: 2, cuda: 8).")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size (cpu: 256, cuda: 4096).")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads (cpu: 8, cuda: 32).")] = None,
    kv_heads: Annotated[int | None, typer.Option(min=1, help="Key/value heads (cpu: 2, cuda: 8).")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of the prompt (cpu: 48, cuda: 1024).")] = None,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to generate (cpu: 16, cuda: 64).")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences, all of the prompt's length.")] = 1,
    times: Annotated[bool, typer.Option(help="Measure times too.")] = True,
) -> None:
    """Compare logits, generated tokens and times of a Llama with random weights on torch SDPA and on this library."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: torch sees no CUDA device here. Use --device cpu.")
    where = torch.device(device)
    defaults = GPU_DEFAULTS if where.type == "cuda" else CPU_DEFAULTS
    given = {"dtype": dtype, "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    given |= {"prompt": prompt, "tokens": new_tokens}
    values: dict[str, Any] = {name: defaults[name] if value is None else value for name, value in given.items()}
    if values["dtype"] not in DTYPES:
        raise typer.BadParameter(f"--dtype {values['dtype']}: use one of {', '.join(DTYPES)}.")
    if values["hidden"] % values["heads"] or values["heads"] % values["kv_heads"]:
        raise typer.BadParameter("--heads must divide --hidden, and --kv-heads must divide --heads.")
    element = DTYPES[values["dtype"]]
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=values["hidden"],
        intermediate_size=values["hidden"] * 11 // 4,
        num_hidden_layers=values["layers"],
        num_attention_heads=values["heads"],
        num_key_value_heads=values["kv_heads"],
        max_position_embeddings=values["prompt"] + values["tokens"],
        initializer_range=values["hidden"] ** -0.5,  # activations of order 1, so that attention decides the logits
    )
    from cutlass_kernels.integrations.transformers import register

    model = build(config, where, element)
    head_dim = values["hidden"] // values["heads"]
    explained = cutlass_kernels.explain(
        device=where,
        q_dtype=element,
        num_qo_heads=values["heads"],
        num_kv_heads=values["kv_heads"],
        head_dim_qk=head_dim,
        features=["causal"],
    )
    machine = torch.cuda.get_device_name(where) if where.type == "cuda" else "the CPU"
    console.print(
        f"Llama, {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M parameters in {values['dtype']} on {machine}: "
        f"{values['layers']} layers, hidden {values['hidden']}, heads {values['heads']}/{values['kv_heads']}, head_dim "
        f"{head_dim}; batch {batch}. Backend of this library: {explained.selected}.",
        highlight=False,
    )
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(config.vocab_size, (batch, values["prompt"]), generator=generator).to(where)
    count = values["tokens"]
    by_torch = contiguous("sdpa")
    ours = {"this library": contiguous(register()), "this library, pages": paged}
    sdpa = generate(model, by_torch, ids, count)
    exact = truth(model, ids, sdpa.tokens)
    fine = True
    for label, attention in ours.items():
        fine &= report_logits(label, generate(model, attention, ids, count, forced=sdpa.tokens), sdpa, exact)
        report_tokens(label, generate(model, attention, ids, count).tokens, sdpa)
    if times:
        report_times(model, {"torch SDPA": by_torch, **ours}, ids, count)
    if not fine:
        console.print("[red]The logits are farther from the truth than they may be.[/]")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
