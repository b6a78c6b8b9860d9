"""The kernel that writes tile lists, on the host: tests/cpp/schedule.cpp."""

from __future__ import annotations

from pathlib import Path

import compilers


def test_lists_have_every_tile_and_split(tmp_path: Path) -> None:
    compilers.write_host_cute(tmp_path)
    for header in ("cuda_runtime.h", "cuda_runtime_api.h", "driver_types.h"):
        (tmp_path / header).write_text('#include "one_block.h"\n')
    program, sources = tmp_path / "schedule", compilers.SOURCES
    here = compilers.ROOT / "tests" / "cpp"
    folders = [f"-I{path}" for path in (tmp_path, sources / "src", sources / "include", here)]
    compilers.run(
        compilers.host_compiler(), "-std=c++17", "-O1", "-pthread", *folders, here / "schedule.cpp", "-o", program
    )
    assert compilers.run(program).strip() == "OK"
