"""Entry points of the plug-ins for serving engines, without an engine: which release they serve, and that they break
nothing."""

from __future__ import annotations

import importlib.metadata
import logging
import re

import pytest
from commands import python
from distribution import entry_points_of_pyproject
from paths import ROOT

from cutlass_kernels.integrations import _engines

GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}


@pytest.mark.parametrize("engine", _engines.SERVED)
def test_extras_pin_what_is_served(engine):
    extras = re.findall(rf'^{engine} = \["{engine}==([\d.]+)\.\*"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras == [_engines.SERVED[engine]]


@pytest.mark.parametrize("engine", _engines.SERVED)
def test_documentation_names_what_is_served(engine):
    page = (ROOT / "docs" / "plug-ins.md").read_text()
    assert f"{_engines.TITLES[engine]} {_engines.SERVED[engine]}" in page


@pytest.mark.parametrize("engine", _engines.SERVED)
def test_entry_points_are_declared(engine):
    value = f"cutlass_kernels.integrations.{engine}:register"
    assert entry_points_of_pyproject()[GROUPS[engine]] == {"cutlass_kernels": value}


@pytest.mark.parametrize(
    ("engine", "version", "served"),
    [
        ("vllm", "0.33.0", True),
        ("vllm", "0.33.2+cu130", True),
        ("vllm", "0.34.0", False),
        ("vllm", "0.3.3", False),
        ("vllm", "1.0", False),
        ("vllm", "0.33.0rc1", True),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.23.post1", True),
        ("sglang", "0.5.24", False),
        ("sglang", "0.5.2", False),
    ],
)
def test_served_releases(engine, version, served):
    assert _engines.is_served(engine, version) is served


@pytest.mark.parametrize("engine", _engines.SERVED)
def test_another_release_is_left_alone(engine, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.9.9")
    module = importlib.import_module(f"cutlass_kernels.integrations.{engine}")
    monkeypatch.setattr(module, "_register", lambda: pytest.fail("registered"))
    with caplog.at_level(logging.WARNING, "cutlass_kernels"):
        module.register()
    title = _engines.TITLES[engine]
    assert [x.getMessage() for x in caplog.records] == [
        f"cutlass_kernels serves {title} {_engines.SERVED[engine]}, and 9.9.9 is installed: its attention backend is "
        "not registered."
    ]


@pytest.mark.parametrize("engine", _engines.SERVED)
def test_errors_do_not_reach_the_engine(engine, monkeypatch, caplog):
    def fail() -> None:
        raise ImportError("moved")

    monkeypatch.setattr(importlib.metadata, "version", lambda name: _engines.SERVED[name])
    with caplog.at_level(logging.WARNING, "cutlass_kernels"):
        assert not _engines.register_with(engine, fail)
    (record,) = caplog.records
    assert "could not register" in record.getMessage() and "ImportError('moved')" in record.getMessage()


def test_the_package_imports_no_engine():
    code = (
        "import sys, cutlass_kernels, cutlass_kernels.flash_attn, cutlass_kernels.integrations.vllm, "
        "cutlass_kernels.integrations.sglang; print([x for x in ('vllm', 'sglang') if x in sys.modules])"
    )
    assert python("-c", code, timeout=120).stdout.strip() == "[]"
