"""Draws docs/images/fa3.svg, fa2.svg and latent-slots.svg: who does what when in a thread block. Widths are not to
scale.

The pictures have no background. Text and lines follow the colour scheme of the page, as those of charts.py do.

python tools/draw_pipelines.py
"""

from __future__ import annotations

from pathlib import Path

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
GREEN, DARK, ORANGE, BLUE, VIOLET = "#76b900", "#4a7c00", "#e69f00", "#4477aa", "#8c6bb1"
TEAL, GREY = "#00796b", "#707070"
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
Rows = list[tuple[str, list[Box]]]


def fa3() -> Rows:
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


def fa2() -> Rows:
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

    rows: Rows = []
    for name, shift in (("block 1", 0.0), ("block 2", 1.9)):
        tensor, other, loads = block(shift)
        rows += [(f"{name}: mma.sync", tensor), (f"{name}: softmax", other), (f"{name}: cp.async", loads)]
    return rows


def latent_pair() -> Rows:
    """One CTA of a pair: halves of the columns are copied in turns, and widened in place. The other does the same."""
    halves = ("a left", "a right", "b right", "b left")
    next_halves = ("c left", "c right")

    def in_turn(start: float, next_start: float, colour: str) -> list[Box]:
        first = [(start + i, 1.0, half, colour) for i, half in enumerate(halves)]
        return [*first, *((next_start + i, 1.0, half, colour) for i, half in enumerate(next_halves))]

    values: list[Box] = [(7, 1, "P V(a)", DARK), (8.6, 1, "P V(b)", DARK)]
    return [
        ("slots of lists", [(0, 1, "slots", VIOLET)]),
        ("cp.async, in place", in_turn(1, 8, BLUE)),
        ("widen, st.async", in_turn(2, 9, TEAL)),
        ("st.async from CTA 1", in_turn(2, 9, TEAL)),
        ("stage 0", [(1, 7, "64 keys of a", GREY), (8, 3, "64 keys of c", GREY)]),
        ("stage 1", [(3, 6.6, "64 keys of b", GREY)]),
        ("warpgroup 0: S, O left", [(3, 2, "S(a)", GREEN), *values, (10, 1, "S(c)", GREEN)]),
        ("warpgroup 0: softmax", [(5, 0.8, "P(a)", ORANGE)]),
        ("panel of the positions", [(5.8, 0.8, "P(a)", GREY), (7.8, 0.8, "P(b)", GREY)]),
        ("warpgroup 1: S, O right", [(5, 2, "S(b)", GREEN), *values]),
        ("warpgroup 1: softmax", [(7, 0.8, "P(b)", ORANGE)]),
    ]


def latent_few_heads() -> Rows:
    """A tile of three blocks. Copies run ahead of the stages. Each warpgroup has blocks, and an O, of its own."""

    def block(start: float, j: str) -> tuple[list[Box], list[Box]]:
        products: list[Box] = [(start, 1, f"S^T({j})", GREEN), (start + 1.8, 1.4, f"O^T({j})", DARK)]
        return products, [(start + 1, 0.8, f"P({j})", ORANGE)]

    (a, p_a), (b, p_b), (c, p_c) = block(3, "a"), block(4, "b"), block(7.2, "c")
    copies: list[Box] = [(1 + i, 1, j, BLUE) for i, j in enumerate("abc")]
    return [
        ("slots of lists", [(0, 1, "slots", VIOLET)]),
        ("bulk copies to records", [*copies, (7.2, 3, "next tile", BLUE)]),
        ("widen into a stage", [(2, 1, "a", TEAL), (3, 1, "b", TEAL), (6.2, 1, "c", TEAL)]),
        ("stage 0", [(2, 4.2, "64 keys of a", GREY), (6.2, 4.2, "64 keys of c", GREY)]),
        ("stage 1", [(3, 4.2, "64 keys of b", GREY), (7.2, 3.8, "O of warpgroup 1", GREY)]),
        ("warpgroup 0: wgmma", [*a, *c, (10.4, 0.6, "join", VIOLET)]),
        ("warpgroup 0: softmax", [*p_a, *p_c]),
        ("warpgroup 1: wgmma", b),
        ("warpgroup 1: softmax", p_b),
    ]


def latent_slots() -> str:
    panels = {
        "64 rows, CTA 0 of a pair: four producer warps, which widen half of the keys": latent_pair(),
        "Up to 16 heads: sixteen producer warps, keys are the rows of wgmma": latent_few_heads(),
    }
    return draw(panels, "fa3: latent attention over selected tokens of a quantized cache", unit=48, left=168)


def draw(panels: dict[str, Rows], label: str = "", unit: float = UNIT, left: int = LEFT) -> str:
    """Panels by their titles, one below the other."""
    end = max(start + width for rows in panels.values() for _, boxes in rows for start, width, _, _ in boxes)
    width = int(left + end * unit + 20)
    height = sum(50 + ROW * len(rows) for rows in panels.values())
    label = label or next(iter(panels))
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}"',
        '  font-family="system-ui, sans-serif" font-size="13">',
        STYLE,
    ]
    top = 0
    for title, rows in panels.items():
        out.append(f'<text x="12" y="{top + 24}" font-weight="bold">{title}</text>')
        for i, (name, boxes) in enumerate(rows):
            y = top + 40 + ROW * i
            out.append(f'<text x="12" y="{y + 18}">{name}</text>')
            out.append(f'<path d="M{left} {y + 13}H{width - 12}"/>')
            for start, length, text, colour in boxes:
                x, box = left + start * unit, length * unit - 2
                out.append(f'<rect x="{x:.0f}" y="{y}" width="{box:.0f}" height="26" rx="3" fill="{colour}"/>')
                on = "black" if colour in ON_LIGHT else "white"
                out.append(f'<text x="{x + box / 2:.0f}" y="{y + 18}" text-anchor="middle" class="{on}">{text}</text>')
        top += 50 + ROW * len(rows)
    return "\n".join([*out, "</svg>", ""])


def files() -> dict[Path, str]:
    """Everything that this script writes."""
    return {
        IMAGES / "fa3.svg": draw({"fa3: one CTA, from the last KV block to the first": fa3()}),
        IMAGES / "fa2.svg": draw({"fa2: two thread blocks of an SM, from the last KV block to the first": fa2()}),
        IMAGES / "latent-slots.svg": latent_slots(),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
