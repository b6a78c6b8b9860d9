"""The build's own tools: the backend that asks for compilers, and the guard that reads what ptxas says."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "cutlass_kernels" / "cmake"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name)


# --- nvcc_guard ----------------------------------------------------------------------------------------------------

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for 'sm_90a'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {spill} bytes spill stores, {spill} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def test_guard_prints_one_line_per_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = load("nvcc_guard", monkeypatch)
    shown, faults = guard.judge(PTXAS.format(name="_Z6kerneli", stack=0, spill=0), 64)
    assert len(shown) == 1
    assert "168 registers" in shown[0]
    assert "sm_90a" in shown[0]
    assert not faults


@pytest.mark.parametrize(("spill", "accepted"), [(0, True), (64, True), (68, False)])
def test_guard_refuses_spills(monkeypatch: pytest.MonkeyPatch, spill: int, accepted: bool) -> None:
    guard = load("nvcc_guard", monkeypatch)
    _, faults = guard.judge(PTXAS.format(name="_Z6kerneli", stack=spill, spill=spill), 64)
    assert (not faults) == accepted


def test_guard_refuses_serialised_wgmma_and_shows_other_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = load("nvcc_guard", monkeypatch)
    warning = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    shown, faults = guard.judge(f"{warning}\nunit.cu(3): warning #177-D: variable was declared but never used", 64)
    assert len(faults) == 1
    assert "C7510" in faults[0]
    assert any("177-D" in line for line in shown)


def test_guard_removes_the_object_of_a_slow_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    guard = load("nvcc_guard", monkeypatch)
    messages = tmp_path / "messages"
    messages.write_text(PTXAS.format(name="_Z6kerneli", stack=200, spill=200))
    target = tmp_path / "unit.o"
    command = ["sh", "-c", f"touch {target}; cat {messages} >&2", "-o", str(target)]
    assert guard.main(64, command) == 1
    assert not target.exists()
    assert "spills 200 bytes" in capfd.readouterr().err
    assert guard.main(256, command) == 0
    assert target.exists()
    assert guard.main(64, ["sh", "-c", "exit 7"]) == 7


# --- build_backend -------------------------------------------------------------------------------------------------


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    for name in ("CK_BUILD_KERNELS", "CK_CUDA_TOOLKIT"):
        monkeypatch.delenv(name, raising=False)
    return load("build_backend", monkeypatch)


def test_backend_asks_for_nothing_without_kernels(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend._packages({"cmake.define.CK_BUILD_KERNELS": "OFF"}) == []
    monkeypatch.setenv("CK_BUILD_KERNELS", "0")
    assert backend._packages(None) == []
    assert backend._settings(None) == {"wheel.cmake": "false"}
    assert backend._packages({"cmake.define.CK_BUILD_KERNELS": "ON"}) != [], "a setting wins over the environment"


@pytest.mark.parametrize(
    ("toolkit", "has_nvcc", "asks"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("pypi", True, True),
        ("system", False, False),
        ("/opt/cuda", False, False),
    ],
)
def test_backend_asks_for_nvcc_where_the_system_has_none(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, toolkit: str, has_nvcc: bool, asks: bool
) -> None:
    monkeypatch.setattr(backend, "_has_system_nvcc", lambda: has_nvcc)
    wanted = backend._packages({"cmake.define.CK_CUDA_TOOLKIT": toolkit})
    assert any(package.startswith("nvidia-cutlass") for package in wanted)
    assert any(package.startswith("nvidia-cuda-nvcc") for package in wanted) == asks
    releases = {package.partition("==")[2] for package in wanted if "==" in package}
    assert len(releases) == (1 if asks else 0), "the toolkit's parts must be of one release"


def test_backend_refuses_an_old_nvcc(backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    for release, expected in (("11.8", False), ("12.4", True), ("13.0", True)):
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
        nvcc.chmod(0o755)
        monkeypatch.setenv("CUDACXX", str(nvcc))
        assert backend._has_system_nvcc() == expected
