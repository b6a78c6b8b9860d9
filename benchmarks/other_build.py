"""A second build of this library in the same process, under another name: old and new on the same tensors, in turns.

    python benchmarks/bench.py decode --backends fa2 --against ../old/python  # a checkout with its compiled extension
    pip install --no-deps --target ../installed . && python benchmarks/bench.py host --against ../installed

load() imports a copy of the package in which everything is renamed that two builds would share in one process:

- the package's name, in all its sources. Modules go by it, and so do the operators that torch.library registers.
- the name under which pybind11 keeps its table of types, in the bytes of the extension. Extensions of one ABI share the
  table, and a type that is in it already cannot be registered again.
- the name of the shared library with the kernels, in its own bytes and in those of the extension. The loader gives an
  extension the library of that name that is loaded already.
"""

from __future__ import annotations

import atexit
import importlib.util
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

PACKAGE = "cutlass_kernels"
NAME = f"{PACKAGE}_other"
_LIBRARY, _OTHER_LIBRARY = b"libcutlass_kernels.so", b"libcutlass_kernelo.so"  # of the same length
_TABLE_OF_TYPES = re.compile(rb"(__pybind11_(?:internals|module_local))_v(\d+_)")


def load(folder: Path, name: str = NAME) -> ModuleType:
    """The package in ``folder`` as the module ``name``; the module itself where it has been loaded before.

    Raises:
        ValueError: ``folder`` does not hold the package.
    """
    if name in sys.modules:
        return sys.modules[name]
    source = folder / PACKAGE
    if not (source / "__init__.py").is_file():
        raise ValueError(
            f"{folder} holds no Python package {PACKAGE}: give the folder `python` of a checkout, or one that "
            "`pip install --target` installed into."
        )
    scratch = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    copy = scratch / name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in copy.rglob("*.py"):
        path.write_text(path.read_text().replace(PACKAGE, name))
    for path in [*copy.glob("*.so"), *copy.glob("*.so.*")]:
        renamed = _TABLE_OF_TYPES.sub(rb"\1_o\2", path.read_bytes())  # of the same length
        path.unlink()
        path = copy / path.name.replace(_LIBRARY.decode(), _OTHER_LIBRARY.decode())
        path.write_bytes(renamed.replace(_LIBRARY, _OTHER_LIBRARY))
    spec = importlib.util.spec_from_file_location(name, copy / "__init__.py", submodule_search_locations=[str(copy)])
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
