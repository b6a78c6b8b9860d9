"""dcp_local_indices(): lists of tokens that are spread over ranks, as lists of what one of them stores."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from captures import no_waiting
from mla_problems import DEVICES
from refusals import Row, rows

from cutlass_kernels.distributed import dcp_local_indices, dcp_local_lengths

INT32 = torch.int32


def int32(x: Any, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(x, dtype=INT32, device=device)


@dataclass
class Layout:
    """Blocks of tokens, of which a rank stores every ``world``-th, and a rank's pages of each request, or None."""

    world: int
    block: int
    page_size: int
    table: list[list[int]] | None

    def slot(self, rank: int, request: int, token: int) -> int:
        if token < 0 or token // self.block % self.world != rank:
            return -1
        local = token // (self.block * self.world) * self.block + token % self.block
        if self.table is None:
            return local
        pages = self.table[request] if 0 <= request < len(self.table) else []
        page = pages[local // self.page_size] if local // self.page_size < len(pages) else -1
        return page * self.page_size + local % self.page_size if page >= 0 else -1


@DEVICES
@pytest.mark.parametrize("seed", range(60))
def test_random_lists(device, seed):
    rng = random.Random(seed)
    layout = Layout(rng.choice([1, 2, 3, 8]), rng.choice([1, 2, 16, 64, 5]), rng.choice([1, 16, 64, 7]), None)
    requests, each, heads, width = rng.choice([1, 3]), rng.choice([1, 4]), rng.choice([0, 1, 2]), rng.choice([0, 1, 99])
    columns, count = rng.choice([1, 9]), requests * each
    most = layout.world * columns * layout.page_size
    numbers = [-1, -(2**31), 2**31 - 1, most, most + 1]
    lists = [
        [rng.choice(numbers) if rng.random() < 0.2 else rng.randrange(most) for _ in range(width)]
        for _ in range(count * max(heads, 1))
    ]
    owners, lengths = [i // each for i in range(count)], [width] * count
    given: dict[str, Any] = dict(block_size=layout.block)
    if rng.random() < 0.8:
        layout.table = [[rng.choice([-1, 0, 1, 2000]) for _ in range(columns)] for _ in range(requests)]
        given |= dict(page_table=int32(layout.table, device), page_size=layout.page_size)
        if rng.random() < 0.5:
            owners = [rng.randrange(-1, requests + 1) for _ in range(count)]
            given["batch_indices"] = int32(owners, device)
    if rng.random() < 0.5:
        lengths = [rng.randint(0, width) for _ in range(count)]
        given["topk_length"] = int32(lengths, device)
    indices = int32(lists, device).view(count, *[heads] * (heads > 0), width)
    for rank in {0, layout.world - 1, rng.randrange(layout.world)}:
        want, most_of_row = [], [0] * count
        for i, tokens in enumerate(lists):
            row = i // max(heads, 1)
            seen = [x if j < lengths[row] else -1 for j, x in enumerate(tokens)]
            want.append([layout.slot(rank, owners[row], token) for token in seen])
            most_of_row[row] = max(most_of_row[row], sum(x >= 0 for x in want[-1]))
        with no_waiting(device != "cpu"):
            kept = dcp_local_indices(indices, rank, layout.world, compact=False, **given)
            slots, counts = dcp_local_indices(indices, rank, layout.world, **given)
        assert kept.dtype == slots.dtype == counts.dtype == INT32 and kept.shape == slots.shape == indices.shape
        assert kept.flatten(0, -2).tolist() == want and counts.tolist() == most_of_row
        assert slots.flatten(0, -2).tolist() == [sorted(x, key=lambda slot: slot < 0) for x in want]  # is stable


@pytest.mark.parametrize("block", [1, 4])
def test_counts_are_those_of_dcp_local_lengths(block):
    """And the ranks' lists together are the whole list."""
    tokens, world = 50, 3
    every = torch.arange(tokens, dtype=INT32).view(1, -1)
    kept = [dcp_local_indices(every, rank, world, block_size=block, compact=False) for rank in range(world)]
    assert (torch.stack(kept) >= 0).sum(0).eq(1).all()
    for rank in range(world):
        slots, count = dcp_local_indices(every, rank, world, block_size=block)
        held = int(dcp_local_lengths(torch.tensor([tokens]), rank, world, block_size=block))
        assert count.tolist() == [held] and slots[0, :held].tolist() == list(range(held))


def test_nothing_to_look_up():
    empty = torch.zeros(0, 7, dtype=INT32)
    slots, counts = dcp_local_indices(empty, 0, 2, page_table=torch.zeros(0, 3, dtype=INT32), page_size=4)
    assert slots.shape == (0, 7) and counts.shape == (0,)
    slots, counts = dcp_local_indices(int32([[0, 1]]), 0, 2, page_table=torch.zeros(1, 0, dtype=INT32), page_size=4)
    assert slots.tolist() == [[-1, -1]] and counts.tolist() == [0]


REFUSED: list[Row] = [
    *rows(
        ValueError, r"indices has shape \(2, 3\) and dtype torch.int64: it must be", indices=torch.zeros(2, 3).long()
    ),
    *rows(ValueError, r"indices has shape \(3,\)", indices=torch.zeros(3, dtype=INT32)),
    *rows(TypeError, "indices=.* pass a tensor", indices=[[1]]),
    *rows(ValueError, "rank=2 must lie between 0 and world - 1, with world=2", rank=2),
    *rows(ValueError, "rank=-1 must lie", rank=-1),
    *rows(TypeError, "rank=0.5 is of type float", rank=0.5),
    *rows(ValueError, "block_size=0 must be a positive number", block_size=0),
    *rows(TypeError, "compact='no'", compact="no"),
    *rows(ValueError, r"topk_length has shape \(3,\)", topk_length=torch.zeros(3, dtype=INT32)),
    *rows(ValueError, r"topk_length has .*dtype torch.int64", topk_length=torch.zeros(2).long()),
    (dict(page_table=None), ValueError, "page_size is given without page_table"),
    (dict(page_table=None, page_size=None), ValueError, "batch_indices is given without page_table"),
    *rows(ValueError, "page_table is given without page_size", page_size=None),
    *rows(ValueError, "page_size=0 must be positive", page_size=0),
    *rows(ValueError, r"page_table has shape \(4,\)", page_table=torch.zeros(4, dtype=INT32)),
    *rows(ValueError, r"page_table has .*dtype torch.float32", page_table=torch.zeros(1, 4)),
    *rows(ValueError, r"batch_indices has shape \(1,\)", batch_indices=torch.zeros(1, dtype=INT32)),
    *rows(ValueError, "indices has 2 rows and page_table 4 requests", batch_indices=None),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_refusals(change, error, words):
    given: dict[str, Any] = dict(indices=torch.zeros(2, 3, dtype=INT32), rank=1, world=2, page_size=16)
    given |= dict(page_table=torch.zeros(4, 4, dtype=INT32), batch_indices=torch.zeros(2, dtype=INT32))
    with pytest.raises(error, match=words):
        dcp_local_indices(**given | change)
