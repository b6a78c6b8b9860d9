"""Attention by PyTorch with a dense mask: training, additive masks, masks that differ between heads.

Kernels compute no gradients, no dropout, and no masks but of bits for all heads.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from . import _key_ranges
from ._key_ranges import Kind


def attend(
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
    """q, k, v are ``[batch, heads, tokens, dim]``, the output ``[batch, tokens, heads, dim]``.

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
