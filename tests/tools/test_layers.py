"""The folders of the Python package import downwards, as the table in cutlass_kernels/src/README.md says."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from paths import ROOT

PACKAGE = ROOT / "python" / "cutlass_kernels"


def layers() -> dict[str, int]:
    """The row of each folder in the table, counted from the top; "." is that of public names."""
    text = (ROOT / "cutlass_kernels" / "src" / "README.md").read_text()
    table = text[text.index("## The Python package") :].split("|---|---|\n")[1].split("\n\n")[0]
    rows = [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in table.splitlines()]
    return {folder: i for i, row in enumerate(rows) for folder in row}


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0] if path.parent != PACKAGE else "."


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and folder of what a module imports from the package, within functions too, but not for types."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            start = path.parents[node.level - 1]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for found in (start.joinpath(*name.split(".")) for name in names):
                if found.relative_to(PACKAGE).parts[0] != "_C":  # the compiled module
                    yield node.lineno, folder_of(found / "x" if found.is_dir() else found)
        yield from imports(node, path)


def test_every_folder_has_a_row():
    assert {folder_of(path) for path in PACKAGE.rglob("*.py")} == set(layers())


def test_folders_import_downwards():
    rows = layers()
    upwards = [
        f"{path.relative_to(PACKAGE)}:{line} imports from {folder}"
        for path in PACKAGE.rglob("*.py")
        for line, folder in imports(ast.parse(path.read_text()), path)
        if rows[folder] < rows[folder_of(path)] and path.name != "__main__.py"
    ]
    assert not upwards
