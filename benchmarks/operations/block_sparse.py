"""`block_sparse`: one request under a mask of blocks, through the wrappers for block-sparse patterns."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import api
import torch
from backend import ALL, Backend, Operation, Workload, module, needs_cuda, needs_module
from inputs import Inputs, make_inputs
from lengths import tokens
from problem import OfProblem, Problem
from timing import Timed


@dataclass(frozen=True)
class BlockSparse(OfProblem):
    """Every block of ``block`` rows sees the same number of blocks of as many keys, drawn at random."""

    block: int
    density: float

    @property
    def seen(self) -> int:
        """Blocks of keys of a block of rows."""
        return max(round(self.problem.kv_lens[0] // self.block * self.density), 1)

    @property
    def detail(self) -> str:
        return f"blocks of {self.block}, {self.density:.0%} of them, {self.problem.detail}"

    @property
    def work(self) -> float:
        return self.problem.work * self.seen * self.block / self.problem.kv_lens[0]

    def pattern(self, device: torch.device) -> torch.Tensor:
        """Bool ``[blocks of rows, blocks of keys]``."""
        generator = torch.Generator().manual_seed(0)
        rows, keys = (n // self.block for n in (self.problem.qo_lens[0], self.problem.kv_lens[0]))
        chosen = torch.rand(rows, keys, generator=generator).topk(self.seen, 1).indices
        return torch.zeros(rows, keys, dtype=torch.bool).scatter_(1, chosen, True).to(device)


def _inputs(case: BlockSparse, device: torch.device) -> Inputs:
    """Those of the problem, with the pattern as a mask for the check."""
    mask = case.pattern(device).repeat_interleave(case.block, 0).repeat_interleave(case.block, 1)
    return dataclasses.replace(make_inputs(case.problem, device), mask=mask)


# --- who attends -------------------------------------------------------------------------------------------------


def _blocks(library: Any, case: BlockSparse, x: Inputs, backend: str = "auto") -> Timed:
    p, pattern, dtype = case.problem, case.pattern(x.q.device), getattr(torch, case.problem.dtype)
    indptr = torch.nn.functional.pad(pattern.sum(1).cumsum(0), (1, 0)).int()
    wrapper = library.BlockSparseAttentionWrapper(api.workspace(x.q.device), backend=backend)
    sizes = (p.qo_lens[0], p.kv_lens[0], case.block, case.block, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk)
    wrapper.plan(indptr, pattern.nonzero()[:, 1].int(), *sizes, q_data_type=dtype, o_data_type=dtype)
    return Timed(functools.partial(wrapper.run, x.q, x.k, x.v))


def _heads(library: Any, case: BlockSparse, x: Inputs) -> Timed:
    """The wrapper for patterns per head, with one pattern for all."""
    p, dtype = case.problem, getattr(torch, case.problem.dtype)
    pattern = case.pattern(x.q.device).expand(p.num_kv_heads, -1, -1).contiguous()
    sizes = [torch.full((p.num_kv_heads, n), case.block, dtype=torch.int32) for n in pattern.shape[1:]]
    if library is not module("cutlass_kernels"):  # FlashInfer's sizes are on the device
        sizes = [size.to(x.q.device) for size in sizes]
    wrapper = library.VariableBlockSparseAttentionWrapper(api.workspace(x.q.device))
    wrapper.plan(pattern, *sizes, p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, q_data_type=dtype)
    tensors = [y.transpose(0, 1).contiguous() for y in (x.q, x.k, x.v)]
    return Timed(functools.partial(wrapper.run, *tensors), output=lambda out: out.transpose(0, 1))


def _dense(library: Any, case: BlockSparse, x: Inputs, backend: str = "auto") -> Timed:
    return Timed(functools.partial(library.single_prefill_with_kv_cache, x.q, x.k, x.v, backend=backend))


def _only_full(case: BlockSparse, device: torch.device) -> str | None:
    return None if case.density == 1 else "computes all blocks"


def ours(library: Any) -> list[Backend]:
    def column(name: str, make: Any, refuses: Any = None) -> Backend:
        refused = functools.partial(api.refused, library, "auto") if refuses is None else refuses
        return Backend(name, True, ALL, needs_cuda, functools.partial(make, library), refused)

    refused_by_fa2 = functools.partial(api.refused, library, "fa2")
    return [
        column("blocks", _blocks),
        column("blocks_fa2", functools.partial(_blocks, backend="fa2"), refused_by_fa2),
        column("heads", _heads),
        column("dense", _dense, _only_full),
        column("dense_fa2", functools.partial(_dense, backend="fa2"), _only_full),
    ]


def _flashinfer(name: str, make: Any) -> Backend:
    missing = needs_module("flashinfer")
    return Backend(name, False, ALL, missing, lambda case, x: make(module("flashinfer"), case, x))


# --- workloads ---------------------------------------------------------------------------------------------------


def _cases(dtype: str, rows: int, blocks: tuple[int, ...], heads: tuple[tuple[int, int], ...]) -> list[BlockSparse]:
    cases = []
    for num_qo_heads, num_kv_heads in heads:
        for block in blocks:
            for density in (0.1, 0.25, 0.5, 1.0):
                group = f"{num_qo_heads}/{num_kv_heads} hd128 {tokens(rows)}, blocks of {block}"
                sizes = ((rows,), (rows,), num_qo_heads, num_kv_heads, 128, 128)
                problem = Problem(group, f"{density:.0%}", *sizes, causal=False, dtype=dtype)
                cases.append(BlockSparse(problem, block, density))
    return cases


def block_sparse(dtype: str) -> list[BlockSparse]:
    """16k rows and keys."""
    return _cases(dtype, 16384, (128, 64), ((32, 32), (32, 8)))


OPERATION = Operation(
    "one request under a mask of blocks: a pattern for all heads, a pattern per head, and, of 100 %, without a mask",
    ("TFLOP/s", "us"),
    ours,
    [
        _flashinfer("flashinfer_fa2", functools.partial(_blocks, backend="fa2")),
        _flashinfer("flashinfer_fa3", functools.partial(_blocks, backend="fa3")),
        _flashinfer("flashinfer_heads", _heads),
    ],
    {"block-sparse": Workload("blocks of 128 and 64, 10 to 100 % of them, 16k tokens", block_sparse)},
    "block-sparse",
    ("blocks", "heads", "dense", "flashinfer_fa2", "flashinfer_fa3", "flashinfer_heads"),
    _inputs,
)
