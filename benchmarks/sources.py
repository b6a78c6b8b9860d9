"""What figures were measured on: a digest per folder of the kernels' sources, to tell whether they changed since."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SOURCES = Path(__file__).resolve().parent.parent / "cutlass_kernels" / "src"


def digests(sources: Path = SOURCES) -> dict[str, str]:
    """By folder of ``cutlass_kernels/src``; files beside the folders count as ``"others"``."""
    found: dict[str, list[Path]] = {}
    for path in sorted(sources.rglob("*")):
        if path.is_file() and path.suffix in (".h", ".cu", ".cpp", ".cuh"):
            parts = path.relative_to(sources).parts
            found.setdefault(parts[0] if len(parts) > 1 else "others", []).append(path)
    return {folder: _digest(paths, sources) for folder, paths in found.items()}


def _digest(paths: list[Path], sources: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        code = " ".join(re.sub(r"//.*", "", path.read_text()).split())  # neither comments nor line ends
        digest.update(f"{path.relative_to(sources).as_posix()}\0{code}\0".encode())
    return digest.hexdigest()[:12]
