"""Attention of Hugging Face transformers (5.17 and newer) computed by this library.

    from cutlass_kernels.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())

It serves at inference what ``sdpa`` serves: padded batches, every cache, windows, chunks, packed sequences, encoders
and cross attention, and beyond that soft caps and sinks. PyTorch computes training, additive masks and position biases.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.nn import functional

from .._attend import plan_free
from .._core.errors import PerformanceWarning, warn
from .._core.native import PER_THREAD_STREAM
from .._core.tracing import is_captured, is_traced
from . import _key_ranges
from ._key_ranges import Kind

NAME = "cutlass_kernels"
_KEPT = "_cutlass_kernels_rows"  # attribute of key ranges


def register(name: str = NAME) -> str:
    """Makes ``attn_implementation=name`` known to transformers, and returns the name.

    Raises:
        ImportError: transformers is not installed, or older than 5.17.

    Examples:
        >>> model.set_attn_implementation(register())
        >>> model.generate(**tokenizer(["Hello", "Good morning"], padding=True, return_tensors="pt"))
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from ._transformers_masks import mask

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
    return name


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q, k, v are ``[batch, heads, tokens, dim]``, the output ``[batch, tokens, heads, dim]``.

    Nothing is read back from the device, and keys are not copied. Rows that see no key have output 0.

    Args:
        module: its ``is_causal`` holds where ``is_causal`` is None. Without a mask, query rows stand at the last keys.
        attention_mask: None; what the mask function returned; a bool mask ``[batch or 1, heads or 1, rows or 1,
            keys]``, True where a row sees a key; or one of numbers, which are added to the logits.
        sliding_window: W without a mask: rows see W keys to the left, their own among them; not causal rows as many to
            the right. A mask holds the window already.
        more: unless padding or positions made a bool mask, ``cu_seq_lens_q`` and ``cu_seq_lens_k`` (int
            ``[sequences + 1]``) with ``max_length_q`` and ``max_length_k`` are those of sequences in one row of the
            batch.

    Raises:
        ValueError: a mask whose shape or dtype makes no sense.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    reach = -1 if sliding_window is None else sliding_window - 1
    kind = Kind(causal, reach, -1 if causal else reach)
    scale = query.size(-1) ** -0.5 if scaling is None else scaling
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.size(0) != key.size(0):  # learned queries, the same for all requests
        query = query.expand(key.size(0), -1, -1, -1)
    reason = _why_torch(attention_mask, position_bias, dropout, query, key, value, s_aux)
    if reason:
        if not is_traced():
            _warn_of_torch(reason)
        out = _attend_by_torch(query, key, value, attention_mask, kind, scale, softcap, s_aux, position_bias, dropout)
        return out, None
    sinks = None if s_aux is None else s_aux.detach().reshape(-1).float()
    is_plain = attention_mask is None or attention_mask.dtype == torch.int32
    if is_plain and more.get("cu_seq_lens_q") is not None and query.size(0) == 1:
        if attention_mask is not None:
            kind = _key_ranges.read(attention_mask, 1).kind
        options = dict(logits_soft_cap=softcap, sm_scale=scale, sinks=sinks)
        return _packed(query, key, value, kind, more, options), None
    compute = _operator if is_traced() else _attend
    out = compute(query, key, value, attention_mask, *kind[:3], scale, softcap, sinks)
    return out, None


def _why_torch(
    mask: torch.Tensor | None, bias: torch.Tensor | None, dropout: float, *tensors: torch.Tensor | None
) -> str:
    """Why kernels cannot compute a call; empty where they can."""
    if dropout > 0.0 or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)):
        return "kernels compute neither gradients nor dropout. For inference: model.eval() and torch.inference_mode()"
    if bias is not None:
        return "kernels add no position bias to the logits"
    if mask is not None and mask.is_floating_point():
        return "kernels do not add masks of numbers to the logits. Pass a bool mask, True where a row sees a key"
    if mask is not None and mask.dtype == torch.bool and mask.size(1) > 1:
        return "kernels take one mask for all heads"
    return ""


@functools.lru_cache(8)
def _warn_of_torch(reason: str) -> None:
    """Once for each reason."""
    warn(f"attn_implementation='{NAME}' computes this model's attention with PyTorch: {reason}.", PerformanceWarning)


def _attend_by_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kind: Kind,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
    dropout: float,
) -> torch.Tensor:
    """Training, additive masks, masks that differ between heads: kernels compute no gradients, no dropout, and no masks
    but of bits for all heads. q, k, v are ``[batch, heads, tokens, dim]``, the output ``[batch, tokens, heads, dim]``.

    ``kind`` is the mask where ``mask`` is None. Without soft cap and sinks this is
    ``torch.nn.functional.scaled_dot_product_attention``, which has neither.
    """
    rows, keys, group = query.size(2), key.size(2), query.size(1) // key.size(1)
    key, value = (x if group == 1 else x.repeat_interleave(group, 1) for x in (key, value))
    mask = _dense(mask, kind, rows, keys, query)
    if bias is not None:
        bias = bias[..., :keys].to(query.dtype)
        lowest = torch.finfo(query.dtype).min
        if mask is None:
            mask = bias
        else:
            mask = torch.where(mask, bias, lowest) if mask.dtype == torch.bool else mask + bias
    if not softcap and sinks is None:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
        return out.transpose(1, 2).contiguous()
    logits = scale * (query @ key.transpose(2, 3)).float()
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    lse = logits.logsumexp(-1, keepdim=True)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().view(-1, 1, 1))
    weights = (logits - lse).exp().nan_to_num(0.0).to(value.dtype)  # NaN: a row that sees no key
    return (functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()


def _dense(mask: torch.Tensor | None, kind: Kind, rows: int, keys: int, query: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        is_full = kind == Kind() or (kind == Kind(causal=True) and rows == 1)
        return None if is_full else _key_ranges.pattern(kind, rows, keys, query.device)
    if mask.dtype == torch.bool:
        return mask[..., :keys]
    if mask.is_floating_point():
        return mask[..., :keys].to(query.dtype)
    return _key_ranges.to_dense(_key_ranges.read(mask, query.size(0)), rows, keys)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    *,
    keeps_rows: bool = True,
) -> torch.Tensor:
    """One call of ``attention()``, which takes a cache ``[B, H, T, D]`` as it is.

    With key ranges it is ``[rows, H, D]``, with a row stride of D and a head stride of T * D: request b begins at row
    b * H * T, and its other heads lie between its keys and those of the next request.
    """
    batch, _, rows, _ = query.shape
    q = query.transpose(1, 2)
    if batch > 1 and rows > 1 and q.stride(0) != rows * q.stride(1):
        q = q.contiguous()  # rows of requests follow one another
    k, v, options = key, value, dict[str, Any](causal=causal, window=(left, right), kv_layout="HND")
    if mask is not None and mask.dtype == torch.bool:
        bits, indptr = _key_ranges.to_bits(mask, batch, rows, key.size(2))
        options = dict(packed_custom_mask=bits, mask_indptr=indptr, kv_layout="HND")
    elif mask is not None:
        k, v, step = _as_rows(key, value)
        (causal, left, right, chunk_size), first, length = _ranges_of_rows(mask, batch, step, keeps_rows)
        options = dict(causal=causal, window=(left, right), chunk_size=chunk_size)
        options |= dict(cu_seqlens_k=first, seqused_k=length, max_seqlen_k=key.size(2))
    out = plan_free.attention(q, k, v, logits_soft_cap=softcap, sm_scale=scale, sinks=sinks, **options)
    assert isinstance(out, torch.Tensor)
    return out


def _ranges_of_rows(mask: torch.Tensor, batch: int, step: int, keeps: bool) -> _key_ranges.Ranges:
    """Key ranges whose first keys are rows of the cache. All layers read the same: they are kept with the mask.

    Not in a compiled model or a graph, whose memory must not outlive it; nor with a mask that has its own storage: its
    ranges are views of it, and both would live forever.
    """
    state = None
    if keeps and mask._is_view() and not (mask.is_inference() or is_captured(mask)):
        state = (step, mask._version, *_stream(mask))
    kept = getattr(mask, _KEPT, None)
    if kept is not None and kept[0] == state:
        return kept[1]
    ranges = _key_ranges.read(mask, batch)
    if batch > 1 and step:
        starts = torch.arange(0, (batch + 1) * step, step, dtype=torch.int32, device=mask.device)
        ranges = ranges._replace(first=ranges.first + starts)
    if state is not None:
        setattr(mask, _KEPT, (state, ranges))
    return ranges


def _stream(x: torch.Tensor) -> tuple[int, int]:
    """What a kept tensor is ready on: a stream, and the thread where the stream is each thread's own."""
    if not x.is_cuda:
        return 0, 0
    stream = torch.cuda.current_stream(x.device).cuda_stream
    return stream, threading.get_ident() if stream == PER_THREAD_STREAM else 0


def _as_rows(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Keys and values ``[rows, H, D]``, and how many rows lie between the first of two requests."""
    step = _step(key)
    if step is None or step != _step(value):
        key, value = key.contiguous(), value.contiguous()
        step = _step(key)
    assert step is not None
    return _rows(key, step), _rows(value, step), step


def _rows(x: torch.Tensor, step: int) -> torch.Tensor:
    batch, heads, tokens, dim = x.shape
    strides = x.stride()
    return x.as_strided(((batch - 1) * step + tokens, heads, dim), (_row_stride(x), strides[1], strides[3]))


def _row_stride(x: torch.Tensor) -> int:
    """The stride of tokens; a single token has any, so that of requests."""
    return x.stride(0) if x.size(2) == 1 and x.size(0) > 1 else x.stride(2)


def _step(x: torch.Tensor) -> int | None:
    stride = _row_stride(x)
    if x.size(0) == 1 or x.stride(0) == 0:
        return 0
    return None if stride <= 0 or x.stride(0) % stride else x.stride(0) // stride


def _packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kind: Kind,
    more: dict[str, Any],
    options: dict[str, Any],
) -> torch.Tensor:
    """Sequences that follow one another in the only row of a batch."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    indptr = more["cu_seq_lens_q"].to(torch.int32)
    kv_indptr = more.get("cu_seq_lens_k")
    options |= dict(causal=kind.causal, window=(kind.left, kind.right), chunk_size=kind.chunk_size)
    options |= dict(cu_seqlens_q=indptr, cu_seqlens_k=indptr if kv_indptr is None else kv_indptr.to(torch.int32))
    for name, most in (("max_seqlen_q", more.get("max_length_q")), ("max_seqlen_k", more.get("max_length_k"))):
        options[name] = most if isinstance(most, int) else None
    out = plan_free.attention(q, k, v, **options)
    assert isinstance(out, torch.Tensor)
    return out.unsqueeze(0)


_OPERATOR = f"{NAME}::attend_dense"
_SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, SymInt left, SymInt right, float scale, "
    "float? softcap, Tensor? sinks) -> Tensor"
)


@torch.library.custom_op(_OPERATOR, mutates_args=(), schema=_SCHEMA)
def _operator(*args: Any) -> torch.Tensor:
    """``_attend`` in a graph, which then holds no views of caches that a compiler might copy."""
    return _attend(*args, keeps_rows=False).contiguous()


@_operator.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> torch.Tensor:
    return query.new_empty(query.size(0), query.size(2), query.size(1), value.size(3))
