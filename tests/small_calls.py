"""Every function as a call on one small request, some of whose arguments a test replaces."""

from __future__ import annotations

from typing import Any

import torch
from problems import Batch, make_batch

import cutlass_kernels as ck

HEADS, PAGE = (4, 2, 64), 16


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def qkv_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.q, batch.k, batch.v


class Calls:
    """One request of 5 rows and 20 keys, and every function as a call on it with some arguments replaced."""

    def __init__(self, target: Any) -> None:
        self.target = target
        batch = make_batch([5], [20], *HEADS, device=target.device)
        self.batch, self.pages = batch, batch.paged(PAGE)
        self.qkv = self.q, self.k, self.v = qkv_of(batch)
        self.cache = self.pages.cache
        self.plans = {
            "paged": dict(zip(("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), self.pages.table()))
            | dict(qo_indptr=ints(0, 5), head_dim=64, page_size=PAGE),
            "ragged": dict(qo_indptr=ints(0, 5), kv_indptr=ints(0, 20), head_dim_qk=64),
            "decode": dict(zip(("indptr", "indices", "last_page_len"), self.pages.table()))
            | dict(head_dim=64, page_size=PAGE),
        }

    def wrapper(self, kind: str, kv_layout: str = "NHD") -> Any:
        names = {"paged": "PrefillWithPaged", "ragged": "PrefillWithRagged", "decode": "DecodeWithPaged"}
        cls = getattr(ck, f"Batch{names[kind]}KVCacheWrapper")
        return cls(self.target.workspace(), kv_layout, backend=self.target.backend)

    def planned(self, kind: str, kv_layout: str = "NHD", **options: Any) -> Any:
        wrapper = self.wrapper(kind, kv_layout)
        wrapper.plan(**(dict(num_qo_heads=4, num_kv_heads=2) | self.plans[kind] | options))
        return wrapper

    def cascade(self, **options: Any) -> Any:
        wrapper = ck.MultiLevelCascadeAttentionWrapper(1, self.target.workspace())
        wrapper.plan([ints(0, 5)], *([x] for x in self.pages.table()), *HEADS, PAGE, **options)
        return wrapper

    def single(self, **options: Any) -> Any:
        tensors = dict(q=self.q, k=self.k, v=self.v)
        return ck.single_prefill_with_kv_cache(**(tensors | dict(backend=self.target.backend) | options))

    def decode(self, **options: Any) -> Any:
        tensors = dict(q=self.q[0], k=self.k, v=self.v)
        return ck.single_decode_with_kv_cache(**(tensors | dict(backend=self.target.backend) | options))

    def padded(self, **options: Any) -> Any:
        tensors = dict(q=self.q[:1], k_shared=self.k, v_shared=self.v, k_unique=self.k[None], v_unique=self.v[None])
        return ck.batch_decode_with_shared_prefix_padded_kv_cache(**(tensors | options))

    def fused(self, layout: str = "SEPARATE_Q_K_V", **options: Any) -> Any:
        given = dict(
            qkv=(self.q, self.k, self.v),
            input_layout=layout,
            workspace_buffer=self.target.workspace(16),
            seq_lens=ints(20),
            max_q_len=5,
            max_kv_len=20,
            bmm1_scale=0.1,
            bmm2_scale=1.0,
            batch_size=1,
            cum_seq_lens_q=ints(0, 5),
            cum_seq_lens_kv=ints(0, 20),
        )
        return ck.trtllm_fmha_v2_prefill(**(given | options))

    def append(self, **options: Any) -> Any:
        indptr, indices, last = self.pages.table()
        given = dict(
            append_key=self.k[:2],
            append_value=self.v[:2],
            batch_indices=ints(0, 0),
            positions=ints(3, 4),
            paged_kv_cache=self.cache.clone(),
            kv_indices=indices,
            kv_indptr=indptr,
            kv_last_page_len=last,
        )
        return ck.append_paged_kv_cache(**(given | options))

    def append_by_slot(self, **options: Any) -> Any:
        k_cache, v_cache = self.cache.clone().unbind(1)
        given = dict(key=self.k[:2], value=self.v[:2], key_cache=k_cache, value_cache=v_cache, slot_mapping=ints(3, 17))
        return ck.append_paged_kv_cache_by_slot(**(given | options))
