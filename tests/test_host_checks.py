"""The compiled checks of index tensors on the host take what the checks in torch take, and leave the rest to them."""

from __future__ import annotations

import pytest
import torch

from cutlass_kernels import _args


@pytest.fixture(params=["torch", "compiled"])
def checks(request, monkeypatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(_args, "_C", None)
    elif _args._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 3, 3, 9], [0, 2**31 - 1]])
def test_offsets_that_are_taken(checks, offsets):
    assert _args.indptr("x", torch.tensor(offsets).int(), from_zero=True).tolist() == offsets
    shifted = [min(x + 5, 2**31 - 1) for x in offsets]
    assert _args.indptr("x", torch.tensor(shifted).int()).tolist() == shifted


@pytest.mark.parametrize(
    "offsets,from_zero,message",
    [
        ([1, 2], True, "starts at 1"),
        ([-1, 2], False, "starts at -1"),
        ([0, 4, 3, 8], True, "decreases from 4 to 3 at request 1"),
        ([0, 4, -3], False, "decreases from 4 to -3 at request 1"),
    ],
)
def test_offsets_that_are_refused(checks, offsets, from_zero, message):
    with pytest.raises(RuntimeError, match=message):
        _args.indptr("x", torch.tensor(offsets).int(), from_zero=from_zero)


def test_lengths_of_a_page_table(checks):
    offsets, last = torch.tensor([3, 3, 4, 9, 9 + 2**20]).int(), torch.tensor([0, 1, 16, 7]).int()
    want = [0, 1, 80, (2**20 - 1) * 16 + 7]
    for step in (1, 2):  # contiguous, and not
        strided = last.repeat_interleave(step)[::step]
        lens = _args.paged_kv_lens(offsets, strided, 16)
        assert lens.dtype == torch.int64 and lens.tolist() == want
    offsets, last = torch.tensor([0, 2**31 - 1]).int(), torch.tensor([9]).int()  # more keys than int32 counts
    assert _args.paged_kv_lens(offsets, last, 1 << 20).tolist() == [(2**31 - 2) * 2**20 + 9]


@pytest.mark.parametrize("last,wrong", [([0, 0], 1), ([3, 17], 1), ([3, -1], 1)])
def test_last_pages_that_are_refused(checks, last, wrong):
    with pytest.raises(RuntimeError, match=rf"paged_kv_last_page_len\[{wrong}\]={last[wrong]} is not in"):
        _args.paged_kv_lens(torch.tensor([0, 0, 2]).int(), torch.tensor(last).int(), 16)
