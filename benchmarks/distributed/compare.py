"""Whether the rows that a rank has computed are those of one GPU."""

from __future__ import annotations

import torch

# bf16 against bf16: rounding of weights, output and merged states gives 0.4 % of RMS. A mask that is off by one key
# gives 1.6 % with a window of 4k keys, and all of the first rows without one.
RMS = 0.01  # of all elements
ROW_RMS = 0.04  # of any head of any row
ROWS = 4096  # compared at once: fp32 copies of them stay small


def check(actual: torch.Tensor, want: torch.Tensor) -> None:
    """Raises ArithmeticError if ``actual``, ``[rows, heads, dim]``, is wrong."""
    if actual.shape != want.shape:
        raise ArithmeticError(f"wrong result: shape {tuple(actual.shape)}, expected {tuple(want.shape)}")
    if want.numel() == 0:
        return
    zero = torch.zeros((), device=want.device)
    errors, squares, worst = zero.double(), zero.double(), zero
    for got, exact in zip(actual.split(ROWS), want.split(ROWS)):
        got, exact = got.float(), exact.float()
        error, square = (got - exact).square().mean(-1), exact.square().mean(-1)
        errors, squares = errors + error.sum().double(), squares + square.sum().double()
        worst = worst.maximum((error / square.clamp(min=1e-30)).max())  # NaN stays NaN
    rms, row = float((errors / squares).sqrt()), float(worst.sqrt())
    if not (rms <= RMS and row <= ROW_RMS):
        raise ArithmeticError(f"wrong result: RMS error {100 * rms:.2g} %, worst row {100 * row:.2g} %")
