"""FlashInfer's package, as its tests import it: our modules, and stand-ins for those that have no counterpart."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

import cutlass_kernels

__path__: list[str] = []


class _Skips(type):
    """A class whose attributes exist, and whose calls skip the test."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        pytest.skip(f"{cls.__qualname__} has no counterpart in cutlass_kernels", allow_module_level=True)


class _Nothing:
    """Stands for what FlashInfer compiles before its tests, and for the tables that it takes the names from."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None

    def __getitem__(self, key: Any) -> str:
        return str(key)


def _capability(device: Any = None) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


_UTILS = {
    "get_compute_capability": _capability,
    "has_flashinfer_jit_cache": lambda: True,
    "is_sm90a_supported": lambda device=None: _capability(device)[0] == 9,
}


class _StandIn(ModuleType):
    """One of FlashInfer's modules: names of ours first, then names that skip."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        short = self.__name__.removeprefix("flashinfer.")
        if short == "utils" and name in _UTILS:
            return _UTILS[name]
        try:
            return getattr(importlib.import_module(f"cutlass_kernels.{short}"), name)
        except (ImportError, AttributeError):
            pass
        if short.split(".")[0] == "jit" or (name.startswith("gen_") and name.endswith("_module")):
            return type(name, (Exception,), {}) if name.endswith("Error") else _Nothing()
        if name.startswith("is_"):
            return lambda *args, **kwargs: False
        return _Skips(name, (), {"__qualname__": f"{self.__name__}.{name}"})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith("flashinfer.") or name == "flashinfer.moe_ep":  # which its tests do without
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    ours = getattr(cutlass_kernels, name, None)
    if ours is not None and not isinstance(ours, ModuleType):
        return ours
    if name.islower():
        return importlib.import_module(f"flashinfer.{name}")
    return _Skips(name, (), {"__qualname__": f"flashinfer.{name}"})
