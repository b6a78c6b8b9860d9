"""`merge`: attention states through merge_state and merge_states."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import check
import torch
from backend import Backend, Operation, Workload, module, needs_cuda, needs_module
from lengths import tokens
from timing import Timed

from cutlass_kernels._cli.comparison import Errors


@dataclass(frozen=True)
class Merge:
    """Merging of attention states: merge_state() of two, merge_states() of any other number."""

    tokens: int
    states: int
    heads: int
    head_dim: int
    dtype: str = "bfloat16"
    features: frozenset[str] = frozenset()

    @property
    def group(self) -> str:
        return f"merge_state{'' if self.states == 2 else 's'}"

    @property
    def column(self) -> str:
        return f"{tokens(self.tokens)}x{self.states}x{self.heads}x{self.head_dim}"

    @property
    def label(self) -> str:
        return f"{self.group} {self.column}"

    @property
    def detail(self) -> str:
        return f"{self.tokens} tokens, {self.states} states, {self.heads} heads, head_dim {self.head_dim}, {self.dtype}"

    @property
    def work(self) -> float:
        """FLOPs: a multiply and an add per element of every state."""
        return 2.0 * self.tokens * self.states * self.heads * self.head_dim

    @property
    def bytes(self) -> float:
        """Of all states and the result, values and LSEs, each once."""
        row = self.head_dim * getattr(torch, self.dtype).itemsize + 4
        return float(self.tokens * (self.states + 1) * self.heads * row)


@dataclass
class States:
    """The tensors of a :class:`Merge`: v ``[tokens, states, heads, dim]`` and its LSEs."""

    v: torch.Tensor
    s: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Of merge_state() where there are two states, else of merge_states()."""
        if self.v.size(1) != 2:
            return self.v, self.s
        return tuple(x[:, i].contiguous() for i in (0, 1) for x in (self.v, self.s))


def make_states(case: Merge, device: torch.device, seed: int = 0) -> States:
    generator = torch.Generator(device).manual_seed(seed)
    shape = (case.tokens, case.states, case.heads)
    v = torch.empty((*shape, case.head_dim), dtype=getattr(torch, case.dtype), device=device)
    return States(v.normal_(generator=generator), torch.randn(shape, generator=generator, device=device))


def expect_merged(states: States) -> check.Expected:
    """What states merge to, all of it; plain PyTorch rounds weights and sums to the element type."""
    weights = torch.softmax(states.s.double() * math.log(2.0), 1).float()[..., None]
    tokens = states.v.size(0)
    exact, largest, squares = [], 0.0, 0.0
    for rows in torch.arange(tokens).split(max(1, check.ELEMENTS // max(states.v[0].numel(), 1))):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        out = (weights[part] * states.v[part].float()).sum(1)
        error = (weights[part].to(states.v.dtype) * states.v[part]).sum(1).float() - out
        largest = max(largest, float(error.abs().max()))
        squares += float(error.double().square().sum())
        exact.append(out)
    merged = torch.cat(exact)
    rms = (squares / max(merged.numel(), 1)) ** 0.5
    return check.Expected(torch.arange(tokens, device=merged.device), merged, Errors(largest, rms), tokens)


# --- who merges --------------------------------------------------------------------------------------------------


def _merge(library: Any, case: Merge, x: States) -> Timed:
    """The calls of FlashInfer's API, which is also ours."""
    call = functools.partial(getattr(library, case.group), *x.arguments)
    return Timed(call, output=lambda returned: returned[0])


def _torch(case: Merge, x: States) -> Timed:
    def call() -> tuple[torch.Tensor, torch.Tensor]:
        scaled = x.s * math.log(2.0)
        weights = torch.softmax(scaled, 1).unsqueeze(-1)
        return (weights * x.v).sum(1).to(x.v.dtype), torch.logsumexp(scaled, 1) / math.log(2.0)

    return Timed(call, output=lambda returned: returned[0])


def no_kernels(library: Any, device: torch.device) -> str | None:
    if device.type != "cuda" or library.list_kernels():
        return needs_cuda(device)
    return "this installation has no compiled kernels, so PyTorch would compute"


def ours(library: Any) -> list[Backend]:
    missing = functools.partial(no_kernels, library)
    return [Backend("auto", True, frozenset(), missing, functools.partial(_merge, library))]


def merge(dtype: str) -> list[Merge]:
    """States of prefills, where memory bounds, and of decoding, where the launch does."""
    if dtype.startswith("float8"):
        raise ValueError(f"dtype {dtype!r} is no type of states: use float16 or bfloat16.")
    sizes = (
        (8192, 4, 32, 128), (8192, 2, 32, 128), (8192, 3, 32, 64), (4096, 8, 32, 128), (512, 64, 32, 128),
        (4096, 2, 128, 512), (128, 2, 32, 128), (128, 4, 32, 128), (16, 33, 32, 128), (1, 300, 8, 128),
    )  # fmt: skip
    return [Merge(*size, dtype=dtype) for size in sizes]


OPERATION = Operation(
    "attention states through merge_state and merge_states",
    ("TB/s", "us"),
    ours,
    [
        Backend("torch", False, frozenset(), needs_cuda, _torch),
        Backend(
            "flashinfer",
            False,
            frozenset(),
            needs_module("flashinfer"),
            lambda case, x: _merge(module("flashinfer"), case, x),
        ),
    ],
    {"merge": Workload("2 to 300 states of 1 to 8k tokens", merge)},
    "merge",
    ("auto", "torch", "flashinfer"),
    make_states,
    lambda case, inputs: expect_merged(inputs),
)
