"""Prefill over ranks: every layout and method against the oracle."""

from __future__ import annotations

import itertools
from typing import Any

import cp_calls
import pytest
import torch
from cp_checks import check_prefill

from cutlass_kernels import distributed

pytestmark = pytest.mark.runs_nothing("ranks are other processes")

LENGTHS = {
    "one": ([96], [96]),
    "unequal": ([70, 1, 0, 33, 128], [70, 1, 0, 33, 128]),
    "appends": ([20, 5, 64], [100, 37, 64]),
    "few": ([2, 1], [2, 1]),  # fewer tokens than ranks have parts
}
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(17, -1)),
    "both_sides": dict(window=(9, 4)),
    "to_the_left": dict(window=(9, -1)),
    "chunks": dict(causal=True, chunk_size=24),
    "window_and_chunks": dict(causal=True, window=(7, -1), chunk_size=24),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "zigzag": {},
    "contiguous": dict(layout="contiguous"),
    "interleaved": dict(layout="interleaved", block_size=8),
}


def check(
    processes: Any, shape: int | tuple[int, int], lengths: str, options: dict[str, Any], pages: int = 0, **more: Any
) -> None:
    q_lens, kv_lens = LENGTHS[lengths]
    head_groups = 1 + len(q_lens) % 2  # groups of heads, one after another
    problem = dict(q_lens=q_lens, kv_lens=kv_lens, heads=(4, 2, 64), dtype=torch.float16, head_groups=head_groups)
    check_prefill(processes, shape, problem | more, options, pages)


CASES = [
    pytest.param(lengths, mask, layout, id=f"{lengths}-{mask}-{layout}")
    for lengths, mask, layout in itertools.product(LENGTHS, MASKS, LAYOUTS)
]


@pytest.mark.parametrize("lengths, mask, layout", CASES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_allgather(processes, world, lengths, mask, layout):
    check(processes, world, lengths, dict(comm="allgather", **MASKS[mask], **LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("lengths", ["one", "unequal", "few"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_ring(processes, world, lengths, mask, layout):
    check(processes, world, lengths, dict(comm="ring", **MASKS[mask], **LAYOUTS[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", [2, 4, (2, 2)], ids=["2", "4", "2x2"])
def test_ulysses(processes, shape, lengths, mask, layout):
    comm = "ulysses" if isinstance(shape, int) else "hybrid"
    check(processes, shape, lengths, dict(comm=comm, **MASKS[mask], **LAYOUTS[layout]))


@pytest.mark.parametrize(
    "comm, shape", [("allgather", 2), ("ring", 2), ("ulysses", 2), ("hybrid", (2, 2)), ("ring", (2, 2))]
)
def test_options(processes, comm, shape):
    """Sinks count once; caps. (Scales: test_cp_random.py.)"""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    check(processes, shape, "unequal", dict(comm=comm, causal=True, sinks=sinks, logits_soft_cap=8.0))


# Segments of fewer rows that see keys than of those that see none.
UNEVEN: dict[str, tuple[int, list[int], dict[str, Any]]] = {
    "interleaved": (2, [522], dict(layout="interleaved", block_size=256)),
    "zigzag": (3, [771, 5], {}),
    "contiguous": (4, [3, 1030], dict(layout="contiguous")),
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("comm", ["allgather", "ring"])
def test_segments_that_see_nothing(processes, comm, name):
    world, lens, layout = UNEVEN[name]
    options = dict(comm=comm, causal=True, **layout)
    check(processes, world, "one", options, q_lens=lens, kv_lens=lens, head_groups=1 + len(lens) % 2)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [2, (2, 1)], ids=["2", "2x1"])
def test_without_symmetric_memory(nccl, shape, layout, mask):
    """Keys travel as messages of NCCL."""
    comm = "allgather" if shape == 2 else "hybrid"
    check(nccl, shape, "unequal", dict(comm=comm, **MASKS[mask], **LAYOUTS[layout]), messages=True)


@pytest.mark.parametrize("chosen", ["allgather", "ring", "ulysses"])
def test_auto_runs_what_the_model_chooses(processes, chosen):
    check(processes, 2, "unequal", dict(comm="auto", causal=True), chosen=chosen)


@pytest.mark.parametrize("lengths", ["appends", "unequal"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(processes, layout, lengths):
    check(processes, 2, lengths, dict(causal=True, **LAYOUTS[layout]), pages=5)


def test_places_of_a_rank_that_there_is_not():
    for function in (distributed.cp_positions, distributed.cp_indices):
        with pytest.raises(ValueError, match="rank=2 is not one of the 2 ranks"):
            function([8, 4], 2, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [[96], [70, 1, 0, 33, 128], [2, 1], []], ids=str)
@pytest.mark.parametrize("shape", [2, 3, 4, (2, 2)], ids=["2", "3", "4", "2x2"])
def test_split_and_restore(processes, shape, lengths, layout):
    assert all(processes.run(cp_calls.restored, shape, lengths, LAYOUTS[layout]))


@pytest.mark.gpu
@pytest.mark.parametrize("pages", [0, 16])
@pytest.mark.parametrize("comm, shape", [("allgather", 2), ("ring", 2), ("ulysses", 2), ("hybrid", (2, 1))])
def test_replayed(nccl, shape, comm, pages):
    assert all(nccl.run(cp_calls.replayed_prefill, shape, pages, dict(comm=comm)))
