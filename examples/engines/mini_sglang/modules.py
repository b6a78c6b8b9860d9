"""Modules that mini-sglang imports: ``flashinfer``, ``sgl_kernel``, and functions of ``minisgl.kernel``."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import shutil
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from . import _stand_ins, sdpa_wrappers

WRAPPERS = (
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
)


def register(attention: str, helpers: str, longest: int) -> dict[str, str]:
    """Puts the modules into ``sys.modules``. What stands for what, to be printed.

    Args:
        attention: ``"ours"``, ``"sdpa"``, ``"flashinfer"`` or ``"sgl_kernel"``.
        helpers: who computes norms, RoPE, activations and samples: ``"flashinfer"``, ``"torch"``, or ``"auto"``:
            FlashInfer where it is installed.
        longest: tokens that a request may have, for ``"sdpa"``.
    """
    installed = importlib.util.find_spec("flashinfer") is not None
    if helpers == "auto":
        helpers = "flashinfer" if installed else "torch"
    if "flashinfer" in (attention, helpers) and not installed:
        raise ModuleNotFoundError("flashinfer is not installed: use --helpers torch, and other --against.")
    library = _flashinfer(with_stand_ins=helpers == "torch", with_package="flashinfer" in (attention, helpers))
    if attention == "sdpa":
        sdpa_wrappers.CUDAGraphBatchDecodeWithPagedKVCacheWrapper.longest = longest
    if attention != "flashinfer":
        wrappers: Any = sdpa_wrappers if attention == "sdpa" else importlib.import_module("cutlass_kernels")
        for name in WRAPPERS:
            setattr(library, name, getattr(wrappers, name))
    sys.modules["flashinfer"] = library
    if helpers == "torch":
        sys.modules["flashinfer.sampling"] = library.sampling
    if attention == "ours":
        kernels = _module("sgl_kernel")
        kernels.flash_attn = importlib.import_module("cutlass_kernels.flash_attn")  # type: ignore[attr-defined]
        sys.modules["sgl_kernel"], sys.modules["sgl_kernel.flash_attn"] = kernels, kernels.flash_attn
    computed_by = attention if attention == "flashinfer" else wrappers.__name__
    return {"wrappers": computed_by, "norm, rope, activation, sampling": helpers}


def _flashinfer(with_stand_ins: bool, with_package: bool) -> ModuleType:
    """A module ``flashinfer`` with the stand-ins of ``_stand_ins.py``. What it lacks comes from the package, which is
    imported when a name is asked for: that initialises CUDA, and the engine has to be the first to do so."""
    library = _module("flashinfer")
    if with_stand_ins:
        sampling = _module("flashinfer.sampling")
        vars(library).update(_stand_ins.FLASHINFER, sampling=sampling)
        vars(sampling).update(_stand_ins.SAMPLING)
    if with_package:
        spec = importlib.util.find_spec("flashinfer")
        assert spec is not None and spec.submodule_search_locations is not None
        library.__path__ = list(spec.submodule_search_locations)  # its modules import each other by the package's name
        vars(library).update(__getattr__=_from_package)
    return library


def _from_package(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(_package(), name)


@functools.cache
def _package() -> ModuleType:
    """The package, in whose place another module is registered."""
    names: tuple[str, ...] = ("flashinfer", "flashinfer.sampling")
    ours = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        return importlib.import_module("flashinfer")
    finally:
        sys.modules.update(ours)


def _module(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__path__ = []
    return module


def replace_kernels(choice: str, directory: Path) -> str:
    """Replaces the functions of ``minisgl.kernel`` that the engine compiles. Which ones are used, to be printed.

    Args:
        choice: ``"engine"``, ``"torch"``, or ``"auto"``: the engine's where it can compile them.
        directory: of the model, for whose sizes ``"auto"`` tries.
    """
    why_not = ""
    if choice == "auto":
        why_not = ", ".join(missing_to_compile())
        why_not = f" (missing: {why_not})" if why_not else _try_to_compile(directory)
    if choice == "engine" or (choice == "auto" and not why_not):
        return "the engine's, compiled"
    kernel = importlib.import_module("minisgl.kernel")
    for name, function in _stand_ins.KERNELS.items():
        setattr(kernel, name, function)
    return "torch" + why_not


def _try_to_compile(directory: Path) -> str:
    """Compiles two of the engine's kernels, which are kept for it. Empty, or why that failed."""
    config = json.loads((directory / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    try:
        importlib.import_module("minisgl.kernel.radix")._load_radix_module()
        store = importlib.import_module("minisgl.kernel.store")
        store._jit_store_module(config["num_key_value_heads"] * head_dim * 2)
    except Exception as error:
        return f" (the engine's do not compile: {type(error).__name__}: {str(error).splitlines()[0]})"
    return ""


def missing_to_compile() -> list[str]:
    """What the engine needs to compile its kernels, and this machine has not."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc") or (home and (Path(home) / "bin" / "nvcc").exists())
    found = {
        "tvm_ffi": importlib.util.find_spec("tvm_ffi"),
        "nvcc": nvcc,
        "ninja": shutil.which("ninja"),
        "a C++ compiler": shutil.which(os.environ.get("CXX", "c++")),
    }
    return [name for name, there in found.items() if not there]
