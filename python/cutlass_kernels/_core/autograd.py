"""What autograd must know: attention has no backward, and kernels write to tensors. And how to turn autocast off.

A result that depends on a tensor with ``requires_grad`` gets a backward that raises. Without it, autograd would treat
the result as a constant, and a model would train without its attention. Operators of traced calls (``_graphs``) do the
same. A tensor that a kernel writes to gets a new version. Without it, autograd would use the new contents for the
backward of an operation that saved the old ones.

Public functions compute the same under ``torch.autocast``, which rounds products and refuses to join other types.
Kernels do not see it. What PyTorch computes in their place runs with it off: the reference, merging, and whatever joins
or rotates tensors. So a call that a kernel serves pays nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import is_grad_enabled
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from .errors import warn
from .tracing import is_traced

P = ParamSpec("P")
R = TypeVar("R")

_DEVICES = ("cpu", "cuda")
_is_any_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled

NO_BACKWARD = (
    "cutlass_kernels computes attention forward only, so it has no backward: train with "
    "torch.nn.functional.scaled_dot_product_attention or flash-attn. For inference, use torch.no_grad()."
)


def needs_grad(q: Any, k: Any, v: Any, out: Any, lse: Any, sinks: Any, *scales: Any) -> bool:
    """Whether a tensor among the arguments of a call requires a gradient. ``k`` may be a pair of caches.

    Ask only where ``is_grad_enabled()``: this takes 0.3 us, as torch needs 0.07 us to read one ``requires_grad``.
    """
    try:
        if type(k) is tuple:
            k, v = k
        if q.requires_grad or k.requires_grad or (v is not None and v.requires_grad):
            return True
        if out is not None and out.requires_grad:
            return True
        if lse is not None and lse.requires_grad:
            return True
        if sinks is not None and sinks.requires_grad:
            return True
    except (AttributeError, ValueError):  # a list of tensors, or a wrong argument: later checks raise
        return requires_grad((q, k, v, out, lse, sinks, scales))
    for x in scales:  # noqa: SIM110, a generator takes 0.2 us more
        if x is not None and type(x) is not float and requires_grad(x):
            return True
    return False


def requires_grad(x: Any) -> bool:
    """Whether ``x`` is a tensor that requires a gradient, or a tuple or list with one."""
    if isinstance(x, (tuple, list)):
        return any(map(requires_grad, x))
    return isinstance(x, torch.Tensor) and x.requires_grad


def wants_grad(*values: Any) -> bool:
    """Whether autograd records a call with these tensors."""
    return is_grad_enabled() and requires_grad(values)


def with_grad(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors with ``requires_grad`` in ``values``, tuples and lists included."""
    tensors = []
    for x in values:
        if isinstance(x, (tuple, list)):
            tensors += with_grad(x)
        elif isinstance(x, torch.Tensor) and x.requires_grad:
            tensors.append(x)
    return tensors


class _ForwardOnly(torch.autograd.Function):
    """Connects a computed tensor to the inputs that it depends on."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(computed)  # apply() returns the same object
        return computed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(NO_BACKWARD)


def forward_only(result: Any, places: tuple[torch.Tensor | None, ...], *inputs: Any) -> Any:
    """Gives ``result`` a backward that raises, and so ``places``, the caller's tensors that it was written to.

    ``inputs`` are the arguments of the call. Views of a place follow the place.
    """
    tensors = with_grad(inputs)
    for place in places:
        if place is not None:
            _ForwardOnly.apply(place, *tensors)
    if isinstance(result, tuple):
        return tuple(_connected(x, tensors) for x in result)
    return _connected(result, tensors)


def _connected(x: Any, tensors: list[torch.Tensor]) -> Any:
    if x.requires_grad:
        return x
    # autograd refuses to write to a view that was made without grad. Detached, it is none.
    return _ForwardOnly.apply(x.detach() if x._is_view() else x, *tensors)


def forward_only_as_a_whole(function: Callable[P, R]) -> Callable[P, R]:
    """For functions that merge results of several calls. They run without autograd: merge kernels refuse tensors that
    require gradients."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> R:
        given = (*args, *kwargs.values())
        if is_traced() or not is_grad_enabled() or not any(map(requires_grad, given)):
            return function(*args, **kwargs)
        with torch.no_grad():
            result = function(*args, **kwargs)
        connected: R = forward_only(result, (kwargs.get("out"),), *given)
        return connected

    return call


def without_grad(keys: Any, values: Any, function: str = "append_paged_kv_cache", *scales: Any) -> tuple[Any, Any]:
    """Detaches ``keys`` and ``values`` that ``function`` appends to a cache. Warns where they or ``scales`` require
    gradients: a cache with gradients would keep the autograd graph of every step alive."""
    if not wants_grad(keys, values, scales):
        return keys, values
    if not is_traced():
        warn(
            f"{function}() got keys or values that require gradients, or scales that do, but a cache carries no "
            "gradients: for inference, use torch.no_grad().",
            UserWarning,
        )
    return keys.detach(), values.detach()


def written(*tensors: torch.Tensor | None) -> None:
    """Increments the versions of tensors that a kernel has written to: 0.2 us each."""
    for x in tensors:
        if x is not None:
            try:
                increment_version(x)
            except RuntimeError:  # torch 2.4 refuses inference tensors, which have no version
                if not x.is_inference():
                    raise


def without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Runs ``function`` with autocast off. Where it is off, a call takes 0.4 us more."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        # dynamo traces only the first of these two questions
        if not (any(map(torch.is_autocast_enabled, _DEVICES)) if is_dynamo_compiling() else _is_any_enabled()):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return call
