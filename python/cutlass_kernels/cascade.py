"""Attention of requests that share a prefix, and the merging of attention states.

The shared keys are read once for all requests, as one long attention; the keys of each request on its own follow; the
two states merge by their base-2 LSEs into the attention over both (Juravsky et al., "Hydragen", 2024; Ye et al.,
"Cascade Inference", 2024).
"""

from __future__ import annotations

from ._compute.merging import merge_state, merge_state_in_place, merge_states
from ._planned.cascade_levels import MultiLevelCascadeAttentionWrapper
from ._planned.shared_prefixes import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    batch_decode_with_shared_prefix_padded_kv_cache,
)

__all__ = [
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
]
