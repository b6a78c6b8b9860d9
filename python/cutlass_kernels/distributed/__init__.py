"""Attention over more than one GPU: prompts and caches that are spread over the ranks of a process group."""

from __future__ import annotations

from ._dcp import dcp_combine, dcp_decode
from ._local import dcp_local_indices, dcp_local_lengths
from ._prefill import cp_prefill
from ._shards import cp_restore, cp_split
from ._shards import indices as cp_indices
from ._shards import positions as cp_positions

__all__ = [
    "cp_indices",
    "cp_positions",
    "cp_prefill",
    "cp_restore",
    "cp_split",
    "dcp_combine",
    "dcp_decode",
    "dcp_local_indices",
    "dcp_local_lengths",
]
