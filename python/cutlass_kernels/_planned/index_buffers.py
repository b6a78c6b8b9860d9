"""The buffers of a wrapper for CUDA graphs: plans copy their index vectors to them, and captured runs read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._core.problems import Copies
from .batches import Index


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
