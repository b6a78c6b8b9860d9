"""What ``attention()`` does where the direct call is not made: checks, conversions, and the reference.

Arguments are checked and brought into the form that kernels take: index tensors as int32 on the device of the queries,
keys and values of odd strides as pages. The direct call is then made after all; where it still cannot be, PyTorch
computes request by request, from lengths on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from .._compute import fused_kernels, reference, request_facts, selection
from .._core import call_table, checks, hints, index_vectors, native, schedules
from .._core.autograd import forward_only, wants_grad, written
from .._core.call_table import Call
from .._core.errors import BackendError
from .._core.problems import FP8_DTYPES, HALF_DTYPES, Logits, Mask, Output, Problem, RaggedKv
from .._core.run_options import Result
from .._masks import mask_packing
from . import gathered_keys, latent_parts, quantized_caches, selected_keys

MOST_ROWS = 1 << 30  # of k and v, that kernels count
LN2 = math.log(2.0)


def compute(call: Call) -> Result:
    """Computes a call of any arguments, or says what is wrong with them."""
    grad = wants_grad(*call)
    ready = checked(call)
    with torch.no_grad():
        result = _compute(ready, call)
    if grad:
        return forward_only(result, (call.out, call.max_logits), *call._replace(out=None, max_logits=None))
    return result


def _compute(call: Call, given: Call) -> Result:
    result = None
    if call.q.is_cuda and call.q.numel() and call.backend != "reference":
        for readable in _readable(call):
            *most, schedule, backend = readable
            result = native.attention(*most, schedules.shared(schedule), selection.asked_for(backend))
            if result is not None:
                break
    if result is None:
        result = _by_reference(latent_parts.with_whole_queries(call))
    for place, wanted in ((call.out, given.out), (call.max_logits, given.max_logits)):
        if place is not None and wanted is not None:
            if place is not wanted:
                wanted.copy_(place)
            written(wanted)
    if given.out is not None:
        return (given.out, result[1]) if isinstance(result, tuple) else given.out
    return result


def _readable(call: Call) -> Iterator[Call]:
    """The call, and the same with copies of the queries that a kernel may read where it does not read these."""
    is_fp8 = call.q.dtype in FP8_DTYPES
    if not (is_fp8 and latent_parts.head_dim(call.q, call.q_rope) > request_facts.MOST_SEPARATE_COLUMNS):
        yield call
    if is_fp8 and call.o_dtype in HALF_DTYPES:  # which hold every fp8 number
        q_rope = None if call.q_rope is None else call.q_rope.to(call.o_dtype)
        call = call._replace(q=call.q.to(call.o_dtype), q_rope=q_rope)
        yield call
    if call.q_rope is not None:
        yield latent_parts.with_whole_queries(call)


# --- checks and conversions --------------------------------------------------------------------------------------


def checked(call: Call) -> Call:
    """The call as kernels take it; ValueError, TypeError or RuntimeError where it makes no sense."""
    checks.kv_layout(call.kv_layout)
    call_table.is_natural(call.lse_base)
    by_row = selected_keys.are_given(call)
    q = _tensor("q", call.q, (3, 4))
    k, v = _tensor("k", call.k, (3, 4)), _tensor("v", call.v, (3, 4))
    if q.dim() == 4 and call.cu_seqlens_q is not None:
        raise ValueError(f"q has shape {tuple(q.shape)}: with cu_seqlens_q it must be [rows, num_qo_heads, head_dim].")
    batch = q.size(0) if q.dim() == 4 or by_row else 1
    if call.cu_seqlens_q is not None:
        batch = index_vectors.index_vector("cu_seqlens_q", call.cu_seqlens_q).numel() - 1
    if batch < 0:
        raise ValueError("cu_seqlens_q is empty: it needs batch_size + 1 elements, starting with 0.")
    heads = 2 if call.kv_layout == "NHD" or k.dim() == 3 else 1
    heads = (1 if call.kv_layout == "NHD" else 0) if k.dim() == 3 else heads
    tokens = 1 - heads if k.dim() == 3 else 3 - heads
    if k.dim() != v.dim() or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}: they may differ in head_dim alone.")
    call, kind = quantized_caches.checked(call)
    call = latent_parts.checked(call)
    q, k, v = call.q, call.k, call.v
    dim, keys_dim = latent_parts.head_dim(q, call.q_rope), latent_parts.head_dim(k, call.k_rope)
    if keys_dim != dim and kind is None:
        raise ValueError(f"q has head_dim {dim} and k {keys_dim}: they must be equal.")
    checks.heads_of(q, k.transpose(-3, -2) if call.kv_layout == "HND" else k, call.kv_layout)
    checks.same_device(q.device, k=k, v=v)
    o_dtype = call.out.dtype if isinstance(call.out, torch.Tensor) else call.o_dtype
    if o_dtype is None and q.dtype in FP8_DTYPES:
        o_dtype = torch.bfloat16
    # PyTorch reads quantized keys beside queries of any dtype.
    keys_dtype, values_dtype = (k.dtype, v.dtype) if kind is None else (q.dtype, q.dtype)
    o_dtype = checks.element_types(q.dtype, keys_dtype, values_dtype, o_dtype)
    index = _Indices(q.device)
    lens: dict[str, Any] = dict(
        cu_seqlens_q=index("cu_seqlens_q", call.cu_seqlens_q, batch + 1),
        cu_seqlens_k=index("cu_seqlens_k", call.cu_seqlens_k, batch + 1),
        seqused_q=index("seqused_q", call.seqused_q, batch),
        seqused_k=index("seqused_k", call.seqused_k, batch),
        kv_indptr=index("kv_indptr", call.kv_indptr, batch + 1),
        kv_indices=index("kv_indices", call.kv_indices, None),
        kv_last_page_len=index("kv_last_page_len", call.kv_last_page_len, batch),
        page_table=index.table(call.page_table, batch),
        mask_indptr=index("mask_indptr", call.mask_indptr, batch + 1),
    )
    q_rope = None if call.q_rope is None else _joined(call.q_rope)
    call = call._replace(q=_joined(q), q_rope=q_rope, k=k, v=v, o_dtype=o_dtype, **lens)
    if not by_row:
        _check_where_keys_are(call, batch, tokens)
    if call.kv_shard is not None:
        other_masks = call.packed_custom_mask is not None or call.alibi_slopes is not None
        mask_packing.check_shard(call.kv_shard, call.seqused_k, other_masks)
    call = _with_scales(call, batch, k.size(heads))
    call = call._replace(
        causal=checks.flag("causal", call.causal),
        window=call_table.window(call.window),
        chunk_size=_nonnegative("chunk_size", call.chunk_size),
        num_splits=_nonnegative("num_splits", call.num_splits),
        max_seqlen_q=_bound("max_seqlen_q", call.max_seqlen_q),
        max_seqlen_k=_bound("max_seqlen_k", call.max_seqlen_k),
        return_lse=checks.flag("return_lse", call.return_lse),
        batch_invariant=checks.flag("batch_invariant", call.batch_invariant),
        logits_soft_cap=checks.soft_cap(call.logits_soft_cap),
        sm_scale=checks.sm_scale(call.sm_scale, dim),
        sinks=checks.sinks(call.sinks, q.size(-2), q.device),
        alibi_slopes=_slopes(call.alibi_slopes, q.size(-2), q.device),
        packed_custom_mask=_bits(call, batch),
        out=_output(call, (*q.shape[:-1], quantized_caches.values_dim(call)), o_dtype),
    )
    return selected_keys.checked(call, batch, k.size(heads)) if by_row else _as_pages(call, batch, tokens)


def _tensor(name: str, x: Any, ranks: tuple[int, ...]) -> torch.Tensor:
    if isinstance(x, torch.Tensor) and x.dim() not in ranks:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have {' or '.join(map(str, ranks))} dimensions.")
    return checks.tensor(name, x, x.dim() if isinstance(x, torch.Tensor) else ranks[0])


def _nonnegative(name: str, value: Any) -> int:
    number = checks.integer(name, value)
    if number < 0:
        raise ValueError(f"{name}={number} must not be negative.")
    return number


def _bound(name: str, value: Any) -> int | None:
    """A bound of lengths as the direct call takes it: engines pass numpy's integers."""
    return None if value is None else checks.integer(name, value)


class _Indices:
    """Index tensors as int32 on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def __call__(self, name: str, x: Any, length: int | None) -> torch.Tensor | None:
        if x is None:
            return None
        x = index_vectors.index_vector(name, x)
        if length is not None and x.numel() != length:
            raise ValueError(f"{name} has {x.numel()} elements, but this batch needs {length}.")
        return self._moved(name, x)

    def table(self, x: Any, batch: int) -> torch.Tensor | None:
        if x is None:
            return None
        if (
            not isinstance(x, torch.Tensor)
            or x.dim() != 2
            or x.size(0) != batch
            or x.dtype not in index_vectors.INTEGERS
        ):
            shape = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"page_table is {shape}: it must be an int32 tensor [{batch}, pages of a request].")
        # Not wrapped: what does not fit becomes a number that no cache has. The reference reads any integers.
        x = self._moved("page_table", x if self.device.type == "cpu" else index_vectors.saturated(x))
        apart = x.stride(1) == 1 and x.stride(0) >= x.size(1)
        return x if apart else x.contiguous()

    def _moved(self, name: str, x: torch.Tensor) -> torch.Tensor:
        if self.captured:
            x = fused_kernels.captured(name, x, self.device)
        return x.to(self.device, non_blocking=True)


def _check_where_keys_are(call: Call, batch: int, tokens: int) -> None:
    """ValueError where it is not clear which keys are whose."""
    k = call.k
    if call.page_table is not None or call.kv_indptr is not None:
        if k.dim() != 4:
            raise ValueError(f"k has shape {tuple(k.shape)}: pages are [pages, page_size, num_kv_heads, head_dim].")
        if call.page_table is not None and call.kv_indptr is not None:
            raise ValueError("page_table and kv_indptr are given: pass one of them.")
        if call.page_table is not None and call.seqused_k is None and call.cu_seqlens_k is None:
            raise ValueError("page_table is given without lengths: pass seqused_k, the number of keys of each request.")
        if call.kv_indptr is not None and call.kv_indices is None:
            raise ValueError("kv_indptr is given without kv_indices, the page numbers that it divides up.")
        if call.kv_indptr is not None and call.kv_last_page_len is None and call.seqused_k is None:
            raise ValueError("kv_indptr is given without lengths: pass kv_last_page_len or seqused_k.")
    elif k.dim() == 4:
        if call.cu_seqlens_k is not None:
            raise ValueError(f"k has shape {tuple(k.shape)}: with cu_seqlens_k it must be [tokens, heads, head_dim].")
        if k.size(0) != batch:
            raise ValueError(
                f"k holds {k.size(0)} requests (shape {tuple(k.shape)}), but q {batch}: pass a page_table where k is a "
                "paged cache."
            )
    elif call.cu_seqlens_k is None and batch != 1:
        raise ValueError(f"k has shape {tuple(k.shape)} for {batch} requests: pass cu_seqlens_k.")


def _joined(x: torch.Tensor) -> torch.Tensor:
    """``[B, n, H, D]`` whose rows follow one another; a copy where they do not."""
    if x.dim() == 4 and x.size(0) > 1 and x.size(1) > 1 and x.stride(0) != x.size(1) * x.stride(1):
        return x.contiguous()
    return x


def _output(call: Call, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
    if call.out is None:
        return None
    # A copy starts with what ``out`` holds: rows that are not used go back as they were.
    with torch.no_grad():
        return _joined(checks.output(call.out, shape, dtype, call.q.device))


def _slopes(value: Any, heads: int, device: torch.device) -> torch.Tensor | None:
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != (heads,):
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(f"alibi_slopes is {shape}: it must be a float32 tensor [{heads}], one slope per query head.")
    if not value.is_floating_point():
        raise TypeError(f"alibi_slopes has dtype {value.dtype}: it must be float32.")
    checks.same_device(device, alibi_slopes=value)
    return value.to(torch.float32).contiguous()


def _bits(call: Call, batch: int) -> torch.Tensor | None:
    bits = call.packed_custom_mask
    if bits is None:
        return None
    if not isinstance(bits, torch.Tensor) or bits.dtype != torch.uint8 or bits.dim() != 1:
        raise ValueError("packed_custom_mask must be a 1-D uint8 tensor, a bit per row and key.")
    if batch > 1 and call.mask_indptr is None:
        raise ValueError(f"packed_custom_mask holds masks of {batch} requests: pass mask_indptr, where each begins.")
    checks.same_device(call.q.device, packed_custom_mask=bits)
    return mask_packing.whole_words(bits)


def _with_scales(call: Call, batch: int, num_kv_heads: int) -> Call:
    num_qo_heads, device = call.q.size(-2), call.q.device

    def scale(name: str, value: Any, heads: tuple[int, ...]) -> Any:
        if value is None:
            return None
        if not isinstance(value, torch.Tensor):
            return checks.scale(value, name)
        hints.real(name, value)
        if value.numel() == 1:
            if value.is_cuda or device.type == "cpu":
                return value.reshape(1).to(torch.float32)
            return checks.scale(value, name)
        fits = value.dim() in (1, 2) and value.size(-1) in heads and (value.dim() == 1 or value.size(0) in (1, batch))
        if not fits:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: pass a number, [{heads[0]}] or [{batch}, {heads[0]}], one per "
                "head, or per request and head."
            )
        checks.same_device(device, **{name: value})
        return value.to(torch.float32)

    return call._replace(
        q_descale=scale("q_descale", call.q_descale, (num_kv_heads, num_qo_heads)),
        k_descale=scale("k_descale", call.k_descale, (num_kv_heads,)),
        v_descale=scale("v_descale", call.v_descale, (num_kv_heads,)),
    )


def _as_pages(call: Call, batch: int, tokens: int) -> Call:
    """Keys ``[B, S, ...]`` as pages of S tokens, if kernels cannot step from request to request by a number of rows."""
    k, v, k_rope = call.k, call.v, call.k_rope
    paged = call.page_table is not None or call.kv_indptr is not None
    if paged or k.dim() == 3 or batch < 2 or k.size(tokens) == 0:
        return call
    strides = {_stride_of_requests(x, tokens) for x in (k, v, k_rope) if x is not None}
    stride = strides.pop() if len(strides) == 1 else None
    if stride is not None and (batch - 1) * stride + k.size(tokens) < MOST_ROWS:
        return call
    k, v = (x.contiguous() if x.stride(0) == 0 else x for x in (k, v))
    if k_rope is not None:
        v, k_rope = k[..., : v.size(-1)], k_rope.contiguous() if k_rope.stride(0) == 0 else k_rope
    table = torch.arange(batch, dtype=torch.int32, device=k.device).unsqueeze(1)
    lens = call.seqused_k
    if lens is None:
        lens = torch.full((batch,), k.size(tokens), dtype=torch.int32, device=k.device)
    return call._replace(k=k, v=v, k_rope=k_rope, page_table=table, seqused_k=lens)


def _stride_of_requests(x: torch.Tensor, tokens: int) -> int | None:
    """Distance between requests, in rows; None if it is not a whole number of them."""
    token = x.stride(0) if x.size(tokens) == 1 and x.stride(0) else x.stride(tokens)
    return None if token <= 0 or x.stride(0) % token else x.stride(0) // token


# --- the reference -----------------------------------------------------------------------------------------------


def _by_reference(call: Call) -> Result:
    """Computes with PyTorch, a request at a time. Raises where a kernel was asked for by name."""
    q, k, v, k_rope = call.q, call.k, call.v, call.k_rope
    if call.kv_layout == "HND":
        k, v = k.transpose(-3, -2), v.transpose(-3, -2)
        k_rope = None if k_rope is None else k_rope.transpose(-3, -2)
    empty = q.numel() == 0
    if not empty:
        request = _choose_reference(call, k, v, k_rope)
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise selection.not_captured(request)
    assert call.o_dtype is not None
    out = call.out
    if out is None:
        out = q.new_zeros((*q.shape[:-1], quantized_caches.values_dim(call)), dtype=call.o_dtype)
    rows, places = q.flatten(0, -3), out.flatten(0, -3)
    lse = torch.full(rows.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
    by_row = call.kv_indices_per_token is not None
    if by_row and not empty:
        selected_keys.compute(call, rows, k, v, k_rope, places, lse)
    for index, (begin, count, keys, values) in enumerate(
        () if empty or by_row else gathered_keys.requests(call, rows, k, v, k_rope)
    ):
        mine = slice(begin, begin + count)
        problem = Problem(
            rows[mine],
            RaggedKv(keys, values),
            _logits(call, index, keys.size(1)),
            Output(
                places[mine],
                lse[mine],
                None,
                _scale(call.v_descale, index, rows.size(1)),
                sinks_in_lse=not call.flash_mla_lse,
            ),
            _mask(call, index, count),
        )
        reference.compute(problem)
    if not call.return_lse:
        return out
    if call_table.is_natural(call.lse_base):
        lse *= LN2
    if call.flash_mla_lse:
        lse.masked_fill_(lse == -math.inf, math.inf)
    if call.lse_heads_first:
        return out, lse.t().contiguous()
    return out, lse.view(q.shape[:-1])


def _choose_reference(
    call: Call, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None
) -> request_facts.Request:
    """Asks for a backend as every call does, which warns or raises where the reference is not what was asked for.
    Returns the facts of the call."""
    q, features = call.q.flatten(0, -3), set[str]()
    if quantized_caches.are_given(call):
        features.add("quantized_cache")
        k, v = quantized_caches.stand_ins(call)
    elif call.kv_indices_per_token is not None and call.extra_k is None:
        features.add("token_lists")
    if call.extra_k is not None:
        features.add("extra_keys")
    logits = Logits(1.0, call.logits_soft_cap or 0.0, alibi=call.alibi_slopes, sinks=call.sinks)
    mask = Mask(call.causal, call.window[0], call.chunk_size, call.packed_custom_mask)
    out = q.new_empty((1, 1, v.size(-1)), dtype=call.o_dtype)
    keys, values = k.flatten(0, -3)[:1], v.flatten(0, -3)[:1]
    if k_rope is not None:
        keys = latent_parts.joined(keys, k_rope.flatten(0, -3)[:1])
        values = keys[..., : v.size(-1)]
    problem = Problem(q, RaggedKv(keys, values), logits, Output(out), mask)
    request = request_facts.Request.from_problem(problem)
    if k_rope is not None:
        features.add("separate_rope")
    request = request._replace(features=request.features | features)
    backend = "auto" if selection.asked_for(call.backend) == "auto" else call.backend
    selected = selection.select(backend, request)
    if selected != "reference" and backend != "auto":
        raise BackendError(
            f"backend={backend!r} has no kernel for these tensors as they are: q {call.q.dtype} {tuple(call.q.shape)} "
            f"with strides {call.q.stride()}, k {k.dtype} {tuple(k.shape)} with strides {k.stride()}. Use "
            "backend='auto', or a wrapper, which copies what kernels do not read."
        )
    # (Under "auto", kernels that serve plain tensors of this kind may still not read these: see docs/limits.md.)
    return request


def _mask(call: Call, index: int, rows: int) -> Mask:
    mask = Mask(call.causal, call.window[0], call.chunk_size, window_right=call.window[1])
    if call.kv_shard is not None and call.seqused_k is not None:
        return mask_packing.mask_of_shard(call.kv_shard, mask, rows, max(int(call.seqused_k[index]), 0), call.q.device)
    if call.packed_custom_mask is not None:
        mask.chunk_size = 0
        begin = 0 if call.mask_indptr is None else int(call.mask_indptr[index])
        mask.bits = call.packed_custom_mask[begin:]
    return mask


def _logits(call: Call, index: int, num_kv_heads: int) -> Logits:
    num_qo_heads = call.q.size(-2)
    assert call.sm_scale is not None
    logits = Logits(call.sm_scale, call.logits_soft_cap or 0.0, alibi=call.alibi_slopes, sinks=call.sinks)
    for descale in (call.q_descale, call.k_descale):
        factor = _scale(descale, index, num_qo_heads)
        if not isinstance(factor, torch.Tensor):
            logits.sm_scale = logits.sm_scale * factor
        else:
            logits.head_scale = factor if logits.head_scale is None else logits.head_scale * factor
    return logits


def _scale(value: float | torch.Tensor | None, index: int, num_qo_heads: int) -> float | torch.Tensor:
    """A descale of a request: a number, or one factor per query head."""
    if not isinstance(value, torch.Tensor):
        return 1.0 if value is None else value
    if value.dim() == 2:
        value = value[index if value.size(0) > 1 else 0]
    return value.repeat_interleave(num_qo_heads // value.numel())
