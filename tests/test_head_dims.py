"""Head dimensions and tiles that a kernel would compute wrongly do not compile: a sentence says why."""

from __future__ import annotations

import re
from pathlib import Path

import compilers
import pytest

SOURCES = compilers.SOURCES
FOLDERS = [f"-I{SOURCES / name}" for name in ("include", "src")]


def says(output: str, sentence: str) -> bool:
    """Whether a compiler, which may break lines, names a static assertion's sentence."""
    return sentence in re.sub(r"\s+", " ", output)


# --- the tile tables, which any C++ compiler reads ------------------------------------------------------------------

FA3 = {
    "row of q": ("72, 64, 1, 64, 3, 2, 1, 1, false, true, false", "takes 16 columns per wgmma"),
    "panel of o": ("128, 96, 2, 128, 2, 2, 4, 1, true, true, false", "panels of 64 columns"),
    "wide o": ("512, 512, 2, 64, 1, 1, 2, 2, true, false, false", "at most 256"),
    "merged columns": ("512, 512, 2, 64, 1, 1, 2, 2, false, false, false, 1, false, true", "than the merge kernels"),
    "keys": ("128, 128, 2, 80, 2, 2, 4, 2, true, true, false", "32 keys at a time"),
}
FA3_FP8 = {"panel of o of e4m3": ("96, 3, 128, 3, 2, 3, 6, 1, true, true, false, false", "panels of 64 columns")}
FA2 = {
    "swizzle": ("80, 2, 4, 64, 64, 2, 2, 2", "eight chunks of 64 columns"),
    "lanes": ("192, 2, 4, 64, 64, 1, 4, 2", "64, 128 and 256"),
    "wide": ("512, 2, 4, 64, 64, 1, 4, 1, 2", "64, 128 and 256"),
    "merged columns": ("512, 1, 4, 32, 32, 2, 4, 1, 1, true", "than the merge kernels"),
}
WRONG = [
    pytest.param(f"{backend}::{tile}<{arguments}>", sentence, id=f"{backend} {name}")
    for backend, tile, tiles in (("fa3", "Tile", FA3), ("fa3", "Fp8Tile", FA3_FP8), ("fa2", "Tile", FA2))
    for name, (arguments, sentence) in tiles.items()
]


def check_tables(folder: Path, text: str) -> list[str | Path]:
    source = folder / "tables.cpp"
    source.write_text(f'#include "fa2/config.h"\n#include "fa3/config.h"\n{text}\n')
    return [compilers.host_compiler(), "-std=c++17", "-fsyntax-only", *FOLDERS, source]


def test_the_tile_tables_compile(tmp_path):
    compilers.run(*check_tables(tmp_path, ""))


@pytest.mark.parametrize("tile,sentence", WRONG)
def test_tiles_that_would_be_wrong(tmp_path, tile, sentence):
    assert says(compilers.refusal(*check_tables(tmp_path, f"template struct cutlass_kernels::{tile};")), sentence)


# --- what takes the kernels themselves ------------------------------------------------------------------------------


def row(backend: str, element: str, qk: int, vo: int, template: str = "attention.cu.in") -> str:
    """The unit of a row of instances.cmake."""
    words = {"NAME": "row", "ELEMENT": element, "KV_ELEMENT": element, "HEAD_DIM_QK": str(qk), "HEAD_DIM_VO": str(vo)}
    text = (SOURCES / "src" / backend / template).read_text()
    return re.sub(r"@CK_(\w+)@", lambda match: words[match[1]], text)


SMALL_DEVICE = """
#include "fa2/launch.h"
namespace cutlass_kernels::fa2 {
struct Heavy : TileTable<128> {
  using Packed = Tile<128, 1, 4, 64, 32, 4, 2, 1, 1, true>;  // 144 KB
};
constexpr bool serves = serves_every_device<Heavy>();
}  // namespace cutlass_kernels::fa2
"""
LARGE_BLOCK = """
#include "fa3/launch.h"
namespace cutlass_kernels::fa3 {
using Heavy = Tile<128, 128, 2, 128, 3, 3, 4, 2, true, true, false>;
template Status launch_tile<bf16, Heavy, Logits::kPlain>(const AttentionParams&, cudaStream_t);
}  // namespace cutlass_kernels::fa3
"""
THREE_PANELS = """
#include "merge/merge_row.h"
namespace cutlass_kernels {
template __device__ MergedRow<3> merge_pieces<3, 16>(const AttentionParams&, const PieceRows&, int, int, int, int);
}  // namespace cutlass_kernels
"""
UNITS = {
    "wider values of fa2": (lambda: row("fa2", "fp16", 64, 128), "wider values would lose columns"),
    "wider values of e4m3": (lambda: row("fa3", "e4m3", 64, 128, "attention_fp8.cu.in"), "one head dimension"),
    "memory of a small device": (lambda: SMALL_DEVICE, "99 KB, the shared memory of compute capability 8.6"),
    "memory of fa3's block": (lambda: LARGE_BLOCK, "227 KB for one block"),
    "merged panels": (lambda: THREE_PANELS, "one piece in 32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNITS)
def test_units_that_would_be_wrong(tmp_path, name):
    unit, sentence = UNITS[name]
    source = tmp_path / "unit.cu"
    source.write_text(unit())
    arch = "--generate-code=arch=compute_90a,code=sm_90a"
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-DNDEBUG", arch, "--ptx"]
    folders = [*FOLDERS, f"-I{compilers.cutlass_headers()}"]
    output = compilers.refusal(compilers.nvcc(), *flags, *folders, source, "-o", tmp_path / "unit.ptx")
    assert says(output, sentence), output
