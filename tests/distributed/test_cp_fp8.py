"""Queries, keys and caches of 8 bits over ranks, with factors for requests and heads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cp_checks import check_decode, check_prefill

pytestmark = pytest.mark.runs_nothing("ranks are other processes")

E4M3 = torch.float8_e4m3fn
TYPES: dict[str, dict[str, Any]] = {
    "fp8": dict(dtype=E4M3, kv_dtype=E4M3),
    "fp8_cache": dict(dtype=torch.float16, kv_dtype=E4M3),
}
LENS = [70, 1, 0, 33, 128]
PREFILLS: dict[str, dict[str, Any]] = {
    "allgather": {},
    "allgather-interleaved": dict(layout="interleaved", block_size=4),  # more ranges than are copied one by one
    "ring": {},
    "ulysses": {},
}


def factors(types: str, requests: int, heads: int) -> dict[str, Any]:
    """One for each request and key head; of values, one row for all requests."""
    generator = torch.Generator().manual_seed(7)
    names = ["k_descale", "v_descale", *(["q_descale"] if types == "fp8" else [])]
    made = {name: torch.rand(requests, heads, generator=generator) + 0.5 for name in names}
    return made | {"v_descale": made["v_descale"][:1]}


@pytest.mark.parametrize("pages", [0, 5])
@pytest.mark.parametrize("method", PREFILLS)
@pytest.mark.parametrize("types", TYPES)
def test_prefill(processes, types, method, pages):
    problem = dict(q_lens=LENS, kv_lens=LENS, heads=(4, 2, 64), head_groups=2, **TYPES[types])
    options = dict(comm=method.split("-")[0], causal=True, **PREFILLS[method], **factors(types, len(LENS), 2))
    check_prefill(processes, 2, problem, options, pages)


@pytest.mark.parametrize("comm", ["auto", "a2a", "ag_rs"])
@pytest.mark.parametrize("form", ["pages", "dense"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("types", TYPES)
def test_decode(processes, types, rows, form, comm):
    problem = dict(q_lens=[rows] * 4, kv_lens=[57, 3, 200, 4], heads=(8, 2, 64), **TYPES[types])
    options = dict(comm=comm, block_size=4, lse_base=math.e, **factors("fp8_cache", 4, 2))
    check_decode(processes, 2, problem, options, form)
