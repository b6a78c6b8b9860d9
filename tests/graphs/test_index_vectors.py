"""Index vectors on the host: how a plan brings them to the GPU depends on how many they are, the results do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch
from targets import Target
from wrapper_problems import CLASSES, Wrapped

pytestmark = pytest.mark.gpu

HEADS, PAGE = (2, 1, 64), 2
# Both offsets of 449 requests are the 900 words that kernels take as parameters. 1365 requests with their page numbers
# are 16 KB, which the driver copies; 3000 are 36 KB, which go through pinned memory.
BATCHES = [1, 3, 4, 200, 225, 448, 449, 450, 1365, 3000]


NAMES = {
    "ragged": ["qo_indptr", "kv_indptr"],
    "paged": ["qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"],
}
kinds = pytest.mark.parametrize("kind", NAMES)


class Vectors(Wrapped):
    """A wrapper for a batch of requests with a row each, and one or two pages, and copies of the index vectors."""

    def __init__(self, batch: int, kind: str, backend: str = "fa2", graph: bool = False, wrapper: Any = None) -> None:
        drawn = torch.Generator().manual_seed(batch)
        kv_lens = torch.randint(1, 2 * PAGE + 1, (batch,), generator=drawn).tolist()
        made = make_batch([1] * batch, kv_lens, *HEADS, device="cuda:0")
        super().__init__(Target("cuda:0", backend), kind, made, PAGE, wrapper=wrapper)
        self.given = [x.clone() for x in self.vectors()]
        if graph:
            buffers = [torch.full_like(x, -1, device="cuda:0") for x in self.given]
            make = CLASSES[kind]
            self.wrapper = make(self.target.workspace(32 << 20), "NHD", True, *buffers, backend=backend)
            assert self.wrapper.is_cuda_graph_enabled

    def plan_of(self, device: str, **options: Any) -> torch.Tensor:
        """A run planned with copies, which change when the plan has been made: that is the caller's right."""
        given = [x.to(device, copy=True) for x in self.given]
        self.wrapper.plan(*given, *self.sizes, causal=True, disable_split_kv=True, **options)
        if device == "cpu":
            for x in given:
                x.fill_(-1)
        return self.run()


@pytest.mark.parametrize("batch", BATCHES)
@kinds
@pytest.mark.parametrize("graph", [False, True])
def test_vectors_of_the_host(kernel_backend: str, graph: bool, kind: str, batch: int) -> None:
    vectors = Vectors(batch, kind, kernel_backend, graph)
    vectors.wrapper._int_workspace_buffer.fill_(255)
    out = vectors.plan_of("cpu")
    for name, want in zip(NAMES[kind], vectors.given):
        assert getattr(vectors.wrapper, f"_{name}_buf").tolist() == want.tolist(), name
    vectors.wrapper = Vectors(batch, kind, kernel_backend, graph).wrapper
    assert_bitwise(out, vectors.plan_of("cuda"))


@kinds
@pytest.mark.parametrize("batch", [3, 449, 1365])
def test_room_for_vectors(kind: str, batch: int) -> None:
    vectors = Vectors(batch, kind)
    wrapper, want = vectors.wrapper, vectors.plan_of("cpu")
    _, room = wrapper.workspace_size(*vectors.given, *vectors.sizes, causal=True, disable_split_kv=True)
    floats = wrapper._float_workspace_buffer
    for size in (room, room + 8):
        wrapper.reset_workspace_buffer(floats, torch.empty(size, dtype=torch.uint8, device="cuda"))
        assert_bitwise(vectors.plan_of("cpu"), want)
    for size in (room - 16, 16):
        wrapper.reset_workspace_buffer(floats, torch.empty(size, dtype=torch.uint8, device="cuda"))
        with pytest.raises(RuntimeError, match=f"int_workspace_buffer has {size} bytes.* needs {room}"):
            vectors.plan_of("cpu")


def test_a_plan_that_fails_leaves_the_vectors_of_the_last() -> None:
    vectors = Vectors(5, "ragged")
    want = vectors.plan_of("cpu")
    for batch in (2, 3000):
        with pytest.raises(ValueError, match="backend"):
            Vectors(batch, "ragged", wrapper=vectors.wrapper).plan_of("cpu", q_data_type=torch.float32)
        assert vectors.wrapper._kv_indptr_buf.tolist() == vectors.given[1].tolist()
    assert_bitwise(vectors.run(), want)


def test_a_tensor_of_the_vectors_is_that_of_the_present_plan() -> None:
    """They lie in the int workspace, as the tile list does."""
    vectors = Vectors(5, "ragged")
    vectors.plan_of("cpu")
    place, workspace = vectors.wrapper._kv_indptr_buf, vectors.wrapper._int_workspace_buffer
    assert workspace.data_ptr() <= place.data_ptr() < workspace.data_ptr() + workspace.nbytes
