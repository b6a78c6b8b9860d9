"""The kernels that merge states: what they compute, on tensors that lie in memory in any way, and when they are used.

What merging is, test_cascade.py says, for all devices; graphs and torch.compile, the tests of all public calls."""

from __future__ import annotations

import oracle
import pytest
import torch
from compare import assert_all_bitwise, assert_bitwise, assert_close, assert_lse_close
from guards import Guarded, poison_
from pairs import every

import cutlass_kernels as ck
from cutlass_kernels._compute import kernels, merging

DEVICE = "cuda:0"
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
State = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture
def no_torch(monkeypatch):
    """Fails where PyTorch is to compute."""

    def refuse(v, s):
        raise AssertionError(f"PyTorch merges states of shape {tuple(v.shape)}")

    monkeypatch.setattr(merging, "_merge", refuse)


def states(tokens: int, count: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> State:
    v = torch.randn(tokens, count, heads, dim).to(dtype).to(DEVICE)
    return v, (4 * torch.randn(tokens, count, heads)).to(DEVICE)


def halves(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The arguments of merge_state, contiguous, of two states."""
    return tuple(x[:, i].clone(memory_format=torch.contiguous_format) for i in (0, 1) for x in (v, s))


def check(got: State, v: torch.Tensor, s: torch.Tensor) -> None:
    """``got`` is the merged state of all of ``v`` and ``s``."""
    want, want_lse = oracle.merge(v, s)
    assert_close(got[0], want, dtype=v.dtype)
    assert_lse_close(got[1], want_lse, atol=1e-4)


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same numbers elsewhere. ``how`` names what is unusual."""
    if how == "heads first":
        order = (*range(x.dim() - 2), x.dim() - 1, x.dim() - 2)
        return x.transpose(-2, -3).contiguous().transpose(-2, -3) if x.dim() > 3 else x.permute(order)
    if how == "gaps":
        return torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., : x.size(-1)]
    if how == "last dimension strided":
        return torch.stack([x, torch.full_like(x, torch.nan)], -1).flatten(-2)[..., ::2]
    assert how == "odd address"
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.gpu
@pytest.mark.usefixtures("no_torch")
class TestKernels:
    @pytest.mark.pairwise
    @every(dtype=DTYPES, dim=[8, 72, 128, 192, 512], count=[0, 1, 2, 3, 4, 5, 6, 7, 12, 33, 300])
    def test_many_states(self, count, dim, dtype):
        v, s = states(3 if count > 30 else 19, count, 5, dim, dtype)
        got = ck.merge_states(v, s)
        check(got, v, s)
        if count == 1:
            assert_all_bitwise(got, (v[:, 0], s[:, 0]))

    @every(**{"dtype": DTYPES, "tokens,heads,dim": [(1, 1, 8), (300, 1, 8), (37, 3, 72), (5, 32, 128), (9, 7, 1024)]})
    def test_two_states(self, tokens, heads, dim, dtype):
        v, s = states(tokens, 2, heads, dim, dtype)
        parts = halves(v, s)
        before = [x.clone() for x in parts]
        check(ck.merge_state(*parts), v, s)
        assert_all_bitwise(parts, before)
        assert ck.merge_state_in_place(*parts) is None
        check(parts[:2], v, s)
        assert_all_bitwise(parts[2:], before[2:])

    def test_longest_rows(self):
        for dim, dtype in ((2048, torch.float16), (1024, torch.float32)):
            v, s = states(3, 4, 2, dim, dtype)
            check(ck.merge_states(v, s), v, s)

    @every(shape=[(0, 3, 4, 64), (5, 3, 0, 64)])
    def test_nothing_to_merge(self, shape):
        v, s = torch.empty(shape, device=DEVICE), torch.empty(shape[:3], device=DEVICE)
        out, lse = ck.merge_states(v, s)
        assert out.shape == shape[:1] + shape[2:] and lse.shape == (shape[0], shape[2])
        out, lse = ck.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])
        assert out.shape == shape[:1] + shape[2:] and lse.shape == (shape[0], shape[2])
        ck.merge_state_in_place(v[:, 0], s[:, 0], v[:, 1], s[:, 1])

    @every(dtype=DTYPES, count=[2, 4, 9])
    def test_states_without_keys_may_hold_anything(self, count, dtype):
        v, s = states(200, count, 3, 64, dtype)
        s.masked_fill_(torch.rand(s.shape).to(DEVICE) < 0.5, -torch.inf)
        s[0] = -torch.inf
        lonely = torch.arange(1, 1 + count)
        s[lonely] = -torch.inf
        s[lonely, lonely - 1] = 3.25
        empty = s == -torch.inf
        poison_(v)[~empty] = torch.randn(int((~empty).sum()), 64).to(dtype).to(DEVICE)
        calls = [ck.merge_states(v, s)]
        if count == 2:
            parts = halves(v, s)
            calls.append(ck.merge_state(*parts))
            ck.merge_state_in_place(*parts)
            calls.append(parts[:2])
        for out, lse in calls:
            assert torch.count_nonzero(out[0]) == 0 and bool((lse[0] == -torch.inf).all())
            assert_all_bitwise((out[lonely], lse[lonely]), (v[lonely, lonely - 1], s[lonely, lonely - 1]))
            check((out, lse), v, s)

    @every(count=[2, 3, 9])
    def test_values_that_are_no_numbers(self, count):
        v, s = states(6, count, 2, 8, torch.float32)
        s[0, 1], s[1, 0], s[2, count - 1] = torch.nan, torch.inf, -torch.inf
        s[3] = torch.nan
        v[4, 1] = torch.inf
        v[5, 1], s[5] = torch.nan, 0.0
        s[5, 1] = -3000.0  # counts for nothing beside the others
        out, lse = ck.merge_states(v, s)
        for token in (0, 1, 3):
            assert bool(out[token].isnan().all()) and bool(lse[token].isnan().all())
        check((out[[2, 5]], lse[[2, 5]]), v[[2, 5]], s[[2, 5]])
        assert bool((out[4] == torch.inf).all())

    @every(dtype=DTYPES)
    def test_the_largest_numbers_do_not_overflow(self, dtype):
        v = torch.full((3, 9, 2, 16), torch.finfo(dtype).max / 2, dtype=dtype, device=DEVICE)
        s = torch.full((3, 9, 2), 100.0, device=DEVICE)
        out, lse = ck.merge_states(v, s)
        torch.testing.assert_close(out, v[:, 0], rtol=2e-6, atol=0)
        assert_lse_close(lse, oracle.merge(v, s)[1], atol=1e-4)
        tiny = torch.full((1, 1, 16), 3e-45, device=DEVICE)  # the smallest numbers pass through
        out, _ = ck.merge_state(tiny, s[:1, 0, :1], torch.ones_like(tiny), torch.full_like(s[:1, 0, :1], -torch.inf))
        assert_bitwise(out, tiny)

    def test_far_apart_states_in_every_order(self):
        v, s = states(5, 20, 3, 64, torch.float32)
        for largest in (0, 7, 19):
            apart = s.clone()
            apart[:, largest] += 3000
            out, lse = ck.merge_states(v, apart)
            assert_all_bitwise((out, lse), (v[:, largest], apart[:, largest]))

    @every(dtype=[torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
    def test_masks(self, dtype):
        v, s = states(41, 2, 3, 72)
        chosen = (torch.arange(41) % 3 != 0).to(DEVICE)
        mask = chosen if dtype == torch.bool else chosen.to(dtype) * 64  # not only 1
        if dtype == torch.int64:
            mask = mask << 32  # nothing in the low half
        for given in (mask, mask.repeat_interleave(2)[::2]):
            parts = halves(v, s)
            ck.merge_state_in_place(*parts, mask=given)
            assert_all_bitwise([x[chosen] for x in parts[:2]], [x[chosen] for x in ck.merge_state(*halves(v, s))])
            assert_all_bitwise([x[~chosen] for x in parts[:2]], [x[~chosen] for x in halves(v, s)[:2]])

    def test_masks_of_other_kinds(self):
        v, s = states(4, 2, 3, 72)
        with pytest.raises(RuntimeError, match=r"mask has shape \(5,\)"):
            ck.merge_state_in_place(*halves(v, s), mask=torch.ones(5, dtype=torch.bool, device=DEVICE))
        parts = halves(v, s)
        ck.merge_state_in_place(*parts, mask=torch.tensor([0.0, 0.5, 1.0, 0.0], device=DEVICE))
        assert_bitwise(parts[0][0], v[0, 0])
        check((parts[0][1:3], parts[1][1:3]), v[1:3], s[1:3])

    @every(how=["heads first", "gaps", "last dimension strided", "odd address"], dtype=[torch.bfloat16, torch.float32])
    def test_tensors_of_any_layout(self, how, dtype):
        v, s = states(11, 3, 4, 72, dtype)
        odd_v, odd_s = laid_out(v, how), laid_out(s, "gaps" if how == "heads first" else how)
        assert torch.equal(odd_v, v) and torch.equal(odd_s, s)
        check(ck.merge_states(odd_v, odd_s), v, s)
        check(ck.merge_states(v, odd_s), v, s)
        pair = v[:, :2], s[:, :2]
        for given in ((odd_v, s), (v, odd_s), (odd_v, odd_s)):
            check(ck.merge_state(given[0][:, 0], given[1][:, 0], v[:, 1], s[:, 1]), *pair)
            check(ck.merge_state(v[:, 0], s[:, 0], given[0][:, 1], given[1][:, 1]), *pair)
            own, own_lse = given[0].clone(memory_format=torch.preserve_format), given[1].clone()
            own, own_lse = laid_out(own, how)[:, 0], laid_out(own_lse, "gaps")[:, 0]
            ck.merge_state_in_place(own, own_lse, given[0][:, 1], given[1][:, 1])
            check((own, own_lse), *pair)

    def test_states_of_one_tensor_side_by_side(self):
        v, s = states(11, 3, 4, 64)
        both, lses = v.clone(), s.clone()
        ck.merge_state_in_place(both[:, 0], lses[:, 0], both[:, 2], lses[:, 2])
        check((both[:, 0].contiguous(), lses[:, 0].contiguous()), v[:, ::2], s[:, ::2])
        assert_bitwise(both[:, 1:], v[:, 1:])
        wide = v[:, :1].expand(-1, 7, -1, -1), s[:, :1].expand(-1, 7, -1)
        check(ck.merge_states(*wide), *wide)

    def test_in_place_with_itself_and_with_what_it_overlaps(self):
        v, s = states(40, 2, 4, 256, torch.float32)
        parts = halves(v, s)
        ck.merge_state_in_place(*parts[:2], *parts[:2])
        assert_bitwise(parts[0], v[:, 0])
        assert_lse_close(parts[1], s[:, 0].double() + 1)
        rows, lses = v[:, 0].contiguous(), s[:, 0].contiguous()
        want = oracle.merge(torch.stack([rows[1:], rows[:-1]], 1), torch.stack([lses[1:], lses[:-1]], 1))
        ck.merge_state_in_place(rows[1:], lses[1:], rows[:-1], lses[:-1])
        assert_close(rows[1:], want[0])
        assert_lse_close(lses[1:], want[1], atol=1e-4)

    @every(dtype=[torch.float16, torch.float64])
    def test_types_that_are_converted(self, dtype):
        v, s = states(13, 2, 3, 64)
        parts = list(halves(v, s.to(dtype)))
        parts[2] = parts[2].float()
        check(ck.merge_state(*parts), v, s.to(dtype))
        ck.merge_state_in_place(*parts)
        want, want_lse = oracle.merge(v, s.to(dtype))
        assert_close(parts[0], want)
        assert parts[1].dtype == dtype
        assert_close(parts[1], want_lse, atol=1e-2, rtol=1e-3)

    @every(**{"dtype": DTYPES, "tokens,heads,dim": [(1, 1, 8), (13, 3, 72), (40, 5, 512)]})
    def test_nothing_else_is_written(self, tokens, heads, dim, dtype):
        v, s = states(tokens, 2, heads, dim, dtype)
        out = Guarded((tokens, heads, dim), dtype, DEVICE, strides=(heads * (dim + 8), dim + 8, 1))
        lse = Guarded((tokens, heads), torch.float32, DEVICE, strides=(2 * heads, 2))
        merging._launch(*halves(v, s), out.tensor, lse.tensor)
        check((out.tensor.contiguous(), lse.tensor.contiguous()), v, s)
        out.check("v")
        lse.check("s")
        masked = [Guarded(x.shape, x.dtype, DEVICE) for x in halves(v, s)[:2]]
        mask = torch.zeros(tokens, dtype=torch.uint8, device=DEVICE)
        merging._launch(*halves(v, s), masked[0].tensor, masked[1].tensor, mask=mask)
        masked[0].check_untouched("v")
        masked[1].check_untouched("s")


@pytest.mark.gpu
@pytest.mark.parametrize("dim,dtype", [(20, torch.float16), (64, torch.float64), (2056, torch.bfloat16)])
def test_torch_merges_the_rest(dim, dtype):
    v, s = states(7, 2, 3, dim, dtype)
    check(ck.merge_states(v, s), v, s)
    check(ck.merge_state(*halves(v, s)), v, s)
    parts = halves(v, s)
    ck.merge_state_in_place(*parts)
    check(parts[:2], v, s)


# --- choice ------------------------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def test_where_torch_computes():
    x = torch.zeros(2, 3)
    assert not kernels.move(x)
    assert not kernels.move(x.as_subclass(Subclass))


@pytest.mark.gpu
def test_where_kernels_compute():
    x = torch.zeros(2, 3, device=DEVICE)
    assert kernels.move(x)
    assert kernels.move(torch.nn.Parameter(x, requires_grad=False))
    wanted = torch.nn.Parameter(x)  # gradients are PyTorch's
    assert not kernels.move(wanted) and not kernels.move(x, wanted)
    with torch.no_grad():
        assert kernels.move(wanted)
    assert not kernels.move(x.as_subclass(Subclass))
