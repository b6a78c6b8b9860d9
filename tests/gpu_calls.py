"""Calls on a GPU: in graphs, without synchronisation, beside another stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def captured(call: Callable[[], Any], first: Callable[[], Any] | None = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``call``, before which it is made once, or ``first`` is; and what replays write to."""
    (first or call)()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    return graph, results


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """PyTorch raises where this block waits for the device."""
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
