"""Latent attention (MLA) over keys that are spread over ranks: partial results of 512 columns, and what they make."""

from __future__ import annotations

import math
from typing import Any

import cp_latent
import pytest
import torch
from compare import assert_close, assert_lse_close
from plan_free_problems import Mask, Options, expect, keys
from ranks import Failed

import cutlass_kernels as ck

PROBLEM = ([1, 1, 3, 1], [57, 1, 200, 3], 12)


@pytest.mark.runs_nothing("ranks are other processes")
@pytest.mark.parametrize("separate", [False, True], ids=["one cache", "two caches"])
@pytest.mark.parametrize("options", [{}, {"comm": "ag_rs", "lse_base": math.e}, {"scatter_heads": False}], ids=str)
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("world", [2, 3])
def test_decode(processes: Any, world: int, block: int, options: dict[str, Any], separate: bool) -> None:
    if world > processes.world:
        pytest.skip(f"needs {world} GPUs, this machine has {processes.world}")
    want, want_lse, base = expect(cp_latent.batch_of(*PROBLEM), Mask(causal=True), Options())
    states = processes.run(cp_latent.decode, world, PROBLEM, block, options, separate)
    if options.get("scatter_heads", True):
        states = [tuple(torch.cat(parts, 1) for parts in zip(*states, strict=True))]
    for out, lse in states:
        assert_close(out, want, base)
        assert_lse_close(lse * math.log2(options.get("lse_base", 2)), want_lse)


@pytest.mark.runs_nothing("ranks are other processes")
@pytest.mark.parametrize("separate", [(), ("q",), ("k",), ("q", "k")], ids=["one tensor", "q", "k", "both"])
@pytest.mark.parametrize("options", [{}, {"comm": "ag_rs", "lse_base": math.e}, {"gather_heads": False}], ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_decode_in_one_call(processes: Any, world: int, options: dict[str, Any], separate: tuple[str, ...]) -> None:
    if world > processes.world:
        pytest.skip(f"needs {world} GPUs, this machine has {processes.world}")
    want, want_lse, base = expect(cp_latent.batch_of(*PROBLEM), Mask(causal=True), Options())
    states = processes.run(cp_latent.step, world, PROBLEM, 16, options, separate)
    if options.get("gather_heads", True):
        states = [tuple(torch.cat(parts, 1) for parts in zip(*states, strict=True))]
    for out, lse in states:
        assert_close(out, want, base)
        assert_lse_close(lse * math.log2(options.get("lse_base", 2)), want_lse)


@pytest.mark.runs_nothing("ranks are other processes")
@pytest.mark.parametrize(
    "what, told",
    [
        ("values", r"On rank {who}: k_rope is given, but v .* is not k in the same memory"),
        ("heads", r"On rank {who}: q_rope has shape .*, 6, 64\) and q .*, 8, 512\)"),
        ("dimensions", r"On rank {who}: q_rope has shape \(1, 4, 64\): it must be \[B, n, heads, D\]"),
        ("columns", r"On rank {who}: q has head_dim 544 and k 576"),
        ("keys", r"Ranks disagree on the cache: .*576.* on rank {who}\b"),
    ],
)
@pytest.mark.parametrize("who", [0, 1])
def test_all_ranks_raise_the_same_error(processes: Any, who: int, what: str, told: str) -> None:
    with pytest.raises(Failed, match=told.format(who=who)) as failed:
        processes.run(cp_latent.disagreeing_step, 2, who, what)
    assert len(set(failed.value.messages.values())) == 1


@pytest.mark.runs_nothing("ranks are other processes")
def test_compiled(processes: Any) -> None:
    assert set(processes.run(cp_latent.compiled_step, 2)) == {None}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("block", [1, 16])
def test_partial_results_of_shards_merge(world: int, block: int) -> None:
    """In one process, with merge_states()."""
    batch = cp_latent.batch_of(*PROBLEM)
    outs, lses = [], []
    for rank in range(world):
        at, counts = cp_latent.here(batch.kv_lens, rank, world, block)
        part = cp_latent.Batch(batch.qo_lens, counts, batch.q, batch.k[at], batch.k[at][..., :512])
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
