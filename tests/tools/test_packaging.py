"""What is installed, and what it drags in: nothing but the C++ runtime."""

from __future__ import annotations

import re
import shutil
import subprocess
import zipfile
from importlib.metadata import files, requires, version
from pathlib import Path

import pytest
from commands import python
from paths import ROOT

SYSTEM_LIBRARIES = re.compile(r"^(libstdc\+\+|libgcc_s|libc|libm|libdl|librt|libpthread|ld-linux-x86-64)\.so(\.\d+)?$")


def binutils(*command: str | Path) -> str:
    if shutil.which(str(command[0])) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def needed_by(file: Path) -> set[str]:
    """Libraries that are not the system's."""
    needed = re.findall(r"\(NEEDED\).*\[(.+?)\]", binutils("readelf", "-d", file))
    assert needed
    return {name for name in needed if not SYSTEM_LIBRARIES.match(name)}


def test_no_torch_cuda_runtime_or_driver_is_needed(extension: Path, library: Path) -> None:
    assert needed_by(extension) == {library.name}
    assert not needed_by(library)
    paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", binutils("readelf", "-d", extension))
    assert paths == ["$ORIGIN"]
    assert not re.search(r"\((RUNPATH|RPATH)\)", binutils("readelf", "-d", library))


def test_kernels_are_stored_once(extension: Path, library: Path) -> None:
    assert extension.stat().st_size < 2 << 20 < library.stat().st_size


def test_extension_exports_only_its_entry_point(extension: Path) -> None:
    symbols = [line.split()[-1] for line in binutils("nm", "-D", "--defined-only", extension).splitlines()]
    assert symbols == ["PyInit__C"], "a second CUDA runtime in the process must not be able to bind to ours"


def test_extension_imports_without_gpu_and_without_torch(extension: Path) -> None:
    program = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_C", {str(extension)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert "torch" not in sys.modules
print(module.version(), len(module.list_kernels()), module.cutlass_version, module.commit or "-", *module.machine_codes)
"""
    done = python("-c", program, CUDA_VISIBLE_DEVICES="")
    extension_version, count, cutlass_version, commit, *machine_codes = done.stdout.split()
    assert extension_version == version("cutlass_kernels")
    assert int(count) > 0
    assert re.fullmatch(r"[34]\.\d+\.\d+", cutlass_version)
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|-", commit)
    assert all(re.fullmatch(r"\d{2,3}", code) for code in machine_codes)


def test_launch_without_gpu_is_a_sentence(extension: Path) -> None:
    program = """
from cutlass_kernels import _C
address = 1 << 20
try:
    _C.merge_states("float16", 1, 2, 1, 64, address, 128, 64, 64, address, 2, 1, 1, address, address, 0)
except RuntimeError as error:
    print(error)
"""
    done = python("-c", program, CUDA_VISIBLE_DEVICES="")
    assert "cudaError" in done.stdout


def test_version_is_stated_once() -> None:
    import cutlass_kernels

    (stated,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version("cutlass_kernels") == stated
    assert cutlass_kernels.__version__ == stated


def test_the_library_requires_torch_alone() -> None:
    required = requires("cutlass_kernels") or []
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.4"]
    assert {line.split(";")[0] for line in required if 'extra == "cli"' in line} == {"typer", "rich"}


def test_folder_of_the_sources_does_not_hide_the_package() -> None:
    program = "import cutlass_kernels; print(cutlass_kernels.__file__)"
    done = python("-c", program, cwd=ROOT)
    found = Path(done.stdout.strip())
    assert found.name == "__init__.py" and found.parent.parent != ROOT


def test_nothing_is_installed_outside_the_package() -> None:
    installed = [str(file) for file in files("cutlass_kernels") or []]
    # An editable installation adds its redirection files (_cutlass_kernels_editable.*).
    outside = [
        name for name in installed if not re.match(r"(cutlass_kernels[/-]|_cutlass_kernels_editable|\.\./)", name)
    ]
    assert installed
    assert not outside


def test_wheel_without_kernels_is_pure_python(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    # A process of its own: the backend works in the current directory.
    program = f"""
import sys
sys.path.insert(0, "cutlass_kernels/cmake")
import build_backend
print(build_backend.build_wheel({str(tmp_path)!r}, {{"cmake.define.CK_BUILD_KERNELS": "OFF"}}))
"""
    python("-c", program, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"cutlass_kernels/{path.name}" for path in (ROOT / "python/cutlass_kernels").glob("*.py")}
    assert sources <= names
    assert "cutlass_kernels/py.typed" in names
    assert not [name for name in names if name.endswith((".so", ".a", ".cu", ".h"))]


def test_public_modules_are_the_documented_ones() -> None:
    import cutlass_kernels

    folder = Path(cutlass_kernels.__file__).parent
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    public = {name for name in modules if not name.startswith("_")}
    assert public == {
        "cascade",
        "decode",
        "distributed",
        "flash_attn",
        "flash_mla",
        "fmha_v2",
        "integrations",
        "mla",
        "page",
        "pod",
        "prefill",
        "quantization",
        "rope",
        "sparse",
        "utils",
    }
