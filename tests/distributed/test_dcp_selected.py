"""Decode steps of latent attention (MLA) by lists of selected tokens, over caches that are spread over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cp_compiled
import cp_selected
import pytest
import torch
from compare import assert_close, assert_lse_close

pytestmark = pytest.mark.runs_nothing("ranks are other processes")
SCALE = 192**-0.5
LISTS = ["any", "none", "one", "rank 1", "all"]


def check(
    processes: Any,
    problem: dict[str, Any],
    options: dict[str, Any],
    function: Callable[..., Any] = cp_selected.decode,
) -> None:
    """All ranks together give what the oracle gives over all tokens."""
    given = {"sm_scale": SCALE} | options
    states = processes.run(function, problem["shard"][0], problem, given)
    want, want_lse, base = cp_selected.make(problem).expected(sm_scale=given["sm_scale"], sinks=options.get("sinks"))
    found = [(out.flatten(0, -3), lse.flatten(0, -2)) for out, lse in states]
    if options.get("gather_heads", True) and options.get("scatter_heads", True):
        found = [tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))]
    for out, lse in found:
        assert_close(out, want, base, dtype=torch.bfloat16)
        assert_lse_close(lse * math.log2(options.get("lse_base", 2)), want_lse)


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 9, 12)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("block", [1, 8, 16])
@pytest.mark.parametrize("world", [2, 4])
def test_decode(processes, world, block, sinks, compact):
    """Lists of any tokens, none, duplicates, and of one rank alone; ranks without a token of a request."""
    problem = dict(kv_lens=[150, 3, 64], rows=15, width=40, shard=(world, block), lists=LISTS, compact=compact)
    check(processes, problem | dict(lengths=compact), dict(sinks=sinks))


@pytest.mark.parametrize("options", [dict(comm="ag_rs", lse_base=math.e), dict(gather_heads=False)], ids=str)
@pytest.mark.parametrize("form", ["any_order", "by_request", "in_order"])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_of_requests(processes, world, form, options):
    """In any order, as rows of requests ``[B, n, heads, D]``, or one request after the other."""
    problem = dict(kv_lens=[70, 0, 33], rows=6, width=30, shard=(world, 1), lists=LISTS, lengths=True, seed=2)
    check(processes, problem | {form: True}, options)


@pytest.mark.parametrize("options", [{}, dict(scatter_heads=False, lse_base=math.e, comm="a2a")], ids=str)
def test_two_calls(processes, options):
    problem = dict(kv_lens=[150, 3], rows=8, width=40, shard=(4, 16), lists=LISTS, lengths=True, seed=3)
    check(processes, problem, dict(options, sinks=torch.linspace(-2, 9, 12)), cp_selected.decode_in_two_calls)


@pytest.mark.parametrize("kind", [dict(lists=["none"]), dict(width=0)], ids=str)
@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 9, 12)], ids=["no sinks", "sinks"])
def test_rows_that_see_no_token_on_any_rank(processes, sinks, kind):
    check(processes, dict(kv_lens=[20], rows=2, width=9, shard=(2, 1)) | kind, dict(sinks=sinks))


@pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
@pytest.mark.parametrize("world", [2, 4])
def test_quantized_caches(processes, world):
    problem = dict(kv_lens=[50, 9], rows=4, width=30, shard=(world, 1), lists=LISTS, quantized=True, lengths=True)
    check(processes, problem, {})
    check(processes, problem, dict(kv_format="v3.2"))


@pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
@pytest.mark.parametrize("world", [2, 4])
def test_a_second_cache_that_every_rank_stores(processes, world):
    """As the window of DeepSeek V4: listed by one rank, it counts once. The sink does, too."""
    problem = dict(kv_lens=[50, 9], rows=4, width=30, shard=(world, 4), lists=LISTS, window=20, lengths=True)
    check(processes, problem, dict(sinks=torch.linspace(-2, 3, 12)))


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(block_size=4), "block_size=4 is given with kv_indices_per_token"),
        (dict(window=(5, -1)), "window=\\(5, -1\\) is given with kv_indices_per_token"),
        (dict(seqused_k=torch.tensor([40], dtype=torch.int32)), "seqused_k=.* is given with kv_indices_per_token"),
        (dict(cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32)), "cu_seqlens_q=.* is given with kv_indices_per_to"),
        (dict(page_table=torch.zeros(1, 2, dtype=torch.int32)), "page_table=.* is given with kv_indices_per_token"),
        (dict(kv_format="v3"), "kv_format='v3' is unknown"),
        (dict(extra_topk_length=torch.tensor([1], dtype=torch.int32)), "extra_topk_length is given without extra_k"),
    ],
    ids=str,
)
def test_refusals(processes, options, told):
    """On all ranks alike: none is left waiting."""
    processes.refuses(told, cp_selected.refused, 2, options)


def test_lists_on_one_rank_alone(processes):
    processes.refuses("Ranks disagree on the cache", cp_selected.differs, 2)


def test_compiled(processes):
    assert set(processes.run(cp_compiled.selected_step, 2)) == {None}


@pytest.mark.gpu
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("comm", ["a2a", "ag_rs", "symmetric"])
def test_replayed_steps(nccl, comm, compact):
    assert all(nccl.run(cp_selected.replayed, 2, comm, compact))
