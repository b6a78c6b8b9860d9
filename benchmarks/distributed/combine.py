"""`combine`: states of ranks that each attended to some of the keys."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from timing import Timed

from cutlass_kernels import distributed as cp

from .columns import Operation, column
from .ranks import Ranks


@dataclass(frozen=True)
class Case:
    rows: int
    heads: int
    dim: int

    @property
    def column(self) -> str:
        return f"{self.rows} x {self.heads} x {self.dim}"


@dataclass
class States:
    """Of all ranks: ``[W, rows, heads, D]``, and base-2 LSEs."""

    out: torch.Tensor
    lse: torch.Tensor


def _inputs(ranks: Ranks, case: Case) -> States:
    generator = torch.Generator(ranks.device).manual_seed(0)
    shape = (ranks.world, case.rows, case.heads, case.dim)
    out = torch.randn(shape, generator=generator, device=ranks.device, dtype=torch.bfloat16)
    return States(out, torch.randn(shape[:3], generator=generator, device=ranks.device))


def _want(ranks: Ranks, case: Case, x: States, layout: str) -> torch.Tensor:
    weights = torch.softmax(x.lse * torch.log(torch.tensor(2.0)), 0)
    merged = (x.out * weights[..., None]).sum(0)
    return merged.chunk(ranks.world, 1)[ranks.rank].contiguous()


def _ours(comm: str, ranks: Ranks, case: Case, x: States) -> Timed:
    mine = x.out[ranks.rank], x.lse[ranks.rank]
    return Timed(functools.partial(cp.dcp_combine, *mine, ranks.group, comm=comm))


def _needs_gpu(case: Case, ranks: Ranks) -> str | None:
    return None if ranks.on_gpu else "symmetric memory needs GPUs"


OPERATION = Operation(
    "combine",
    "us",
    {"combine": lambda: [Case(64, 32, 128)], "tiny": lambda: [Case(5, 8, 32)]},
    [
        column("symmetric", functools.partial(_ours, "symmetric"), ours=True, refuses=_needs_gpu),
        *(column(comm, functools.partial(_ours, comm), ours=True) for comm in ("a2a", "ag_rs")),
    ],
    _inputs,
    _want,
    calls_per_graph=10,
    only_graphs=True,
    default=("combine",),
)
