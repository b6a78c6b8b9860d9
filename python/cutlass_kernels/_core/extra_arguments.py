"""What public calls take beyond their signatures, as FlashInfer's callers pass it.

Keywords by other names, arguments by position, and arguments that nothing here serves.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

# Positional arguments of single_prefill_with_kv_cache behind q, k and v: the documented order, and FlashInfer's newer
# one, which has the scales in front.
_MASKS = ("custom_mask", "packed_custom_mask", "causal", "kv_layout", "pos_encoding_mode")
_NUMBERS = ("sm_scale", "window_left", "logits_soft_cap", "rope_scale", "rope_theta")
_ORDER = (*_MASKS, "allow_fp16_qk_reduction", *_NUMBERS)
_SCALES = ("scale_q", "scale_k", "scale_v", "o_dtype")
_LAST = ("backend", "return_lse", "kv_cache_sf", "k_scale", "v_scale")
_NEWER_ORDER = (*_SCALES, *_MASKS, "use_fp16_qk_reduction", *_NUMBERS, *_LAST)


def spellings(head_dim_vo_at: int | None = None, **aliases: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a method accept keywords by a second name, and ``head_dim_vo`` by position. Type checkers see its own
    signature, which has the documented names alone.

    ``aliases`` maps the other name to the parameter's. ``head_dim_vo_at`` is the position (without self) where some
    callers pass an integer ``head_dim_vo`` before all that follows.
    """

    others = frozenset(aliases)

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> R:
            at = head_dim_vo_at
            if at is not None and len(args) > at and args[at] is not None and _is_integer(args[at]):
                if "head_dim_vo" in kwargs:
                    raise TypeError("head_dim_vo is given twice, by position and by keyword.")
                kwargs["head_dim_vo"] = operator.index(args[at])
                args = (*args[:at], *args[at + 1 :])
            if not others.isdisjoint(kwargs):
                for other in others.intersection(kwargs):
                    name = aliases[other]
                    if name in kwargs:
                        raise TypeError(f"{name} and {other} are two names of one argument: give one of them.")
                    kwargs[name] = kwargs.pop(other)
            return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python or numpy; a tensor is a mask, and would have to be read back."""
    if isinstance(value, (bool, torch.Tensor)):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def run_scales(
    args: tuple[Any, ...], named: tuple[str, ...], given: dict[str, Any], return_lse: bool
) -> tuple[tuple[Any, Any, Any], bool]:
    """Sorts the positional arguments behind the tensors of run(): ``((q_scale, k_scale, v_scale), return_lse)``.

    Three tensors are the dequantization scales of q, k and v; anything else follows ``named``.
    """
    if len(args) == 3 and all(isinstance(x, torch.Tensor) for x in args):
        named = ("q_scale", "k_scale", "v_scale")
    elif len(args) > len(named):
        raise TypeError(
            f"run() takes at most {', '.join(named)} behind the tensors, or three tensors (scale_q, scale_k, scale_v); "
            f"{len(args)} positional arguments were given."
        )
    for name, value in zip(named, args):
        if name == "return_lse":
            return_lse = value
        elif given.get(name) is not None:
            raise TypeError(f"{name} is given twice, by position and by keyword.")
        else:
            given[name] = value
    if not isinstance(return_lse, bool):  # a scale in the wrong place, which bool() might read from the device
        raise TypeError(f"return_lse is {type(return_lse).__name__}, not a bool: pass True or False.")
    return (given.get("q_scale"), given.get("k_scale"), given.get("v_scale")), return_lse


def single_prefill_positions(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of single_prefill_with_kv_cache by name, from those by position behind q, k and v and those by
    keyword, of which None and ``...`` are not given.

    TypeError for too many positions, or for an argument that is given by position and by keyword.
    """
    order = _NEWER_ORDER if _has_scales(args) else _ORDER
    if len(args) > len(order):
        raise TypeError(
            f"single_prefill_with_kv_cache() takes from 3 to {3 + len(order)} positional arguments, but "
            f"{3 + len(args)} were given: pass the others by keyword."
        )
    given = {name: value for name, value in keywords.items() if value is not None and value is not ...}
    for name, value in zip(order, args):
        if name in given:
            raise TypeError(
                f"single_prefill_with_kv_cache() got multiple values for argument {name!r}, by position and by "
                "keyword: give it once."
            )
        given[name] = value
    return given


def _has_scales(args: tuple[Any, ...]) -> bool:
    """Whether positional arguments behind q, k and v begin with scales, and not with a mask.

    The first one decides, if it is a tensor: scales are floating, masks are not. Else a floating tensor among the
    other scales does, or an ``o_dtype`` or a mask where the documented order has neither tensors nor dtypes.
    """
    if isinstance(args[0], torch.Tensor):
        return args[0].is_floating_point()
    scales, behind = args[1:3], args[3:6]
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in scales) or any(
        isinstance(x, (torch.Tensor, torch.dtype)) for x in behind
    )


def refuse_others(owner: Any, given: dict[str, Any], known: frozenset[str]) -> None:
    """TypeError for a keyword of ``owner.run()`` that is not ``known``, which names the caller's class."""
    for name in given:  # one by one: PyTorch 2.11 cannot trace a difference of sets
        if name not in known:
            raise TypeError(
                f"{type(owner).__name__}.run() got an unexpected keyword argument {name!r}: masks and scales of logits "
                "are arguments of plan()."
            )


def unsupported(owner: str, remedy: str, **arguments: Any) -> None:
    """NotImplementedError where one of ``arguments`` is set."""
    for name, value in arguments.items():
        if value is not None and value is not False and value != {}:
            shown = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(f"{owner} does not serve {name}={shown}: {remedy}")
