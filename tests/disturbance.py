"""Calls beside another stream, whose kernels change the order in which thread blocks start."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch


def disturbed(call: Callable[[], Any], stream: torch.cuda.Stream, chance: random.Random) -> Any:
    """While another stream holds some of the multiprocessors, thread blocks start in another order."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(chance.randrange(1, 200_000))
        x = torch.ones(chance.choice([128, 512, 1024]), 512, device=stream.device)
        for _ in range(chance.randrange(1, 6)):
            x = x @ x.T @ x * 1e-6
    return call()
