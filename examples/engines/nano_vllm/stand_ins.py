"""Modules that nano-vllm imports as ``flash_attn``, to compare with: its two functions in other hands.

They take the arguments that nano-vllm passes and no others. Caches are ``[pages, 256, kv heads, dim]``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cached_property
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from ..common.sdpa import Kept, decode, prefill

Tensor = torch.Tensor


def as_module(varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor]) -> ModuleType:
    """A module ``flash_attn`` of two functions."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = with_kvcache  # type: ignore[attr-defined]
    return module


# --- torch's scaled_dot_product_attention on gathered pages ---


def sdpa() -> ModuleType:
    """Gathers pages and calls SDPA."""
    rows_of, offsets_of = (Kept(lambda tensor: tensor.tolist()) for _ in range(2))

    def varlen(q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None, **call: Any) -> Tensor:
        offsets = offsets_of(call["cu_seqlens_k"])

        def keys_of(i: int) -> tuple[Tensor, Tensor]:
            begin, end = offsets[i : i + 2]
            if block_table is None:
                return k[begin:end], v[begin:end]
            pages = block_table[i, : -(-(end - begin) // k.size(1))]
            return k[pages].flatten(0, 1)[: end - begin], v[pages].flatten(0, 1)[: end - begin]

        return prefill(q, rows_of(call["cu_seqlens_q"]), keys_of, call["softmax_scale"], call["causal"])

    def with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
        lengths, scale = call["cache_seqlens"], call["softmax_scale"]
        return decode(q.squeeze(1), k_cache, v_cache, call["block_table"], lengths, scale).unsqueeze(1)

    return as_module(varlen, with_kvcache)


# --- torch's FlashAttention-2 on pages, where this torch has it ---


def varlen() -> ModuleType:
    """``torch.nn.attention.varlen.varlen_attn`` with a block table (newer releases of torch)."""
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise RuntimeError(f"varlen_attn of torch {torch.__version__} takes no block_table: use --against sdpa.")

    def attend(
        q: Tensor, k: Tensor, v: Tensor, rows: Tensor, keys: Tensor | None, longest: tuple[int, int], **options: Any
    ) -> Tensor:
        return varlen_attn(q, k, v, rows, keys, *longest, window_size=(-1, 0), enable_gqa=True, **options)

    def with_offsets(q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None, **call: Any) -> Tensor:
        longest = (call["max_seqlen_q"], call["max_seqlen_k"])
        keys, options = call["cu_seqlens_k"], {"scale": call["softmax_scale"]}
        if block_table is not None:
            options |= {"seqused_k": keys.diff().int(), "block_table": block_table}
            keys = None
        return attend(q, k, v, call["cu_seqlens_q"], keys, longest, **options)

    def with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
        table = call["block_table"]
        rows = torch.arange(q.size(0) + 1, dtype=torch.int32, device=q.device)
        options = {"scale": call["softmax_scale"], "seqused_k": call["cache_seqlens"], "block_table": table}
        longest = (1, table.size(1) * k_cache.size(1))
        return attend(q.squeeze(1), k_cache, v_cache, rows, None, longest, **options).unsqueeze(1)

    return as_module(with_offsets, with_kvcache)


# --- FlashInfer: wrappers for prefill, the functions without a plan for decode ---


class OverFlashInfer:
    """FlashInfer's kernels under FlashAttention's names. ``library`` is the package ``flashinfer``."""

    PAGE = 128  # pages of 256 are two of these: the decode kernels of Hopper take no larger ones

    def __init__(self, library: Any) -> None:
        self.library, self.planned = library, torch.empty(0)

    @cached_property
    def workspace(self) -> Tensor:
        return torch.zeros(128 << 20, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")

    @cached_property
    def wrappers(self) -> tuple[Any, Any]:
        prefill = self.library.prefill
        return (
            prefill.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD"),
            prefill.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD"),
        )

    def varlen(self, q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None, **call: Any) -> Tensor:
        ragged, paged = self.wrappers
        heads, size = (q.size(1), k.size(-2)), q.size(2)
        rows, keys = call["cu_seqlens_q"], call["cu_seqlens_k"]
        new_step, self.planned = rows is not self.planned, rows
        options = {"causal": call["causal"], "sm_scale": call["softmax_scale"], "q_data_type": q.dtype}
        if block_table is None:
            if new_step:
                ragged.plan(rows.cpu(), keys.cpu(), *heads, size, **options)
            return ragged.run(q, k, v)
        if new_step:
            lengths = keys.diff().cpu()
            counts = (lengths + k.size(1) - 1) // k.size(1)
            indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
            indptr[1:] = counts.cumsum(0)
            last = (lengths - (counts - 1) * k.size(1)).int()
            used = torch.arange(block_table.size(1)) < counts[:, None]
            paged.plan(rows.cpu(), indptr, block_table[used.to(q.device)], last, *heads, size, k.size(1), **options)
        return paged.run(q, (k, v))

    def with_kvcache(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
        times = k_cache.size(1) // self.PAGE
        table = call["block_table"].clamp(min=0)[..., None] * times
        table = (table + torch.arange(times, dtype=table.dtype, device=table.device)).flatten(1)
        caches = tuple(x.view(-1, self.PAGE, *x.shape[2:]) for x in (k_cache, v_cache))
        out = self.library.decode.trtllm_batch_decode_with_kv_cache(
            q.squeeze(1),
            caches,
            self.workspace,
            table,
            call["cache_seqlens"],
            table.size(1) * self.PAGE,
            bmm1_scale=call["softmax_scale"],
            bmm2_scale=1.0,
            kv_layout="NHD",
        )
        return out.view(q.shape)


def flashinfer() -> ModuleType:
    """FlashInfer, where it is installed."""
    over = OverFlashInfer(importlib.import_module("flashinfer"))
    return as_module(over.varlen, over.with_kvcache)
