"""Attention in which every query row has keys of its own, ``kv_indices_per_token``: checks, and the reference.

For kernels each row is a request of one row, whose list of slots stands in the place of a page table.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._compute import reference
from .._core import call_table, checks, hints
from .._core.call_table import Call
from .._core.problems import FP8_DTYPES, Logits, Output, Problem, RaggedKv
from .._core.tracing import is_traced
from . import latent_parts

# What else says which keys there are, or which of them a row sees. Its value without effect.
_NAMES = ["page_table", "kv_indptr", "kv_indices", "kv_last_page_len", "cu_seqlens_q", "cu_seqlens_k", "seqused_q"]
_NAMES += ["seqused_k", "kv_shard", "packed_custom_mask", "mask_indptr", "alibi_slopes"]
_OTHERS: dict[str, Any] = dict.fromkeys(_NAMES) | dict(causal=False, chunk_size=0, window=(-1, -1))
_ELEMENTS = 1 << 24  # of keys that are gathered at a time


# --- checks ------------------------------------------------------------------------------------------------------


def are_given(call: Call) -> bool:
    """Whether rows have lists. ValueError for an argument of lists without them, or one that contradicts them."""
    if call.kv_indices_per_token is None:
        for name in ("topk_length", "max_logits"):
            if getattr(call, name) is not None:
                raise ValueError(f"{name} is given without kv_indices_per_token, the keys of each row: pass both.")
        return False
    for name, without in _OTHERS.items():
        value = getattr(call, name)
        if value is without:
            continue
        if name == "window":
            value = call_table.window(value)
        if isinstance(value, torch.Tensor) or value != without:
            raise ValueError(
                f"{name}={hints.shown(value)} is given with kv_indices_per_token, which alone says what a row sees: "
                f"leave {name} out."
            )
    return True


def checked(call: Call, batch: int, num_kv_heads: int) -> Call:
    """The call with lists, lengths and factors per row, as kernels take them. ``batch`` is that of its factors."""
    q = call.q
    rows, num_qo_heads = math.prod(q.shape[:-2]), q.size(-2)
    indices = _indices(call.kv_indices_per_token, rows, num_kv_heads, q.device)
    max_logits = call.max_logits
    if max_logits is not None:
        max_logits = checks.output(max_logits, (rows, num_qo_heads), torch.float32, q.device, name="max_logits")
        max_logits = max_logits if max_logits.is_contiguous() else q.new_empty(max_logits.shape, dtype=torch.float32)
    per_row = rows // max(batch, 1)
    return call._replace(
        kv_indices_per_token=indices,
        topk_length=_lengths(call.topk_length, rows, batch, indices.size(2), q.device),
        max_logits=max_logits,
        max_seqlen_q=None,  # each row is a request of one row and K keys at most
        max_seqlen_k=None,
        q_descale=_of_rows(call.q_descale, per_row),
        k_descale=_of_rows(call.k_descale, per_row),
        v_descale=_of_rows(call.v_descale, per_row),
    )


def _indices(x: Any, rows: int, num_kv_heads: int, device: torch.device) -> torch.Tensor:
    checks.tensors(kv_indices_per_token=x)
    if x.dim() != 3 or tuple(x.shape[:2]) != (rows, num_kv_heads) or x.dtype != torch.int32:
        raise ValueError(
            f"kv_indices_per_token has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor "
            f"[{rows}, {num_kv_heads}, K]: query rows, key heads, keys per row."
        )
    checks.same_device(device, kv_indices_per_token=x)
    # Kernels read lists of consecutive indices, whose places in the tensor are numbers of 31 bits.
    readable = x.stride(2) == 1 and x.stride(0) >= x.size(2) and rows * x.stride(0) < 2**31
    return x if readable or x.numel() == 0 else x.contiguous()


def _lengths(x: Any, rows: int, batch: int, width: int, device: torch.device) -> torch.Tensor | None:
    if x is None:
        return None
    checks.tensors(topk_length=x)
    if x.dim() != 1 or x.numel() not in (rows, batch) or x.dtype != torch.int32:
        requests = f", or [{batch}], one per request" if batch != rows else ""
        raise ValueError(
            f"topk_length has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor [{rows}], one per "
            f"query row{requests}."
        )
    checks.same_device(device, topk_length=x)
    if not (x.is_cuda or is_traced()):
        wrong = (x < 0) | (x > width)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            raise ValueError(
                f"topk_length[{at}]={int(x[at])} must lie between 0 and {width}, the number of "
                "kv_indices_per_token per row."
            )
    return (x if x.numel() == rows else _repeated(x, rows // batch)).contiguous()


def _of_rows(factor: Any, per_row: int) -> Any:
    """Factors ``[B, heads]`` of requests as those of their rows."""
    if not isinstance(factor, torch.Tensor) or factor.dim() < 2 or factor.size(0) == 1 or per_row == 1:
        return factor
    return _repeated(factor, per_row)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.unsqueeze(1).expand(-1, times, *x.shape[1:]).flatten(0, 1)


# --- the reference -----------------------------------------------------------------------------------------------


def compute(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_rope: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Computes rows ``[rows, heads, dim]`` with PyTorch, some at a time. ``k`` and ``v`` are in NHD.

    Heads of all these rows become heads of one row, as each has keys of its own.
    """
    caches = [x if x.dim() == 4 else x.unsqueeze(1) for x in (k, v, k_rope) if x is not None]
    rows, num_qo_heads, _ = q.shape
    indices, logits = call.kv_indices_per_token, call.max_logits
    assert indices is not None and call.sm_scale is not None
    _, num_kv_heads, width = indices.shape
    factors = [_factor(x, rows, num_qo_heads) for x in (call.q_descale, call.k_descale, call.v_descale)]
    step = max(1, _ELEMENTS // max(num_kv_heads * width * latent_parts.head_dim(k, k_rope), 1))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        count = min(step, rows - first)
        keys, values, hidden = _gathered(call, caches, indices[some], some)
        of_q, of_k, of_v = (x if isinstance(x, float) else x[some].flatten() for x in factors)
        scale = Logits(call.sm_scale, call.logits_soft_cap or 0.0)
        scale.sinks = None if call.sinks is None else call.sinks.repeat(count)
        for factor in (of_q, of_k):
            if isinstance(factor, float):
                scale.sm_scale = scale.sm_scale * factor
            else:
                scale.head_scale = factor if scale.head_scale is None else scale.head_scale * factor
        result = out.new_empty((1, count * num_qo_heads, out.size(2)))
        output = Output(result, lse[some].view(1, -1), None, of_v, sinks_in_lse=not call.flash_mla_lse)
        output.max_logits = None if logits is None else logits[some].view(1, -1)
        reference.compute(
            Problem(q[some].reshape(1, -1, q.size(2)), RaggedKv(keys, values, hidden=hidden), scale, output)
        )
        out[some] = result.view(out[some].shape)


def _gathered(
    call: Call, caches: list[torch.Tensor], indices: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values ``[K, rows * heads, dim]`` of some rows, and which of them are none: ``[K, rows * heads]``."""
    pages, page_size, heads, _ = caches[0].shape
    slots = indices.to(torch.int64)
    seen = (slots >= 0) & (slots < pages * page_size)
    if call.topk_length is not None:
        seen &= torch.arange(indices.size(2), device=indices.device) < call.topk_length[rows, None, None]
    slots = slots.masked_fill(~seen, 0)
    page, offset = slots // max(page_size, 1), slots % max(page_size, 1)
    head = torch.arange(heads, device=indices.device)[:, None]

    def of(x: torch.Tensor) -> torch.Tensor:
        if pages * page_size == 0:
            return x.new_zeros((*indices.shape, x.size(3))).flatten(0, 1).transpose(0, 1)
        bits = x.view(torch.uint8) if x.dtype in FP8_DTYPES else x  # copying needs no arithmetic
        found = bits[page, offset, head].masked_fill_(~seen[..., None], 0).view(x.dtype)
        return found.flatten(0, 1).transpose(0, 1)

    k, v, *rope = caches
    keys = latent_parts.joined(of(k), of(rope[0])) if rope else of(k)
    values = keys[..., : v.size(3)] if latent_parts.starts_with(k, v) else of(v)
    return keys, values, ~seen.flatten(0, 1).t()


def _factor(value: Any, rows: int, num_qo_heads: int) -> Any:
    """A descale: a number, or a factor of each row and query head."""
    if not isinstance(value, torch.Tensor):
        return 1.0 if value is None else float(value)
    value = value.reshape(-1, value.size(-1))
    return value.repeat_interleave(num_qo_heads // value.size(1), 1).expand(rows, num_qo_heads)
