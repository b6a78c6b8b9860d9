"""Swizzles and fragments that kernels compute by hand, beside CuTe's layout algebra."""

from __future__ import annotations

import compilers


def test_layouts_are_those_of_cute() -> None:
    source = compilers.ROOT / "tests" / "cpp" / "cute_layouts.cu"
    folders = ("-isystem", compilers.cutlass_headers(), f"-I{compilers.SOURCES}/include", f"-I{compilers.SOURCES}/src")
    target = "--generate-code=arch=compute_90a,code=compute_90a"
    compilers.run(
        compilers.nvcc(), "-std=c++17", "--expt-relaxed-constexpr", "-fdevice-syntax-only", target, *folders,
        "-c", source, "-o", "/dev/null",
    )  # fmt: skip
