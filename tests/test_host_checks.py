"""The compiled reading of index tensors takes what the checks in torch take, and leaves the rest to them."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels import _args, _batch

LIKE = torch.empty(0, dtype=torch.uint8)


@pytest.fixture(params=["torch", "compiled"])
def checks(request, monkeypatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(_args, "_C", None)
    elif _args._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")


@pytest.fixture
def compiled() -> None:
    if _args._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")


def vector(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 3, 3, 9], [0, 2**31 - 1]])
def test_offsets_that_are_taken(checks, offsets):
    assert _args.indptr("x", vector(*offsets), from_zero=True).tolist() == offsets
    shifted = [min(x + 5, 2**31 - 1) for x in offsets]
    assert _args.indptr("x", vector(*shifted)).tolist() == shifted


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
        _args.indptr("x", vector(*offsets), from_zero=from_zero)


def test_lengths_of_a_page_table():
    offsets, last = vector(3, 3, 4, 9, 9 + 2**20), vector(0, 1, 16, 7)
    want = [0, 1, 80, (2**20 - 1) * 16 + 7]
    for step in (1, 2):  # contiguous, and not
        strided = last.repeat_interleave(step)[::step]
        lens = _args.paged_kv_lens(offsets, strided, 16)
        assert lens.dtype == torch.int64 and lens.tolist() == want
    offsets, last = vector(0, 2**31 - 1), vector(9)  # more keys than int32 counts
    assert _args.paged_kv_lens(offsets, last, 1 << 20).tolist() == [(2**31 - 2) * 2**20 + 9]


@pytest.mark.parametrize("last,wrong", [([0, 0], 1), ([3, 17], 1), ([3, -1], 1)])
def test_last_pages_that_are_refused(last, wrong):
    with pytest.raises(RuntimeError, match=rf"paged_kv_last_page_len\[{wrong}\]={last[wrong]} is not in"):
        _args.paged_kv_lens(vector(0, 0, 2), vector(*last), 16)


def test_what_is_read_of_a_ragged_batch(compiled):
    qo, kv = vector(0, 3, 3, 9), vector(2, 4, 13, 13)
    batch = _batch.read_offsets(qo, kv, LIKE)
    assert (batch.size, batch.qo.last, batch.kv.last, batch.longest, batch.total_kv) == (3, 9, 13, 9, 13)
    assert batch.kv_lens.tolist() == [2, 9, 0]
    for index, given in ((batch.qo, qo), (batch.kv, kv)):
        want = given.tolist()
        given.zero_()  # the batch has a copy
        assert index.tensor.tolist() == index.host.tolist() == want
        assert index.numel() == 4 and index.data_ptr() == index.tensor.data_ptr() and index.data_ptr() % 16 == 0
        assert index.host_ptr() == index.host.data_ptr()


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_read_of_a_paged_batch(compiled, whole):
    vectors = vector(0, 3, 3, 9), vector(1, 3, 3, 4), vector(5, 0, 16), vector(99, 7, 2, 0, 98)
    batch = _batch.read_pages(*vectors, 16, whole, LIKE)
    assert (batch.size, batch.qo.last, batch.kv.last, batch.longest, batch.total_kv) == (3, 9, 4, 21, 64)
    assert batch.page_bound == 8 and batch.kv_lens.tolist() == [21, 0, 16]
    copies = (batch.qo, batch.kv, batch.last_page_len, batch.indices)
    for index, given, size in zip(copies, vectors, (4, 4, 3, 5 if whole else 4)):
        assert index.tensor.tolist() == index.host.tolist() == given.tolist()[:size] and index.numel() == size
        assert index.data_ptr() == index.tensor.data_ptr() and index.data_ptr() % 16 == 0


def test_an_empty_batch_is_read(compiled):
    batch = _batch.read_pages(vector(0), vector(0), vector(), vector(), 16, False, LIKE)
    assert (batch.size, batch.qo.last, batch.kv.last, batch.longest, batch.page_bound) == (0, 0, 0, 0, 0)
    assert batch.indices.tensor.numel() == 0 and batch.kv_lens.tolist() == []


@pytest.mark.parametrize(
    "change",
    [
        {"qo": vector(1, 2)},
        {"qo": vector(0, -1)},
        {"kv": vector(0, 3)},  # more pages than there are
        {"kv": vector(-1, 1)},
        {"kv": vector(0, 1, 1)},
        {"last": vector(0)},
        {"last": vector(17)},
        {"last": vector(1, 1)},
        {"pages": vector(0, -1)},
        {"pages": torch.zeros(2, dtype=torch.int64)},
        {"pages": torch.zeros(4, dtype=torch.int32)[::2]},
        {"pages": torch.zeros(2, 1, dtype=torch.int32)},
        {"pages": [0, 1]},
        {"page_size": 0},
    ],
)
def test_what_is_left_to_the_checks_in_torch(compiled, change):
    given = {"qo": vector(0, 2), "kv": vector(0, 2), "last": vector(16), "pages": vector(0, 1), "page_size": 16}
    assert _batch.read_pages(*given.values(), False, LIKE) is not None
    assert _batch.read_pages(*(given | change).values(), False, LIKE) is None


@pytest.mark.parametrize("empty", [0, 10000], ids=["small", "large"])  # from 32 KB on, the way to the device is another
@pytest.mark.parametrize("whose", ["paged", "ragged"])
def test_plan_copies_index_vectors(target, whose, empty):
    """They may be overwritten as soon as plan() returns, while the device is still busy with something else."""
    batch = make_batch([0] * empty + [6, 5], [0] * empty + [9, 40], 4, 2, 64, device=target.device)
    paged = batch.paged(4)
    if whose == "paged":
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
        vectors, sizes, kv = (batch.qo_indptr(), *paged.table()), (*batch.heads, 4), (paged.cache,)
    else:
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
        vectors, sizes, kv = (batch.qo_indptr(), batch.kv_indptr()), batch.heads, (batch.k, batch.v)
    assert (4 * sum(x.numel() for x in vectors) > 2 * _batch._PAGEABLE_BYTES) == (empty > 0)
    wrapper.plan(*vectors, *sizes)
    want = wrapper.run(batch.q, *kv)
    gpu = target.device != "cpu"
    for pinned in (False, True) if gpu else (False,):
        given = [x.pin_memory() if pinned else x.clone() for x in vectors]
        if gpu:
            torch.cuda._sleep(1 << 26)  # some 30 ms
        wrapper.plan(*given, *sizes)
        for x in given:
            x.zero_()
        assert_bitwise(wrapper.run(batch.q, *kv), want)
