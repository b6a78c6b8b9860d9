"""``attention()`` as an operator: see ``_ops``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _args, _ops
from ._options import Result
from ._plan_free import HEADS_FIRST, RETURNED, Call
from ._problem import FP8_DTYPES

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, Tensor? page_table, Tensor? kv_indptr, Tensor? kv_indices, "
    "Tensor? kv_last_page_len, str kv_layout, bool causal, SymInt window_left, SymInt window_right, SymInt chunk_size, "
    "Tensor? packed_custom_mask, Tensor? mask_indptr, float? logits_soft_cap, float? sm_scale, Tensor? sinks, "
    "Tensor? alibi_slopes, float[] factors, Tensor?[] scales, ScalarType? o_dtype, SymInt lse_form, SymInt num_splits, "
    "bool batch_invariant, SymInt[]? kv_shard, Tensor? q_rope, Tensor? k_rope, str backend"
)
_DESCALES = slice(Call._fields.index("q_descale"), Call._fields.index("v_descale") + 1)
_OUT = Call._fields.index("out")


def traced(call: Call) -> Result:
    """The call in a graph."""
    o_dtype = None if call.o_dtype is None else _args.dtype(call.o_dtype)
    every: tuple[Any, ...] = tuple(call._replace(sinks=_ops.one(call.sinks), o_dtype=o_dtype))
    o_dtype, _, *others = every[_DESCALES.stop :]
    args = (*every[: _DESCALES.start], *_ops.split_scales(every[_DESCALES]), o_dtype, *others)
    return _ops.call("attention", args, call.out, None, bool(call.lse_form & RETURNED))


def _call(args: tuple[Any, ...], out: torch.Tensor | None) -> Call:
    before, rest = args[: _DESCALES.start], args[_DESCALES.start :]
    factors, scales, o_dtype, *others = rest
    every = (*before, *_ops.join_scales(factors, scales), o_dtype, out, *others)
    return Call._make(every)


def define(attend: Callable[[Call], Any]) -> None:
    """Registers the operator, whose calls ``attend`` computes."""

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        arguments, (out, lse) = _split(args)
        call = _call(arguments, out)
        return _ops.new_results(attend(call), call.q, bool(call.lse_form & RETURNED), out, lse)

    _ops.define("attention", _ARGUMENTS, run, _fake)


def _split(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, Any]]:
    """The arguments, and ``out`` and ``lse``, which not every form of the operator has."""
    count = _ARGUMENTS.count(",") + 1
    return args[:count], (args[count], args[count + 1]) if len(args) > count else (None, None)


def _fake(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments, (out, lse) = _split(args)
    call = _call(arguments, out)
    q = call.q
    dtype = call.o_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
    shape = q.shape[:-1]
    if call.lse_form & HEADS_FIRST:
        rows = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
        shape = torch.Size((q.shape[-2], rows))
    wanted = bool(call.lse_form & RETURNED) and lse is None
    return (
        q.new_empty((*q.shape[:-1], call.v.shape[-1]) if out is None else (0,), dtype=dtype),
        q.new_empty(shape if wanted else (0,), dtype=torch.float32),
    )
