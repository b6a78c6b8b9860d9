"""Attention without a plan: lengths and page tables are read on the device by the kernel itself."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import is_grad_enabled

from .._compute import selection
from .._core import call_table, checks, hints, native, schedules, signatures
from .._core.autograd import needs_grad, written
from .._core.call_table import INTERNAL, Call
from .._core.run_options import Result
from .._core.signatures import typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import checked_calls, quantized_caches

_SAME_NAMES: Mapping[str, str] = {}
_OUT, _MAX_LOGITS = map(Call._fields.index, ("out", "max_logits"))
_SCHEDULE, _BACKEND = map(Call._fields.index, ("schedule", "backend"))  # the last two
_GRADIENTS = ["q", "k", "v", "out", "sinks", "q_descale", "k_descale", "v_descale", "alibi_slopes", "q_rope", "k_rope"]
_GRADIENTS += ["max_logits"]
_with_gradients = itemgetter(*map(Call._fields.index, _GRADIENTS))


def attend(arguments: tuple[Any, ...], names: Mapping[str, str] = _SAME_NAMES) -> Any:
    """``attention()`` of a tuple of ``call_table.packer()``, for functions with other ``names``, which errors say.

    A plain tuple: to make a ``Call`` takes 2 us.
    """
    if not is_traced():
        grad = False
        if is_grad_enabled():
            q, k, v, out, *others = _with_gradients(arguments)
            grad = needs_grad(q, k, v, out, None, *others)
        ready, schedule, backend = arguments, arguments[_SCHEDULE], selection.asked_for(arguments[_BACKEND])
        if schedule is not None or backend is not arguments[_BACKEND]:
            ready = (*arguments[:_SCHEDULE], schedules.shared(schedule), backend)
        if not (grad or selection.is_logged()):
            result = native.attention(*ready)
            if result is not None:
                if arguments[_OUT] is not None:
                    written(arguments[_OUT])
                if arguments[_MAX_LOGITS] is not None:
                    written(arguments[_MAX_LOGITS])
                return result
    call = Call._make(arguments)
    if _is_for_graphs(call):
        return _traced(call)
    with hints.spelt(names):
        return checked_calls.compute(call)


def check(arguments: tuple[Any, ...], names: Mapping[str, str]) -> None:
    """Raises what ``attend()`` of these arguments would raise before it computes, for calls that write something else
    first."""
    if not is_traced():
        with hints.spelt(names):
            checked_calls.checked(Call._make(arguments))


def _is_for_graphs(call: Call) -> bool:
    return is_traced() or have_own_dispatch(call.q, call.k, call.v, call.extra_k)


def _traced(call: Call) -> Result:
    call_table.is_natural(call.lse_base)
    flag, window = checks.flag("return_lse", call.return_lse), call_table.window(call.window)
    return _in_graph(**call._replace(return_lse=flag, window=window)._asdict())


def _attend_in_graph(**arguments: Any) -> Result:
    """A call that a graph runs, which has no schedule."""
    call = Call(**arguments)
    result = native.attention(*call[:-1], selection.asked_for(call.backend))
    return checked_calls.compute(call) if result is None else result


_in_graph = operators.operator(
    "attention",
    call_table.TYPES,
    _attend_in_graph,
    lambda x: operators.outputs(x, x.q, quantized_caches.values_dim(x), x.lse_heads_first),
    left_out=("schedule",),
    places=("out", "lse", "max_logits"),
)

attention = typed_as(signatures.attention)(
    call_table.function("attention", attend, INTERNAL, torch.Tensor | tuple[torch.Tensor, torch.Tensor])
)
attention.__module__ = __name__
attention.__doc__ = call_table.documented(
    """Attention of a batch of prompts, appends, decodes or any mixture: ``softmax(cap(sm_scale * q k^T)) v``.

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

    Or every row has keys of its own (sparse attention): ``kv_indices_per_token`` lists slots of k, which is
    ``[tokens, Hkv, D]`` or ``[pages, P, Hkv, D]``. Then no mask and no other argument says which keys there are. A
    second cache, ``extra_k``, has lists of its own.

    Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv 2405.04434) has one key head of 576 columns,
    512 latent ones and 64 for the position, and ``v = k[..., :512]``: kernels read them once, under causal masks,
    windows and chunks, and by lists. PyTorch serves all else, slowly. The 64 columns may lie in tensors of their own:
    ``attention(q, ckv, ckv, q_rope=q_pe, k_rope=kpe)``.

    Args:
        {arguments}

    Returns:
        The output, shaped as q with the head dimension of v; with ``return_lse`` the pair of it and the LSE, fp32,
        shaped as q without its last dimension.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or an explicit backend that cannot serve the
            call; on the CPU, lengths, offsets and page numbers that q and k do not have. (A GPU does not read them
            back: such requests compute nothing.) Or ``schedule`` was made by a call of other sizes or options.
        TypeError: ``schedule`` is not a ``Schedule``.
        RuntimeError: ``Hkv`` does not divide ``Hq``.

    Examples:
        >>> q = torch.randn(4, 1, 32, 128, dtype=torch.float16)  # a decode step of 4 requests
        >>> k, v = torch.randn(2, 64, 16, 8, 128, dtype=torch.float16)  # 64 pages of 16 tokens
        >>> table = torch.arange(64, dtype=torch.int32).view(4, 16)
        >>> lens = torch.tensor([7, 250, 31, 16], dtype=torch.int32)
        >>> attention(q, k, v, page_table=table, seqused_k=lens, causal=True).shape
        torch.Size([4, 1, 32, 128])
    """
)
