"""Attention kernels for Ampere and Hopper GPUs, with a PyTorch reference backend, in the API of FlashInfer.

    import cutlass_kernels as flashinfer

Importing needs no GPU. ``explain()`` says which backend would serve a call and why; ``list_kernels()`` lists what is
compiled into this installation. Every LSE is base 2.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from . import cascade, decode, mla, page, pod, prefill, quantization, rope, sparse, utils
from ._attend.plan_free import attention
from ._compute import kernels
from ._compute.selection import explain
from ._core import native
from ._core.errors import BackendError, PerformanceWarning
from ._core.schedules import Schedule
from ._planned.batch_attention import BatchAttention
from ._planned.sink_wrapper import BatchAttentionWithAttentionSinkWrapper
from .cascade import (
    BatchDecodeWithSharedPrefixPagedKVCacheWrapper,
    BatchPrefillWithSharedPrefixPagedKVCacheWrapper,
    MultiLevelCascadeAttentionWrapper,
    batch_decode_with_shared_prefix_padded_kv_cache,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from .decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
    single_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from .mla import BatchMLAPagedAttentionWrapper
from .page import (
    append_paged_kv_cache,
    append_paged_kv_cache_by_slot,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from .page import nvfp4_quantize_append_paged_kv_cache as nvfp4_quantize_append_paged_kv_cache
from .page import (
    nvfp4_quantize_append_paged_kv_cache_with_slot_mapping as nvfp4_quantize_append_paged_kv_cache_with_slot_mapping,
)
from .pod import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper
from .prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    fmha_v2_stats_to_lse,
    single_prefill_with_kv_cache,
    single_prefill_with_kv_cache_return_lse,
    trtllm_batch_context_with_kv_cache,
    trtllm_fmha_v2_prefill,
)
from .quantization import packbits, segment_packbits
from .rope import (
    apply_rope_with_cos_sin_cache,
    apply_rope_with_cos_sin_cache_inplace,
    rope_append_paged_kv_cache_by_slot,
)
from .sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper, convert_bsr_mask_layout

try:
    __version__ = metadata.version("cutlass_kernels")
except metadata.PackageNotFoundError:  # a source tree on the path, or a kernel of the hub
    __version__ = "0.0.0" if native._C is None else str(native._C.version())

__all__ = [
    "BackendError",
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
    "PerformanceWarning",
    "Schedule",
    "VariableBlockSparseAttentionWrapper",
    "__version__",
    "append_paged_kv_cache",
    "append_paged_kv_cache_by_slot",
    "append_paged_mla_kv_cache",
    "apply_rope_with_cos_sin_cache",
    "apply_rope_with_cos_sin_cache_inplace",
    "attention",
    "batch_decode_with_shared_prefix_padded_kv_cache",
    "cascade",
    "convert_bsr_mask_layout",
    "decode",
    "explain",
    "fast_decode_plan",
    "fmha_v2_stats_to_lse",
    "get_batch_indices_positions",
    "get_seq_lens",
    "list_kernels",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "mla",
    "packbits",
    "page",
    "pod",
    "prefill",
    "quantization",
    "rope",
    "rope_append_paged_kv_cache_by_slot",
    "segment_packbits",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
    "sparse",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_fmha_v2_prefill",
    "utils",
    "xqa_batch_decode_with_kv_cache",
]


def list_kernels() -> list[Any]:
    """The kernels compiled into this installation, one entry each; empty for an installation without compiled code.

    ``torch.compile`` cannot trace this function: call it outside of the compiled function.

    Examples:
        >>> for kernel in list_kernels():
        ...     print(kernel)
    """
    return list(kernels.kernels())
