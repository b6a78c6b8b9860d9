"""Causal models of transformers under this library: padding, caches, packed sequences, masks of the caller."""

from __future__ import annotations

import inspect

import pytest
import torch
from tiny_models import CACHE, DECODERS, VOCABULARY, assert_same, assert_same_tokens, decoder, padded, transformers

from cutlass_kernels.integrations import transformers as integration
from cutlass_kernels.integrations.paged_cache import PagedCache
from cutlass_kernels.integrations.transformers import NAME, register

CHUNKED = inspect.signature(transformers.masking_utils.create_chunked_causal_mask).parameters
LLAMA4_IS_STATIC = "block_sequence_ids" in CHUNKED  # which generate() passes
SIDES = [None, "left", "right"]


@pytest.fixture
def device(target) -> str:
    return target.device


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", DECODERS)
def test_prompts(device, name, side):
    model, inputs = decoder(name, device), padded(side, device)
    assert_same(model, lambda: model(**inputs).logits, inputs["attention_mask"])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("name", DECODERS)
def test_caches(device, name, side, cache):
    """A prompt, an append, and single tokens. Windows and chunks have rolled over by then."""
    model, inputs = decoder(name, device), padded(side, device)
    ids, mask = inputs["input_ids"], inputs["attention_mask"]

    def logits() -> torch.Tensor:
        more = {"max_cache_len": 32} if cache == "static" else {}
        kept = {"dynamic": transformers.DynamicCache, "static": transformers.StaticCache}[cache](
            config=model.config, **more
        )
        found, end = [], 0
        for part in ids.split([9, 1, 1, 6, 1, 1, 2], 1):
            end += part.size(1)
            seen = {} if side is None else {"attention_mask": mask[:, :end]}
            found.append(model(part, **{CACHE: kept}, use_cache=True, **seen).logits)
        return torch.cat(found, 1)

    assert_same(model, logits, mask)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma3", "GptOss", "Llama4"])
def test_generate(name, side, cache):
    if name == "Llama4" and cache and not LLAMA4_IS_STATIC:
        pytest.skip("this version of transformers cannot generate with chunks on a static cache")
    # A row of right padding may see no key of a window or chunk: what it computes is not defined.
    lengths = (21, 20, 19) if side == "right" else (21, 16, 18)
    inputs = padded(side, "cpu", lengths)
    options = {"cache_implementation": cache, "disable_compile": True}
    assert_same_tokens(decoder(name, "cpu"), inputs, max_new_tokens=10, **options)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Llama4"])
def test_packed_sequences(device, name):
    """Positions that begin again begin another sequence."""
    model, lengths = decoder(name, device), (9, 13, 4)
    ids = padded(None, device, (sum(lengths),))["input_ids"]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    assert_same(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_packed_sequences_with_offsets(device, name):
    """The keywords of transformers' collator. A mask of ones keeps transformers from looking at positions."""
    model, lengths = decoder(name, device), (9, 13, 4)
    ids = padded(None, device, (sum(lengths),))["input_ids"]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    indptr = torch.tensor([0, 9, 22, 26], device=device)
    offsets = {"cu_seq_lens_q": indptr, "cu_seq_lens_k": indptr, "max_length_q": 13, "max_length_k": 13}

    def logits() -> torch.Tensor:  # sdpa knows positions alone
        is_ours = model.config._attn_implementation == NAME
        more = {"attention_mask": torch.ones_like(ids), **offsets} if is_ours else {}
        return model(ids, position_ids=positions, use_cache=False, **more).logits

    assert_same(model, logits)


def test_masks_of_the_caller(device):
    model, seen = decoder("Llama", device), _random_mask(1).to(device)
    ids = padded(None, device)["input_ids"]
    assert_same(model, lambda: model(ids, attention_mask=seen, use_cache=False).logits)


@pytest.mark.runs_nothing("PyTorch adds masks of numbers, and has one for each head")
@pytest.mark.parametrize("form", ["lowest", "additive", "heads"])
def test_masks_by_pytorch(device, form):
    model, ids = decoder("Llama", device), padded(None, device)["input_ids"]
    seen, lowest = _random_mask(4 if form == "heads" else 1), torch.finfo(torch.float32).min
    masks = {"heads": seen, "lowest": torch.where(seen, 0.0, lowest), "additive": torch.randn(seen.shape)}
    mask = masks[form].to(device)

    def logits() -> torch.Tensor:
        given = mask if form == "heads" else mask.to(model.dtype)
        return model(ids, attention_mask=given, use_cache=False).logits

    assert_same(model, logits)


def _random_mask(heads: int) -> torch.Tensor:
    seen = torch.rand(3, heads, 21, 21, generator=torch.Generator().manual_seed(0)) < 0.5
    return seen | torch.eye(21, dtype=torch.bool)


def test_a_hole_in_the_padding(device):
    """Keys that are no interval become bits, in prompts and in decode steps."""
    model, inputs = decoder("Llama", device), padded("left", device)
    inputs["attention_mask"][:, 10:12] = 0
    assert_same(model, lambda: model(**inputs).logits, inputs["attention_mask"])
    if device == "cpu":
        assert_same_tokens(model, inputs, max_new_tokens=5)


def test_text_generation_pipeline():
    """A pipeline pads its batch itself."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", padding_side="left")
    texts = []
    for implementation in ("sdpa", register()):
        model = decoder("Llama", "cpu")
        model.set_attn_implementation(implementation)
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=fast, batch_size=2)
        texts.append(pipe(["w5 w6 w7", "w9 w10 w11 w12 w13"], max_new_tokens=6, do_sample=False))
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_training_is_left_to_pytorch(name):
    gradients = []
    for implementation in ("eager", register()):
        model, inputs = decoder(name, "cpu"), padded("left", "cpu")
        model.set_attn_implementation(implementation)
        logits = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
        logits.square().mean().backward()
        gradients.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)


# --- a cache in pages, and one that is kept ---


@torch.no_grad()
def logits(model, implementation: str, ids: torch.Tensor, **options) -> torch.Tensor:
    model.set_attn_implementation(implementation)
    return model(ids, **options).logits


def test_a_wrong_attention_shows_in_the_logits(monkeypatch):
    """Comparisons would not mean much if attention hardly mattered to the logits of random weights."""
    model, ids = decoder("Llama", "cpu"), padded("one request", "cpu")["input_ids"]
    expected, attend = logits(model, "sdpa", ids), integration.plan_free.attention
    wrong = lambda *args, **options: attend(*args, **{**options, "window": (8, -1)})  # noqa: E731
    monkeypatch.setattr(integration.plan_free, "attention", wrong)
    assert float((logits(model, register(), ids) - expected).abs().max()) > 0.01


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_a_cache_in_pages(batch, page_size, name):
    """A prompt, several tokens at once and single ones, under windows and soft caps too."""
    model, ids = decoder(name, "cpu"), padded(None, "cpu")["input_ids"][:batch]
    cache = PagedCache(model.config, batch, ids.size(1), model.device, model.dtype, page_size)
    parts = [
        logits(model, cache.register(), part, past_key_values=cache, use_cache=True)
        for part in ids.split([11, 1, 1, 4, 1, 3], 1)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), logits(model, "eager", ids), rtol=1e-4, atol=1e-4)
    assert cache.get_seq_length() == ids.size(1)
    with pytest.raises(RuntimeError, match="larger max_tokens"):
        logits(model, cache.register(), ids[:, :1], past_key_values=cache, use_cache=True)


def test_a_cache_in_pages_refuses_padding():
    model, inputs = decoder("Llama", "cpu"), padded("left", "cpu")
    cache = PagedCache(model.config, 3, 32, model.device, model.dtype)
    model.set_attn_implementation(cache.register())
    with pytest.raises(NotImplementedError, match="padding"):
        model(**inputs, past_key_values=cache, use_cache=True)


def test_kept_lengths_serve_inference_mode_and_no_grad():
    model, ids = decoder("Llama", "cpu"), padded(None, "cpu")["input_ids"]
    with torch.inference_mode():
        first = logits(model, register(), ids)
    assert torch.equal(first, logits(model, register(), ids))
