"""Small models of transformers with random weights, and their logits under two implementations of attention."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from cutlass_kernels.integrations.transformers import register  # noqa: E402

VOCABULARY = 97
WINDOW = 6  # and chunks of eight
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Qwen3": {},
    "Gemma2": {**HYBRID, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 5},
    "Gemma3": HYBRID,
    "GptOss": {**HYBRID, "num_local_experts": 1, "num_experts_per_tok": 1},
    "Llama4": {
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 8,
        "num_local_experts": 1,
        "intermediate_size_mlp": 64,
    },
}
NOT_BY_SDPA = ("Gemma2", "GptOss")  # soft caps and sinks
PARAMETERS = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in PARAMETERS else "past_key_values"  # the keyword of this version
SPECIAL = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def decoder(name: str, device: str, **more: Any) -> Any:
    """A causal model in fp32; on GPUs with a head dimension that every backend has."""
    text = "Text" if name in ("Gemma3", "Llama4") else ""
    head_dim = 16 if device == "cpu" else 64
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": head_dim, "initializer_range": 0.15}
    config = getattr(transformers, f"{name}{text}Config")(**{**sizes, **heads, **SPECIAL, **DECODERS[name], **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, parameter in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return model.to(device)


def padded(side: str | None, device: str, lengths: tuple[int, ...] = (21, 16, 18)) -> dict[str, torch.Tensor]:
    """Token ids and mask of a batch, padded on the left, on the right, or of equal lengths; or of one request."""
    lengths = lengths[:1] if side == "one request" else lengths
    longest = max(lengths)
    mask = torch.ones(len(lengths), longest, dtype=torch.long)
    for row, length in zip(mask, lengths):
        if side in ("left", "right"):
            row[slice(0, longest - length) if side == "left" else slice(length, longest)] = 0
    generator = torch.Generator().manual_seed(len(lengths))
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def baseline(model: Any) -> str:
    """The implementation to compare with: gpt-oss and Gemma 2 have no sdpa."""
    return "eager" if type(model).__name__.startswith(NOT_BY_SDPA) else "sdpa"


def assert_same(
    model: Any, call: Any, real: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16, by: str | None = None
) -> None:
    """``call()``, logits ``[batch, tokens, ...]``, is under this library as under transformers' own attention ``by``.

    ``real`` is the mask of tokens to compare, ``[batch, tokens]``. On GPUs the model turns to ``dtype``, and may be
    twice as far from fp32 as its own attention is.
    """
    name, by = register(), by or baseline(model)

    def logits(implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        found = call().double()
        assert bool(found.isfinite().all()) or implementation != name
        return found if real is None else found[real.bool()]

    with torch.inference_mode():
        want = logits(by)
        if model.device.type == "cpu":
            torch.testing.assert_close(logits(name), want, atol=1e-4, rtol=1e-4)
            return
        model.to(dtype)
        theirs, ours = ((logits(x) - want).abs().max() for x in (by, name))
        assert float(theirs) > 0  # there is something to compare with
        assert float(ours) <= 2 * float(theirs) + 1e-3


def assert_same_tokens(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> None:
    """Greedy generation gives the same tokens; on the CPU, where both compute in fp32."""
    tokens = []
    for implementation in (baseline(model), register()):
        model.set_attn_implementation(implementation)
        tokens.append(model.generate(**inputs, do_sample=False, **options))
    assert torch.equal(*tokens), f"{tokens[0].tolist()} is not {tokens[1].tolist()}"
