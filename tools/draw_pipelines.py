"""Draws docs/images/fa3.svg and fa2.svg: who does what when in a thread block. Widths are not to scale.

The pictures have no background. Text and lines follow the colour scheme of the page, as those of charts.py do.

python tools/draw_pipelines.py
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
GREEN, DARK, ORANGE, BLUE, VIOLET = "#76b900", "#4a7c00", "#e69f00", "#4477aa", "#8c6bb1"
ON_LIGHT = (GREEN, ORANGE)  # text on these boxes is black, on others white
STYLE = """<style>
text { fill: #333333 }
path { stroke: #00000026 }
@media (prefers-color-scheme: dark) { text { fill: #d8dae0 } path { stroke: #ffffff33 } }
.black { fill: #000000 }
.white { fill: #ffffff }
</style>"""
UNIT, LEFT, ROW = 82, 190, 34

Box = tuple[float, float, str, str]  # start, width, text, colour


def fa3() -> list[tuple[str, list[Box]]]:
    """Two consumer warpgroups take turns at the tensor cores: one computes exponentials under the other's products."""

    def products(turn: float) -> list[Box]:
        boxes: list[Box] = []
        for step, j in enumerate(("j", "j-1", "j-2")):
            before = "" if step == 0 else ("j", "j-1")[step - 1]
            start = turn + 4 * step
            if start < 9:
                boxes.append((start, 1, f"S({j})", GREEN))
                boxes.append((start + 1, 1, f"P V({before})" if before else "P V(j+1)", DARK))
        return boxes

    def softmax(turn: float) -> list[Box]:
        starts = {"j": turn + 1, "j-1": turn + 5}
        return [(start, 3, f"P({j})", ORANGE) for j, start in starts.items() if start < 7]

    return [
        ("warp 0: next tile", [(5, 1.2, "find tile", VIOLET)]),
        ("warp 1: Q", [(6.2, 1.6, "Q of next tile", BLUE)]),
        ("warp 2: K", [(0, 1.8, "K(j-1)", BLUE), (4, 1.8, "K(j-2)", BLUE), (8, 1.8, "K(j-3)", BLUE)]),
        ("warp 3: V", [(1, 1.8, "V(j)", BLUE), (4.2, 1.8, "V(j-1)", BLUE), (8, 1.8, "V(j-2)", BLUE)]),
        ("warpgroup 1: wgmma", products(0)),
        ("warpgroup 1: softmax", softmax(0)),
        ("warpgroup 2: wgmma", products(2)),
        ("warpgroup 2: softmax", softmax(2)),
    ]


def fa2() -> list[tuple[str, list[Box]]]:
    """Two thread blocks on an SM; in each, P is taken 16 keys ahead of the products that need it."""

    def block(shift: float) -> tuple[list[Box], list[Box], list[Box]]:
        tensor: list[Box] = []
        other: list[Box] = []
        loads: list[Box] = []
        for step, j in enumerate(("j", "j-1")):
            start = shift + 4.2 * step
            tensor += [(start, 1.4, f"S({j})", GREEN), (start + 2.2, 2, f"P V({j})", DARK)]
            other += [(start + 1.4, 0.8, "max", ORANGE), (start + 2.2, 1.8, f"P({j})", ORANGE)]
            loads += [(start + 1.4, 0.8, ("j-2", "j-3")[step], BLUE)]
        return tensor, other, loads

    rows: list[tuple[str, list[Box]]] = []
    for name, shift in (("block 1", 0.0), ("block 2", 1.9)):
        tensor, other, loads = block(shift)
        rows += [(f"{name}: mma.sync", tensor), (f"{name}: softmax", other), (f"{name}: cp.async", loads)]
    return rows


def draw(rows: list[tuple[str, list[Box]]], title: str) -> str:
    end = max(start + width for _, boxes in rows for start, width, _, _ in boxes)
    width, height = int(LEFT + end * UNIT + 20), 50 + ROW * len(rows)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}"',
        '  font-family="system-ui, sans-serif" font-size="13">',
        STYLE,
        f'<text x="12" y="24" font-weight="bold">{title}</text>',
    ]
    for i, (name, boxes) in enumerate(rows):
        y = 40 + ROW * i
        out.append(f'<text x="12" y="{y + 18}">{name}</text>')
        out.append(f'<path d="M{LEFT} {y + 13}H{width - 12}"/>')
        for start, length, text, colour in boxes:
            x, box = LEFT + start * UNIT, length * UNIT - 2
            out.append(f'<rect x="{x:.0f}" y="{y}" width="{box:.0f}" height="26" rx="3" fill="{colour}"/>')
            on = "black" if colour in ON_LIGHT else "white"
            out.append(f'<text x="{x + box / 2:.0f}" y="{y + 18}" text-anchor="middle" class="{on}">{text}</text>')
    return "\n".join([*out, "</svg>", ""])


def files() -> dict[Path, str]:
    """Everything that this script writes."""
    return {
        IMAGES / "fa3.svg": draw(fa3(), "fa3: one CTA, from the last KV block to the first"),
        IMAGES / "fa2.svg": draw(fa2(), "fa2: two thread blocks of an SM, from the last KV block to the first"),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
