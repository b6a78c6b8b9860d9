"""From TensorRT-LLM's arguments to those of ``attention()``: what the functions of ``trtllm`` share."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._attend import plan_free
from .._core import call_table, checks, extra_arguments, hints
from .._core.problems import FLOAT_DTYPES, FP8_DTYPES, HALF_DTYPES
from .._core.run_options import Result
from .._masks import mask_packing

Scale = float | torch.Tensor
Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Sinks = torch.Tensor | list[torch.Tensor] | None

FOUR_BITS = "4-bit floats need a Blackwell GPU. Leave it out, and use fp8 or 16-bit tensors."
OTHER_GPUS = "it is for Blackwell GPUs. Leave it out."
_pack = call_table.packer(
    "q k v cu_seqlens_q seqused_k max_seqlen_q max_seqlen_k page_table kv_layout causal window packed_custom_mask "
    "mask_indptr sm_scale sinks q_descale v_descale o_dtype out return_lse lse_base"
)
_NAMES = {"sm_scale": "bmm1_scale", "q_descale": "bmm1_scale", "v_descale": "bmm2_scale", "page_table": "block_tables"}


def attend(
    query: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    rows: int,
    kv_cache: Any,
    kv_layout: str,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_kv_len: int,
    scales: tuple[Scale, float, Scale],  # of the logits, its unit, of the output
    masks: tuple[bool, int, torch.Tensor | None],  # causal, window_left, bits of draft tokens
    sinks: Sinks,
    out: torch.Tensor | None,
    wanted: torch.dtype,
    lse: torch.Tensor | None,
    return_lse: bool,
    natural: bool = False,  # the LSE in base e instead of 2
) -> Result:
    return_lse = checks.flag("return_lse", return_lse)
    k, v = _caches(kv_cache)
    seq_lens = _signed(seq_lens)
    causal, window_left, draft_mask = masks
    if lse is not None:  # before anything is written
        checks.lse_output(lse, query.shape[:2], query.device)
    if cu_seqlens_q is None:
        _check_batch(block_tables, seq_lens, query.size(0) // rows)
        q, max_seqlen_q = _by_request(query, rows), None
    else:
        hints.tensors(cum_seq_lens_q=cu_seqlens_q)
        cu_seqlens_q = _signed(cu_seqlens_q)
        _check_batch(block_tables, seq_lens, cu_seqlens_q.numel() - 1)
        q, max_seqlen_q = query, rows
    bits = offsets = None
    if draft_mask is not None:
        page_size = k.size(1 if kv_layout == "NHD" else 2)
        most_keys = min(max_kv_len, block_tables.size(1) * page_size)
        bits, offsets = mask_packing.mask_of_drafts(draft_mask, cu_seqlens_q, seq_lens, rows, most_keys)
    logits_scale, unit, output_scale = scales
    for name, scale in (("bmm1_scale", logits_scale), ("bmm2_scale", output_scale)):
        checks.one_factor(name, scale)
    sm_scale: float | None = unit
    q_descale: torch.Tensor | None = None
    if isinstance(logits_scale, torch.Tensor):
        q_descale = logits_scale
    else:
        sm_scale = logits_scale
    computed = _computed_dtype(query.dtype, wanted)
    place = out if computed == wanted else None
    if isinstance(place, torch.Tensor) and cu_seqlens_q is None:
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


def rows(
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


def _check_batch(block_tables: Any, seq_lens: Any, batch: int) -> None:
    for name, x, dims in (("block_tables", block_tables, 2), ("seq_lens", seq_lens, 1)):
        if not isinstance(x, torch.Tensor) or x.dim() != dims or x.size(0) != batch:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            form = "[batch, pages of a request]" if dims == 2 else "[batch]"
            raise ValueError(f"{name} is {shape}: it must be an int32 tensor {form}, and query has {batch} requests.")


def check_backend(function: str, backend: str, known: tuple[str, ...]) -> None:
    if backend in known:
        return
    if backend == "cake":
        raise NotImplementedError(f"{function} does not serve backend='cake': {OTHER_GPUS}")
    raise ValueError(f"backend={backend!r} is unknown: use one of {', '.join(known)}, all of them the same here.")


def refuse_4_bits(function: str, out_dtype: Any, o_sf_scale: Any, o_sf_vec_size: Any, kv_cache_sf: Any) -> None:
    extra_arguments.unsupported(
        function,
        FOUR_BITS,
        out_dtype=out_dtype if out_dtype == "nvfp4" else None,
        o_sf_scale=o_sf_scale,
        o_sf_vec_size=o_sf_vec_size,
        kv_cache_sf=kv_cache_sf,
    )


def refuse_pages_of_values(function: str, shared: bool) -> None:
    if not shared:
        raise NotImplementedError(
            f"{function} does not serve uses_shared_paged_kv_idx=False: keys and values must lie in pages of the same "
            "numbers. Pass block_tables [batch, pages of a request], or call trtllm_fmha_v2_prefill, which takes "
            "[batch, 2, pages]."
        )


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
