"""PEP 517 build backend: scikit-build-core, and the packages that a build with kernels needs.

A build without kernels (CK_BUILD_KERNELS=OFF in the environment, or `-C cmake.define.CK_BUILD_KERNELS=OFF`) is a pure
Python wheel that takes seconds and needs no compiler. A build with kernels takes the system's nvcc if it is 12.4 or
newer, else it asks pip for NVIDIA's packages. Their parts must be of one release: an nvvm newer than ptxas writes PTX
that this ptxas refuses ("Unsupported .version").
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from scikit_build_core import build as _base

Settings = dict[str, Any] | None

BUILD_PACKAGES = ["nvidia-cutlass>=4.2,<5", "apache-tvm-ffi", "pybind11>=2.13", "ninja"]
CUDA_PACKAGES = [f"nvidia-{name}==13.0.*" for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-cccl", "cuda-runtime")]
MINIMUM_NVCC = (12, 4)


def _option(settings: Settings, name: str, default: str) -> str:
    """An option of CMakeLists.txt as this build will see it."""
    given = (settings or {}).get(f"cmake.define.{name}")
    return str(given) if given is not None else os.environ.get(name) or default


def _wants_kernels(settings: Settings) -> bool:
    return _option(settings, "CK_BUILD_KERNELS", "ON").upper() not in ("0", "OFF", "FALSE", "NO", "N")


def _has_system_nvcc() -> bool:
    roots = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    candidates = [os.environ.get("CUDACXX"), *(f"{root}/bin/nvcc" for root in roots if root), shutil.which("nvcc")]
    for nvcc in filter(None, [*candidates, "/usr/local/cuda/bin/nvcc"]):
        if not Path(nvcc).exists():
            continue
        done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        if match := re.search(r"release (\d+)\.(\d+)", done.stdout):
            return (int(match[1]), int(match[2])) >= MINIMUM_NVCC
    return False


def _settings(settings: Settings) -> Settings:
    """Without kernels nothing is left for CMake to do."""
    return settings if _wants_kernels(settings) else {**(settings or {}), "wheel.cmake": "false"}


def _packages(settings: Settings) -> list[str]:
    if not _wants_kernels(settings):
        return []
    toolkit = _option(settings, "CK_CUDA_TOOLKIT", "auto")
    with_nvcc = toolkit == "pypi" or (toolkit == "auto" and not _has_system_nvcc())
    return BUILD_PACKAGES + (CUDA_PACKAGES if with_nvcc else [])


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return _base.get_requires_for_build_wheel(_settings(config_settings)) + _packages(config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return _base.get_requires_for_build_editable(_settings(config_settings)) + _packages(config_settings)


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return _base.get_requires_for_build_sdist(config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return _base.prepare_metadata_for_build_wheel(metadata_directory, _settings(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return _base.prepare_metadata_for_build_editable(metadata_directory, _settings(config_settings))


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return _base.build_wheel(wheel_directory, _settings(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return _base.build_editable(wheel_directory, _settings(config_settings), metadata_directory)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return _base.build_sdist(sdist_directory, config_settings)
