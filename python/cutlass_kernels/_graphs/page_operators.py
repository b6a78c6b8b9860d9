"""Positions of new tokens, and writing them into paged caches, as operators: see ``operators``.

Their kernels keep nothing between calls, so ``mode="reduce-overhead"`` may capture them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import operators

_APPEND = (
    "(Tensor append_key, Tensor append_value, Tensor batch_indices, Tensor positions, Tensor(a!) k_cache, "
    "Tensor(b!)? v_cache, Tensor kv_indices, Tensor kv_indptr, Tensor kv_last_page_len, str kv_layout) -> ()"
)
_BY_SLOT = (
    "(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, float[] factors, "
    "Tensor?[] scales, str kv_layout) -> ()"
)
_ROPE = (
    "(Tensor positions, Tensor(a!) query, Tensor(b!) key, SymInt head_size, Tensor cos_sin_cache, bool is_neox) -> ()"
)
_ROPE_BY_SLOT = (
    "(Tensor(a!) query, Tensor(b!) key, Tensor value, Tensor positions, Tensor cos_sin_cache, Tensor(c!) key_cache, "
    "Tensor(d!) value_cache, Tensor slot_mapping, float[] factors, Tensor?[] scales, str kv_layout, bool is_neox, "
    "bool update_key) -> ()"
)
_POSITIONS = "(Tensor append_indptr, Tensor seq_lens, SymInt nnz) -> (Tensor, Tensor)"


def append(
    new: tuple[torch.Tensor, torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor],
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    table: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    kv_layout: str,
) -> None:
    """``append_paged_kv_cache()`` in a graph."""
    pair = paged_kv_cache if isinstance(paged_kv_cache, tuple) else (paged_kv_cache, None)
    torch.ops.cutlass_kernels.append(*new, *places, *pair, *table, kv_layout)


def append_by_slot(
    new: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    scales: tuple[Any, Any],
    kv_layout: str,
) -> None:
    """``append_paged_kv_cache_by_slot()`` in a graph."""
    torch.ops.cutlass_kernels.append_by_slot(*new, *caches, slot_mapping, *operators.split_scales(scales), kv_layout)


def rope(*args: Any) -> None:
    """``apply_rope_with_cos_sin_cache_inplace()`` in a graph."""
    torch.ops.cutlass_kernels.rope(*args)


def rope_append_by_slot(tensors: tuple[Any, ...], scales: tuple[Any, Any], options: tuple[Any, ...]) -> None:
    """``rope_append_paged_kv_cache_by_slot()`` in a graph."""
    torch.ops.cutlass_kernels.rope_append_by_slot(*tensors, *operators.split_scales(scales), *options)


def positions(append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``get_batch_indices_positions()`` in a graph, with new tensors."""
    result: tuple[torch.Tensor, torch.Tensor] = torch.ops.cutlass_kernels.positions(append_indptr, seq_lens, nnz)
    return result


# --- what graphs are told ----------------------------------------------------------------------------------------


def _fake_append(*args: Any) -> None:
    """Returns nothing: the cache is written in place."""


def _fake_positions(append_indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int) -> tuple[torch.Tensor, torch.Tensor]:
    new = [append_indptr.new_empty((nnz,), dtype=torch.int32) for _ in range(2)]
    return new[0], new[1]


def define(append: Callable[..., None], positions: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Registers the operators of ``append_paged_kv_cache`` and ``get_batch_indices_positions``."""

    def run_append(*args: Any) -> None:
        *new, k_cache, v_cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout = args
        cache = k_cache if v_cache is None else (k_cache, v_cache)
        append(*new, cache, kv_indices, kv_indptr, kv_last_page_len, kv_layout)

    operators.register("append", _APPEND, run_append, _fake_append)
    operators.register("positions", _POSITIONS, positions, _fake_positions)


def define_by_slot(append: Callable[..., None]) -> None:
    """Registers the operator of ``append_paged_kv_cache_by_slot``."""

    def run(*args: Any) -> None:
        *tensors, factors, scales, kv_layout = args
        append(*tensors, *operators.join_scales(factors, scales), kv_layout)

    operators.register("append_by_slot", _BY_SLOT, run, _fake_append)


def define_rope(rope: Callable[..., None], rope_append: Callable[..., None]) -> None:
    """Registers the operators of rotary embeddings, alone and with appending to slots."""

    def run(*args: Any) -> None:
        *tensors, factors, scales, kv_layout, is_neox, update_key = args
        rope_append(*tensors, *operators.join_scales(factors, scales), kv_layout, is_neox, update_key)

    operators.register("rope", _ROPE, rope, _fake_append)
    operators.register("rope_append_by_slot", _ROPE_BY_SLOT, run, _fake_append)
