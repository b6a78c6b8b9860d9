"""Block-sparse patterns, and what the oracle says of them: a dense mask for each head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from captures import capture, no_waiting
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from problems import randn


@dataclass
class Bsr:
    """A pattern of blocks of R x C of an M x N mask, with a mask in each block where ``mask`` is given."""

    M: int
    N: int
    R: int
    C: int
    indptr: torch.Tensor
    indices: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.M, self.N, self.R, self.C

    def lists(self, device: str | torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return self.indptr.to(device), self.indices.to(device)

    def order(self) -> list[list[int]]:
        """The keys of each row block, in the order of its list."""
        keys = []
        for begin, end in zip(self.indptr[:-1].tolist(), self.indptr[1:].tolist()):
            blocks = self.indices[begin:end].tolist()
            keys.append([j for b in blocks for j in range(b * self.C, min((b + 1) * self.C, self.N))])
        return keys

    def dense(self, causal: bool = False) -> torch.Tensor:
        """Bool ``[M, N]``; every block may occur once in a row block."""
        seen = torch.zeros(self.M, self.N, dtype=torch.bool)
        for i, keys in enumerate(self.order()):
            rows = range(i * self.R, min((i + 1) * self.R, self.M))
            for at, row in enumerate(rows):
                shown = keys[: max(len(keys) - len(rows) + at + 1, 0)] if causal and self.mask is None else keys
                seen[row, shown] = True
            if self.mask is not None:
                for e in range(int(self.indptr[i]), int(self.indptr[i + 1])):
                    begin = int(self.indices[e]) * self.C
                    width = min(self.C, self.N - begin)
                    part = self.mask[e, : len(rows), :width]
                    seen[rows.start : rows.stop, begin : begin + width] &= part
        return seen


def random_bsr(
    M: int, N: int, R: int, C: int, density: float = 0.4, masked: bool = False, seed: int = 0, empty: bool = True
) -> Bsr:
    """Blocks drawn at random, in random order; the second row block is empty."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.rand(-(-M // R), -(-N // C), generator=generator) < density
    if empty and blocks.size(0) > 2:
        blocks[1] = False
    rows = [row.nonzero()[:, 0] for row in blocks]
    rows = [row[torch.randperm(len(row), generator=generator)] for row in rows]
    indptr = torch.tensor([0, *(len(row) for row in rows)]).cumsum(0).int()
    indices = torch.cat(rows).int() if rows else torch.zeros(0, dtype=torch.int32)
    mask = torch.rand(indices.numel(), R, C, generator=generator) < 0.6 if masked else None
    return Bsr(M, N, R, C, indptr, indices, mask)


@dataclass
class Expected:
    """``out`` and ``baseline`` ``[rows, num_qo_heads, head_dim]``, ``lse`` ``[rows, num_qo_heads]``."""

    out: torch.Tensor
    lse: torch.Tensor
    baseline: torch.Tensor


def expect(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masks: torch.Tensor, **options: Any) -> Expected:
    """The oracle over ``[tokens, heads, dim]``, where ``masks`` is ``[M, N]``, or ``[num_qo_heads, M, N]``."""
    if masks.dim() == 2:
        heads = [(slice(None), slice(None), masks)]
    else:
        group = q.size(1) // k.size(1)
        heads = [(slice(h, h + 1), slice(h // group, h // group + 1), mask) for h, mask in enumerate(masks)]
    exact, plain = [], []
    for own, shared, mask in heads:
        given = (q[:, own], k[:, shared], v[:, shared])
        exact.append(oracle.attention(*given, mask=mask, **options))
        plain.append(oracle.attention(*given, mask=mask, arithmetic=q.dtype, **options))
    out, lse, base = (torch.cat(x, 1) for x in ([s.out for s in exact], [s.lse for s in exact], [s.out for s in plain]))
    return Expected(out, lse, base.to(q.dtype))


def tensors(
    M: int, N: int, heads: tuple[int, int], dim: int, device: str, dtype: torch.dtype = torch.float16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v ``[tokens, heads, dim]``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((M, heads[0], dim), (N, heads[1], dim), (N, heads[1], dim))
    return tuple(randn(shape, dtype, device, generator) for shape in shapes)  # type: ignore[return-value]


def check_run(wrapper: Any, given: tuple[torch.Tensor, ...], want: Expected, heads_first: bool = False) -> torch.Tensor:
    """A run into places full of NaN, and one without them. Returns the LSE."""
    q = given[0]
    out, lse = poison_(torch.empty_like(q)), poison_(torch.empty(q.shape[:2], device=q.device))
    found = wrapper.run(*given, out=out, lse=lse, return_lse=True)
    assert found[0] is out and found[1] is lse
    rows_first = [x.transpose(0, 1) if heads_first else x for x in (out, lse)]
    assert_close(rows_first[0], want.out, want.baseline, dtype=q.dtype)
    assert_lse_close(rows_first[1], want.lse)
    assert_bitwise(wrapper.run(*given), out)
    return lse


def check_captured(wrapper: Any, plan: Callable[[], None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Neither plan nor run waits for the device, and replays of a run follow new values."""
    out = torch.empty_like(q)
    with no_waiting():
        plan()
        wrapper.run(q, k, v, out=out)
    want = out.clone()
    graph, _ = capture(lambda: wrapper.run(q, k, v, out=out), warm_up=0)
    poison_(out)
    graph.replay()
    assert_bitwise(out, want)
    v.neg_()
    graph.replay()
    assert torch.equal(out, -want)


def check_what_refused_calls_leave(wrapper: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Not their options, and no output."""
    want = wrapper.run(q, k, v)
    with pytest.raises(ValueError, match="dtype"):
        wrapper.forward(q.float(), k, v, sm_scale=0.5, logits_soft_cap=1.0)
    assert_bitwise(wrapper.run(q, k, v), want)
    out = torch.full_like(want, 7.0)
    with pytest.raises(ValueError, match=r"lse has shape \(3, 4\)"):
        wrapper.run(q, k, v, out=out, lse=torch.empty(3, 4, device=q.device))
    assert torch.all(out == 7.0)
    assert not torch.equal(wrapper.forward(q, k, v, sm_scale=0.5), want)
    assert not torch.equal(wrapper.run(q, k, v), want)  # options of a call that succeeds stay
