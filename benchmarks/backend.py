"""What the benchmark is made of: a case, a backend that runs it, a workload of cases, an operation with all of them.

A backend says which features it honours (the names in ``features`` of a case) and makes a callable for a case. A case
that it does not honour is shown as "-" and not approximated.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import check
import torch
from inputs import make_inputs
from report import UNITS
from timing import Timed

import cutlass_kernels as ck

ALL = frozenset({"causal", "ragged", "append", "gqa", "window", "soft_cap", "sinks", "head_dim_vo", "paged"})
FP8 = frozenset({"fp8"})
ONLY_OURS = frozenset({"custom_mask", "alibi"}) | FP8  # measured against ourselves: no peer is asked


class Case(Protocol):
    """A label, a place in a result table (``group`` is the row, ``column`` the column), needs, and work."""

    @property
    def label(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def column(self) -> str: ...
    @property
    def detail(self) -> str: ...
    @property
    def features(self) -> frozenset[str]: ...
    @property
    def work(self) -> float: ...
    @property
    def bytes(self) -> float: ...


@dataclass(frozen=True)
class Backend:
    """One column of the results; ``make(case, inputs)`` returns what to time."""

    name: str
    ours: bool
    honours: frozenset[str]
    missing: Callable[[torch.device], str | None]  # why it cannot run at all
    make: Callable[[Any, Any], Timed]
    refuses: Callable[[Any, torch.device], str | None] = lambda case, device: None  # what features do not express

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Why this backend does not run ``case``; None if it does."""
        reason = self.missing(device)
        if reason is None and case.features - self.honours:
            reason = f"does not honour {', '.join(sorted(case.features - self.honours))}"
        return reason if reason is not None else self.refuses(case, device)


@dataclass(frozen=True)
class Workload:
    """Named cases."""

    about: str
    cases: Callable[[str], Sequence[Case]]  # of the element type
    units: tuple[str, ...] = ()  # tables to show, if not that of the operation; the first is what files hold


@dataclass(frozen=True)
class Operation:
    """What the command line can measure. The first of ``units`` is that of :meth:`figure`."""

    about: str
    units: tuple[str, ...]
    ours: Callable[[Any], list[Backend]]  # the columns of a build of this library
    peers: list[Backend]
    workloads: dict[str, Workload]
    default_workload: str
    default_backends: tuple[str, ...]
    inputs: Callable[[Any, torch.device], Any] = lambda case, device: make_inputs(case.problem, device)
    expect: Callable[[Any, Any], check.Expected] = lambda case, inputs: check.expect(case.problem, inputs)
    host_clock: bool = False
    yardstick: str = ""  # a column that does something else, and is no peer

    @functools.cached_property
    def backends(self) -> dict[str, Backend]:
        """All columns: ours first."""
        return {backend.name: backend for backend in (*self.ours(ck), *self.peers)}

    def twins(self, library: Any, names: Sequence[str]) -> dict[str, Backend]:
        """By the names of columns of ours: the same columns of another build of this library."""
        columns = {backend.name: backend for backend in self.ours(library)}
        return {name: replace(columns[name], name=f"other_{name}", ours=False) for name in names}

    @property
    def unit(self) -> str:
        return self.units[0]

    @property
    def higher_is_better(self) -> bool:
        return UNITS[self.unit].higher_is_better

    def figure(self, case: Case, seconds: float) -> float:
        return UNITS[self.unit].figure(case.work, case.bytes, seconds)


# --- what a backend may be missing -------------------------------------------------------------------------------


def needs_nothing(device: torch.device) -> str | None:
    return None


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


ALSO = {  # other places of the same functions
    "flash_attn_interface": "vllm_fa3",
    "flash_mla": "vllm.third_party.flashmla.flash_mla_interface",
}


@functools.cache
def module(name: str) -> Any:
    """The module of a peer, or why it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # not only ImportError: a broken installation must not stop the others
        also = module(ALSO[name]) if name in ALSO else ""
        why = f"{name} cannot be imported: {error}"
        return " ".join(filter(None, (why, also))) if isinstance(also, str) else also


def needs_module(name: str) -> Callable[[torch.device], str | None]:
    """For ``missing``: a CUDA device, and this module."""

    def missing(device: torch.device) -> str | None:
        reason = needs_cuda(device)
        if reason is None and isinstance(module(name), str):
            reason = module(name)
        return reason

    return missing
