"""Lays out a wheel as Hugging Face's kernel hub loads it: ``build/<variant>/`` with the package and its metadata.

    python tools/kernel_hub.py dist/cutlass_kernels-*.whl --out hub
    python -c "from kernels import get_local_kernel; from pathlib import Path; get_local_kernel(Path('hub'))"

The extension uses neither libtorch nor its headers, so one variant serves every version of torch: ``torch-cuda``.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path

PACKAGE = "cutlass_kernels"


def lay_out(wheel: Path, out: Path, backend: str = "cuda") -> Path:
    """Writes ``out/build/torch-<backend>``, which must not exist, and returns it."""
    variant = out / "build" / f"torch-{backend}"
    if variant.exists():
        raise SystemExit(f"{variant} exists: remove it, or choose another --out.")
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(f"{PACKAGE}/"):
                target = variant / name.removeprefix(f"{PACKAGE}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))
    metadata = {
        "id": f"{PACKAGE}_{backend}_{version.replace('.', '_')}",
        "name": PACKAGE.replace("_", "-"),
        "version": 1,  # of the interface
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument(
        "--out", type=Path, default=Path("hub"), help="the folder of the hub's repository (default: hub)"
    )
    parser.add_argument("--backend", default="cuda", choices=("cuda", "cpu"), help="what the variant is for")
    given = parser.parse_args()
    print(lay_out(given.wheel, given.out, given.backend))


if __name__ == "__main__":
    main()
