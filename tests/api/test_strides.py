"""Views: slices of a packed projection, HND, strided caches, outputs with strides, all inside guarded memory."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import MARGIN, Guarded
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

CAUSAL = Options(causal=True)


def sliced_projection(target, tokens: int, heads: int, kv_heads: int, dim: int = 64) -> Batch:
    """q, k and v cut out of one projection ``[tokens, (heads + 2 kv_heads) * dim]``."""
    packed = torch.randn(tokens, (heads + 2 * kv_heads) * dim).half().to(target.device)
    q, k, v = packed.split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
    assert not q.is_contiguous()
    return Batch(
        [tokens],
        [tokens],
        q.unflatten(1, (heads, dim)),
        k.unflatten(1, (kv_heads, dim)),
        v.unflatten(1, (kv_heads, dim)),
    )


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_single_prefill_on_a_packed_projection(target, heads):
    batch = sliced_projection(target, 50, *heads)
    out, lse = ck.single_prefill_with_kv_cache(
        batch.q, batch.k, batch.v, causal=True, return_lse=True, backend=target.backend
    )
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_ragged_on_a_packed_projection(target, heads):
    whole = sliced_projection(target, 50, *heads)
    batch = Batch([20, 0, 30], [20, 0, 30], whole.q, whole.k, whole.v)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
    want = expect(batch, CAUSAL)
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_hnd_as_a_transposed_view(target):
    # NHD storage handed over as HND: the strides, not the shape, say where things are.
    batch = make_batch([20], [50], 4, 2, 64, device=target.device)
    out = ck.single_prefill_with_kv_cache(
        batch.q, batch.k.transpose(0, 1), batch.v.transpose(0, 1), kv_layout="HND", causal=True, backend=target.backend
    )
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)


def test_heads_before_tokens_in_q(target):
    batch = make_batch([20], [50], 4, 2, 64, device=target.device)
    q = batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    out = ck.single_prefill_with_kv_cache(q, batch.k, batch.v, causal=True, backend=target.backend)
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
    assert_close(wrapper.run(q, batch.k, batch.v), want.out, want.baseline)


@pytest.mark.parametrize("pad", [1, 3, 8])
@pytest.mark.parametrize("kind", ["single", "ragged"])
def test_any_pitch(target, kind, pad):
    # A pitch of 64 + 1 elements breaks 16-byte alignment; it may cost time but not correctness.
    batch = make_batch([20], [50], 4, 2, 64, device=target.device)
    views = []
    for x in (batch.q, batch.k, batch.v):
        wide = torch.full((*x.shape[:2], 64 + pad), torch.nan, dtype=x.dtype, device=target.device)
        wide[..., :64] = x
        views.append(wide[..., :64])

    def call(backend):
        if kind == "single":
            return ck.single_prefill_with_kv_cache(*views, causal=True, backend=backend)
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        return wrapper.run(*views)

    out = target.attempt(call, ["unaligned"] if pad % 8 else [])
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)


def test_broadcast_heads_and_tokens(target):
    # Stride 0: one KV head shown as two, one row shown as five.
    batch = make_batch([5], [30], 4, 2, 64, device=target.device)
    k, v = batch.k[:, :1].expand(30, 2, 64), batch.v[:, :1].expand(30, 2, 64)
    q = batch.q[:1].expand(5, 4, 64)
    call = lambda backend: ck.single_prefill_with_kv_cache(q, k, v, causal=True, backend=backend)  # noqa: E731
    want = expect(Batch([5], [30], q, k, v), CAUSAL)
    assert_close(target.attempt(call, ["stride_0"]), want.out, want.baseline)


CACHES = ["interleaved", "wide", "page_gap", "different"]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", CACHES)
def test_strided_caches(target, form, kv_layout):
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device)
    paged = batch.paged(8, kv_layout, "tuple")
    k, v = paged.k_cache, paged.v_cache

    def spread(x: torch.Tensor, where: str) -> torch.Tensor:
        pages, a, b, dim = x.shape
        if where == "wide":
            big = x.new_full((pages, a, b, dim + 16), torch.nan)
            view = big[..., :dim]
        elif where == "page_gap":
            big = x.new_full((pages, 3, a, b, dim), torch.nan)
            view = big[:, 1]
        else:
            big = x.new_full((pages, a, b, 2, dim), torch.nan)
            view = big[:, :, :, 1]
        view.copy_(x)
        return view

    if form == "interleaved":
        both = torch.full((*k.shape[:3], 2, 64), torch.nan, dtype=k.dtype, device=target.device)
        both[..., 0, :], both[..., 1, :] = k, v
        cache = (both[..., 0, :], both[..., 1, :])
    elif form == "different":
        cache = (spread(k, "wide"), spread(v, "page_gap"))
    else:
        cache = (spread(k, form), spread(v, form))
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), kv_layout)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True)
    out, lse = wrapper.run(batch.q, cache, return_lse=True)
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_stacked_cache_with_kv_in_front(target, kv_layout):
    # [2, pages, ...] storage, permuted to [pages, 2, ...], as engines keep it.
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device)
    paged = batch.paged(8, kv_layout)
    cache = paged.cache.transpose(0, 1).contiguous().transpose(0, 1)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), kv_layout)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True)
    want = expect(batch, CAUSAL)
    assert_close(wrapper.run(batch.q, cache), want.out, want.baseline)


def test_layouts_as_views_of_each_other(target):
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device)
    paged = batch.paged(8, "NHD")
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "HND")
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True)
    want = expect(batch, CAUSAL)
    assert_close(wrapper.run(batch.q, paged.cache.permute(0, 1, 3, 2, 4)), want.out, want.baseline)


def dense(form: str, x: torch.Tensor, each: int, hnd: bool) -> torch.Tensor:
    """Keys of three requests as ``[3, each, heads, dim]``, or ``[3, heads, each, dim]``, in a tensor of that form."""
    x = x.view(3, each, 2, 64)
    if form in ("heads_first", "part_of_heads_first"):
        x = x.transpose(1, 2)
    if form.startswith("part_of"):
        more = x.new_full((3, *x.shape[1:-1], 64), torch.nan)
        x = torch.cat([x, more], 2 if form == "part_of_heads_first" else 1)
    x = x.contiguous()
    if form in ("heads_first", "part_of_heads_first"):
        x = x.transpose(1, 2)
    if form == "odd":
        room = x.new_full((3, each * 128 + 8), torch.nan)
        x = room.as_strided(x.shape, (room.size(1), 128, 64, 1)).copy_(x)
    x = x[:, :each]
    return x.transpose(1, 2) if hnd else x


DENSE = ["tokens_first", "part_of_tokens_first", "heads_first", "part_of_heads_first", "odd"]


@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("each, used", [(1, None), (50, None), (50, [50, 0, 17])])
@pytest.mark.parametrize("v_form", [None, "tokens_first"])
@pytest.mark.parametrize("form", DENSE)
def test_dense_keys(target, form, v_form, each, used, hnd, monkeypatch):
    """Kernels address dense keys themselves if k and v have the same number of rows between requests."""
    batch = make_batch([4] * 3, [each] * 3, 4, 2, 64, device=target.device)
    k, v = dense(form, batch.k, each, hnd), dense(v_form or form, batch.v, each, hnd)
    given = {} if used is None else {"seqused_k": torch.tensor(used, dtype=torch.int32, device=target.device)}
    if not target.is_reference and (form == "tokens_first" if v_form else form != "odd"):
        monkeypatch.setattr("cutlass_kernels._attend.checked_calls.compute", None)
    q, layout = batch.q.view(3, 4, 4, 64), "HND" if hnd else "NHD"
    out = ck.attention(q, k, v, kv_layout=layout, causal=True, backend=target.backend, **given)
    if used is not None:
        k, v = (torch.cat([x[b * each :][:n] for b, n in enumerate(used)]) for x in (batch.k, batch.v))
        batch = Batch([4] * 3, used, batch.q, k, v)
    want = expect(batch, CAUSAL)
    assert_close(out.flatten(0, 1), want.out, want.baseline)


@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
def test_dense_keys_that_requests_share(target, hnd):
    one = make_batch([4], [50], 4, 2, 64, device=target.device)
    k, v = (x.transpose(0, 1) if hnd else x for x in (one.k, one.v))
    q = one.q.expand(3, -1, -1, -1)
    layout = "HND" if hnd else "NHD"
    out = ck.attention(
        q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), kv_layout=layout, causal=True, backend=target.backend
    )
    want = expect(one, CAUSAL)
    for b in range(3):
        assert_close(out[b], want.out, want.baseline)


OUT_STRIDES = {
    "dense": (4 * 64, 64, 1),
    "head_gap": (4 * 80, 80, 1),
    "token_gap": (4 * 64 + 128, 64, 1),
    "heads_first": (64, 29 * 64, 1),
}


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("form", OUT_STRIDES)
def test_out_with_strides_inside_guards(target, form, kind):
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device)
    out = Guarded((29, 4, 64), torch.float16, target.device, OUT_STRIDES[form])
    lse = Guarded((29, 4), torch.float32, target.device)
    inputs = [Guarded(x.shape, x.dtype, target.device, value=x) for x in (batch.q, batch.k, batch.v)]
    q, k, v = (x.tensor for x in inputs)

    def call(backend):
        if kind == "ragged":
            wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=backend)
            wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
            return wrapper.run(q, k, v, out=out.tensor, lse=lse.tensor, return_lse=True)
        paged = batch.paged(8)
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True)
        return wrapper.run(q, paged.cache, out=out.tensor, lse=lse.tensor, return_lse=True)

    target.attempt(call, ["paged"] if kind == "paged" else [])
    want = expect(batch, CAUSAL)
    assert_close(out.tensor, want.out, want.baseline)
    assert_lse_close(lse.tensor, want.lse)
    out.check("out")
    lse.check("lse")
    for name, x in zip("qkv", inputs):
        x.check(name)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_inputs_at_the_edge_of_memory(target, kv_layout):
    # NaN directly before and behind each tensor: reading one row too many shows.
    batch = make_batch([77], [131], 4, 2, 64, device=target.device)
    k, v = batch.k, batch.v
    if kv_layout == "HND":
        k, v = k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    inputs = [Guarded(x.shape, x.dtype, target.device, value=x) for x in (batch.q, k, v)]
    out, lse = ck.single_prefill_with_kv_cache(
        *(x.tensor for x in inputs), kv_layout=kv_layout, return_lse=True, backend=target.backend
    )
    want = expect(batch)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_guards_notice():
    # The helper itself: a write in the margin and one in a gap are both seen.
    for offset in (-1, 70):
        guarded = Guarded((2, 64), torch.float16, "cpu", strides=(80, 1))
        guarded.tensor.fill_(1.0)
        guarded.check()
        guarded._whole[MARGIN + offset] = 0.0
        with pytest.raises(AssertionError, match="outside"):
            guarded.check()
    untouched = Guarded((2, 64), torch.float16, "cpu")
    untouched.check_untouched()
    untouched.tensor[0, 0] = 1.0
    with pytest.raises(AssertionError, match="written"):
        untouched.check_untouched()
