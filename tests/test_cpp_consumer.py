"""The C++ library as its users meet it: configured, built, installed, found by another project, run.

Builds a kernel unit of each backend, once, for the static and the shared library. CK_TEST_INSTALL_PREFIX names an
existing installation to test instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ["hello_attention", "fmha_v2_plugin"]
NARROW = ("-DCK_HEAD_DIMS=64", "-DCK_DTYPES=float16,float8_e4m3fn", "-DCK_ARCHS=90", "-DCK_BUILD_TESTS=ON")
pytestmark = pytest.mark.slow


def run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


@pytest.fixture(scope="module")
def build_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("there is no nvcc to build the C++ library with")
    return tmp_path_factory.mktemp("library")


def install(build: Path, shared: bool) -> Path:
    """An installed library; the second call only links, as static and shared are made of the same objects."""
    if os.environ.get("CK_TEST_INSTALL_PREFIX"):
        return Path(os.environ["CK_TEST_INSTALL_PREFIX"])
    prefix = build / ("shared" if shared else "static")
    linkage = f"-DBUILD_SHARED_LIBS={'ON' if shared else 'OFF'}"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-S", ROOT, "-B", build / "build", *generator(), *NARROW, linkage, python, "-DCK_BUILD_PYTHON=OFF")
    run("cmake", "--build", build / "build", "--parallel")
    run("cmake", "--install", build / "build", "--prefix", prefix)
    return prefix


@pytest.mark.parametrize("shared", [False, True], ids=["static", "shared"])
def test_installed_library_serves_another_project(build_directory: Path, shared: bool) -> None:
    prefix = install(build_directory, shared)
    outputs = {}
    for project, programs in (("tests/cpp/consumer", ["consumer"]), ("examples/cpp", EXAMPLES)):
        build = build_directory / f"{Path(project).name}-{shared}"
        run("cmake", "-S", ROOT / project, "-B", build, *generator(), f"-DCMAKE_PREFIX_PATH={prefix}")
        run("cmake", "--build", build)
        outputs |= {program: run(build / program) for program in programs}
    assert outputs["consumer"].rstrip().endswith("OK")
    assert "fa2_float16_hd64" in outputs["consumer"] and "fa3_float16_hd64" in outputs["consumer"]
    assert "cutlass_kernels" in outputs["hello_attention"]
    # Its own comparison decides how it ends; without a GPU it shows the sentence of a status.
    assert re.search(r"difference from the CPU|no GPU here: .*\w", outputs["fmha_v2_plugin"])


def test_shared_library_hides_everything_but_the_api(build_directory: Path) -> None:
    if os.environ.get("CK_TEST_INSTALL_PREFIX"):
        pytest.skip("CK_TEST_INSTALL_PREFIX may hold a static library")
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    (library,) = (install(build_directory, shared=True) / "lib").glob("libcutlass_kernels.so")
    needed = run("readelf", "-d", library)
    assert not re.search(r"NEEDED.*(cuda|torch)", needed)
    symbols = run("nm", "-DC", "--defined-only", library).splitlines()
    strong = [line.split(maxsplit=2)[2] for line in symbols if line.split()[1] == "T"]
    assert strong
    assert all(name.startswith("cutlass_kernels::") for name in strong), strong


def test_host_code_on_a_stand_in_for_the_cuda_runtime(build_directory: Path) -> None:
    """Workspaces of exactly the promised size, and where in them everything lies: tests/cpp/host/main.cu."""
    if os.environ.get("CK_TEST_INSTALL_PREFIX"):
        pytest.skip("CK_TEST_INSTALL_PREFIX has no objects to link")
    install(build_directory, shared=False)
    assert run(build_directory / "build" / "tests" / "cpp" / "host" / "host_checks").rstrip().endswith("OK")


def test_headers_need_neither_cuda_nor_cutlass(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("c++ is not installed")
    headers = ROOT / "cutlass_kernels" / "include"
    for header in (headers / "cutlass_kernels").glob("*.h"):
        source = tmp_path / f"{header.stem}.cpp"
        source.write_text(f'#include "cutlass_kernels/{header.name}"\n#include "cutlass_kernels/{header.name}"\n')
        run("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{headers}", source)
