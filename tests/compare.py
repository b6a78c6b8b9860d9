"""How results are compared: assertions over the comparator that the command line and the benchmarks use, too.

A fixed tolerance is either too loose for short rows or too tight for long ones. So beside the contract's
tolerances the error must stay within twice the error of a plain PyTorch computation in the same 16-bit type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from cutlass_kernels._cli.comparison import LSE_TOLERANCE, TOLERANCE, Errors, fault


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
    default = TOLERANCE.get(actual.dtype, (0.0, 0.0))
    tolerance = (default[0] if atol is None else atol, default[1] if rtol is None else rtol)
    exact = expected.detach().double().to(actual.device)
    plain = None if baseline is None else Errors.of(baseline.detach().to(actual.device), exact)
    found = fault(actual.detach(), exact, plain=plain, tolerance=tolerance, allowed=allowed, factor=factor)
    if found is not None:
        raise AssertionError(f"{name}: {found}")


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


def assert_all_bitwise(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """As many tensors, of the same bits."""
    for number, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(x, y, f"result {number}")


def assert_repeats(call: Callable[[], Sequence[torch.Tensor]], times: int) -> Sequence[torch.Tensor]:
    """Calls that follow the first give its bits. Returns the first results."""
    first = call()
    for _ in range(times):
        assert_all_bitwise(call(), first)
    return first
