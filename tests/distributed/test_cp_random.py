"""Random calls over ranks against the oracle: lengths, masks, heads, layouts and methods in any combination."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from cp_checks import check_decode, check_prefill
from plan_free_problems import Mask
from ranks import world_of

pytestmark = pytest.mark.runs_nothing("ranks are other processes")

HEADS = [(1, 1), (8, 1), (4, 4), (4, 2), (6, 2), (16, 4), (12, 4), (8, 8)]  # groups of 1, 2, 3, 4 and 8
DTYPES = [torch.float16, torch.bfloat16]
SHAPES: list[int | tuple[int, int]] = [1, 2, 3, 4, (2, 2)]


def shape_of(rng: random.Random, processes: Any, shapes: list[Any]) -> Any:
    """Ranks of a group or a mesh, as far as there are GPUs."""
    return rng.choice([x for x in shapes if world_of(x) <= processes.world])


def options_of(rng: random.Random, heads: tuple[int, int], requests: int) -> dict[str, Any]:
    """Of both functions."""
    given: dict[str, Any] = dict(lse_base=rng.choice([2, math.e]))
    if rng.random() < 0.3:
        given["logits_soft_cap"] = rng.choice([2.0, 20.0])
    if rng.random() < 0.3:
        given["sinks"] = torch.tensor([rng.uniform(-3, 3) for _ in range(heads[0])])
    if rng.random() < 0.3:
        given["sm_scale"] = 0.2
    if rng.random() < 0.2:
        rows = torch.tensor([[rng.uniform(0.5, 1.5) for _ in range(heads[1])] for _ in range(requests)])
        given["k_descale"], given["v_descale"] = rows, rows.flip(0)
    return given


def mask_of(rng: random.Random) -> Mask:
    some, other = rng.choice([0, 1, 7, 64]), rng.choice([0, 3, 33])
    return rng.choice(
        [
            Mask(),
            Mask(causal=True),
            Mask(causal=True),
            Mask(causal=True, window=(some, -1)),
            Mask(window=(some, other)),
            Mask(window=(some, -1)),
            Mask(window=(-1, other)),
            Mask(causal=True, chunk_size=some + 1),
            Mask(causal=True, window=(some, -1), chunk_size=other + 1),
        ]
    )


@pytest.mark.parametrize("seed", range(80))
def test_prefill(processes, seed):
    rng = random.Random(seed)
    shape = shape_of(rng, processes, SHAPES)
    heads, mask, longest = rng.choice(HEADS), mask_of(rng), rng.choice([1, 3, 17, 70, 150])
    q_lens = [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(rng.choice([1, 2, 5]))]
    kv_lens = q_lens
    if rng.random() < 0.4:  # rows stand last; where they are more than keys, the first ones see none
        kv_lens = [max(n + rng.choice([0, 1, -2, rng.randint(0, 100)]), 0) for n in q_lens]
    inner = shape if isinstance(shape, int) else shape[1]
    shares = heads[0] % inner == 0 and (heads[1] % inner == 0 or inner % heads[1] == 0)
    rings = kv_lens == q_lens and mask in (Mask(), Mask(causal=True))
    if isinstance(shape, int):
        comms = ["auto", "allgather", *["ring"] * rings, *["ulysses"] * shares]
    else:
        comms = ["auto", "hybrid", *["ring"] * rings] if shares else []
    if not comms:
        return
    given = options_of(rng, heads, len(q_lens)) | dict(comm=rng.choice(comms), batch_invariant=rng.random() < 0.2)
    given |= dict(layout=rng.choice(["zigzag", "contiguous", "interleaved"]), block_size=rng.choice([1, 3, 16]))
    pages = rng.choice([0, 0, 1, 5, 16])
    if pages:
        given["kv_layout"] = rng.choice(["NHD", "HND"])
    dims = rng.choice([(64, 64), (64, 64), (128, 128), (128, 64)])
    problem = dict(q_lens=q_lens, kv_lens=kv_lens, heads=(*heads, dims[0]), head_dim_vo=dims[1])
    problem |= dict(dtype=rng.choice(DTYPES), head_groups=rng.choice([1, 2, 3]))
    options = given | dict(causal=mask.causal, window=mask.window, chunk_size=mask.chunk_size)
    check_prefill(processes, shape, problem, options, pages)


@pytest.mark.parametrize("seed", range(60))
def test_decode(processes, seed):
    """Requests without keys, and of fewer keys than rows: their first rows see none."""
    rng = random.Random(1000 + seed)
    world = shape_of(rng, processes, [1, 2, 3, 4])
    heads = rng.choice(HEADS)
    rows = rng.choice([1, 1, 2, 4])
    lens = [rng.choice([0, 1, rng.randint(0, 150)]) for _ in range(rng.choice([1, 2, 5]))]
    gather = heads[0] % world == 0 and rng.random() < 0.7
    given = options_of(rng, heads, len(lens))
    given |= dict(comm=rng.choice(["auto", "a2a", "ag_rs"]), gather_heads=gather, block_size=rng.choice([1, 4]))
    given["kv_layout"] = rng.choice(["NHD", "HND"])
    problem = dict(q_lens=[rows] * len(lens), kv_lens=lens, heads=(*heads, 64), dtype=rng.choice(DTYPES), page_size=4)
    check_decode(processes, world, problem, given, rng.choice(["pages", "dense"]))
