"""Whether a timed result is right: its error against fp32, measured by the error that plain PyTorch has in 16 bits.

A fixed tolerance is too loose for short rows or too tight for long ones. So the bound is relative: the largest and the
root-mean-square error may be twice those of the same attention computed naively with scores, weights and output rounded
to the element type, plus half a unit in the last place. Of fp8 the weights alone are rounded to the element type; the
rest is computed in fp16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from inputs import Inputs
from problem import Problem

FACTOR = 2.0
ROWS = 512  # query rows computed at once
ELEMENTS = 1 << 25  # scores, or elements of keys, computed at once
PAIRS = 4e10  # (row, key, head) triples above which only some blocks of rows are checked


@dataclass
class Expected:
    """Some rows of the exact result, and the errors that plain 16-bit PyTorch makes in them."""

    rows: torch.Tensor  # indices into the rows of the output
    out: torch.Tensor  # fp32
    largest: float
    rms: float
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
    return Expected(torch.cat(rows), torch.cat(exact), largest, rms, inputs.q.size(0))


def _blocks(case: Problem) -> list[tuple[int, int, int]]:
    """(request, first row, rows)."""
    return [
        (request, first, min(ROWS, qo_len - first))
        for request, qo_len in enumerate(case.qo_lens)
        for first in range(0, qo_len, ROWS)
    ]


def naive(case: Problem, inputs: Inputs, request: int, first: int, rows: int, arithmetic: torch.dtype) -> torch.Tensor:
    """Attention of ``rows`` rows of a request, some heads at a time, scores and weights in ``arithmetic``."""
    qo, kv = int(inputs.qo_indptr[request]) + first, int(inputs.kv_indptr[request])
    position = first + case.kv_lens[request] - case.qo_lens[request]  # of the first of these rows
    length = case.kv_lens[request]
    if case.causal:  # no row sees more
        length = min(length, max(position + rows, 1))
    q = inputs.q[qo : qo + rows].transpose(0, 1)
    k, v = (x[kv : kv + length].transpose(0, 1) for x in (inputs.k, inputs.v))
    if case.fp8:  # not every version of PyTorch indexes fp8
        q, k, v = q.half(), k.half(), v.half()
    p = torch.arange(position, position + rows, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)
    hidden = torch.zeros(rows, length, dtype=torch.bool, device=q.device)
    if case.causal:
        hidden |= j > p
    if case.window_left >= 0:
        hidden |= j < p - case.window_left
    if inputs.mask is not None:
        hidden |= ~inputs.mask[first : first + rows]
    out = torch.empty(rows, case.num_qo_heads, case.head_dim_vo, dtype=arithmetic, device=q.device)
    at_once = max(1, ELEMENTS // max(length * max(rows, case.head_dim_qk), 1))
    for heads in torch.arange(case.num_qo_heads, device=q.device).split(at_once):
        readers = heads // (case.num_qo_heads // case.num_kv_heads)
        keys, values = k[readers].to(arithmetic), v[readers].to(arithmetic)
        scores = torch.matmul(q[heads].to(arithmetic), keys.mT).float() * case.head_dim_qk**-0.5
        if case.alibi:
            scores = scores + _alibi_slopes(case.num_qo_heads).to(q.device)[heads, None, None] * (j - p)
        if case.soft_cap > 0:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        sinks = None if inputs.sinks is None else inputs.sinks[heads, None, None]
        if sinks is not None:
            top = top.maximum(sinks)
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks - top)
        if case.fp8 and arithmetic != torch.float32:
            weights = (weights * 256).to(inputs.v.dtype).float() / 256
        weights = (weights / total).masked_fill(total == 0, 0.0)
        out[:, heads] = torch.matmul(weights.to(arithmetic), values).transpose(0, 1)
    return out


def _alibi_slopes(num_heads: int) -> torch.Tensor:
    """Of as many heads as a power of two."""
    assert num_heads & (num_heads - 1) == 0
    return torch.exp2(-8.0 / num_heads * torch.arange(1, num_heads + 1))


def fault(actual: torch.Tensor, expected: Expected) -> str | None:
    """What is wrong with a result, or None."""
    if actual.size(0) != expected.total_rows or actual.shape[1:] != expected.out.shape[1:]:
        return f"shape {tuple(actual.shape)}, expected ({expected.total_rows}, ...) {tuple(expected.out.shape[1:])}"
    error = actual[expected.rows].float() - expected.out
    if not bool(torch.isfinite(error).all()):
        return "not finite"
    half_unit = 0.5 * torch.finfo(actual.dtype).eps
    bounds = (
        ("largest", float(error.abs().max()), expected.largest, float(expected.out.abs().max())),
        ("rms", float(error.square().mean().sqrt()), expected.rms, float(expected.out.square().mean().sqrt())),
    )
    for name, ours, plain, size in bounds:
        if ours > FACTOR * plain + half_unit * size:
            return f"{name} error {ours:.2e} where plain PyTorch in {actual.dtype} has {plain:.2e}"
    return None
