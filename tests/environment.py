"""The backends that the environment asks for, which the package reads once."""

from __future__ import annotations

import pytest

from cutlass_kernels import _select


def choose_backend(monkeypatch: pytest.MonkeyPatch, auto: str | None = None, forced: str | None = None) -> None:
    """As if CUTLASS_KERNELS_BACKEND and CUTLASS_KERNELS_FORCE_BACKEND had been set to these, or not at all."""
    monkeypatch.setattr(_select, "environment", _select.Environment(auto, forced))
