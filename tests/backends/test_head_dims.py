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
    "row of q": ("TileDefaults<72, 64>", "", "takes 16 columns per wgmma"),
    "columns of o": ("TileDefaults<128, 72>", "", "16 columns at a time"),
    "panel of o of e4m3": ("Fp8Defaults<96>", "", "panels of 64 columns"),
    "wide o": ("TileDefaults<512>", "", "at most 256"),
    "combined columns": ("Packing<TileDefaults<1024>>", "", "than the kernels that combine them"),
    "keys": ("TileDefaults<128>", "static constexpr int kBlockN = 80;", "32 keys at a time"),
}
FA2_ROWS = """
static constexpr int kBlockM = 128, kRowTiles = 2, kBlockN = 64, kStepN = 64, kStages = 2, kAhead = 2;
static constexpr int kBlocksPerSm = 2;
"""
FA2 = {
    "swizzle": ("OneHeadTile<80>", FA2_ROWS, "eight chunks of 64 columns"),
    "lanes": ("OneHeadTile<192>", FA2_ROWS, "64, 128, 256 or 512 columns"),
    "wide": ("OneHeadTile<384>", FA2_ROWS, "64, 128, 256 or 512 columns"),
    "columns of a product": ("Narrow<OneHeadTile<128>, 72>", FA2_ROWS, "products take 16 columns"),
    "shared columns": (
        "Narrow<OneHeadTile<256>, 192>",
        FA2_ROWS + "static constexpr int kSharers = 2;",
        "share columns",
    ),
    "combined columns": ("PackedTile<1024>", FA2_ROWS, "than the kernels that combine them"),
}
USES = {"fa3": "template struct Tile<Wrong>;", "fa2": "static_assert(is_consistent<Wrong>());"}
WRONG = [
    pytest.param(backend, base, members, sentence, id=f"{backend} {name}")
    for backend, tiles in (("fa3", FA3), ("fa2", FA2))
    for name, (base, members, sentence) in tiles.items()
]


def check_tables(folder: Path, text: str) -> list[str | Path]:
    source = folder / "tables.cpp"
    source.write_text(f'#include "fa2/config.h"\n#include "fa3/config.h"\n{text}\n')
    return [compilers.host_compiler(), "-std=c++17", "-fsyntax-only", *FOLDERS, source]


def test_the_tile_tables_compile(tmp_path):
    compilers.run(*check_tables(tmp_path, ""))


@pytest.mark.parametrize("backend,base,members,sentence", WRONG)
def test_tiles_that_would_be_wrong(tmp_path, backend, base, members, sentence):
    wrong = f"struct Wrong : {base} {{ {members} }}; {USES[backend]}"
    text = f"namespace cutlass_kernels::{backend} {{ {wrong} }}"
    assert says(compilers.refusal(*check_tables(tmp_path, text)), sentence)


# --- what takes the kernels themselves ------------------------------------------------------------------------------


def row(backend: str, element: str, qk: int, vo: int, template: str = "attention.cu.in") -> str:
    """The unit of a row of instances.cmake."""
    words = {"NAME": "row", "ELEMENT": element, "KV_ELEMENT": element, "HEAD_DIM_QK": str(qk), "HEAD_DIM_VO": str(vo)}
    words["AMPERE_TILES"] = "kEverywhere"
    text = (SOURCES / "src" / backend / template).read_text()
    return re.sub(r"@CK_(\w+)@", lambda match: words[match[1]], text)


SMALL_DEVICE = """
#include "fa2/launch.h"
namespace cutlass_kernels::fa2 {
struct Heavy : TileTable<128> {
  struct Packed : TileTable<128>::Packed {
    static constexpr int kBlockN = 64, kStages = 4;  // 144 KB
  };
};
constexpr bool serves = serves_every_device<Heavy>();
}  // namespace cutlass_kernels::fa2
"""
LARGE_BLOCK = """
#include "fa3/launch.h"
namespace cutlass_kernels::fa3 {
struct Stages : TileDefaults<128> {
  static constexpr int kKStages = 3, kVStages = 3, kOPanels = 2;
};
template Status launch_tile<bf16, Tile<Stages>, Logits::kPlain>(const LaunchParams&, cudaStream_t);
}  // namespace cutlass_kernels::fa3
"""
UNITS = {
    "wider values of fa2": (lambda: row("fa2", "fp16", 64, 128), "wider values would lose columns"),
    "wider values of e4m3": (lambda: row("fa3", "e4m3", 64, 128, "attention_fp8.cu.in"), "one head dimension"),
    "memory of a small device": (lambda: SMALL_DEVICE, "99 KB, the shared memory of compute capability 8.6"),
    "memory of fa3's CTA": (lambda: LARGE_BLOCK, "227 KB for one CTA"),
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
