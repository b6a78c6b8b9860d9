"""Decode steps over caches that are spread over ranks."""

from __future__ import annotations

import math
from typing import Any

import cp_calls
import pytest
import torch
from cp_checks import check_decode

COMMS = ["auto", "a2a", "ag_rs", "symmetric"]
pytestmark = pytest.mark.runs_nothing("ranks are other processes")


def check(processes: Any, world: int, rows: list[int], lens: list[int], options: Any, form: str = "pages") -> None:
    problem = dict(q_lens=rows, kv_lens=lens, heads=(12, 2, 64), dtype=torch.float16)
    check_decode(processes, world, problem, options, form)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("form", ["pages", "dense"])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("rows, lens", [(1, [57, 1, 200, 3]), (3, [57, 3, 200, 4])])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_decode(processes, world, rows, lens, block_size, form, comm):
    """Also with ranks that hold nothing of a request."""
    check(processes, world, [rows] * len(lens), lens, dict(block_size=block_size, comm=comm), form)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("gather_heads", [False, True])
def test_options(processes, gather_heads, comm):
    sinks = torch.linspace(-2, 2, 12)
    options = dict(sinks=sinks, logits_soft_cap=5.0, gather_heads=gather_heads, comm=comm, block_size=4)
    check(processes, 2, [2, 2, 2], [33, 90, 2], options)


@pytest.mark.parametrize("gather_heads", [False, True])
@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("window", [-1, 9])
@pytest.mark.parametrize("world", [2, 3])
def test_new_tokens_of_any_number(processes, world, window, block_size, gather_heads):
    """A mixture of decodes, verifications and chunks; windows that some ranks have nothing of."""
    options = dict(block_size=block_size, window=(window, -1), gather_heads=gather_heads)
    check(processes, world, [1, 5, 0, 40, 2], [57, 5, 200, 64, 33], options)


@pytest.mark.parametrize("comm", COMMS)
@pytest.mark.parametrize("scatter_heads", [False, True])
@pytest.mark.parametrize("lse_base", [2, math.e])
@pytest.mark.parametrize("shape", [(7, 12, 64), (2, 3, 12, 128), (0, 12, 64)], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_combine(processes, world, shape, lse_base, scatter_heads, comm):
    options = dict(comm=comm, scatter_heads=scatter_heads, lse_base=lse_base)
    for rank, (out, lse, own, own_lse) in enumerate(processes.run(cp_calls.combine, world, shape, options)):
        lse = lse.double() * math.log(lse_base)
        total = lse.logsumexp(0)
        weight = torch.where(lse == -math.inf, 0, (lse - total).exp())[..., None]
        want = torch.where(weight == 0, 0, out.double() * weight).sum(0)
        if scatter_heads:
            want, total = want.chunk(world, -2)[rank], total.chunk(world, -1)[rank]
        assert own.dtype == torch.float16
        torch.testing.assert_close(own.double(), want, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(own_lse.double(), total / math.log(lse_base), atol=1e-4, rtol=1e-5)


def test_heads_that_ranks_cannot_share(processes):
    told = "2 ranks cannot share 3 heads evenly: pass scatter_heads=False"
    processes.refuses(told, cp_calls.combine, 2, (4, 3, 64), {})


def test_symmetric_memory_is_asked_for_on_the_cpu(gloo):
    gloo.refuses("comm='symmetric' needs 2 to 16 GPUs", cp_calls.combine, 2, (4, 4, 64), dict(comm="symmetric"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_calls_of_any_sizes_in_turn(nccl, world, dtype):
    """Two halves of one memory take turns, whatever the sizes; results are the same bits in every run."""
    assert all(nccl.run(cp_calls.exchanges, world, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("comm", COMMS[1:])
def test_replayed_steps(nccl, comm):
    """A captured decode step follows its tensors, and one that is not captured may come between."""
    assert all(nccl.run(cp_calls.replayed_decode, 2, comm))
