"""Signatures, for type checkers, of functions that return one tensor or two: ``signatures.pyi``.

tools/make_signatures.py makes it from the functions. Nothing reads it at run time: ``help()`` and ``inspect.signature``
show the functions' own signatures.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


class _Signatures:
    """Stands for every name of ``signatures.pyi``."""

    def __getattr__(self, name: str) -> Any:
        return self


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Signatures()


def typed_as(signature: Any) -> Callable[[Any], Any]:
    """Lets type checkers see ``signature`` in place of a function's own. The function is returned as it is."""
    return lambda function: function


def declares(implementation: Callable[..., Any]) -> Callable[[Any], Any]:
    """Puts ``implementation`` in the place of a function, under its name, signature and documentation.

    For an implementation that takes more than the documented signature. Pages made from the sources, ``help()`` and
    ``inspect.signature`` show the function. ``inspect.unwrap`` does not lead to it, as it has no body.
    """

    def decorate(function: Any) -> Any:
        declared: Any = functools.update_wrapper(implementation, function)
        declared.__signature__ = inspect.signature(function)
        del declared.__wrapped__
        return declared

    return decorate
