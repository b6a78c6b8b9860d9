"""How long a prefill and a decode step take, and how much of it is attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from engines.common.shares import MARKS, profiled

from .attention import Attention
from .batch import Batch

REPEATS = 5


def measure(
    model: Any, attention: Attention, prompts: list[list[int]], steps: int, page_size: int, graph: bool
) -> dict[str, Any]:
    """Medians in seconds, and shares. All ranks run this together; times are those of the rank that prints."""
    batch = Batch(model, attention, prompts, steps, page_size)
    tokens = torch.zeros_like(batch.tokens)

    def decode() -> int:
        batch.rewind()
        for _ in range(steps):
            batch.step(tokens)
        return steps

    def prefill() -> int:
        batch.prefill()
        return 1

    found: dict[str, Any] = {"prefill": _seconds(prefill, attention)}
    if graph:
        batch.capture()
    found["decode"] = _seconds(decode, attention) / steps
    if model.device.type == "cuda":  # last: once the profiler ran, launches take longer
        found["shares"] = [profiled(call, MARKS["ours"])["share"] for call in (prefill, decode)]
    return found


def _seconds(call: Callable[[], Any], attention: Attention) -> float:
    call()
    times = []
    for _ in range(REPEATS):
        _synchronize()
        attention.barrier()
        _synchronize()
        start = time.perf_counter()
        call()
        _synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
