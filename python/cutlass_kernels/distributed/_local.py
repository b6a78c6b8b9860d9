"""What a rank holds of requests whose tokens are spread over ranks: how many of them, and which of those in a list."""

from __future__ import annotations

import torch

from .._core import checks, hints
from . import _shards

Lists = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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
    here = indices.long() - rank * block_size
    rounds = here.div(world * block_size, rounding_mode="floor")
    held = (here - rounds * (world * block_size) < block_size) & (indices >= 0)
    column = torch.arange(indices.size(-1), device=indices.device)
    if topk_length is not None:
        held &= column < _of_rows(topk_length, indices)
    own = (here - rounds * ((world - 1) * block_size)).masked_fill(~held, -1)
    if page_table is not None:
        own = _slots(own, indices, page_table, page_size, batch_indices)
    elif page_size is not None or batch_indices is not None:
        name = "batch_indices" if page_size is None else "page_size"
        raise ValueError(f"{name} is given without page_table, this rank's pages: pass both, or neither.")
    own = own.to(torch.int32)
    if not compact:
        return own
    # A permutation of each row: this rank's tokens from the left, the others from the right.
    held = own >= 0
    until = held.cumsum(-1)
    place = torch.where(held, until - 1, until + (indices.size(-1) - 1 - column))
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


def _of_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """``[rows]`` beside the lists."""
    return x.view(-1, *[1] * (indices.dim() - 1))


def _slots(
    local: torch.Tensor,
    indices: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int | None,
    batch_indices: torch.Tensor | None,
) -> torch.Tensor:
    """Slots of tokens, whose places among those of this rank are ``local``, or -1; -1 where the table has no page."""
    hints.tensors(page_table=page_table)
    if page_table.dim() != 2 or page_table.dtype != torch.int32:
        raise ValueError(
            f"page_table has shape {tuple(page_table.shape)} and dtype {page_table.dtype}: it must be an int32 tensor "
            "[B, M], this rank's pages of each request."
        )
    checks.same_device(indices.device, "indices is", page_table=page_table)
    if page_size is None:
        raise ValueError("page_table is given without page_size, the tokens of a page: pass both, or neither.")
    size = checks.page_size(page_size)
    rows, (requests, width) = indices.size(0), page_table.shape
    if batch_indices is not None:
        _check_rows("batch_indices", batch_indices, indices)
        request = batch_indices.long()
    else:
        if rows % max(requests, 1):
            raise ValueError(
                f"indices has {rows} rows and page_table {requests} requests, which cannot have equally many rows: "
                "pass batch_indices, the request of each row."
            )
        request = torch.arange(rows, device=indices.device) // max(rows // max(requests, 1), 1)
    if page_table.numel() == 0:
        return torch.full_like(local, -1)
    column = local.div(size, rounding_mode="floor")
    exists = (local >= 0) & (column < width) & _of_rows((request >= 0) & (request < requests), indices)
    request = _of_rows(request.clamp(0, requests - 1), indices)
    pages = page_table[request, column.clamp(0, width - 1)].long()
    return (local + (pages - column) * size).masked_fill(~(exists & (pages >= 0)), -1)
