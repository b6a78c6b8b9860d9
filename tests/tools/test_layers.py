"""The Python package imports downwards, as the table in cutlass_kernels/src/README.md says."""

from __future__ import annotations

import ast
import re

from paths import ROOT

PACKAGE = ROOT / "python" / "cutlass_kernels"


def layers() -> dict[str, int]:
    """The row of each module in the table, counted from the top."""
    text = (ROOT / "cutlass_kernels" / "src" / "README.md").read_text()
    table = text[text.index("## The Python package") :].split("|---|---|\n")[1].split("\n\n")[0]
    rows = [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()]
    return {module: i for i, row in enumerate(rows) for module in row}


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    """Line and name of each module of the package that a module imports, within functions too, but not for types."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [(node.lineno, name) for name in ([node.module] if node.module else [x.name for x in node.names])]
        found += imports(node)
    return found


def test_every_module_has_a_row():
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__main__"}
    assert modules == set(layers())


def test_modules_import_downwards():
    rows = layers()
    upwards = [
        f"{path.name}:{line} imports {module}"
        for path in PACKAGE.glob("*.py")
        if path.stem in rows
        for line, module in imports(ast.parse(path.read_text()))
        if module in rows and rows[module] < rows[path.stem]
    ]
    assert not upwards
