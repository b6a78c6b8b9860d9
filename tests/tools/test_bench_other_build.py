"""Another build of the library in one process with this one: here a copy of the installed package, on the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paths import ROOT

pytest.importorskip("typer")
import bench
import measure
import other_build
import timing
from commands import invoke, words
from operations import OPERATIONS
from problem import Problem
from report import Report

import cutlass_kernels as ck

CPU = torch.device("cpu")
FOLDER = Path(ck.__file__).parent.parent


@pytest.fixture(scope="module")
def other() -> ModuleType:
    return other_build.load(FOLDER)


def test_the_other_build_shares_no_module_with_this_one(other: ModuleType) -> None:
    assert other.__name__ == "cutlass_kernels_other" and other is not ck
    assert Path(other.__file__ or "").parent != Path(ck.__file__).parent
    ours = {name for name in sys.modules if name == "cutlass_kernels" or name.startswith("cutlass_kernels.")}
    theirs = {name for name in sys.modules if name.startswith("cutlass_kernels_other")}
    assert len(theirs) > 10 and not ours & theirs
    assert not any(sys.modules[name] in [sys.modules[mine] for mine in ours] for name in theirs)
    assert other.BatchPrefillWithRaggedKVCacheWrapper is not ck.BatchPrefillWithRaggedKVCacheWrapper
    assert other_build.load(FOLDER) is other


def test_both_compute_the_same(other: ModuleType) -> None:
    q, k, v = torch.randn(3, 20, 4, 16).half()
    assert torch.equal(
        ck.single_prefill_with_kv_cache(q, k, v, causal=True), other.single_prefill_with_kv_cache(q, k, v, causal=True)
    )


def test_both_compile_into_graphs_of_their_own(other: ModuleType) -> None:
    q, k, v = torch.randn(3, 20, 4, 16).half()
    for library in (ck, other):
        compiled = torch.compile(lambda *x, call=library.single_prefill_with_kv_cache: call(*x), backend="eager")
        assert torch.equal(compiled(q, k, v), library.single_prefill_with_kv_cache(q, k, v))


def test_both_extensions_register_their_types(other: ModuleType, extension: Path) -> None:
    ours, theirs = (importlib.import_module(f"{name}._C") for name in ("cutlass_kernels", "cutlass_kernels_other"))
    assert Path(theirs.__file__ or "").stat().st_size == extension.stat().st_size
    types = [name for name, value in vars(ours).items() if isinstance(value, type)]
    assert types and all(getattr(ours, name) is not getattr(theirs, name) for name in types)
    assert [dict(kernel) for kernel in other.list_kernels()] == [dict(kernel) for kernel in ck.list_kernels()]


def test_it_is_measured_beside_this_build(other: ModuleType) -> None:
    operation = OPERATIONS["prefill"]
    twin = operation.twins(other, ["reference"])["reference"]
    assert (twin.name, twin.ours) == ("other_reference", False)
    backends = [operation.backends["reference"], twin]
    settings = timing.Settings("test", rounds=3, pause_ms=0.0, warm_ms=0.0, round_ms=0.01)
    cases = [
        Problem("small", "batch", (7, 1), (40, 33), 4, 2, 16, 16),
        Problem("small", "one", (9,), (9,), 4, 2, 16, 16),
    ]
    results = measure.measure(operation, cases, backends, settings, CPU, timing.HostClock())
    facts = measure.environment(settings, "bfloat16", None, FOLDER)
    names, twins = [b.name for b in backends], {"reference": "other_reference"}
    report = Report("TFLOP/s", True, names, ["reference"], ["best", "other"], facts, results, twins)
    assert [r.reason for r in results] == [""] * 4
    assert facts["other"]["folder"] == str(FOLDER)
    assert report.ratio_columns() == [("reference", "other")]  # the other build is no peer
    case = report.cases()[0]
    figures = [report.figure(case, name) for name in names]
    assert figures[0] is not None and figures[1] is not None
    assert report.ratio(case, "reference", "other") == pytest.approx(figures[0] / figures[1])
    assert report.means()[0].startswith("reference / other: geometric mean ")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_columns_of_another_build(operation: str, other: ModuleType) -> None:
    names = [name for name, backend in OPERATIONS[operation].backends.items() if backend.ours]
    assert names
    twins = OPERATIONS[operation].twins(other, names)
    assert [twin.name for twin in twins.values()] == [f"other_{name}" for name in names]


# --- command line ------------------------------------------------------------------------------------------------


def test_against_a_folder_adds_its_columns(other: ModuleType) -> None:
    arguments = ("prefill", "--workload", "quick", "--backends", "fa2,fa3,torch_fa2", "--dry-run")
    output = invoke(bench.app, *arguments, "--against", f"best,{FOLDER}")
    assert output.splitlines()[0].endswith("honoured by fa2 other_fa2 fa3 other_fa3 torch_fa2")
    assert "other" not in invoke(bench.app, *arguments, "--against", "best,torch_fa2+cudnn")


def test_folders_that_hold_no_build_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, other_build.NAME, raising=False)
    arguments = ("prefill", "--workload", "quick", "--dry-run", "--against")
    said = words(invoke(bench.app, *arguments, str(tmp_path), code=2))
    assert "holds no Python package cutlass_kernels" in said and "pip install --target" in said
    assert "one other build" in invoke(bench.app, *arguments, f"{tmp_path},{ROOT}", code=2)


@pytest.mark.gpu
def test_two_builds_run_on_a_gpu(tmp_path: Path) -> None:
    arguments = ["--rounds", "2", "--round-ms", "2", "--backends", "fa2", "--against", str(FOLDER)]
    arguments += ["--out", str(tmp_path)]
    for operation, workload in (("prefill", "quick"), ("decode", "decode"), ("host", "calls")):
        only = {"prefill": "2k", "decode": "32/8 hd128 (1 x 1k|8 x 1k)", "host": "run|plan"}[operation]
        invoke(bench.app, operation, "--workload", workload, "--only", only, *arguments)
        text = (tmp_path / f"{operation}-{workload}.md").read_text()
        assert "| other_fa2 |" in text and "fa2 / other" in text and "failed" not in text
