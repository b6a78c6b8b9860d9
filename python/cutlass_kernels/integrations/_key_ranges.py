"""Which keys the rows of a dense batch see, in one small tensor, and the same as bits or as a dense mask.

Models hand a mask from the function that makes it to the function that computes attention, and accept nothing but
four-dimensional tensors. Key ranges are such a tensor: int32 ``[1, kind + 1, 2, batch + 1]``, expanded along the second
dimension, so that its size names a ``Kind``. ``[0, 0, 0, b]`` is the first key of request b, ``[0, 0, 1, b]`` its KV
length. The last query row stands at the last key of the range.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch

from ..quantization import packbits


class Kind(NamedTuple):
    """The mask of rows within a range, as ``attention()`` takes it; -1 is no limit, and 0 no chunks."""

    causal: bool = False
    left: int = -1
    right: int = -1
    chunk_size: int = 0


_kinds: list[Kind] = []
_lock = threading.Lock()


class Ranges(NamedTuple):
    kind: Kind
    first: torch.Tensor  # int32 [batch + 1], the last of which is not used
    length: torch.Tensor  # int32 [batch]


def write(
    kind: Kind, batch: int, first: int | torch.Tensor, length: int | torch.Tensor, device: torch.device | str
) -> torch.Tensor:
    """Key ranges of a batch. ``first`` and ``length`` are numbers, or integer tensors ``[batch]`` or ``[]``."""
    ranges = torch.zeros(2, batch + 1, dtype=torch.int32, device=device)
    for row, value in zip(ranges, (first, length)):
        if isinstance(value, torch.Tensor):
            row[:batch].copy_(value)
        elif value:
            row.fill_(value)
    return ranges.expand(_number(kind) + 1, -1, -1).unsqueeze(0)


def read(mask: torch.Tensor, batch: int) -> Ranges:
    """What ``write`` has written; ValueError for any other mask of integers."""
    if mask.dtype != torch.int32 or mask.shape[2:] != (2, batch + 1) or not 1 <= mask.size(1) <= len(_kinds):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and dtype {mask.dtype}, which is no mask of {batch} "
            "sequences: pass bool (True where a row sees a key), or a float mask, which is added to the logits."
        )
    return Ranges(_kinds[mask.size(1) - 1], mask[0, 0, 0], mask[0, 0, 1, :batch])


def to_dense(ranges: Ranges, rows: int, keys: int) -> torch.Tensor:
    """The mask as bool ``[batch, 1, rows, keys]``."""
    kind, first, length = ranges.kind, ranges.first[:-1, None, None], ranges.length[:, None, None]
    key = torch.arange(keys, device=first.device) - first
    row = torch.arange(rows, device=first.device)[:, None] + length - rows
    seen = (key >= 0) & (key < length)
    return (seen & _pattern(kind, row, key)).unsqueeze(1)


def pattern(kind: Kind, rows: int, keys: int, device: torch.device) -> torch.Tensor:
    """The mask of ``rows`` that stand at the last of ``keys``, as bool ``[rows, keys]``."""
    row = torch.arange(rows, device=device)[:, None] + keys - rows
    return _pattern(kind, row, torch.arange(keys, device=device)[None])


def _pattern(kind: Kind, row: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    seen = torch.ones_like(key - row, dtype=torch.bool)
    if kind.causal:
        seen &= key <= row
    if kind.left >= 0:
        seen &= key >= row - kind.left
    if kind.right >= 0:
        seen &= key <= row + kind.right
    if kind.chunk_size:
        seen &= key // kind.chunk_size == row // kind.chunk_size
    return seen


def to_bits(mask: torch.Tensor, batch: int, rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``packed_custom_mask`` and ``mask_indptr`` of a bool mask ``[batch or 1, 1, rows or 1, keys]``, without reading
    anything back. A mask of more keys is cut, as transformers' own attention does it."""
    if mask.size(-1) < keys or mask.size(0) not in (1, batch) or mask.size(2) not in (1, rows):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but there are {batch} sequences of {rows} query rows over "
            f"{keys} keys: it must be [{batch}, 1, {rows}, {keys}]."
        )
    flat = mask[..., :keys].expand(batch, 1, rows, keys).reshape(batch, rows * keys)
    missing = -flat.size(1) % 32  # each request starts on a word
    if missing:
        flat = torch.cat([flat, flat.new_zeros(batch, missing)], 1)
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=mask.device) * (flat.size(1) // 8)
    return packbits(flat.view(-1), "little"), indptr


def _number(kind: Kind) -> int:
    with _lock:
        if kind not in _kinds:
            _kinds.append(kind)
        return _kinds.index(kind)
