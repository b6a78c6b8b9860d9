"""What cases that present a problem of their own to a function in another form have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapes import Prefill


@dataclass(frozen=True)
class OfProblem:
    """A case with the name, the features and the work of its problem."""

    problem: Prefill

    @property
    def group(self) -> str:
        return self.problem.group

    @property
    def column(self) -> str:
        return self.problem.column

    @property
    def label(self) -> str:
        return self.problem.label

    @property
    def features(self) -> frozenset[str]:
        return self.problem.features

    @property
    def work(self) -> float:
        return self.problem.work

    @property
    def bytes(self) -> float:
        return self.problem.bytes
