"""What the compiler made of the kernels, read from the built library: right instructions, nothing in local memory."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from paths import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import support_matrix

BUDGET = ROOT / "cutlass_kernels" / "kernel_budget.txt"

MAX_STACK_BYTES = 64
# A pair of uniform registers begins at an even one. ptxas 13.0 has made kernels in which it does not: illegal
# instructions (copies of paged decode kernels with a cache policy: fa2/load_pages.h).
ODD_DESCRIPTOR = re.compile(r"desc\[UR\d*[13579]\]")
# What each backend's speed rests on: tensor-core products, asynchronous copies to shared memory; for fa3 also registers
# that move from the loading warps to the computing ones, and stores by TMA, but for tiles of packed heads, whose rows
# lie in several places.
INSTRUCTIONS = {"fa2": ("HMMA", "LDGSTS"), "fa3": ("HGMMA", "UTMALDG", "USETMAXREG", "UTMASTG")}
FP8 = {"HGMMA": "QGMMA"}  # what else products of fp8 are
# Tiles of fa3 by their names in src/fa3/config.h.
FP8_TILE = re.compile(r"3fa3.*Hd\d+Fp8")
PACKED = re.compile(r"3fa3.*(?:7Packing|Hd\d+(?:Fp8)?Packed|Hd\d+Converted)")


@pytest.fixture(scope="module")
def cuobjdump() -> str:
    try:
        packaged = Path(str(distribution("nvidia-cuda-cuobjdump").locate_file("nvidia/cu13/bin/cuobjdump")))
    except PackageNotFoundError:
        packaged = Path()
    found = str(packaged) if packaged.is_file() else shutil.which("cuobjdump")
    if found is None:
        pytest.skip("cuobjdump is not installed (pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm)")
    return found


def backend_of(symbol: str) -> str | None:
    """The backend whose namespace a mangled kernel name is in: _ZN15cutlass_kernels3fa2..."""
    match = re.search(r"15cutlass_kernels\d+(fa\d)", symbol)
    return match[1] if match else None


def instructions(cuobjdump: str, library: Path) -> Iterator[tuple[str, str, set[str]]]:
    """(GPU, kernel, mnemonics without their modifiers) of each compiled kernel."""
    run = subprocess.Popen([cuobjdump, "-sass", str(library)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    gpu, kernel, seen = "", "", set[str]()
    instruction = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)")
    for line in run.stdout:
        if match := instruction.match(line):
            seen.add(match[1])
            if ODD_DESCRIPTOR.search(line):
                seen.add("odd descriptor")
        elif match := re.match(r"\s*(?:Function : (\S+)|arch = (\S+))", line):
            if kernel:
                yield gpu, kernel, seen
            kernel, seen = match[1] or "", set()
            gpu = match[2] or gpu
    if kernel:
        yield gpu, kernel, seen
    assert run.wait() == 0


def test_backends_are_known_to_both_languages_in_the_same_order(extension: Path) -> None:
    from cutlass_kernels import _C
    from cutlass_kernels._compute import selection

    assert (*_C.backends, "reference") == selection.BACKENDS


def test_kernels_use_the_instructions_their_backend_is_built_on(cuobjdump: str, library: Path) -> None:
    from cutlass_kernels import _C

    seen: dict[str, int] = {}
    missing = []
    for gpu, kernel, mnemonics in instructions(cuobjdump, library):
        backend = backend_of(kernel)
        if backend is None:
            continue
        seen[backend] = seen.get(backend, 0) + 1
        for wanted in INSTRUCTIONS[backend]:
            if FP8_TILE.search(kernel):
                wanted = FP8.get(wanted, wanted)
            if wanted not in mnemonics and not (wanted == "UTMASTG" and PACKED.search(kernel)):
                missing.append(f"{kernel} for {gpu} has no {wanted}")
        if "odd descriptor" in mnemonics:
            missing.append(f"{kernel} for {gpu} has an odd descriptor, which no GPU executes")
    assert not missing, "\n".join(missing)
    listed = {row["backend"] for row in _C.list_kernels()}
    assert set(seen) == listed
    assert all(seen[name] >= sum(row["backend"] == name for row in _C.list_kernels()) for name in listed)


def test_no_kernel_keeps_more_than_a_few_values_in_local_memory(cuobjdump: str, library: Path) -> None:
    text = subprocess.run([cuobjdump, "-res-usage", str(library)], capture_output=True, text=True, check=True).stdout
    usage = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert usage
    heavy = [
        f"{kernel}: {registers} registers, stack {stack} B, local {local} B"
        for kernel, registers, stack, local in usage
        if int(stack) + int(local) > MAX_STACK_BYTES
    ]
    assert not heavy, "\n".join(heavy)


# --- the budget ---------------------------------------------------------------------------------------------------


def budget(kind: str) -> dict[tuple[str, ...], float]:
    """The rows of the budget that begin with ``kind``: what they allow, by their other words."""
    lines = (line.partition("#")[0].split() for line in BUDGET.read_text().splitlines())
    return {tuple(words[1:-1]): float(words[-1]) for words in lines if words and words[0] == kind}


def group_of(symbol: str) -> str:
    """Of a mangled kernel name: a backend, "latent" attention of either, or "others"."""
    return "latent" if "15cutlass_kernels3mla" in symbol else backend_of(symbol) or "others"


@pytest.fixture(scope="module")
def counted(cuobjdump: str, library: Path) -> Counter[tuple[str, ...]]:
    """Kernels in the library, by GPU and group."""
    text = subprocess.run([cuobjdump, "-res-usage", str(library)], capture_output=True, text=True, check=True).stdout
    found: Counter[tuple[str, ...]] = Counter()
    gpu = ""
    for match in re.finditer(r"^arch = (\S+)|^ Function (\S+):", text, re.MULTILINE):
        if match[1]:
            gpu = match[1]
        else:
            found[gpu, group_of(match[2])] += 1
    assert found
    return found


def leaves_out_rows() -> bool:
    from cutlass_kernels import _C

    instances = (ROOT / support_matrix.INSTANCES).read_text()
    return len(_C.list_kernels()) < len(support_matrix.parse_instances(instances))


def test_kernels_are_within_their_budget(counted: Counter[tuple[str, ...]]) -> None:
    allowed = budget("kernels")
    if not any(gpu == "sm_90a" for gpu, _ in counted):  # without fa3, fa2 has all of its tiles for Hopper, too
        allowed = {key: most for key, most in allowed.items() if key[0] != "sm_90"}
    over = {key: (count, allowed[key]) for key, count in counted.items() if key in allowed and count > allowed[key]}
    assert not over, f"more kernels than {BUDGET.name} allows: {over}. Take away as many, or say there what needs them"
    if not leaves_out_rows():
        loose = {key: (counted[key], most) for key, most in allowed.items() if 0 < counted[key] < most}
        assert not loose, f"{BUDGET.name} allows more kernels than there are, lower it: {loose}"


def test_the_library_is_within_its_budget(counted: Counter[tuple[str, ...]], library: Path) -> None:
    gpus = ",".join(sorted({gpu.removesuffix("a") for gpu, _ in counted}))
    allowed = budget("megabytes").get((gpus,))
    if allowed is None:
        pytest.skip(f"{BUDGET.name} has no row of megabytes for {gpus}")
    size = library.stat().st_size / 1e6
    assert size <= allowed, f"{library.name} has {size:.1f} MB, {BUDGET.name} allows {allowed}"
