"""What FlashInfer has for Blackwell GPUs alone: 4-bit tensors. The names can be imported; what they name raises."""

from __future__ import annotations

from typing import Any, NoReturn


class FP4Tensor:
    """A tensor of packed 4-bit floats with its scales. Making one raises NotImplementedError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _raise("FP4Tensor", "use a torch.float8_e4m3fn, float16 or bfloat16 tensor.")


def nvfp4_quantize_append_paged_kv_cache(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError: the cache would hold 4-bit floats."""
    _raise("nvfp4_quantize_append_paged_kv_cache", "append to an fp8 cache with append_paged_kv_cache.")


def nvfp4_quantize_append_paged_kv_cache_with_slot_mapping(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises NotImplementedError: the cache would hold 4-bit floats."""
    _raise(
        "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
        "append to an fp8 cache with append_paged_kv_cache_by_slot.",
    )


def _raise(name: str, remedy: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} is for 4-bit floats, which need a Blackwell GPU (compute capability 10.0 or newer). This library "
        f"serves Ampere and Hopper: {remedy}"
    )
