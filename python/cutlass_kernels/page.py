"""Paged key/value caches: lengths, positions of new tokens, and writing them into their pages.

Nothing here reads a value back from the device. On CUDA devices a kernel each says where new tokens belong and writes
them; PyTorch does on other devices, and for elements of more than 4 bytes.
"""

from __future__ import annotations

from ._caches.page_functions import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from ._caches.slots_of_tokens import append_paged_kv_cache_by_slot
from ._fronts.blackwell import (
    nvfp4_quantize_append_paged_kv_cache,
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)

__all__ = [
    "append_paged_kv_cache",
    "append_paged_kv_cache_by_slot",
    "append_paged_mla_kv_cache",
    "get_batch_indices_positions",
    "get_seq_lens",
    "nvfp4_quantize_append_paged_kv_cache",
    "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping",
]
