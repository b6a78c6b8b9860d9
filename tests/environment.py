"""Which backends run here, and which the environment asks for, which the package reads once."""

from __future__ import annotations

import pytest

import cutlass_kernels
from cutlass_kernels._compute import selection


def choose_backend(monkeypatch: pytest.MonkeyPatch, auto: str | None = None, forced: str | None = None) -> None:
    """As if CUTLASS_KERNELS_BACKEND and CUTLASS_KERNELS_FORCE_BACKEND had been set to these, or not at all."""
    monkeypatch.setattr(selection, "environment", selection.Environment(auto, forced))


def why_no_fa3() -> str | None:
    """Of the first GPU; None where fa3 runs."""
    return " ".join(cutlass_kernels.explain(device="cuda:0").reasons["fa3"]) or None
