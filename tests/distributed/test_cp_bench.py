"""The benchmark of several GPUs, run as it is there, with gloo and tiny problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import python
from paths import ROOT

BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.runs_nothing("ranks are other processes")

COLUMNS_THAT_FAIL = f"""
import os, random, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import torch
from timing import Settings, Timed
from distributed import prefill, ranks, run
from distributed.columns import Attempt, Column, column

def wrong(ranks, case, x):
    right = prefill._ours("allgather", ranks, case, x)
    def call():
        out = right.call()
        return out.index_fill(0, torch.tensor([7]), 0.0) if ranks.rank == 1 else out
    return Timed(call)

def one_alone(ranks, case, x):
    if ranks.rank == 1:
        raise RuntimeError("no kernel here")
    return prefill._ours("allgather", ranks, case, x)

here = ranks.start("cpu")
torch.set_grad_enabled(False)
right = Attempt(lambda *a: prefill._ours("allgather", *a), "another way")
columns = [*run.one(prefill.OPERATION), column("wrong", wrong), column("alone", one_alone),
           Column("second", True, (Attempt(one_alone), right))]
case = run.Case(here, prefill.OPERATION, prefill._tiny()[0], ["eager"])
for r in case.run(columns, Settings("burst", 1, 0.0, 0.0, 0.1), random.Random(0)):
    if here.rank == 0:
        print(r.name, r.failed, r.series is not None, r.reason or r.note, sep="|", flush=True)
sys.stdout.flush()
os._exit(0)
"""


def ranks_run(*arguments: str) -> str:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return python(*launcher, *arguments, timeout=100, OMP_NUM_THREADS="1").stdout


@pytest.mark.parametrize(
    "operation, refused",
    [
        ("prefill", {"torch_cp", "torch_cp_a2a", "torch_cp_fa2"}),
        ("decode", {"symmetric"}),
        ("combine", {"symmetric"}),
    ],
)
def test_dry_run(tmp_path: Path, operation: str, refused: set[str]) -> None:
    """Everything that has a CPU form computes what one process does, and gets a figure."""
    script = str(BENCHMARKS / "distributed" / "bench.py")
    options = ["--device", "cpu", "--rounds", "1", "--round-ms", "0.1", "--out", str(tmp_path)]
    told = ranks_run(script, operation, *options)
    results: list[dict[str, Any]] = json.loads((tmp_path / f"{operation}.json").read_text())["results"]
    assert [r for r in results if r["failed"]] == []
    assert all(r["seconds"] > 0 for r in results if not r["reason"])
    assert {r["backend"] for r in results} - {r["backend"] for r in results if r["seconds"]} == refused
    assert (tmp_path / f"{operation}.md").read_text().splitlines()[0] in told


def test_columns_that_fail(tmp_path: Path) -> None:
    """What is wrong or raises on one rank is not timed on any, and the others go on."""
    script = tmp_path / "fails.py"
    script.write_text(COLUMNS_THAT_FAIL)
    found = {line.split("|")[0]: line.split("|")[1:] for line in ranks_run(str(script)).splitlines() if "|" in line}
    assert found["one"][:2] == ["False", "True"]
    assert found["wrong"][:2] == ["True", "False"] and "wrong result: RMS error" in found["wrong"][2]
    assert found["alone"][:2] == ["True", "False"] and "no kernel here (rank 1 of 2)" in found["alone"][2]
    assert found["second"][:2] == ["False", "True"] and found["second"][2].startswith("another way, since RuntimeError")
