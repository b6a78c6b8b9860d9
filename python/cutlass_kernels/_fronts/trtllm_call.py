"""From TensorRT-LLM's arguments to those of ``attention()``: what the functions of ``trtllm`` share."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._attend import plan_free
from .._core import call_table, checks, extra_arguments, hints, index_vectors
from .._core.problems import FLOAT_DTYPES, FP8_DTYPES, HALF_DTYPES
from .._core.run_options import Result
from .._masks import mask_packing

Scale = float | torch.Tensor
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Sinks = torch.Tensor | list[torch.Tensor] | None

FOUR_BITS = "4-bit floats need a Blackwell GPU. Leave it out, and use fp8 or 16-bit tensors."
OTHER_GPUS = "it is for Blackwell GPUs. Leave it out."
_NOT_SET = {"cp_world": 1, "cp_rank": 0}
_pack = call_table.packer(
    "q k v cu_seqlens_q seqused_k max_seqlen_q max_seqlen_k page_table kv_layout causal window packed_custom_mask "
    "mask_indptr sm_scale sinks q_descale v_descale o_dtype out return_lse lse_base kv_indices_per_token topk_length "
    "kv_format"
)
_NAMES = {"sm_scale": "bmm1_scale", "q_descale": "bmm1_scale", "v_descale": "bmm2_scale", "page_table": "block_tables"}
_NAMES |= {"kv_indices_per_token": "block_tables", "topk_length": "sparse_mla_top_k_lens"}


class Arguments:
    """TensorRT-LLM's arguments, in the order of the decode."""

    query: torch.Tensor
    kv_cache: Cache
    workspace_buffer: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    max_seq_len: int
    bmm1_scale: Scale = 1.0
    bmm2_scale: Scale = 1.0
    window_left: int = -1
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | str | None = None
    o_sf_scale: float | None = None
    o_sf_vec_size: int | None = None
    sinks: Sinks = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    backend: str = "auto"
    q_len_per_req: int | None = 1
    o_scale: float | None = 1.0
    mask: torch.Tensor | None = None
    max_q_len: int | None = None
    cum_seq_lens_q: torch.Tensor | None = None
    q_cu_seq_lens: torch.Tensor | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    kv_cache_sf: Any = None
    uses_shared_paged_kv_idx: bool = True
    lse: torch.Tensor | None = None
    return_lse: bool = False
    bmm1_scale_log2: torch.Tensor | None = None
    multi_ctas_kv_counter_buffer: torch.Tensor | None = None
    enable_block_sparse_attention: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: torch.Tensor | None = None
    bf16q_fp8kv_transform_mode: str | None = None
    request_order: torch.Tensor | None = None
    request_order_plan: Any = None


# What attend() and refuse() get of the functions' arguments.
TUPLES = {
    "given": "query kv_cache kv_layout block_tables seq_lens bmm1_scale bmm2_scale window_left sinks out lse "
    "return_lse",
    "wanted": "out_dtype o_scale backend uses_shared_paged_kv_idx skip_softmax_threshold_scale_factor",
}


def attend(
    given: tuple[Any, ...],  # TUPLES
    rows_of: tuple[Any, ...],  # rows of each request, offsets of them, their bound, mask of draft tokens
    max_kv_len: int | None,
    output: tuple[Any, Any],  # out_dtype, o_scale
    causal: bool = True,
    unit: float = 1.0,  # of bmm1_scale
    natural: bool = False,  # the LSE in base e instead of 2
    lists: tuple[Any, Any] | None = None,  # of row_lists()
    kv_format: str | None = None,
) -> Result:
    query, kv_cache, kv_layout, block_tables, seq_lens, logits_scale, output_scale, *others = given
    window_left, sinks, out, lse, return_lse = others
    cu_seqlens_q, draft_mask = rows_of[1], rows_of[3]
    rows = _rows(query, *rows_of)
    wanted = wanted_dtype(query, out, *output)
    return_lse = checks.flag("return_lse", return_lse)
    k, v = _caches(kv_cache)
    seq_lens = _signed(seq_lens)
    if lse is not None:  # before anything is written
        checks.lse_output(lse, query.shape[:2], query.device)
    is_ragged = cu_seqlens_q is not None
    q, max_seqlen_q = (query, rows) if is_ragged else (_by_request(query, rows), None)
    kv_indices = topk_length = None
    if lists is not None:
        kv_indices, topk_length = lists
        causal, cu_seqlens_q, max_seqlen_q, block_tables, seq_lens, max_kv_len = False, None, None, None, None, None
    elif not is_ragged:
        _check_batch(block_tables, seq_lens, query.size(0) // rows)
    else:
        hints.tensors(cum_seq_lens_q=cu_seqlens_q)
        cu_seqlens_q = _signed(cu_seqlens_q)
        _check_batch(block_tables, seq_lens, cu_seqlens_q.numel() - 1)
    bits = offsets = None
    if draft_mask is not None:
        page_size = k.size(1 if kv_layout == "NHD" else 2)
        assert max_kv_len is not None
        most_keys = min(max_kv_len, block_tables.size(1) * page_size)
        bits, offsets = mask_packing.mask_of_drafts(draft_mask, cu_seqlens_q, seq_lens, rows, most_keys)
    sm_scale, q_descale = logits_scale, None
    if isinstance(logits_scale, torch.Tensor):
        checks.one_factor("bmm1_scale", logits_scale)
        sm_scale, q_descale = unit, logits_scale
    checks.one_factor("bmm2_scale", output_scale)
    computed = _computed_dtype(query.dtype, wanted)
    place = out if computed == wanted else None
    if isinstance(place, torch.Tensor) and not is_ragged:
        place = _by_request(place, rows)
    call = _pack(
        q,
        k,
        v,
        cu_seqlens_q,
        seq_lens,  # seqused_k
        max_seqlen_q,
        max_kv_len,  # max_seqlen_k
        _signed(block_tables),  # page_table
        kv_layout,
        causal,
        (window_left if type(window_left) is int else checks.window(window_left), -1),  # window
        bits,  # packed_custom_mask
        offsets,  # mask_indptr
        sm_scale,
        sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks,  # sinks
        q_descale,
        output_scale,  # v_descale
        computed,  # o_dtype
        place,  # out
        return_lse or lse is not None,  # return_lse
        math.e if natural else 2,  # lse_base
        kv_indices,
        topk_length,
        kv_format,
    )
    result = plan_free.attend(call, _NAMES)
    found, found_lse = result if isinstance(result, tuple) else (result, None)
    if place is not None:
        found = out
    else:
        found = _rounded(found.flatten(0, -3), wanted)
        if out is not None:
            found = write(found, checks.output(out, found.shape, wanted, query.device), cu_seqlens_q)
    if found_lse is not None:
        found_lse = found_lse.flatten(0, -2)
        if lse is not None:
            found_lse = write(found_lse, lse, cu_seqlens_q)
    return (found, found_lse) if return_lse else found


def _caches(kv_cache: Any) -> tuple[Any, Any]:
    if not isinstance(kv_cache, torch.Tensor):
        if isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2:
            hints.tensors(k_cache=kv_cache[0], v_cache=kv_cache[1])
            return kv_cache[0], kv_cache[1]
        raise ValueError(f"kv_cache is {type(kv_cache).__name__}: pass one tensor or a tuple (k_cache, v_cache).")
    if kv_cache.dim() != 5 or kv_cache.size(1) not in (1, 2):
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}: one tensor must be [pages, 2, ...] with 5 dimensions, keys "
            "first, or [pages, 1, ...] where keys and values are the same."
        )
    halves = kv_cache.unbind(1)
    return halves[0], halves[-1]


def _signed(x: torch.Tensor) -> torch.Tensor:
    """Lengths as int32. The same memory, where they are uint32."""
    return x.view(torch.int32) if isinstance(x, torch.Tensor) and x.dtype == torch.uint32 else x


def _by_request(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``[batch * rows, ...]`` as ``[batch, rows, ...]``."""
    return x.unsqueeze(1) if rows == 1 else x.unflatten(0, (x.size(0) // rows, rows))


def _rows(
    query: torch.Tensor, each: int | None, cu_seqlens_q: torch.Tensor | None, bound: int | None, mask: Any = None
) -> int:
    """Rows of each request; where offsets tell them, the bound of them, at most the bits in a row of ``mask``."""
    checks.tensor("query", query, 3)
    if cu_seqlens_q is not None:
        if bound is not None:
            return checks.integer("the bound of query lengths", bound)
        has_bits = isinstance(mask, torch.Tensor) and mask.dim() > 0
        return min(query.size(0), max(8 * mask.element_size() * mask.size(-1), 1)) if has_bits else query.size(0)
    if each is None:
        raise ValueError("q_len_per_req=None: pass the number of query rows of each request, or their offsets.")
    count = checks.integer("q_len_per_req", each)
    if count < 1 or query.size(0) % count:
        raise ValueError(
            f"q_len_per_req={count}, but query has {query.size(0)} rows: it must have q_len_per_req rows for each "
            "request. For query lengths that differ, pass offsets."
        )
    return count


def row_lists(given: tuple[Any, ...], width: Any, lengths: Any, cu_seqlens_q: Any) -> tuple[Any, Any]:
    """``kv_indices_per_token`` and ``topk_length`` of a call with ``sparse_mla_top_k=width``."""
    width, query, tables, seq_lens = checks.integer("sparse_mla_top_k", width), given[0], given[3], given[4]
    if width < 1:
        raise ValueError(
            f"sparse_mla_top_k={width} is no width of lists in block_tables: pass theirs, or leave out both it and "
            "sparse_mla_top_k_lens."
        )
    rows = math.prod(query.shape[:-2])
    shapes = [(rows, width)] if cu_seqlens_q is not None else [(*query.shape[:2], width), (rows, width)]
    checks.tensors(block_tables=tables)
    if tuple(tables.shape) not in shapes or tables.dtype != torch.int32:
        raise ValueError(
            f"block_tables has shape {tuple(tables.shape)} and dtype {tables.dtype}: with sparse_mla_top_k={width} it "
            f"must be an int32 tensor {list(shapes[0])}, the keys of each row."
        )
    if lengths is None and seq_lens is not None:
        lengths = _lengths_of_rows(seq_lens, query.shape[:-2], cu_seqlens_q, query.device).clamp(0, width)
    return tables.reshape(rows, 1, width), lengths


def _lengths_of_rows(seq_lens: Any, shape: torch.Size, cu_seqlens_q: Any, device: torch.device) -> torch.Tensor:
    """``seq_lens`` per request or per row, as int32 per row. ``shape`` is ``[batch, rows]`` or ``[rows]``."""
    checks.tensors(seq_lens=seq_lens)
    rows, batch = math.prod(shape), shape[0]
    forms = [[batch], [rows], [*shape]]
    if cu_seqlens_q is not None:
        cu_seqlens_q = index_vectors.index_vector("cum_seq_lens_q", cu_seqlens_q).to(device, non_blocking=True)
        batch = cu_seqlens_q.numel() - 1
        forms = [[batch], [rows]]
    if [*seq_lens.shape] not in forms:
        raise ValueError(
            f"seq_lens has shape {tuple(seq_lens.shape)}: with sparse_mla_top_k it must be an int32 tensor "
            f"{forms[0]}, one per request, or {forms[-1]}, one per row."
        )
    lengths = index_vectors.index_vector("seq_lens", seq_lens.flatten()).to(device, non_blocking=True)
    if seq_lens.dim() == 2 or lengths.numel() != batch:
        return lengths
    if cu_seqlens_q is None:
        return lengths.unsqueeze(1).expand(shape).flatten()
    # Rows behind the last request have no keys.
    places = torch.arange(rows, dtype=torch.int32, device=device)
    requests = torch.searchsorted(cu_seqlens_q[1:].contiguous(), places, right=True)
    return torch.cat([lengths, lengths.new_zeros(1)])[requests]


def _check_batch(block_tables: Any, seq_lens: Any, batch: int) -> None:
    for name, x, dims in (("block_tables", block_tables, 2), ("seq_lens", seq_lens, 1)):
        if not isinstance(x, torch.Tensor) or x.dim() != dims or x.size(0) != batch:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            form = "[batch, pages of a request]" if dims == 2 else "[batch]"
            raise ValueError(f"{name} is {shape}: it must be an int32 tensor {form}, and query has {batch} requests.")


def refusals(four_bits: tuple[str, ...], others: str = "") -> dict[str, str]:
    """Arguments that nothing here serves, and what to do instead."""
    return dict.fromkeys(four_bits, FOUR_BITS) | dict.fromkeys(others.split(), OTHER_GPUS)


def refuse(
    function: str, refused: dict[str, str], values: tuple[Any, ...], wanted: tuple[Any, ...], backends: tuple[str, ...]
) -> None:
    """Raises where one of the ``refused`` has a value, or another argument asks for what nothing here serves."""
    out_dtype, _, backend, has_shared_pages, skip_softmax = wanted
    if backend not in backends:
        if backend == "cake":
            raise NotImplementedError(f"{function} does not serve backend='cake': {OTHER_GPUS}")
        known = ", ".join(backends)
        raise ValueError(f"backend={backend!r} is unknown: use one of {known}, all of them the same here.")
    if out_dtype == "nvfp4":
        extra_arguments.unsupported(function, FOUR_BITS, out_dtype=out_dtype)
    if not has_shared_pages:
        raise NotImplementedError(
            f"{function} does not serve uses_shared_paged_kv_idx=False: keys and values must lie in pages of the same "
            "numbers. Pass block_tables [batch, pages of a request], or call trtllm_fmha_v2_prefill, which takes "
            "[batch, 2, pages]."
        )
    for name, value in zip(refused, values):
        if value is not None and value is not False and not (name in _NOT_SET and value == _NOT_SET[name]):
            extra_arguments.unsupported(function, refused[name], **{name: value})
    if skip_softmax is not None:
        checks.skip_softmax(skip_softmax)


# --- the output --------------------------------------------------------------------------------------------------


def wanted_dtype(query: torch.Tensor, out: Any, out_dtype: Any, o_scale: float | None) -> torch.dtype:
    wanted = None if out_dtype is None else checks.dtype(out_dtype)
    if isinstance(out, torch.Tensor):
        if wanted is not None and wanted != out.dtype:
            raise ValueError(f"out has dtype {out.dtype}, but out_dtype={wanted}: leave one of them out.")
        wanted = out.dtype
        if wanted not in FLOAT_DTYPES and wanted not in FP8_DTYPES:
            raise ValueError(f"out has dtype {wanted}: use float16, bfloat16, float32 or an fp8 type.")
    result = query.dtype if wanted is None else wanted
    if o_scale not in (None, 1) and result not in FP8_DTYPES:
        raise ValueError(
            f"o_scale={o_scale} is for fp8 outputs, but the output has dtype {result}: pass o_scale=1, and multiply "
            "bmm2_scale."
        )
    return result


def _computed_dtype(q_dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype:
    """The dtype that kernels write."""
    if q_dtype in HALF_DTYPES:
        return q_dtype
    return torch.float16 if q_dtype in FP8_DTYPES and wanted not in HALF_DTYPES else wanted


def _rounded(x: torch.Tensor, wanted: torch.dtype) -> torch.Tensor:
    """``x`` in another dtype. What lies beyond the largest fp8 number becomes that number."""
    if x.dtype != wanted and wanted in FP8_DTYPES:
        most = torch.finfo(wanted).max
        x = x.clamp(-most, most)
    return x.to(wanted)


def write(x: torch.Tensor, place: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> torch.Tensor:
    """Copies rows to ``place``, but none behind the last request, and returns it."""
    if cu_seqlens_q is None:
        return place.copy_(x)
    behind = torch.arange(x.size(0), device=x.device) >= cu_seqlens_q[-1]
    behind = behind.view(-1, *[1] * (x.dim() - 1))
    if x.element_size() == 1:  # torch selects no fp8 numbers
        place.view(torch.uint8).copy_(torch.where(behind, place.view(torch.uint8), x.view(torch.uint8)))
        return place
    return place.copy_(torch.where(behind, place, x))
