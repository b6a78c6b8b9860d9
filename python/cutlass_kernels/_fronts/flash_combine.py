"""FlashAttention's functions that compute no attention: of partial results, and of what kernels here do not need."""

from __future__ import annotations

import torch

from .._attend.checked_calls import LN2
from .._compute.merging import merge_states
from .._core import checks, hints
from .flash_cache import Pair, Window, tensors


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Pair:
    """Merges partial results over disjoint keys.

    Args:
        out_partial: ``[splits, B, n, H, D]`` or ``[splits, rows, H, D]``, float32.
        lse_partial: their natural LSEs, fp32, the same shape without D.
        out: where to write the output.
        out_dtype: dtype of the output; default that of ``out``, or float32.

    Returns:
        The output ``[B, n, H, D]`` (or ``[rows, H, D]``) and its natural LSE, fp32, the same shape without D. Where all
        partial LSEs are -inf they are 0 and -inf.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.

    Examples:
        >>> out, lse = flash_attn_combine(torch.randn(3, 2, 5, 8, 64), torch.randn(3, 2, 5, 8))
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 8]))
    """
    hints.tensors(out_partial=out_partial, lse_partial=lse_partial)
    tensors(out=out)
    if out_partial.dim() not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}: they must "
            "be [splits, B, n, H, D] and the same without D."
        )
    if out_dtype is not None:
        out_dtype = checks.dtype(out_dtype)
    if out is not None:
        out = checks.output(out, out_partial.shape[1:], out_dtype or out.dtype, out_partial.device)
    states = out_partial.movedim(0, -3).flatten(0, -4)  # [tokens, splits, H, D]
    merged, lse = merge_states(states, (lse_partial.movedim(0, -2).flatten(0, -3) / LN2).contiguous())
    merged, lse = merged.view(out_partial.shape[1:]), lse.view(lse_partial.shape[1:]) * LN2
    if out is not None:
        out.copy_(merged)
        return out, lse
    return merged if out_dtype is None else merged.to(out_dtype), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """What FlashAttention-3 computes beforehand for ``scheduler_metadata``: kernels here find their work themselves, so
    this is an int32 tensor ``[1]`` that nobody reads. The arguments are FlashAttention-3's, in its order; only the
    device of ``cache_seqlens`` counts.

    Examples:
        >>> get_scheduler_metadata(2, 1, 128, 8, 2, 64, torch.tensor([100, 7], dtype=torch.int32))
        tensor([0], dtype=torch.int32)
    """
    hints.tensors(cache_seqlens=cache_seqlens)
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)
