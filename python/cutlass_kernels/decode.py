"""Decode attention, of the newest tokens over all keys and values: one request, or a batch with paged keys."""

from ._attend.singles import single_decode_with_kv_cache
from ._fronts.trtllm import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache
from ._fronts.trtllm import trtllm_batch_decode_with_kv_cache_mla as trtllm_batch_decode_with_kv_cache_mla
from ._planned.paged_decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from .page import get_seq_lens as get_seq_lens  # engines import the two here
from .utils import _get_range_buf as _get_range_buf

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache",
]
