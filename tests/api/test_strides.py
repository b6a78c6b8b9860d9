"""Views: slices of a packed projection, HND, strided caches, outputs with strides, all inside guarded memory."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close
from guards import MARGIN, Guarded
from problems import Batch, Options, expect, make_batch
from wrapper_problems import Wrapped, check

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
@pytest.mark.parametrize("kind", ["single", "ragged"])
def test_a_packed_projection(target, kind, heads):
    batch = sliced_projection(target, 50, *heads)
    if kind == "ragged":
        batch = Batch([20, 0, 30], [20, 0, 30], batch.q, batch.k, batch.v)
    check(target, kind, batch, CAUSAL)


def test_hnd_as_a_transposed_view(target):
    # NHD storage handed over as HND: the strides, not the shape, say where things are.
    w = Wrapped(target, "single", make_batch([20], [50], 4, 2, 64, device=target.device), kv_layout="HND")
    w.kv = tuple(x.transpose(0, 1) for x in (w.batch.k, w.batch.v))
    w.plan(CAUSAL).check(w.run())


@pytest.mark.parametrize("kind", ["single", "ragged"])
def test_heads_before_tokens_in_q(target, kind):
    w = Wrapped(target, kind, make_batch([20], [50], 4, 2, 64, device=target.device))
    w.batch.q = w.batch.q.transpose(0, 1).contiguous().transpose(0, 1)
    w.plan(CAUSAL).check(w.run())


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
    wide = Batch([20], [50], *views)
    run = lambda backend: Wrapped(target, kind, wide, backend=backend).plan(CAUSAL).run()  # noqa: E731
    Wrapped(target, kind, batch).check(target.attempt(run, ["unaligned"] if pad % 8 else []), CAUSAL)


def test_broadcast_heads_and_tokens(target):
    # Stride 0: one KV head shown as two, one row shown as five.
    one = make_batch([5], [30], 4, 2, 64, device=target.device)
    batch = Batch([5], [30], one.q[:1].expand(5, 4, 64), *(x[:, :1].expand(30, 2, 64) for x in (one.k, one.v)))
    run = lambda backend: Wrapped(target, "single", batch, backend=backend).plan(CAUSAL).run()  # noqa: E731
    Wrapped(target, "single", batch).check(target.attempt(run, ["stride_0"]), CAUSAL)


CACHES = ["interleaved", "wide", "page_gap", "different"]


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", CACHES)
def test_strided_caches(target, form, kv_layout):
    w = Wrapped(target, "paged", make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device), 8, kv_layout, "tuple")
    k, v = w.pages.k_cache, w.pages.v_cache

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
    w.kv = (cache,)
    w.plan(CAUSAL).check()


@pytest.mark.parametrize("kv_layout,shown_as", [("NHD", "NHD"), ("HND", "HND"), ("NHD", "HND")])
def test_other_orders_of_a_stacked_cache(target, kv_layout, shown_as):
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device)
    w = Wrapped(target, "paged", batch, 8, kv_layout)
    if kv_layout == shown_as:  # [2, pages, ...] storage, permuted to [pages, 2, ...], as engines keep it
        w.kv = (w.pages.cache.transpose(0, 1).contiguous().transpose(0, 1),)
    else:  # a layout as a view of the other
        w.wrapper, w.kv = Wrapped(target, "paged", kv_layout=shown_as).wrapper, (w.pages.cache.transpose(2, 3),)
    w.plan(CAUSAL).check(w.run())


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


def guard(batch: Batch) -> list[Guarded]:
    """The tensors of the batch with NaN directly before and behind each: reading one row too many shows."""
    inputs = [Guarded(x.shape, x.dtype, batch.device, value=x) for x in (batch.q, batch.k, batch.v)]
    batch.q, batch.k, batch.v = (x.tensor for x in inputs)
    return inputs


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("form", OUT_STRIDES)
def test_out_with_strides_inside_guards(target, form, kind):
    out = Guarded((29, 4, 64), torch.float16, target.device, OUT_STRIDES[form])
    lse = Guarded((29, 4), torch.float32, target.device)
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, device=target.device)
    inputs = guard(batch)
    w = Wrapped(target, kind, batch, 8).plan(CAUSAL)
    w.run(out=out.tensor, lse=lse.tensor, return_lse=True)
    w.check((out.tensor, lse.tensor))
    out.check("out")
    lse.check("lse")
    for name, x in zip("qkv", inputs):
        x.check(name)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_single_inputs_at_the_edge_of_memory(target, kv_layout):
    w = Wrapped(target, "single", make_batch([77], [131], 4, 2, 64, device=target.device), kv_layout=kv_layout)
    guarded = [Guarded(x.shape, x.dtype, target.device, value=x) for x in (w.batch.q, *w.kv)]
    w.batch.q, *kv = (x.tensor for x in guarded)
    w.kv = tuple(kv)
    w.check()


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
