"""Functions of a process group as operators, which traced calls put into their graph: see ``_graphs/operators.py``.

Their arguments are those of the function, groups by name. All ranks must trace the same calls in the same order. The
operators have an order, too: a compiler could reorder independent calls, not alike on every rank.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from .._caches import latent_formats
from .._core.autograd import forward_only, with_grad, without_autocast
from .._core.problems import FP8_DTYPES
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from ._peers import Grid, Peers, grid_of, grid_with, peers_of

P = ParamSpec("P")
R = TypeVar("R")
Values = dict[str, Any]  # of arguments


def traceable(
    shape: Callable[[Values], tuple[Any, ...]], of_mesh: bool = False
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Registers an operator for a function that returns an output, with ``return_lse`` the pair of it and its LSE.

    Eager calls go to the function. If a tensor requires a gradient, results get a backward that raises.

    Args:
        shape: of the output.
        of_mesh: whether the group may be a mesh of two dimensions.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters
        defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
        names, operator = tuple(parameters), function.__name__
        arguments = operators.Arguments(get_type_hints(function) | {"group": list[str]}, places=())
        function = without_autocast(function)

        def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            values = arguments.found(args)  # places of results follow, all None
            values["group"] = _with_names(values["group"])
            result: Any = function(**values)  # type: ignore[call-arg]
            return operators.new_results(result, values["return_lse"], None, None)

        def fake(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            args = tuple(vars(given).values())
            values, x = arguments.found(args), args[0]
            size = shape(values)
            dtype = values.get("o_dtype") or (torch.bfloat16 if x.dtype in FP8_DTYPES else x.dtype)
            lse_size = size[:-1] if values["return_lse"] else (0,)
            return x.new_empty(size, dtype=dtype), x.new_empty(lse_size, dtype=torch.float32)

        operators.define(operator, arguments.schema, run, fake)
        _keep_order(operator)

        def traced(*args: Any, **kwargs: Any) -> Any:
            values: Values = {**defaults, **dict(zip(names, args)), **kwargs}
            if len(args) > len(names) or len(values) != len(names):
                raise TypeError(f"{operator}() has the parameters {', '.join(names)}; given are {', '.join(values)}.")
            values["group"] = _names(grid_of(values["group"]) if of_mesh else peers_of(values["group"]))
            return operators.call(operator, arguments.given(values), values["return_lse"])

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            result: Any
            if is_traced() or have_own_dispatch(*args):
                result = traced(*args, **kwargs)
                return result
            inputs = with_grad((*args, *kwargs.values())) if torch.is_grad_enabled() else []
            if not inputs:
                return function(*args, **kwargs)
            with torch.no_grad():
                result = function(*args, **kwargs)
            return forward_only(result, (), *inputs)

        return call

    return decorate


def like_queries(values: Values) -> tuple[Any, ...]:
    """The shape of q, with the head dimension of v."""
    v = values["v"]
    is_quantized = latent_formats.is_quantized(v, values.get("kv_format"))
    return (*values["q"].shape[:-1], latent_formats.VALUES if is_quantized else v.shape[-1])


def own_heads(values: Values) -> tuple[Any, ...]:
    """The shape of out, with the heads that a rank gets."""
    *rows, heads, dim = values["out"].shape
    world = _group(values["group"][0]).size() if values["scatter_heads"] else 1
    return (*rows, heads // world, dim)


def _names(of: Grid | Peers) -> list[str]:
    groups = [of] if isinstance(of, Peers) else [peers for peers in (of.outer, of.inner) if peers is not None]
    return [peers.group.group_name for peers in groups]


def _with_names(names: list[str]) -> Any:
    """A group, or for two names the grid of a mesh."""
    groups = [_group(name) for name in names]
    if len(groups) == 1:
        return groups[0]
    return grid_with(*map(peers_of, groups))


def _group(name: Any) -> dist.ProcessGroup:
    return distributed_c10d._resolve_process_group(name)


def _keep_order(operator: str) -> None:
    """Where torch can: graphs pass a token from one of these operators to the next."""
    register = getattr(operators._library, "_register_effectful_op", None)
    if register is not None:
        from torch._library.effects import EffectType

        for form in ("", "_forward_only"):
            register(f"cutlass_kernels::{operator}{form}", EffectType.ORDERED)
