"""Decode attention over one request whose keys and values lie in plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import is_grad_enabled

from .._compute import selection
from .._core import checks, native, run_options, signatures
from .._core.autograd import forward_only, needs_grad, written
from .._core.problems import Mask
from .._core.run_options import Result
from .._core.signatures import typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from .single_prefill import attend, keys_and_values, refuse_4bit


@typed_as(signatures.single_decode_with_kv_cache)
def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    scale_q: checks.Scale | None = None,
    scale_k: checks.Scale | None = None,
    scale_v: checks.Scale | None = None,
    o_dtype: str | torch.dtype | None = None,
    backend: str = "auto",
    kv_cache_sf: Any = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    """Decode attention of one request: the token of q stands at the last key and sees all keys, or its window of them.

    Args:
        q: ``[num_qo_heads, head_dim_qk]``; float16, bfloat16, or fp8 with k and v of the same type.
        k: ``[kv_len, num_kv_heads, head_dim_qk]``, or ``[num_kv_heads, kv_len, head_dim_qk]`` where ``kv_layout`` is
            "HND". The dtype of q, or fp8. ``num_kv_heads`` divides ``num_qo_heads``, in any ratio.
        v: as k, with ``head_dim_vo`` in the last dimension.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE", "ROPE_LLAMA" (q at position ``kv_len - 1``, key j at j) or "ALIBI" (adds
            ``slope_h * j`` to the logits).
        use_tensor_cores: accepted; which instructions are used is the backend's choice.
        q_scale, k_scale: per-tensor factors of q and k, which multiply ``sm_scale``.
        v_scale: per-tensor factor of v, which multiplies the output.
        window_left: keys seen besides the last one; negative for all.
        logits_soft_cap: c > 0 replaces a logit s by ``c tanh(s / c)``; None or <= 0 is off.
        sm_scale: default ``1 / sqrt(head_dim_qk)``.
        rope_scale, rope_theta: position divisor (default 1) and base (default 1e4) of "ROPE_LLAMA".
        return_lse: whether to return the LSE too.
        scale_q, scale_k, scale_v, o_dtype, backend, kv_cache_sf, sinks: as in
            ``single_prefill_with_kv_cache``.
        out, lse: tensors to write to instead of new ones.

    Returns:
        The output ``[num_qo_heads, head_dim_vo]``, or with ``return_lse`` the pair of it and the LSE, fp32
        ``[num_qo_heads]``: the base-2 logarithm of the softmax denominator. Without keys they are 0 and -inf.

    Raises:
        KeyError, ValueError, RuntimeError, NotImplementedError: as in
            ``single_prefill_with_kv_cache``.

    Examples:
        >>> q = torch.randn(32, 128, dtype=torch.float16)
        >>> k, v = torch.randn(2, 4096, 8, 128, dtype=torch.float16)
        >>> single_decode_with_kv_cache(q, k, v).shape
        torch.Size([32, 128])
    """
    traced, grad = is_traced(), False
    if not traced and is_grad_enabled():
        grad = needs_grad(q, k, v, out, lse, sinks, scale_q, scale_k, scale_v, q_scale, k_scale, v_scale)
    if (
        not (traced or grad)
        and scale_q is None
        and scale_k is None
        and scale_v is None
        and o_dtype is None
        and kv_cache_sf is None
        and pos_encoding_mode == "NONE"
        and not selection.is_logged()
    ):
        result: Result | None = native.single_decode(
            q,
            k,
            v,
            out,
            lse,
            sinks,
            return_lse,
            False,
            kv_layout,
            window_left,
            logits_soft_cap,
            sm_scale,
            q_scale,
            k_scale,
            v_scale,
            selection.asked_for(backend),
        )
        if result is not None:
            if out is not None or lse is not None:
                written(out, lse)
            return result
    refuse_4bit(kv_cache_sf)
    return_lse = checks.flag("return_lse", return_lse)
    rows = checks.tensor("q", q, 2).unsqueeze(0)
    if out is not None:
        out = checks.tensor("out", out, 2).unsqueeze(0)
    if lse is not None:
        lse = checks.tensor("lse", lse, 1).unsqueeze(0)
    if traced or have_own_dispatch(q, k, v):
        values = run_options.options(
            False, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, False
        )
        factor = k_scale if q_scale is None else q_scale if k_scale is None else q_scale * k_scale
        scales, masks = (scale_q, scale_k, scale_v, factor, v_scale), (None, None)
        result = operators.single(
            rows, k, v, values, o_dtype, sinks, scales, masks, kv_layout, backend, out, lse, return_lse
        )
        return (result[0].squeeze(0), result[1].squeeze(0)) if return_lse else result.squeeze(0)
    k, v = keys_and_values(rows, k, v, kv_layout)
    problem = attend(
        rows,
        k,
        v,
        Mask(window_left=checks.window(window_left)),
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        scales=(scale_q, scale_k, scale_v),
        k_scale=k_scale,
        v_scale=v_scale,
        o_dtype=o_dtype,
        sinks=sinks,
        backend=backend,
        return_lse=return_lse,
        out=out,
        lse=lse,
        q_scale=q_scale,
    )
    new_out, new_lse = problem.output.out, problem.output.lse
    result = new_out.squeeze(0)
    if return_lse and new_lse is not None:
        result = result, new_lse.squeeze(0)
    if grad:
        return forward_only(result, (out, lse), q, k, v, sinks, scale_q, scale_k, scale_v, q_scale, k_scale, v_scale)
    return result
