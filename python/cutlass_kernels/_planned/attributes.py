"""Attributes of wrappers that serving engines read and assign: options in effect, and index tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from . import index_buffers
from .batches import Index

if TYPE_CHECKING:
    from .base_wrapper import BatchPrefillWrapper


class IndexBuffer:
    """An attribute of a wrapper that is an index tensor: a slice of the packed ones is made for who reads it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removeprefix("_")

    def __get__(self, wrapper: BatchPrefillWrapper | None, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        stored = wrapper._stored.get(self._name)
        return stored.tensor if isinstance(stored, Index) else stored

    def __set__(self, wrapper: BatchPrefillWrapper, tensor: torch.Tensor | None) -> None:
        present = wrapper._stored.get(self._name)
        if wrapper._use_cuda_graph and isinstance(present, torch.Tensor):
            index_buffers.check_replacement(self._name, present, tensor, wrapper.device)
        wrapper._stored = {**wrapper._stored, self._name: tensor}


class Option:
    """An attribute of a wrapper that is one of its options, for engines that read or assign it."""

    def __init__(self, field: str = "") -> None:
        self._field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self._field = self._field or name.removeprefix("_")

    def __get__(self, wrapper: BatchPrefillWrapper | None, owner: type | None = None) -> Any:
        return self if wrapper is None else getattr(wrapper._options, self._field)

    def __set__(self, wrapper: BatchPrefillWrapper, value: Any) -> None:
        wrapper._options = wrapper._options.replaced(self._field, value)
