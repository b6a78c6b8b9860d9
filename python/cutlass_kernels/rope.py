"""Rotary position embeddings of queries and keys, alone or with writing keys and values to a paged cache."""

from ._caches.rotary import apply_rope_with_cos_sin_cache as apply_rope_with_cos_sin_cache
from ._caches.rotary import apply_rope_with_cos_sin_cache_inplace as apply_rope_with_cos_sin_cache_inplace
from ._caches.rotary import rope_append_paged_kv_cache_by_slot as rope_append_paged_kv_cache_by_slot
