"""`rope`: rotary embeddings with writing to slots of a cache, in one kernel and in two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import check
import torch
from backend import Backend, Operation, Workload, module, needs_cuda
from lengths import tokens
from timing import Timed

from cutlass_kernels._cli.comparison import Errors

from .merge import no_kernels

PAGE_SIZE = 16
POSITIONS = 8192


@dataclass(frozen=True)
class Rope:
    """Queries, keys and values of so many tokens, side by side as a projection leaves them. Without a cache, queries
    and keys are rotated in place."""

    tokens: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    cache_dtype: str | None
    dtype: str = "bfloat16"
    features: frozenset[str] = frozenset()

    @property
    def group(self) -> str:
        return f"{self.dtype}, {f'cache of {self.cache_dtype}' if self.cache_dtype else 'in place'}"

    @property
    def column(self) -> str:
        return f"{tokens(self.tokens)}x{self.num_qo_heads}/{self.num_kv_heads}x{self.head_dim}"

    @property
    def label(self) -> str:
        return f"rope {self.group} {self.column}"

    @property
    def detail(self) -> str:
        return f"{self.tokens} tokens, {self.num_qo_heads}/{self.num_kv_heads} heads, {self.head_dim}, {self.group}"

    @property
    def work(self) -> float:
        """Three operations for each element of a query or a key."""
        return 3.0 * self.tokens * (self.num_qo_heads + self.num_kv_heads) * self.head_dim

    @property
    def bytes(self) -> float:
        """What is read and written once; the table stays in caches."""
        size = getattr(torch, self.dtype).itemsize
        elements = self.tokens * self.head_dim
        if self.cache_dtype is None:
            return float(2 * size * elements * (self.num_qo_heads + self.num_kv_heads))
        stored = getattr(torch, self.cache_dtype).itemsize
        return float(elements * (2 * size * self.num_qo_heads + 2 * (size + stored) * self.num_kv_heads))


@dataclass
class Tokens:
    """The tensors of a :class:`Rope`."""

    q: torch.Tensor
    k: torch.Tensor
    first_k: torch.Tensor  # before any call
    v: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor] | None
    slots: torch.Tensor


def make_tokens(case: Rope, device: torch.device, seed: int = 0) -> Tokens:
    generator = torch.Generator(device).manual_seed(seed)
    heads = [case.num_qo_heads, case.num_kv_heads, case.num_kv_heads]
    qkv = torch.randn(case.tokens, sum(heads), case.head_dim, generator=generator, device=device)
    q, k, v = qkv.to(getattr(torch, case.dtype)).split(heads, 1)
    half = case.head_dim // 2
    angles = torch.arange(POSITIONS, device=device)[:, None] / 10000 ** (torch.arange(half, device=device) / half)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    positions = torch.randint(POSITIONS, (case.tokens,), generator=generator, device=device)
    pages = -(-case.tokens // PAGE_SIZE)
    slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[: case.tokens]
    caches = None
    if case.cache_dtype:
        k_cache, v_cache = torch.zeros(2, pages, PAGE_SIZE, case.num_kv_heads, case.head_dim, device=device).to(
            getattr(torch, case.cache_dtype)
        )
        caches = (k_cache, v_cache)
    return Tokens(q, k, k.clone(), v, positions, table, caches, slots)


def expect_rotated(x: Tokens) -> check.Expected:
    """The first keys, rotated, before they are rounded."""
    cos, sin = x.table[x.positions].unsqueeze(1).chunk(2, -1)
    a, b = x.first_k.float().chunk(2, -1)
    exact = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    plain = exact.to(x.first_k.dtype)
    if x.caches:
        plain = plain.to(x.caches[0].dtype)
    error = plain.float() - exact
    rms = float(error.double().square().mean().sqrt())
    every = torch.arange(exact.size(0), device=exact.device)
    return check.Expected(every, exact, Errors(float(error.abs().max()), rms), exact.size(0))


def _timed(call: Callable[[Tokens], None], x: Tokens) -> Timed:
    """Every call rotates further what the one before has left. What is checked comes of one call on the first keys."""

    def output(_: Any) -> torch.Tensor:
        once = replace(x, q=x.q.clone(), k=x.first_k.clone())
        call(once)
        if x.caches is None:
            return once.k.float()
        bits = x.caches[0].flatten(0, 1).view(torch.uint8)[x.slots]
        return bits.view(x.caches[0].dtype).float()

    return Timed(functools.partial(call, x), output=output)


def _in_one(library: Any, case: Rope, x: Tokens) -> Timed:
    def call(x: Tokens) -> None:
        if x.caches is None:
            library.apply_rope_with_cos_sin_cache_inplace(x.positions, x.q, x.k, case.head_dim, x.table)
        else:
            library.rope_append_paged_kv_cache_by_slot(x.q, x.k, x.v, x.positions, x.table, *x.caches, x.slots)

    return _timed(call, x)


def _in_two(library: Any, case: Rope, x: Tokens) -> Timed:
    def call(x: Tokens) -> None:
        library.apply_rope_with_cos_sin_cache_inplace(x.positions, x.q, x.k, case.head_dim, x.table)
        if x.caches is not None:
            library.append_paged_kv_cache_by_slot(x.k, x.v, *x.caches, x.slots)

    return _timed(call, x)


def _flashinfer(case: Rope, x: Tokens) -> Timed:
    rotate = module("flashinfer").apply_rope_with_cos_sin_cache_inplace

    def call(x: Tokens) -> None:
        rotate(x.positions, x.q.flatten(1), x.k.flatten(1), case.head_dim, x.table)

    return _timed(call, x)


def _needs_flashinfer(device: torch.device) -> str | None:
    found = module("flashinfer")
    return found if isinstance(found, str) else needs_cuda(device)


def _not_with_a_cache(case: Rope, device: torch.device) -> str | None:
    return None if case.cache_dtype is None else "rotates alone"


def ours(library: Any) -> list[Backend]:
    missing = functools.partial(no_kernels, library)
    return [
        Backend("auto", True, frozenset(), missing, functools.partial(_in_one, library)),
        Backend("two_calls", True, frozenset(), missing, functools.partial(_in_two, library)),
    ]


def rope(dtype: str) -> list[Rope]:
    """A decode step of one request up to a prompt of 16k tokens."""
    sizes = ((32, 8, 128), (8, 1, 64))
    return [
        Rope(count, *size, cache, dtype)
        for cache in (None, dtype, "float8_e4m3fn")
        for count in (1, 64, 2048, 16384)
        for size in sizes
    ]


OPERATION = Operation(
    "rotary embeddings, alone and with writing to slots of a cache",
    ("TB/s", "us"),
    ours,
    [Backend("flashinfer", False, frozenset(), _needs_flashinfer, _flashinfer, _not_with_a_cache)],
    {"rope": Workload("1 to 16k tokens, in place and to caches", rope)},
    "rope",
    ("auto", "two_calls", "flashinfer"),
    make_tokens,
    lambda case, inputs: expect_rotated(inputs),
)
