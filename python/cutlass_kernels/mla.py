"""Multi-head latent attention (MLA) in its absorbed form: FlashInfer's wrapper, FlashMLA's functions, and its cache.

All of it computes with ``attention()``, which serves latent attention too: ``attention(q, ckv, ckv, q_rope=q_pe,
k_rope=kpe)``. docs/mla.md says which call is for what.
"""

from ._caches.latent_slots import (
    append_quantized_mla_kv_cache,
    concat_and_cache_mla,
    concat_and_cache_mla_rope_fused,
)
from ._fronts.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from ._fronts.trtllm import trtllm_batch_decode_with_kv_cache_mla
from ._planned.latent_plans import MLAPlanMetadata
from ._planned.latent_wrapper import BatchMLAPagedAttentionWrapper
from .page import append_paged_mla_kv_cache

__all__ = [
    "BatchMLAPagedAttentionWrapper",
    "FlashMLASchedMeta",
    "MLAPlanMetadata",
    "append_paged_mla_kv_cache",
    "append_quantized_mla_kv_cache",
    "concat_and_cache_mla",
    "concat_and_cache_mla_rope_fused",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
    "trtllm_batch_decode_with_kv_cache_mla",
]
