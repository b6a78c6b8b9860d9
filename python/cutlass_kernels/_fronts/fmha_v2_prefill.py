"""The fused prefill with TensorRT-LLM's arguments: see ``fmha_v2``."""

from __future__ import annotations

import math
from typing import Any, get_type_hints

import torch
from torch import is_grad_enabled

from .._compute import fused_kernels, request_facts, selection
from .._core import checks, hints, index_vectors, native, run_options, signatures
from .._core.autograd import forward_only, wants_grad, written
from .._core.call_table import Scale
from .._core.problems import FP8_DTYPES, HALF_DTYPES, Logits, Mask, Output, PagedKv, Problem, RaggedKv
from .._core.signatures import typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators

LOG2E = 1.4426950408889634
LAYOUTS = ("PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD")
MASK_MODES = ("causal", "padding", "sliding_window", "chunked")

Tensors = torch.Tensor | tuple[Any, ...] | list[Any]


@typed_as(signatures.trtllm_fmha_v2_prefill)
def trtllm_fmha_v2_prefill(
    qkv: Tensors,
    input_layout: str,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale: float | torch.Tensor,
    bmm2_scale: float | torch.Tensor,
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: str | torch.dtype | None = None,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: float | None = None,
    mask_mode: str = "causal",
    window_left: int = -1,
    chunked_attention_size: int = 0,
    save_softmax_stats: bool = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> run_options.Result:
    """Prefill attention of a batch: ``O = bmm2_scale * softmax(cap(bmm1_scale * Q K^T) + bias) V``.

    Row ``i`` of a request stands at position ``p = i + kv_len - q_len``. Its keys are ``j <= p`` (causal),
    ``p - window_left <= j <= p`` (sliding_window), ``p // C * C <= j <= p`` with ``C = chunked_attention_size``
    (chunked), or all keys of its request (padding). A row without keys is 0.

    On a GPU this is one kernel, which reads lengths and block tables there. Requests so short and few that they would
    leave most of the device idle have their keys split, and mostly a second kernel merges the results. Under fa2, one
    more may make a list of tiles first: for such requests of more than a few rows, and where lengths differ much from
    ``max_q_len``. What a kernel does not read (e4m3 with ALiBi or statistics, or on fa2) is converted first. All of
    this can be captured in a CUDA graph. Tensors that no kernel serves are left to the reference, which cannot.

    Args:
        qkv: what ``input_layout`` says (T query tokens and Tkv key tokens of all requests, one after the other):

            * ``PACKED_QKV``: ``[T, 3, num_heads, head_dim]``
            * ``CONTIGUOUS_Q_KV``: ``(q, kv)``, ``[T, num_qo_heads, head_dim]``, ``[Tkv, 2, num_kv_heads, head_dim]``
            * ``SEPARATE_Q_K_V``: ``(q, k, v)``, k ``[Tkv, num_kv_heads, head_dim]``, v the same with ``head_dim_v``
            * ``Q_PAGED_KV_HND``: ``(q, pool)``, pool ``[pages, 2, num_kv_heads, page_size, head_dim]``, or
              ``(q, (k_cache, v_cache))``, each ``[pages, num_kv_heads, page_size, head_dim]`` of one allocation
            * ``Q_PAGED_KV_NHD``: the same with ``page_size`` before ``num_kv_heads``

            float16, bfloat16 or float8_e4m3fn, the same for all of them.
        input_layout: one of these names.
        workspace_buffer: any byte tensor; kept for its callers, neither read nor written (the kernel's counters are
            the library's own).
        seq_lens: int32 ``[batch_size]``, keys per request; not read, since ``cum_seq_lens_kv`` says the same.
        max_q_len, max_kv_len: upper bounds of the lengths, ``max_kv_len >= max_q_len`` (equal for ``PACKED_QKV``).
            Offsets on the CPU are checked against them; of those on a CUDA device, rows of a request beyond
            ``max_q_len`` need not be computed.
        bmm1_scale: factor of ``Q K^T``, a number or a one-element tensor: the softmax scale, times the scales of fp8
            queries and keys. 0 is ``1 / sqrt(head_dim)``.
        bmm2_scale: factor of the output, a number or a one-element tensor.
        batch_size: number of requests.
        cum_seq_lens_q, cum_seq_lens_kv: int32 ``[batch_size + 1]``, offsets of the requests in tokens. On the device
            of the queries they are read by the kernel: a captured call follows them, within the bounds. It follows
            those in pinned CPU memory, too, and refuses all others on the CPU.
        block_tables: int32. For a pool, ``[batch_size, M]`` page numbers. For separate caches, ``[batch_size, 2, M]``
            block numbers of keys and of values, both counted from the start of ``k_cache``. None for other layouts.
            A captured call takes them as it takes the offsets.
        out: ``[T, num_qo_heads, head_dim_v]`` to write to.
        out_dtype: dtype of the output where ``out`` is None; default that of the queries. 16-bit queries give their own
            dtype only; e4m3 queries float16, bfloat16 or float8_e4m3fn (rounded to nearest; what lies beyond 448 is
            448, NaN stays NaN).
        sinks: float32 ``[num_qo_heads]`` (or a list of that one tensor); the softmax denominator of head h grows by
            ``exp(sinks[h])``, in natural-log units, not multiplied by ``bmm1_scale``.
        pos_encoding_mode: None or ``"alibi"``: adds ``slope_h * j`` after the soft cap.
        logits_soft_cap_scale: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
        mask_mode: ``"causal"``, ``"padding"``, ``"sliding_window"`` or ``"chunked"``, in any case. A positive
            ``window_left`` also takes effect with ``"causal"``, and so does ``chunked_attention_size``, also with
            ``"sliding_window"``.
        window_left: keys to the left of a row's own, inclusive; -1 is no limit.
        chunked_attention_size: chunk length, a power of two; 0 is none.
        save_softmax_stats: also return the statistics. Kernels then compute e4m3 tensors from 16-bit copies.
        skip_softmax_threshold_scale_factor: permission to skip key tiles where every weight, relative to the row's
            largest so far, is below ``factor / kv_len``. 0 computes all, and so do most kernels: those of fa3 skip
            tiles of long 16-bit prompts whose scales are numbers, without a soft cap and ALiBi, in pages of a multiple
            of 8 tokens or in none.
            The values of what is skipped add nothing, nor do its weights to the denominator; NaN there does not show.
            With ``save_softmax_stats`` nothing is skipped.

    Returns:
        ``out``, or ``(out, stats)`` with ``stats`` float32 ``[T, num_qo_heads, 2]``: the row maximum m and
        ``sum_j exp(logit_j - max_j logit_j)`` (natural exponent, without sinks). m is in units of
        ``1 / (bmm1_scale * sqrt(head_dim))``: the largest logit is ``m * sqrt(head_dim) * bmm1_scale``, or
        ``m * sqrt(head_dim)`` with a soft cap. Rows without keys hold the lowest float32 and 0.
        ``fmha_v2_stats_to_lse`` converts them into the base-2 LSE of the other functions.

    Raises:
        ValueError: unknown layout or mask mode, shapes or dtypes that contradict the layout, a missing or malformed
            block table or one without pages, a window together with chunks, padding together with either; lengths on
            the CPU beyond their bounds.
        AssertionError: ``qkv`` is not a tensor or tuple as the layout needs.
        KeyError: unknown ``pos_encoding_mode``.
        RuntimeError: ``num_qo_heads`` is not a multiple of ``num_kv_heads``; offsets that decrease.

    Examples:
        >>> q, kv = torch.randn(6, 8, 64).half(), torch.randn(9, 2, 2, 64).half()
        >>> cum_q, cum_kv = torch.tensor([0, 2, 6]).int(), torch.tensor([0, 3, 9]).int()
        >>> trtllm_fmha_v2_prefill((q, kv), "CONTIGUOUS_Q_KV", torch.zeros(16).byte(), torch.tensor([3, 6]), 4, 6,
        ...                        64**-0.5, 1.0, 2, cum_q, cum_kv).shape
        torch.Size([6, 8, 64])
    """
    traced, grad = is_traced(), False
    if isinstance(sinks, (list, tuple)) and len(sinks) == 1:
        sinks = sinks[0]
    if not traced and is_grad_enabled():
        grad = fused_kernels.needs_grad(qkv, out, None, sinks, bmm1_scale, bmm2_scale)
    if seq_lens is not None and type(seq_lens) is not torch.Tensor:
        hints.tensor("seq_lens", seq_lens)
    if not (traced or grad) and pos_encoding_mode is None and not selection.is_logged():
        result = native.fused_prefill(
            qkv,
            input_layout,
            max_q_len,
            max_kv_len,
            bmm1_scale,
            bmm2_scale,
            batch_size,
            cum_seq_lens_q,
            cum_seq_lens_kv,
            block_tables,
            out,
            out_dtype,
            sinks,
            logits_soft_cap_scale,
            mask_mode,
            window_left,
            chunked_attention_size,
            save_softmax_stats,
            skip_softmax_threshold_scale_factor,
            selection.asked_for("auto"),
        )
        if result is not None:
            if out is not None:
                written(out)
            return result
    _check_layout(input_layout, qkv)
    q, k, v = _split(qkv, input_layout)
    group_heads, head_dim = q.size(1), q.size(2)
    if not traced:
        for name, number in (("max_q_len", max_q_len), ("max_kv_len", max_kv_len), ("batch_size", batch_size)):
            checks.integer(name, number)
    _check_sizes(q, k, v, input_layout, max_q_len, max_kv_len)
    if traced or have_own_dispatch(q, k, v):
        _check_scale(bmm1_scale)
        return _in_graph(
            out,
            qkv=_parts(qkv),
            input_layout=input_layout,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            bmm1_scale=bmm1_scale,
            bmm2_scale=bmm2_scale,
            batch_size=batch_size,
            cum_seq_lens_q=cum_seq_lens_q,
            cum_seq_lens_kv=cum_seq_lens_kv,
            block_tables=block_tables,
            out_dtype=_output_dtype(q.dtype, out, out_dtype),
            sinks=sinks,
            pos_encoding_mode=pos_encoding_mode,
            logits_soft_cap_scale=checks.soft_cap(logits_soft_cap_scale),
            mask_mode=mask_mode,
            window_left=checks.window(window_left),
            chunked_attention_size=chunked_attention_size or 0,
            save_softmax_stats=save_softmax_stats,
            skip_softmax_threshold_scale_factor=checks.skip_softmax(skip_softmax_threshold_scale_factor),
        )
    checks.same_device(q.device, k=k, v=v)
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        cum_seq_lens_q = fused_kernels.captured("cum_seq_lens_q", cum_seq_lens_q, q.device)
        cum_seq_lens_kv = fused_kernels.captured("cum_seq_lens_kv", cum_seq_lens_kv, q.device)
        block_tables = fused_kernels.captured("block_tables", block_tables, q.device)
    qo_indptr = index_vectors.indptr("cum_seq_lens_q", cum_seq_lens_q, batch_size, from_zero=True, told_by="the call")
    kv_indptr = index_vectors.indptr("cum_seq_lens_kv", cum_seq_lens_kv, batch_size, told_by="the call")
    _check_total("cum_seq_lens_q", qo_indptr, "queries", q.size(0))
    _check_longest("max_q_len", max_q_len, qo_indptr)
    _check_longest("max_kv_len", max_kv_len, kv_indptr)
    kv: RaggedKv | PagedKv
    tables: fused_kernels.Tables | None = None
    if input_layout.startswith("Q_PAGED"):
        separate = not isinstance(qkv[1], torch.Tensor)
        entries = _check_tables(block_tables, separate, batch_size)
        tables = fused_kernels.Tables(entries, _value_offset(k, v) if separate else 0)
        if not q.is_cuda or not (kv_indptr.is_cuda or tables.entries.is_cuda):
            kv = fused_kernels.paged(k, v, tables, kv_indptr)  # checks lengths and page numbers
        if q.is_cuda:  # of which nothing but the caches and the offsets is needed as yet
            fused_kernels.check_room(tables.entries, k.size(1), kv_indptr)
            kv = PagedKv(k, v, kv_indptr, tables.entries, kv_indptr)
    else:
        if block_tables is not None:
            raise ValueError(f"block_tables is given, but input_layout={input_layout} has no pages: pass None.")
        _check_total("cum_seq_lens_kv", kv_indptr, "keys", k.size(0))
        kv = RaggedKv(k, v, kv_indptr)
    mask = _mask(mask_mode, window_left, chunked_attention_size)
    logits = Logits(
        sm_scale=_fused_scale(bmm1_scale, head_dim),
        soft_cap=checks.soft_cap(logits_soft_cap_scale),
        alibi=checks.alibi_slopes(group_heads, q.device) if _is_alibi(pos_encoding_mode) else None,
        alibi_relative=False,
        alibi_after_cap=True,
        sinks=checks.sinks(sinks, group_heads, q.device),
    )
    skip = checks.skip_softmax(skip_softmax_threshold_scale_factor)
    shape = (q.size(0), group_heads, v.size(-1))
    result = checks.output(out, shape, _output_dtype(q.dtype, out, out_dtype), q.device)
    has_stats = checks.flag("save_softmax_stats", save_softmax_stats)
    stats = torch.empty((*shape[:2], 2), dtype=torch.float32, device=q.device) if has_stats else None
    output = Output(result, stats=stats, scale=checks.scale(bmm2_scale, "bmm2_scale"))
    problem = Problem(q, kv, logits, output, mask, qo_indptr, skip)
    request = request_facts.Request.from_problem(problem)
    selected = selection.select("auto", request)
    returned = result if stats is None else (result, stats)
    longest, most_keys = int(max_q_len), int(max_kv_len)
    if batch_size and not qo_indptr.is_cuda:
        longest = max(int(index_vectors.lens(qo_indptr).max()), 1)
    if fused_kernels.serves(problem, request, selected):
        fused_kernels.compute(problem, selected, tables, longest, most_keys)
        written(out)
    else:
        if tables is not None and q.is_cuda:
            # Copies of fp8 pages, where they are needed, are of all entries: no more of them than any request uses.
            used = tables._replace(entries=tables.entries[..., : -(-most_keys // k.size(1))])
            problem.kv = fused_kernels.paged(k, v, used, kv_indptr)
        selection.compute_selected(problem, request, selected)
    return forward_only(returned, (out,), qkv, sinks, bmm1_scale, bmm2_scale) if grad else returned


def fmha_v2_stats_to_lse(
    stats: torch.Tensor,
    head_dim: int,
    bmm1_scale: float | torch.Tensor,
    logits_soft_cap_scale: float | None = None,
) -> torch.Tensor:
    """The base-2 LSE of rows whose statistics ``trtllm_fmha_v2_prefill`` saved.

    ``LSE = log2(e) * (max * sqrt(head_dim) * bmm1_scale + ln(sum))``, without ``bmm1_scale`` where a soft cap was in
    effect. Sinks are not included.

    Args:
        stats: float32 ``[T, num_qo_heads, 2]``.
        head_dim: dimension of the query heads.
        bmm1_scale: as in the call that made ``stats`` (0 is ``1 / sqrt(head_dim)``).
        logits_soft_cap_scale: as in that call.

    Returns:
        float32 ``[T, num_qo_heads]``, base 2; -inf for rows without keys. For ``merge_state`` and its relatives.

    Raises:
        ValueError: ``stats`` does not end in a dimension of 2.

    Examples:
        >>> out, stats = trtllm_fmha_v2_prefill(..., save_softmax_stats=True)
        >>> lse = fmha_v2_stats_to_lse(stats, head_dim=128, bmm1_scale=128**-0.5)
    """
    if not isinstance(stats, torch.Tensor):
        raise TypeError(f"stats is {type(stats).__name__}, not a tensor.")
    head_dim = checks.integer("head_dim", head_dim)
    if stats.dim() == 0 or stats.size(-1) != 2:
        raise ValueError(f"stats has shape {tuple(stats.shape)}: its last dimension must hold the maximum and the sum.")
    unit: float | torch.Tensor = math.sqrt(head_dim)
    if checks.soft_cap(logits_soft_cap_scale) == 0.0:
        if isinstance(bmm1_scale, torch.Tensor) and (is_traced() or wants_grad(bmm1_scale)):  # not read as a number
            checks.one_factor("bmm1_scale", bmm1_scale)
            factor = bmm1_scale.reshape(1).to(stats.device, torch.float32)
            unit = unit * torch.where(factor == 0.0, 1.0 / unit, factor)
        else:
            unit = unit * _fused_scale(bmm1_scale, head_dim)
    maximum, total = stats.to(torch.float32).unbind(-1)
    lse = (maximum * unit) * LOG2E + torch.log2(total)
    return torch.where(total == 0.0, -math.inf, lse)  # NaN stays NaN


# --- layouts -----------------------------------------------------------------------------------------------------


def _check_layout(layout: str, qkv: Tensors) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"input_layout={layout!r} is not a layout: use one of {', '.join(LAYOUTS)}.")
    if layout == "PACKED_QKV":
        if not isinstance(qkv, torch.Tensor):
            raise AssertionError(f"input_layout=PACKED_QKV needs qkv as one tensor, not {type(qkv).__name__}.")
        return
    count = 3 if layout == "SEPARATE_Q_K_V" else 2
    if not isinstance(qkv, (tuple, list)) or len(qkv) != count or not isinstance(qkv[0], torch.Tensor):
        raise AssertionError(f"input_layout={layout} needs qkv as a tuple of {count}, the first of them the queries.")


def _split(qkv: Tensors, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries ``[T, heads, dim]`` with keys and values ``[Tkv, heads, dim]`` or ``[pages, page_size, heads, dim]``."""
    if isinstance(qkv, torch.Tensor):
        q, k, v = _unbound("qkv", qkv, 4, 3, "PACKED_QKV is [T, 3, num_heads, head_dim].")
        return q, k, v
    q = checks.tensor("q", qkv[0], 3)
    if layout == "SEPARATE_Q_K_V":
        return q, checks.tensor("k", qkv[1], 3), checks.tensor("v", qkv[2], 3)
    if layout == "CONTIGUOUS_Q_KV":
        return q, *_unbound("kv", qkv[1], 4, 2, "CONTIGUOUS_Q_KV is [Tkv, 2, num_kv_heads, head_dim].")
    if isinstance(qkv[1], torch.Tensor):
        k, v = _unbound("paged_kv", qkv[1], 5, 2, "its second dimension holds keys and values.")
    else:
        if not isinstance(qkv[1], (tuple, list)) or len(qkv[1]) != 2:
            raise AssertionError(f"input_layout={layout} needs (q, pool) or (q, (k_cache, v_cache)).")
        k, v = checks.tensor("k_cache", qkv[1][0], 4), checks.tensor("v_cache", qkv[1][1], 4)
        if k.shape != v.shape or k.dtype != v.dtype or not k.is_contiguous() or not v.is_contiguous():
            raise ValueError(
                f"k_cache ({tuple(k.shape)}, {k.dtype}) and v_cache ({tuple(v.shape)}, {v.dtype}) must be contiguous "
                "and have one shape and dtype: block_tables counts their blocks alike."
            )
    return (q, k, v) if layout.endswith("NHD") else (q, k.transpose(1, 2), v.transpose(1, 2))


def _unbound(name: str, x: Any, rank: int, count: int, says: str) -> Any:
    if checks.tensor(name, x, rank).size(1) != count:
        raise ValueError(f"{name} has shape {tuple(x.shape)}: {says}")
    return x.unbind(1)


def _check_sizes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, max_q: int, max_kv: int) -> None:
    checks.heads_of(q, k, layout)
    if k.size(-1) != q.size(-1) or k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}: q and k must agree in "
            "head_dim, k and v in tokens and heads."
        )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise ValueError(f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}: they must be the same.")
    if max_kv < max_q or (layout == "PACKED_QKV" and max_kv != max_q):
        relation = "equal" if layout == "PACKED_QKV" else "be at least"
        raise ValueError(f"max_kv_len={max_kv} must {relation} max_q_len={max_q} with input_layout={layout}.")


def _check_total(name: str, indptr: torch.Tensor, what: str, tokens: int) -> None:
    if not indptr.is_cuda and int(indptr[-1]) > tokens:
        raise ValueError(f"{name}[-1]={int(indptr[-1])}, but there are only {tokens} {what}.")


def _check_longest(name: str, most: int, indptr: torch.Tensor) -> None:
    """ValueError where a request is known to be longer than its bound."""
    if indptr.is_cuda or indptr.numel() < 2:
        return
    longest = int(index_vectors.lens(indptr).max())
    if longest > most:
        raise ValueError(f"{name}={most}, but there is a request of length {longest}: pass an upper bound.")


def _check_tables(block_tables: torch.Tensor | None, separate: bool, batch_size: int) -> torch.Tensor:
    """The block tables; ValueError where they are not what the caches need."""
    if block_tables is None:
        raise ValueError("a paged input_layout needs block_tables.")
    rank = 3 if separate else 2
    shape = "[batch_size, 2, M]" if separate else "[batch_size, M]"
    table = block_tables
    if not isinstance(table, torch.Tensor):
        raise TypeError(f"block_tables is {type(table).__name__}, not a tensor.")
    if table.dtype != torch.int32:
        raise ValueError(f"block_tables has dtype {table.dtype}: it must be torch.int32.")
    if table.dim() != rank or table.size(0) != batch_size or (separate and table.size(1) != 2):
        raise ValueError(
            f"block_tables has shape {tuple(table.shape)}: with {'separate caches' if separate else 'a pool'} and "
            f"batch_size={batch_size} it must be {shape}."
        )
    return table


def _value_offset(k: torch.Tensor, v: torch.Tensor) -> int:
    """How many blocks the value cache lies behind the key cache."""
    block = k.size(1) * k.size(2) * k.size(3) * k.element_size()
    distance = v.data_ptr() - k.data_ptr()
    if block == 0 or distance <= 0 or distance % block != 0:
        raise ValueError(
            f"v_cache lies {distance} bytes behind k_cache, which must be a positive multiple of a block "
            f"({block} bytes): allocate both caches in one tensor."
        )
    return distance // block


# --- options -----------------------------------------------------------------------------------------------------


def _mask(mask_mode: str, window_left: int, chunk_size: int) -> Mask:
    mode = mask_mode.lower() if isinstance(mask_mode, str) else mask_mode
    if mode not in MASK_MODES:
        raise ValueError(f"mask_mode={mask_mode!r} is not a mask: use one of {', '.join(MASK_MODES)}.")
    window, chunk = checks.window(window_left), checks.integer("chunked_attention_size", chunk_size or 0)
    if chunk < 0 or chunk & (chunk - 1):
        raise ValueError(f"chunked_attention_size={chunk} must be a power of two, or 0 for none.")
    if mode == "chunked" and chunk == 0:
        raise ValueError("mask_mode='chunked' needs a positive chunked_attention_size.")
    if mode == "padding":
        if window >= 0 or chunk > 0:
            raise ValueError(
                f"mask_mode='padding' sees all keys, but window_left={window} and chunked_attention_size={chunk} "
                "restrict them: use 'sliding_window' or 'chunked'."
            )
        return Mask()
    if window == 0 and mode != "sliding_window":
        window = -1
    if window >= 0 and chunk > 0:
        raise ValueError(
            f"window_left={window} and chunked_attention_size={chunk} exclude each other: set one of them."
        )
    return Mask(causal=True, window_left=window, chunk_size=chunk)


def _is_alibi(mode: str | None) -> bool:
    name = "none" if mode is None else str(mode).lower()
    if name not in ("none", "alibi"):
        raise KeyError(f"pos_encoding_mode={mode!r} is not served here: use None or 'alibi'.")
    return name == "alibi"


def _check_scale(value: float | torch.Tensor) -> None:
    if value is None:
        raise ValueError("bmm1_scale is None: pass a number, 0 for 1 / sqrt(head_dim).")


def _fused_scale(value: float | torch.Tensor, head_dim: int) -> float | torch.Tensor:
    """``bmm1_scale``, with 0 replaced by its default."""
    _check_scale(value)
    factor = checks.scale(value, "bmm1_scale")
    default = 1.0 / math.sqrt(head_dim)
    if isinstance(factor, torch.Tensor):
        return torch.where(factor == 0.0, default, factor)
    return default if factor == 0.0 else factor


def _output_dtype(q_dtype: torch.dtype, out: torch.Tensor | None, out_dtype: str | torch.dtype | None) -> torch.dtype:
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError(f"out is {type(out).__name__}, not a tensor.")
    wanted = out.dtype if out is not None else q_dtype if out_dtype is None else checks.dtype(out_dtype)
    served = (*HALF_DTYPES, torch.float8_e4m3fn) if q_dtype in FP8_DTYPES else (q_dtype,)
    if wanted not in served:
        names = ", ".join(str(d).removeprefix("torch.") for d in served)
        name = "out_dtype" if out is None else "out.dtype"
        raise ValueError(f"{name}={wanted} is not served where the queries are {q_dtype}: it can be {names}.")
    return wanted


# --- in graphs ---------------------------------------------------------------------------------------------------


def _parts(qkv: Tensors) -> list[torch.Tensor]:
    """The tensors of ``qkv``, also of a pair of caches in it."""
    return [qkv] if isinstance(qkv, torch.Tensor) else [x for part in qkv for x in _parts(part)]


def _run(qkv: tuple[torch.Tensor, ...], input_layout: str, **arguments: Any) -> run_options.Result:
    parts: Any = qkv[0] if len(qkv) == 1 else qkv
    if len(qkv) == 3 and input_layout.startswith("Q_PAGED"):
        parts = (qkv[0], qkv[1:])
    unread: Any = dict.fromkeys(_UNREAD)
    return trtllm_fmha_v2_prefill(parts, input_layout, **unread, **arguments)


def _fake(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.qkv[0]
    rows, heads, head_dim_vo = q.shape[0], q.shape[-2], x.qkv[-1].shape[-1]
    return (
        q.new_empty((rows, heads, head_dim_vo) if x.out is None else (0,), dtype=x.out_dtype),
        q.new_empty((rows, heads, 2) if x.save_softmax_stats else (0,), dtype=torch.float32),
    )


_CHANGED: dict[str, Any] = dict.fromkeys(("bmm1_scale", "bmm2_scale"), Scale) | {"logits_soft_cap_scale": float}
_CHANGED |= {"qkv": list[torch.Tensor], "out_dtype": torch.dtype, "sinks": torch.Tensor | None}
_TYPES, _UNREAD = get_type_hints(trtllm_fmha_v2_prefill) | _CHANGED, ("workspace_buffer", "seq_lens")
_in_graph = operators.operator("fused", _TYPES, _run, _fake, _UNREAD, "save_softmax_stats")
