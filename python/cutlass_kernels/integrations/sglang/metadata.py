"""The batch of a step, as a layer's attention reads it. Lengths and tables are device data, and nothing is planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass
class Metadata:
    """Requests of a step. The maxima are bounds: of a captured step, those of every replay."""

    starts: torch.Tensor  # int32 [B + 1], query rows
    lens: torch.Tensor  # int32 [B], keys in the cache; of a tree, those before it
    page_table: torch.Tensor  # int32 [B, pages]
    max_query_len: int
    max_seq_len: int
    window_table: torch.Tensor | None = None  # of layers with a window, where they have a pool of their own
    tree_bits: torch.Tensor | None = None  # packed masks of the draft tokens of a verification, [B, bytes]
    tree_starts: torch.Tensor | None = None  # int32 [B + 1], bytes


@dataclass
class Shape:
    """What a step computes: ``rows`` query rows of each request, or ``rows_of`` them, over ``lens`` keys."""

    rows: int
    lens: torch.Tensor
    rows_of: torch.Tensor | None = None
    is_tree: bool = False


def tree_bytes(drafts: int) -> int:
    """Bytes of the mask of a request's draft tokens: whole words, as kernels read them."""
    return -(-drafts * drafts // 32) * 4


def pack_trees(mask: torch.Tensor, lens: torch.Tensor, drafts: int) -> torch.Tensor:
    """Masks of draft tokens among themselves, uint8 ``[B, tree_bytes]``, a bit per token and token.

    SGLang's mask holds ``[drafts, lens[b] + drafts]`` cells of every request, one after the other. All draft tokens see
    all keys before them, so that the last columns say everything. Shapes depend on no length: a graph can record it.
    """
    width = lens.long() + drafts
    begins = torch.cumsum(width * drafts, 0) - width * drafts
    token = torch.arange(drafts, device=mask.device)
    cell = begins[:, None, None] + token[:, None] * width[:, None, None] + lens.long()[:, None, None] + token
    bits = mask.view(-1)[cell.clamp_(max=max(mask.numel() - 1, 0)).flatten(1)].to(torch.uint8)
    bits = torch.nn.functional.pad(bits, (0, -bits.size(1) % 32)).unflatten(1, (-1, 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits * weights).sum(-1, dtype=torch.uint8)


class Buffers:
    """Where captured graphs read the tables of a step, for any number of requests up to ``most``."""

    def __init__(self, most: int, pages: int, drafts: int, has_windows: bool, device: Any) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.lens, self.table = ints(most), ints(most, pages)
        self.window_table = ints(most, pages) if has_windows else None
        self.tree_bits = torch.zeros(most * tree_bytes(drafts), dtype=torch.uint8, device=device)
        self.starts: dict[tuple[int, int], torch.Tensor] = {}  # by rows of a request: one tensor for every size

    def put(self, metadata: Metadata) -> Metadata:
        """The same step in the buffers; columns behind its tables keep what they held."""
        lens, table = _put(self.lens, metadata.lens), _put(self.table, metadata.page_table)
        held = replace(metadata, lens=lens, page_table=table)
        if metadata.window_table is not None and self.window_table is not None:
            held.window_table = _put(self.window_table, metadata.window_table)
        if metadata.tree_bits is not None:
            # Whole, as its indptr says: a graph may verify fewer draft tokens than there are at most.
            bits = metadata.tree_bits
            held.tree_bits = self.tree_bits[: bits.numel()].view_as(bits).copy_(bits)
        return held


def _put(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    place = buffer[: x.size(0)]
    (place if x.dim() == 1 else place[:, : x.size(1)]).copy_(x)
    return place
