"""The build's own tools: the backend that asks for compilers, and the guard that reads what ptxas says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from paths import ROOT

TOOLS = ROOT / "cutlass_kernels" / "cmake"


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


# --- what makes an object out of date ------------------------------------------------------------------------------


def packages(folder: Path, cutlass: str) -> Path:
    """An environment as pip makes one for a build: a Python, and CUTLASS (as much of it as CMake looks at)."""
    headers = folder / "cutlass_library" / "source" / "include"
    (headers / "cute").mkdir(parents=True)
    (headers / "cute" / "layout.hpp").touch()
    (headers / "cutlass").mkdir()
    numbers = zip(("MAJOR", "MINOR", "PATCH"), cutlass.split("."))
    text = "".join(f"#define CUTLASS_{name} {number}\n" for name, number in numbers)
    (headers / "cutlass" / "version.h").write_text(text)
    metadata = folder / f"nvidia_cutlass-{cutlass}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cutlass\nVersion: {cutlass}\n")
    (folder / "python3").symlink_to(sys.executable)
    return folder


@pytest.mark.slow
def test_objects_do_not_depend_on_where_pip_put_the_headers(
    tmp_path: Path, clean_environment: pytest.MonkeyPatch
) -> None:
    """pip's environment for a build has a new path and new files each time: nine minutes where commands show it."""
    for tool in ("cmake", "ninja", "c++", "nvcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if (ROOT / "third_party" / "cutlass").exists():
        pytest.skip("third_party/cutlass is there, and so no package is looked for")
    build = tmp_path / "build"

    def commands(environment: Path) -> list[str]:
        """Of all compilations."""
        (build / "CMakeCache.txt").unlink(missing_ok=True)  # scikit-build-core does, and removes CMakeFiles, too
        python = f"-DPython_EXECUTABLE={environment / 'python3'}"
        narrow = ("-DCK_HEAD_DIMS=64", "-DCK_DTYPES=float16", "-DCK_ARCHS=90", "-DCK_CCACHE=OFF")
        run = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja", python, *narrow, "-DCK_BUILD_PYTHON=OFF"]
        variables = {**os.environ, "PYTHONPATH": str(environment)}
        done = subprocess.run(run, capture_output=True, text=True, env=variables, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"({environment}" in done.stdout
        show = ["ninja", "-C", str(build), "-t", "commands"]
        lines = subprocess.run(show, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line for line in lines if " -c " in line]

    first = commands(packages(tmp_path / "first", "4.2.0"))
    assert commands(packages(tmp_path / "second", "4.2.0")) == first
    assert any("nvcc_guard.py" in command for command in first)
    assert not [command for command in first if " -o CMakeFiles/" in command], "scikit-build-core removes this folder"
    assert all(" -MMD " in command for command in first), "headers of packages are as new as the environment"
    assert commands(packages(tmp_path / "third", "4.2.1")) != first, "another CUTLASS makes other objects"


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
    for headers in ("nvidia-cutlass", "apache-tvm-ffi"):
        assert any(package.startswith(headers) for package in wanted)
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
