"""FlashAttention's functions on this library's kernels.

    from cutlass_kernels.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Argument order and conventions are those of FlashAttention-3 (Shah et al., "FlashAttention-3", 2024): the LSE is natural
and has the heads first. Keywords of vLLM's fork and of FlashAttention-2 are accepted beside them. Everything is
forward only. ``cutlass_kernels.attention`` says what is computed, and serves more.

What decides speed in FlashAttention is decided here by the library: ``pack_gqa``, ``sm_margin``,
``scheduler_metadata`` and ``fa_version`` have no effect, and ``deterministic`` has none since results always are.
"""

from __future__ import annotations

from ._fronts.flash_functions import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
