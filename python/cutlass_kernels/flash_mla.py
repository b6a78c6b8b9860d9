"""FlashMLA's functions on this library's kernels.

    from cutlass_kernels.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Arguments, their order and conventions are FlashMLA's. The LSE is natural and without sinks, and +inf for a row of a
sparse call that sees no key. docs/migrate/flash-mla.md says what differs. ``cutlass_kernels.attention`` says what is
computed, and serves more.
"""

from __future__ import annotations

from ._fronts.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_metadata",
]
