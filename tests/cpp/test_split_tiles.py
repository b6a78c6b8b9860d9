"""Which tiles the kernel that combines partial results finds: tests/cpp/split_tiles.cpp."""

from __future__ import annotations

from pathlib import Path

import compilers


def test_tiles_to_combine_are_those_that_attention_has_split(tmp_path: Path) -> None:
    compilers.write_host_cute(tmp_path)
    program = tmp_path / "split_tiles"
    sources = compilers.SOURCES
    folders = [f"-I{tmp_path}", f"-I{sources / 'src'}", f"-I{sources / 'include'}"]
    source = compilers.ROOT / "tests/cpp/split_tiles.cpp"
    compilers.run(compilers.host_compiler(), "-std=c++17", "-O1", "-pthread", *folders, source, "-o", program)
    assert compilers.run(program).strip() == "OK"
