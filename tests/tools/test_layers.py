"""The folders of the Python package import downwards, as the table in cutlass_kernels/src/README.md says."""

from __future__ import annotations

import ast
import graphlib
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


def imports(path: Path) -> Iterator[tuple[int, Path]]:
    """What a module imports from the package, within functions and for types, too: line, and module or folder."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            start = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            for found in [start / alias.name for alias in node.names] if start.is_dir() else [start]:
                found = found if found.is_dir() else found.with_suffix(".py")
                if found.exists():  # not the compiled module
                    yield node.lineno, found
                elif found.name != "_C.py":  # a name of a folder
                    yield node.lineno, start / "__init__.py"


def test_every_folder_has_a_row():
    assert {folder_of(path) for path in PACKAGE.rglob("*.py")} == set(layers())


def test_folders_import_downwards():
    rows = layers()
    upwards = [
        f"{path.relative_to(PACKAGE)}:{line} imports from {folder}"
        for path in PACKAGE.rglob("*.py")
        for line, found in imports(path)
        if rows[folder := folder_of(found / "x" if found.is_dir() else found)] < rows[folder_of(path)]
        and path.name != "__main__.py"
    ]
    assert not upwards


def test_no_module_imports_itself_through_others():
    modules = [path for path in PACKAGE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    graph = {path: {found for _, found in imports(path) if found.name != "__init__.py"} for path in modules}
    tuple(graphlib.TopologicalSorter(graph).static_order())  # raises for a circle
