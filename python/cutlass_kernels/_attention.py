"""Attention without a plan: lengths and page tables are read on the device by the kernel itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import is_grad_enabled

from . import _args, _attention_op, _hints, _native, _plan_free, _schedule, _select, _signatures
from ._autograd import needs_grad, written
from ._options import Result
from ._plan_free import NATURAL, O_DTYPE, OUT, RETURNED, SINKS, Call
from ._schedule import Schedule
from ._signatures import typed_as
from ._tracing import have_own_dispatch, is_traced

_SAME_NAMES: Mapping[str, str] = {}


@typed_as(_signatures.attention)
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q_rope: torch.Tensor | None = None,
    k_rope: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    kv_shard: tuple[int, int, int] | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    page_table: torch.Tensor | None = None,
    kv_indptr: torch.Tensor | None = None,
    kv_indices: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
    kv_layout: str = "NHD",
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    chunk_size: int = 0,
    packed_custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    q_descale: float | torch.Tensor | None = None,
    k_descale: float | torch.Tensor | None = None,
    v_descale: float | torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    lse_base: float = 2,
    num_splits: int = 0,
    batch_invariant: bool = False,
    schedule: Schedule | None = None,
    backend: str = "auto",
) -> Result:
    r"""Attention of a batch of prompts, appends, decodes or any mixture: ``softmax(cap(sm_scale * q k^T)) v``.

    Nothing is planned and nothing is read back: lengths and page tables are device data. One kernel computes a call; a
    second one merges, where keys were split. Captured in a CUDA graph, a call follows new lengths and tables. The
    workspace, if one is needed, comes from torch's allocator.

    Row ``i`` of a request of n rows and m keys stands at position ``p = i + m - n``: causal masks are aligned to the
    last key. It sees key j if all of these hold: ``j <= p`` where ``causal``; ``p - left <= j <= p + right``, where
    these are not negative; with ``chunk_size = C``, ``j // C == p // C``. A custom mask replaces ``causal`` and chunks.
    A row that sees no key has output 0 and LSE -inf. A request of length 0 is such a request, or has no rows.

    Queries, and how many requests there are:

    =============================  ============================================================================
    q                              requests
    =============================  ============================================================================
    ``[B, n, Hq, D]``              B of n rows
    ``[rows, Hq, D]``              of ``cu_seqlens_q`` (int32 ``[B + 1]``); without, one request
    =============================  ============================================================================

    Keys and values, in NHD; with ``kv_layout="HND"``, heads come before tokens:

    =============================  ============================================================================
    k, v                           keys of request b
    =============================  ============================================================================
    ``[B, S, Hkv, D]``             the first ``seqused_k[b]``, or all S
    ``[tokens, Hkv, D]``           those of ``cu_seqlens_k`` (int32 ``[B + 1]``), of which the first
                                   ``seqused_k[b]``, where given; without either, all of them (one request)
    ``[pages, P, Hkv, D]``         ``seqused_k[b]`` tokens in pages ``page_table[b]`` (int32 ``[B, M]``); or the pages
                                   ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``, the last of which holds
                                   ``kv_last_page_len[b]`` tokens (or ``seqused_k[b]`` in all)
    =============================  ============================================================================

    k and v are separate tensors of any strides with a contiguous last dimension: two halves of one allocation, or K|V
    side by side in the last dimension.

    Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434) has one key head of 576 columns,
    512 latent ones and 64 for the position, and ``v = k[..., :512]``: kernels read them once, under causal masks,
    windows and chunks. PyTorch serves all else, slowly. The 64 columns may lie in tensors of their own:
    ``attention(q, ckv, ckv, q_rope=q_pe, k_rope=kpe)``.

    Args:
        q: float16, bfloat16, or float8_e4m3fn with k and v of the same type.
        k, v: the dtype of q, or fp8. ``Hkv`` divides ``Hq``; query head h reads key head ``h // (Hq // Hkv)``. v may
            have another head dimension.
        q_rope: the last columns of the queries, shaped as q but for the last dimension, where q has only the first.
        k_rope: the same of the keys. v is then k itself, in the same memory. Either may be given alone, and both may be
            views of the rows that q and k are views of.
        cu_seqlens_q, cu_seqlens_k: offsets of requests, in rows and keys.
        seqused_q, seqused_k: int32 ``[B]``, how many rows and keys of each request are used. Other rows of the output
            are not written.
        kv_shard: ``(world, rank, block)``, where the keys of requests are spread over ranks: block i of ``block`` keys
            is rank ``i % world``'s, and k and v hold this rank's, in order. ``seqused_k``, which it needs, then counts
            the keys on all ranks together, as do masks. The result is partial, over the keys of this rank: combine
            those of all ranks with ``distributed.dcp_combine()``. Not with a custom mask or ALiBi.
        max_seqlen_q, max_seqlen_k: bounds of the lengths. They decide tiles and splits; rows of a request beyond
            ``max_seqlen_q`` need not be computed. Of captured calls, bounds of every replay. Default: what the shapes
            allow. With ``kv_shard``, ``max_seqlen_k`` bounds the keys here.
        page_table, kv_indptr, kv_indices, kv_last_page_len: see the table.
        causal, window, chunk_size: the mask; ``window`` is ``(left, right)``, -1 is no limit.
        packed_custom_mask: uint8, a bit per row and key, packed little-endian: request b's ``[n, m]`` bits begin at
            byte ``mask_indptr[b]`` (int32 ``[B + 1]``; not needed for one request).
        logits_soft_cap: c > 0 replaces a logit s by ``c tanh(s / c)``; None or <= 0 is off.
        sm_scale: default ``1 / sqrt(D)``, with all columns of the queries. (DeepSeek's models need another, for
            192 columns before the absorption.)
        sinks: fp32 ``[Hq]``; adds ``exp(sink)`` to the softmax denominator (and to the LSE).
        alibi_slopes: fp32 ``[Hq]``; adds ``slope * (j - i)`` to a logit, before the cap.
        q_descale, k_descale, v_descale: dequantisation factors of fp8 tensors: numbers, or fp32 tensors of one element,
            ``[Hkv]`` or ``[B, Hkv]`` (of q also ``[Hq]`` and ``[B, Hq]``), which may be expanded.
        o_dtype: dtype of the output; default that of ``out``, of q, or of fp8 q bfloat16.
        out: where to write the output. Rows behind the last request are not written.
        return_lse: whether to return the LSE too.
        lse_base: 2, or ``math.e`` for the natural logarithm.
        num_splits: KV splits of short queries. 0 chooses from shapes and device facts, 1 splits none, n asks for n on
            average.
        batch_invariant: the bits of a request's result then depend on nothing but the request, the head counts, the
            options and the device. The length of a request decides its kernel and its KV splits, so that a batch of
            short and long queries takes up to three kernels. ``num_splits=1`` still means no splits; other numbers are
            not used. Decodes and prompts take 0.9 to 1.5 times as long, a prompt beside decodes up to 1.9 times, and
            a few rows over long keys 1.1 to 3.2 times, most with few key heads.
        schedule: shared by calls of the same sizes and lengths, such as those of a model's layers; see ``Schedule``.
        backend: "auto", "fa3", "fa2" or "reference". "auto" takes the fastest that serves all arguments.

    Returns:
        The output, shaped as q with the head dimension of v; with ``return_lse`` the pair of it and the LSE, fp32,
        shaped as q without its last dimension.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or an explicit backend that cannot serve the
            call; on the CPU, lengths, offsets and page numbers that q and k do not have. (A GPU does not read them
            back: such requests compute nothing.) Or ``schedule`` was made by a call of other sizes or options.
        TypeError: ``schedule`` is none.
        RuntimeError: ``Hkv`` does not divide ``Hq``.

    Examples:
        >>> q = torch.randn(4, 1, 32, 128, dtype=torch.float16)  # a decode step of 4 requests
        >>> k, v = torch.randn(2, 64, 16, 8, 128, dtype=torch.float16)  # 64 pages of 16 tokens
        >>> table = torch.arange(64, dtype=torch.int32).view(4, 16)
        >>> lens = torch.tensor([7, 250, 31, 16], dtype=torch.int32)
        >>> attention(q, k, v, page_table=table, seqused_k=lens, causal=True).shape
        torch.Size([4, 1, 32, 128])
    """
    traced, grad = is_traced(), False
    if not traced and is_grad_enabled():
        grad = needs_grad(q, k, v, out, None, sinks, q_descale, k_descale, v_descale, alibi_slopes, q_rope, k_rope)
    shared = None if traced else _schedule.shared(schedule)
    lse_form = 0
    if _args.flag("return_lse", return_lse):
        lse_form = RETURNED if lse_base == 2 else RETURNED | NATURAL
    pair = isinstance(window, (tuple, list)) and len(window) == 2
    if not (traced or grad) and pair and lse_base in (2, math.e) and not _select.is_logged():
        result = _native.attention(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            max_seqlen_q,
            max_seqlen_k,
            page_table,
            kv_indptr,
            kv_indices,
            kv_last_page_len,
            kv_layout,
            causal,
            window[0],
            window[1],
            chunk_size,
            packed_custom_mask,
            mask_indptr,
            logits_soft_cap,
            sm_scale,
            sinks,
            alibi_slopes,
            q_descale,
            k_descale,
            v_descale,
            o_dtype,
            out,
            lse_form,
            num_splits,
            batch_invariant,
            kv_shard,
            q_rope,
            k_rope,
            _select.asked_for(backend),
            shared,
        )
        if result is not None:
            if out is not None:
                written(out)
            return result
    if lse_base not in (2, math.e):
        raise ValueError(f"lse_base={lse_base} is not served: use 2, or math.e for the natural logarithm.")
    call = Call(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        max_seqlen_q,
        max_seqlen_k,
        page_table,
        kv_indptr,
        kv_indices,
        kv_last_page_len,
        kv_layout,
        causal,
        *_plan_free.window(window),
        chunk_size,
        packed_custom_mask,
        mask_indptr,
        logits_soft_cap,
        sm_scale,
        sinks,
        alibi_slopes,
        q_descale,
        k_descale,
        v_descale,
        o_dtype,
        out,
        lse_form,
        num_splits,
        batch_invariant,
        kv_shard,
        q_rope,
        k_rope,
        backend,
    )
    return _attention_op.traced(call) if _is_for_graphs(call) else _plan_free.compute(call)


def attend(
    arguments: tuple[Any, ...], ropes: tuple[Any, Any] = (None, None), names: Mapping[str, str] = _SAME_NAMES
) -> Any:
    """The same of arguments in the order of ``Call``, up to ``kv_shard``: for functions with other ``names`` for them,
    which errors are to say. ``ropes`` are ``q_rope`` and ``k_rope``.

    A plain tuple: to make a ``Call`` takes 2 us.
    """
    if not is_traced() and not _select.is_logged():
        q, k, v, out = arguments[0], arguments[1], arguments[2], arguments[OUT]
        if not (is_grad_enabled() and needs_grad(q, k, v, out, None, *arguments[SINKS:O_DTYPE], *ropes)):
            result = _native.attention(*arguments, *ropes, _select.asked_for("auto"))
            if result is not None:
                if out is not None:
                    written(out)
                return result
    call = Call._make((*arguments, *ropes, "auto"))
    if _is_for_graphs(call):
        return _attention_op.traced(call)
    with _hints.spelt(names):
        return _plan_free.compute(call)


def check(arguments: tuple[Any, ...], ropes: tuple[Any, Any], names: Mapping[str, str]) -> None:
    """Raises what ``attend()`` of these arguments would raise before it computes, for calls that write something else
    first."""
    if not is_traced():
        with _hints.spelt(names):
            _plan_free.checked(Call._make((*arguments, *ropes, "auto")))


def _is_for_graphs(call: Call) -> bool:
    return is_traced() or have_own_dispatch(call.q, call.k, call.v)


def _attend_call(call: Call) -> Any:
    result = _native.attention(*call[:-1], _select.asked_for(call.backend))
    return _plan_free.compute(call) if result is None else result


_attention_op.define(_attend_call)
