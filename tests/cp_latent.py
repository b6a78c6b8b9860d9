"""What ranks run in tests of latent attention (MLA) whose keys are spread over them."""

from __future__ import annotations

from typing import Any

import torch
from cp_calls import _paged
from problems import Batch, make_batch

from cutlass_kernels import attention, distributed


def batch_of(q_lens: list[int], kv_lens: list[int], heads: int) -> Batch:
    batch = make_batch(q_lens, kv_lens, heads, 1, 576, dtype=torch.bfloat16)
    batch.v = batch.k[..., :512]
    return batch


def here(kv_lens: list[int], rank: int, world: int, block: int) -> tuple[torch.Tensor, list[int]]:
    """Which keys of a batch a rank holds, and how many of each request."""
    places, begin = [], 0
    for n in kv_lens:
        at = torch.arange(n)
        places.append(at[at // block % world == rank] + begin)
        begin += n
    return torch.cat(places), [x.numel() for x in places]


def decode(
    group: Any,
    device: torch.device,
    problem: tuple[list[int], list[int], int],
    block: int,
    options: dict[str, Any],
    separate: bool,
) -> Any:
    """The combined output and LSE of this rank's heads."""
    batch = batch_of(*problem)
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    at, counts = here(batch.kv_lens, rank, world, block)
    k = batch.k[at].to(device)
    cache, _, table = _paged(k, k, counts, 16)
    q = batch.q.to(device)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    call: dict[str, Any] = dict(page_table=table, seqused_k=lens, cu_seqlens_q=batch.qo_indptr(device))
    v = cache[..., :512]
    if separate:
        q, call["q_rope"] = (x.contiguous() for x in q.split([512, 64], -1))
        cache, call["k_rope"] = (x.contiguous() for x in cache.split([512, 64], -1))
        v = cache
    base = options.get("lse_base", 2)
    out, lse = attention(
        q, cache, v, causal=True, kv_shard=(world, rank, block), return_lse=True, lse_base=base, **call
    )
    own, own_lse = distributed.dcp_combine(out, lse, group, return_lse=True, **options)
    return own.cpu(), own_lse.cpu()
