"""Page lists of block-sparse patterns: which pages of the keys each request, a block of rows, reads.

All of it is vectorised torch on the device of the pattern. Nothing here reads a value back.
"""

from __future__ import annotations

import math

import torch

from .._core.index_vectors import starts

_AT_ONCE = 1 << 24  # places of a list that are computed together: 16 bytes each for as long


def largest_page(*sizes: int) -> int:
    """The largest power of two that divides all ``sizes``. Zeros do not count."""
    common = math.gcd(*sizes)
    return common & -common or 1


def row_offsets(rows: int, block: int) -> torch.Tensor:
    """Where blocks of ``block`` rows begin, int32 ``[blocks + 1]`` on the CPU; the last block may be shorter."""
    return (torch.arange(-(-rows // block) + 1, dtype=torch.int32, device="cpu") * block).clamp_(max=rows)


def of_shorter_last_block(
    indptr: torch.Tensor, indices: torch.Tensor, blocks: int, pages: int, pages_of_last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A list of blocks of ``pages`` pages, of which block ``blocks - 1`` has fewer, as a list of pages.

    Returns the new offsets and page numbers, int32. The list has room for whole blocks: what lies behind its end
    is 0.
    """
    count = torch.where(indices == blocks - 1, pages_of_last, pages)
    ends = starts(count)
    page = torch.arange(pages, device=indices.device)
    place = torch.where(page < count[:, None], ends[:-1, None] + page, indices.numel() * pages)
    result = indices.new_zeros(indices.numel() * pages + 1, dtype=torch.int32)
    numbers = indices[:, None].to(torch.int32) * pages + page.to(torch.int32)
    result.scatter_(0, place.flatten(), numbers.flatten())
    return ends[indptr.to(torch.int64)].to(torch.int32), result[:-1]


def mask_by_request(mask: torch.Tensor, indptr: torch.Tensor, widths: torch.Tensor | None = None) -> torch.Tensor:
    """Masks of blocks ``[nnz, R, C]`` as masks of requests: row-major ``[R, keys]`` each, flattened and concatenated.
    Those of entries in front of ``indptr[0]`` and from ``indptr[-1]`` on come last.

    ``widths`` ``[nnz]`` are the columns of each block that count; None: all. With widths, the size of the result
    depends on data, so that a mask on the GPU waits for it.
    """
    count, rows, columns = mask.shape
    starts = torch.cat([indptr.to(device=mask.device, dtype=torch.int64), indptr.new_full((1,), count).to(mask.device)])
    first = starts[0].clone()
    starts[:-1] -= first
    entry = (torch.arange(count, device=mask.device) - first) % max(count, 1)
    request = torch.searchsorted(starts, entry, right=True) - 1  # of a slice, Inductor does not compile it
    begin, end = starts[:-1][request], starts[1:][request]
    row = torch.arange(rows, device=mask.device)
    place = (begin * rows + entry - begin)[:, None] + row * (end - begin)[:, None]
    result = torch.empty_like(mask, memory_format=torch.contiguous_format).view(count * rows, columns)
    result[place.flatten()] = mask.reshape(count * rows, columns)
    if widths is None:
        return result.flatten()
    kept = torch.empty_like(place.flatten())
    kept[place.flatten()] = widths.to(torch.int64).repeat_interleave(rows, output_size=count * rows)
    return result[torch.arange(columns, device=mask.device) < kept[:, None]]


def of_heads(
    selected: torch.Tensor,
    pages_of_blocks: torch.Tensor,
    pages: int,
    num_kv_heads: int,
    steps: tuple[int, int],
    room: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists of a pattern per head, whose requests are (head, block of rows).

    Args:
        selected: bool ``[heads, row blocks, column blocks]``. Heads are the key heads, or more of which several in turn
            share a key head.
        pages_of_blocks: int64 ``[heads, column blocks]``, how many pages a block of columns has.
        pages: pages of a head, the sum of every row of ``pages_of_blocks``.
        num_kv_heads: key heads.
        steps: page p of key head h is numbered ``h * steps[0] + p * steps[1]``.
        room: entries of the list, no fewer than there are.

    Returns:
        Offsets ``[heads * row blocks + 1]`` and page numbers ``[room]``, int32; 0 behind the last request.
    """
    heads, row_blocks, _ = selected.shape
    device, share = selected.device, heads // num_kv_heads
    counts = (selected * pages_of_blocks[:, None]).sum(-1)
    offsets = starts(counts.flatten())
    result = torch.zeros(room + 1, dtype=torch.int32, device=device)
    page = torch.arange(pages, device=device)
    block = torch.searchsorted(pages_of_blocks.cumsum(1), page.expand(heads, pages).contiguous(), right=True)
    step = max(_AT_ONCE // max(row_blocks * pages, 1), 1)
    for begin in range(0, heads if room else 0, step):
        end = min(begin + step, heads)
        shape = (end - begin, row_blocks, pages)
        chosen = selected[begin:end].gather(2, block[begin:end, None].expand(shape)).flatten()
        place = chosen.cumsum(0) + (offsets[begin * row_blocks] - 1)
        key_head = torch.arange(begin, end, device=device) // share
        numbers = (key_head * steps[0])[:, None, None] + page * steps[1]
        result.scatter_(0, torch.where(chosen, place, room), numbers.to(torch.int32).expand(shape).flatten())
    return offsets.to(torch.int32), result[:-1]
