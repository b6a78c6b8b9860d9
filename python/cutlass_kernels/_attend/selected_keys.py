"""Attention in which every query row has keys of its own, ``kv_indices_per_token``: checks, and the reference.

For kernels each row is a request of one row, whose list of slots stands in the place of a page table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .._caches import latent_formats
from .._caches.latent_formats import Format
from .._compute import reference
from .._core import call_table, checks, hints
from .._core.autograd import without_autocast
from .._core.call_table import Call
from .._core.problems import FP8_DTYPES, Logits, Output, Problem, RaggedKv
from .._core.tracing import is_traced
from . import latent_parts, quantized_caches

# What else says which keys there are, or which of them a row sees. Its value without effect.
_NAMES = ["page_table", "kv_indptr", "kv_indices", "kv_last_page_len", "cu_seqlens_q", "cu_seqlens_k", "seqused_q"]
_NAMES += ["seqused_k", "kv_shard", "packed_custom_mask", "mask_indptr", "alibi_slopes"]
_OTHERS: dict[str, Any] = dict.fromkeys(_NAMES) | dict(causal=False, chunk_size=0, window=(-1, -1))
_OF_EXTRA = ("extra_k", "extra_indices_per_token", "extra_topk_length")
_BYTES = 1 << 26  # of keys, as they are read, that are gathered at a time


# --- checks ------------------------------------------------------------------------------------------------------


def are_given(call: Call) -> bool:
    """Whether rows have lists. ValueError for an argument of lists without them, or one that contradicts them."""
    if call.kv_indices_per_token is None:
        for name in ("topk_length", "max_logits", *_OF_EXTRA):
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
    for name, needed in zip(_OF_EXTRA, (_OF_EXTRA[1], _OF_EXTRA[0], _OF_EXTRA[0])):
        if getattr(call, name) is not None and getattr(call, needed) is None:
            raise ValueError(f"{name} is given without {needed}: a second cache needs both, or neither.")
    return True


def checked(call: Call, batch: int, num_kv_heads: int) -> Call:
    """The call with lists, lengths and factors per row, as kernels take them. ``batch`` is that of its factors."""
    q = call.q
    rows, num_qo_heads = math.prod(q.shape[:-2]), q.size(-2)
    indices = _indices("kv_indices_per_token", call.kv_indices_per_token, rows, num_kv_heads, q.device)
    if call.extra_k is not None:
        call = _with_extra(call, rows, batch, num_kv_heads)
    max_logits = call.max_logits
    if max_logits is not None:
        max_logits = checks.output(max_logits, (rows, num_qo_heads), torch.float32, q.device, name="max_logits")
        max_logits = max_logits if max_logits.is_contiguous() else q.new_empty(max_logits.shape, dtype=torch.float32)
    per_row = rows // max(batch, 1)
    return call._replace(
        kv_indices_per_token=indices,
        topk_length=_lengths(call, "topk_length", rows, batch, indices),
        max_logits=max_logits,
        max_seqlen_q=None,  # each row is a request of one row and K keys at most
        max_seqlen_k=None,
        q_descale=_of_rows(call.q_descale, per_row),
        k_descale=_of_rows(call.k_descale, per_row),
        v_descale=_of_rows(call.v_descale, per_row),
    )


def _with_extra(call: Call, rows: int, batch: int, num_kv_heads: int) -> Call:
    """The call with the second cache and its lists as the first are."""
    k, device = call.extra_k, call.q.device
    assert k is not None
    checks.same_device(device, extra_k=k)
    if call.k_rope is not None:
        raise ValueError("extra_k is given with k_rope: pass keys with all columns in one tensor, k.")
    if not latent_parts.starts_with(call.k, call.v):
        raise ValueError(
            "extra_k is given, but v is not k in the same memory: values of a second cache are its first columns, as "
            "those of k are. Pass v=k or a view of its first columns."
        )
    cache = checks.last_dim_contiguous("extra_k", k.transpose(-3, -2) if call.kv_layout == "HND" else k)
    dim = latent_parts.head_dim(call.q, call.q_rope)
    kind = quantized_caches.kind_of(call, "extra_k")
    if kind is not None:
        quantized_caches.check_columns("extra_k", k, kind, dim)
        cache = latent_formats.as_bytes("extra_k", cache, kind)
    else:
        of, wanted = ("q", call.q.dtype) if quantized_caches.are_given(call) else ("k", call.k.dtype)
        if k.dtype != wanted:
            raise ValueError(
                f"extra_k has dtype {k.dtype} and {of} {wanted}: they must be equal, or extra_k a quantized latent "
                "cache."
            )
        if k.size(-1) != dim:
            raise ValueError(f"extra_k has shape {tuple(k.shape)} and q head_dim {dim}: they must be equal.")
    if cache.size(-2) != num_kv_heads:
        raise ValueError(
            f"extra_k has shape {tuple(k.shape)} with kv_layout={call.kv_layout!r}, {cache.size(-2)} heads, and k "
            f"{num_kv_heads}: they must be equal."
        )
    indices = _indices("extra_indices_per_token", call.extra_indices_per_token, rows, num_kv_heads, device)
    return call._replace(
        extra_k=cache.transpose(-3, -2) if call.kv_layout == "HND" else cache,
        extra_indices_per_token=indices,
        extra_topk_length=_lengths(call, "extra_topk_length", rows, batch, indices),
    )


def _indices(name: str, x: Any, rows: int, num_kv_heads: int, device: torch.device) -> torch.Tensor:
    checks.tensors(**{name: x})
    if x.dim() != 3 or tuple(x.shape[:2]) != (rows, num_kv_heads) or x.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor "
            f"[{rows}, {num_kv_heads}, K]: query rows, key heads, keys per row."
        )
    checks.same_device(device, **{name: x})
    # Kernels read lists of consecutive indices, whose places in the tensor are numbers of 31 bits.
    readable = x.stride(2) == 1 and x.stride(0) >= x.size(2) and rows * x.stride(0) < 2**31
    return x if readable or x.numel() == 0 else x.contiguous()


def _lengths(call: Call, name: str, rows: int, batch: int, indices: torch.Tensor) -> torch.Tensor | None:
    x, width = getattr(call, name), indices.size(2)
    if x is None:
        return None
    checks.tensors(**{name: x})
    if x.dim() != 1 or x.numel() not in (rows, batch) or x.dtype != torch.int32:
        requests = f", or [{batch}], one per request" if batch != rows else ""
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor [{rows}], one per "
            f"query row{requests}."
        )
    checks.same_device(call.q.device, **{name: x})
    if not (x.is_cuda or is_traced()):
        wrong = (x < 0) | (x > width)
        if bool(wrong.any()):
            at = int(wrong.nonzero()[0])
            of = "kv_indices_per_token" if name == "topk_length" else "extra_indices_per_token"
            raise ValueError(f"{name}[{at}]={int(x[at])} must lie between 0 and {width}, the number of {of} per row.")
    return (x if x.numel() == rows else _repeated(x, rows // batch)).contiguous()


def _of_rows(factor: Any, per_row: int) -> Any:
    """Factors ``[B, heads]`` of requests as those of their rows."""
    if not isinstance(factor, torch.Tensor) or factor.dim() < 2 or factor.size(0) == 1 or per_row == 1:
        return factor
    return _repeated(factor, per_row)


def _repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    return x.unsqueeze(1).expand(-1, times, *x.shape[1:]).flatten(0, 1)


# --- the reference -----------------------------------------------------------------------------------------------


@without_autocast
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
    rows, num_qo_heads, dim = q.shape
    logits = call.max_logits
    assert call.sm_scale is not None
    scopes = _scopes(call, k, v, k_rope)
    factors = [_factor(x, rows, num_qo_heads) for x in (call.q_descale, call.k_descale, call.v_descale)]
    step = max(1, _BYTES // max(sum(x.bytes_per_row(dim) for x in scopes), 1))
    for first in range(0, rows, step):
        some = slice(first, first + step)
        count = min(step, rows - first)
        keys, values, hidden = _joined([scope.read(some, dim) for scope in scopes])
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


_Read = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class _Scope:
    """A cache with lists of its slots, ``[rows, heads, K]``: what is stored of a token lies in ``caches``."""

    caches: list[torch.Tensor]  # [pages, page_size, heads, dim]
    indices: torch.Tensor
    lengths: torch.Tensor | None
    values_dim: int
    kind: Format | None = None
    has_rope: bool = False
    v: torch.Tensor | None = None  # where values are no columns of the keys

    def bytes_per_row(self, dim: int) -> int:
        """Bytes of the keys of one row, as ``read()`` returns them."""
        dtype = self.caches[0].dtype if self.kind is None else latent_formats.NUMBERS
        return self.indices.size(1) * self.indices.size(2) * dim * dtype.itemsize

    def read(self, rows: slice, dim: int) -> _Read:
        """Keys and values ``[K, rows * heads, dim]`` of some rows, and which of them are none."""
        pages, page_size, heads, _ = self.caches[0].shape
        slots = self.indices[rows].to(torch.int64)
        seen = (slots >= 0) & (slots < pages * page_size)
        if self.lengths is not None:
            seen &= torch.arange(slots.size(2), device=slots.device) < self.lengths[rows, None, None]
        slots = slots.masked_fill(~seen, 0)
        page, offset = slots // max(page_size, 1), slots % max(page_size, 1)
        head = torch.arange(heads, device=slots.device)[:, None]

        def of(x: torch.Tensor) -> torch.Tensor:
            if pages * page_size == 0:
                return x.new_zeros((*slots.shape, x.size(3))).flatten(0, 1).transpose(0, 1)
            bits = x.view(torch.uint8) if x.dtype in FP8_DTYPES else x  # copying needs no arithmetic
            found = bits[page, offset, head].masked_fill_(~seen[..., None], 0).view(x.dtype)
            return found.flatten(0, 1).transpose(0, 1)

        found = [of(x) for x in self.caches]
        if self.kind is not None:
            keys = latent_formats.decoded(found, self.kind)[..., :dim]
        else:
            keys = latent_parts.joined(*found) if self.has_rope else found[0]
        values = keys[..., : self.values_dim] if self.v is None else of(self.v)
        return keys, values, ~seen.flatten(0, 1).t()


def _scopes(call: Call, k: torch.Tensor, v: torch.Tensor, k_rope: torch.Tensor | None) -> list[_Scope]:
    """The caches of a call, and their lists."""

    def in_pages(x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 4 else x.unsqueeze(1)

    def caches(x: torch.Tensor, kind: Format | None) -> list[torch.Tensor]:
        return [in_pages(x)] if kind is None else [in_pages(part) for part in latent_formats.parts(x, kind)]

    columns, indices = quantized_caches.values_dim(call), call.kv_indices_per_token
    kind = quantized_caches.kind_of(call)
    assert indices is not None
    first = _Scope(caches(k, kind), indices, call.topk_length, columns, kind)
    if k_rope is not None:
        first.caches.append(in_pages(k_rope))
        first.has_rope = True
    if kind is None and not latent_parts.starts_with(k, v):
        first.v = in_pages(v)
    if call.extra_k is None or call.extra_indices_per_token is None:
        return [first]
    extra = call.extra_k.transpose(-3, -2) if call.kv_layout == "HND" else call.extra_k
    kind = quantized_caches.kind_of(call, "extra_k")
    lists = call.extra_indices_per_token, call.extra_topk_length
    return [first, _Scope(caches(extra, kind), *lists, columns, kind)]


def _joined(found: list[_Read]) -> _Read:
    """Keys of all caches, one behind the other."""
    if len(found) == 1:
        return found[0]
    if found[0][0].dtype != found[1][0].dtype or found[0][0].dtype in FP8_DTYPES:
        found = [(keys.float(), values.float(), hidden) for keys, values, hidden in found]
    keys, values, hidden = (torch.cat(x) for x in zip(*found))
    return keys, values, hidden


def _factor(value: Any, rows: int, num_qo_heads: int) -> Any:
    """A descale: a number, or a factor of each row and query head."""
    if not isinstance(value, torch.Tensor):
        return 1.0 if value is None else float(value)
    value = value.reshape(-1, value.size(-1))
    return value.repeat_interleave(num_qo_heads // value.size(1), 1).expand(rows, num_qo_heads)
