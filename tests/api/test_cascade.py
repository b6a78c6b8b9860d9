"""Merging attention states, and the shared-prefix calls built on it."""

from __future__ import annotations

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

merges = pytest.mark.runs_nothing("merges states that no backend computed")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def states(count: int, target, dtype=torch.float16, rows=17, heads=3, dim=64):
    v = torch.randn(rows, count, heads, dim).to(dtype).to(target.device)
    s = (torch.randn(rows, count, heads) * 4).to(target.device)
    return v, s


def apart(v: torch.Tensor, s: torch.Tensor) -> list[torch.Tensor]:
    """Of two states, as four tensors."""
    return [x[:, i].contiguous() for i in (0, 1) for x in (v, s)]


def check_merged(got, v: torch.Tensor, s: torch.Tensor, **out) -> None:
    want, want_lse = oracle.merge(v, s)
    assert_close(got[0], want, **out)
    assert_lse_close(got[1], want_lse, atol=1e-4)


@merges
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_merge_state(target, dim, dtype):
    v, s = states(2, target, dtype, dim=dim)
    before = v.clone(), s.clone()
    check_merged(ck.merge_state(*apart(v, s)), v, s, dtype=dtype)
    assert torch.equal(v, before[0]) and torch.equal(s, before[1])


@merges
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_merge_states(target, count, dtype):
    v, s = states(count, target, dtype)
    out, lse = ck.merge_states(v, s)
    check_merged((out, lse), v, s, dtype=dtype)
    if count == 1:
        assert torch.equal(out, v[:, 0]) and torch.equal(lse, s[:, 0])


@merges
@pytest.mark.parametrize("mask", [None, "bool", "uint8"])
def test_merge_state_in_place(target, mask):
    v, s = states(2, target)
    own, own_lse, *other = apart(v, s)
    rows = torch.arange(17, device=target.device) % 3 != 0
    extra = {} if mask is None else {"mask": rows if mask == "bool" else rows.to(torch.uint8)}
    assert ck.merge_state_in_place(own, own_lse, *other, **extra) is None
    want, want_lse = oracle.merge(v, s)
    if mask is not None:
        want = torch.where(rows[:, None, None], want, v[:, 0].double())
        want_lse = torch.where(rows[:, None], want_lse, s[:, 0].double())
        assert torch.equal(own[~rows], v[:, 0][~rows]) and torch.equal(own_lse[~rows], s[:, 0][~rows])
    assert_close(own, want)
    assert_lse_close(own_lse, want_lse, atol=1e-4)


@merges
def test_merge_in_place_writes_back_a_16_bit_lse(target):
    v, s = states(2, target)
    own, own_lse, *other = apart(v, s.half())
    ck.merge_state_in_place(own, own_lse, *other)
    want, want_lse = oracle.merge(v, s.half())
    assert_close(own, want)
    assert own_lse.dtype == torch.float16
    assert_close(own_lse, want_lse, atol=1e-2, rtol=1e-3)


@merges
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_lse_types_are_cast(target, dtype):
    v, s = states(2, target)
    s = s.to(dtype)
    check_merged(ck.merge_state(*apart(v, s)), v, s)


@merges
def test_states_without_keys(target):
    v, s = states(2, target)
    s[0], s[1, 0], s[2, 1] = -torch.inf, -torch.inf, -torch.inf
    in_place = apart(v, s)
    ck.merge_state_in_place(*in_place)
    for out, lse in (ck.merge_state(*apart(v, s)), ck.merge_states(v, s), in_place[:2]):
        assert torch.count_nonzero(out[0]) == 0 and bool((lse[0] == -torch.inf).all())
        # A state that saw nothing leaves the other one exactly as it was.
        assert torch.equal(out[1], v[1, 1]) and torch.equal(lse[1], s[1, 1])
        assert torch.equal(out[2], v[2, 0]) and torch.equal(lse[2], s[2, 0])
        check_merged((out, lse), v, s)


@merges
def test_far_apart_states(target):
    v, s = states(2, target)
    s[:, 0] += 3000
    out, lse = ck.merge_states(v, s)
    assert torch.equal(out, v[:, 0]) and torch.equal(lse, s[:, 0])


def test_pieces_of_attention_merge_to_the_whole(target):
    batch = make_batch([13], [90], 4, 2, 64, device=target.device)
    pieces = [(0, 40), (40, 41), (41, 90)]
    parts = [
        ck.single_prefill_with_kv_cache(
            batch.q, batch.k[a:b], batch.v[a:b], causal=b == 90, return_lse=True, backend=target.backend
        )
        for a, b in pieces
    ]
    out, lse = ck.merge_states(torch.stack([p[0] for p in parts], 1), torch.stack([p[1] for p in parts], 1))
    want = expect(batch, Options(causal=True))
    assert_close(out, want.out, atol=2e-3)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("sm_scale", [None, 0.3])
@pytest.mark.parametrize("group", [1, 4])
def test_padded_shared_prefix_decode(target, kv_layout, sm_scale, group):
    batch_size, shared, unique, kv_heads = 5, 33, 7, 2
    heads = kv_heads * group
    q = torch.randn(batch_size, heads, 64).half().to(target.device)
    k_shared, v_shared = torch.randn(2, shared, kv_heads, 64).half().to(target.device)
    k_unique, v_unique = torch.randn(2, batch_size, unique, kv_heads, 64).half().to(target.device)
    k = torch.cat([torch.cat([k_shared, k_unique[b]]) for b in range(batch_size)])
    v = torch.cat([torch.cat([v_shared, v_unique[b]]) for b in range(batch_size)])
    want = expect(Batch([1] * batch_size, [shared + unique] * batch_size, q, k, v), Options(sm_scale=sm_scale))
    if kv_layout == "HND":
        k_shared, v_shared = (x.transpose(0, 1).contiguous() for x in (k_shared, v_shared))
        k_unique, v_unique = (x.transpose(1, 2).contiguous() for x in (k_unique, v_unique))
    out = ck.batch_decode_with_shared_prefix_padded_kv_cache(
        q, k_shared, v_shared, k_unique, v_unique, kv_layout, False, sm_scale, None, None
    )
    assert_close(out, want.out, atol=2e-3, dtype=torch.float16)


class SharedPrefix:
    """Keys of each request in pages of 8 behind keys that all share, and a wrapper of the kind for them."""

    def __init__(
        self,
        target,
        kind,
        qo_lens,
        unique_lens,
        shared=50,
        dtype=torch.float16,
        kv_layout="NHD",
        form="stacked",
        wrapper=None,
    ):
        self.unique = make_batch(qo_lens, unique_lens, 4, 2, 64, dtype=dtype, device=target.device)
        keys = torch.randn(2, shared, 2, 64).to(dtype).to(target.device)
        k, v = (torch.cat([torch.cat([keys[i], x[i + 1]]) for x in self.unique.requests()]) for i in (0, 1))
        self.whole = Batch(self.unique.qo_lens, [shared + m for m in self.unique.kv_lens], self.unique.q, k, v)
        self.shared = tuple(x.transpose(0, 1).contiguous() if kv_layout == "HND" else x for x in keys)
        self.pages, self.kind = self.unique.paged(8, kv_layout, form), kind
        self.wrapper = wrapper or CLASSES[kind](target.workspace(), kv_layout)

    def vectors(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        return (() if self.kind == "decode" else (self.unique.qo_indptr(),)) + self.pages.table(device)

    def begin(self, *more, device: str = "cpu", **options) -> None:
        self.wrapper.begin_forward(*self.vectors(device), *self.unique.heads, *more, **options)

    def forward(self, *args, **options) -> torch.Tensor:
        return self.wrapper.forward(self.unique.q, *self.shared, self.pages.cache, *args, **options)

    def check(self, out: torch.Tensor, **options) -> None:
        tolerance = 2e-2 if out.dtype == torch.bfloat16 else 2e-3
        assert_close(out, expect(self.whole, Options(**options)).out, atol=tolerance)


CLASSES = {
    "decode": ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    "prefill": ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
}


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_decode_wrapper(target, kv_layout, form, dtype):
    x = SharedPrefix(target, "decode", [1] * 4, [9, 1, 16, 33], 50, dtype, kv_layout, form)
    x.begin(8, device=target.device, data_type=dtype)
    for options in ({}, dict(sm_scale=0.3)):
        x.check(x.forward(**options), **options)
    x.wrapper.end_forward()


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("with_page_size", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_prefill_wrapper(target, kv_layout, with_page_size, dtype):
    x = SharedPrefix(target, "prefill", [3, 1, 16, 7], [9, 1, 16, 33], 50, dtype, kv_layout)
    x.begin(*((8,) if with_page_size else ()))
    for causal in (True, False):
        x.check(x.forward(causal=causal), causal=causal)
    x.check(x.forward(), causal=True)  # the default, as the API page says
    x.check(x.forward(True, False, 0.2), causal=True, sm_scale=0.2)
    x.wrapper.end_forward()


def test_causal_is_about_the_unique_part_only(target):
    # More rows than unique keys: early rows see no unique key but the whole prefix.
    x = SharedPrefix(target, "prefill", [6], [2], 10)
    x.begin()
    prefix = Batch([4], [10], x.unique.q[:4], *x.shared)
    assert_close(x.forward(causal=True)[:4], expect(prefix).out, atol=2e-3)


def test_prefill_wrapper_of_one_batch_after_another(target):
    """A batch is that of the latest begin_forward(), whatever becomes of its index tensors; end_forward() drops it."""
    wrapper = CLASSES["prefill"](target.workspace())
    for lens in ([9, 33], [16, 2]):
        x = SharedPrefix(target, "prefill", [3, 2], lens, wrapper=wrapper)
        index = x.vectors()
        wrapper.begin_forward(*index, *x.unique.heads)
        for vector in index:
            vector.zero_()
        x.check(x.forward(), causal=True)
    wrapper.end_forward()
    with pytest.raises(RuntimeError, match="has no batch"):
        x.forward()


def test_shared_prefix_wrapper_with_an_empty_part(target):
    wrapper = None
    for lens, shared in (([0, 5], 10), ([3, 5], 0)):
        x = SharedPrefix(target, "decode", [1, 1], lens, shared, wrapper=wrapper)
        wrapper = x.wrapper
        x.begin(8)
        x.check(x.forward())


@pytest.mark.parametrize("kind", CLASSES)
def test_reset_workspace_with_one_or_two_buffers(target, kind):
    for count in (1, 2):
        x = SharedPrefix(target, kind, [1, 1], [4, 5], 10)
        x.wrapper.reset_workspace_buffer(*(target.workspace() for _ in range(count)))
        x.begin(8)
        x.check(x.forward())
    x.wrapper.reset_workspace_buffer(float_workspace_buffer=target.workspace(), int_workspace_buffer=None)


@pytest.mark.runs_nothing("constructs only")
@pytest.mark.parametrize("kwarg", ["workspace_buffer", "float_workspace_buffer"])
def test_constructor_keyword_of_both_eras(target, kwarg):
    for cls in CLASSES.values():
        assert cls(**{kwarg: target.workspace()}, kv_layout="HND") is not None


@merges
def test_shapes_that_do_not_match(target):
    v, s = states(2, target)
    a, sa, b, sb = apart(v, s)
    for call, words in (
        (lambda: ck.merge_state(a, sa, b[:5], sb[:5]), r"v_a .*\(17, 3, 64\).* v_b .*\(5, 3, 64\)"),
        (lambda: ck.merge_state(a, sa[:5], b, sb), r"v_a .*\(17, 3, 64\).* s_a .*\(5, 3\)"),
        (lambda: ck.merge_state(a, sa, b[..., :32].contiguous(), sb), r"v_a .*\(17, 3, 64\).* v_b .*\(17, 3, 32\)"),
        (lambda: ck.merge_state_in_place(a, sa, b[:, :1].contiguous(), sb), r"v_other .*\(17, 1, 64\).* s_other"),
        (lambda: ck.merge_states(v, s[:, :1]), r"v .*\(17, 2, 3, 64\).* s .*\(17, 1, 3\)"),
    ):
        before = a.clone()
        with pytest.raises(RuntimeError, match=words):
            call()
        assert torch.equal(a, before)


@merges
def test_states_of_integers(target):
    v, s = torch.zeros(3, 2, 8, device=target.device), torch.zeros(3, 2, device=target.device)
    for wrong in ((v.int(), s, v.int(), s), (v, s.int(), v, s), (v, s, v, s.long())):
        with pytest.raises(RuntimeError, match="floating-point"):
            ck.merge_state(*wrong)
    with pytest.raises(RuntimeError, match="floating-point"):
        ck.merge_states(v[:, None].int(), s[:, None])
