"""The tile of a problem: the one of the least estimated time, of all that may compute it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pairs import every
from problems import Options, make_batch
from targets import KERNELS
from test_kernels import check

import cutlass_kernels as ck

# One line per problem, with the microseconds of an H200 for each tile: a sample of what benchmarks/tile_times.py wrote.
MEASURED = json.loads((Path(__file__).parent / "tile_times.json").read_text())

# Rows and keys of requests.
LENGTHS = [([100], [1500]), ([300, 40, 301], [700, 700, 2000]), ([40, 0, 33], [4100, 5, 4000])]


def candidates(compute_capability: int = 90, multiprocessors: int = 132, **problem) -> list[dict]:
    from cutlass_kernels import _C

    names = ("backend", "dtype", "dtype", "heads", "kv_heads", "dim", "dim_vo", "requests")
    given = [problem[name] for name in names]
    tokens = [problem["requests"] * problem[name] for name in ("rows", "keys")]
    row = 256 if (problem["backend"], problem["dim"]) == ("fa2", 192) else problem["dim"]  # which serves it, padded
    kind = {"backend": problem["backend"], "q_dtype": problem["dtype"], "head_dim_qk": row}
    built = [kernel for kernel in _C.list_kernels() if kind.items() <= kernel.items()]
    if not any(compute_capability <= (kernel["max_compute_capability"] or compute_capability) for kernel in built):
        pytest.skip(f"this build has no kernel for {kind} on {compute_capability}")
    return _C.candidates(
        *given, *tokens, problem["causal"], problem["page_size"], compute_capability, multiprocessors,
        problem["alibi"], True,
    )  # fmt: skip


def taken(**problem) -> str:
    return next(c["name"] for c in candidates(**problem) if c["taken"])


def prompt(rows: int, heads: int, dim: int = 128, **others) -> dict:
    sizes = dict(rows=rows, keys=rows, heads=heads, kv_heads=heads, dim=dim, dim_vo=dim, requests=1)
    return dict(backend="fa3", dtype="bfloat16", causal=True, page_size=0, alibi=False) | sizes | others


@pytest.mark.parametrize("backend,capability,mean,most", [("fa2", 100, 1.02, 1.2), ("fa3", 90, 1.01, 1.4)])
def test_the_choice_is_near_the_fastest_tile(extension, backend, capability, mean, most):
    """fa2's tiles for prompts are not for 9.0 where fa3 is built: 10.0 has as much shared memory."""
    lost = []
    for problem in MEASURED:
        if problem["backend"] == backend:
            times = problem["us"]
            lost.append(times[taken(**problem, compute_capability=capability)] / min(times.values()))
    assert math.exp(sum(map(math.log, lost)) / len(lost)) < mean and max(lost) < most


def test_smaller_tiles_where_larger_ones_leave_sms_idle(extension):
    """H20, A100, H100 PCIe, H100 and H200, a device that does not exist yet."""
    for multiprocessors in (78, 108, 114, 132, 160):
        few, many = (128 * tiles for tiles in (multiprocessors // 2, 4 * multiprocessors))
        assert taken(**prompt(few, 1, keys=512, causal=False), multiprocessors=multiprocessors) == "small"
        assert taken(**prompt(many, 1, keys=512, causal=False), multiprocessors=multiprocessors) == "large"


def test_keys_are_split_where_rows_are_few(extension):
    found = {c["name"]: c for c in candidates(**prompt(64, 8, keys=32768))}
    assert found["packed"]["taken"] and found["packed"]["splits"] > 8 and found["large"]["splits"] == 1


def test_explained(extension):
    sizes = dict(compute_capability=90, q_dtype="bfloat16", num_qo_heads=32, num_kv_heads=8)
    explained = ck.explain(**sizes, features=["causal"], batch_size=4, qo_len=512, kv_len=8192)
    if explained.selected != "fa3":
        pytest.skip("fa3 is not built")
    assert {c.name for c in explained.candidates} == {"packed", "large", "small"}
    assert sum(c.taken for c in explained.candidates) == 1
    best = min(explained.candidates, key=lambda c: c.microseconds)
    assert best.taken and f"{best}" in str(explained) and f"{best}".endswith("taken")
    assert ck.explain(**sizes).candidates == ()
    decode = ck.explain(**sizes, batch_size=64, qo_len=1, kv_len=8192)
    assert (decode.selected, [str(c) for c in decode.candidates]) == ("fa2", ["decode, taken"])
    stats = ck.explain(**sizes, features=["causal", "stats"], qo_len=64, kv_len=32768)
    assert all(c.splits == 1 for c in stats.candidates)


@pytest.mark.parametrize(
    "lengths,words",
    [
        (dict(qo_len=1, kv_len=0), "kv_len=0 is not a number of 1 to"),
        (dict(qo_len=1 << 31), "qo_len=2147483648 is not a number of 1 to"),
        (dict(qo_len=4, batch_size=0), "batch_size=0 is not a number of 1 to"),
        (dict(kv_len=7), "say nothing without qo_len"),
    ],
)
def test_explained_lengths_are_checked(lengths, words):
    with pytest.raises(ValueError, match=words):
        ck.explain(device="cpu", **lengths)


@pytest.fixture
def preferred() -> Iterator:
    from cutlass_kernels import _C

    yield _C.prefer_tile
    _C.prefer_tile("")


@every(
    backend=KERNELS,
    dim=[64, 96, 128, 192, 256, 512],
    lengths=LENGTHS,
    mode=["NONE", "ALIBI"],
    page_size=[None, 5, 16],
)
def test_every_candidate_computes(extension, preferred, backend, dim, lengths, mode, page_size):
    major, minor = torch.cuda.get_device_capability()
    batch = make_batch(*lengths, 8, 2, dim, dtype=torch.bfloat16, device="cuda:0")
    options = Options(causal=True, pos_encoding_mode=mode)
    rows, keys = (sum(some) // len(some) for some in lengths)
    sizes = dict(keys=keys, kv_heads=2, requests=len(lengths[0]), alibi=mode == "ALIBI")
    problem = prompt(rows, 8, dim, backend=backend, page_size=page_size or 0, **sizes)
    found = candidates(10 * major + minor, **problem)
    for tile in sorted({c["name"] for c in found}):
        preferred(tile)
        assert {c["name"] for c in candidates(10 * major + minor, **problem)} == {tile}
        check(backend, batch, options, page_size=page_size)


@pytest.mark.gpu
def test_a_log_of_plans(extension):
    code = (
        "import torch, cutlass_kernels as ck\n"
        "q = torch.randn(300, 8, 128, device='cuda').bfloat16()\n"
        "ck.attention(q, q, q, causal=True)"
    )
    log = os.environ | {"CUTLASS_KERNELS_LOG": "plan"}
    done = subprocess.run([sys.executable, "-c", code], env=log, capture_output=True, text=True, check=True)
    line = next(line for line in done.stderr.splitlines() if line.startswith("cutlass_kernels: "))
    assert "8/8 heads, 1 x 300 rows over 300 keys: " in line and " us, taken: " in line
