"""FlashInfer's three wrappers on torch's SDPA, to compare with, for what mini-sglang passes: pages of one token."""

from __future__ import annotations

from typing import Any

import torch

from ..common import sdpa

Tensor = torch.Tensor
Caches = tuple[Tensor, Tensor]  # keys and values [slots, 1, heads, dim]


class BatchPrefillWithPagedKVCacheWrapper:
    """Prompts, and prompts behind a cached prefix."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        self._int_workspace_buffer = workspace

    def plan(self, *, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, **options: Any) -> None:
        self.rows, self.keys = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.slots, self.causal = paged_kv_indices, options["causal"]

    def run(self, *, q: Tensor, paged_kv_cache: Caches) -> Tensor:
        def keys_of(i: int) -> Caches:
            slots = self.slots[self.keys[i] : self.keys[i + 1]]
            return paged_kv_cache[0][slots].squeeze(1), paged_kv_cache[1][slots].squeeze(1)

        return sdpa.prefill(q, self.rows, keys_of, None, self.causal)


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode steps: a table of slots as wide as the longest request."""

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", use_tensor_cores: bool = False, **more: Any) -> None:
        self._int_workspace_buffer = workspace

    def plan(self, *, indptr: Tensor, indices: Tensor, **options: Any) -> None:
        lengths = indptr.diff()
        self.table = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.int32, device=indices.device)
        self.lengths = torch.zeros(len(lengths), dtype=torch.int32, device=indices.device)
        self._fill(indptr, indices)

    def _fill(self, indptr: Tensor, indices: Tensor) -> None:
        lengths = indptr.diff()
        request = torch.arange(len(lengths)).repeat_interleave(lengths)
        column = torch.arange(len(request)) - indptr[:-1][request]
        place = torch.stack([request, column.long()]).to(indices.device)
        self.table[place[0], place[1]] = indices[: len(request)]
        self.lengths.copy_(lengths)

    def run(self, *, q: Tensor, paged_kv_cache: Caches) -> Tensor:
        return sdpa.decode(q, *paged_kv_cache, self.table, self.lengths, None)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """Decode steps in a CUDA graph: the table is as wide as any request may be."""

    longest = 0  # set before the engine starts

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", *, indptr_buffer: Tensor, **buffers: Any) -> None:
        super().__init__(workspace, kv_layout)
        requests, device = len(indptr_buffer) - 1, indptr_buffer.device
        self.table = torch.zeros(requests, self.longest, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(requests, dtype=torch.int32, device=device)

    def plan(self, *, indptr: Tensor, indices: Tensor, **options: Any) -> None:
        self._fill(indptr, indices)
