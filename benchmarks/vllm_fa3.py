"""FlashAttention-3 as vLLM's wheel ships it, with the functions of flash_attn_interface that are measured here.

A machine rarely has flash_attn_interface, which takes an hour to compile. The operators are those of the compiled
module alone, so that nothing else of vLLM, nor the torch that it asks for, need be installed.
"""

from __future__ import annotations

import functools
import importlib
import math
from importlib import metadata
from typing import Any

import torch

importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
_ops = torch.ops._vllm_fa3_C
try:
    __version__ = metadata.version("vllm")
except metadata.PackageNotFoundError:  # the compiled module alone
    __version__ = ""


@functools.cache
def _offsets(count: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (count + 1) * length, length, dtype=torch.int32, device=device)


def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """Of tensors ``[batch, length, heads, dim]``, as offsets: vLLM compiles nothing else."""
    for name, x in (("q", q), ("k", k)):
        options[f"cu_seqlens_{name}"] = _offsets(*x.shape[:2], x.device)
        options[f"max_seqlen_{name}"] = x.size(1)
    return _forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), **options)


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
    if q.dim() == 4:
        options |= {"cu_seqlens_q": _offsets(*q.shape[:2], q.device), "max_seqlen_q": q.size(1)}
        q = q.flatten(0, 1)
    return _forward(q, k_cache, v_cache, seqused_k=cache_seqlens, num_splits=0, **options)


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
    lengths = (cu_seqlens_q, cu_seqlens_k, None, None, seqused_k, max_seqlen_q, max_seqlen_k)
    out, *_ = _ops.fwd(
        *(q, k, v),
        *[None] * 4,  # new keys and values, qv, out
        *lengths,
        page_table,
        *[None] * 8,  # entries, left padding, rotary embeddings, scales
        *(1 / math.sqrt(q.size(-1)), causal, *window_size, softcap, True),
        *(scheduler_metadata, num_splits, None, 0),
        *(None, 1, 0, None),  # sinks, context parallelism
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
