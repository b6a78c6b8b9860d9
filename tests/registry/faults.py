"""What does not hold yet. Entries are deleted when issue 52 is mended; nothing is added without an issue."""

from __future__ import annotations

from .entry import ENTRIES

# Issue 52, fault 4: the reference and whatever joins tensors compute in the dtype of autocast, or raise.
UNDER_AUTOCAST = {name for name, entry in ENTRIES.items() if entry.attends or "rope" in name or name == "merge_state"}

# Issue 52, faults 12 and 13: LSEs in another layout than the kernels' raise in the forward; scales in tensors are left
# out. By label of the calls.
IN_BACKWARD = {
    "attention": {"returns LSE", "scales"},
    "trtllm_batch_decode_with_kv_cache": {"scales"},
    "trtllm_batch_context_with_kv_cache": {"scales"},
    "flash_attn.flash_attn_func": {"scales"},
    "BatchMLAPagedAttentionWrapper": {"returns LSE", "scales"},
    "mla.trtllm_batch_decode_with_kv_cache_mla": {"returns LSE"},
    "mla.flash_mla_with_kvcache": {"returns LSE"},
}
# The LSE of compiled calls has no backward where blocks differ between heads.
IN_COMPILED_BACKWARD = {
    **IN_BACKWARD,
    "BlockSparseAttentionWrapper": {"by head"},
    "VariableBlockSparseAttentionWrapper": {"by head"},
}

# Issue 52, fault 18: a shallow copy shares the inner wrappers, so that planning it changes the original.
SHARED_BY_COPIES = {
    "BatchAttention",
    "BatchDecodeWithSharedPrefixPagedKVCacheWrapper",
    "BatchPODWithPagedKVCacheWrapper",
    "BatchPrefillWithSharedPrefixPagedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "PODWithPagedKVCacheWrapper",
}
