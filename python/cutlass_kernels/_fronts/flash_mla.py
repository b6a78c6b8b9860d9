"""FlashMLA's functions, on this library's kernels: see ``flash_mla``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .._attend.plan_free import attend
from .._caches import latent_formats
from .._core import call_table, checks, extra_arguments
from .._core.problems import FP8_DTYPES
from .._core.schedules import Schedule
from .._core.tracing import is_traced

Scale = float | torch.Tensor | None

_NAME = "flash_mla_with_kvcache"
_OF_EXTRA = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
_UNSERVED = (352, 288)  # bytes per token of FlashMLA's other quantised caches
_LSE = dict(return_lse=True, lse_base=math.e)
_pack_dense = call_table.packer(
    "q k v page_table seqused_k kv_format causal sm_scale q_descale k_descale v_descale out schedule", **_LSE
)
_pack_selected = call_table.packer(
    "q k v kv_indices_per_token topk_length sinks extra_k extra_indices_per_token extra_topk_length kv_format causal "
    "sm_scale q_descale k_descale v_descale out schedule",
    **_LSE,
    flash_mla_lse=True,
)
_pack_prefill = call_table.packer(
    "q k v kv_indices_per_token topk_length max_logits sinks sm_scale out", **_LSE, flash_mla_lse=True
)
# Of calls with indices, in errors.
_NAMES = {"kv_indices_per_token": "indices", "sinks": "attn_sink", "k": "k_cache", "sm_scale": "softmax_scale"}
_NAMES |= {"extra_k": "extra_k_cache", "extra_indices_per_token": "extra_indices_in_kvcache"}
_NAMES_OF_DENSE: dict[str, str] = {}
_NAMES_OF_PREFILL = {"kv_indices_per_token": "indices", "sinks": "attn_sink", "k": "kv"}


@dataclass
class FlashMLASchedMeta:
    """What engines keep of ``get_mla_metadata()`` and pass to layers of a step: its schedule, made by the first.

    As FlashMLA's, it serves calls of the same sizes and lengths, and follows new lengths in CUDA graphs that captured
    its first call. Its attributes may be assigned, as vLLM does; nothing reads them. ``have_initialized`` says whether
    a call has used it; ``config``, ``tile_scheduler_metadata`` and ``num_splits`` stay None, as there is nothing else.
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
        metadata.schedule, metadata.have_initialized = Schedule(), True
    return metadata.schedule


def get_mla_metadata(cache_seqlens: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What FlashMLA computes before a decode step: here the first call that gets it does.

    Args:
        cache_seqlens: int32 ``[batch]``, of which the device and the size are used; or None.
        args, kwargs: FlashMLA's other arguments, not used.

    Returns:
        With ``cache_seqlens`` two int32 tensors of zeros, ``[1, 8]`` and ``[batch + 1]``, which engines may copy to
        buffers of CUDA graphs, as FlashMLA's first releases made. Without, ``(FlashMLASchedMeta(), None)``.

    Examples:
        >>> metadata, num_splits = get_mla_metadata(torch.tensor([100, 7], dtype=torch.int32), 16, 1)
        >>> metadata.shape, num_splits.shape
        (torch.Size([1, 8]), torch.Size([3]))
    """
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
    kv_format: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention (MLA) of decode steps over a paged cache, for any number of query rows.

    Lengths, block tables and indices are read on the GPU, so a captured call follows new ones. Without ``indices``, row
    i of n rows of a request stands at position ``i + cache_seqlen - n``. A row that sees no key has output 0. Its LSE
    is -inf, with ``indices`` +inf.

    Args:
        q: ``[batch, rows, num_heads, 576]``: the absorbed queries, then those of the position. float16, bfloat16 or
            float8_e4m3fn. 512 columns for DeepSeek V4, whose values are the whole keys.
        k_cache: ``[pages, page_size, 1, 576]``, the values being its first ``head_dim_v`` columns. The dtype of q, or
            float8_e4m3fn. Any page size. Or FlashMLA's quantised tokens, ``[pages, page_size, 1, bytes]`` of uint8,
            int8 or float8_e4m3fn: 656 bytes (DeepSeek V3.2), 584 (V4) or 528 (V4.1), which PyTorch computes.
        block_table: int32 ``[batch, M]``, the pages of each request. Not used with ``indices``, may be None.
        cache_seqlens: int32 ``[batch]``, keys of each request, those of its query rows included. Not used with
            ``indices``, may be None.
        head_dim_v: 512.
        tile_scheduler_metadata: what ``get_mla_metadata()`` returned for this step. Of a ``FlashMLASchedMeta`` the
            schedule is used; anything else is not.
        num_splits: not used.
        softmax_scale: default ``1 / sqrt(576)``; DeepSeek's models need ``1 / sqrt(192)`` times their own factor.
        causal: whether rows see only keys up to their own position. Not with ``indices``.
        is_fp8_kvcache: a cache of uint8 or int8 with the columns of q is then read as float8_e4m3fn. Not needed for the
            quantised tokens.
        indices: int32 ``[batch, rows, topk]``, the keys of each row: ``page * page_size + offset``. Out-of-range
            indices, such as -1, are ignored.
        attn_sink: float32 ``[num_heads]``, with ``indices``. Multiplies the output by
            ``exp(lse) / (exp(lse) + exp(attn_sink))``. The LSE is that without it.
        topk_length: int32 ``[batch]``, with ``indices``: only the leftmost so many of a row count.
        extra_k_cache: with ``indices``, a second cache, whose keys join the same softmax. As ``k_cache``, with pages of
            any size, in the same or another format.
        extra_indices_in_kvcache, extra_topk_length: what ``indices`` and ``topk_length`` are, for ``extra_k_cache``.
        descale_q, descale_k: dequantisation factors of fp8 queries and of an fp8 cache: numbers, or float32 tensors of
            one element. Not used with 16 bits, for which engines pass them, too.
        out: ``[batch, rows, num_heads, head_dim_v]``, where to write the output.
        kv_format: how tokens of 528 bytes lie in their page. Default ``"v4.1"``, each with its scales, as FlashMLA has
            it since September 30, 2026; ``"v4.1_pages"``, behind the page's data, as its releases before.

    Returns:
        The output ``[batch, rows, num_heads, head_dim_v]``, in the dtype of q (bfloat16 for fp8), and the natural LSE,
        float32 ``[batch, num_heads, rows]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together; ``causal`` with ``indices``.
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
    for name, x, dims in (("q", q, 4), ("k_cache", k_cache, 4)):
        checks.tensor(name, x, dims)
    extra = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
    if indices is None:
        _check_dense(
            q, block_table, cache_seqlens, attn_sink, {"topk_length": topk_length} | dict(zip(_OF_EXTRA, extra))
        )
    else:
        _check_lists(q, indices, "indices")
    k_cache, packed = _cache("k_cache", q, k_cache, is_fp8_kvcache, kv_format)
    columns = checks.integer("head_dim_v", head_dim_v)
    if packed is not None and columns != latent_formats.VALUES:
        raise ValueError(f"head_dim_v={head_dim_v}, but values of such a cache have 512 columns: pass 512.")
    values = k_cache if packed else k_cache[..., : _columns("head_dim_v", head_dim_v, "k_cache", k_cache)]
    if q.dtype not in FP8_DTYPES:
        descale_q = None
    if packed or k_cache.dtype not in FP8_DTYPES:
        descale_k = None
    options = (causal, softmax_scale, descale_q, descale_k, descale_k, out, _schedule_of(tile_scheduler_metadata))
    if indices is None:
        call, names = _pack_dense(q, k_cache, values, block_table, cache_seqlens, packed, *options), _NAMES_OF_DENSE
    else:
        if extra_k_cache is not None:
            checks.tensor("extra_k_cache", extra_k_cache, 4)
            extra_k_cache, of_extra = _cache("extra_k_cache", q, extra_k_cache, is_fp8_kvcache, kv_format)
            packed = of_extra if packed is None or extra_k_cache.size(-1) in _UNCLEAR else packed
        if extra_indices_in_kvcache is not None:
            _check_lists(q, extra_indices_in_kvcache, "extra_indices_in_kvcache")
            extra_indices_in_kvcache = _by_row(extra_indices_in_kvcache)
        extra = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        lists = _by_row(indices), topk_length, attn_sink
        call, names = _pack_selected(q, k_cache, values, *lists, *extra, packed, *options), _NAMES
    result, lse = attend(call, names)
    return result, lse.transpose(1, 2)


def _by_row(lists: torch.Tensor) -> torch.Tensor:
    """``[batch, rows, topk]`` as ``[batch * rows, 1, topk]``."""
    return lists if lists.size(1) == 1 else lists.flatten(0, 1).unsqueeze(1)


def _check_lists(q: torch.Tensor, x: Any, name: str) -> None:
    if checks.tensor(name, x, 3).shape[:2] != q.shape[:2] or x.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor "
            f"[{q.size(0)}, {q.size(1)}, topk], as q has {q.size(0)} requests of {q.size(1)} rows."
        )


def _check_dense(
    q: torch.Tensor, block_table: Any, cache_seqlens: Any, attn_sink: Any, of_lists: dict[str, Any]
) -> None:
    """Says what is wrong with arguments of a call without indices."""
    extra_arguments.unsupported(
        _NAME, "without indices, call attention(sinks=), whose LSE includes the sink.", attn_sink=attn_sink
    )
    for name, given in of_lists.items():
        if given is not None:
            raise ValueError(f"{name} is given without indices, the keys of each row: pass both.")
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


_UNCLEAR = (528,)  # bytes per token that two formats have
_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)


def _cache(
    name: str, q: torch.Tensor, cache: torch.Tensor, is_fp8: bool, kv_format: str | None
) -> tuple[torch.Tensor, str | None]:
    """The cache in the type of its elements, and the format of its tokens where these are bytes."""
    latent_formats.check_name(kv_format)
    size = cache.size(-1)
    if cache.dtype in _BYTES and size != q.size(-1) and latent_formats.is_packed(cache.view(torch.uint8), kv_format):
        found = latent_formats.format_of(name, cache, kv_format or ("v4.1" if size in _UNCLEAR else None))
        return cache.view(torch.uint8), found.name
    if cache.dtype in _BYTES and size in _UNSERVED:
        raise NotImplementedError(
            f"{name} has {size} bytes per token, a format of FlashMLA that is not served: pass 16 bits, or 656, 584 or "
            "528 bytes."
        )
    if cache.dtype in (torch.uint8, torch.int8) and is_fp8 and size == q.size(-1):
        return cache.view(torch.float8_e4m3fn), None
    if cache.dtype in (torch.uint8, torch.int8):
        raise ValueError(
            f"{name} has dtype {cache.dtype} and shape {tuple(cache.shape)}: pass float8_e4m3fn of {q.size(-1)} "
            "columns, or such bytes with is_fp8_kvcache=True, or FlashMLA's tokens of 656, 584 or 528 bytes."
        )
    if is_fp8 and cache.dtype not in FP8_DTYPES:
        raise ValueError(f"is_fp8_kvcache=True, but {name} has dtype {cache.dtype}: leave it out.")
    return cache, None


def _columns(name: str, value: Any, of: str, k: torch.Tensor) -> int:
    """How many columns of the keys are the values."""
    columns = checks.integer(name, value)
    if not 0 < columns <= k.size(-1):
        raise ValueError(
            f"{name}={value}, but {of} has {k.size(-1)} columns: values are its first ones, 512 in DeepSeek's models."
        )
    return columns


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latent attention (MLA) of query rows to selected tokens, such as those of DeepSeek V3.2's indexer.

    A row that sees no key has output 0, largest logit -inf and LSE +inf.

    Args:
        q: ``[s_q, num_heads, 576]``; float16, bfloat16 or float8_e4m3fn.
        kv: ``[s_kv, 1, 576]``, the values being its first ``d_v`` columns. The dtype of q, or float8_e4m3fn.
        indices: int32 ``[s_q, 1, topk]``, rows of kv that each query row sees. Out-of-range indices, such as -1, are
            ignored. One that is listed twice counts twice.
        sm_scale: scale of the logits.
        d_v: 512.
        attn_sink: float32 ``[num_heads]``. Multiplies the output by ``exp(lse) / (exp(lse) + exp(attn_sink))``. Largest
            logits and LSE are those without it.
        topk_length: int32 ``[s_q]``: only the leftmost so many indices of a row count.
        out: ``[s_q, num_heads, d_v]``, where to write the output.

    Returns:
        The output ``[s_q, num_heads, d_v]``, in the dtype of q (bfloat16 for fp8), the largest logit and the natural
        LSE of each row and head, float32 ``[s_q, num_heads]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together.

    Examples:
        >>> q = torch.randn(3, 16, 576, dtype=torch.bfloat16)
        >>> kv = torch.randn(100, 1, 576, dtype=torch.bfloat16)
        >>> indices = torch.randint(100, (3, 1, 64), dtype=torch.int32)
        >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 192**-0.5)
        >>> out.shape, max_logits.shape, lse.shape
        (torch.Size([3, 16, 512]), torch.Size([3, 16]), torch.Size([3, 16]))
    """
    for name, x in (("q", q), ("kv", kv), ("indices", indices)):
        checks.tensor(name, x, 3)
    values = kv[..., : _columns("d_v", d_v, "kv", kv)]
    max_logits = q.new_empty(q.shape[:2], dtype=torch.float32)
    packed = _pack_prefill(q, kv, values, indices, topk_length, max_logits, attn_sink, sm_scale, out)
    result, lse = attend(packed, _NAMES_OF_PREFILL)
    return result, max_logits, lse
