"""What a timed result must be: exact rows, computed in fp32, and the errors that plain PyTorch makes in them.

The bound is that of ``cutlass_kernels._cli.comparison``: twice the errors of the same attention computed with scores,
weights and output rounded to the element type. For fp8 the weights alone are rounded to the element type, the rest to
fp16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from inputs import Inputs
from problem import Problem

from cutlass_kernels._cli import comparison
from cutlass_kernels._cli.comparison import Errors

ROWS = 512  # query rows computed at once
ELEMENTS = comparison.ELEMENTS  # scores, or elements of keys, computed at once
PAIRS = 4e10  # (row, key, head) triples above which only some blocks of rows are checked


@dataclass
class Expected:
    """Some rows of the exact result, and the errors that plain 16-bit PyTorch makes in them."""

    rows: torch.Tensor  # indices into the rows of the output
    out: torch.Tensor  # fp32
    plain: Errors
    total_rows: int

    @property
    def coverage(self) -> str:
        return "all rows" if self.rows.numel() == self.total_rows else f"{self.rows.numel()} of {self.total_rows} rows"


def expect(case: Problem, inputs: Inputs) -> Expected:
    """The exact rows of ``case``; where those are too many, blocks spread evenly, the first and the last among them."""
    blocks = _blocks(case)
    work = sum(count * case.kv_lens[request] for request, _, count in blocks) * case.num_qo_heads
    if work > PAIRS:
        keep = max(2, int(len(blocks) * PAIRS / work))
        blocks = [blocks[round(i * (len(blocks) - 1) / (keep - 1))] for i in range(keep)]
    starts = inputs.qo_indptr.tolist()
    exact, rows = [], []
    largest, squares, count = 0.0, 0.0, 0
    for request, first, size in blocks:
        out = naive(case, inputs, request, first, size, torch.float32)
        plain = torch.float16 if case.fp8 else inputs.q.dtype
        error = naive(case, inputs, request, first, size, plain).float() - out
        largest = max(largest, float(error.abs().max()))
        squares += float(error.double().square().sum())
        count += error.numel()
        exact.append(out)
        start = starts[request] + first
        rows.append(torch.arange(start, start + size, device=out.device))
    rms = (squares / max(count, 1)) ** 0.5
    return Expected(torch.cat(rows), torch.cat(exact), Errors(largest, rms), inputs.q.size(0))


def _blocks(case: Problem) -> list[tuple[int, int, int]]:
    """(request, first row, rows)."""
    return [
        (request, first, min(ROWS, qo_len - first))
        for request, qo_len in enumerate(case.qo_lens)
        for first in range(0, qo_len, ROWS)
    ]


def naive(case: Problem, inputs: Inputs, request: int, first: int, rows: int, arithmetic: torch.dtype) -> torch.Tensor:
    """Attention of ``rows`` rows of a request, from row ``first`` on, computed in ``arithmetic``."""
    qo, kv = int(inputs.qo_indptr[request]) + first, int(inputs.kv_indptr[request])
    position = first + case.kv_lens[request] - case.qo_lens[request]  # of the first of these rows
    length = case.kv_lens[request]
    if case.causal:  # no row sees more
        length = min(length, max(position + rows, 1))
    q, k, v = inputs.q[qo : qo + rows], inputs.k[kv : kv + length], inputs.v[kv : kv + length]
    p = torch.arange(position, position + rows, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)
    hidden = torch.zeros(rows, length, dtype=torch.bool, device=q.device)
    if case.causal:
        hidden |= j > p
    if case.window_left >= 0:
        hidden |= j < p - case.window_left
    if inputs.mask is not None:
        hidden |= ~inputs.mask[first : first + rows]
    return comparison.plain_attention(
        q,
        k,
        v,
        hidden,
        arithmetic,
        soft_cap=case.soft_cap,
        sinks=inputs.sinks,
        bias=(_alibi_slopes(case.num_qo_heads).to(q.device), j - p) if case.alibi else None,
        weights_dtype=v.dtype if case.fp8 and arithmetic != torch.float32 else None,
        elements=ELEMENTS,
    )


def _alibi_slopes(num_heads: int) -> torch.Tensor:
    """Of as many heads as a power of two."""
    assert num_heads & (num_heads - 1) == 0
    return torch.exp2(-8.0 / num_heads * torch.arange(1, num_heads + 1))


def fault(actual: torch.Tensor, expected: Expected) -> str | None:
    """What is wrong with a result, or None."""
    if actual.size(0) != expected.total_rows or actual.shape[1:] != expected.out.shape[1:]:
        return f"shape {tuple(actual.shape)}, expected ({expected.total_rows}, ...) {tuple(expected.out.shape[1:])}"
    return comparison.fault(actual[expected.rows], expected.out, plain=expected.plain)
