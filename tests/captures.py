"""CUDA graphs of calls, and calls that must not wait for the device."""

from __future__ import annotations

import contextlib
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
