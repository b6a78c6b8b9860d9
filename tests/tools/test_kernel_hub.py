"""The layout of Hugging Face's kernel hub, loaded by its own package from a local folder."""

from __future__ import annotations

import zipfile
from pathlib import Path

import kernel_hub
import pytest
from commands import python

import cutlass_kernels


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """The installed package as a wheel."""
    package = Path(cutlass_kernels.__file__).parent
    made = tmp_path / "cutlass_kernels-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path in package.rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                archive.write(path, f"cutlass_kernels/{path.relative_to(package)}")
        archive.writestr("cutlass_kernels-1.2.3.dist-info/METADATA", "")
    return made


def test_the_package_is_laid_out_once(wheel: Path, tmp_path: Path) -> None:
    variant = kernel_hub.lay_out(wheel, tmp_path / "hub")
    assert variant == tmp_path / "hub" / "build" / "torch-cuda"
    assert {"__init__.py", "metadata.json", "prefill.py"} <= {path.name for path in variant.iterdir()}
    assert not [path for path in variant.rglob("*") if "dist-info" in str(path)]
    with pytest.raises(SystemExit, match="remove it"):
        kernel_hub.lay_out(wheel, tmp_path / "hub")


def test_the_hubs_package_loads_it(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason="kernels, the package of the hub, is not installed")
    kernel_hub.lay_out(wheel, tmp_path / "hub", backend="cpu")
    program = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
ck = get_local_kernel(Path(sys.argv[1]), backend="cpu")
q, k, v = torch.randn(3, 5, 2, 16)
print(ck.__file__, ck.single_prefill_with_kv_cache(q, k, v, causal=True).shape, "cutlass_kernels" in sys.modules)
"""
    file = tmp_path / "hub/build/torch-cpu/__init__.py"
    done = python("-c", program, tmp_path / "hub", cwd=tmp_path)
    assert done.stdout == f"{file} torch.Size([5, 2, 16]) False\n"
