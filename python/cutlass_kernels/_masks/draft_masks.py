"""Masks of draft tokens (speculative decoding) as the custom masks that ``attention()`` takes.

A draft mask covers the last keys of a request, those of its draft tokens; a row sees all keys before them. Lengths stay
on the device, and sizes follow from shapes and bounds, so a CUDA graph can capture this.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core import index_vectors
from .._core.tracing import is_traced


def custom_mask(
    mask: Any, cu_seqlens_q: torch.Tensor | None, seq_lens: torch.Tensor, rows: int, most_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of all keys, uint8, and the first byte of each request, int32 ``[batch + 1]``.

    ``mask`` holds a row of bits for each query row, ``[..., row, bytes]``, bit c for draft token c of its request: rows
    of ``cu_seqlens_q``, or ``rows`` of each request. A request has at most ``rows`` rows and ``most_keys`` keys.
    """
    packed = _rows_of_bytes(mask, rows)
    device, batch = packed.device, seq_lens.numel()
    size = -(-rows * most_keys // 32) * 4  # bytes of a request, whole words
    if batch * size > index_vectors.INT32_MAX:
        raise ValueError(
            f"mask of {batch} requests of {rows} rows and up to {most_keys} keys takes {batch * size} bytes, more than "
            "int32 offsets reach: pass a smaller max_seq_len, or mask=None for causal drafts."
        )
    row = torch.arange(packed.size(0), device=device)
    if cu_seqlens_q is None:
        owner = row // rows
        first, count = owner * rows, torch.full_like(owner, rows)
        inside = owner < batch
    else:
        longest = max(cu_seqlens_q.diff().tolist(), default=0) if cu_seqlens_q.is_cpu and not is_traced() else 0
        if longest > rows:
            raise ValueError(
                f"a request has {longest} draft tokens, but rows of mask, or the bound of query lengths, allow for "
                f"{rows}: a row needs a bit for each."
            )
        ends = cu_seqlens_q.to(device, torch.int64)
        owner = torch.searchsorted(ends[1:], row, right=True)
        inside = owner < batch  # not behind the last request
        owner = owner.clamp(max=batch - 1)
        first, count = ends[owner], ends[owner + 1] - ends[owner]
    kv_len = seq_lens.to(device, torch.int64)[owner].clamp(max=most_keys)
    draft = torch.arange(rows, device=device)
    seen = (packed[:, draft // 8] >> (draft % 8).to(torch.uint8)) & 1
    key = (kv_len - count).unsqueeze(1) + draft  # [query rows, draft tokens]
    hidden = (seen == 0) & (draft < count.unsqueeze(1)) & (key >= 0) & inside.unsqueeze(1)
    bit = ((row - first) * kv_len).unsqueeze(1) + key
    # A sum of different powers of two sets their bits.
    word = torch.where(hidden, (owner * (size // 4)).unsqueeze(1) + bit // 32, 0)
    power = torch.where(hidden, torch.ones_like(bit) << bit % 32, 0).to(torch.int32)
    words = torch.zeros(max(batch * size // 4, 1), dtype=torch.int32, device=device)
    words.scatter_add_(0, word.flatten(), power.flatten())
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device) * size
    return words.bitwise_not_().view(torch.uint8), offsets


def _rows_of_bytes(mask: Any, rows: int) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.dtype not in index_vectors.INTEGERS or mask.dim() < 2:
        shown = f"{tuple(mask.shape)} {mask.dtype}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(
            f"mask is {shown}: pass packed bits, uint16 [batch, q_len, 2 * ceil(q_len / 32)], or with q_cu_seq_lens "
            "[rows, 2 * ceil(q_len / 32)]."
        )
    packed = mask.contiguous().view(torch.uint8).flatten(0, -2)
    if packed.size(1) * 8 < rows:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}, {packed.size(1) * 8} bits per row, but requests have up to {rows} "
            "draft tokens: a row needs a bit for each."
        )
    return packed
