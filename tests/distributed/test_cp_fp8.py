"""Queries, keys and caches of 8 bits over ranks, with factors for requests and heads."""

from __future__ import annotations

import math
from typing import Any

import cp_calls
import pytest
import torch
from compare import assert_close, assert_lse_close
from plan_free_problems import Mask, Options, expect

pytestmark = pytest.mark.runs_nothing("ranks are other processes")

E4M3 = torch.float8_e4m3fn
TYPES = {"fp8": (E4M3, E4M3), "fp8_cache": (torch.float16, E4M3)}
LENS = [70, 1, 0, 33, 128]
PREFILLS: dict[str, dict[str, Any]] = {
    "allgather": {},
    "allgather-interleaved": dict(layout="interleaved", block_size=4),  # more ranges than are copied one by one
    "ring": {},
    "ulysses": {},
}


def problem_of(types: str, q_lens: list[int], kv_lens: list[int], heads: tuple[int, int, int]) -> dict[str, Any]:
    dtype, kv_dtype = TYPES[types]
    return dict(q_lens=q_lens, kv_lens=kv_lens, heads=heads, dtype=dtype, kv_dtype=kv_dtype, head_groups=2)


def factors(types: str, requests: int, heads: int) -> dict[str, Any]:
    """One for each request and key head; of values, one row for all requests."""
    generator = torch.Generator().manual_seed(7)
    names = ["k_descale", "v_descale", *(["q_descale"] if types == "fp8" else [])]
    made = {name: torch.rand(requests, heads, generator=generator) + 0.5 for name in names}
    return made | {"v_descale": made["v_descale"][:1]}


def check(out: torch.Tensor, lse: torch.Tensor, want: tuple[torch.Tensor, ...], rows: Any, types: str) -> None:
    exact, exact_lse, base = (x[rows] for x in want)
    if types == "fp8":  # as the tests of attention() on one device
        assert_close(out, exact, atol=0.12, rtol=0.12, dtype=torch.bfloat16)
    else:
        assert_close(out, exact, base, dtype=torch.float16)
    assert_lse_close(lse / math.log(2), exact_lse, atol=5e-3)


@pytest.mark.parametrize("pages", [0, 5])
@pytest.mark.parametrize("method", PREFILLS)
@pytest.mark.parametrize("types", TYPES)
def test_prefill(processes, types, method, pages):
    problem = problem_of(types, LENS, LENS, (4, 2, 64))
    descales = factors(types, len(LENS), 2)
    options = dict(comm=method.split("-")[0], causal=True, **PREFILLS[method], **descales)
    want = expect(
        cp_calls.batch_of(problem),
        Mask(causal=True),
        Options(descales=descales | {"v_descale": descales["v_descale"][0]}),
    )
    for out, lse, rows in processes.run(cp_calls.prefill, 2, problem, options, pages):
        check(out, lse, want, rows, types)


@pytest.mark.parametrize("comm", ["auto", "a2a", "ag_rs"])
@pytest.mark.parametrize("form", ["pages", "dense"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("types", TYPES)
def test_decode(processes, types, rows, form, comm):
    lens = [57, 3, 200, 4]
    problem = problem_of(types, [rows] * len(lens), lens, (8, 2, 64))
    descales = factors("fp8_cache", len(lens), 2)
    want = expect(
        cp_calls.batch_of(problem),
        Mask(causal=True),
        Options(descales=descales | {"v_descale": descales["v_descale"][0]}),
    )
    options = dict(comm=comm, block_size=4, lse_base=math.e, **descales)
    states = processes.run(cp_calls.decode, 2, problem, options, form)
    out, lse = (torch.cat(parts, 2).flatten(0, 1) for parts in zip(*states, strict=True))
    check(out, lse, want, slice(None), types)
