"""Draws docs/images/speed.svg from docs/data/prefill.json: prefill of this library and of its peers.

pip install matplotlib && python tools/draw_speed.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

ROOT = Path(__file__).resolve().parent.parent
DATA, PICTURE = ROOT / "docs" / "data" / "prefill.json", ROOT / "docs" / "images" / "speed.svg"
CASES = {
    "hd64 causal": "head dim 64, causal",
    "hd128 causal": "head dim 128, causal",
    "hd256 causal": "head dim 256, causal",
    "hd64 full": "head dim 64",
    "hd128 full": "head dim 128",
    "hd256 full": "head dim 256",
}
SERIES = {
    "fa3": ("cutlass_kernels", "#76b900"),
    "FlashAttention-3": ("FlashAttention-3", "#4477aa"),
    "cuDNN": ("cuDNN", "#bbbbbb"),
}


def draw() -> None:
    data = json.loads(DATA.read_text())
    # Text stays text, and the file is the same for the same data.
    pyplot.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "speed", "font.size": 9, "font.family": "sans-serif"}
    )
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 5), sharey=True, constrained_layout=True)
    for axis, (case, title) in zip(axes.flat, CASES.items()):
        for i, (name, (label, colour)) in enumerate(SERIES.items()):
            places = [x + 0.27 * (i - 1) for x in range(len(data["lengths"]))]
            axis.bar(places, data["cases"][case][name], 0.25, color=colour, label=label)
        axis.set_xticks(range(len(data["lengths"])), data["lengths"])
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    for row in axes:
        row[0].set_ylabel("TFLOP/s")
    figure.supxlabel(f"sequence length; bfloat16, 16k tokens in all, {data['gpu']}, {data['date']}", fontsize=9)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    figure.patch.set_facecolor("white")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    draw()
