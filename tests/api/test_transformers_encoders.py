"""Encoders and cross attention of transformers under this library."""

from __future__ import annotations

import pytest
import torch
from tiny_models import VOCABULARY, assert_same, assert_same_tokens, padded, transformers

SIDES = [None, "left", "right"]
SIZES = {"vocab_size": VOCABULARY, "pad_token_id": 0}


@pytest.fixture
def device(target) -> str:
    return target.device


def built(kind: str, name: str, device: str, **sizes: object):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)
    model = getattr(transformers, f"{name}{kind}")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.to(device)


def encoder(name: str, device: str):
    width = 64 if device == "cpu" else 256
    sizes = {"hidden_size": width, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    more = {"local_attention": 8, "global_attn_every_n_layers": 2} if name == "ModernBert" else {}
    return built("Model", name, device, **sizes, **more)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_encoders(device, name, side):
    model, inputs = encoder(name, device), padded(side, device)
    assert_same(model, lambda: model(**inputs).last_hidden_state, inputs["attention_mask"])


def bart(device: str):
    width = 64 if device == "cpu" else 256
    heads = {f"{part}_attention_heads": 4 for part in ("encoder", "decoder")}
    layers = {f"{part}_layers": 2 for part in ("encoder", "decoder")}
    ffn = {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
    special = {"bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None}
    return built("ForConditionalGeneration", "Bart", device, d_model=width, **heads, **layers, **ffn, **special)


@pytest.mark.parametrize("side", SIDES)
def test_cross_attention(device, side):
    model, inputs = bart(device), padded(side, device)
    target = padded("right", device, (7, 5, 6))
    more = {"decoder_input_ids": target["input_ids"], "decoder_attention_mask": target["attention_mask"]}
    assert_same(model, lambda: model(**inputs, **more).logits, target["attention_mask"])


@pytest.mark.parametrize("cache", [None, "static"])
def test_generation_with_cross_attention(cache):
    inputs = padded("right", "cpu")
    options = {"cache_implementation": cache, "disable_compile": True, "max_new_tokens": 8, "num_beams": 1}
    assert_same_tokens(bart("cpu"), inputs, **options)


@pytest.mark.parametrize("cache", [None, "static"])
def test_position_bias(cache):
    """T5 adds a bias to its logits, which PyTorch computes."""
    special = {"eos_token_id": None, "decoder_start_token_id": 0}
    model = built("ForConditionalGeneration", "T5", "cpu", d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4,
                  **special)  # fmt: skip
    inputs = padded("right", "cpu")
    more = {"decoder_input_ids": padded(None, "cpu", (7, 7, 7))["input_ids"]}
    assert_same(model, lambda: model(**inputs, **more).logits)
    assert_same_tokens(model, inputs, max_new_tokens=6, cache_implementation=cache, disable_compile=True)


def test_a_bidirectional_decoder(device):
    """Configurations with ``is_causal=False`` make encoders of causal models."""
    from tiny_models import decoder

    model, inputs = decoder("Llama", device, is_causal=False), padded("left", device)
    assert_same(model, lambda: model(**inputs, use_cache=False).logits, inputs["attention_mask"])
