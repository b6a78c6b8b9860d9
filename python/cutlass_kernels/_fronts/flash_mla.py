"""FlashMLA's functions for dense decoding, on this library's kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .._attend.plan_free import attention
from .._core import checks, extra_arguments
from .._core.problems import FP8_DTYPES
from .._core.schedules import Schedule
from .._core.tracing import is_traced

Scale = float | torch.Tensor | None

_NAME = "flash_mla_with_kvcache"
_SPARSE = "sparse attention is not served. Leave it out for all keys of the block table, or call FlashMLA itself."


@dataclass
class FlashMLASchedMeta:
    """What engines keep of ``get_mla_metadata()`` and pass to layers of a step: its schedule, made by the first.

    As FlashMLA's, it serves calls of the same sizes and lengths, and follows new lengths in CUDA graphs that captured
    its first call. Its attributes may be assigned, as vLLM does; nothing reads them.
    """

    have_initialized: bool = False
    config: Any = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None
    schedule: Schedule | None = field(default=None, repr=False, compare=False)


def _schedule_of(metadata: Any) -> Schedule | None:
    if is_traced() or not isinstance(metadata, FlashMLASchedMeta):
        return None
    if metadata.schedule is None:
        metadata.schedule = Schedule()
    return metadata.schedule


def get_mla_metadata(cache_seqlens: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What FlashMLA computes before a decode step: here the first call that gets it does.

    Args:
        cache_seqlens: int32 ``[batch]``, of which the device and the size are used; or None.
        args, kwargs: FlashMLA's other arguments, not used. ``topk`` is refused.

    Returns:
        With ``cache_seqlens`` two int32 tensors of zeros, ``[1, 8]`` and ``[batch + 1]``, which engines may copy to
        buffers of CUDA graphs, as FlashMLA's first releases made. Without, ``(FlashMLASchedMeta(), None)``.

    Raises:
        NotImplementedError: ``topk`` is given.

    Examples:
        >>> metadata, num_splits = get_mla_metadata(torch.tensor([100, 7], dtype=torch.int32), 16, 1)
        >>> metadata.shape, num_splits.shape
        (torch.Size([1, 8]), torch.Size([3]))
    """
    extra_arguments.unsupported("get_mla_metadata", _SPARSE, topk=args[4] if len(args) > 4 else kwargs.get("topk"))
    if not isinstance(cache_seqlens, torch.Tensor):
        return FlashMLASchedMeta(), None
    sizes = (1, 8), (cache_seqlens.numel() + 1,)
    metadata, splits = (torch.zeros(size, dtype=torch.int32, device=cache_seqlens.device) for size in sizes)
    return metadata, splits


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    descale_q: Scale = None,
    descale_k: Scale = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention (MLA) of decode steps over a paged cache, for any number of query rows.

    Lengths and block tables are read on the GPU, so a captured call follows new ones. Row i of n rows of a request
    stands at position ``i + cache_seqlen - n``. A row that sees no key has output 0 and LSE -inf.

    Args:
        q: ``[batch, rows, num_heads, 576]``: the absorbed queries, then those of the position. float16, bfloat16 or
            float8_e4m3fn.
        k_cache: ``[pages, page_size, 1, 576]``, the values being its first ``head_dim_v`` columns. The dtype of q, or
            float8_e4m3fn. Any page size.
        block_table: int32 ``[batch, M]``, the pages of each request.
        cache_seqlens: int32 ``[batch]``, keys of each request, those of its query rows included.
        head_dim_v: 512.
        tile_scheduler_metadata: what ``get_mla_metadata()`` returned for this step. Of a ``FlashMLASchedMeta`` the
            schedule is used; anything else is not.
        num_splits: not used.
        softmax_scale: default ``1 / sqrt(576)``; DeepSeek's models need ``1 / sqrt(192)`` times their own factor.
        causal: whether rows see only keys up to their own position.
        is_fp8_kvcache: a uint8 cache of 576 columns is then read as float8_e4m3fn. FlashMLA's format of 656 bytes per
            token, for sparse attention, is refused.
        indices, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: of sparse attention, refused.
        attn_sink: refused; ``attention(sinks=)`` takes it.
        descale_q, descale_k: dequantisation factors of fp8 queries and of an fp8 cache: numbers, or float32 tensors of
            one element. Not used with 16 bits, for which engines pass them, too.
        out: ``[batch, rows, num_heads, head_dim_v]``, where to write the output.

    Returns:
        The output ``[batch, rows, num_heads, head_dim_v]``, in the dtype of q (bfloat16 for fp8), and the natural LSE,
        float32 ``[batch, num_heads, rows]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.
        NotImplementedError: an argument that is refused.

    Examples:
        >>> q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)  # 2 requests
        >>> cache = torch.randn(10, 64, 1, 576, dtype=torch.bfloat16)  # 10 pages of 64 tokens
        >>> table, lens = torch.arange(10, dtype=torch.int32).view(2, 5), torch.tensor([300, 7], dtype=torch.int32)
        >>> metadata, num_splits = get_mla_metadata(lens, 16, 1)
        >>> out, lse = flash_mla_with_kvcache(q, cache, table, lens, 512, metadata, num_splits, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
    """
    sparse = dict(
        indices=indices,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    extra_arguments.unsupported(_NAME, _SPARSE, **sparse)
    extra_arguments.unsupported(_NAME, "call attention(sinks=), whose LSE includes the sink.", attn_sink=attn_sink)
    for name, x, dims in (("q", q, 4), ("k_cache", k_cache, 4)):
        checks.tensor(name, x, dims)
    for name, given, form in (
        ("block_table", block_table, ", pages of a request"),
        ("cache_seqlens", cache_seqlens, ""),
    ):
        x = checks.tensor(name, given, 2 if form else 1)
        if x.dtype != torch.int32 or x.size(0) != q.size(0):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor "
                f"[{q.size(0)}{form}], as q has {q.size(0)} requests."
            )
    if k_cache.dtype == torch.uint8 and is_fp8_kvcache and k_cache.size(-1) == q.size(-1):
        k_cache = k_cache.view(torch.float8_e4m3fn)
    elif k_cache.dtype == torch.uint8:
        raise ValueError(
            f"k_cache has dtype torch.uint8 and shape {tuple(k_cache.shape)}: pass float8_e4m3fn of {q.size(-1)} "
            "columns, or such bytes with is_fp8_kvcache=True. The 656 bytes of FlashMLA's sparse cache are not served."
        )
    if is_fp8_kvcache and k_cache.dtype not in FP8_DTYPES:
        raise ValueError(f"is_fp8_kvcache=True, but k_cache has dtype {k_cache.dtype}: leave it out.")
    columns = checks.integer("head_dim_v", head_dim_v)
    if not 0 < columns <= k_cache.size(-1):
        raise ValueError(
            f"head_dim_v={head_dim_v}, but k_cache has {k_cache.size(-1)} columns: values are its first ones, 512 in "
            "DeepSeek's models."
        )
    if q.dtype not in FP8_DTYPES:
        descale_q = None
    if k_cache.dtype not in FP8_DTYPES:
        descale_k = None
    result, lse = attention(
        q,
        k_cache,
        k_cache[..., :columns],
        page_table=block_table,
        seqused_k=cache_seqlens,
        causal=causal,
        sm_scale=softmax_scale,
        q_descale=descale_q,
        k_descale=descale_k,
        v_descale=descale_k,
        out=out,
        return_lse=True,
        lse_base=math.e,
        schedule=_schedule_of(tile_scheduler_metadata),
    )
    return result, lse.transpose(1, 2)
