"""Index vectors on the host: how a plan brings them to the GPU depends on how many they are, the results do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bitwise
from problems import indptr

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu

HEADS, PAGE = (2, 1, 64), 2
# Both offsets of 449 requests are the 900 words that kernels take as parameters. 1365 requests with their page numbers
# are 16 KB, which the driver copies; 3000 are 36 KB, which go through pinned memory.
BATCHES = [1, 3, 4, 200, 225, 448, 449, 450, 1365, 3000]


class Vectors:
    """The index vectors of a batch of requests with a row each, and one or two pages."""

    def __init__(self, batch: int, paged: bool) -> None:
        drawn = torch.Generator().manual_seed(batch)
        self.batch, self.paged = batch, paged
        pages = torch.randint(1, 3, (batch,), generator=drawn)
        self.qo, self.kv = indptr([1] * batch), indptr(pages.tolist())
        count = int(self.kv[-1])
        self.names = ["qo_indptr", "kv_indptr"]
        self.given = [self.qo, self.kv]
        if paged:
            self.names = ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"]
            last = torch.randint(1, PAGE + 1, (batch,), generator=drawn, dtype=torch.int32)
            self.given += [torch.randperm(count, generator=drawn).int(), last]
        shape = (count, PAGE, 1, 64) if paged else (count, 1, 64)
        self.q, self.k, self.v = (
            torch.randn(size, generator=drawn).to("cuda", torch.float16) for size in ((batch, 2, 64), shape, shape)
        )

    def wrapper(self, backend: str, graph: bool, room: int = 32 << 20) -> Any:
        kind = ck.BatchPrefillWithPagedKVCacheWrapper if self.paged else ck.BatchPrefillWithRaggedKVCacheWrapper
        buffers = [torch.full_like(x, -1, device="cuda") for x in self.given] if graph else []
        made = kind(torch.empty(room, dtype=torch.uint8, device="cuda"), "NHD", graph, *buffers, backend=backend)
        if graph:
            assert made.is_cuda_graph_enabled
        return made

    def plan(self, wrapper: Any, device: str, **options: Any) -> None:
        # Copies, which change when the plan has been made: that is the caller's right.
        given = [x.to(device, copy=True) for x in self.given]
        page = (PAGE,) if self.paged else ()
        wrapper.plan(*given, *HEADS, *page, causal=True, disable_split_kv=True, **options)
        if device == "cpu":
            for x in given:
                x.fill_(-1)

    def run(self, wrapper: Any) -> torch.Tensor:
        return wrapper.run(self.q, (self.k, self.v)) if self.paged else wrapper.run(self.q, self.k, self.v)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("graph", [False, True])
def test_vectors_of_the_host(kernel_backend: str, graph: bool, paged: bool, batch: int) -> None:
    vectors = Vectors(batch, paged)
    wrapper = vectors.wrapper(kernel_backend, graph)
    wrapper._int_workspace_buffer.fill_(255)
    vectors.plan(wrapper, "cpu")
    for name, want in zip(vectors.names, vectors.given):
        assert getattr(wrapper, f"_{name}_buf").tolist() == want.tolist(), name
    other = vectors.wrapper(kernel_backend, graph)
    vectors.plan(other, "cuda")
    assert_bitwise(vectors.run(wrapper), vectors.run(other))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("batch", [3, 449, 1365])
def test_room_for_vectors(paged: bool, batch: int) -> None:
    vectors = Vectors(batch, paged)
    wrapper, other = (vectors.wrapper("fa2", graph=False) for _ in range(2))
    page = (PAGE,) if paged else ()
    _, room = wrapper.workspace_size(*vectors.given, *HEADS, *page, causal=True, disable_split_kv=True)
    floats = wrapper._float_workspace_buffer
    vectors.plan(other, "cpu")
    for size in (room, room + 8):
        wrapper.reset_workspace_buffer(floats, torch.empty(size, dtype=torch.uint8, device="cuda"))
        vectors.plan(wrapper, "cpu")
        assert_bitwise(vectors.run(wrapper), vectors.run(other))
    for size in (room - 16, 16):
        wrapper.reset_workspace_buffer(floats, torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.raises(RuntimeError, match=f"int_workspace_buffer has {size} bytes.* needs {room}"):
            vectors.plan(wrapper, "cpu")


def test_a_plan_that_fails_leaves_the_vectors_of_the_last() -> None:
    vectors = Vectors(5, paged=False)
    wrapper = vectors.wrapper("fa2", graph=False)
    vectors.plan(wrapper, "cpu")
    want = vectors.run(wrapper)
    longer = Vectors(3000, paged=False)
    for fewer in (Vectors(2, paged=False), longer):
        with pytest.raises(ValueError, match="backend"):
            fewer.plan(wrapper, "cpu", q_data_type=torch.float32)
        assert wrapper._kv_indptr_buf.tolist() == vectors.kv.tolist()
    assert_bitwise(vectors.run(wrapper), want)


def test_a_tensor_of_the_vectors_is_that_of_the_present_plan() -> None:
    """They lie in the int workspace, as the tile list does."""
    vectors = Vectors(5, paged=False)
    wrapper = vectors.wrapper("fa2", graph=False)
    vectors.plan(wrapper, "cpu")
    place, workspace = wrapper._kv_indptr_buf, wrapper._int_workspace_buffer
    assert workspace.data_ptr() <= place.data_ptr() < workspace.data_ptr() + workspace.nbytes
