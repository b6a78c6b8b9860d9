"""Builds the wheel that is released: kernels once in a shared library, and an extension for each CPython found.

    python tools/build_wheel.py                                   # CPython 3.10 to 3.14, as far as they are on PATH
    python tools/build_wheel.py --python /opt/python/cp310-cp310/bin/python --python /opt/python/cp314-cp314/bin/python

The wheel is tagged for all these interpreters and for manylinux_2_28. It is one file because the kernels are nearly all
of its size: a wheel per interpreter would hold them again each time. Needs `pip install auditwheel wheel`, nothing else
that `pip install .` does not need.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PLATFORM = "manylinux_2_28_x86_64"
MOST_BYTES = 25 << 20
ARCHS = "80;90;ptx"


def output_of(*command: str | Path) -> str:
    return subprocess.run([str(x) for x in command], check=True, capture_output=True, text=True).stdout


def tag_of(python: str) -> str | None:
    """``cp312`` of an interpreter that extensions can be compiled for; None of any other."""
    program = (
        "import sys, sysconfig, os; assert sys.implementation.name == 'cpython';"
        "assert not sysconfig.get_config_var('Py_GIL_DISABLED');"
        "assert os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'));"
        "print('cp%d%d' % sys.version_info[:2])"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def found_pythons() -> list[str]:
    return [found for version in VERSIONS if (found := shutil.which(f"python{version}"))]


def interpreters(candidates: list[str]) -> dict[str, str]:
    """By tag; the one that runs this program first, as it builds."""
    tags: dict[str, str] = {}
    for python in [sys.executable, *candidates]:
        tag = tag_of(python)
        if tag is None:
            print(f"{python}: not a CPython with headers, left out", file=sys.stderr)
        elif tag[2:] in {version.replace(".", "") for version in VERSIONS}:
            tags.setdefault(tag, python)
    if not tags:
        raise SystemExit("No CPython from 3.10 to 3.14 with headers was found: name one with --python.")
    return tags


def build(tags: dict[str, str], folder: Path, archs: str, options: list[str]) -> Path:
    """The wheel as pip builds it, for the first interpreter by its tag."""
    builder, *others = tags.values()
    settings = [
        f"cmake.define.CK_ARCHS={archs}",
        "cmake.define.CK_MANYLINUX=ON",
        f"cmake.define.CK_EXTENSION_PYTHONS={';'.join(others)}",
        *(f"cmake.define.{option}" for option in options),
    ]
    command = [builder, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--verbose", "--wheel-dir", str(folder)]
    subprocess.run([*command, *(part for x in settings for part in ("--config-settings", x))], check=True)
    (wheel,) = folder.glob("cutlass_kernels-*.whl")
    return wheel


def retag(wheel: Path, tags: dict[str, str]) -> Path:
    names = ".".join(sorted(tags, key=lambda tag: int(tag[2:])))
    options = ("--remove", "--python-tag", names, "--abi-tag", names, "--platform-tag", PLATFORM)
    name = output_of(sys.executable, "-m", "wheel", "tags", *options, wheel).split()[-1]
    return wheel.parent / name


def audit(wheel: Path) -> None:
    """Stops unless the wheel is what its tag says, and not too large."""
    shown = " ".join(output_of(sys.executable, "-m", "auditwheel", "show", wheel).split())
    match = re.search(r'consistent with the following platform tag: "(manylinux_(\d+)_(\d+)_x86_64)"', shown)
    if match is None or (int(match[2]), int(match[3])) > (2, 28):
        raise SystemExit(f"{wheel.name} is not {PLATFORM}: {shown}")
    if wheel.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", help="an interpreter to build for (default: those on PATH)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheel goes (default: dist)")
    parser.add_argument("--archs", default=ARCHS, help=f"as CK_ARCHS (default: {ARCHS})")
    parser.add_argument("--option", action="append", default=[], help="a build option, such as CK_HEAD_DIMS=128")
    given = parser.parse_args()
    tags = interpreters(given.python or found_pythons())
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = retag(build(tags, Path(folder), given.archs, given.option), tags)
        audit(wheel)
        kept = given.out / wheel.name
        shutil.move(wheel, kept)
    print(f"{kept}: {kept.stat().st_size / 2**20:.1f} MiB, {', '.join(tags)}, {PLATFORM}")


if __name__ == "__main__":
    main()
