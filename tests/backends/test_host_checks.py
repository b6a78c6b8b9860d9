"""The compiled reading of index tensors takes what the checks in torch take, and leaves the rest to them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from captures import graph_wrapper
from compare import assert_bitwise
from problems import graph_buffers, make_batch

import cutlass_kernels as ck
from cutlass_kernels._compute import kernels, selection
from cutlass_kernels._core import index_vectors, native
from cutlass_kernels._core.problems import Offsets, Split
from cutlass_kernels._planned import batches, index_buffers
from cutlass_kernels._planned.batches import Packed, Part

LIKE = torch.empty(0, dtype=torch.uint8)
PAGEABLE = 32 << 10  # bytes of vectors that go to the device at once; kPageable in indices.cpp


@pytest.fixture(params=["torch", "compiled"])
def checks(request, monkeypatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(native, "_C", None)
    elif native._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")


@pytest.fixture
def compiled() -> None:
    if native._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")


def vector(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 3, 3, 9], [0, 2**31 - 1]])
def test_offsets_that_are_taken(checks, offsets):
    assert index_vectors.indptr("x", vector(*offsets), from_zero=True).tolist() == offsets
    shifted = [min(x + 5, 2**31 - 1) for x in offsets]
    assert index_vectors.indptr("x", vector(*shifted)).tolist() == shifted


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
        index_vectors.indptr("x", vector(*offsets), from_zero=from_zero)


def test_lengths_of_a_page_table():
    offsets, last = vector(3, 3, 4, 9, 9 + 2**20), vector(0, 1, 16, 7)
    want = [0, 1, 80, (2**20 - 1) * 16 + 7]
    for step in (1, 2):  # contiguous, and not
        strided = last.repeat_interleave(step)[::step]
        lens = index_vectors.paged_kv_lens(offsets, strided, 16)
        assert lens.dtype == torch.int64 and lens.tolist() == want
    offsets, last = vector(0, 2**31 - 1), vector(9)  # more keys than int32 counts
    assert index_vectors.paged_kv_lens(offsets, last, 1 << 20).tolist() == [(2**31 - 2) * 2**20 + 9]


@pytest.mark.parametrize("last,wrong", [([0, 0], 1), ([3, 17], 1), ([3, -1], 1)])
def test_last_pages_that_are_refused(last, wrong):
    with pytest.raises(RuntimeError, match=rf"paged_kv_last_page_len\[{wrong}\]={last[wrong]} is not in"):
        index_vectors.paged_kv_lens(vector(0, 0, 2), vector(*last), 16)


def test_what_is_read_of_a_ragged_batch(compiled):
    qo, kv = vector(0, 3, 3, 9), vector(2, 4, 13, 13)
    batch = batches.read_offsets(qo, kv, LIKE)
    assert (batch.size, batch.qo.last, batch.kv.last, batch.longest, batch.total_kv) == (3, 9, 13, 9, 13)
    assert batch.kv_lens.tolist() == [2, 9, 0]
    for index, given in ((batch.qo, qo), (batch.kv, kv)):
        want = given.tolist()
        given.zero_()  # the batch has a copy
        assert index.tensor.tolist() == index.host.tolist() == want
        assert index.numel() == 4 and index.data_ptr() == index.tensor.data_ptr() and index.data_ptr() % 16 == 0
        assert index.host_address == index.host.data_ptr()


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_read_of_a_paged_batch(compiled, whole):
    vectors = vector(0, 3, 3, 9), vector(1, 3, 3, 4), vector(5, 0, 16), vector(99, 7, 2, 0, 98)
    batch = batches.read_pages(*vectors, 16, whole, LIKE)
    assert (batch.size, batch.qo.last, batch.kv.last, batch.longest, batch.total_kv) == (3, 9, 4, 21, 64)
    assert batch.page_bound == 8 and batch.kv_lens.tolist() == [21, 0, 16]
    copies = (batch.qo, batch.kv, batch.last_page_len, batch.indices)
    for index, given, size in zip(copies, vectors, (4, 4, 3, 5 if whole else 4)):
        assert index.tensor.tolist() == index.host.tolist() == given.tolist()[:size] and index.numel() == size
        assert index.data_ptr() == index.tensor.data_ptr() and index.data_ptr() % 16 == 0


ON_DEVICE = torch.empty(0, dtype=torch.uint8, device="meta")


@pytest.fixture
def meta_is_a_gpu(compiled, monkeypatch) -> Iterator[None]:
    """The compiled module takes tensors of the meta device for tensors of a GPU: nothing there can be read."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, vectors would be copied to it")
    described: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(native._C, "use_torch", lambda api, functions: described.append(functions))
        native._describe_torch()
    monkeypatch.setattr(native, "_DLPACK_DEVICES", {"cpu": 1, "meta": 2})
    native._C.use_torch(None, described[0] | {"stream_of": lambda index: 0})
    yield
    native._describe_torch()


def packed_for_a_gpu(count: int = 5) -> Packed:
    """So many vectors' elements on the host, which are for a GPU."""
    host = bytearray(vector(*range(count)).numpy().tobytes())
    return Packed(torch.device("cuda"), host, torch.frombuffer(host, dtype=torch.int32).data_ptr())


@pytest.mark.parametrize("room,begin", [(20, 0), (32, 0), (40, 16), (4096, 4064)])
def test_vectors_lie_at_the_end_of_a_workspace(room, begin):
    packed, workspace = packed_for_a_gpu(), torch.zeros(room, dtype=torch.uint8)
    assert packed.waits and packed.place(workspace) == room - begin
    assert packed.address == workspace.data_ptr() + begin
    assert not packed.waits and packed.place(workspace) == 0  # a second plan has vectors of its own
    workspace.view(torch.int32)[begin // 4 : begin // 4 + 5] = torch.arange(5, dtype=torch.int32)  # as the plan copies
    assert packed.tensor.tolist() == [0, 1, 2, 3, 4] and packed.tensor.data_ptr() == packed.address


def test_vectors_in_a_workspace_are_traced():
    packed, workspace = packed_for_a_gpu(), torch.zeros(64, dtype=torch.uint8)
    packed.place(workspace)
    workspace.view(torch.int32)[8:13] = 7
    part = Part(packed, 2, 3, None)
    compiled = torch.compile(lambda x: x + part.tensor, backend="eager", fullgraph=True)
    assert compiled(torch.arange(3, dtype=torch.int32)).tolist() == [7, 8, 9]


def test_a_workspace_that_is_too_small_for_vectors():
    packed = packed_for_a_gpu()
    assert packed.place(torch.zeros(19, dtype=torch.uint8)) == 20 and packed.waits


@pytest.mark.parametrize("capturing", [False, True])
def test_what_a_plan_copies_from_the_host(monkeypatch, capturing):
    """Not what might wait for the device, nor into a graph what would be read again when that is replayed."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    for count, waits in ((900, True), (901, not capturing), (8192, not capturing), (8193, False)):
        packed = packed_for_a_gpu(count)
        assert packed.waits == waits
        assert (packed.place(torch.zeros(1 << 16, dtype=torch.uint8)) > 0) == waits


def test_vectors_of_the_host_go_to_the_buffers_of_a_graph():
    wrapper, buffers = graph_wrapper()
    packed = packed_for_a_gpu(18)
    begins = dict(zip(wrapper._stored, (0, 3, 6, 15)))
    parts = {
        name: Part(packed, begins[name], x.numel(), None) for (name, x) in zip(wrapper._stored, buffers, strict=True)
    }
    (from_host, on_device), apart = index_buffers.copies(wrapper._stored, parts)
    assert not on_device and not apart
    assert from_host == [
        (x.data_ptr(), packed.host_address + 4 * begin, x.numel()) for x, begin in zip(buffers, begins.values())
    ]


@pytest.mark.parametrize("whole", [False, True])
def test_page_numbers_on_the_device_are_used_as_they_are(meta_is_a_gpu, whole):
    host = vector(0, 3, 3, 9), vector(1, 3, 3, 4), vector(5, 0, 16)
    pages = torch.zeros(5, dtype=torch.int32, device="meta")
    batch = batches.read_pages(*host, pages, 16, whole, ON_DEVICE)
    assert (batch.size, batch.qo.last, batch.kv.last, batch.longest, batch.total_kv) == (3, 9, 4, 21, 64)
    assert batch.page_bound == 0 and batch.kv_lens.tolist() == [21, 0, 16] and batch.indices.host is None
    assert batch.indices.numel() == (5 if whole else 4) and (batch.indices.tensor is pages) == whole
    for index, given in zip((batch.qo, batch.kv, batch.last_page_len), host):
        assert index.host.tolist() == given.tolist()
    assert batches.read_pages(*host, pages[:4], 16, whole, ON_DEVICE) is not None
    for change in (pages[:3], pages.long(), pages[::2], pages[None], [0] * 5):
        assert batches.read_pages(*host, change, 16, whole, ON_DEVICE) is None
    assert batches.read_pages(*host, pages, 16, whole, LIKE) is None  # which is on another device
    for i, wrong in enumerate((vector(1, 3, 3, 9), vector(1, 3, 2, 4), vector(5, 0, 17))):
        assert batches.read_pages(*host[:i], wrong, *host[i + 1 :], pages, 16, whole, ON_DEVICE) is None


def test_vectors_on_the_device_are_used_as_they_are(meta_is_a_gpu):
    qo, kv, last, pages = (torch.zeros(n, dtype=torch.int32, device="meta") for n in (4, 4, 3, 9))
    batch = batches.take_offsets(qo, kv, ON_DEVICE)
    assert batch.qo.tensor is qo and batch.kv.tensor is kv and batch.size == 3
    rows = batch.qo
    batch = batches.take_pages(rows, kv, last, pages, 16, ON_DEVICE)
    assert (batch.size, batch.longest, batch.qo.last, batch.page_bound) == (3, None, None, 0)
    assert batch.total_kv == 9 * 16  # no more, whatever the offsets say
    assert batch.qo is rows and batch.last_page_len.tensor is last and batch.indices.tensor is pages
    for change in (
        dict(rows=None),
        dict(kv=kv[:3]),
        dict(kv=vector(0, 0, 0, 0)),
        dict(last=last.long()),
        dict(last=pages),
        dict(pages=[0]),
        dict(page_size=0),
        dict(page_size=16.0),
        dict(like=LIKE),
    ):
        given = dict(rows=rows, kv=kv, last=last, pages=pages, page_size=16, like=ON_DEVICE) | change
        assert batches.take_pages(*given.values()) is None
    for wrong in ((qo, kv[:3]), (qo, vector(0, 0, 0, 0)), (qo.long(), kv), (qo[:0], kv[:0])):
        assert batches.take_offsets(*wrong, ON_DEVICE) is None


def test_an_empty_batch_is_read(compiled):
    batch = batches.read_pages(vector(0), vector(0), vector(), vector(), 16, False, LIKE)
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
    assert batches.read_pages(*given.values(), False, LIKE) is not None
    assert batches.read_pages(*(given | change).values(), False, LIKE) is None


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("form", ["pages", "all"])  # on the device: page numbers alone (vLLM), or all vectors (SGLang)
@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_plans_of_vectors_on_the_device(target, whose, form, graph):
    """They give what plans of vectors on the CPU give, and the host waits for nothing."""
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, where there is no device")
    count = 37
    qo_lens = [1] * count if whose == "decode" else [1 + n % 5 for n in range(count)]
    batch = make_batch(qo_lens, [20 + 31 * n for n in range(count)], 4, 2, 64, device=target.device)
    paged = batch.paged(4)
    qo, indptr, indices, last = (batch.qo_indptr(), *paged.table())
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    wrappers = []
    for _ in range(2):
        buffers = [torch.full((n,), 7, dtype=torch.int32, device=target.device) for n in (count + 1, 6000, count)]
        if whose == "decode":
            given = dict(zip((name + "fer" for name in names), buffers)) if graph else {}
            made = ck.BatchDecodeWithPagedKVCacheWrapper
        else:
            rows = torch.full((count + 1,), 7, dtype=torch.int32, device=target.device)
            given = dict(zip(names, buffers), qo_indptr_buf=rows) if graph else {}
            made = ck.BatchPrefillWithPagedKVCacheWrapper
        wrappers.append(made(target.workspace(), use_cuda_graph=graph, backend=target.backend, **given))
    first = () if whose == "decode" else (qo,)
    sizes = (*batch.heads, 4)
    wrappers[0].plan(*first, indptr, indices, last, *sizes)
    want = wrappers[0].run(batch.q, paged.cache)
    moved = [x.to(target.device) for x in (*first, indptr, indices, last)]
    if form == "pages":
        moved = [*first, indptr, moved[-2], last]
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            wrappers[1].plan(*moved, *sizes)
            got = wrappers[1].run(batch.q, paged.cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
        for name, given in zip(names, (indptr, indices, last)):
            assert torch.equal(getattr(wrappers[1], f"_{name}")[: given.numel()].cpu(), given)
    if graph:  # what lies in the buffers already is not copied to them
        stored = [getattr(wrappers[1], f"_{name}")[: x.numel()] for name, x in zip(names, (indptr, indices, last))]
        wrappers[1].plan(*moved[: len(first)], *stored, *sizes)
        torch.testing.assert_close(wrappers[1].run(batch.q, paged.cache), want, atol=2e-3, rtol=2e-3)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
@pytest.mark.gpu
def test_a_plan_that_fails_leaves_the_buffers_of_a_graph(target):
    if target.is_reference:
        pytest.skip("only kernels need a tile list, which may find no room")
    batch = make_batch([8] * 9, [40] * 9, 4, 2, 64, device=target.device)
    paged = batch.paged(4)
    buffers = graph_buffers(9, 200, target.device)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend, **buffers)
    held = [x for x in buffers.values() if isinstance(x, torch.Tensor)]
    before = [x.fill_(7).clone() for x in held]
    room = torch.zeros(16, dtype=torch.uint8, device=target.device)
    wrapper.reset_workspace_buffer(target.workspace(), room)
    for device in ("cpu", target.device):
        with pytest.raises(RuntimeError, match="int_workspace_buffer has 16 bytes"):
            wrapper.plan(batch.qo_indptr(), *paged.table(device), *batch.heads, 4)
        for x, y in zip(held, before):
            assert_bitwise(x, y)
    # Nor does one for which there is no room for the results of split keys.
    wrapper.reset_workspace_buffer(target.workspace(), torch.zeros(8 << 20, dtype=torch.uint8, device=target.device))
    with pytest.raises((RuntimeError, ValueError)):
        wrapper.plan(
            batch.qo_indptr(), *paged.table(), *batch.heads, 4, fixed_split_size=1, max_sequence_kv=(1 << 31) - 1024
        )
    for x, y in zip(held, before):
        assert_bitwise(x, y)


@pytest.mark.parametrize("fixed, room, refused", [(1, 8000, True), (1, 8192, False), (0, 8000, False)])
def test_a_plan_of_fixed_splits_asks_for_the_room_of_one_row(extension, monkeypatch, fixed, room, refused):
    """Where only the device knows how many there are. Long queries are not split, but where the size is fixed."""

    def plan_of(backend, request, offsets, rows, *others):
        assert fixed and rows == 1
        return None, 48 * rows, 8192 * rows

    copied = []
    monkeypatch.setattr(kernels, "_plan_of", plan_of)
    monkeypatch.setattr(kernels, "_copy", lambda copies, device: copied.extend(copies))
    monkeypatch.setattr(kernels, "reads_as_is", lambda *facts: False)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    indptr, partials = torch.tensor([0, 5]), torch.empty(room, dtype=torch.uint8)
    offsets = Offsets(indptr, indptr, None, split=Split(fixed_size=fixed), partials=partials)
    with pytest.raises(RuntimeError, match=r"8000 bytes.* at least 8192") if refused else contextlib.nullcontext():
        kernels.Schedule("fa2", None, offsets, torch.empty(48, dtype=torch.uint8), [(1, 2, 3)])
    assert copied == ([] if refused else [(1, 2, 3)])  # what fails writes nothing


class TileLists:
    """Stands for the compiled planner: a list takes 48 bytes a row."""

    def __init__(self, monkeypatch) -> None:
        self.made: list[tuple[int, Any]] = []  # where, and after which copies
        monkeypatch.setattr(kernels, "_plan_of", self.plan_of)
        monkeypatch.setattr(kernels, "reads_as_is", lambda *facts: False)
        monkeypatch.setattr(kernels, "_current_device", lambda: None)
        monkeypatch.setattr(kernels, "_stream", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def plan_of(self, backend, request, offsets, rows, workspace=0, room=0, partial_room=0, copies=(), stream=0):
        if 48 * rows <= room:
            self.made.append((workspace, copies))
        return "plan", 48 * rows, 0


@pytest.mark.parametrize("tail", [0, 32, 4800])
@pytest.mark.parametrize("rows_are_known", [True, False])
def test_a_workspace_that_is_no_callers_grows(monkeypatch, rows_are_known, tail):
    """Vectors in the last ``tail`` bytes stay where they are. The list is made once, after the copies."""
    lists, copies = TileLists(monkeypatch), [(1, 2, 3)]
    monkeypatch.setattr(kernels, "_copy", lambda copies, device: None)
    indptr, asked = torch.tensor([0, 5]), []

    def grow(size: int) -> torch.Tensor:
        asked.append(size)
        return torch.empty(size, dtype=torch.uint8)

    offsets = Offsets(indptr, indptr, 100 if rows_are_known else None, split=Split(fixed_size=1))
    small, tail = torch.empty(4096, dtype=torch.uint8), tail if rows_are_known else 0
    schedule = kernels.Schedule("fa2", None, offsets, small, copies, tail, grow)
    assert schedule.plan(100) == "plan" and asked[0] == 4800 + tail
    assert schedule.workspace is not small
    assert lists.made == [(schedule.workspace.data_ptr(), copies if rows_are_known else kernels._NO_COPIES)]
    with pytest.raises(RuntimeError, match=r"int_workspace_buffer has 4096 bytes.* reset_workspace_buffer"):
        kernels.Schedule("fa2", None, offsets, small, copies, tail).plan(100)  # a caller's


@pytest.mark.runs_nothing("only plans")
@pytest.mark.parametrize("graph", [False, True])
def test_the_own_int_workspace_of_a_wrapper_grows(monkeypatch, graph):
    """A caller's does not, nor one that captured graphs read."""
    lists = TileLists(monkeypatch)
    monkeypatch.setattr(selection, "select", lambda requested, request: "fa2")
    monkeypatch.setattr(kernels, "room", lambda device, size=64, kept=False: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(kernels, "_copy", lambda copies, device: None)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, **graph_buffers(3, 60, "cpu") if graph else {})
    batch = make_batch([5] * 3, [40] * 3, 4, 2, 64)
    plan = functools.partial(wrapper.plan, batch.qo_indptr(), *batch.paged(16).table(), 4, 2, 64, 16)
    wrapper._int_workspace_buffer = wrapper._own_int_workspace = torch.empty(16, dtype=torch.uint8)
    plan()
    own = wrapper._int_workspace_buffer
    assert own.nbytes == 8 << 20 and lists.made[-1][0] == own.data_ptr()
    plan()
    assert wrapper._int_workspace_buffer is own
    if graph:  # planned once: its address may be in a graph
        wrapper._int_workspace_buffer = wrapper._own_int_workspace = torch.empty(16, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="cannot grow any more, as CUDA graphs read it: pass a larger one"):
            plan()
    wrapper.reset_workspace_buffer(workspace, torch.empty(16, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match=r"int_workspace_buffer has 16 bytes.* needs 720: pass a larger one"):
        plan()


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("graph", [False, True])
def test_small_fixed_splits_of_many_decodes(target, graph, where):
    """Their tile list takes more than the 8 MiB that a wrapper has at first."""
    if target.is_reference:
        pytest.skip("only kernels need a tile list")
    batch = make_batch([1] * 1300, [428 - i // 20 for i in range(1300)], 4, 4, 64, device=target.device)
    paged = batch.paged(1)
    buffers = graph_buffers(1300, paged.table()[1].numel(), target.device) if graph else {}
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(512 << 20), backend=target.backend, **buffers)
    before = wrapper._int_workspace_buffer.nbytes
    plan = (batch.qo_indptr().to(where), *paged.table(where), *batch.heads, 1)
    splits = dict(fixed_split_size=2, max_sequence_kv=428)
    assert wrapper.workspace_size(*plan, **splits)[1] > before
    wrapper.plan(*plan, **splits)
    got = wrapper.run(batch.q, paged.cache)
    assert wrapper._int_workspace_buffer.nbytes > before
    other = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    other.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 1)
    torch.testing.assert_close(got, other.run(batch.q, paged.cache), atol=2e-3, rtol=2e-3)


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
    assert (4 * sum(x.numel() for x in vectors) > 2 * PAGEABLE) == (empty > 0)
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


def test_scales_of_no_heads_are_left_to_python(meta_is_a_gpu):
    """They divide by the number of heads."""
    new, cache = (torch.empty(*shape, 0, 64, dtype=torch.float16, device="meta") for shape in ((3,), (2, 16)))
    slots, scale = torch.empty(3, dtype=torch.int64, device="meta"), torch.empty(0, device="meta")
    assert native.append_by_slot(new, new, cache, cache, slots, scale, None, "NHD") is None
