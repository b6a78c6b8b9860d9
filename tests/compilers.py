"""Compilers and headers for tests that compile small programs; a test skips, saying why, where there is none."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

SOURCES = ROOT / "cutlass_kernels"


def host_compiler() -> str:
    found = shutil.which("c++")
    if found is None:
        pytest.skip("c++ is not installed")
    return found


def _in_package(package: str, path: str) -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution(package).locate_file(path)))
    except importlib.metadata.PackageNotFoundError:
        return None


def nvcc() -> Path:
    """That of the system, or of the PyPI packages, as the build chooses it."""
    system = [os.environ.get("CUDACXX"), shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    packaged = _in_package("nvidia-cuda-nvcc", "nvidia/cu13/bin/nvcc")
    for path in (*(Path(x) for x in system if x), packaged):
        if path is not None and path.exists():
            return path.resolve()
    pytest.skip("there is no nvcc")


def cuda_headers() -> Path:
    """The folder of cuda.h and of the runtime's header."""
    toolkit = nvcc().parent.parent
    for folder in (toolkit / "include", *toolkit.glob("targets/*/include"), Path("/usr/local/cuda/include")):
        if (folder / "cuda.h").exists() and (folder / "cuda_runtime_api.h").exists():
            return folder
    pytest.skip(f"the toolkit of {nvcc()} has no headers of the CUDA runtime")


def cutlass_headers() -> Path:
    given = os.environ.get("CK_CUTLASS_INCLUDE_DIR")
    packaged = _in_package("nvidia-cutlass", "cutlass_library/source/include")
    for folder in (Path(given) if given else None, ROOT / "third_party/cutlass/include", packaged):
        if folder is not None and (folder / "cute/layout.hpp").exists():
            return folder
    pytest.skip("there are no CUTLASS headers")


def write_host_cute(folder: Path) -> None:
    """What device headers take from CuTe, for a host compiler that is given ``-I folder``."""
    macros = ("CUTE_DEVICE inline", "CUTE_HOST_DEVICE inline", "CUTE_UNROLL", "CUTE_NO_UNROLL")
    (folder / "cute").mkdir()
    (folder / "cute" / "config.hpp").write_text("#pragma once\n" + "".join(f"#define {macro}\n" for macro in macros))


def run(*command: str | Path) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def refusal(*command: str | Path) -> str:
    """What a command that fails prints."""
    done = subprocess.run([str(x) for x in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode != 0, f"{' '.join(map(str, command))} was to fail\n{done.stdout}"
    return done.stdout
