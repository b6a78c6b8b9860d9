"""Runs of ``BatchMLAPagedAttentionWrapper`` as an operator, so that new plans need no new graph: see ``operators``."""

from __future__ import annotations

from typing import Any

import torch

from .._core.problems import FP8_DTYPES
from .._core.run_options import Result
from . import operators

_ARGUMENTS = (
    "SymInt wrapper, Tensor q_nope, Tensor? q_pe, Tensor ckv_cache, Tensor? kpe_cache, float? ckv_scale, "
    "float? kpe_scale, Tensor? sinks, float? bmm1_number, Tensor? bmm1_tensor, float? bmm2_number, "
    "Tensor? bmm2_tensor, ScalarType? o_dtype, bool base_e, bool return_lse"
)
_COUNT = _ARGUMENTS.count(",") + 1


def run(
    number: int,
    tensors: tuple[Any, Any, Any, Any],
    kv_scales: tuple[float | None, float | None],
    sinks: Any,
    bmm_scales: tuple[Any, Any],
    o_dtype: torch.dtype | None,
    base_e: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """The run of the wrapper with this number in a graph."""
    scales = [x for pair in bmm_scales for x in ((None, pair) if isinstance(pair, torch.Tensor) else (pair, None))]
    if o_dtype is None and out is not None:
        o_dtype = out.dtype
    args = (number, *tensors, *kv_scales, operators.one(sinks), *scales, o_dtype, base_e, return_lse)
    return operators.call("run_mla", args, out, lse, return_lse)


def _run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    number, q_nope, q_pe, ckv_cache, kpe_cache, ckv_scale, kpe_scale, sinks, *scales = args[:_COUNT]
    out, lse = args[_COUNT:] or (None, None)  # not every form of the operator has them
    bmm1_number, bmm1_tensor, bmm2_number, bmm2_tensor, _, base_e, return_lse = scales
    result = operators.planned(number, q_nope).run(
        q_nope,
        q_pe,
        ckv_cache,
        kpe_cache,
        out,
        lse,
        return_lse,
        return_lse_base_on_e=base_e,
        ckv_scale=ckv_scale,
        kpe_scale=kpe_scale,
        sinks=sinks,
        bmm1_scale=bmm1_number if bmm1_tensor is None else bmm1_tensor,
        bmm2_scale=bmm2_number if bmm2_tensor is None else bmm2_tensor,
    )
    return operators.new_results(result, q_nope, return_lse, out, lse)


def _fake(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.q_nope
    o_dtype = x.o_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
    return operators.outputs(q, x.ckv_cache.shape[-1], o_dtype, x.return_lse, False, x.out, x.lse)


operators.define("run_mla", _ARGUMENTS, _run, _fake)
