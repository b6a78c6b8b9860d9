"""What serving engines import from ``flashinfer.utils``."""

from __future__ import annotations

import torch

from ._fronts.blackwell import FP4Tensor

__all__ = ["FP4Tensor", "get_device_sm_count", "get_trtllm_gen_multi_ctas_kv_counter_bytes"]


def get_device_sm_count(device: torch.device | str | int) -> int:
    """Number of streaming multiprocessors (SMs) of a CUDA device.

    Args:
        device: the CUDA device.

    Raises:
        ValueError: ``device`` is not a CUDA device.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda":
        raise ValueError(f"device={str(place)!r} has no streaming multiprocessors: pass a CUDA device.")
    return int(torch.cuda.get_device_properties(place).multi_processor_count)


def get_trtllm_gen_multi_ctas_kv_counter_bytes(batch_size: int, num_qo_heads: int, sm_count: int) -> int:
    """Bytes that callers allocate for ``multi_ctas_kv_counter_buffer``: 4 per request and head, at least 4 per SM, in
    multiples of 32. Functions here accept the buffer and do not use it.

    Examples:
        >>> get_trtllm_gen_multi_ctas_kv_counter_bytes(2, 8, 132)
        544
    """
    return -(-max(batch_size * num_qo_heads, sm_count) // 8) * 32


def _get_range_buf(seq_len: int, device: torch.device | str) -> torch.Tensor:
    """int32 ``[0, 1, ..., seq_len - 1]`` on ``device``, for callers that make offsets of batches of equal lengths."""
    return torch.arange(seq_len, dtype=torch.int32, device=device)
