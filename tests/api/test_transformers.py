"""The attention function that transformers calls, on every target, and whole models on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_close

import cutlass_kernels
from cutlass_kernels.integrations import _key_ranges
from cutlass_kernels.integrations import transformers as integration
from cutlass_kernels.integrations._key_ranges import Kind

try:
    import transformers
except ImportError:
    transformers = None

DTYPES = {"cpu": [torch.float32], "cuda:0": [torch.float16, torch.bfloat16]}


def formula(
    q, k, v, *, scaling, is_causal=True, sliding_window=None, softcap=None, s_aux=None, seen=None
) -> torch.Tensor:
    """``[batch, tokens, heads, dim]`` in the arithmetic of the tensors; rows that see no key are 0.

    ``seen`` is a dense bool mask, instead of what the options say.
    """
    rows, keys, group = q.size(2), k.size(2), q.size(1) // k.size(1)
    scores = scaling * q @ k.repeat_interleave(group, 1).transpose(2, 3)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if seen is None:
        seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device)
        seen = seen.tril(keys - rows) if is_causal else seen
        seen = seen if sliding_window is None else seen.triu(keys - rows - sliding_window + 1)
    scores = scores.masked_fill(~seen, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[:, None, None].expand(len(q), -1, rows, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1).nan_to_num()[..., :keys]
    return (weights @ v.repeat_interleave(group, 1)).transpose(1, 2)


def randn(target: Any, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.randn(*shape).to(dtype or DTYPES[target.device][0]).to(target.device)


def check(q, k, v, mask: torch.Tensor | None = None, *, like: Any = None, factor: float = 2.0, **given: Any) -> None:
    """The function gives what the formula does. ``like``: q, k and v of other strides or shapes for the formula."""
    out, weights = integration.attention(
        torch.nn.Module(), q, k, v, mask, **{name: x for name, x in given.items() if name != "seen"}
    )
    assert weights is None and out.dtype == q.dtype
    like = like or (q, k, v)
    want = formula(*(x.double() for x in like), **given)
    assert_close(out, want, formula(*like, **given).to(q.dtype), dtype=q.dtype, factor=factor)


# In fp32 the order in which a BLAS adds decides: on one machine errors differ threefold between two shapes.
def factor_of(dtype: torch.dtype) -> float:
    return 4.0 if dtype == torch.float32 else 2.0


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": dict(is_causal=True),
    "full": dict(is_causal=False),
    "window": dict(is_causal=True, sliding_window=6),
    "cap": dict(is_causal=True, softcap=1.5),
    "sinks": dict(is_causal=True, s_aux=True),
    "sinks, full": dict(is_causal=False, s_aux=True),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rows, keys", [(1, 9), (5, 9), (70, 200), (1, 3000)])
@pytest.mark.parametrize("batch", [1, 3])
def test_attention_function(target, batch, rows, keys, head_dim, options):
    given = dict(OPTIONS[options], scaling=0.3)
    for dtype in DTYPES[target.device]:
        shapes = [(batch, 6, rows, head_dim), *[(batch, 2, keys, head_dim)] * 2]
        q, k, v = (randn(target, *shape, dtype=dtype) for shape in shapes)
        if "s_aux" in given:
            given["s_aux"] = randn(target, 6, dtype=dtype)
        check(q, k, v, factor=factor_of(dtype), **given)


def test_views_of_a_cache(target):
    """A dynamic cache hands over what it has concatenated; a model's queries are transposed projections."""
    q, k, v = (x.transpose(1, 2) for x in randn(target, 2, 30, 8, 64).split([4, 2, 2], 2))
    for rows in (30, 7, 1):
        check(q[:, :, -rows:], k, v, scaling=0.125, is_causal=True)


KINDS = {
    "causal": Kind(causal=True),
    "full": Kind(),
    "window": Kind(causal=True, left=6),
    "two sides": Kind(left=5, right=5),
    "chunks": Kind(causal=True, chunk_size=8),
}


def laid_out(layout: str, x: torch.Tensor) -> torch.Tensor:
    """The same values in other strides: of a cache, of projections, of part of a larger cache, and of odd requests."""
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "slice":
        return torch.cat([x, torch.full_like(x, torch.nan)], 2)[:, :, : x.size(2)]
    if layout == "odd":
        size = x[0].numel() + 8
        room = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
        return room.as_strided(x.shape, (size, *x[0].contiguous().stride())).copy_(x)
    return x.contiguous()


@pytest.mark.pairwise
@pytest.mark.parametrize("values", ["heads first", "tokens first"])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "slice", "odd"])
@pytest.mark.parametrize("form", ["ranges", "bits"])
@pytest.mark.parametrize("rows, keys", [(1, 1), (1, 40), (12, 40), (40, 40)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_layouts(target, kind, batch, rows, keys, form, layout, values):
    """Key ranges, and the same as a dense mask, over keys of any strides."""
    q, k, v = (randn(target, *shape) for shape in ((batch, 4, rows, 64), *[(batch, 2, keys, 64)] * 2))
    first = torch.tensor([0, 3, 11])[:batch].clamp(max=keys - 1).to(target.device)
    behind = torch.tensor([keys, keys - 2, keys])[:batch].clamp(min=1).to(target.device)
    ranges = _key_ranges.write(KINDS[kind], batch, first, (behind - first).clamp(min=0), target.device)
    seen = _key_ranges.to_dense(_key_ranges.read(ranges, batch), rows, keys)
    mask = ranges if form == "ranges" else seen
    given = (q, laid_out(layout, k), laid_out(values, v))
    check(*given, mask, like=(q, k, v), factor=factor_of(q.dtype), scaling=0.2, seen=seen)


def test_key_ranges_that_are_written_again(target):
    """What a call keeps with its mask holds until somebody writes to the mask, or the cache has other strides."""
    q, k, v = (randn(target, 3, heads, 9, 64) for heads in (4, 2, 2))
    mask = _key_ranges.write(Kind(causal=True), 3, 0, 9, target.device)
    for first in ([0, 0, 0], [2, 0, 5]):
        mask[0, 0, 0, :3] = torch.tensor(first)
        mask[0, 0, 1, :3] = 9 - torch.tensor(first)
        seen = _key_ranges.to_dense(_key_ranges.read(mask, 3), 9, 9)
        for layout in ("heads first", "tokens first"):
            given = [laid_out(layout, x) for x in (k, v)]
            check(q, *given, mask, like=(q, k, v), factor=4.0, scaling=0.2, seen=seen)


def test_heads_of_different_sizes(target):
    """Multi-head latent attention: values are narrower than keys."""
    check(*(randn(target, 2, 4, 9, dim) for dim in (192, 192, 128)), scaling=0.07)


def test_queries_of_one_request_for_all(target):
    """Learned queries have no batch."""
    q, k, v = (randn(target, n, 4, 9, 64) for n in (1, 3, 3))
    check(q, k, v, like=(q.expand(3, -1, -1, -1), k, v), scaling=0.125, is_causal=False)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
@pytest.mark.parametrize(
    "mask, words",
    [
        (torch.ones(2, 1, 5, 5, dtype=torch.int64), "torch.int64, which is no mask of 2 sequences"),
        (torch.ones(2, 1, 5, 4, dtype=torch.bool), r"it must be \[2, 1, 5, 5\]"),
        (torch.ones(3, 1, 5, 5, dtype=torch.bool), r"it must be \[2, 1, 5, 5\]"),
    ],
)
def test_masks_that_make_no_sense(mask, words):
    q = torch.randn(2, 4, 5, 16)
    with pytest.raises(ValueError, match=words):
        integration.attention(torch.nn.Module(), q, q, q, mask)


NUMBERS = torch.zeros(1, 1, 5, 5)


@pytest.mark.runs_nothing("PyTorch computes")
@pytest.mark.parametrize(
    "options, words",
    [
        (dict(attention_mask=NUMBERS), "masks of numbers"),
        (dict(attention_mask=NUMBERS.bool().expand(1, 4, 5, 5)), "one mask for all heads"),
        (dict(position_bias=NUMBERS), "position bias"),
        (dict(dropout=0.5), "dropout"),
    ],
)
def test_what_pytorch_computes_warns_once(options, words):
    integration._warn_of_torch.cache_clear()
    q = torch.randn(2, 4, 5, 16)
    with pytest.warns(cutlass_kernels.PerformanceWarning, match=words) as seen:
        for _ in range(2):
            integration.attention(torch.nn.Module(), q, q, q, **options)
    assert len(seen) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, "ranges", "bits"])
def test_attention_reads_nothing_back(target, form):
    if target.is_reference:
        pytest.skip("the CPU has nothing to read back")
    q, k, v = (torch.randn(3, heads, 40, 64, device=target.device, dtype=torch.float16) for heads in (4, 2, 2))
    ranges = _key_ranges.write(Kind(causal=True), 3, 0, torch.tensor(30, device=target.device), target.device)
    masks = {None: None, "ranges": ranges, "bits": _key_ranges.to_dense(_key_ranges.read(ranges, 3), 40, 40)}
    calls = [integration.attention(torch.nn.Module(), q, k, v, masks[form])[0]]
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls.append(integration.attention(torch.nn.Module(), q, k, v, masks[form])[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(*calls)


@pytest.mark.gpu
@pytest.mark.skipif(transformers is None, reason="transformers is not installed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
@torch.inference_mode()
def test_models(target, name, batch, dtype):
    """A prompt at once, then in chunks and single tokens on a cache: as good as PyTorch's attention in that type."""
    if target.is_reference:
        pytest.skip("test_transformers_decoders.py has the models of the CPU")
    from tiny_models import assert_same, decoder

    more: dict[str, Any] = dict(sliding_window=5) if name != "Llama" else {}
    more |= dict(layer_types=None, query_pre_attn_scalar=64) if name == "Gemma2" else {}
    model = decoder(name, target.device, hidden_size=256, intermediate_size=96, **more)
    ids = torch.randint(97, (batch, 24), device=target.device)

    def logits() -> torch.Tensor:
        whole = model(ids).logits
        cache = transformers.DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split([12, 8, 1, 1, 2], 1)]
        return torch.stack([whole, torch.cat(parts, 1)])

    assert_same(model, logits, dtype=dtype, by="eager")
