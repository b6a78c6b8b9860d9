"""Prefill beside its peers: two pictures and a table of docs/, from the JSON file that a benchmark wrote.

docs/data/prefill.json is what `bench.py prefill --workload paper --out` wrote, without the figures of single rounds.

pip install matplotlib && python tools/draw_speed.py
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
# Each of our backends beside the fastest peers of its kind: names in the file, names to read, colours.
PICTURES = {
    "fa3": {
        "fa3": ("cutlass_kernels (fa3)", "#76b900"),
        "flash_attn_3": ("FlashAttention-3", "#4477aa"),
        "cudnn": ("cuDNN", "#bbbbbb"),
    },
    "fa2": {
        "fa2": ("cutlass_kernels (fa2)", "#76b900"),
        "flashinfer_fa2": ("FlashInfer (fa2)", "#4477aa"),
        "torch_fa2": ("PyTorch's FlashAttention-2", "#bbbbbb"),
    },
}
FILES = {"fa3": "speed.svg", "fa2": "speed-fa2.svg"}
CASES = ("hd64 causal", "hd128 causal", "hd256 causal", "hd64 full", "hd128 full", "hd256 full")

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
        picture = f"![Prefill: {ours}, {' and '.join(peers)}](images/{FILES[ours]})"
        lines += ["", f"### {ours}", "", picture, "", summary(figures, ours), "", table(figures, ours)]
    return "\n".join([*lines, END])


def update(page: str, text: str) -> str:
    before, rest = page.split(BEGIN)
    return before + text + rest.split(END)[1]


def draw(environment: dict[str, Any], figures: Figures, ours: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    # Text stays text, and the file is the same for the same data.
    pyplot.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "speed", "font.size": 9, "font.family": "sans-serif"}
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5), sharey=True, constrained_layout=True)
    for axis, case in zip(axes.flat, CASES):
        rows = figures[case]
        for i, (backend, (label, colour)) in enumerate(PICTURES[ours].items()):
            places = [x + 0.27 * (i - 1) for x in range(len(rows[backend]))]
            axis.bar(places, list(rows[backend].values()), 0.25, color=colour, label=label)
        axis.set_xticks(range(len(rows[ours])), list(rows[ours]))
        dim, mask = case.removeprefix("hd").split()
        axis.set_title(f"head dim {dim}{', causal' if mask == 'causal' else ''}", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    where = f"{environment['gpu']}, {environment['date']}, commit {environment['commit']}"
    figure.supxlabel(f"sequence length; bfloat16, 16k tokens in all, {where}", fontsize=9)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.patch.set_facecolor("white")
    figure.savefig(DOCS / "images" / FILES[ours], metadata={"Date": None})


if __name__ == "__main__":
    environment, figures = read()
    for ours in PICTURES:
        draw(environment, figures, ours)
    PAGE.write_text(update(PAGE.read_text(), section(environment, figures)))
