"""Results are the same bits on every repeat, whatever else a GPU does."""

from __future__ import annotations

from typing import Any

import cp_repeats
import pytest
import torch
from ranks import world_of

pytestmark = pytest.mark.runs_nothing("ranks are other processes")

# On the CPU, of a size that takes milliseconds; on the GPU, of several tiles, splits and copies.
PROBLEMS: dict[str, dict[str, Any]] = {
    "cpu": dict(q_lens=[70, 1, 0, 33, 128], heads=(4, 2, 64)),
    "cuda": dict(q_lens=[3000, 1, 0, 777, 5000], heads=(16, 4, 128)),
}
CACHES: dict[str, list[int]] = {"cpu": [57, 3, 200, 4], "cuda": [30000, 3, 12345, 700]}
METHODS: list[tuple[str, int | tuple[int, int], int]] = [  # and groups of heads, one after another
    ("allgather", 2, 1),
    ("allgather", 2, 2),
    ("ring", 2, 1),
    ("ring", 3, 1),
    ("ulysses", 2, 1),
    ("hybrid", (2, 2), 2),
]


def check(processes: Any, shape: int | tuple[int, int], name: str, *args: Any) -> None:
    times = 3 if processes.device == "cpu" else 10
    assert processes.run(cp_repeats.differing, shape, times, name, *args) == [[]] * world_of(shape)


@pytest.mark.parametrize("layout", ["zigzag", "interleaved"])
@pytest.mark.parametrize("comm, shape, head_groups", METHODS)
def test_prefill(processes, shape, comm, layout, head_groups):
    problem = PROBLEMS[processes.device] | dict(dtype=torch.float16, head_groups=head_groups)
    problem["kv_lens"] = problem["q_lens"]
    check(processes, shape, "prefill", problem, dict(comm=comm, layout=layout, block_size=16, causal=True))


@pytest.mark.parametrize("comm", ["auto", "a2a", "ag_rs", "symmetric"])
@pytest.mark.parametrize("rows", [1, 3])
def test_decode(processes, rows, comm):
    lens = CACHES[processes.device]
    problem = dict(q_lens=[rows] * len(lens), kv_lens=lens, heads=(12, 2, 64), dtype=torch.float16)
    check(processes, 2, "decode", problem, dict(comm=comm, block_size=4), "pages")


@pytest.mark.parametrize("comm", ["auto", "a2a", "ag_rs", "symmetric"])
@pytest.mark.parametrize("scatter_heads", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_combine(processes, world, scatter_heads, comm):
    check(processes, world, "combine", (64, 12, 128), dict(comm=comm, scatter_heads=scatter_heads))
