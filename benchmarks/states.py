"""Merging of attention states: a case of it, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lengths import tokens


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
