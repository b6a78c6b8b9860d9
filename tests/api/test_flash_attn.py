"""FlashAttention's functions, by the names of FlashAttention-3: what attention() gives of the same arguments."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from plan_free_problems import Mask, Options, expect, keys, page_table
from problems import Batch, make_batch, randn

import cutlass_kernels as ck
from cutlass_kernels.flash_attn import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)


def ints(values: Any, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def check(batch: Batch, out: torch.Tensor, mask: Mask | None = None) -> None:
    want, _, base = expect(batch, mask or Mask(causal=True), Options())
    assert_close(out.flatten(0, -3), want, base.to(out.dtype))


def by_request(batch: Batch) -> list[torch.Tensor]:
    """q, k and v ``[B, n, ...]``."""
    return [x.unflatten(0, (len(batch.qo_lens), -1)) for x in (batch.q, batch.k, batch.v)]


def same(target, found: Any, *tensors: torch.Tensor, **options: Any) -> None:
    """The bits of attention(), and the natural LSE ``[B, heads, rows]`` or ``[heads, rows]`` if it is returned."""
    out, lse = ck.attention(*tensors, return_lse=True, lse_base=math.e, backend=target.backend, **options)
    assert_bitwise(found[0] if isinstance(found, tuple) else found, out)
    if isinstance(found, tuple):
        assert_bitwise(found[1], lse.transpose(-1, -2), "lse")


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths(target, causal):
    q, k, v = by_request(make_batch([12] * 3, [40] * 3, 6, 2, device=target.device))
    out, lse = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)
    assert out.shape == (3, 12, 6, 64) and lse.shape == (3, 6, 12)
    same(target, (out, lse), q, k, v, causal=causal, num_splits=1)
    found = flash_attn_func(q, k, v, 0.2, causal, None, None, None, None, (5, 3), 0, 20.0)
    same(target, found, q, k, v, causal=causal, window=(5, 3), logits_soft_cap=20.0, sm_scale=0.2, num_splits=1)
    window, chunk = (5, -1) if causal else (-1, -1), dict(causal=causal, num_splits=1)
    found = flash_attn_func(q, k, v, window_size=window, attention_chunk=7, causal=causal)
    same(target, found, q, k, v, window=window, chunk_size=7, **chunk)


def test_packed(target):
    q, k, v = by_request(make_batch([12] * 2, [12] * 2, 4, 4, device=target.device))
    found = flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), causal=True, return_attn_probs=True)
    same(target, found, q, k, v, causal=True, num_splits=1)
    q, k, v = by_request(make_batch([12] * 2, [12] * 2, 4, 2, device=target.device))
    found = flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=4, window_size=(5, -1))
    same(target, found, q, k, v, causal=True, window=(5, -1), num_splits=1)


def test_any_lengths(target):
    batch = make_batch([12, 1, 30], [40, 9, 30], device=target.device)
    offsets, tensors = (batch.qo_indptr(target.device), batch.kv_indptr(target.device)), (batch.q, batch.k, batch.v)
    whose = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), (*offsets, 30, 40)))
    found = flash_attn_varlen_func(*tensors, *offsets, 30, 40, causal=True, return_attn_probs=True)
    assert found[1].shape == (4, 43)
    same(target, found, *tensors, **whose, causal=True, num_splits=1)
    used = dict(seqused_q=ints([12, 0, 7], target.device), seqused_k=ints([40, 5, 30], target.device))
    place, want = (torch.zeros_like(batch.q) for _ in range(2))
    flash_attn_varlen_func(*tensors, *offsets, 30, 40, **used, out=place)
    same(target, place, *tensors, **whose, **used, out=want, num_splits=1)


@pytest.mark.parametrize("lengths", ["seqused_k", "cu_seqlens_k", "both"])
def test_vllms_form(target, lengths):
    batch = make_batch([12, 1, 30], [40, 9, 30], device=target.device)
    k, v, more = keys(batch, "table")
    sinks = torch.randn(4, device=target.device).bfloat16()
    given: dict[str, Any] = dict(seqused_k=more["seqused_k"], cu_seqlens_k=batch.kv_indptr(target.device))
    whose = dict(cu_seqlens_q=batch.qo_indptr(target.device), max_seqlen_q=30)
    out, metadata = (
        torch.empty_like(batch.q),
        get_scheduler_metadata(3, 30, 40, 4, 2, 64, more["seqused_k"], causal=True),
    )
    call = whose | dict(q=batch.q, k=k, v=v, out=out, max_seqlen_k=40, softmax_scale=0.125, causal=True, s_aux=sinks)
    call |= dict(alibi_slopes=None, window_size=[-1, -1], block_table=more["page_table"], softcap=0, q_descale=None)
    call |= dict(scheduler_metadata=metadata, fa_version=3, ver=3, num_splits=0)
    returned = flash_attn_varlen_func(**call, **{name: x for name, x in given.items() if lengths in (name, "both")})
    assert returned.data_ptr() == out.data_ptr()
    same(target, out, batch.q, k, v, **whose, **more, max_seqlen_k=40, causal=True, sinks=sinks)


@pytest.mark.parametrize("rows", [1, 5])
def test_sglangs_form(target, rows):
    """``cu_seqlens_k_new`` without new keys is not read; ``sinks`` and ``ver`` are the names of SGLang's kernels."""
    batch = make_batch([rows] * 3, [40, 9, 33], device=target.device)
    k, v, more = keys(batch, "table")
    sinks = torch.randn(4, device=target.device).bfloat16()
    whose = dict(cu_seqlens_q=batch.qo_indptr(target.device), max_seqlen_q=rows)
    call = whose | dict(q=batch.q, k_cache=k, v_cache=v, page_table=more["page_table"], cache_seqlens=more["seqused_k"])
    call |= dict(cu_seqlens_k_new=batch.kv_indptr(target.device), softmax_scale=0.125, causal=True, sinks=sinks, ver=3)
    call |= dict(sm_margin=0, window_size=(-1, -1), softcap=0.0, num_splits=0, pack_gqa=None)
    same(target, flash_attn_with_kvcache(**call), batch.q, k, v, **whose, **more, causal=True, sinks=sinks)


def dense_cache(batch: Batch, entries: int, room: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches ``[entries, room, heads, dim]`` that hold NaN but for the keys of the batch, and which entry is whose."""
    index = torch.randperm(entries)[: len(batch.kv_lens)]
    caches = []
    for x in (batch.k, batch.v):
        cache = torch.full((entries, room, *x.shape[1:]), math.nan, dtype=x.dtype, device=x.device)
        for b, part in enumerate(x.split(batch.kv_lens)):
            cache[index[b], : part.size(0)] = part
        caches.append(cache)
    return caches[0], caches[1], index.to(torch.int32).to(batch.device)


def test_cache_of_one_length(target):
    q, k, v = by_request(make_batch([3] * 2, [17] * 2, device=target.device))
    room = torch.full((2, 13, 2, 64), math.nan, dtype=k.dtype, device=target.device)
    caches = [torch.cat([x, room], 1) for x in (k, v)]
    found = flash_attn_with_kvcache(q, *caches, cache_seqlens=17, causal=True, return_softmax_lse=True)
    same(target, found, q, *caches, seqused_k=ints([17, 17], target.device), causal=True)


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_cache(target, page_size):
    """Of request b is entry ``cache_batch_idx[b]`` of a cache, and row ``cache_batch_idx[b]`` of a page table."""
    batch = make_batch([3] * 3, [40, 9, 33], device=target.device)
    q, lens = batch.q.unflatten(0, (3, -1)), ints(batch.kv_lens, target.device)
    if page_size is None:
        k, v, index = dense_cache(batch, 5, 48)
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, cache_batch_idx=index, causal=True)
        check(batch, out)
        return
    k, v, more = keys(batch, "table", "NHD", page_size)
    table = more["page_table"]
    for name in ("page_table", "block_table"):
        found = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, causal=True, **{name: table})
        same(target, found, q, k, v, **more, causal=True)
    other = torch.tensor([2, 0, 1], device=target.device)
    given = dict(cache_seqlens=lens, page_table=table[other.argsort()], cache_batch_idx=other.int())
    same(target, flash_attn_with_kvcache(q, k, v, causal=True, **given), q, k, v, **more, causal=True)


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_padding_on_the_left(target, page_size):
    padded = make_batch([3] * 3, [40, 9, 33], device=target.device)
    pad = [7, 0, 32]
    q, lens = padded.q.unflatten(0, (3, -1)), ints(padded.kv_lens, target.device)
    given: dict[str, Any] = dict(cache_seqlens=lens, cache_leftpad=ints(pad, target.device), causal=True)
    if page_size is None:
        k, v, given["cache_batch_idx"] = dense_cache(padded, 5, 48)
    else:
        k, v, more = keys(padded, "table", "NHD", page_size)
        given["page_table"] = more["page_table"]
    out = flash_attn_with_kvcache(q, k, v, **given)
    seen = [torch.cat([y[p:] for y, p in zip(x.split(padded.kv_lens), pad)]) for x in (padded.k, padded.v)]
    batch = Batch(padded.qo_lens, [m - p for m, p in zip(padded.kv_lens, pad)], padded.q, *seen)
    check(batch, out)


def rotated(x: torch.Tensor, first: int, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, step: int = 1):
    """``x [tokens, heads, dim]`` at positions first, first + step, ...: one pair of columns at a time."""
    result = x.double().clone()
    half = cos.size(-1)
    for t in range(x.size(0)):
        for d in range(half):
            i, j = (2 * d, 2 * d + 1) if interleaved else (d, d + half)
            c, s = float(cos[first + t * step, d]), float(sin[first + t * step, d])
            a, b = x[t, :, i].double(), x[t, :, j].double()
            result[t, :, i], result[t, :, j] = a * c - b * s, a * s + b * c
    return result.to(x.dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [None, "interleaved", "halves"])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("page_size", [None, 16])
def test_new_keys_are_appended(target, page_size, ragged, rotary, causal):
    device, old, new = target.device, [20, 0, 13], [4, 2, 3] if ragged else [3, 3, 3]
    batch = make_batch([3] * 3, [m + n for m, n in zip(old, new)], device=device)
    angle = torch.rand(48, 16, generator=torch.Generator().manual_seed(5)) * 6.3
    turns = [f(angle).to(torch.float16) for f in (torch.cos, torch.sin)]
    given: dict[str, Any] = dict(cache_seqlens=ints(old, device), causal=causal)
    q, step = batch.q.unflatten(0, (3, -1)).clone(), 1 if causal else 0
    # What is passed: the new keys without rotation. The batch then is what the cache holds afterwards.
    new_keys = [torch.cat([y[m:] for y, m in zip(x.split(batch.kv_lens), old)]) for x in (batch.k, batch.v)]
    if rotary is not None:
        given |= dict(zip(("rotary_cos", "rotary_sin"), (x.to(device) for x in turns)))
        given["rotary_interleaved"] = interleaved = rotary == "interleaved"
        for rows, tokens, m in zip(batch.q.split(batch.qo_lens), batch.k.split(batch.kv_lens), old):
            rows.copy_(rotated(rows.cpu(), m, *turns, interleaved, step))
            tokens[m:] = rotated(tokens[m:].cpu(), m, *turns, interleaved).to(device)
    if ragged:
        given["cu_seqlens_k_new"] = ints([0, 4, 6, 9], device)
    else:
        new_keys = [x.unflatten(0, (3, -1)) for x in new_keys]
    if page_size is None:
        k, v, given["cache_batch_idx"] = dense_cache(batch, 5, 30)
    else:
        k, v, more = keys(batch, "table", "NHD", page_size)
        given["page_table"] = more["page_table"]
    full = [x.clone() for x in (k, v)]
    for b, (m, n) in enumerate(zip(old, new)):  # forget the new keys
        for p in range(m, m + n):
            where = (given["cache_batch_idx"][b], p) if page_size is None else (given["page_table"][b, p // 16], p % 16)
            for x in (k, v):
                x[tuple(map(int, where))] = math.nan
    out = flash_attn_with_kvcache(q, k, v, *new_keys, **given)
    for x, want in zip((k, v), full):
        assert torch.equal(x.isnan(), want.isnan())
        assert_close(x.nan_to_num(), want.nan_to_num().double(), atol=2e-3, rtol=2e-3)
    check(batch, out, Mask(causal=causal))


@pytest.mark.runs_nothing("merging is no attention")
def test_combine(target):
    generator = torch.Generator().manual_seed(1)
    parts = randn((5, 2, 7, 4, 64), torch.float32, target.device, generator).transpose(2, 3).transpose(2, 3)
    lse = randn((5, 2, 4, 7), torch.float32, target.device, generator).transpose(-1, -2)
    lse[3:, :1] = -math.inf
    lse[:, 1, 2] = -math.inf
    out, merged = flash_attn_combine(parts, lse, out_dtype=torch.bfloat16)
    want_lse = torch.logsumexp(lse.double(), 0)
    weight = torch.exp(lse.double() - want_lse).nan_to_num(0.0)
    assert out.dtype == torch.bfloat16
    assert_close(out, (weight.unsqueeze(-1) * parts.double()).sum(0))
    assert_lse_close(merged, want_lse)
    place = torch.full((2, 7, 4, 64), math.nan, device=target.device)
    assert flash_attn_combine(parts, lse, place)[0] is place
    named = flash_attn_combine(parts, lse, out_dtype="float16")[0]
    assert torch.equal(named, flash_attn_combine(parts, lse, out_dtype=torch.float16)[0])
    for given, words in (((place[..., :32],), "out has shape"), ((None, "int32x"), "'int32x' is not a data type")):
        with pytest.raises((ValueError, TypeError), match=words):
            flash_attn_combine(parts, lse, *given)
    assert_close(place, (weight.unsqueeze(-1) * parts.double()).sum(0))


def test_values_in_the_logits(target):
    batch = make_batch([5] * 2, [9] * 2, 4, 2, 64, head_dim_vo=512, device=target.device)
    q, k, v = (x.unflatten(0, (2, -1)) for x in (batch.q, batch.k, batch.v))
    qv = randn((2, 5, 4, 512), torch.float16, target.device, torch.Generator().manual_seed(2))
    out = target.attempt(lambda backend: flash_attn_func(q, k, v, qv=qv, causal=True), {"qv"})
    wide = Batch(batch.qo_lens, batch.kv_lens, torch.cat([q, qv], -1).flatten(0, 1), None, batch.v)
    wide.k = torch.cat([k, v], -1).flatten(0, 1)
    check(wide, out)


@pytest.mark.parametrize("form", ["dense", "ragged", "pages"])
def test_values_in_the_logits_of_latent_attention(form):
    """SGLang's and vLLM's decode steps of MLA with FlashAttention-3: keys and values are not copied."""
    batch = make_batch([2] * 2, [9, 5] if form != "dense" else [9, 9], 4, 1, 576, dtype=torch.bfloat16)
    batch.v = batch.k[..., :512]
    (qv, q), (v, k) = (x.split([512, 64], -1) for x in (batch.q, batch.k))
    offsets = ints([0, 2, 4], "cpu")
    if form == "dense":
        q, qv, k, v = (x.unflatten(0, (2, -1)) for x in (q, qv, k, v))
        out = flash_attn_func(q, k, v, qv=qv, causal=True).flatten(0, 1)
    elif form == "ragged":
        given = (q, k, v, offsets, batch.kv_indptr("cpu"), 2, 9)
        out = flash_attn_varlen_func(*given, qv=qv, causal=True)
        assert torch.equal(flash_attn_varlen_func(*given, q_v=qv, causal=True), out)
    else:
        paged = batch.paged(4, "NHD", form="split")
        cache = [x.contiguous() for x in paged.k_cache.split([512, 64], -1)]
        table = page_table(paged, 2)
        given = dict(cache_seqlens=ints(batch.kv_lens, "cpu"), page_table=table, cu_seqlens_q=offsets, max_seqlen_q=2)
        out = flash_attn_with_kvcache(q, cache[1], cache[0], qv=qv, causal=True, **given)
    check(batch, out)


@pytest.mark.parametrize("form", ["dense", "packed", "ragged", "cache", "cache, older names"])
def test_scales_and_slopes_have_their_places(form):
    """Of fp8 tensors on the CPU: the results of ``attention``, to which all forms hand them."""
    heads, scales = 4, {f"{name}_descale": torch.rand(2, 4) + 0.5 for name in "qkv"}
    qkv = torch.randn(2, 5, 3, heads, 64).to(torch.float8_e4m3fn)
    q, k, v = qkv.unbind(2)
    given: dict[str, Any] = dict(alibi_slopes=torch.rand(heads), **scales)
    want, want_lse = ck.attention(q, k, v, **given, return_lse=True, lse_base=math.e)
    if form == "dense":
        out, lse = flash_attn_func(q, k, v, return_attn_probs=True, **given)
    elif form == "packed":
        out, lse = flash_attn_qkvpacked_func(qkv, return_attn_probs=True, **given)
    elif form == "ragged":
        rows, offsets = [x.flatten(0, 1) for x in (q, k, v)], ints([0, 5, 10], "cpu")
        out, lse = flash_attn_varlen_func(*rows, offsets, offsets, 5, 5, return_softmax_lse=True, **given)
        out, lse = out.unflatten(0, (2, 5)), lse.unflatten(1, (2, 5)).transpose(0, 1)
    else:
        if form != "cache":
            given = {f"descale_{x[0]}" if x.endswith("_descale") else x: y for x, y in given.items()}
        lens = ints([5, 5], "cpu")
        out, lse = flash_attn_with_kvcache(q, k, v, cache_seqlens=lens, return_softmax_lse=True, **given)
    assert torch.equal(out, want) and torch.equal(lse.transpose(1, 2), want_lse)


def test_what_is_refused():
    q = torch.zeros(1, 2, 2, 64).half()
    with pytest.raises(ValueError, match=r"it must be \[B, n, 3, H, D\]"):
        flash_attn_qkvpacked_func(torch.zeros(1, 9, 4, 2, 64).half())
    with pytest.raises(ValueError, match=r"dropout_p=0\.1 is for training"):
        flash_attn_func(q, q, q, dropout_p=0.1)
    with pytest.raises(ValueError, match="cp_world_size=2 needs cp_tot_seqused_k"):
        flash_attn_varlen_func(q[0], q[0], q[0], ints([0, 2], "cpu"), ints([0, 2], "cpu"), 2, 2, cp_world_size=2)


def test_parameters_are_those_of_flash_attention_3():
    """Their order, and the defaults of those that decide KV splits."""
    splits = {flash_attn_func: 1, flash_attn_varlen_func: 1, flash_attn_with_kvcache: 0, get_scheduler_metadata: 0}
    for function, default in splits.items():
        assert inspect.signature(function).parameters["num_splits"].default == default
    names = (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v "
        "cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size attention_chunk "
        "has_softcap num_splits pack_gqa sm_margin"
    )
    assert list(inspect.signature(get_scheduler_metadata).parameters) == names.split()
    with pytest.raises(TypeError, match="unexpected keyword"):
        get_scheduler_metadata(2, 1, 128, 8, 2, 64, torch.zeros(2, dtype=torch.int32), unknown=True)
