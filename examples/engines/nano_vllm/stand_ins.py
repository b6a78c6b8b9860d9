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
import torch.nn.functional as F

Tensor = torch.Tensor


class Kept:
    """The last result of a function of a tensor: every layer of a step passes the same one."""

    def __init__(self, compute: Callable[[Tensor], Any]) -> None:
        self.compute, self.tensor, self.result = compute, torch.empty(0), None

    def __call__(self, tensor: Tensor) -> Any:
        if tensor is not self.tensor:
            self.tensor, self.result = tensor, self.compute(tensor)
        return self.result


def as_module(varlen: Callable[..., Tensor], with_kvcache: Callable[..., Tensor]) -> ModuleType:
    """A module ``flash_attn`` of two functions."""
    module = ModuleType("flash_attn")
    module.__spec__ = ModuleSpec("flash_attn", None)
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = with_kvcache  # type: ignore[attr-defined]
    return module


# --- torch's scaled_dot_product_attention on gathered pages ---


def sdpa() -> ModuleType:
    """Gathers the pages of all requests, to the longest that a CUDA graph allows, and calls SDPA."""
    from torch.nn.attention.bias import causal_lower_right

    offsets = Kept(lambda tensor: tensor.tolist())

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        block_table: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        rows, keys = offsets(cu_seqlens_q), cu_seqlens_k_of(cu_seqlens_k)
        for i in range(len(rows) - 1):
            mine, length = slice(rows[i], rows[i + 1]), keys[i + 1] - keys[i]
            if block_table is None:
                found = [x[keys[i] : keys[i + 1]] for x in (k, v)]
            else:
                pages = block_table[i, : -(-length // k.size(1))]
                found = [x[pages].flatten(0, 1)[:length] for x in (k, v)]
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q[mine], *found))
            mask = causal_lower_right(query.size(2), length) if causal else None
            seen = F.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True)
            out[mine] = seen[0].transpose(0, 1)
        return out

    cu_seqlens_k_of = Kept(lambda tensor: tensor.tolist())
    return as_module(varlen, gathered_decode)


def gathered_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """q ``[B, 1, heads, dim]``. Shapes depend on shapes alone, so that a CUDA graph holds it."""
    requests, room = q.size(0), block_table.size(1) * k_cache.size(1)
    pages = block_table.clamp(min=0).flatten()
    keys, values = (x.index_select(0, pages).view(requests, room, *x.shape[2:]) for x in (k_cache, v_cache))
    seen = torch.arange(room, device=q.device) < cache_seqlens.clamp(min=1)[:, None]  # [B, room]
    query = q.view(requests, keys.size(2), -1, q.size(3))  # the query heads of a key head are its rows
    group = query.size(2)
    mask = seen[:, None, None, :].expand(requests, 1, group, room)
    out = F.scaled_dot_product_attention(query, keys.transpose(1, 2), values.transpose(1, 2), mask, scale=softmax_scale)
    return out.reshape(q.shape)


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

    def prefill(q: Tensor, k: Tensor, v: Tensor, *, block_table: Tensor | None, **call: Any) -> Tensor:
        longest = (call["max_seqlen_q"], call["max_seqlen_k"])
        keys, options = call["cu_seqlens_k"], {"scale": call["softmax_scale"]}
        if block_table is not None:
            options |= {"seqused_k": keys.diff().int(), "block_table": block_table}
            keys = None
        return attend(q, k, v, call["cu_seqlens_q"], keys, longest, **options)

    def decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, **call: Any) -> Tensor:
        table = call["block_table"]
        rows = torch.arange(q.size(0) + 1, dtype=torch.int32, device=q.device)
        options = {"scale": call["softmax_scale"], "seqused_k": call["cache_seqlens"], "block_table": table}
        longest = (1, table.size(1) * k_cache.size(1))
        return attend(q.squeeze(1), k_cache, v_cache, rows, None, longest, **options).unsqueeze(1)

    return as_module(prefill, decode)


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
