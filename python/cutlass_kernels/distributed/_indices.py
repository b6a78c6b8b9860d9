"""Index tensors of a plan, made once for each device. A captured call finds those that a call before it has made."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from .._core import kept_memory
from ._peers import is_capturing

Numbers = Sequence[int] | torch.Tensor


class Indices:
    def __init__(self) -> None:
        self._kept: dict[tuple[Hashable, torch.device], list[torch.Tensor]] = {}

    def get(
        self,
        name: Hashable,
        device: torch.device,
        make: Callable[[], Sequence[Numbers]],
        dtype: torch.dtype = torch.int32,
    ) -> list[torch.Tensor]:
        """The vectors of this name on a device; ``make()`` gives their numbers."""
        key = (name, device)
        if key not in self._kept:
            self._kept[key] = [kept_on(device, torch.as_tensor(numbers, dtype=dtype)) for numbers in make()]
        return self._kept[key]


def kept_on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A copy outside of the memory pools of compiled graphs."""
    if device.type == "cuda" and is_capturing():
        raise RuntimeError("The first call with its lengths makes index vectors: make it before capturing a graph.")
    made = kept_memory.empty(x.shape, x.dtype, device).copy_(x)
    if made.is_cuda:  # allocated on the default stream
        made.record_stream(torch.cuda.current_stream(device))
    return made
