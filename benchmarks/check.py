"""Whether a timed result is right: its error against fp32, measured by the error that plain PyTorch has in 16 bits.

A fixed tolerance is too loose for short rows or too tight for long ones. So the bound is relative: the largest and the
root-mean-square error may be twice those of the same attention computed naively with scores, weights and output rounded
to the element type, plus half a unit in the last place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from shapes import Inputs, Prefill

FACTOR = 2.0
ROWS = 512  # query rows computed at once
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


def expect(case: Prefill, inputs: Inputs) -> Expected:
    """The exact rows of ``case``; where those are too many, blocks spread evenly, the first and the last among them."""
    blocks = _blocks(case)
    work = sum(count * case.kv_lens[request] for request, _, count in blocks) * case.num_qo_heads
    if work > PAIRS:
        keep = max(2, int(len(blocks) * PAIRS / work))
        blocks = [blocks[round(i * (len(blocks) - 1) / (keep - 1))] for i in range(keep)]
    qo, kv = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    exact, rows = [], []
    largest, squares, count = 0.0, 0.0, 0
    for request, first, size in blocks:
        keys = slice(kv[request], kv[request + 1])
        q = inputs.q[qo[request] + first : qo[request] + first + size]
        position = first + case.kv_lens[request] - case.qo_lens[request]
        out = naive(case, q, inputs.k[keys], inputs.v[keys], inputs.sinks, position, torch.float32)
        error = naive(case, q, inputs.k[keys], inputs.v[keys], inputs.sinks, position, inputs.q.dtype).float() - out
        largest = max(largest, float(error.abs().max()))
        squares += float(error.double().square().sum())
        count += error.numel()
        exact.append(out)
        rows.append(torch.arange(qo[request] + first, qo[request] + first + size, device=q.device))
    rms = (squares / max(count, 1)) ** 0.5
    return Expected(torch.cat(rows), torch.cat(exact), largest, rms, inputs.q.size(0))


def _blocks(case: Prefill) -> list[tuple[int, int, int]]:
    """(request, first row, rows)."""
    return [
        (request, first, min(ROWS, qo_len - first))
        for request, qo_len in enumerate(case.qo_lens)
        for first in range(0, qo_len, ROWS)
    ]


def naive(
    case: Prefill,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    position: int,
    arithmetic: torch.dtype,
) -> torch.Tensor:
    """Attention of rows whose first stands at key ``position``, head by head, scores and weights in ``arithmetic``."""
    rows, group = q.size(0), case.num_qo_heads // case.num_kv_heads
    if case.causal:  # nobody sees more
        k, v = k[: max(position + rows, 1)], v[: max(position + rows, 1)]
    p = torch.arange(position, position + rows, device=q.device)[:, None]
    j = torch.arange(k.size(0), device=q.device)
    hidden = torch.zeros(rows, k.size(0), dtype=torch.bool, device=q.device)
    if case.causal:
        hidden |= j > p
    if case.window_left >= 0:
        hidden |= j < p - case.window_left
    out = torch.empty(rows, case.num_qo_heads, case.head_dim_vo, dtype=arithmetic, device=q.device)
    for head in range(case.num_qo_heads):
        keys, values = k[:, head // group].to(arithmetic), v[:, head // group].to(arithmetic)
        scores = torch.matmul(q[:, head].to(arithmetic), keys.T).float() * case.head_dim_qk**-0.5
        if case.soft_cap > 0:
            scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
        scores = scores.masked_fill(hidden, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            top = top.maximum(sinks[head])
        top = top.masked_fill(top == -torch.inf, 0.0)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sinks[head] - top)
        weights = (weights / total).masked_fill(total == 0, 0.0)
        out[:, head] = torch.matmul(weights.to(arithmetic), values)
    return out


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
