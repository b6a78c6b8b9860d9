"""Attention over one request whose keys and values lie in plain tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import is_grad_enabled

from .._compute import request_facts, selection
from .._core import checks, extra_arguments, native, run_options, signatures
from .._core.autograd import forward_only, needs_grad, written
from .._core.problems import Logits, Mask, Output, Problem, RaggedKv
from .._core.run_options import Result
from .._core.signatures import declares, typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from .._masks import mask_packing


def _single_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: Any = ...,
    kv_layout: Any = ...,
    pos_encoding_mode: Any = ...,
    allow_fp16_qk_reduction: Any = ...,
    sm_scale: float | None = None,
    window_left: Any = ...,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: Any = ...,
    scale_q: checks.Scale | None = None,
    scale_k: checks.Scale | None = None,
    scale_v: checks.Scale | None = None,
    o_dtype: str | torch.dtype | None = None,
    use_fp16_qk_reduction: Any = ...,
    backend: Any = ...,
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    """The implementation of single_prefill_with_kv_cache. ``args`` are in one of two orders (``extra_arguments``).

    Defaults of None and ``...`` tell which keywords the caller left out. One function, as a second one in front of it
    costs each call 0.66 us; taking ``args`` here costs 0.2 us.
    """
    if args:
        keywords = {
            "custom_mask": custom_mask,
            "packed_custom_mask": packed_custom_mask,
            "causal": causal,
            "kv_layout": kv_layout,
            "pos_encoding_mode": pos_encoding_mode,
            "allow_fp16_qk_reduction": allow_fp16_qk_reduction,
            "sm_scale": sm_scale,
            "window_left": window_left,
            "logits_soft_cap": logits_soft_cap,
            "rope_scale": rope_scale,
            "rope_theta": rope_theta,
            "return_lse": return_lse,
            "scale_q": scale_q,
            "scale_k": scale_k,
            "scale_v": scale_v,
            "o_dtype": o_dtype,
            "use_fp16_qk_reduction": use_fp16_qk_reduction,
            "backend": backend,
            "kv_cache_sf": kv_cache_sf,
            "k_scale": k_scale,
            "v_scale": v_scale,
        }
        given = extra_arguments.single_prefill_positions(args, keywords)
        return _single_prefill(q, k, v, sinks=sinks, out=out, lse=lse, **given)
    if causal is ...:
        causal = False
    if kv_layout is ...:
        kv_layout = "NHD"
    if pos_encoding_mode is ...:
        pos_encoding_mode = "NONE"
    if window_left is ...:
        window_left = -1
    if return_lse is ...:
        return_lse = False
    if backend is ...:
        backend = "auto"
    traced, grad = is_traced(), False
    if not traced and is_grad_enabled():
        grad = needs_grad(q, k, v, out, lse, sinks, scale_q, scale_k, scale_v, k_scale, v_scale)
    if (
        not (traced or grad)
        and custom_mask is None
        and packed_custom_mask is None
        and scale_q is None
        and scale_k is None
        and scale_v is None
        and o_dtype is None
        and kv_cache_sf is None
        and pos_encoding_mode == "NONE"
        and not selection.is_logged()
    ):
        result = native.single_prefill(
            q,
            k,
            v,
            out,
            lse,
            sinks,
            return_lse,
            causal,
            kv_layout,
            window_left,
            logits_soft_cap,
            sm_scale,
            None,
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
    if traced or have_own_dispatch(q, k, v):
        values = run_options.options(
            causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, False
        )
        scales = (scale_q, scale_k, scale_v, k_scale, v_scale)
        masks = (custom_mask, packed_custom_mask)
        return operators.single(
            q, k, v, values, o_dtype, sinks, scales, masks, kv_layout, backend, out, lse, return_lse
        )
    checks.tensor("q", q, 3)
    k, v = keys_and_values(q, k, v, kv_layout)
    mask = Mask(causal=checks.flag("causal", causal), window_left=checks.window(window_left))
    if packed_custom_mask is not None or custom_mask is not None:
        _set_bits(mask, custom_mask, packed_custom_mask, q, k.size(0))
    problem = attend(
        q,
        k,
        v,
        mask,
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
    )
    new_out, new_lse = problem.output.out, problem.output.lse
    result = (new_out, new_lse) if return_lse else new_out
    if grad:
        return forward_only(result, (out, lse), q, k, v, sinks, scale_q, scale_k, scale_v, k_scale, v_scale)
    return result


def _single_prefill_return_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, return_lse: bool = True, **more: Any
) -> Any:
    return _single_prefill(q, k, v, *args, return_lse=return_lse, **more)


@typed_as(signatures.single_prefill_with_kv_cache)
@declares(_single_prefill)
def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    allow_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    *,
    return_lse: bool = False,
    scale_q: checks.Scale | None = None,
    scale_k: checks.Scale | None = None,
    scale_v: checks.Scale | None = None,
    o_dtype: str | torch.dtype | None = None,
    use_fp16_qk_reduction: bool = False,
    backend: str = "auto",
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> Result:
    r"""Prefill (append) attention of one request: ``softmax(cap(sm_scale * q k^T)) v`` over the visible keys.

    Row i stands at key position ``p = i + kv_len - qo_len``: the last row at the last key. It sees key j if all of
    these hold: the mask bit (i, j) is set, where a custom mask is given; else ``j <= p``, where ``causal``; and
    ``j >= p - window_left``, where ``window_left >= 0``. A row that sees no key has output 0 and LSE -inf. Key and
    value positions that no row sees may hold anything, NaN included.

    FlashInfer's newer positional order is accepted, too: ``scale_q, scale_k, scale_v, o_dtype`` stand behind v, in
    front of ``custom_mask``, and ``backend, return_lse, kv_cache_sf, k_scale, v_scale`` behind ``rope_theta``. A
    floating tensor in the place of a scale, or an ``o_dtype`` or mask behind them, tells the two orders apart.

    Args:
        q: ``[qo_len, num_qo_heads, head_dim_qk]``; float16, bfloat16, or fp8 with k and v of the same type. Strides are
            free, but the last dimension is contiguous (so slices of a packed projection are fine, for k and v too).
        k: ``[kv_len, num_kv_heads, head_dim_qk]``, or ``[num_kv_heads, kv_len, head_dim_qk]`` where ``kv_layout`` is
            "HND". The dtype of q, or fp8. ``num_kv_heads`` divides ``num_qo_heads``; query head h reads key head
            ``h // (num_qo_heads // num_kv_heads)``.
        v: as k, with ``head_dim_vo`` in the last dimension.
        custom_mask: bool ``[qo_len, kv_len]`` or that flattened, True where row i sees key j.
        packed_custom_mask: the same as bits, ``packbits(mask.flatten(), bitorder="little")``; it wins over
            ``custom_mask``.
        causal: whether rows see no key behind their own position; ignored where a mask is given.
        kv_layout: "NHD" or "HND".
        pos_encoding_mode: "NONE"; "ROPE_LLAMA" (rotary embedding of q at p and k at j, halves paired: Su et al.,
            "RoFormer", 2021); or "ALIBI" (adds ``slope_h * (j - i)``: Press et al., "Train Short, Test Long", 2022).
        allow_fp16_qk_reduction, use_fp16_qk_reduction: permission to accumulate ``q k^T`` in half precision. Accepted;
            the accumulation is always fp32.
        sm_scale: default ``1 / sqrt(head_dim_qk)``.
        window_left: keys seen to the left of a row's position, itself not counted; negative for all.
        logits_soft_cap: c > 0 replaces a logit s by ``c tanh(s / c)``; None or <= 0 is off.
        rope_scale, rope_theta: position divisor (default 1) and base (default 1e4) of "ROPE_LLAMA".
        return_lse: whether to return the LSE too.
        scale_q, scale_k, scale_v: dequantization factors of fp8 inputs: numbers, or fp32 tensors with one element per
            head (``[num_qo_heads]``, ``[num_kv_heads]``, ``[num_kv_heads]``).
        o_dtype: dtype of the output; default that of q. Required for fp8 q.
        backend: "auto", "fa3", "fa2" or "reference". "auto" takes the fastest that serves all arguments. Calls may come
            from any threads and streams, and be captured into CUDA graphs.
        kv_cache_sf: scale factors of 4-bit caches; not supported.
        k_scale, v_scale: per-tensor factors of k (into the logits) and v (into the output).
        sinks: fp32 ``[num_qo_heads]``; adds ``exp(sink)`` to the softmax denominator (and to the LSE).
        out, lse: tensors to write to instead of new ones.

    Returns:
        The output ``[qo_len, num_qo_heads, head_dim_vo]``, or with ``return_lse`` the pair of it and the LSE, fp32
        ``[qo_len, num_qo_heads]``: the base-2 logarithm of the softmax denominator (times ln 2 for the natural one).

    Raises:
        TypeError: an argument is given twice, or too many are given by position.
        KeyError: unknown ``kv_layout`` or ``pos_encoding_mode``.
        ValueError: shapes, dtypes or devices that do not fit together, a mask shorter than ``qo_len * kv_len``, an
            unknown backend, or an explicit backend that cannot serve the call.
        RuntimeError: ``num_kv_heads`` does not divide ``num_qo_heads``.
        NotImplementedError: ``kv_cache_sf`` is set.

    Examples:
        >>> q = torch.randn(128, 32, 128, dtype=torch.float16)
        >>> k, v = torch.randn(2, 4096, 4, 128, dtype=torch.float16)
        >>> single_prefill_with_kv_cache(q, k, v, causal=True).shape
        torch.Size([128, 32, 128])
    """
    raise NotImplementedError


@typed_as(signatures.single_prefill_with_kv_cache_return_lse)
@declares(_single_prefill_return_lse)
def single_prefill_with_kv_cache_return_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    allow_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    *,
    return_lse: bool = True,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``single_prefill_with_kv_cache`` with ``return_lse=True``: returns ``(out, lse)``, the LSE in base 2.

    ``more`` are the keyword-only arguments of that function. It accepts both positional orders, too.

    Examples:
        >>> q, k, v = torch.randn(3, 16, 8, 64, dtype=torch.float16)
        >>> out, lse = single_prefill_with_kv_cache_return_lse(q, k, v)
        >>> lse.shape
        torch.Size([16, 8])
    """
    raise NotImplementedError


# --- shared with decode ------------------------------------------------------------------------------------------


def refuse_4bit(kv_cache_sf: Any) -> None:
    """NotImplementedError where scale factors of a 4-bit cache are given."""
    if kv_cache_sf is not None:
        raise NotImplementedError("kv_cache_sf is set, but 4-bit caches are not supported: use fp8 keys and values.")


def keys_and_values(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """``k`` and ``v`` as ``[tokens, heads, dim]`` views that fit q ``[rows, heads, dim]``."""
    k = checks.token_major(checks.tensor("k", k, 3), kv_layout)
    v = checks.token_major(checks.tensor("v", v, 3), kv_layout)
    kv_len, num_kv_heads, head_dim = k.shape
    if v.size(0) != kv_len or v.size(1) != num_kv_heads:
        raise ValueError(
            f"k has {kv_len} tokens and {num_kv_heads} heads, but v has {v.size(0)} and {v.size(1)} "
            f"(kv_layout={kv_layout!r}): they must be equal."
        )
    if head_dim != q.size(2):
        raise ValueError(f"q has head_dim {q.size(2)} and k {head_dim}: they must be equal.")
    checks.heads_of(q, k, kv_layout)
    if k.device != q.device or v.device != q.device:
        checks.same_device(q.device, k=k, v=v)
    return k, v


def _set_bits(
    mask: Mask, custom: torch.Tensor | None, packed: torch.Tensor | None, q: torch.Tensor, kv_len: int
) -> None:
    qo_lens, kv_lens = [q.size(0)], [kv_len]
    if packed is not None:
        mask.bits_indptr = mask_packing.check_packed_mask(packed, qo_lens, kv_lens)
        mask.bits = packed
    else:
        assert custom is not None
        mask.bits, mask.bits_indptr = mask_packing.pack_mask(custom, qo_lens, kv_lens)
    assert mask.bits is not None
    checks.same_device(q.device, custom_mask=mask.bits)
    mask.bits = mask_packing.whole_words(mask.bits)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: Mask,
    *,
    pos_encoding_mode: str,
    sm_scale: float | None,
    logits_soft_cap: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    scales: tuple[Any, Any, Any],
    k_scale: float | None,
    v_scale: float | None,
    o_dtype: str | torch.dtype | None,
    sinks: torch.Tensor | None,
    backend: str,
    return_lse: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    q_scale: float | None = None,
) -> Problem:
    """Computes one request from token-major views; every check comes before the computation.

    Returns the problem, which holds the results.
    """
    device, (rows, num_qo_heads, head_dim) = q.device, q.shape
    num_kv_heads, head_dim_vo = k.size(1), v.size(2)
    if o_dtype is None and isinstance(out, torch.Tensor):
        o_dtype = out.dtype
    o_dtype = checks.element_types(q.dtype, k.dtype, v.dtype, o_dtype)
    rope = checks.rope(pos_encoding_mode, rope_scale, rope_theta)
    logits = Logits(checks.sm_scale(sm_scale, head_dim), checks.soft_cap(logits_soft_cap), rope=rope)
    checks.rope_dim(pos_encoding_mode, head_dim)
    if pos_encoding_mode == "ALIBI":
        logits.alibi = checks.alibi_slopes(num_qo_heads, device)
    if sinks is not None:
        logits.sinks = checks.sinks(sinks, num_qo_heads, device)
    out_scale = checks.scale(v_scale, "v_scale")
    if q_scale is not None or k_scale is not None:
        logits.sm_scale = checks.product(
            logits.sm_scale, checks.scale(q_scale, "q_scale"), checks.scale(k_scale, "k_scale")
        )
    if scales != (None, None, None):
        factor, logits.head_scale, values = checks.descale(*scales, num_qo_heads, num_kv_heads, device)
        logits.sm_scale = checks.product(logits.sm_scale, factor)
        out_scale = checks.product(out_scale, values)
    out = checks.output(out, (rows, num_qo_heads, head_dim_vo), o_dtype, device)
    if return_lse or lse is not None:
        lse = checks.lse_output(lse, (rows, num_qo_heads), device)
    problem = Problem(q, RaggedKv(k, v), logits, Output(out, lse, None, out_scale), mask)
    selection.compute(problem, selection.select(backend, request_facts.Request.from_problem(problem)))
    return problem


operators.define_single(_single_prefill)
