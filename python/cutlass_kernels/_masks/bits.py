"""Packing of boolean tensors into bits, whole or in segments: see ``quantization``."""

from __future__ import annotations

from collections.abc import Callable

import torch

_CHUNK_BYTES = 1 << 20


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
    packed_indptr = torch.zeros_like(elements)
    torch.cumsum((sizes + 7) // 8, 0, out=packed_indptr[1:])
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


def pack_rule(
    bit: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    sizes: torch.Tensor,
    packed: torch.Tensor,
    total: int,
    bitorder: str,
) -> torch.Tensor:
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
