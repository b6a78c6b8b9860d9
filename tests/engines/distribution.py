"""A distribution with the entry points of pyproject.toml, as an installed wheel has them, of the sources at hand."""

from __future__ import annotations

import re
from pathlib import Path

from paths import ROOT


def entry_points_of_pyproject() -> dict[str, dict[str, str]]:
    """Group, name and object of each."""
    groups: dict[str, dict[str, str]] = {}
    text = (ROOT / "pyproject.toml").read_text()
    for group, body in re.findall(r'^\[project\.entry-points\."([^"]+)"\]\n((?:[^\[\n].*\n|\n)*)', text, re.M):
        groups[group] = dict(re.findall(r'^([\w-]+) = "([^"]+)"$', body, re.M))
    return groups


def write_distribution(folder: Path) -> None:
    """A folder for sys.path where importlib finds the entry points."""
    info = folder / "cutlass_kernels_plug_ins-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cutlass_kernels_plug_ins\nVersion: 0\n")
    lines: list[str] = []
    for group, names in entry_points_of_pyproject().items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
