"""What ranks run in the tests of repeats."""

from __future__ import annotations

from typing import Any

import cp_calls
import torch
from compare import assert_bitwise


def differing(group: Any, device: torch.device, times: int, name: str, *args: Any) -> list[str]:
    """What differs from the first of so many calls of a function of ``cp_calls``. Every other one runs beside
    multiplications on another stream, so that its blocks start in another order."""
    function, faults = getattr(cp_calls, name), []
    first: list[torch.Tensor] = []
    for i in range(times):
        if device.type == "cuda" and i % 2:
            _keep_busy(device)
        results = [x for x in function(group, device, *args) if isinstance(x, torch.Tensor)]
        first = first or results
        for a, b in zip(results, first, strict=True):
            try:
                assert_bitwise(a, b)
            except AssertionError as error:
                faults.append(f"call {i}: {error}")
    return faults


_busy: dict[torch.device, tuple[torch.cuda.Stream, torch.Tensor]] = {}


def _keep_busy(device: torch.device) -> None:
    """10 ms of an H100, in kernels that leave SMs free now and then."""
    if device not in _busy:
        _busy[device] = torch.cuda.Stream(device), torch.randn(2048, 2048, device=device, dtype=torch.float16) / 64
    stream, x = _busy[device]
    with torch.cuda.stream(stream):
        for _ in range(300):
            torch.mm(x, x)
