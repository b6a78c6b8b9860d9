"""Tensors with watched surroundings: reads outside show up as NaN in results, writes outside as changed bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MARGIN = 512  # elements on either side


def poison_(x: torch.Tensor) -> torch.Tensor:
    """Fill with NaN (with the largest NaN-like bits for fp8, whose fill_ may not know NaN)."""
    if x.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(float("nan"))
    return x


class Guarded:
    """A tensor of the given shape (and strides) inside a NaN-filled allocation.

    ``tensor`` is the view to hand out. :meth:`check` raises when any byte of the allocation that does not belong to the
    view has changed: the bands on both sides, and the gaps that the strides leave.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: str | torch.device,
        strides: Sequence[int] | None = None,
        value: torch.Tensor | None = None,
    ) -> None:
        if strides is None:
            strides = list(torch.empty(tuple(shape), device="meta").stride())
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in tuple(shape) else 0
        self._whole = poison_(torch.empty(span + 2 * MARGIN, dtype=dtype, device=device))
        self.tensor = torch.as_strided(self._whole, tuple(shape), tuple(strides), MARGIN)
        self._inside = torch.zeros(span + 2 * MARGIN, dtype=torch.bool, device=device)
        torch.as_strided(self._inside, tuple(shape), tuple(strides), MARGIN).fill_(True)
        self._before = self._bytes().clone()
        if value is not None:
            self.tensor.copy_(value)

    def _bytes(self) -> torch.Tensor:
        return self._whole.view(torch.uint8).reshape(self._whole.numel(), -1)

    def check(self, name: str = "tensor") -> None:
        changed = (self._bytes() != self._before).any(dim=1) & ~self._inside
        if bool(changed.any()):
            places = (changed.nonzero()[:4, 0] - MARGIN).tolist()
            raise AssertionError(
                f"{name}: {int(changed.sum())} elements outside the tensor were written, at offsets {places}"
            )

    def check_untouched(self, name: str = "tensor") -> None:
        """Nothing was written at all, inside included (valid for a tensor that was handed out full of NaN)."""
        changed = (self._bytes() != self._before).any(dim=1)
        if bool(changed.any()):
            raise AssertionError(f"{name}: {int(changed.sum())} elements were written although the call failed")
