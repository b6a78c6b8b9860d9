"""Another build of the library in one process with this one: here a copy of the installed package, on the CPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

typer_testing = pytest.importorskip("typer.testing")
import bench  # noqa: E402
import measure  # noqa: E402
import other_build  # noqa: E402
import timing  # noqa: E402
from operations import OPERATIONS  # noqa: E402
from problem import Problem  # noqa: E402
from report import Report  # noqa: E402

import cutlass_kernels as ck  # noqa: E402

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


def invoke(*arguments: str) -> Any:
    return typer_testing.CliRunner().invoke(bench.app, list(arguments))


def test_against_a_folder_adds_its_columns(other: ModuleType) -> None:
    arguments = ("prefill", "--workload", "quick", "--backends", "fa2,fa3,torch_fa2", "--dry-run")
    result = invoke(*arguments, "--against", f"best,{FOLDER}")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[0].endswith("honoured by fa2 other_fa2 fa3 other_fa3 torch_fa2")
    assert "other" not in invoke(*arguments, "--against", "best,torch_fa2+cudnn").output


def test_folders_that_hold_no_build_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, other_build.NAME, raising=False)
    result = invoke("prefill", "--workload", "quick", "--dry-run", "--against", str(tmp_path))
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "holds no Python package cutlass_kernels" in said and "pip install --target" in said
    result = invoke("prefill", "--workload", "quick", "--dry-run", "--against", f"{tmp_path},{ROOT}")
    assert result.exit_code == 2 and "one other build" in result.output


@pytest.mark.gpu
def test_two_builds_run_on_a_gpu(tmp_path: Path) -> None:
    arguments = (
        "--rounds",
        "2",
        "--round-ms",
        "2",
        "--backends",
        "fa2",
        "--against",
        str(FOLDER),
        "--out",
        str(tmp_path),
    )
    for operation, workload in (("prefill", "quick"), ("decode", "decode"), ("host", "calls")):
        only = {"prefill": "2k", "decode": "32/8 hd128 (1 x 1k|8 x 1k)", "host": "run|plan"}[operation]
        result = invoke(operation, "--workload", workload, "--only", only, *arguments)
        assert result.exit_code == 0, result.output
        text = (tmp_path / f"{operation}-{workload}.md").read_text()
        assert "| other_fa2 |" in text and "fa2 / other" in text and "failed" not in text
