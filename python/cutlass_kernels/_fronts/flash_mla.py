"""FlashMLA's functions, on this library's kernels: see ``flash_mla``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from .._attend.plan_free import attend
from .._caches import latent_formats
from .._core import call_table, checks, extra_arguments, hints
from .._core.problems import FP8_DTYPES
from .._core.schedules import Schedule
from .._core.tracing import is_traced

Scale = float | torch.Tensor | None

_NAME = "flash_mla_with_kvcache"
_UNSERVED = (352, 288)  # bytes per token of FlashMLA's other quantized caches
# SGLang's fork of FlashMLA has names of its own.
_FORMATS = {"V32": "v3.2", "V32_NO_ROPE": "v3.2_nope", "V4": "v4", "V41": "v4.1_pages"}
_LATENT_COLUMNS = 576  # kernels of dense calls with others write -inf for a row that sees no key
_LSE = dict(return_lse=True, lse_base=math.e)
_pack_dense = call_table.packer(
    "q k v page_table seqused_k kv_format causal sm_scale q_descale k_descale v_descale out schedule flash_mla_lse",
    **_LSE,
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
_NAMES_OF_DENSE = {"k": "k_cache"}
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
    kv_format: str | None = None,
    *,
    descale_q: Scale = None,
    descale_k: Scale = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention (MLA) of decode steps over a paged cache, for any number of query rows.

    Lengths, block tables and indices are read on the GPU, so a captured call follows new ones. Without ``indices``, row
    i of n rows of a request stands at position ``i + cache_seqlen - n``. A row that sees no key has output 0 and LSE
    +inf, unlike rows of ``attention()``, whose LSE is then -inf.

    Args:
        q: ``[batch, rows, num_heads, 576]``: the absorbed queries, then those of the position. float16, bfloat16 or
            float8_e4m3fn. 512 columns for DeepSeek V4, whose values are the whole keys.
        k_cache: ``[pages, page_size, 1, 576]``, the values being its first ``head_dim_v`` columns. The dtype of q, or
            float8_e4m3fn. Any page size. Or a quantized latent cache, ``[pages, page_size, 1, bytes]`` of uint8, int8
            or float8_e4m3fn: 656, 584 or 528 bytes per token, see ``kv_format``.
        block_table: int32 ``[batch, M]``, the pages of each request. Not used with ``indices``, may be None.
        cache_seqlens: int32 ``[batch]``, keys of each request, those of its query rows included. Not used with
            ``indices``, may be None.
        head_dim_v: 512.
        tile_scheduler_metadata: what ``get_mla_metadata()`` returned for this step. Of a ``FlashMLASchedMeta`` the
            schedule is used; anything else is not.
        num_splits: not used.
        softmax_scale: default ``1 / sqrt(576)``; DeepSeek's models need ``1 / sqrt(192)`` times their own factor.
        causal: whether rows see only keys up to their own position. Not with ``indices``.
        is_fp8_kvcache: a cache of uint8 or int8 with the columns of q is then read as float8_e4m3fn. Not needed for
            quantized latent caches.
        indices: int32 ``[batch, rows, topk]``, the keys of each row: ``page * page_size + offset``. Out-of-range
            indices, such as -1, are ignored.
        attn_sink: float32 ``[num_heads]``, with ``indices``. Multiplies the output by
            ``exp(lse) / (exp(lse) + exp(attn_sink))``. The LSE is that without it.
        topk_length: int32 ``[batch]``, with ``indices``: only the leftmost so many of a row count.
        extra_k_cache: with ``indices``, a second cache, whose keys join the same softmax. As ``k_cache``, with pages of
            any size, in the same or another format.
        extra_indices_in_kvcache, extra_topk_length: as ``indices`` and ``topk_length``, for ``extra_k_cache``.
        kv_format: format of quantized latent caches. Default: from the number of bytes; required for 528. A token
            stands for bfloat16 numbers: e4m3 times its scale in fp32, rounded to nearest. On Hopper, fa3 reads these
            caches with ``indices`` and bfloat16 queries, two of them if both have one format; PyTorch computes the
            rest, slowly.

            - ``"v3.2"`` (or ``"V32"``): 656 bytes, DeepSeek V3.2
            - ``"v3.2_nope"`` (``"V32_NO_ROPE"``): 528 bytes, the same without RoPE
            - ``"v4"`` (``"V4"``): 584 bytes, DeepSeek V4
            - ``"v4.1_pages"`` (``"V41"``): 528 bytes, DeepSeek V4.1, with the scales of a page behind its data, as
              vLLM, SGLang and FlashMLA's releases before September 30, 2026 have it
            - ``"v4.1_tokens"``: the same, with the scales of a token behind its data, as FlashMLA's release of that day
        descale_q, descale_k: dequantization factors of fp8 queries and of an fp8 cache: numbers, or float32 tensors of
            one element. Not used with 16 bits, for which engines pass them, too, and with quantized latent caches,
            which hold their own. Refused where one of two caches is quantized, and the other fp8.
        out: ``[batch, rows, num_heads, head_dim_v]``, where to write the output.

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
    if indices is None:
        _check_dense(q, block_table, cache_seqlens, attn_sink)
        if not (topk_length is extra_k_cache is extra_indices_in_kvcache is extra_topk_length is None):
            _refuse_lists(topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length)
    else:
        _check_lists(q, indices, "indices")
    if kv_format is not None:
        kv_format = _format(kv_format)
    k_cache = _cache("k_cache", q, k_cache, is_fp8_kvcache, kv_format)
    if extra_k_cache is not None:
        checks.tensor("extra_k_cache", extra_k_cache, 4)
        extra_k_cache = _cache("extra_k_cache", q, extra_k_cache, is_fp8_kvcache, kv_format)
        _check_descale(descale_k, k_cache, extra_k_cache)
    if is_fp8_kvcache and k_cache.element_size() > 1 and (extra_k_cache is None or extra_k_cache.element_size() > 1):
        raise ValueError(f"is_fp8_kvcache=True, but k_cache has dtype {k_cache.dtype}: leave it out.")
    if k_cache.dtype == torch.uint8:
        values = _quantized_values(head_dim_v, k_cache)
    else:
        values = k_cache[..., : _columns("head_dim_v", head_dim_v, "k_cache", k_cache)]
    if q.dtype not in FP8_DTYPES:
        descale_q = None
    if k_cache.dtype not in FP8_DTYPES:
        descale_k = None
    options = (causal, softmax_scale, descale_q, descale_k, descale_k, out, _schedule_of(tile_scheduler_metadata))
    has_lse = True  # FlashMLA's
    if indices is None:
        has_lse = q.size(-1) == _LATENT_COLUMNS
        dense = block_table, cache_seqlens, kv_format, *options, has_lse
        call, names = _pack_dense(q, k_cache, values, *dense), _NAMES_OF_DENSE
    else:
        if extra_indices_in_kvcache is not None:
            _check_lists(q, extra_indices_in_kvcache, "extra_indices_in_kvcache")
            extra_indices_in_kvcache = _by_row(extra_indices_in_kvcache)
        extra = extra_k_cache, extra_indices_in_kvcache, extra_topk_length
        lists = _by_row(indices), topk_length, attn_sink
        call, names = _pack_selected(q, k_cache, values, *lists, *extra, kv_format, *options), _NAMES
    result, lse = attend(call, names)
    if not has_lse:
        lse = lse.masked_fill(lse == -math.inf, math.inf)
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


def _check_dense(q: torch.Tensor, block_table: Any, cache_seqlens: Any, attn_sink: Any) -> None:
    """Says what is wrong with arguments of a call without indices."""
    extra_arguments.unsupported(
        _NAME, "without indices, call attention(sinks=), whose LSE includes the sink.", attn_sink=attn_sink
    )
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


def _refuse_lists(*of_lists: Any) -> NoReturn:
    names = ("topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")
    name = next(name for name, given in zip(names, of_lists) if given is not None)
    raise ValueError(f"{name} is given without indices, the keys of each row: pass both.")


def _format(kv_format: Any) -> str:
    found = _FORMATS.get(kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    latent_formats.check_name(found)
    return str(found)


def _cache(name: str, q: torch.Tensor, cache: torch.Tensor, is_fp8: bool, kv_format: str | None) -> torch.Tensor:
    """The cache in the dtype of its elements; uint8 if it is quantized."""
    columns, is_bytes = cache.size(-1), cache.dtype in latent_formats.BYTES
    if columns != q.size(-1) and (is_bytes or cache.dtype == torch.float8_e4m3fn):
        if columns in _UNSERVED:
            raise NotImplementedError(
                f"{name} has {columns} bytes per token, a format of FlashMLA that is not served: pass 16 bits, or "
                f"{latent_formats.IN_WORDS}."
            )
        if latent_formats.is_quantized(cache.view(torch.uint8), kv_format):
            return cache.view(torch.uint8)
    if is_bytes and is_fp8 and columns == q.size(-1):
        return cache.view(torch.float8_e4m3fn)
    if is_bytes:
        raise ValueError(
            f"{name} has dtype {cache.dtype} and shape {tuple(cache.shape)}: pass float8_e4m3fn of {q.size(-1)} "
            f"columns, such bytes with is_fp8_kvcache=True, or a quantized latent cache of {latent_formats.IN_WORDS} "
            "per token."
        )
    return cache


def _check_descale(descale_k: Scale, *caches: torch.Tensor) -> None:
    """ValueError if ``descale_k`` would multiply keys of a quantized cache, too."""
    dtypes = {x.dtype for x in caches}
    if descale_k is not None and torch.uint8 in dtypes and not dtypes.isdisjoint(FP8_DTYPES):
        raise ValueError(
            f"descale_k={hints.shown(descale_k)} is given, but one of k_cache and extra_k_cache is a quantized latent "
            "cache, which holds its own scales: leave descale_k out, or pass caches of one format."
        )


def _quantized_values(head_dim_v: Any, k_cache: torch.Tensor) -> torch.Tensor:
    if checks.integer("head_dim_v", head_dim_v) != latent_formats.VALUES:
        raise ValueError(
            f"head_dim_v={head_dim_v}, but values of a quantized latent cache have {latent_formats.VALUES} columns: "
            f"pass {latent_formats.VALUES}."
        )
    return k_cache


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
