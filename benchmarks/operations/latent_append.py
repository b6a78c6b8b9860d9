"""`latent_append`: new tokens to slots of quantized latent caches, rotated or not, beside a copy of as many bytes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import check
import torch
from backend import Backend, Operation, Workload, needs_cuda
from lengths import tokens
from timing import Timed

from cutlass_kernels._caches import latent_formats
from cutlass_kernels._cli.comparison import Errors

from .merge import no_kernels

PAGE_SIZE = 64
POSITIONS = 8192
ROPE = 64
# Calls take turns among so many bytes of tensors, at least: the L2 cache of an H200 has 50 MiB.
APART = 1 << 28
MOST_SETS = 64


@dataclass(frozen=True)
class LatentAppend:
    """So many tokens of a format to as many slots in random order, and the RoPE columns of their queries."""

    tokens: int
    kv_format: str
    heads: int | None  # of queries; None: nothing is rotated
    dtype: str = "bfloat16"
    features: frozenset[str] = frozenset()

    @property
    def kind(self) -> latent_formats.Format:
        return latent_formats.FORMATS[self.kv_format]

    @property
    def group(self) -> str:
        rotated = "" if self.heads is None else f", rotated, {self.heads} heads"
        return f"{self.dtype} to {self.kv_format}{rotated}"

    @property
    def column(self) -> str:
        return tokens(self.tokens)

    @property
    def label(self) -> str:
        return f"latent_append {self.group} {self.column}"

    @property
    def detail(self) -> str:
        return f"{self.tokens} tokens, {self.group}"

    @property
    def work(self) -> float:
        """A multiply per quantized column, three operations per rotated one."""
        rotated = 0 if self.heads is None else 3 * ROPE * (1 + self.heads)
        return float(self.tokens * (self.kind.latent + rotated))

    @property
    def bytes(self) -> float:
        """Tokens as they come and as they are stored, slots, and queries read and written."""
        queries = 0 if self.heads is None else 4 * ROPE * self.heads + 8
        return float(self.tokens * (2 * self.kind.columns + self.kind.bytes + 8 + queries))


@dataclass
class Set:
    """Tensors of one call. ``copy`` is a pair of tensors that together have the bytes of the case."""

    ckv: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor
    rotation: dict[str, Any]
    copy: tuple[torch.Tensor, torch.Tensor]


def make_sets(case: LatentAppend, device: torch.device, seed: int = 0) -> list[Set]:
    generator = torch.Generator(device).manual_seed(seed)
    angles = torch.arange(POSITIONS, device=device)[:, None] / 10000 ** (torch.arange(32, device=device) / 32)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    pages = -(-case.tokens // PAGE_SIZE)

    def make() -> Set:
        shape = (case.tokens, case.kind.columns)
        ckv = torch.randn(shape, generator=generator, device=device).to(getattr(torch, case.dtype))
        cache = torch.zeros(pages, PAGE_SIZE, 1, case.kind.bytes, dtype=torch.uint8, device=device)
        slots = torch.randperm(pages * PAGE_SIZE, generator=generator, device=device)[: case.tokens]
        rotation: dict[str, Any] = {}
        if case.heads is not None:
            q = torch.randn(case.tokens, case.heads, ROPE, generator=generator, device=device).to(ckv.dtype)
            positions = torch.randint(POSITIONS, (case.tokens,), generator=generator, device=device)
            rotation = dict(positions=positions, cos_sin_cache=table, is_neox=False, q_pe=q)
        copy = torch.zeros(2, int(case.bytes) // 2, dtype=torch.uint8, device=device)
        return Set(ckv, cache, slots, rotation, (copy[0], copy[1]))

    return [make() for _ in range(max(1, min(MOST_SETS, -(-APART // int(case.bytes)))))]


def numbers(case: LatentAppend, x: Set) -> torch.Tensor:
    """Quantized columns in the order of tokens, as numbers; of formats that quantize rotated ones, without those."""
    parts = [part.flatten(0, 1)[x.slots] for part in latent_formats.parts(x.cache, case.kind)]
    return latent_formats.decoded(parts, case.kind)[..., : case.kind.columns - ROPE]


def expect_stored(case: LatentAppend, sets: list[Set]) -> check.Expected:
    """The columns of the first set, and how far from them PyTorch's bytes are."""
    x = sets[0]
    exact = x.ckv.float()[:, None, : case.kind.columns - ROPE]
    power = case.kind.has_powers
    latent_formats.write(x.ckv, x.cache, x.slots, case.kind, power)
    error = numbers(case, x) - exact
    x.cache.zero_()
    every = torch.arange(case.tokens, device=exact.device)
    return check.Expected(
        every, exact, Errors(float(error.abs().max()), float(error.square().mean().sqrt())), case.tokens
    )


def _timed(case: LatentAppend, sets: list[Set], call: Callable[[Set], Any]) -> Timed:
    """Each call takes the next set. What is checked is the first, written anew."""
    turn = itertools.cycle(sets)

    def output(_: Any) -> torch.Tensor:
        sets[0].cache.zero_()
        call(sets[0])
        return numbers(case, sets[0])

    def next_call() -> bool:
        call(next(turn))
        return True

    return Timed(next_call, output=output)


def _append(library: Any, case: LatentAppend, sets: list[Set]) -> Timed:
    append = library.mla.append_quantized_mla_kv_cache
    return _timed(case, sets, lambda x: append(x.ckv, None, x.cache, x.slots, case.kv_format, **x.rotation))


def _in_two(library: Any, case: LatentAppend, sets: list[Set]) -> Timed:
    append, rotate = library.mla.append_quantized_mla_kv_cache, library.apply_rope_with_cos_sin_cache_inplace

    def call(x: Set) -> None:
        angles = ROPE, x.rotation["cos_sin_cache"], x.rotation["is_neox"]
        rotate(x.rotation["positions"], x.rotation["q_pe"], x.ckv[:, None, -ROPE:], *angles)
        append(x.ckv, None, x.cache, x.slots, case.kv_format)

    return _timed(case, sets, call)


def _copy(case: LatentAppend, sets: list[Set]) -> Timed:
    turn = itertools.cycle(sets)

    def call() -> None:
        to, source = next(turn).copy
        to.copy_(source)

    return Timed(call)


def ours(library: Any) -> list[Backend]:
    missing = functools.partial(no_kernels, library)
    alone = lambda case, device: "rotates nothing" if case.heads is None else None  # noqa: E731
    return [
        Backend("auto", True, frozenset(), missing, functools.partial(_append, library)),
        Backend("two_calls", True, frozenset(), missing, functools.partial(_in_two, library), alone),
    ]


def latent_append(dtype: str) -> list[LatentAppend]:
    """A decode step of one request up to a prompt of 64k tokens. "v4.1_tokens" has the bytes of "v4.1_pages"."""
    plain = [name for name in latent_formats.FORMATS if name != "v4.1_tokens"]
    counts = (1, 64, 1024, 4096, 16384, 65536)
    cases = [LatentAppend(count, name, None, dtype) for name in plain for count in counts]
    cases += [LatentAppend(count, name, 0, dtype) for name in ("v3.2", "v4", "v4.1_pages") for count in counts]
    return cases + [LatentAppend(count, "v4", 64, dtype) for count in counts[:5]]


OPERATION = Operation(
    "new tokens to slots of quantized latent caches",
    ("TB/s", "us"),
    ours,
    [Backend("copy", False, frozenset(), needs_cuda, _copy)],
    {"latent_append": Workload("1 to 64k tokens of four formats, rotated or not", latent_append)},
    "latent_append",
    ("auto", "two_calls", "copy"),
    make_sets,
    expect_stored,
    yardstick="copy",
)
