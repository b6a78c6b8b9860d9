"""Continuous batching of transformers on this library."""

from __future__ import annotations

import pytest
import torch
from tiny_models import baseline, decoder, transformers

continuous_batching = pytest.importorskip("cutlass_kernels.integrations.continuous_batching")


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "GptOss"])
def test_generate_batch(target, name):
    """The same greedy tokens as those of each prompt by itself; of fp16, most."""
    device = target.device
    model = decoder(name, device)
    if device != "cpu":
        model.to(torch.float16)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 97, (length,), generator=generator).tolist() for length in (3, 14, 7)]
    model.set_attn_implementation(baseline(model))
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        want.append(model.generate(ids, max_new_tokens=8, do_sample=False)[0, len(prompt) :].tolist())
    model.set_attn_implementation(continuous_batching.register())
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    config = transformers.GenerationConfig(**options, num_blocks=32, max_batch_tokens=64)
    results = model.generate_batch(inputs=prompts, generation_config=config)
    numbers = sorted(results, key=lambda key: int(key.split("_")[-1]))
    found = [results[key].generated_tokens for key in numbers]
    if device == "cpu":
        assert found == want
    else:
        same = [a == b for x, y in zip(found, want) for a, b in zip(x, y)]
        assert sum(same) > 0.7 * len(same), f"{found} is not {want}"


@pytest.mark.parametrize("window", [None, 5])
def test_decode_steps_read_pages(target, window):
    """With a block table transformers leaves it to attention to write new keys and values."""
    dtype = torch.float32 if target.device == "cpu" else torch.float16
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(target.device, dtype)

    q, k, v, pages = randn(1, 4, 2, 64), randn(1, 2, 2, 64), randn(1, 2, 2, 64), randn(2, 6, 16, 2, 64)
    table = torch.tensor([[3, 1, -1], [5, 0, 2]], dtype=torch.int32, device=target.device)
    lengths = [20, 41]  # with the new token
    indptr = torch.tensor([0, 20, 61], dtype=torch.int32, device=target.device)
    options = {"cu_seq_lens_k": indptr, "block_table": table, "k_cache": pages[0].clone(), "v_cache": pages[1].clone()}
    out = continuous_batching._decode(q, k, v, {**options, "scaling": 0.3, "sliding_window": window})
    assert out.shape == (1, 2, 4, 64)
    for b, length in enumerate(lengths):
        used = table[b][: -(-length // 16)].long()
        keys, values = (x[used].flatten(0, 1)[:length].double() for x in (options["k_cache"], options["v_cache"]))
        assert torch.equal(keys[-1].to(dtype), k[0, :, b]) and torch.equal(values[-1].to(dtype), v[0, :, b])
        near = slice(0 if window is None else length - window, length)
        keys, values = (x[near].repeat_interleave(2, 1) for x in (keys, values))
        weights = (0.3 * torch.einsum("hd,khd->hk", q[0, :, b].double(), keys)).softmax(-1)
        want = torch.einsum("hk,khd->hd", weights, values)
        torch.testing.assert_close(out[0, b].double(), want, atol=5e-3 if dtype == torch.float16 else 1e-5, rtol=1e-3)
