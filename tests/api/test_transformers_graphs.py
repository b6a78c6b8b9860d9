"""Decode steps of transformers on static caches: compiled, and captured in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import CACHE, baseline, decoder, padded, transformers

from cutlass_kernels.integrations.transformers import register

ROOM = 40


def prefilled(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    cache = transformers.StaticCache(config=model.config, max_cache_len=ROOM)
    model(**inputs, **{CACHE: cache}, use_cache=True)
    return cache


def masks(side: str | None, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The mask of all keys of the cache, or none."""
    if side is None:
        return {}
    mask = inputs["attention_mask"]
    return {"attention_mask": torch.cat([mask, mask.new_ones(len(mask), ROOM - mask.size(1))], 1)}


def eager_steps(model: Any, inputs: dict[str, torch.Tensor], mask: dict[str, torch.Tensor], tokens: Any) -> Any:
    """Logits of single tokens ``[steps, batch, vocabulary]`` under the attention that the model has."""
    cache = prefilled(model, inputs)
    return torch.stack(
        [model(token, **{CACHE: cache}, use_cache=True, **mask).logits[:, -1] for token in tokens]
    ).double()


@pytest.mark.gpu
@pytest.mark.parametrize("side", [None, "left"])
@torch.inference_mode()
def test_captured_step(target, side):
    """One graph computes every step: lengths grow on the device. Its capture proves that nothing is read back."""
    if target.is_reference:
        pytest.skip("graphs need a GPU")
    model, inputs = decoder("Llama", target.device), padded(side, target.device)
    tokens, mask = inputs["input_ids"].flip(1).t()[:8, :, None].contiguous(), masks(side, inputs)
    model.set_attn_implementation(baseline(model))
    want = eager_steps(model, inputs, mask, tokens)
    model.to(torch.bfloat16)
    theirs = (eager_steps(model, inputs, mask, tokens) - want).abs().max()

    model.set_attn_implementation(register())
    cache, token = prefilled(model, inputs), tokens[0].clone()
    lengths = [layer.cumulative_length for layer in cache.layers]

    def step() -> torch.Tensor:
        return model(token, **{CACHE: cache}, use_cache=True, **mask).logits[:, -1]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    for length in lengths:
        length.fill_(inputs["input_ids"].size(1))
    ours = []
    for next_token in tokens:
        token.copy_(next_token)
        graph.replay()
        ours.append(logits.double())
    assert float((torch.stack(ours) - want).abs().max()) <= 2 * float(theirs) + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("side", [None, "left"])
@torch.inference_mode()
def test_eager_steps_read_nothing_back(target, side):
    if target.is_reference:
        pytest.skip("the CPU has nothing to read back")
    model, inputs = decoder("Llama", target.device).to(torch.bfloat16), padded(side, target.device)
    model.set_attn_implementation(register())
    cache, mask, token = prefilled(model, inputs), masks(side, inputs), inputs["input_ids"][:, :1]
    model(token, **{CACHE: cache}, use_cache=True, **mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(token, **{CACHE: cache}, use_cache=True, **mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("side", [None, "left"])
@torch.inference_mode()
def test_compiled_step(target, side):
    """``fullgraph``: nothing breaks the graph, and one graph serves all lengths."""
    model, inputs = decoder("Llama", target.device), padded(side, target.device)
    if target.device != "cpu":
        model.to(torch.float16)
    tokens, mask = inputs["input_ids"].flip(1).t()[:4, :, None].contiguous(), masks(side, inputs)
    model.set_attn_implementation(register())
    want = eager_steps(model, inputs, mask, tokens)
    cache = prefilled(model, inputs)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    options = {"backend": "aot_eager"} if target.device == "cpu" else {"mode": "reduce-overhead"}
    compiled = torch.compile(model, fullgraph=True, **options)
    for index, token in enumerate(tokens):
        logits = compiled(token, **{CACHE: cache}, use_cache=True, **mask).logits[:, -1].double()
        torch.testing.assert_close(logits, want[index], atol=1e-4 if target.device == "cpu" else 2e-2, rtol=1e-3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "GptOss"])
@pytest.mark.parametrize("side", [None, "left"])
def test_compiled_generation(target, name, side):
    """What transformers compiles by itself: decode steps of ``cache_implementation="static"``, in fp16."""
    if target.is_reference:
        pytest.skip("transformers compiles for GPUs")
    model, inputs = decoder(name, target.device).to(torch.float16), padded(side, target.device)
    model.set_attn_implementation(register())
    tokens = [
        model.generate(
            **inputs, max_new_tokens=10, do_sample=False, cache_implementation="static", disable_compile=disabled
        )
        for disabled in (True, False)
    ]
    same = (tokens[0] == tokens[1]).float().mean()
    assert float(same) > 0.8, f"{tokens[0].tolist()} is not {tokens[1].tolist()}"  # near ties may go either way
