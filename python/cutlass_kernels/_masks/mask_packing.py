"""Custom masks and multi-item scoring: from what callers give to packed bits, a byte-aligned segment per request.

Values on a CUDA device are never read back, so nothing here synchronises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from .._core.problems import MultiItem
from .bits import pack_rule, pack_segments

Lengths = Sequence[int] | torch.Tensor
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of mask_of_rule
_INT32_MAX = 2**31 - 1


def pack_mask(custom_mask: torch.Tensor, qo_lens: Lengths, kv_lens: Lengths) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs a boolean mask into little-endian bits, each request starting on a byte.

    ``custom_mask`` is the concatenation of the row-major ``[qo_len, kv_len]`` masks of all requests, flattened; for one
    request also that 2-D mask. Returns the bits (uint8, the mask's device) and the first byte of every request (int32
    ``[batch + 1]``, the lengths' device). ValueError where the mask is not boolean or shorter than the lengths say.
    """
    if not isinstance(custom_mask, torch.Tensor) or custom_mask.is_floating_point() or custom_mask.is_complex():
        what = custom_mask.dtype if isinstance(custom_mask, torch.Tensor) else type(custom_mask).__name__
        hint = " For the causal mask, pass causal=True by keyword." if isinstance(custom_mask, bool) else ""
        raise ValueError(f"custom_mask is {what}: pass a bool tensor, True where a row sees a key.{hint}")
    sizes, rows, columns = _mask_sizes(qo_lens, kv_lens)
    if custom_mask.dim() == 2 and sizes.numel() == 1 and not sizes.is_cuda:
        if tuple(custom_mask.shape) != (int(rows[0]), int(columns[0])):
            raise ValueError(
                f"custom_mask has shape {tuple(custom_mask.shape)}, but qo_len={int(rows[0])} and "
                f"kv_len={int(columns[0])}: it must be [qo_len, kv_len]."
            )
    elif custom_mask.dim() != 1 and not (custom_mask.dim() == 2 and sizes.numel() == 1):
        raise ValueError(
            f"custom_mask has shape {tuple(custom_mask.shape)}: flatten and concatenate the masks of the "
            f"{sizes.numel()} requests into one dimension."
        )
    flat = custom_mask.reshape(-1)
    if flat.dtype != torch.bool:
        flat = flat != 0
    elements = _offsets(sizes)
    byte_offsets = _offsets((sizes + 7) // 8)
    if sizes.is_cuda:
        total = flat.numel() // 8 + sizes.numel()  # an upper bound, known without reading the lengths
    else:
        needed = int(elements[-1])
        if flat.numel() < needed:
            raise ValueError(
                f"custom_mask has {flat.numel()} elements, but the lengths say sum(qo_len * kv_len) = {needed}."
            )
        total = _check_bytes(int(byte_offsets[-1]))
    return pack_segments(flat, elements, byte_offsets, total, "little"), byte_offsets.to(torch.int32)


def mask_of_rule(
    sees: Rule,
    qo_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    room: int,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of a rule, as ``pack_mask`` returns masks, on ``device``.

    ``sees(request, position, key)`` (int64 tensors that broadcast) tells whether a row at a position sees a key. Where
    the lengths are on a CUDA device, the result has ``room`` bytes. ValueError where it has more than int32 counts.
    """
    sizes, _, _ = _mask_sizes(qo_lens, kv_lens)
    byte_offsets = _offsets((sizes + 7) // 8)
    total = room if sizes.is_cuda else _check_bytes(int(byte_offsets[-1]))
    sizes, byte_offsets, rows, columns = (
        x.to(device, non_blocking=True) for x in (sizes, byte_offsets, qo_lens, kv_lens)
    )
    width = columns.clamp(min=1)

    def bit(request: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
        row = element.div(width[request], rounding_mode="floor")
        return sees(request, row + (columns - rows)[request], element - row * width[request])

    return pack_rule(bit, sizes, byte_offsets, total, "little"), byte_offsets.to(torch.int32)


def whole_words(bits: torch.Tensor) -> torch.Tensor:
    """``bits`` and up to three bytes more, a whole number of 32-bit words: as they lie in memory if these words are
    aligned and may all be read, else a copy. Never empty."""
    size = max((bits.numel() + 3) // 4 * 4, 4)
    if bits.numel() and bits.data_ptr() % 4 == 0 and bits.storage_offset() + size <= bits.untyped_storage().nbytes():
        return bits if bits.numel() == size else bits.as_strided((size,), (1,))
    words = bits.new_zeros(size)
    words[: bits.numel()].copy_(bits)
    return words


def check_packed_mask(bits: torch.Tensor, qo_lens: Lengths, kv_lens: Lengths) -> torch.Tensor:
    """The first byte of every request (int32 ``[batch + 1]``) in bits packed as by ``pack_mask``.

    ValueError where ``bits`` is not a 1-D contiguous uint8 tensor or holds fewer bytes than the lengths say.
    """
    if not isinstance(bits, torch.Tensor) or bits.dtype != torch.uint8 or bits.dim() != 1 or not bits.is_contiguous():
        what = f"{tuple(bits.shape)} {bits.dtype}" if isinstance(bits, torch.Tensor) else type(bits).__name__
        hint = " For the causal mask, pass causal=True by keyword." if isinstance(bits, bool) else ""
        raise ValueError(
            f"packed_custom_mask is {what}: pass the contiguous 1-D uint8 tensor that packbits or segment_packbits "
            f"returns with bitorder='little'.{hint}"
        )
    sizes, _, _ = _mask_sizes(qo_lens, kv_lens)
    byte_offsets = _offsets((sizes + 7) // 8)
    if not sizes.is_cuda:
        needed = _check_bytes(int(byte_offsets[-1]))
        if bits.numel() < needed:
            raise ValueError(
                f"packed_custom_mask has {bits.numel()} bytes, but the lengths say sum(ceil(qo_len * kv_len / 8)) = "
                f"{needed}."
            )
        if not bits.is_cuda:
            _check_bit_order(bits, sizes, byte_offsets)
    return byte_offsets.to(torch.int32)


def _check_bit_order(bits: torch.Tensor, sizes: torch.Tensor, byte_offsets: torch.Tensor) -> None:
    """ValueError where the bits behind the last elements, which are 0, lie where big-endian packing leaves them.

    That shows only where a size is no multiple of 8, and an element at the end is True.
    """
    ends = sizes % 8 > 0
    used = sizes[ends] % 8
    last = bits[byte_offsets[1:][ends] - 1].to(torch.int64)
    behind_little, behind_big = last >> used, last & ((1 << (8 - used)) - 1)
    if bool(behind_little.any()) and not bool(behind_big.any()):
        raise ValueError(
            "packed_custom_mask holds bits behind the last element of a mask, where big-endian packing puts elements: "
            "pack it with bitorder='little', which is not the default of packbits and segment_packbits."
        )


def _mask_sizes(qo_lens: Lengths, kv_lens: Lengths) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = (
        x.to(torch.int64) if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.int64, device="cpu")
        for x in (qo_lens, kv_lens)
    )
    if rows.device != columns.device:  # meet on the CUDA device: reading it back would synchronise
        device = rows.device if rows.is_cuda else columns.device
        rows, columns = rows.to(device, non_blocking=True), columns.to(device, non_blocking=True)
    if rows.shape != columns.shape or rows.dim() != 1:
        raise ValueError(f"qo_lens has shape {tuple(rows.shape)} and kv_lens {tuple(columns.shape)}: both are [batch].")
    return rows * columns, rows, columns


def _offsets(sizes: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(sizes.numel() + 1, dtype=torch.int64, device=sizes.device)
    torch.cumsum(sizes, 0, out=result[1:])
    return result


def _check_bytes(total: int) -> int:
    if total > _INT32_MAX:
        raise ValueError(f"the packed masks of this batch take {total} bytes, more than int32 offsets reach: split it.")
    return total


# --- rules ---


def every_key(request: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A rule for ``mask_of_rule``: rows see all keys."""
    return torch.ones_like(key, dtype=torch.bool)


def keys_before(request: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """A rule for ``mask_of_rule``: the causal mask."""
    return key <= position


def keys_of_items(items: MultiItem) -> Rule:
    """The rule of multi-item scoring, for ``mask_of_rule``; the tensors of ``items`` are on its device.

    A row behind the end of its request's token positions counts as a delimiter, which sees the prefix only. Rows whose
    positions would lie behind the end of the whole tensor are causal.
    """
    prefix_len, length = items.prefix_len.to(torch.int64), items.token_pos_len
    token_pos, end = torch.nn.functional.pad(items.token_pos.to(torch.int64), (0, 1)), items.token_pos.numel()

    def sees(request: torch.Tensor, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        prefix = prefix_len[request]
        entry = position - prefix
        place = request * length + entry
        inside = (entry >= 0) & (entry < length)
        back = token_pos[torch.where(inside, place, end).clamp_(max=end)]
        back = torch.where(inside & (place >= end), entry + 1, back)
        return (key <= position) & ((entry < 0) | (key < prefix) | (key > position - back))

    return sees


def of_requests(items: MultiItem, count: int) -> MultiItem:
    """``items`` with a prefix length for each request; one of no dimensions is that of all."""
    if items.prefix_len.dim() > 0:
        return items
    return dataclasses.replace(items, prefix_len=items.prefix_len.view(1).expand(count).contiguous())


def lens_on_host(qo_lens: torch.Tensor, kv_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lengths on the CPU, for a mask whose size the host must know. To read CUDA lengths back waits for the GPU;
    while a stream is captured they stay where they are."""
    if not (qo_lens.is_cuda or kv_lens.is_cuda) or torch.cuda.is_current_stream_capturing():
        return qo_lens, kv_lens
    return qo_lens.cpu(), kv_lens.cpu()


def check_items(items: MultiItem, qo_lens: torch.Tensor, kv_lens: torch.Tensor) -> None:
    """ValueError where sizes do not fit, or where the host knows that a row has no entry in ``token_pos``."""
    count = kv_lens.numel()
    if items.prefix_len.shape != kv_lens.shape:
        raise ValueError(f"prefix_len_ptr has shape {tuple(items.prefix_len.shape)}, but there are {count} requests.")
    if items.prefix_len.is_cuda or qo_lens.is_cuda or kv_lens.is_cuda:
        return
    rows = torch.where(qo_lens > 0, kv_lens - items.prefix_len.to(torch.int64), 0)
    if bool((rows > items.token_pos_len).any()):
        at = int(rows.argmax())
        raise ValueError(
            f"token_pos_in_items_len={items.token_pos_len}, but request {at} has {int(rows[at])} positions behind its "
            "prefix: pad token_pos_in_items_ptr."
        )
