"""Attention calls of the compiled module on a stand-in for the GPU, which records what kernels are launched with.

The module is built from the sources of the bindings with the host compiler, so the calls are the same code as those of
``cutlass_kernels._C``. Tensors live on the CPU and are presented as those of ``cuda:0``: nothing reads or writes them.
"""

from __future__ import annotations

import fcntl
import importlib.machinery
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import compilers
import pytest
import torch
from paths import ROOT

from cutlass_kernels._core.call_table import Call

HALF, BF16, E4M3, E5M2, INTS = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int32
DLPACK = {  # code and bits of DLDataType
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
}
CPU, CUDA = 1, 2  # DLDeviceType
HERE = ROOT / "tests" / "cpp" / "direct"
WITH_KERNELS = {"append.cpp", "merge.cpp", "module.cpp", "prepare.cpp"}  # bindings of other kernels


def _headers() -> list[str]:
    """torch brings the headers of pybind11 and DLPack."""
    others = Path(torch.__file__).parent / "include"
    dlpack = others / "ATen" / "dlpack.h"
    if not dlpack.exists() or "DLPackExchangeAPI" not in dlpack.read_text():
        pytest.skip("the DLPack header of this torch has no exchange API")
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        pytest.skip("the headers of Python are not installed")
    ours = [compilers.SOURCES / folder for folder in ("include", "src", "bindings")]
    system = [others, python, compilers.cuda_headers(), compilers.cutlass_headers()]
    folders = [(HERE / "headers", "-I"), *((x, "-I") for x in ours), *((x, "-isystem") for x in system)]
    return [part for folder, option in folders for part in (option, str(folder))]


def _arguments_of_call() -> str:
    """What the build makes of the rows of Call (bindings/call_arguments.h.in)."""
    names = ["k" + "".join(word.capitalize() for word in name.split("_")) for name in Call._fields]
    members = f'enum {{ {", ".join(names)}, kArguments }}; constexpr const char* kCallArguments = "";'
    return f"#pragma once\nnamespace cutlass_kernels {{ {members} }}\n"


def build_module(build: Path) -> Path:
    """Compiles what has changed: through ccache, where that is installed."""
    sources = compilers.SOURCES
    units = [HERE / "module.cpp", HERE.parent / "host" / "stand_in_cuda.cpp", sources / "src" / "device.cpp"]
    units += [x for x in (sources / "bindings").glob("*.cpp") if x.name not in WITH_KERNELS]
    units += [x for folder in ("plan", "registry") for x in (sources / "src" / folder).glob("*.cpp")]
    compiler = compilers.host_compiler()
    launcher = [shutil.which("ccache")] if shutil.which("ccache") else []
    # The name of the namespace is another, so that the types of pybind11 are others than those of _C.
    flags = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-pthread", "-Dcutlass_kernels=recorded_kernels"]
    flags += ["-DCK_ARCHS_MIN=80", "-DCK_ARCHS_MAX=0", *_headers()]

    (build / "call_arguments.h").write_text(_arguments_of_call())
    flags += ["-I", str(build)]

    def compile(unit: Path) -> Path:
        target = build / f"{unit.parent.name}_{unit.stem}.o"
        compilers.run(*launcher, compiler, *flags, "-c", unit, "-o", target)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile, units))
    module = build / f"recorded_calls{sysconfig.get_config_var('EXT_SUFFIX')}"
    compilers.run(compiler, "-shared", "-pthread", *objects, "-o", module)
    return module


def load_module(shared: Path) -> ModuleType:
    """The module, built by the first process that asks for it. ``shared`` is a folder of all processes of a run."""
    build = shared / "recorded_calls"
    build.mkdir(exist_ok=True)
    with (build / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        module = next(build.glob("recorded_calls.*.so"), None) or build_module(build)
    loader = importlib.machinery.ExtensionFileLoader("recorded_calls", str(module))
    spec = importlib.util.spec_from_loader("recorded_calls", loader)
    assert spec is not None
    loaded = importlib.util.module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


class Gpu:
    """The module, and what it is told of tensors and of the GPU."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        # By id of a tensor: the tensor, so that its id stays its own, and what else than the truth is told of it.
        self.changed: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}
        self.made: list[tuple[str, torch.Tensor]] = []  # by which function of torch
        functions = {
            "Tensor": torch.Tensor,
            "Parameter": torch.nn.Parameter,
            "facts": self._facts,
            "device": lambda *index: "cpu",
            "stream_of": lambda index: 64 + index,
        }
        functions |= {name: self._making(name) for name in ("empty_like", "empty", "zeros")}
        dtypes = "uint8", "int32", "float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"
        module.use_torch(None, functions | {name: getattr(torch, name) for name in dtypes})
        module.set_capturing(False)
        module.take_launches()

    def _facts(self, x: torch.Tensor) -> tuple[Any, ...]:
        told = dict(data=x.data_ptr(), device=(CUDA, 0), dtype=x.dtype, shape=tuple(x.shape), strides=x.stride())
        told |= self.changed.get(id(x), (x, {}))[1]
        return told["data"], *told["device"], *DLPACK[told["dtype"]], told["shape"], told["strides"]

    def _making(self, name: str) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            self.made.append((name, getattr(torch, name)(*args, **kwargs)))
            return self.made[-1][1]

        return make

    def tell(self, x: torch.Tensor, **facts: Any) -> torch.Tensor:
        """The tensor, presented with other facts: ``data``, ``device``, ``dtype``, ``shape`` or ``strides``."""
        self.changed[id(x)] = x, facts
        return x

    def launched(self) -> dict[str, Any]:
        """What the one kernel was given that has been launched since the last look."""
        (launch,) = self.module.take_launches()
        return launch

    def accepts(self, call: Callable[..., Any], *arguments: Any, planned: bool = False) -> bool:
        """Whether a direct call launches. If not, it returns None, and has asked for no memory unless it was refused
        by the plan: then ``planned``."""
        self.made.clear()
        results = call(*arguments)
        launches = [*self.module.take_launches(), *self.module.take_writes()]
        assert len(launches) == (results is not None)
        assert launches or planned or not self.made
        return bool(launches)


def view(x: torch.Tensor) -> tuple[int, int, int]:
    """A [tokens, heads, dim] tensor as kernels are given it: address, strides of tokens and of heads."""
    return x.data_ptr(), x.stride(0), x.stride(1)


def rows_of(*shape: int, dtype: torch.dtype = HALF, every: int = 1, wide: int = 0) -> torch.Tensor:
    """Zeros whose heads (the last dimension but one) are every so many of a larger tensor, and whose rows lie ``wide``
    elements apart."""
    *others, heads, dim = shape
    return torch.zeros(*others, heads * every, dim + wide).to(dtype)[..., ::every, :dim]
