"""Functions that compute a batch without a plan, as operators: see ``operators``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core.run_options import Result
from . import operators

_FUSED = (
    "Tensor[] qkv, str input_layout, SymInt max_q_len, SymInt max_kv_len, float[] factors, Tensor?[] scales, "
    "SymInt batch_size, Tensor cum_seq_lens_q, Tensor cum_seq_lens_kv, Tensor? block_tables, ScalarType o_dtype, "
    "Tensor? sinks, str? pos_encoding_mode, float logits_soft_cap, str mask_mode, SymInt window_left, "
    "SymInt chunked_attention_size, bool save_softmax_stats, float skip_softmax"
)
_SHARED_PREFIX = (
    "Tensor q, Tensor k_shared, Tensor v_shared, Tensor k_unique, Tensor v_unique, str kv_layout, float? sm_scale"
)


def fused(qkv: Any, scales: tuple[Any, Any], out: torch.Tensor | None, stats: bool, **args: Any) -> Result:
    """``trtllm_fmha_v2_prefill()`` in a graph. ``scales`` are bmm1_scale and bmm2_scale, ``args`` the operator's other
    arguments by name."""
    parts = [qkv] if isinstance(qkv, torch.Tensor) else [qkv[0], *_flat(qkv[1:])]
    factors, tensors = operators.split_scales(scales)
    every = {**args, "qkv": parts, "factors": factors, "scales": tensors, "save_softmax_stats": stats}
    return operators.call("fused", tuple([every[name] for name in _NAMES]), out, None, stats)


def _flat(parts: Sequence[Any]) -> list[torch.Tensor]:
    """The caches of a pair as two tensors."""
    return [x for part in parts for x in (part if isinstance(part, (tuple, list)) else [part])]


def shared_prefix(*args: Any) -> torch.Tensor:
    """``batch_decode_with_shared_prefix_padded_kv_cache()`` in a graph."""
    out: torch.Tensor = operators.call("shared_prefix", args, None, None, False)
    return out


# --- what graphs run ---------------------------------------------------------------------------------------------


def _fused(
    prefill: Callable[..., Any],
    parts: Sequence[torch.Tensor],
    input_layout: str,
    max_q_len: int,
    max_kv_len: int,
    factors: Sequence[float],
    scales: Sequence[torch.Tensor | None],
    batch_size: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    block_tables: torch.Tensor | None,
    o_dtype: torch.dtype,
    sinks: torch.Tensor | None,
    pos_encoding_mode: str | None,
    logits_soft_cap: float,
    mask_mode: str,
    window_left: int,
    chunked_attention_size: int,
    save_softmax_stats: bool,
    skip_softmax: float,
    out: torch.Tensor | None = None,
    _: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    qkv: Any = parts[0] if len(parts) == 1 else tuple(parts)
    if len(parts) == 3 and input_layout.startswith("Q_PAGED"):
        qkv = (parts[0], (parts[1], parts[2]))
    unread: Any = None  # workspace_buffer and seq_lens
    bmm1_scale, bmm2_scale = operators.join_scales(factors, scales)
    result = prefill(
        qkv,
        input_layout,
        unread,
        unread,
        max_q_len,
        max_kv_len,
        bmm1_scale,
        bmm2_scale,
        batch_size,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        block_tables,
        out,
        o_dtype,
        sinks,
        pos_encoding_mode,
        logits_soft_cap,
        mask_mode,
        window_left,
        chunked_attention_size,
        save_softmax_stats,
        skip_softmax,
    )
    return operators.new_results(result, parts[0], save_softmax_stats, out, None)


def _shared_prefix(
    decode: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    k_unique: torch.Tensor,
    v_unique: torch.Tensor,
    kv_layout: str,
    sm_scale: float | None,
    *_: None,
) -> tuple[torch.Tensor, torch.Tensor]:
    result = decode(q, k_shared, v_shared, k_unique, v_unique, kv_layout, sm_scale=sm_scale)
    return operators.new_results(result, q, False, None, None)


# --- what graphs are told ----------------------------------------------------------------------------------------


def _fake_fused(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = x.qkv[0]
    rows, heads, head_dim_vo = q.shape[0], q.shape[-2], x.qkv[-1].shape[-1]
    return (
        q.new_empty((rows, heads, head_dim_vo) if x.out is None else (0,), dtype=x.o_dtype),
        q.new_empty((rows, heads, 2) if x.save_softmax_stats else (0,), dtype=torch.float32),
    )


def _fake_shared_prefix(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.q.new_empty((*x.q.shape[:2], x.v_unique.shape[-1])), x.q.new_empty(0, dtype=torch.float32)


_NAMES = [argument.split()[1] for argument in _FUSED.split(", ")]


def define_fused(prefill: Callable[..., Any]) -> None:
    """Registers the operator of ``trtllm_fmha_v2_prefill``, which is ``prefill``."""
    operators.define("fused", _FUSED, functools.partial(_fused, prefill), _fake_fused)


def define_shared_prefix(decode: Callable[..., torch.Tensor]) -> None:
    """Registers the operator of ``batch_decode_with_shared_prefix_padded_kv_cache``, which is ``decode``."""
    operators.define("shared_prefix", _SHARED_PREFIX, functools.partial(_shared_prefix, decode), _fake_shared_prefix)
