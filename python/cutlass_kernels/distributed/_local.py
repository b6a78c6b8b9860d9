"""What a rank holds of requests whose tokens are spread over ranks: how many of them, and which of those in a list."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._compute import kernels
from .._core import checks, hints, native
from . import _shards

Lists = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
MOST_OF_PERIOD = 1 << 30  # world * block_size, of the kernel


def dcp_local_lengths(
    lengths: torch.Tensor, rank: int | torch.Tensor, world: int, *, block_size: int = 1
) -> torch.Tensor:
    """Number of a request's first ``lengths`` tokens that a rank stores, if block i is on rank ``i % world``.

    Args:
        lengths: tokens, any integer dtype and shape, on any device. Nothing is read back.
        rank, world: a rank, or a tensor of ranks, and how many there are.
        block_size: consecutive tokens of a block, as of a page, or 1.

    Returns:
        Tokens of that rank, of the dtype and shape of lengths; 0 of negative lengths.

    Raises:
        TypeError: lengths that are no integers.

    Examples:
        >>> dcp_local_lengths(torch.tensor([9]), 0, 2, block_size=4)  # tokens 0 to 3, and 8
        tensor([5])
    """
    hints.tensors(lengths=lengths)
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths have dtype {lengths.dtype}: they are integers.")
    period, lengths = world * block_size, lengths.clamp(min=0)
    rounds = lengths.div(period, rounding_mode="floor")
    return rounds * block_size + (lengths - rounds * period - rank * block_size).clamp(0, block_size)


def dcp_local_indices(
    indices: torch.Tensor,
    rank: int,
    world: int,
    *,
    block_size: int = 1,
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    batch_indices: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    compact: bool = True,
) -> Lists:
    """Lists of selected tokens on all ranks as lists of those that a rank stores, for ``dcp_decode()``.

    Token ``g`` of a request lies on rank ``g // block_size % world``. Nothing is read back, and shapes depend on shapes
    alone: a CUDA graph can capture the call. Lists serve all layers with the same selection.

    Args:
        indices: int32 ``[rows, K]`` or ``[rows, Hkv, K]``: positions of tokens in their requests, such as an indexer
            selects. In any order; -1 and other negative numbers name none. Duplicates stay.
        rank, world: a rank, and how many there are.
        block_size: consecutive tokens of a block: vLLM's ``cp_kv_cache_interleave_size``, at most the page size there.
        page_table: int32 ``[B, M]``: pages of this rank's tokens of a request, in order. Without one, the result has
            places among this rank's tokens: for caches that are not paged, and for engines that number slots on all
            ranks together, as SGLang does.
        page_size: tokens of a page. Required with ``page_table``.
        batch_indices: int32 ``[rows]``: the request of each row, a row of ``page_table``. Rows of a request that does
            not exist, such as -1, are empty. Default: ``rows / B`` rows for each request, in order.
        topk_length: int32 ``[rows]``: only the leftmost so many of a row count.
        compact: whether this rank's tokens come first, in the order of ``indices``. A kernel then reads them alone, on
            average ``1 / world`` of the list. If not, they keep their places.

    Returns:
        int32, shaped as indices: slots of this rank's cache, ``page * page_size + offset``, and -1 for tokens of other
        ranks, and those that ``page_table`` has no page for. With ``compact`` the pair of it and int32 ``[rows]``, to
        pass as ``topk_length``: how many tokens of a row lie on this rank; with several heads, the most of a head.

    Raises:
        TypeError: an argument is no tensor, or no integer.
        ValueError: shapes, dtypes or devices that do not fit together; a rank that does not exist.

    Examples:
        >>> positions = torch.tensor([[7, 2, 5, -1]], dtype=torch.int32)  # of a row; pages of 2 tokens, 2 ranks
        >>> pages = torch.tensor([[3, 9]], dtype=torch.int32)  # rank 1 has tokens 1 and 3 in page 3, 5 and 7 in page 9
        >>> dcp_local_indices(positions, 1, 2, page_table=pages, page_size=2)
        (tensor([[19, 18, -1, -1]], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    _check_lists(indices, rank, world, block_size, topk_length)
    compact = checks.flag("compact", compact)
    pages = None
    if page_table is not None:
        pages = _Pages(page_table, _checked_size(indices, page_table, page_size, batch_indices), batch_indices)
    elif page_size is not None or batch_indices is not None:
        name = "batch_indices" if page_size is None else "page_size"
        raise ValueError(f"{name} is given without page_table, this rank's pages: pass both, or neither.")
    empty = indices.numel() == 0 or (pages is not None and pages.table.numel() == 0)
    if kernels.move(indices) and not empty and world * block_size < MOST_OF_PERIOD:
        return _by_kernel(indices, (rank, world, block_size), pages, topk_length, compact)
    own = _places(indices, rank, world, block_size, topk_length)
    own = (own if pages is None else pages.slots(own)).to(torch.int32)
    return _compacted(own) if compact else own


@dataclass(frozen=True)
class _Pages:
    """This rank's pages of each request, ``[B, M]``, and the request of each row, or None."""

    table: torch.Tensor
    size: int
    batch_indices: torch.Tensor | None

    def slots(self, places: torch.Tensor) -> torch.Tensor:
        """Slots of tokens by their places among those of this rank; -1 for -1, and where the table has no page."""
        rows, (requests, width) = places.size(0), self.table.shape
        if self.table.numel() == 0:
            return torch.full_like(places, -1)
        if self.batch_indices is not None:
            request = self.batch_indices.long()
        else:
            request = torch.arange(rows, device=places.device) // max(rows // requests, 1)
        column = places.div(self.size, rounding_mode="floor")
        exists = (places >= 0) & (column < width) & _of_rows((request >= 0) & (request < requests), places)
        request = _of_rows(request.clamp(0, requests - 1), places)
        pages = self.table[request, column.clamp(0, width - 1)].long()
        return (places + (pages - column) * self.size).masked_fill(~(exists & (pages >= 0)), -1)


def _by_kernel(
    indices: torch.Tensor,
    shard: tuple[int, int, int],
    pages: _Pages | None,
    topk_length: torch.Tensor | None,
    compact: bool,
) -> Lists:
    rows, *heads, width = indices.shape
    slots = torch.empty(indices.shape, dtype=torch.int32, device=indices.device)
    counts = slots.new_empty(rows) if compact else None
    table = batch_indices = None
    sizes = (0, 0, 0, 0)
    if pages is not None:
        table, batch_indices = pages.table, pages.batch_indices
        if table.stride(1) != 1 or table.stride(0) < table.size(1):
            table = table.contiguous()
        sizes = (table.size(1), table.stride(0), table.size(0), pages.size)
    read = [x if x is None else x.contiguous() for x in (indices, topk_length)]
    read += [table, batch_indices if batch_indices is None else batch_indices.contiguous()]
    addresses = (0 if x is None else x.data_ptr() for x in (*read, slots, counts))
    kernels.launch(native._C.find_local_slots, indices.device, rows, *(heads or [1]), width, *shard, *sizes, *addresses)
    return slots if counts is None else (slots, counts)


def _places(
    indices: torch.Tensor, rank: int, world: int, block_size: int, topk_length: torch.Tensor | None
) -> torch.Tensor:
    """Places of tokens among those of a rank, int64; -1 for what is not there."""
    here = indices.long() - rank * block_size
    rounds = here.div(world * block_size, rounding_mode="floor")
    held = (here - rounds * (world * block_size) < block_size) & (indices >= 0)
    if topk_length is not None:
        held &= torch.arange(indices.size(-1), device=indices.device) < _of_rows(topk_length, indices)
    return (here - rounds * ((world - 1) * block_size)).masked_fill(~held, -1)


def _compacted(own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists with this rank's tokens first, and their number by row.

    A permutation of each list: this rank's tokens from the left, the others from the right.
    """
    held = own >= 0
    until = held.cumsum(-1)
    last = own.size(-1) - 1
    place = torch.where(held, until - 1, until + last - torch.arange(last + 1, device=own.device))
    counts = held.sum(-1, dtype=torch.int32)
    return torch.empty_like(own).scatter_(-1, place, own), counts if counts.dim() == 1 else counts.amax(1)


def _check_lists(
    indices: torch.Tensor, rank: int, world: int, block_size: int, topk_length: torch.Tensor | None
) -> None:
    hints.tensors(indices=indices)
    if indices.dim() not in (2, 3) or indices.dtype != torch.int32:
        raise ValueError(
            f"indices has shape {tuple(indices.shape)} and dtype {indices.dtype}: it must be an int32 tensor [rows, K] "
            "or [rows, num_kv_heads, K]."
        )
    if not 0 <= checks.integer("rank", rank) < checks.integer("world", world):
        raise ValueError(f"rank={rank} must lie between 0 and world - 1, with world={world}.")
    _shards.check_block_size(block_size)
    if topk_length is not None:
        _check_rows("topk_length", topk_length, indices)


def _check_rows(name: str, x: torch.Tensor, indices: torch.Tensor) -> None:
    """Checks a number per row of the lists."""
    hints.tensors(**{name: x})
    if tuple(x.shape) != (indices.size(0),) or x.dtype != torch.int32:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}: it must be an int32 tensor [{indices.size(0)}], "
            "one per row of indices."
        )
    checks.same_device(indices.device, "indices is", **{name: x})


def _of_rows(x: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
    """``[rows]`` beside the lists."""
    return x.view(-1, *[1] * (lists.dim() - 1))


def _checked_size(
    indices: torch.Tensor, page_table: torch.Tensor, page_size: int | None, batch_indices: torch.Tensor | None
) -> int:
    """The page size, where the pages are those of a cache."""
    hints.tensors(page_table=page_table)
    if page_table.dim() != 2 or page_table.dtype != torch.int32:
        raise ValueError(
            f"page_table has shape {tuple(page_table.shape)} and dtype {page_table.dtype}: it must be an int32 tensor "
            "[B, M], this rank's pages of each request."
        )
    checks.same_device(indices.device, "indices is", page_table=page_table)
    if page_size is None:
        raise ValueError("page_table is given without page_size, the tokens of a page: pass both, or neither.")
    if batch_indices is not None:
        _check_rows("batch_indices", batch_indices, indices)
    elif indices.size(0) % max(page_table.size(0), 1):
        raise ValueError(
            f"indices has {indices.size(0)} rows and page_table {page_table.size(0)} requests, which cannot have "
            "equally many rows: pass batch_indices, the request of each row."
        )
    return checks.page_size(page_size)
