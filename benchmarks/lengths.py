"""Lengths of requests: what masks show of them, how they vary, and how tables write them."""

from __future__ import annotations

import math
import random


def ramp(first: int, last: int) -> int:
    """The sum of ``max(0, x)`` over the integers x of [first, last]."""
    first = max(first, 1)
    return (first + last) * (last - first + 1) // 2 if last >= first else 0


def visible_pairs(qo_len: int, kv_len: int, causal: bool, window_left: int = -1) -> int:
    """How many (row, key) pairs the mask shows: row i stands at key position ``i + kv_len - qo_len``."""
    if qo_len <= 0 or kv_len <= 0:
        return 0
    first, last = kv_len - qo_len, kv_len - 1
    pairs = ramp(first + 1, last + 1) if causal else qo_len * kv_len
    if window_left >= 0:
        pairs -= ramp(first - window_left, last - window_left)
    return pairs


def varied(kind: str, count: int, mean: int, seed: int = 0) -> tuple[int, ...]:
    """Random lengths with this mean: ``"uniform"`` from 1 on, or ``"log-normal"`` with a sigma of 1."""
    rng = random.Random(seed)
    if kind == "uniform":
        return tuple(rng.randint(1, 2 * mean - 1) for _ in range(count))
    return tuple(max(1, round(rng.lognormvariate(math.log(mean) - 0.5, 1.0))) for _ in range(count))


def tokens(length: int) -> str:
    """512, 4k, 1000."""
    return f"{length // 1024}k" if length % 1024 == 0 and length else str(length)
