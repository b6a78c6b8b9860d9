"""Whether a result is right: first where NaN and infinities stand, then its error, beside that of plain PyTorch.

A fixed tolerance is too loose for short rows or too tight for long ones. So the largest and the root-mean-square
error may be twice those of the same attention computed by plain PyTorch, which rounds scores, weights and output to
the element type, plus half a unit in the last place. ``python -m cutlass_kernels check``, tests and benchmarks all
compare this way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

FACTOR = 2.0
# atol + rtol |x| by the type of the output, for inputs drawn from N(0, 1) and an exact result.
TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-6, 1e-6),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float8_e4m3fn: (5e-2, 0.13),
    torch.float8_e5m2: (1e-1, 0.26),
}
LSE_TOLERANCE = (1e-3, 1e-5)
ELEMENTS = 1 << 25  # scores, or elements of keys, that plain_attention() computes at once


@dataclass(frozen=True)
class Errors:
    """Of a result: the largest, and the root of the mean square. Where the exact result is not finite, none counts."""

    largest: float
    rms: float

    @classmethod
    def of(cls, result: torch.Tensor, exact: torch.Tensor) -> Errors:
        if exact.numel() == 0:
            return cls(0.0, 0.0)
        error = torch.where(exact.isfinite(), result.to(exact.dtype) - exact, 0.0).abs()
        return cls(float(error.max()), float(error.square().mean().sqrt()))


def fault(
    actual: torch.Tensor,
    exact: torch.Tensor,
    *,
    plain: Errors | None = None,
    tolerance: tuple[float, float] | None = None,
    allowed: torch.Tensor | None = None,
    factor: float = FACTOR,
) -> str | None:
    """What is wrong with ``actual``, or None. ``exact`` is float32 or float64, and so are the errors.

    Places of NaN and infinities must agree. Rows of the last dimension that are exactly 0 must be so, unless there
    is but one dimension. Errors must stay within ``tolerance`` (atol, rtol), ``allowed`` more, and within
    ``factor`` times those of ``plain`` plus half a unit in the last place.
    """
    if actual.shape != exact.shape:
        return f"shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    if actual.numel() == 0:
        return None
    a, e = actual.to(exact.dtype), exact
    found = _other_nonfinite(a, e) or _other_zero_rows(a, e)
    if found is not None:
        return found
    finite = e.isfinite()
    a, e = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
    error = (a - e).abs()
    if tolerance is not None:
        atol, rtol = tolerance
        excess = error - (atol + rtol * e.abs())
        if allowed is not None:
            excess = excess - allowed.to(excess.device)
        if float(excess.max()) > 0:
            at = _worst(excess)
            return (
                f"{int((excess > 0).sum())} of {error.numel()} elements beyond atol={atol:g} rtol={rtol:g}; "
                f"worst at {at}: got {float(a[at]):.6g}, expected {float(e[at]):.6g}, error {float(error[at]):.3g}"
            )
    if plain is not None:
        half_unit = 0.5 * torch.finfo(actual.dtype).eps
        ours = Errors.of(a, e)
        for name, mine, other, size in (
            ("largest", ours.largest, plain.largest, float(e.abs().max())),
            ("rms", ours.rms, plain.rms, float(e.square().mean().sqrt())),
        ):
            if mine > factor * other + half_unit * size:
                return (
                    f"{name} error {mine:.3g} exceeds {factor:g} x {other:.3g} (plain PyTorch in the same precision) + "
                    f"{half_unit * size:.3g}; worst at {_worst(error)}"
                )
    return None


def _other_nonfinite(actual: torch.Tensor, exact: torch.Tensor) -> str | None:
    for name, value in (("NaN", math.nan), ("+inf", math.inf), ("-inf", -math.inf)):
        ours, theirs = (x.isnan() if math.isnan(value) else x == value for x in (actual, exact))
        if not torch.equal(ours, theirs):
            extra, lacking = ours & ~theirs, theirs & ~ours
            return (
                f"{name} positions differ: {int(extra.sum())} unexpected at [{_positions(extra)}], "
                f"{int(lacking.sum())} missing at [{_positions(lacking)}] of shape {tuple(actual.shape)}"
            )
    return None


def _other_zero_rows(actual: torch.Tensor, exact: torch.Tensor) -> str | None:
    if actual.dim() < 2:
        return None
    wrong = (exact == 0).all(-1) & (actual != 0).any(-1)
    return f"rows without a visible key are not exactly 0 at [{_positions(wrong)}]" if bool(wrong.any()) else None


def _positions(mask: torch.Tensor, limit: int = 4) -> str:
    places = mask.nonzero()
    return ", ".join(str(tuple(p)) for p in places[:limit].tolist()) + (" ..." if len(places) > limit else "")


def _worst(error: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(error.reshape(-1).argmax(), error.shape))


# The largest weight of a row lies in the middle between two e4m3 numbers, 256 and 288: off by 6 %, as it may be in a
# kernel whose maximum is that of earlier keys. (A power of 2 would be exact: errors of rows with one large weight would
# be 3 times as small.)
_SCALE_OF_FP8 = 272


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    arithmetic: torch.dtype,
    *,
    sm_scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: tuple[torch.Tensor, torch.Tensor] | None = None,
    weights_dtype: torch.dtype | None = None,
    elements: int = ELEMENTS,
) -> torch.Tensor:
    """Attention of one request by plain PyTorch: scores, weights and output in ``arithmetic``, the softmax in float32.

    Args:
        q: ``[rows, qo_heads, dim]``; ``k`` and ``v`` are ``[keys, kv_heads, dim]``.
        hidden: bool ``[rows, keys]``, True where a row does not see a key.
        bias: ``[qo_heads]`` and ``[rows, keys]``, whose products are added to the scores (ALiBi).
        weights_dtype: fp8 type that the weights are rounded to, for kernels that do so.
        elements: how many scores are computed at once, all those of a head at least.
    """
    q, k, v = (x.half() if x.dtype.itemsize == 1 else x for x in (q, k, v))  # not every PyTorch indexes fp8
    rows, num_qo_heads, dim = q.shape
    keys, num_kv_heads = k.shape[:2]
    out = torch.zeros(rows, num_qo_heads, v.size(2), dtype=arithmetic, device=q.device)
    if rows == 0 or keys == 0:
        return out
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scale = dim**-0.5 if sm_scale is None else sm_scale
    for heads in torch.arange(num_qo_heads, device=q.device).split(max(1, elements // (keys * max(rows, dim)))):
        readers = heads // (num_qo_heads // num_kv_heads)
        scores = torch.matmul(q[heads].to(arithmetic), k[readers].to(arithmetic).mT).float() * scale
        if bias is not None:
            scores = scores + bias[0][heads, None, None] * bias[1]
        if soft_cap > 0:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        sink = None if sinks is None else sinks[heads, None, None]
        if sink is not None:
            top = top.maximum(sink)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        if weights_dtype is not None:
            weights = (weights * _SCALE_OF_FP8).to(weights_dtype).float() / _SCALE_OF_FP8
        weights = (weights / total).masked_fill(total == 0, 0.0)
        out[:, heads] = torch.matmul(weights.to(arithmetic), v[readers].to(arithmetic)).transpose(0, 1)
    return out
