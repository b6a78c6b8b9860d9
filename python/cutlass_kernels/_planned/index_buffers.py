"""Attributes of wrappers that serving engines read and assign, and the buffers of a wrapper for CUDA graphs: plans
copy their index vectors to these, and captured runs read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from .._core.problems import Copies
from .._core.run_options import Options
from .batches import Index


class Wrapper(Protocol):
    """What has these attributes."""

    device: torch.device
    _options: Options
    _stored: Mapping[str, Any]
    _use_cuda_graph: bool


class IndexBuffer:
    """An attribute of a wrapper that is an index tensor: a slice of the packed ones is made for who reads it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removeprefix("_")

    def __get__(self, wrapper: Wrapper | None, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        stored = wrapper._stored.get(self._name)
        return stored.tensor if isinstance(stored, Index) else stored

    def __set__(self, wrapper: Wrapper, tensor: torch.Tensor | None) -> None:
        present = wrapper._stored.get(self._name)
        if wrapper._use_cuda_graph and isinstance(present, torch.Tensor):
            check_replacement(self._name, present, tensor, wrapper.device)
        wrapper._stored = {**wrapper._stored, self._name: tensor}


class Option:
    """An attribute of a wrapper that is one of its options, for engines that read or assign it."""

    def __init__(self, field: str = "") -> None:
        self._field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = self._field or name.removeprefix("_")

    def __get__(self, wrapper: Wrapper | None, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper._options, self._field)

    def __set__(self, wrapper: Wrapper, value: Any) -> None:
        wrapper._options = wrapper._options.replaced(self._field, value)


def check(name: str, buffer: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError unless kernels can read ``buffer``, a vector, as it is."""
    if buffer.dtype != dtype or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device != device:
        raise ValueError(
            f"{name} is {tuple(buffer.shape)} {buffer.dtype} on {buffer.device}: it must be a contiguous 1-D "
            f"{dtype} tensor on {device}."
        )


def check_indices(buffers: Mapping[str, torch.Tensor | None], device: torch.device) -> None:
    """ValueError where one of these index buffers is missing, or not such a vector."""
    for name, buffer in buffers.items():
        if not isinstance(buffer, torch.Tensor):
            raise ValueError(f"use_cuda_graph=True needs {name}, an int32 tensor on {device}, not {buffer!r}.")
        check(name, buffer, torch.int32, device)


def check_replacement(name: str, present: torch.Tensor, tensor: torch.Tensor | None, device: torch.device) -> None:
    """ValueError where ``tensor`` has no room for what plans copy to the buffer in its place, without looking."""
    if tensor is None or tensor.numel() < present.numel():
        size = None if tensor is None else tensor.numel()
        raise ValueError(
            f"_{name} of a wrapper for CUDA graphs holds {present.numel()} elements and cannot be replaced by "
            f"{size}: make a tensor as large, or another wrapper."
        )
    check(name, tensor, torch.int32, device)


def copies(stored: Mapping[str, Any], indices: Mapping[str, Index]) -> tuple[Copies, list[torch.Tensor]]:
    """How the vectors of a plan get to their buffers, and what has to live until then: copies of vectors that lie in
    some buffer, which one kernel would write as it reads."""
    from_host, on_device, apart = [], [], []
    buffers = [(x.data_ptr(), 4 * x.numel()) for x in stored.values() if isinstance(x, torch.Tensor)]
    for name, index in indices.items():
        to, count = stored[name].data_ptr(), index.numel()
        if index.waits:
            from_host.append((to, index.host_address, count))
            continue
        given = index.data_ptr()
        if to == given:  # engines write to the buffers themselves
            continue
        if any(given < begin + size and begin < given + 4 * count for begin, size in buffers):
            apart.append(index.tensor.clone())
            given = apart[-1].data_ptr()
        on_device.append((to, given, count))
    return Copies(from_host, on_device), apart
