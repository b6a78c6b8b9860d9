"""Which tiles the kernel that combines partial results finds: tests/cpp/split_tiles.cpp."""

from __future__ import annotations

from pathlib import Path

import compilers


def test_tiles_to_combine_are_those_that_attention_has_split(tmp_path: Path) -> None:
    headers = tmp_path / "cute"
    headers.mkdir()
    macros = (
        "#define CUTE_DEVICE inline\n#define CUTE_HOST_DEVICE inline\n#define CUTE_UNROLL\n#define CUTE_NO_UNROLL\n"
    )
    (headers / "config.hpp").write_text("#pragma once\n" + macros)
    program = tmp_path / "split_tiles"
    sources = compilers.SOURCES
    folders = [f"-I{tmp_path}", f"-I{sources / 'src'}", f"-I{sources / 'include'}"]
    source = compilers.ROOT / "tests/cpp/split_tiles.cpp"
    compilers.run(compilers.host_compiler(), "-std=c++17", "-O1", "-pthread", *folders, source, "-o", program)
    assert compilers.run(program).strip() == "OK"
