"""Prefill beside its peers: the charts and tables of docs/performance.md, from the JSON file that a benchmark wrote.

docs/data/prefill.json is what `bench.py prefill --workload paper --out` wrote, without the figures of single rounds.
Every chart has two layouts: three columns of panels, and two for phones. They have no background. Text and grid follow
the colour scheme of the page around them: Material and GitHub set `color-scheme`, which browsers hand to SVG images.

python tools/draw_speed.py
"""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
DATA, PAGE = DOCS / "data" / "prefill.json", DOCS / "performance.md"
BEGIN, END = "<!-- prefill:begin -->", "<!-- prefill:end -->"
# Each of our backends beside the fastest peers of its kind: names in the file, names to read, colours. The contrast of
# these colours with white and with the dark backgrounds of Material and GitHub is 3:1 or more.
PICTURES = {
    "fa3": {
        "fa3": ("cutlass_kernels (fa3)", "#639c00"),
        "flash_attn_3": ("FlashAttention-3", "#4477aa"),
        "cudnn": ("cuDNN", "#8c8c8c"),
    },
    "fa2": {
        "fa2": ("cutlass_kernels (fa2)", "#639c00"),
        "flashinfer_fa2": ("FlashInfer (fa2)", "#4477aa"),
        "torch_fa2": ("PyTorch's FlashAttention-2", "#8c8c8c"),
    },
}
FILES = {"fa3": "speed", "fa2": "speed-fa2"}
DIMS, MASKS = ("hd64", "hd128", "hd256"), ("causal", "full")
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #333333 }
path { stroke: #00000026 }
@media (prefers-color-scheme: dark) { text { fill: #d8dae0 } path { stroke: #ffffff33 } }
</style>"""

Figures = dict[str, dict[str, dict[str, float]]]  # case, backend, length


def read() -> tuple[dict[str, Any], Figures]:
    data = json.loads(DATA.read_text())
    figures: Figures = {}
    for result in data["results"]:
        row = figures.setdefault(result["group"], {}).setdefault(result["backend"], {})
        row[result["column"]] = result["figure"]
    return data["environment"], figures


def ratios(figures: Figures, ours: str) -> dict[str, list[float]]:
    """Of each case: our speed by the fastest peer's, by length."""
    _, *peers = PICTURES[ours]
    return {
        case: [figure / max(rows[peer][length] for peer in peers) for length, figure in rows[ours].items()]
        for case, rows in figures.items()
    }


def table(figures: Figures, ours: str) -> str:
    lengths = list(next(iter(figures.values()))[ours])
    lines = [f"| TFLOP/s | | {' | '.join(lengths)} |", "|---" * (len(lengths) + 2) + "|"]
    for case, rows in figures.items():
        for backend, (name, _) in PICTURES[ours].items():
            label = f"**{ours}**" if backend == ours else name
            lines.append(f"| {case} | {label} | {' | '.join(f'{rows[backend][n]:.0f}' for n in lengths)} |")
        best = ratios(figures, ours)[case]
        lines.append(f"| {case} | {ours} / faster of the two | {' | '.join(f'{ratio:.2f}' for ratio in best)} |")
    return "\n".join(lines)


def summary(figures: Figures, ours: str) -> str:
    every = [ratio for case in ratios(figures, ours).values() for ratio in case]
    mean = math.exp(sum(math.log(ratio) for ratio in every) / len(every))
    _, *peers = (name for name, _ in PICTURES[ours].values())
    behind = sum(ratio < 1 for ratio in every)
    text = (
        f"Relative to the faster of {' and '.join(peers)}: geometric mean {mean:.2f}, least {min(every):.2f}, "
        f"slower in {behind or 'none'} of the {len(every)} cells."
    )
    return textwrap.fill(text, 120)


def picture(ours: str, text: str) -> str:
    """The chart of a backend as pages show it: raw HTML, which both MkDocs and GitHub pass on."""
    return f"""<picture>
  <source media="(max-width: 600px)" srcset="images/{FILES[ours]}-narrow.svg">
  <img src="images/{FILES[ours]}.svg" alt="{text}">
</picture>"""


def section(environment: dict[str, Any], figures: Figures) -> str:
    rounds = environment["settings"]["rounds"]
    lines = [
        BEGIN,
        f"{environment['gpu']}, driver {environment['driver']}, CUDA {environment['cuda']},",
        f"torch {environment['torch']}, FlashInfer {environment['flashinfer']}; {rounds} rounds in one process,",
        f"on {environment['date']} at commit {environment['commit']}.",
    ]
    for ours in PICTURES:
        _, *peers = (name for name, _ in PICTURES[ours].values())
        chart = picture(ours, f"Prefill: {ours}, {' and '.join(peers)}")
        lines += ["", f"### {ours}", "", chart, "", summary(figures, ours), "", table(figures, ours)]
    return "\n".join([*lines, END])


def update(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    return before + text + rest.split(END)[1]


def words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def panel(
    rows: dict[str, dict[str, float]], ours: str, box: tuple[float, float, float, float], top: float
) -> list[str]:
    """The bars of a case in ``box`` (x, y, width, height), whose height stands for ``top`` TFLOP/s."""
    x, y, width, height = box
    group = width / len(rows[ours])
    bar = group / (len(PICTURES[ours]) + 0.7)
    out = []
    for i, length in enumerate(rows[ours]):
        for place, (backend, (_, colour)) in enumerate(PICTURES[ours].items()):
            left, tall = x + group * i + bar * (place + 0.35), height * rows[backend][length] / top
            where = f'x="{left:.1f}" y="{y + height - tall:.1f}" width="{bar * 0.92:.1f}" height="{tall:.1f}"'
            out.append(f'<rect {where} fill="{colour}"/>')
        out.append(words(x + group * (i + 0.5), y + height + 15, length, "middle"))
    return out


def draw(environment: dict[str, Any], figures: Figures, ours: str, narrow: bool) -> str:
    """An SVG file: 880 units wide with a row per mask, or 360 wide with a row per head dimension."""
    width, height, axis, gap = (360, 100, 32, 10) if narrow else (880, 150, 36, 16)
    grid = [[(dim, mask) for mask in MASKS] for dim in DIMS] if narrow else [[(d, m) for d in DIMS] for m in MASKS]
    panel_width = (width - axis) / len(grid[0]) - gap
    most = max(figure for rows in figures.values() for backend in PICTURES[ours] for figure in rows[backend].values())
    top, step = 100 * math.ceil(most / 100), 100 if most < 500 else 200
    out = []
    x, y = axis, 12
    for label, colour in PICTURES[ours].values():
        length = 32 + 7 * len(label)
        if x + length > width:
            x, y = axis, y + 18
        out += [f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>', words(x + 17, y, label)]
        x += length
    for row in grid:
        y += 26
        for figure in range(0, top, step):
            tick = y + 10 + height * (1 - figure / top)
            out += [words(axis - 5, tick + 4, str(figure), "end"), f'<path d="M{axis} {tick:.1f}H{width}"/>']
        for i, (dim, mask) in enumerate(row):
            left = axis + gap / 2 + i * (panel_width + gap)
            out.append(words(left + panel_width / 2, y, f"head dim {dim.removeprefix('hd')}, {mask}", "middle"))
            out += panel(figures[f"{dim} {mask}"], ours, (left, y + 10, panel_width, height), top)
        y += height + 25
    y += 5
    where = f"{environment['gpu']}, {environment['date']}, commit {environment['commit']}"
    for line in textwrap.wrap(f"TFLOP/s by sequence length. bfloat16, 16k tokens in all. {where}.", width // 7):
        y += 18
        out.append(words(width / 2, y, line, "middle"))
    label = f"Prefill in TFLOP/s: {', '.join(name for name, _ in PICTURES[ours].values())}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 6}" role="img" aria-label="{label}">'
    return "\n".join([head, STYLE, *out, "</svg>", ""])


def files() -> dict[Path, str]:
    """Everything that this script writes."""
    environment, figures = read()
    charts = {
        DOCS / "images" / f"{name}{'-narrow' if narrow else ''}.svg": draw(environment, figures, ours, narrow)
        for ours, name in FILES.items()
        for narrow in (False, True)
    }
    return {PAGE: update(PAGE.read_text(), section(environment, figures)), **charts}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
