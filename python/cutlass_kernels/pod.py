"""FlashInfer's wrappers for prefill on decode: a prompt, or a batch of them, beside a batch of decode steps.

FlashInfer computes both in one kernel (Kamath et al., "POD-Attention", arXiv 2410.18038). Here they are two calls, one
after the other on the stream. Where prompts and decode steps lie in one cache, ``attention()`` and ``BatchAttention``
compute both in one kernel.
"""

from __future__ import annotations

from ._planned.pod_wrappers import BatchPODWithPagedKVCacheWrapper, PODWithPagedKVCacheWrapper

__all__ = ["BatchPODWithPagedKVCacheWrapper", "PODWithPagedKVCacheWrapper"]
