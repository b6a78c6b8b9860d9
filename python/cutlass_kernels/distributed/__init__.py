"""Attention over more than one GPU: prompts and caches that are spread over the ranks of a process group."""

from __future__ import annotations

from ._combine import dcp_combine
from ._decode import dcp_decode, dcp_local_lengths
from ._prefill import cp_prefill
from ._shards import indices as cp_indices
from ._shards import positions as cp_positions
from ._split import cp_restore, cp_split

__all__ = [
    "cp_indices",
    "cp_positions",
    "cp_prefill",
    "cp_restore",
    "cp_split",
    "dcp_combine",
    "dcp_decode",
    "dcp_local_lengths",
]
