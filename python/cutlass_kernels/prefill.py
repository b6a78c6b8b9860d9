"""Prefill and append attention: one request, paged and ragged batches, and the FMHAv2 form."""

from __future__ import annotations

from ._attend.singles import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from ._fronts.trtllm import trtllm_batch_context_with_kv_cache
from ._planned.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from ._planned.ragged_prefill import BatchPrefillWithRaggedKVCacheWrapper
from .fmha_v2 import fmha_v2_stats_to_lse, trtllm_fmha_v2_prefill

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "fmha_v2_stats_to_lse",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_fmha_v2_prefill",
]
