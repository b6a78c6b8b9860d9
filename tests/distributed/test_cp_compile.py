"""torch.compile(fullgraph=True) around calls of process groups: one operator in a graph, results as in eager calls."""

from __future__ import annotations

import math
import shutil
from typing import Any

import cp_compiled
import pytest
import torch

pytestmark = pytest.mark.runs_nothing("ranks are other processes")


def check(processes: Any, *args: Any, shape: int | tuple[int, int] = 2) -> None:
    assert set(processes.run(args[0], shape, *args[1:])) == {None}


PREFILLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "contiguous": dict(layout="contiguous", causal=True, return_lse=True, lse_base=math.e),
    "interleaved": dict(layout="interleaved", block_size=4, comm="ring", return_lse=True),
    "ulysses": dict(comm="ulysses", causal=True, window=(7, -1)),
    "tensors": dict(
        seqlens=torch.tensor(cp_compiled.LENS),
        sinks=torch.tensor([0.0, 1.0, -1.0, 2.0]),
        k_descale=torch.tensor(0.5),
        v_descale=2.0,
        logits_soft_cap=4.0,
        sm_scale=0.2,
        o_dtype=torch.bfloat16,
    ),
}


@pytest.mark.parametrize("options", PREFILLS.values(), ids=PREFILLS)
def test_prefill(processes, options):
    check(processes, cp_compiled.prefill, options)


@pytest.mark.parametrize("shape", [3, 4, (2, 2)], ids=str)
def test_prefill_of_more_ranks(processes, shape):
    if shape == (2, 2) and torch.__version__ < "2.5":
        pytest.skip("torch 2.4 cannot compile calls with a mesh of two dimensions: torch 2.5 and newer can")
    check(processes, cp_compiled.prefill, dict(causal=True, return_lse=True), shape=shape)


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(return_lse=True, lse_base=math.e, comm="ag_rs", max_seqlen_k=48),
        dict(gather_heads=False, comm="a2a", sinks=torch.tensor([1.0, -1.0, 0.0, 0.5]), k_descale=torch.tensor(0.5)),
    ],
    ids=["plain", "lse", "all_heads"],
)
def test_decode(processes, options):
    check(processes, cp_compiled.decode, options)


@pytest.mark.parametrize("comm", ["auto", "a2a", "ag_rs", pytest.param("symmetric", marks=pytest.mark.gpu)])
def test_combine(processes, comm):
    for options in ({}, dict(scatter_heads=False, return_lse=True), dict(lse_base=math.e, return_lse=True)):
        check(processes, cp_compiled.combine, dict(comm=comm, **options))


INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=INDUCTOR)])
def test_independent_calls_keep_their_order(processes, backend):
    check(processes, cp_compiled.layers, backend)


def test_new_lengths(processes):
    check(processes, cp_compiled.new_lengths)


def test_a_fault_is_raised_on_every_rank(processes):
    processes.refuses("2 ranks cannot share 3 heads evenly", cp_compiled.faulty, 2)


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("name", ["prefill", "decode", "combine"])
def test_there_is_no_backward(processes, name, compiles):
    processes.refuses("forward only", cp_compiled.gradient, 2, name, compiles)


def test_fake_tensors(processes):
    processes.run(cp_compiled.shapes, 2)


@pytest.mark.gpu
def test_reduced_overhead(nccl):
    check(nccl, cp_compiled.replayed)
