"""``info``: versions, GPUs, compiled kernels, and what ``backend='auto'`` means here."""

from __future__ import annotations

import importlib
import json
import platform
import re
import shutil
import subprocess
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import cutlass_kernels

from .._compute import selection
from .._core import native


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    all_kernels: Annotated[bool, typer.Option("--kernels", help="Print a row per kernel, with its features.")] = False,
) -> None:
    """Print versions, GPUs, compiled kernels and the default backend."""
    facts = collect()
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
    else:
        _print(facts, Console(), all_kernels)


def collect() -> dict[str, Any]:
    """Everything ``info`` tells, in types that JSON has."""
    kernels, missing = compiled_kernels()
    return {
        "cutlass_kernels": cutlass_kernels.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cutlass": _cutlass(),
        "nvcc": _nvcc(),
        "gpus": gpus(),
        "driver_problem": driver_problem(),
        "kernels": kernels,
        "why_no_kernels": missing,
        "default_backend": default_backends(),
        "environment": selection.environment.shown(),
    }


def compiled_kernels() -> tuple[list[dict[str, Any]], str | None]:
    """The compiled kernels, and why there are none where there are none."""
    kernels = [dict(kernel) for kernel in cutlass_kernels.list_kernels()]
    if kernels:
        return kernels, None
    try:
        importlib.import_module("cutlass_kernels._C")
    except ModuleNotFoundError:
        return [], "installed without compiled code; `pip install .` where nvcc is available builds it"
    except ImportError as error:  # e.g. built for another Python, or a C++ runtime that is too old
        return [], f"the compiled extension does not load: {error}"
    return [], "the compiled extension contains no kernel"


def commit() -> str | None:
    """Of the sources when the build was configured, with a + where they had changed since; None if it is not known."""
    return getattr(native._C, "commit", None) or None


def driver_problem() -> str | None:
    """Why kernels cannot start although there may be a GPU, None where they can."""
    return None if native._C is None else native._C.driver_problem() or None


def gpus() -> list[dict[str, Any]]:
    """The CUDA devices that torch sees."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "compute_capability": 10 * properties.major + properties.minor,
                "multiprocessors": properties.multi_processor_count,
                "memory_bytes": properties.total_memory,
            }
        )
    return found


def default_backends() -> dict[str, str | None]:
    """For each kind of device here, the backend of a plain float16 attention with head dimension 128."""
    capabilities = dict.fromkeys(gpu["compute_capability"] for gpu in gpus())
    found = {"cpu": cutlass_kernels.explain(device="cpu").selected}
    for capability in capabilities:
        explained = cutlass_kernels.explain(device="cuda", compute_capability=capability)
        found[f"cuda sm_{capability}"] = explained.selected
    return found


def kernel_name(kernel: dict[str, Any]) -> str:
    """A short name that tells a compiled kernel from the others."""
    if kernel.get("name"):
        return str(kernel["name"])
    types = dict.fromkeys((kernel["q_dtype"], kernel["kv_dtype"]))
    dims = dict.fromkeys((str(kernel["head_dim_qk"]), str(kernel["head_dim_vo"])))
    return f"{kernel['backend']} {'/'.join(types)} {'/'.join(dims)}"


def capability_range(kernel: dict[str, Any]) -> str:
    """The GPUs a kernel runs on, e.g. "sm_80 and up"."""
    low, high = kernel["min_compute_capability"], kernel["max_compute_capability"]
    if not high:
        return f"sm_{low} and up"
    return f"sm_{low}" if low == high else f"sm_{low} to sm_{high}"


def _cutlass() -> dict[str, str | None]:
    """The CUTLASS the kernels were compiled against, if the extension tells, and the version of the installed wheel."""
    try:
        installed: str | None = metadata.version("nvidia-cutlass")
    except metadata.PackageNotFoundError:
        installed = None
    return {"built_with": getattr(native._C, "cutlass_version", None), "installed_wheel": installed}


def _nvcc() -> dict[str, str] | None:
    path = shutil.which("nvcc")
    if path is None:
        return None
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)
        match = re.search(r"release [\d.]+, V([\d.]+)", done.stdout)
    except (OSError, subprocess.TimeoutExpired):
        match = None
    return {"path": path, "version": match[1] if match else "unknown"}


def _print(facts: dict[str, Any], console: Console, all_kernels: bool) -> None:
    nvcc, cutlass = facts["nvcc"], facts["cutlass"]
    override = ", ".join(f"{name}={word}" for name, word in facts["environment"].items())
    rows = [
        ("cutlass_kernels", facts["cutlass_kernels"] + (f", commit {facts['commit']}" if facts["commit"] else "")),
        ("Python", f"{facts['python']} on {facts['platform']}"),
        ("torch", f"{facts['torch']}, CUDA runtime {facts['torch_cuda'] or 'none'}"),
        ("CUTLASS of the kernels", cutlass["built_with"] or ("unknown" if facts["kernels"] else "none")),
        ("CUTLASS wheel", cutlass["installed_wheel"] or "not installed (only builds need it)"),
        ("nvcc on PATH", f"{nvcc['version']} ({nvcc['path']})" if nvcc else "none (only builds need it)"),
        ("default backend", ", ".join(f"{where}: {name}" for where, name in facts["default_backend"].items())),
        ("environment", override or "(no backend is set)"),
    ]
    versions = Table(show_header=False, box=None, pad_edge=False)
    versions.add_column(style="bold", no_wrap=True)
    versions.add_column(overflow="fold")
    for row in rows:
        versions.add_row(*row)
    console.print(versions)
    if facts["gpus"]:
        console.print(_gpu_table(facts["gpus"]))
    else:
        console.print("\nNo CUDA device: backend='reference' computes everything.")
    if facts["driver_problem"]:
        console.print(f"\n{facts['driver_problem']}", markup=False)
    if facts["kernels"]:
        console.print(_kernel_table(facts["kernels"]) if all_kernels else _summary(facts["kernels"]))
    else:
        console.print(f"No compiled kernels: {facts['why_no_kernels']}.", markup=False)


def _table(title: str, *names: str, **of_last: Any) -> Table:
    """``of_last``: options of the last column; the others do not wrap."""
    table = Table(title=f"\n{title}", title_justify="left", box=None, pad_edge=False)
    for name in names[:-1]:
        table.add_column(name, no_wrap=True)
    table.add_column(names[-1], **of_last)
    return table


def _gpu_table(found: list[dict[str, Any]]) -> Table:
    table = _table("GPUs", "device", "name", "compute capability", "SMs", "memory")
    for gpu in found:
        major, minor = divmod(gpu["compute_capability"], 10)
        memory = f"{gpu['memory_bytes'] / 2**30:.1f} GiB"
        table.add_row(f"cuda:{gpu['index']}", gpu["name"], f"{major}.{minor}", str(gpu["multiprocessors"]), memory)
    return table


def _summary(kernels: list[dict[str, Any]]) -> Table:
    """Head dimensions by backend and types; types with the same dimensions share a row."""
    dims: dict[tuple[str, str, str, str], list[str]] = {}
    for kernel in kernels:
        types = kernel["q_dtype"], "the same" if kernel["kv_dtype"] == kernel["q_dtype"] else kernel["kv_dtype"]
        qk, vo = kernel["head_dim_qk"], kernel["head_dim_vo"]
        mine = dims.setdefault((kernel["backend"], capability_range(kernel), *types), [])
        mine.append(str(qk) if qk == vo else f"{qk}/{vo}")
    rows: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
    for (backend, gpus_of_it, q, kv), found in dims.items():
        rows.setdefault((backend, gpus_of_it, kv, tuple(found)), []).append(q)
    title = f"{len(kernels)} compiled kernels (info --kernels: each, with its features)"
    table = _table(title, "backend", "GPUs", "q", "k, v", "head dimensions")
    for (backend, gpus_of_it, kv, columns), queries in rows.items():
        table.add_row(backend, gpus_of_it, " ".join(queries), kv, " ".join(columns))
    return table


def _kernel_table(kernels: list[dict[str, Any]]) -> Table:
    table = _table("Compiled kernels", "backend", "q", "k, v", "dim qk/vo", "GPUs", "features", overflow="fold")
    for kernel in kernels:
        table.add_row(
            kernel["backend"],
            kernel["q_dtype"],
            kernel["kv_dtype"],
            f"{kernel['head_dim_qk']}/{kernel['head_dim_vo']}",
            capability_range(kernel),
            " ".join(kernel["features"]),
        )
    return table
