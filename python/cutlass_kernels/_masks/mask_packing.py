"""Custom masks, multi-item scoring, draft tokens, keys spread over ranks: from what callers give to packed bits.

Each request has a byte-aligned segment. Values on a CUDA device are never read back, so nothing here synchronises, but
for ``segment_packbits``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._core.index_vectors import INT32_MAX, INTEGERS, starts
from .._core.problems import Mask, MultiItem
from .._core.tracing import is_traced

Lengths = Sequence[int] | torch.Tensor
Bit = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of pack_rule
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of mask_of_rule
Shard = tuple[int, int, int]  # world, rank, block
_CHUNK_BYTES = 1 << 20  # of a mask, packed together


# --- bits: see ``quantization`` ----------------------------------------------------------------------------------


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Packs the elements of a vector into bits, eight to a byte (the meaning of ``numpy.packbits``).

    Attention reads ``packed_custom_mask`` with ``bitorder="little"``, which is **not** the default here: the default is
    that of ``numpy.packbits``. A mask packed with the default shows other keys, and mostly nothing can tell: only bits
    behind the last element of a mask give it away, and only CPU masks are looked at.

    Args:
        x: 1-D tensor ``[n]``, bool or a number (nonzero is 1), on any device.
        bitorder: ``"big"`` (the first element is the highest bit of its byte) or ``"little"`` (the lowest).

    Returns:
        uint8 tensor ``[ceil(n / 8)]`` on the device of ``x``; the bits behind the last element are 0.

    Raises:
        RuntimeError: ``bitorder`` is unknown.
        TypeError: ``x`` is not a tensor.
        ValueError: ``x`` is not one-dimensional.

    Examples:
        >>> packbits(torch.tensor([True, False, False, True]), bitorder="little")
        tensor([9], dtype=torch.uint8)
    """
    little = _is_little(bitorder)
    _check_vector(x)
    flat = x if x.dtype == torch.bool else x != 0
    size = (flat.numel() + 7) // 8
    missing = -flat.numel() % 32  # kernels read masks in words of 32 bits, which the storage then has
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    weights = _weights(little, x.device)
    # Not view(torch.uint8): Inductor of torch 2.11 cannot compile that of a bool.
    return (flat.to(torch.uint8).view(-1, 8) * weights).sum(-1, dtype=torch.uint8)[:size]


def segment_packbits(x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big") -> tuple[torch.Tensor, torch.Tensor]:
    """Packs every segment of a vector into bits, each segment starting on a byte.

    For ``packed_custom_mask`` use ``bitorder="little"``: see ``packbits``.

    Args:
        x: 1-D tensor ``[indptr[-1]]``, bool or a number (nonzero is 1), on any device.
        indptr: integer tensor ``[segments + 1]``; segment ``s`` is ``x[indptr[s]:indptr[s + 1]]``.
        bitorder: ``"big"`` or ``"little"``, as in ``packbits``.

    Returns:
        ``(packed, packed_indptr)``: the uint8 bytes, and the first byte of every segment, int32 ``[segments + 1]`` on
        the device of ``indptr``. The size of the result depends on ``indptr``, which is read back from the device once.
        So ``torch.compile`` cannot trace this function: call it outside of the compiled function.

    Raises:
        RuntimeError: ``bitorder`` is unknown, or ``indptr`` decreases.
        ValueError: ``x`` or ``indptr`` is not one-dimensional, or ``x`` is shorter than ``indptr[-1]``.

    Examples:
        >>> segment_packbits(torch.tensor([True, True, True]), torch.tensor([0, 1, 3]), bitorder="little")
        (tensor([1, 3], dtype=torch.uint8), tensor([0, 1, 2], dtype=torch.int32))
    """
    _is_little(bitorder)
    _check_vector(x)
    if not isinstance(indptr, torch.Tensor):
        raise TypeError(f"indptr is {type(indptr).__name__}, not a tensor: pass an integer vector [segments + 1].")
    if indptr.dim() != 1 or indptr.numel() == 0 or not _is_integer(indptr.dtype):
        raise ValueError(
            f"indptr has shape {tuple(indptr.shape)} and dtype {indptr.dtype}: it must be an integer vector "
            "[segments + 1]."
        )
    elements = indptr.to(torch.int64)
    sizes = elements[1:] - elements[:-1]
    packed_indptr = starts((sizes + 7) // 8)
    first, last, total, decreases = torch.stack(
        [elements[0], elements[-1], packed_indptr[-1], (sizes < 0).any().to(torch.int64)]
    ).tolist()
    if decreases or first < 0:
        raise RuntimeError("indptr is negative or decreases: it must hold the start of every segment, in order.")
    if last > x.numel():
        raise ValueError(f"x has {x.numel()} elements, but indptr ends at {last}.")
    flat = x if x.dtype == torch.bool else x != 0
    return pack_segments(flat, elements, packed_indptr, total, bitorder), packed_indptr.to(torch.int32)


def pack_segments(
    flat: torch.Tensor, elements: torch.Tensor, packed: torch.Tensor, total: int, bitorder: str
) -> torch.Tensor:
    """Packs segments of the bool vector ``flat``; the inner part of ``segment_packbits``.

    ``elements`` and ``packed`` (int64 ``[segments + 1]``) say where every segment starts in ``flat`` and in the result;
    ``total`` is the size of the result and may exceed ``packed[-1]``. Reads nothing back from a device.
    """
    segments = elements.numel() - 1
    if segments == 1 and not elements.is_cuda:
        return packbits(flat[int(elements[0]) : int(elements[1])], bitorder)
    elements, packed = (x.to(flat.device, non_blocking=True) for x in (elements, packed))
    sizes = elements[1:] - elements[:-1]
    if flat.numel() == 0:
        flat = flat.new_zeros(1)

    def bit(segment: torch.Tensor, element: torch.Tensor) -> torch.Tensor:
        return flat[(elements[segment] + element).clamp_(max=flat.numel() - 1)]

    return pack_rule(bit, sizes, packed, total, bitorder)


def pack_rule(bit: Bit, sizes: torch.Tensor, packed: torch.Tensor, total: int, bitorder: str) -> torch.Tensor:
    """Packs segments of ``sizes`` (int64 ``[segments]``) elements, of which ``bit(segment, element)`` tells the values.

    ``bit`` gets int64 tensors that broadcast, and returns bools; what it says of elements behind the end of a segment
    is not used. ``packed`` and ``total`` are as in ``pack_segments``. Reads nothing back from a device.
    """
    device = sizes.device
    result = torch.empty((total + 3) // 4 * 4, dtype=torch.uint8, device=device)[:total]  # whole words of storage
    if sizes.numel() == 0:
        return result.zero_()
    weights = _weights(_is_little(bitorder), device)
    lanes = torch.arange(8, device=device)
    for start in range(0, total, _CHUNK_BYTES):
        stop = min(start + _CHUNK_BYTES, total)
        byte = torch.arange(start, stop, device=device)
        segment = (torch.searchsorted(packed, byte, right=True) - 1).clamp_(max=sizes.numel() - 1)
        element = (8 * (byte - packed[segment]))[:, None] + lanes
        segment = segment[:, None]
        bits = bit(segment, element) & (element < sizes[segment])
        torch.sum(bits.view(torch.uint8) * weights, -1, dtype=torch.uint8, out=result[start:stop])
    return result


def _weights(little: bool, device: torch.device) -> torch.Tensor:
    lanes = torch.arange(8, dtype=torch.uint8, device=device)
    return torch.bitwise_left_shift(torch.ones_like(lanes), lanes if little else 7 - lanes)


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _is_little(bitorder: str) -> bool:
    if bitorder not in ("big", "little"):
        raise RuntimeError(f"bitorder={bitorder!r} is unknown: use 'big' or 'little'.")
    return bitorder == "little"


def _check_vector(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is {type(x).__name__}, not a tensor: pass a vector of bools.")
    if x.dim() != 1:
        raise ValueError(f"x has shape {tuple(x.shape)}, but packing works on vectors: use x.reshape(-1).")


# --- masks -------------------------------------------------------------------------------------------------------


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
    elements = starts(sizes)
    byte_offsets = starts((sizes + 7) // 8)
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
    sees: Rule, qo_lens: torch.Tensor, kv_lens: torch.Tensor, room: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of a rule, as ``pack_mask`` returns masks, on ``device``.

    ``sees(request, position, key)`` (int64 tensors that broadcast) tells whether a row at a position sees a key. Where
    the lengths are on a CUDA device, the result has ``room`` bytes. ValueError where it has more than int32 counts.
    """
    sizes, _, _ = _mask_sizes(qo_lens, kv_lens)
    byte_offsets = starts((sizes + 7) // 8)
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
    byte_offsets = starts((sizes + 7) // 8)
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


def _check_bytes(total: int) -> int:
    if total > INT32_MAX:
        raise ValueError(f"the packed masks of this batch take {total} bytes, more than int32 offsets reach: split it.")
    return total


# --- rules -------------------------------------------------------------------------------------------------------


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


# --- keys that are spread over ranks -----------------------------------------------------------------------------

# Block i of a request's keys is rank ``i % world``'s, which stores its blocks in order.


def check_shard(shard: Any, seqused_k: Any, other_masks: bool) -> None:
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


def mask_of_shard(shard: Shard, mask: Mask, rows: int, total: int, device: torch.device) -> Mask:
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


# --- draft tokens (speculative decoding) -------------------------------------------------------------------------

# A draft mask covers the last keys of a request, those of its draft tokens; a row sees all keys before them. Lengths
# stay on the device, and sizes follow from shapes and bounds, so a CUDA graph can capture this.


def mask_of_drafts(
    mask: Any, cu_seqlens_q: torch.Tensor | None, seq_lens: torch.Tensor, rows: int, most_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of all keys, uint8, and the first byte of each request, int32 ``[batch + 1]``.

    ``mask`` holds a row of bits for each query row, ``[..., row, bytes]``, bit c for draft token c of its request: rows
    of ``cu_seqlens_q``, or ``rows`` of each request. A request has at most ``rows`` rows and ``most_keys`` keys.
    """
    packed = _rows_of_bytes(mask, rows)
    device, batch = packed.device, seq_lens.numel()
    size = -(-rows * most_keys // 32) * 4  # bytes of a request, whole words
    if batch * size > INT32_MAX:
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
    if not isinstance(mask, torch.Tensor) or mask.dtype not in INTEGERS or mask.dim() < 2:
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
