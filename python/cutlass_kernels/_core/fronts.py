"""Makes the functions of other libraries from tables of their arguments.

A front has a table of arguments and, for each function, their order and which fields of ``Call`` have other names:

    class Arguments:
        q: torch.Tensor
        softmax_scale: float | None = None
        window_size: tuple[int, int] = (-1, -1)

    @front(Arguments, "q softmax_scale window_size", {"sm_scale": "softmax_scale", "window": (pair, "window_size")})
    def function(call, q):
        \"""The documentation.\"""
        return attend(call).view(q.shape)

This makes ``function(q, softmax_scale=None, window_size=(-1, -1))``.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter
from typing import Any

from . import call_table
from .call_table import Call

Function = Callable[..., Any]
EMPTY: Mapping[str, Any] = {}


def front(
    arguments: Any,
    order: str,
    fields: Mapping[str, Any] = EMPTY,
    tuples: Mapping[str, str] = EMPTY,
    constants: Mapping[str, Any] = EMPTY,
    into: Any = Call,
    run: Function | None = None,
    by_position: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]] | None = None,
) -> Callable[[Function], Function]:
    """Makes a function with these arguments, which calls the decorated one.

    The parameters of the decorated function say what it gets: an argument of that name, a tuple of ``tuples``, a
    constant, or as ``call`` the tuple of all fields of ``into``.

    Args:
        arguments: a class with a row for every argument: name, type and default. Or a list of classes: the first one
            that has a row for an argument counts.
        order: the names in the order of the function, "*" before keyword-only ones. ``name=value`` sets another
            default, ``name=`` removes it.
        fields: for a field whose argument has another name, that name. "a/b" is a, or b where a is None.
            ``(convert, name, ...)`` is what ``convert`` returns for these arguments, if the function has all of them.
        tuples: parameters of the decorated function that are tuples, and the names of what they hold.
        constants: values of fields and parameters that are no arguments.
        into: the NamedTuple whose fields ``call`` has.
        run: called instead of the decorated function, which then only has the documentation.
        by_position: for functions that accept two positional orders. It gets the positional arguments behind those
            without a default, and all others by name, where None or ``...`` is one that was left out. It returns the
            given ones by name.
    """

    tables = arguments if isinstance(arguments, list) else [arguments]

    def decorate(function: Function) -> Function:
        parameters, scope = [*_parameters(tables, order)], dict[str, Any]()
        for owner in (*tables, function):
            scope |= vars(sys.modules[owner.__module__])  # where types of arguments are known
        defaults = {x.name: x.default for x in parameters}
        values = into._field_defaults | constants | {f"of_{name}": x for name, x in defaults.items()}
        values |= {"body": run or function, "sort": by_position}
        together = {name: names.split() for name, names in tuples.items()} | {"call": into._fields}
        given = []
        for name in inspect.signature(run or function).parameters:
            of_fields = fields if name == "call" else EMPTY
            packed = [_field(x, of_fields.get(x, x), defaults, values) for x in together.get(name, ())]
            given.append(f"({', '.join(packed)},)" if packed else _field(name, name, defaults, values))
        source, lines = _source(parameters), [f"return _body({', '.join(given)})"]
        if by_position is not None:
            source, sorting = _sorted(function.__name__, defaults)
            lines = sorting + lines
        made = call_table.made(function.__name__, source, lines, values, scope)
        result = function.__annotations__["return"]
        made.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        made.__annotations__ = {x.name: x.annotation for x in parameters} | {"return": result}
        made.__module__, made.__doc__ = function.__module__, function.__doc__
        return made

    return decorate


def _parameters(tables: list[Any], order: str) -> Iterator[Parameter]:
    rows: dict[str, Any] = {}
    for table in reversed(tables):
        defaults = getattr(table, "_field_defaults", vars(table))
        rows |= {x: (kind, defaults.get(x, Parameter.empty)) for x, kind in table.__annotations__.items()}
    kind: Any = Parameter.POSITIONAL_OR_KEYWORD
    for word in order.split():
        name, is_changed, value = word.partition("=")
        if name == "*":
            kind = Parameter.KEYWORD_ONLY
            continue
        row, default = rows[name]
        if is_changed:
            default = ast.literal_eval(value) if value else Parameter.empty
        yield Parameter(name, kind, default=default, annotation=getattr(row, "__forward_arg__", row))


def _source(parameters: list[Parameter]) -> list[str]:
    words = [x.name if x.default is Parameter.empty else f"{x.name}=_of_{x.name}" for x in parameters]
    by_keyword = [i for i, x in enumerate(parameters) if x.kind is Parameter.KEYWORD_ONLY]
    return words if not by_keyword else [*words[: by_keyword[0]], "*", *words[by_keyword[0] :]]


def _sorted(name: str, defaults: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The parameters, as source, of a function that sorts arguments by position, and its lines that do."""
    before = ", ".join(x for x, default in defaults.items() if default is Parameter.empty)
    behind = {x: default for x, default in defaults.items() if default is not Parameter.empty}
    keywords = ", ".join(f"{x}={x}" for x in behind)
    lines = [f"if args: return {name}({before}, **_sort(args, dict({keywords})))"]
    lines += [f"if {x} is ...: {x} = _of_{x}" for x, default in behind.items() if default is not None]
    return [before, "*args", *(f"{x}={None if default is None else ...}" for x, default in behind.items())], lines


def _field(field: str, argument: Any, known: Mapping[str, Any], values: dict[str, Any]) -> str:
    """What a field is, as source."""
    if isinstance(argument, tuple):
        convert, *arguments = argument
        values[f"to_{field}"] = convert
        return f"_to_{field}({', '.join(arguments)})" if known.keys() >= {*arguments} else f"_{field}"
    found = [name for name in argument.split("/") if name in known]
    if not found:
        assert field in values, f"{field} is neither an argument nor a field with a default."
        return f"_{field}"
    return found[0] if len(found) == 1 else f"({found[1]} if {found[0]} is None else {found[0]})"
