"""Compares what a plug-in overrides and calls with the engine's own signatures."""

from __future__ import annotations

import inspect
from typing import Any


def overridden(ours: type, theirs: type) -> list[str]:
    """Functions of ``ours`` and its bases below ``theirs`` that replace one of ``theirs``."""
    own = [base for base in ours.__mro__ if issubclass(base, theirs) and base is not theirs]
    names = {
        name for base in own for name in vars(base) if getattr(theirs, name, None) is not getattr(object, name, None)
    }
    return sorted(name for name in names if callable(getattr(ours, name)) and name not in ("__module__", "__class__"))


def assert_same_parameters(name: str, ours: Any, theirs: Any) -> None:
    """The same names in the same order with the same defaults; ``ours`` may take more, which have defaults."""
    mine, wanted = (list(inspect.signature(x).parameters.values()) for x in (ours, theirs))
    for place, parameter in enumerate(wanted):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            assert parameter.kind in [x.kind for x in mine], f"{name}: {parameter} is missing"
            continue
        assert place < len(mine) and mine[place].name == parameter.name, f"{name}: parameter {place} is not {parameter}"
        both = (mine[place].default, parameter.default)
        assert both[0] == both[1] or parameter.default is parameter.empty, f"{name}: {parameter} has default {both[0]}"
    more = [x for x in mine[len(wanted) :] if x.default is x.empty and x.kind == x.POSITIONAL_OR_KEYWORD]
    assert not more, f"{name} needs {more}, which the engine does not pass"


def assert_takes(function: Any, *args: Any, **kwargs: Any) -> None:
    """A call of the engine's that a plug-in makes."""
    inspect.signature(function).bind(*args, **kwargs)
