"""CUDA graphs of calls, calls that must not wait for the device, and calls beside another stream."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch


def capture(call: Callable[[], Any], warm_up: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of the call, and the results that its replays write. Kernels are loaded before."""
    for _ in range(warm_up):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@contextlib.contextmanager
def no_waiting(on_gpu: bool = True) -> Iterator[None]:
    """What runs inside raises where it waits for the device."""
    if not on_gpu:
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def disturbed(call: Callable[[], Any], stream: torch.cuda.Stream, chance: random.Random) -> Any:
    """While another stream holds some of the multiprocessors, thread blocks start in another order."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(chance.randrange(1, 200_000))
        x = torch.ones(chance.choice([128, 512, 1024]), 512, device=stream.device)
        for _ in range(chance.randrange(1, 6)):
            x = x @ x.T @ x * 1e-6
    return call()
