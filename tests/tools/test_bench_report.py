"""The benchmark's reports: ratios, tables, files, plots."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import report as reporting
import timing


def example(higher: bool = True) -> reporting.Report:
    def result(column: str, backend: str, figure: float | None, **more: Any) -> reporting.Result:
        series = None if figure is None else timing.Series(4, "launch", [1.0, 1.1, 1.05])
        return reporting.Result(backend, "hd64 full", column, 1e12, figure, series=series, **more)

    results = [
        result("1k", "fa2", 300.0),
        result("1k", "torch_fa2", 200.0),
        result("1k", "cudnn", 400.0),
        result("2k", "fa2", 330.0),
        result("2k", "torch_fa2", 300.0),
        result("2k", "cudnn", None, reason="no such thing"),
        result("4k", "fa2", None, reason="broken", failed=True),
        result("4k", "torch_fa2", 310.0),
        result("4k", "cudnn", None, reason="no such thing"),
    ]
    names = ["fa2", "torch_fa2", "cudnn"]
    facts = {"gpu": "GPU", "dtype": "bfloat16", "mode": "burst"}
    unit = "TFLOP/s" if higher else "us"
    return reporting.Report(unit, higher, names, ["fa2"], ["best", "torch_fa2"], facts, results)


def test_ratios() -> None:
    report = example()
    one, two, three = report.cases()
    assert report.ratio(one, "fa2", "best") == pytest.approx(0.75)
    assert report.ratio(one, "fa2", "torch_fa2") == pytest.approx(1.5)
    assert report.ratio(one, "fa2", "torch_fa2+cudnn") == pytest.approx(0.75)
    assert report.ratio(two, "fa2", "best") == pytest.approx(1.1)
    assert report.ratio(three, "fa2", "best") is None
    mean, least, count = report.mean_ratio("fa2", "torch_fa2")
    assert (mean, least, count) == (pytest.approx(math.sqrt(1.5 * 1.1)), pytest.approx(1.1), 2)
    assert report.means()[0] == "fa2 / the best peer: geometric mean 0.908, least 0.750, 2 cases"


def test_ratio_above_one_is_better_for_times_too() -> None:
    report = example(higher=False)
    assert report.ratio(report.cases()[0], "fa2", "best") == pytest.approx(200 / 300)


def test_table() -> None:
    header, rows = reporting.table(example())
    assert header == ["case", "fa2", "torch_fa2", "cudnn", "fa2 / best peer", "fa2 / torch_fa2", "spread"]
    assert rows[0] == ["hd64 full 1k", "300", "200", "400", "0.75", "1.50", "9.5 %"]
    assert rows[1][3:5] == ["-", "1.10"]
    assert rows[2][1] == "failed"


def test_markdown() -> None:
    assert reporting.markdown(example()).splitlines() == [
        "| TFLOP/s | | 1k | 2k | 4k |",
        "|---|---|---|---|---|",
        "| hd64 full | **fa2** | 300 | 330 | failed |",
        "| hd64 full | torch_fa2 | 200 | 300 | 310 |",
        "| hd64 full | cudnn | 400 | - | - |",
        "| hd64 full | fa2 / best peer | 0.75 | 1.10 | - |",
        "| hd64 full | fa2 / torch_fa2 | 1.50 | 1.10 | - |",
        "",
        "- fa2 / the best peer: geometric mean 0.908, least 0.750, 2 cases",
        "- fa2 / torch_fa2: geometric mean 1.285, least 1.100, 2 cases",
    ]


def test_files(tmp_path: Path) -> None:
    report = example()
    written = reporting.write(report, tmp_path / "new", "run", [example(higher=False)])
    assert [path.suffix for path in written][:3] == [".csv", ".json", ".md"]
    with written[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report.results)
    assert rows[0]["backend"] == "fa2"
    assert float(rows[0]["figure"]) == 300.0
    assert rows[5]["reason"] == "no such thing"
    text = written[2].read_text()
    assert text.index("| TFLOP/s |") < text.index("| us |")
    loaded = json.loads(written[1].read_text())
    assert loaded["environment"]["gpu"] == "GPU"
    assert loaded["results"][0]["series"]["seconds"] == [1.0, 1.1, 1.05]


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = reporting.plot(example(), tmp_path / "run.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reporting.plot(example(), tmp_path / "none.png") is None
