"""Which backends computed attention: counted where a kernel is launched and where the reference computes.

That is below all code that chooses a backend: no fallback and no remembered call passes by. A replay of a CUDA graph
counts nothing, but its capture does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_computed_by_reference = 0


def install() -> None:
    """Counts the calls of the reference from now on. (The package may be missing until somebody has said so.)"""
    from cutlass_kernels._compute import reference

    compute = reference.compute

    def counted(*args: Any, **kwargs: Any) -> Any:
        global _computed_by_reference
        _computed_by_reference += 1
        return compute(*args, **kwargs)

    reference.compute = counted


def counts() -> Counter[str]:
    """How often each backend has computed in this process, in all threads."""
    try:
        from cutlass_kernels import _C
    except ImportError:  # an installation without kernels
        launched = {}
    else:
        launched = {backend: _C.launch_count(backend) for backend in _C.backends}
    return Counter({**launched, "reference": _computed_by_reference})


class Ran:
    """What runs from now on in a case that is named after a backend. ``also``: backends that it runs on purpose."""

    current: Ran | None = None

    def __init__(self, named: str, also: Iterable[str] = ()):
        self.named, self.also = named, frozenset(also)
        self.start, self.instead = counts(), Counter[str]()

    def check(self, may_run_nothing: bool = False) -> None:
        """AssertionError where another backend ran, or none."""
        ran = counts() - self.start - self.instead
        others = {backend: count for backend, count in ran.items() if backend not in {self.named, *self.also}}
        assert not others, (
            f"The case is named after {self.named}, but other backends computed: {others}. Pass the backend on, or say "
            "with Target.attempt() what is unserved, or with the marker also_runs what runs on purpose."
        )
        assert may_run_nothing or self.instead or ran[self.named], (
            f"The case is named after {self.named}, which computed nothing. If that is meant, say why with the marker "
            "runs_nothing."
        )


@contextmanager
def recorded(named: str, also: Iterable[str] = ()) -> Iterator[Ran]:
    before, Ran.current = Ran.current, Ran(named, also)
    try:
        yield Ran.current
    finally:
        Ran.current = before


@contextmanager
def in_place_of_a_refusal() -> Iterator[None]:
    """What runs in this block does so because the named backend has refused, as it must."""
    before = counts()
    try:
        yield
    finally:
        if Ran.current is not None:
            Ran.current.instead += counts() - before
