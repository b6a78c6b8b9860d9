"""Plants faults in a copy of the Python package, one at a time, and says which test catches each.

    python tests/faults.py                # all faults of faults.toml
    python tests/faults.py --only chunk   # those whose name, file or tests match a regular expression
    python tests/faults.py --list

The tests run on the CPU, with the copy in front of the package. The exit status is 1 where a fault is missed.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tomllib  # of Python 3.11
from paths import ROOT, TESTS

PACKAGE = ROOT / "python" / "cutlass_kernels"
OPTIONS = ("-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Fault:
    """In ``file``, ``new`` stands in the place of ``old``, which occurs once, while ``tests`` run."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]

    def planted_in(self, text: str) -> str:
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.name}: old occurs {text.count(self.old)} times in {self.file}, or equals new.")
        return text.replace(self.old, self.new)


def load() -> list[Fault]:
    return [Fault(**fault) for fault in tomllib.loads((TESTS / "faults.toml").read_text())["fault"]]


def copy_of_package(folder: Path) -> Path:
    """The package, with links to its compiled files. Bytecode is checked by its source, not by time and size."""
    copy = folder / PACKAGE.name
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.so.*"))
    for binary in PACKAGE.glob("*.so*"):
        (copy / binary.name).symlink_to(binary)
    compileall.compile_dir(copy, quiet=1, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
    return copy


def caught_by(fault: Fault, copy: Path) -> str | None:
    """The first test that fails. RuntimeError where tests do not run: then the fault is no fault of behaviour."""
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command, file = [sys.executable, "-m", "pytest", *OPTIONS, *fault.tests], copy / fault.file
    text = file.read_text()
    file.write_text(fault.planted_in(text))
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    file.write_text(text)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", run.stdout, re.MULTILINE)
    if run.returncode != (failed is not None):
        raise RuntimeError(f"{fault.name}: its tests do not run.\n{run.stdout}{run.stderr}")
    return None if failed is None else failed[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help="faults whose name, file or tests match")
    parser.add_argument("--list", action="store_true", help="print names and run nothing")
    options, start, missed = parser.parse_args(), time.monotonic(), 0
    faults = [x for x in load() if any(re.search(options.only, text) for text in (x.name, x.file, *x.tests))]
    if options.list:
        print(*(fault.name for fault in faults), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_of_package(Path(folder))
        for fault in faults:
            test = caught_by(fault, copy)
            missed += test is None
            print(f"{fault.name}: {f'caught by {test}' if test else 'MISSED'}", flush=True)
    print(f"{len(faults)} faults, {len(faults) - missed} caught, {missed} missed in {time.monotonic() - start:.0f} s.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
