"""Keys that are spread over ranks: which of them a rank holds, and which of these a row sees.

Block i of a request's keys is rank ``i % world``'s, which stores its blocks in order.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.problems import Mask
from .mask_packing import pack_mask

Shard = tuple[int, int, int]  # world, rank, block


def check(shard: Any, seqused_k: Any, other_masks: bool) -> None:
    """ValueError where it is not a shard, or the other arguments of a call do not serve one."""
    if not isinstance(shard, tuple) or len(shard) != 3 or any(not isinstance(n, int) for n in shard):
        raise ValueError(f"kv_shard={shard!r} must be (world, rank, block), three numbers.")
    world, rank, block = shard
    if not 0 <= rank < world or block < 1 or world * block >= 1 << 30:
        raise ValueError(
            f"kv_shard={shard!r}: rank must lie between 0 and world - 1, and world * block between 1 and 2^30 - 1."
        )
    if world > 1 and seqused_k is None:
        raise ValueError(f"kv_shard={shard!r} without seqused_k: pass the keys of each request on all ranks together.")
    if world > 1 and other_masks:
        raise ValueError(f"kv_shard={shard!r} cannot be used with a custom mask or ALiBi: other masks can.")


def keys_held(shard: Shard, keys: int) -> int:
    """Of the first ``keys`` keys of a request."""
    world, rank, block = shard
    rounds, rest = divmod(keys, world * block)
    return rounds * block + min(max(rest - rank * block, 0), block)


def mask_of(shard: Shard, mask: Mask, rows: int, total: int, device: torch.device) -> Mask:
    """A mask without bits as bits over the keys of this rank, of a request of ``total`` keys on all ranks."""
    world, rank, block = shard
    here = torch.arange(keys_held(shard, total), device=device)
    keys = (here.div(block, rounding_mode="floor") * world + rank) * block + here % block
    position = torch.arange(rows, device=device)[:, None] + total - rows
    visible = (keys <= position) if mask.causal else torch.ones(rows, keys.numel(), dtype=torch.bool, device=device)
    if mask.window_right >= 0:
        visible = visible & (keys <= position + mask.window_right)
    if mask.window_left >= 0:
        visible = visible & (keys >= position - mask.window_left)
    if mask.chunk_size:
        first = position.clamp(min=0).div(mask.chunk_size, rounding_mode="floor") * mask.chunk_size
        visible = visible & (keys >= first) & (keys < first + mask.chunk_size) & (position >= 0)
    return Mask(bits=pack_mask(visible, [rows], [keys.numel()])[0])
