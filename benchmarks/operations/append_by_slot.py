"""`append_by_slot`: new keys and values through append_paged_kv_cache_by_slot."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import check
import torch
from backend import Backend, Operation, Workload, needs_cuda
from lengths import tokens
from timing import Timed

from cutlass_kernels._cli.comparison import Errors

from .merge import no_kernels

PAGE_SIZE = 16


@dataclass(frozen=True)
class Append:
    """Keys and values of so many tokens, to as many slots in random order; a cache of fp8 takes them converted."""

    tokens: int
    heads: int
    head_dim: int
    cache_dtype: str
    dtype: str = "bfloat16"
    scale: float = 1.0
    features: frozenset[str] = frozenset()

    @property
    def group(self) -> str:
        return f"{self.dtype} to {self.cache_dtype}, scale {self.scale:g}"

    @property
    def column(self) -> str:
        return f"{tokens(self.tokens)}x{self.heads}x{self.head_dim}"

    @property
    def label(self) -> str:
        return f"append {self.group} {self.column}"

    @property
    def detail(self) -> str:
        return f"{self.tokens} tokens, {self.heads} heads, head_dim {self.head_dim}, {self.group}"

    @property
    def work(self) -> float:
        """A multiply per element."""
        return 2.0 * self.tokens * self.heads * self.head_dim

    @property
    def bytes(self) -> float:
        """Keys and values once as they come and once as they are stored, and the slots."""
        each = sum(getattr(torch, name).itemsize for name in (self.dtype, self.cache_dtype))
        return float(2 * self.tokens * self.heads * self.head_dim * each + 8 * self.tokens)


@dataclass
class Entries:
    """The tensors of an :class:`Append`."""

    key: torch.Tensor
    value: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slots: torch.Tensor
    scale: float

    def stored(self) -> torch.Tensor:
        """The keys in the cache, in the order of tokens, as numbers."""
        return self.key_cache.flatten(0, 1).view(torch.uint8)[self.slots].view(self.key_cache.dtype).float()


def make_entries(case: Append, device: torch.device, seed: int = 0) -> Entries:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.tokens, case.heads, case.head_dim)
    dtype, cache_dtype = (getattr(torch, name) for name in (case.dtype, case.cache_dtype))
    key, value = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(2))
    pages = -(-case.tokens // PAGE_SIZE)
    k_cache, v_cache = torch.zeros(2, pages, PAGE_SIZE, *shape[1:], device=device).to(cache_dtype)
    slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[: case.tokens]
    return Entries(key, value, k_cache, v_cache, slots, case.scale)


def expect_stored(x: Entries) -> check.Expected:
    """What is stored, before it is rounded; PyTorch rounds it to the type of the cache."""
    exact = x.key.float() / x.scale
    error = exact.to(x.key_cache.dtype).float() - exact
    rms = float(error.double().square().mean().sqrt())
    every = torch.arange(x.key.size(0), device=x.key.device)
    return check.Expected(every, exact, Errors(float(error.abs().max()), rms), x.key.size(0))


def _append(library: Any, case: Append, x: Entries) -> Timed:
    arguments = (x.key, x.value, x.key_cache, x.value_cache, x.slots, x.scale, x.scale)
    return Timed(functools.partial(library.append_paged_kv_cache_by_slot, *arguments), output=lambda _: x.stored())


def _torch(case: Append, x: Entries) -> Timed:
    def call() -> None:
        for new, cache in ((x.key, x.key_cache), (x.value, x.value_cache)):
            scaled = new if x.scale == 1.0 else new / x.scale
            cache.flatten(0, 1).view(torch.uint8)[x.slots] = scaled.to(cache.dtype).view(torch.uint8)

    return Timed(call, output=lambda _: x.stored())


def ours(library: Any) -> list[Backend]:
    missing = functools.partial(no_kernels, library)
    return [Backend("auto", True, frozenset(), missing, functools.partial(_append, library))]


def append(dtype: str) -> list[Append]:
    """A decode step of 64 requests up to a prompt of 64k tokens."""
    return [
        Append(count, heads, 128, cache, dtype, scale)
        for cache, scale in (("float8_e4m3fn", 1.0), ("float8_e4m3fn", 0.3), (dtype, 1.0))
        for count, heads in ((64, 8), (2048, 8), (16384, 8), (65536, 8), (65536, 1))
    ]


OPERATION = Operation(
    "new keys and values through append_paged_kv_cache_by_slot",
    ("TB/s", "us"),
    ours,
    [Backend("torch", False, frozenset(), needs_cuda, _torch)],
    {"append_by_slot": Workload("64 to 64k tokens, as they are and converted to fp8", append)},
    "append_by_slot",
    ("auto", "torch"),
    make_entries,
    lambda case, inputs: expect_stored(inputs),
)
