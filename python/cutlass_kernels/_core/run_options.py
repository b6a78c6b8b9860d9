"""Arguments of plans and of runs, checked: sizes, options, and what run() is given besides tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from . import checks, hints
from .problems import MultiItem

P = ParamSpec("P")
R = TypeVar("R")
# What run() and its relatives return: out, or (out, lse) where the LSE is asked for. Any lets a type checker take the
# one or the other without a cast.
Result = torch.Tensor | Any


class Options(NamedTuple):
    """What a run may change without planning again."""

    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    fp16_qk_reduction: bool

    def replaced(self, field: str, value: Any) -> Options:
        """These with another value; themselves where it is the same one."""
        present = getattr(self, field)
        if type(value) is type(present) and type(value) in checks.PLAIN and value == present:
            return self
        return self._replace(**{field: value})


class Shape(NamedTuple):
    """Sizes and dtypes of a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    cast: torch.dtype | None = None  # dtype that q, k and v are converted to before the computation


@dataclass(slots=True)
class RunArgs:
    """Arguments that the run() of every wrapper has."""

    scales: tuple[Any, Any, Any]
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    lse_base: str = "log2"
    lse_layout: str = "NH"
    sinks: Any = None
    skip_softmax_factor: float = 0.0


def _remembered(function: Callable[P, R]) -> Callable[P, R]:
    """The results of a pure function for the latest numbers and names, of which True, 1 and 1.0 are different ones.
    Tensors may change, and while torch.compile traces, numbers may be symbols: for these the function is called."""
    known: Callable[..., R] = functools.lru_cache(maxsize=256, typed=True)(function)

    @functools.wraps(function)
    def call(*given: P.args, **nothing: P.kwargs) -> R:
        is_plain = not is_dynamo_compiling() and checks.PLAIN.issuperset(map(type, given))
        return known(*given) if is_plain else function(*given, **nothing)

    return call


@_remembered
def shape(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int | None,
    q_data_type: str | torch.dtype,
    kv_data_type: str | torch.dtype | None,
    o_data_type: str | torch.dtype | None,
) -> Shape:
    """Checked sizes and dtypes; RuntimeError for heads that do not divide, ValueError for others that do not fit."""
    num_qo_heads = checks.integer("num_qo_heads", num_qo_heads)
    num_kv_heads = checks.integer("num_kv_heads", num_kv_heads)
    head_dim_qk = checks.integer("head_dim_qk", head_dim_qk)
    checks.heads(num_qo_heads, num_kv_heads)
    q_dtype = checks.dtype(q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else checks.dtype(kv_data_type)
    o_dtype = checks.element_types(q_dtype, kv_dtype, None, o_data_type, "o_data_type")
    vo = head_dim_qk if head_dim_vo is None else checks.integer("head_dim_vo", head_dim_vo)
    if head_dim_qk <= 0 or vo <= 0:
        raise ValueError(f"head_dim_qk={head_dim_qk} and head_dim_vo={vo} must be positive.")
    return Shape(num_qo_heads, num_kv_heads, head_dim_qk, vo, q_dtype, kv_dtype, o_dtype)


@_remembered
def options(
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    fp16_qk_reduction: bool,
) -> Options:
    """Checked options, one object for equal numbers. KeyError for an unknown ``pos_encoding_mode``."""
    checks.rope(pos_encoding_mode, rope_scale, rope_theta)
    if sm_scale is not None:
        sm_scale = checks.sm_scale(sm_scale, 1)
    cap = checks.soft_cap(logits_soft_cap)
    return Options(
        checks.flag("causal", causal),
        pos_encoding_mode,
        checks.window(window_left),
        cap,
        sm_scale,
        rope_scale,
        rope_theta,
        bool(fp16_qk_reduction),
    )


def multi_item(prefix_len: Any, token_pos: Any, token_pos_len: int, max_item_len: Any) -> MultiItem | None:
    """The arguments of multi-item scoring, None where ``prefix_len_ptr`` is; ValueError where they are incomplete."""
    if prefix_len is None and token_pos is None and not token_pos_len and max_item_len is None:
        return None
    given = {
        "prefix_len_ptr": prefix_len,
        "token_pos_in_items_ptr": token_pos,
        "token_pos_in_items_len": token_pos_len or None,
        "max_item_len_ptr": max_item_len,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"multi-item scoring needs {', '.join(given)} together; {', '.join(missing)} is missing.")
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr"):
        hints.tensor(name, given[name])
    return MultiItem(prefix_len, token_pos, checks.integer("token_pos_in_items_len", token_pos_len), max_item_len)
