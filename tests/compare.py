"""How results are compared: first what must be exact, then errors, against a baseline of the same precision.

A fixed tolerance is either too loose for short rows or too tight for long ones. So beside the contract's
tolerances the error must stay within twice the error of a plain PyTorch computation in the same 16-bit type.
"""

from __future__ import annotations

import torch

# Contract section 10, for inputs drawn from N(0, 1).
OUT_TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-6, 1e-6),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1e-2, 1e-2),
    torch.float8_e4m3fn: (5e-2, 0.13),
    torch.float8_e5m2: (1e-1, 0.26),
}
LSE_TOLERANCE = (1e-3, 1e-5)


def _worst(error: torch.Tensor) -> tuple[int, ...]:
    flat = int(error.reshape(-1).argmax())
    place = []
    for size in reversed(error.shape):
        place.append(flat % size)
        flat //= size
    return tuple(reversed(place))


def _positions(mask: torch.Tensor, limit: int = 4) -> str:
    places = mask.nonzero()[:limit].tolist()
    return ", ".join(str(tuple(p)) for p in places) + (" ..." if int(mask.sum()) > limit else "")


def assert_same_nonfinite(actual: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """NaN, +inf and -inf stand at exactly the same places."""
    for label, test in (
        ("NaN", torch.isnan),
        ("+inf", lambda x: x == torch.inf),
        ("-inf", lambda x: x == -torch.inf),
    ):
        ours, theirs = test(actual), test(expected)
        if not torch.equal(ours, theirs):
            extra, lacking = ours & ~theirs, theirs & ~ours
            raise AssertionError(
                f"{name}: {label} positions differ: {int(extra.sum())} unexpected at [{_positions(extra)}], "
                f"{int(lacking.sum())} missing at [{_positions(lacking)}] of shape {tuple(actual.shape)}"
            )


def assert_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    baseline: torch.Tensor | None = None,
    *,
    name: str = "out",
    atol: float | None = None,
    rtol: float | None = None,
    factor: float = 2.0,
    dtype: torch.dtype | None = None,
    allowed: torch.Tensor | None = None,
) -> None:
    """``actual`` equals ``expected`` (a double-precision oracle) as well as its type allows, ``allowed`` more.

    Non-finite places must agree exactly; a row of the last dimension that is exactly 0 in the oracle must be exactly
    0; the largest error must be within tolerance; and where a ``baseline`` is given, the largest and the
    root-mean-square error must not exceed ``factor`` times that of the baseline, plus half a unit in the last place.
    """
    if dtype is not None and actual.dtype != dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {dtype}")
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return
    default = OUT_TOLERANCE.get(actual.dtype, (0.0, 0.0))
    atol = default[0] if atol is None else atol
    rtol = default[1] if rtol is None else rtol
    unit = torch.finfo(actual.dtype).eps if actual.dtype.is_floating_point else 0.0
    a, e = actual.detach().double(), expected.detach().double().to(actual.device)
    assert_same_nonfinite(a, e, name)
    if actual.dim() >= 2:
        zero = (e == 0).all(dim=-1)
        if bool((a[zero] != 0).any()):
            wrong = zero & (a != 0).any(dim=-1)
            raise AssertionError(f"{name}: rows without a visible key are not exactly 0 at [{_positions(wrong)}]")
    finite = torch.isfinite(e)
    a, e = torch.where(finite, a, 0.0), torch.where(finite, e, 0.0)
    error = (a - e).abs()
    excess = error - (atol + rtol * e.abs())
    if allowed is not None:
        excess = excess - allowed.to(excess.device)
    if float(excess.max()) > 0:
        at = _worst(excess)
        raise AssertionError(
            f"{name}: {int((excess > 0).sum())} of {error.numel()} elements beyond atol={atol:g} rtol={rtol:g}; "
            f"worst at {at}: got {float(a[at]):.6g}, expected {float(e[at]):.6g}, error {float(error[at]):.3g}"
        )
    if baseline is not None:
        theirs = (torch.where(finite, baseline.detach().double().to(actual.device), 0.0) - e).abs()
        slack = 0.5 * unit * float(e.abs().max())
        rms_slack = 0.5 * unit * float(e.pow(2).mean().sqrt())
        checks = (
            ("max error", float(error.max()), float(theirs.max()), slack),
            ("rms error", float(error.pow(2).mean().sqrt()), float(theirs.pow(2).mean().sqrt()), rms_slack),
        )
        for label, ours, other, epsilon in checks:
            if ours > factor * other + epsilon:
                raise AssertionError(
                    f"{name}: {label} {ours:.3g} exceeds {factor:g} x {other:.3g} (same-precision PyTorch) + "
                    f"{epsilon:.3g}; worst at {_worst(error)}"
                )


def assert_lse_close(
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    name: str = "lse",
    atol: float | None = None,
    rtol: float = LSE_TOLERANCE[1],
) -> None:
    """Base-2 log-sum-exp in fp32; -inf exactly where the oracle says so."""
    tolerance = LSE_TOLERANCE[0] if atol is None else atol
    if actual.dtype != torch.float32:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected torch.float32")
    if tuple(actual.shape) != tuple(expected.shape):
        raise AssertionError(f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    # 0 is an ordinary value here, so no row is required to be exactly 0.
    flat, want = actual.reshape(-1), expected.reshape(-1)
    assert_close(flat, want, name=name, atol=tolerance, rtol=rtol)


def assert_bitwise(actual: torch.Tensor, expected: torch.Tensor, name: str = "out") -> None:
    """The same bits, NaN payloads included."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, f"{name}: different shape or dtype"
    same = torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert same, (
        f"{name}: differs bitwise; largest difference {float((actual.double() - expected.double()).abs().max()):.3g}"
    )
