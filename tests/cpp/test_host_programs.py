"""Device code and checks that a host compiler can compile: programs of this folder that compare, and say so."""

from __future__ import annotations

import re
from pathlib import Path

import compilers
import pytest

HERE, LIBRARY = compilers.ROOT / "tests" / "cpp", compilers.SOURCES
FOLDERS = [LIBRARY / "src", LIBRARY / "include", HERE]
CUDA_HEADERS = ("cuda_runtime.h", "cuda_runtime_api.h", "driver_types.h")


@pytest.mark.parametrize(
    ("name", "sources", "says"),
    [
        ("contradictions", [LIBRARY / "src/registry/validate.cpp"], ".*cases"),  # each is refused alone
        ("schedule", [], "OK"),  # the kernel that writes tile lists: every tile and split
        ("local_slots", [], "OK"),  # the kernel of dcp_local_indices()
        ("split_tiles", [], "OK"),  # tiles to combine are those that attention has split
    ],
)
def test_program(tmp_path: Path, name: str, sources: list[Path], says: str) -> None:
    folders = list(FOLDERS)
    if not sources:  # device code
        compilers.write_host_cute(tmp_path)
        folders.insert(0, tmp_path)
    if name in ("schedule", "local_slots"):
        for header in CUDA_HEADERS:
            (tmp_path / header).write_text('#include "one_block.h"\n')
    flags = ["-std=c++17", "-O1", "-pthread", *(f"-I{folder}" for folder in folders)]
    compilers.run(compilers.host_compiler(), *flags, HERE / f"{name}.cpp", *sources, "-o", tmp_path / name)
    assert re.fullmatch(says, compilers.run(tmp_path / name).strip(), re.DOTALL)


def test_layouts_are_those_of_cute() -> None:
    """Swizzles and fragments that kernels compute by hand, beside CuTe's layout algebra."""
    folders = ("-isystem", compilers.cutlass_headers(), f"-I{LIBRARY}/include", f"-I{LIBRARY}/src")
    target = "--generate-code=arch=compute_90a,code=compute_90a"
    flags = ("-std=c++17", "--expt-relaxed-constexpr", "-fdevice-syntax-only", target, *folders)
    compilers.run(compilers.nvcc(), *flags, "-c", HERE / "cute_layouts.cu", "-o", "/dev/null")
