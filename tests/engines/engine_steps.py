"""What the steps of vLLM and SGLang have in common: requests that grow, random inputs, and what a layer must give."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from compare import assert_close

HEADS, KV_HEADS, DIM = 4, 2, 64
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.25])


@dataclass
class Expected:
    """What the oracle takes beside queries, keys and values."""

    window: int = -1  # keys before a row's own, and after it where rows are not causal
    causal: bool = True
    chunk_size: int = 0
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: bool = False
    scale: float = 0.11

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        seen = oracle.visible(
            len(q),
            len(k),
            causal=self.causal,
            window_left=self.window,
            window_right=-1 if self.causal else self.window,
            chunk_size=self.chunk_size,
            custom_mask=mask,
        )
        more = dict(soft_cap=self.soft_cap, sinks=self.sinks, alibi="relative" if self.alibi else None)
        return oracle.attention(q, k, v, mask=seen, sm_scale=self.scale, **more).out

    def __str__(self) -> str:
        return ",".join(x for x, y in vars(self).items() if y is not getattr(Expected, x)) or "plain"


ALL = Expected(window=8, sinks=SINKS, soft_cap=8.0)
OPTIONS = [
    *(Expected(window=window) for window in (0, 1, 8)),
    Expected(soft_cap=4.0),
    Expected(sinks=SINKS),
    *(Expected(sinks=SINKS, window=window, soft_cap=8.0) for window in (15, 16)),
    Expected(causal=False),
    *(Expected(causal=False, window=window) for window in (6, 7)),
]


class Requests(abc.ABC):
    """Keys and values of requests, as the cache has them."""

    kv_heads = KV_HEADS

    def __init__(self, expected: Expected, dtype: torch.dtype) -> None:
        self.expected, self.dtype = expected, dtype
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)

    @abc.abstractmethod
    def kept(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """What the cache holds of ``x [tokens, heads, dim]``: keys (``index`` 0) or values."""

    @abc.abstractmethod
    def place(self, request: int, new: int) -> list[int]:
        """Slots of the next ``new`` tokens of a request."""

    def length(self, request: int) -> int:
        return len(self.keys.get(request, ()))

    def randn(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, DIM, generator=self.generator).to(self.dtype)

    def grow(self, lengths: dict[int, int], padding: int = 0) -> tuple[list[int], Any, Any, Any]:
        """New tokens of some requests, ``lengths`` by request: their slots, and q, k and v with rows of padding."""
        slots = [x for request, n in lengths.items() for x in self.place(request, n)]
        count = len(slots)
        q, k, v = (self.randn(count + padding, heads) for heads in (HEADS, self.kv_heads, self.kv_heads))
        self.remember(lengths, k[:count], v[:count])
        return slots, q, k, v

    def remember(self, lengths: dict[int, int], k: torch.Tensor, v: torch.Tensor) -> None:
        counts = list(lengths.values())
        for held, x, index in ((self.keys, k, 0), (self.values, v, 1)):
            for request, new in zip(lengths, self.kept(x, index).split(counts)):
                held[request] = torch.cat([held.get(request, new[:0]), new])

    def check(self, out: torch.Tensor, q: torch.Tensor, lengths: dict[int, int], masks: Any = None) -> None:
        """The last rows of requests see what these hold."""
        counts = list(lengths.values())
        for i, (request, rows, got) in enumerate(zip(lengths, q.split(counts), out.view(-1, HEADS, DIM).split(counts))):
            want = self.expected.attend(rows, self.keys[request], self.values[request], masks and masks[i])
            assert_close(got, want, atol=2e-3 if masks is not None else None)

    @abc.abstractmethod
    def step(self, lengths: dict[int, int]) -> Any:
        """A step with these new tokens, whose output is checked."""

    def steps(self, steps: list[dict[int, int]]) -> None:
        for lengths in steps:
            self.step(lengths)
