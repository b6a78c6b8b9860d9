"""Charts of bars, as SVG files that pages show.

Every chart has two layouts: wide, and one for phones. They have no background. Text and grid follow the colour scheme
of the page around them: Material and GitHub set `color-scheme`, which browsers hand to SVG images.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #333333 }
path { stroke: #00000026 }
@media (prefers-color-scheme: dark) { text { fill: #d8dae0 } path { stroke: #ffffff33 } }
</style>"""
# Ours first. Their contrast with white and with the dark backgrounds of Material and GitHub is 3:1 or more.
COLOURS = ("#639c00", "#4477aa", "#8c8c8c", "#b0702e")


@dataclass(frozen=True)
class Chart:
    """``panels``: by title, the figures by column and name, which stand beside ``across[0]`` others, on phones
    ``across[1]``. ``names``: of the bars, ours first, and what the reader sees. ``caption``: what the axes are."""

    names: Mapping[str, str]
    panels: Mapping[str, Mapping[str, Mapping[str, float]]]
    across: tuple[int, int]
    caption: str
    label: str  # for those who cannot see it

    def draw(self, narrow: bool) -> str:
        """An SVG file of 880 units across, or of 360."""
        width, height, axis, gap = (360, 100, 32, 10) if narrow else (880, 150, 36, 16)
        count = self.across[narrow]
        panel_width = (width - axis) / count - gap
        most = max(x for panel in self.panels.values() for column in panel.values() for x in column.values())
        top, step = _scale(most)
        out, y = _legend(self.names, axis, width)
        titles = list(self.panels)
        for first in range(0, len(titles), count):
            y += 26
            for i in range(math.ceil(top / step - 1e-9)):
                tick = y + 10 + height * (1 - i * step / top)
                out += [words(axis - 5, tick + 4, f"{i * step:g}", "end"), f'<path d="M{axis} {tick:.1f}H{width}"/>']
            for i, title in enumerate(titles[first : first + count]):
                left = axis + gap / 2 + i * (panel_width + gap)
                out.append(words(left + panel_width / 2, y, title, "middle"))
                out += self._bars(self.panels[title], (left, y + 10, panel_width, height), top)
            y += height + 25
        y += 5
        for line in textwrap.wrap(self.caption, width // 7):
            y += 18
            out.append(words(width / 2, y, line, "middle"))
        view = f'viewBox="0 0 {width} {y + 6}" role="img" aria-label="{self.label}"'
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {view}>', STYLE, *out, "</svg>", ""])

    def _bars(
        self, panel: Mapping[str, Mapping[str, float]], box: tuple[float, float, float, float], top: float
    ) -> list[str]:
        """In ``box`` (x, y, width, height), whose height stands for ``top``."""
        x, y, width, height = box
        group = width / len(panel)
        bar = group / (len(self.names) + 0.7)
        out = []
        for i, (column, figures) in enumerate(panel.items()):
            for place, (name, colour) in enumerate(zip(self.names, COLOURS)):
                if name not in figures:
                    continue
                left, tall = x + group * i + bar * (place + 0.35), height * figures[name] / top
                where = f'x="{left:.1f}" y="{y + height - tall:.1f}" width="{bar * 0.92:.1f}" height="{tall:.1f}"'
                out.append(f'<rect {where} fill="{colour}"/>')
            out.append(words(x + group * (i + 0.5), y + height + 15, column, "middle"))
        return out


def words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _scale(most: float) -> tuple[float, float]:
    """The end of an axis, and the distance of its lines: 1, 2 or 5 times a power of ten, about four of them."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * 4.6 >= most)
    return math.ceil(2 * most / step) * step / 2, step


def _legend(names: Mapping[str, str], axis: float, width: float) -> tuple[list[str], float]:
    out = []
    x, y = axis, 12.0
    for label, colour in zip(names.values(), COLOURS):
        length = 32 + 7 * len(label)
        if x + length > width:
            x, y = axis, y + 18
        out += [f'<rect x="{x:g}" y="{y - 9:g}" width="12" height="10" fill="{colour}"/>', words(x + 17, y, label)]
        x += length
    return out, y


def picture(file: str, text: str) -> str:
    """A chart as pages show it: raw HTML, which both MkDocs and GitHub pass on."""
    return f"""<picture>
  <source media="(max-width: 600px)" srcset="images/{file}-narrow.svg">
  <img src="images/{file}.svg" alt="{text}">
</picture>"""
