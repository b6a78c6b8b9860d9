"""FlashAttention-3 as vLLM's wheel ships it, with the functions of flash_attn_interface that are measured here.

A machine rarely has flash_attn_interface, which takes an hour to compile. The operators are those of the compiled
module alone, so that nothing else of vLLM, nor the torch that it asks for, need be installed.
"""

from __future__ import annotations

import importlib
import math
from importlib import metadata
from typing import Any

import torch

importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
_ops = torch.ops._vllm_fa3_C
try:
    __version__ = f"FlashAttention-3 of vLLM {metadata.version('vllm')}"
except metadata.PackageNotFoundError:
    __version__ = "FlashAttention-3 of vLLM"


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return _forward(q, k, v, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    return _forward(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)


def flash_attn_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, cache_seqlens: torch.Tensor, **options: Any
) -> torch.Tensor:
    return _forward(q, k_cache, v_cache, seqused_k=cache_seqlens, **options)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 1,
) -> torch.Tensor:
    before = [None] * 3 + [cu_seqlens_q, cu_seqlens_k, None, None, seqused_k, max_seqlen_q, max_seqlen_k, page_table]
    if page_table is not None:
        num_splits = 0  # the default of flash_attn_with_kvcache()
    out, *_ = _ops.fwd(
        *(q, k, v, None),
        *before,
        *[None] * 8,  # entries, left padding, rotary embeddings, scales
        1 / math.sqrt(q.size(-1)),
        causal,
        *window_size,
        softcap,
        True,
        scheduler_metadata,
        num_splits,
        None,
        0,
        None,
        1,
        0,
        None,
    )
    result: torch.Tensor = out
    return result


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    page_size: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    sizes = (batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim, torch.bfloat16)
    lengths = (cache_seqlens, cu_seqlens_q, None, None, None, None)
    made: torch.Tensor = _ops.get_scheduler_metadata(*sizes, *lengths, page_size, 0, causal, -1, -1, False, 0, None, 0)
    return made
