"""The C++ library as its users meet it: installed, found by another project, run.

The libraries are those that pip made beside the extension, where its build folder is there and the sources have not
changed since: then nothing is compiled. Else a kernel unit of each backend is built, once, for the static and the
shared library. CK_TEST_INSTALL_PREFIX names an existing installation to test instead.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import compilers
import pytest
from compilers import run
from paths import ROOT

TAG = f"cp{sys.version_info[0]}{sys.version_info[1]}"
COMPARING = ["fmha_v2_plugin", "latent_attention", "selected_tokens", "block_sparse"]  # with a loop on the CPU
EXAMPLES = ["hello_attention", *COMPARING]
# That these programs call.
KERNELS = ("fa2_float16_hd64", "fa3_float16_hd64", "fa2_float16_hd576_512", "fa3_float16_hd576_512")
KERNELS += ("fa2_bfloat16_hd576_512", "fa3_bfloat16_hd576_512")
NARROW = ("-DCK_HEAD_DIMS=64;576", "-DCK_DTYPES=float16,bfloat16,float8_e4m3fn,latent_v32", "-DCK_ARCHS=90")
pytestmark = pytest.mark.slow


def generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


@pytest.fixture(scope="module")
def build_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        pytest.skip("there is no nvcc to build the C++ library with")
    return tmp_path_factory.mktemp("library")


def built_by_pip(root: Path) -> Path | None:
    """Where pip has built the libraries of this Python's package, of these sources and with the kernels called here."""
    parts = [path for folder in ("src", "include") for path in (root / "cutlass_kernels" / folder).rglob("*.*")]
    changed = max(path.stat().st_mtime for path in parts if path.suffix in (".h", ".cpp", ".cu"))
    for build in (root / "build").glob(f"{TAG}-*"):
        made = [build / "libcutlass_kernels.a", build / "libcutlass_kernels.so"]
        table = build / "generated" / "registry_table.cpp"
        current = all(path.exists() and path.stat().st_mtime >= changed for path in made)
        if current and all(f'"{name}"' in table.read_text() for name in KERNELS):
            return build
    return None


def configure(build: Path, shared: bool) -> None:
    linkage = f"-DBUILD_SHARED_LIBS={'ON' if shared else 'OFF'}"
    python = f"-DPython_EXECUTABLE={sys.executable}"
    run("cmake", "-S", ROOT, "-B", build, *generator(), *NARROW, linkage, python, "-DCK_BUILD_PYTHON=OFF")


def install(build: Path, shared: bool) -> Path:
    """An installed library; at most the first call compiles, as static and shared are made of the same objects."""
    if os.environ.get("CK_TEST_INSTALL_PREFIX"):
        return Path(os.environ["CK_TEST_INSTALL_PREFIX"])
    name = "shared" if shared else "static"
    prefix = build / name
    if made := built_by_pip(ROOT):
        run("cmake", "--install", made, "--component", name, "--prefix", prefix)
        return prefix
    configure(build / "build", shared)
    run("cmake", "--build", build / "build", "--parallel")
    run("cmake", "--install", build / "build", "--prefix", prefix)
    return prefix


@pytest.mark.parametrize("shared", [False, True], ids=["static", "shared"])
def test_installed_library_serves_another_project(build_directory: Path, shared: bool) -> None:
    prefix = install(build_directory, shared)
    outputs = {}
    for project, programs in (("tests/cpp/consumer", ["consumer"]), ("examples/cpp", EXAMPLES)):
        build = build_directory / f"{Path(project).name}-{shared}"
        run("cmake", "-S", ROOT / project, "-B", build, *generator(), f"-DCMAKE_PREFIX_PATH={prefix}")
        run("cmake", "--build", build)
        outputs |= {program: run(build / program) for program in programs}
    assert outputs["consumer"].rstrip().endswith("OK")
    assert all(name in outputs["consumer"] for name in KERNELS)
    assert "cutlass_kernels" in outputs["hello_attention"]
    # Their own comparison decides how they end; without a GPU they show the sentence of a status.
    for program in COMPARING:
        assert re.search(r"difference from the CPU|no GPU here: .*\w", outputs[program]), program


@pytest.mark.parametrize("shared", [False, True], ids=["static", "shared"])
def test_the_program_of_the_page_builds_and_runs(build_directory: Path, shared: bool, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cpp.md").read_text()
    for name, language in (("CMakeLists.txt", "cmake"), ("main.cpp", "cpp")):
        text = re.search(rf"`{re.escape(name)}`:\n\n```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
        assert text is not None, name
        (tmp_path / name).write_text(text[1])
    prefix = install(build_directory, shared)
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", *generator(), f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    done = subprocess.run([tmp_path / "build" / "app"], capture_output=True, text=True, check=False)
    served = done.returncode == 0 and re.search(r"cutlass_kernels .*: no error", done.stdout)
    without_gpu = done.returncode == 1 and re.search(r"driver|no CUDA-capable device", done.stdout)
    assert served or without_gpu, done


def test_shared_library_hides_everything_but_the_api(build_directory: Path) -> None:
    if os.environ.get("CK_TEST_INSTALL_PREFIX"):
        pytest.skip("CK_TEST_INSTALL_PREFIX may hold a static library")
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    (library,) = (install(build_directory, shared=True) / "lib").glob("libcutlass_kernels.so")
    needed = run("readelf", "-d", library)
    assert not re.search(r"NEEDED.*(cuda|torch)", needed)
    symbols = run("nm", "-DC", "--defined-only", library).splitlines()
    strong = [line.split(maxsplit=2)[2] for line in symbols if line.split()[1] == "T"]
    assert strong
    assert all(name.startswith("cutlass_kernels::") for name in strong), strong


def test_host_code_on_a_stand_in_for_the_cuda_runtime(build_directory: Path) -> None:
    """Workspaces of exactly the promised size, where in them everything lies, and what is refused: tests/cpp/host.

    Plans are compiled again, with a sanitizer that ends the program at a division by zero or an overflow.
    """
    if os.environ.get("CK_TEST_INSTALL_PREFIX"):
        pytest.skip("CK_TEST_INSTALL_PREFIX may hold a shared library")
    prefix, sources = install(build_directory, shared=False), ROOT / "tests" / "cpp" / "host"
    folders = [f"-I{prefix / 'include'}", f"-I{ROOT / 'cutlass_kernels' / 'src'}", f"-I{compilers.cutlass_headers()}"]
    flags = ["-std=c++17", "--expt-relaxed-constexpr", "-DNDEBUG", "-arch=sm_80", "-cudart=none"]
    (library,) = (prefix / "lib").glob("libcutlass_kernels.a")
    program = build_directory / "host_checks"
    library_sources = ROOT / "cutlass_kernels" / "src"
    planning = [*library_sources.glob("plan/*.cpp"), library_sources / "registry" / "validate.cpp"]
    units = [*sources.glob("*.cu"), sources / "stand_in_cuda.cpp", *planning]
    sanitizer = "-Xcompiler=-fsanitize=undefined,-fno-sanitize-recover=undefined"
    run(compilers.nvcc(), *flags, sanitizer, *folders, *units, library, "-o", program)
    assert run(program).rstrip().endswith("OK")


@pytest.mark.parametrize("shared", [False, True], ids=["static", "shared"])
def test_one_option_chooses_what_is_linked_and_installed(build_directory: Path, shared: bool) -> None:
    build = build_directory / f"option-{shared}"
    configure(build, shared)
    steps = run("cmake", "--build", build, "--", "-n")  # shows them, and does nothing
    assert ("Linking CXX shared library" in steps, "Linking CXX static library" in steps) == (shared, not shared)
    missing = subprocess.run(["cmake", "--install", build], capture_output=True, text=True).stderr
    assert f"libcutlass_kernels.{'so' if shared else 'a'}" in missing and missing.count("libcutlass_kernels.") == 1


def test_libraries_of_other_sources_or_kernels_are_not_taken(tmp_path: Path) -> None:
    source = tmp_path / "cutlass_kernels" / "src" / "attention.cpp"
    build = tmp_path / "build" / f"{TAG}-{TAG}-linux_x86_64"
    table = build / "generated" / "registry_table.cpp"
    static, shared = build / "libcutlass_kernels.a", build / "libcutlass_kernels.so"
    for path in (source, table, static, shared):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert built_by_pip(tmp_path) is None
    table.write_text(" ".join(f'"{name}"' for name in KERNELS))
    assert built_by_pip(tmp_path) == build
    os.utime(source, (0, shared.stat().st_mtime + 1))
    assert built_by_pip(tmp_path) is None


def test_headers_need_neither_cuda_nor_cutlass(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("c++ is not installed")
    headers = ROOT / "cutlass_kernels" / "include"
    for header in (headers / "cutlass_kernels").glob("*.h"):
        source = tmp_path / f"{header.stem}.cpp"
        source.write_text(f'#include "cutlass_kernels/{header.name}"\n#include "cutlass_kernels/{header.name}"\n')
        run("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-I{headers}", source)
