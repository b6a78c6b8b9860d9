"""The checks of a problem that the C++ library makes, compiled without CUDA."""

from __future__ import annotations

from pathlib import Path

import compilers


def test_every_contradiction_is_refused_alone(tmp_path: Path) -> None:
    program, folders = tmp_path / "contradictions", (compilers.SOURCES / "include", compilers.SOURCES / "src")
    sources = (compilers.ROOT / "tests/cpp/contradictions.cpp", compilers.SOURCES / "src/registry/validate.cpp")
    includes = [f"-I{folder}" for folder in folders]
    compilers.run(compilers.host_compiler(), "-std=c++17", *includes, *sources, "-o", program)
    assert compilers.run(program).endswith("cases\n")
