"""Latent attention (MLA) over keys that are spread over ranks: partial results of 512 columns, and what they make."""

from __future__ import annotations

import math
from typing import Any

import cp_calls
import cp_compiled
import pytest
import torch
from compare import assert_close, assert_lse_close
from cp_checks import check_decode
from plan_free_problems import Mask, Options, expect, keys
from problems import Batch

import cutlass_kernels as ck

PROBLEM = dict(
    q_lens=[1, 1, 3, 1], kv_lens=[57, 1, 200, 3], heads=(12, 1, 576), dtype=torch.bfloat16, page_size=16, latent=()
)
OTHERS = {"comm": "ag_rs", "lse_base": math.e}


@pytest.mark.runs_nothing("ranks are other processes")
@pytest.mark.parametrize("separate", [(), ("q", "k")], ids=["one cache", "two caches"])
@pytest.mark.parametrize("options", [{}, OTHERS, {"scatter_heads": False}], ids=str)
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("world", [2, 3])
def test_decode(processes: Any, world: int, block: int, options: dict[str, Any], separate: tuple[str, ...]) -> None:
    options, problem = dict(options, block_size=block), PROBLEM | dict(latent=separate)
    check_decode(processes, world, problem, options, function=cp_calls.decode_in_two_calls)


@pytest.mark.runs_nothing("ranks are other processes")
@pytest.mark.parametrize("separate", [(), ("q",), ("k",), ("q", "k")], ids=["one tensor", "q", "k", "both"])
@pytest.mark.parametrize("options", [{}, OTHERS, {"gather_heads": False}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_decode_in_one_call(processes: Any, world: int, options: dict[str, Any], separate: tuple[str, ...]) -> None:
    check_decode(processes, world, PROBLEM | dict(latent=separate), dict(options, block_size=16))


@pytest.mark.runs_nothing("ranks are other processes")
def test_compiled(processes: Any) -> None:
    assert set(processes.run(cp_compiled.latent_step, 2)) == {None}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("block", [1, 16])
def test_partial_results_of_shards_merge(world: int, block: int) -> None:
    """In one process, with merge_states()."""
    batch = cp_calls.batch_of(PROBLEM)
    outs, lses = [], []
    for rank in range(world):
        at, counts = cp_calls.held_by(batch.kv_lens, rank, world, block)
        part = Batch(batch.qo_lens, counts, batch.q, batch.k[at], batch.k[at][..., :512])
        k, _, given = keys(part, "table", "NHD", 16, False)
        given["seqused_k"] = torch.tensor(batch.kv_lens, dtype=torch.int32)
        rows = dict(cu_seqlens_q=batch.qo_indptr("cpu"), causal=True, return_lse=True)
        out, lse = ck.attention(batch.q, k, k[..., :512], kv_shard=(world, rank, block), **rows, **given)
        outs.append(out)
        lses.append(lse)
    merged, merged_lse = ck.merge_states(torch.stack(outs, 1), torch.stack(lses, 1))
    want, want_lse, base = expect(batch, Mask(causal=True), Options())
    assert_close(merged, want, base)
    assert_lse_close(merged_lse, want_lse)
