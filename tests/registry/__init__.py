"""Every public call of the package, once: how it is made, and what it promises. How to enter one: tests/README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import attention, blocks, flash, latent, multi_gpu, others, pages, singles, wrappers  # noqa: F401, enter calls
from .data import HEADS, PAGE, Data, ints
from .entry import ENTRIES, Call, Entry, Planned, several

__all__ = ["ENTRIES", "HEADS", "PAGE", "Call", "Data", "Entry", "Planned", "each", "ints", "several", "usual"]

# Calls by short names, for tests of what is not common to all.
USUAL = {
    "single_prefill": ("single_prefill_with_kv_cache_return_lse", 1),
    "single_decode": ("single_decode_with_kv_cache", 1),
    "ragged": ("BatchPrefillWithRaggedKVCacheWrapper", 1),
    "paged": ("BatchPrefillWithPagedKVCacheWrapper", 1),
    "paged pair": ("BatchPrefillWithPagedKVCacheWrapper", 2),
    "decode": ("BatchDecodeWithPagedKVCacheWrapper", 1),
    "fused": ("trtllm_fmha_v2_prefill", 1),
}


def usual(name: str, target: Any) -> Call:
    entry, number = USUAL[name]
    return ENTRIES[entry].calls(Data(target))[number]


def each(chosen: Callable[[Entry], bool] = lambda entry: True) -> Any:
    """Parametrizes a test by the chosen entries."""
    found = []
    for name, entry in ENTRIES.items():
        marks = [] if entry.attends else [pytest.mark.runs_nothing("computes no attention")]
        if chosen(entry):
            found.append(pytest.param(entry, id=name, marks=marks))
    return pytest.mark.parametrize("entry", found)
