"""What ranks run in tests of latent attention (MLA) whose keys are spread over them."""

from __future__ import annotations

from typing import Any

import cp_compiled
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
    q, k, v, call = _arguments(group, device, problem, block, ("q", "k") if separate else ())
    shard = (torch.distributed.get_world_size(group), torch.distributed.get_rank(group), block)
    base = options.get("lse_base", 2)
    out, lse = attention(q, k, v, causal=True, kv_shard=shard, return_lse=True, lse_base=base, **call)
    own, own_lse = distributed.dcp_combine(out, lse, group, return_lse=True, **options)
    return own.cpu(), own_lse.cpu()


def step(
    group: Any,
    device: torch.device,
    problem: tuple[list[int], list[int], int],
    block: int,
    options: dict[str, Any],
    separate: tuple[str, ...],
) -> Any:
    """The same in one call. ``separate``: of queries and keys those whose last columns are tensors of their own."""
    q, k, v, call = _arguments(group, device, problem, block, separate)
    if options.get("gather_heads", True):
        rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        q = q.chunk(world, -2)[rank]
        if "q_rope" in call:
            call["q_rope"] = call["q_rope"].chunk(world, -2)[rank]
    out, lse = distributed.dcp_decode(q, k, v, group, block_size=block, return_lse=True, **call, **options)
    return out.cpu(), lse.cpu()


def disagreeing_step(group: Any, device: torch.device, who: int, what: str) -> None:
    """A step in which one rank differs."""
    q, q_rope = (torch.zeros(2, 1, 4, columns, device=device).bfloat16() for columns in (512, 64))
    k, k_rope = (torch.zeros(8, 4, 1, columns, device=device).bfloat16() for columns in (512, 64))
    v = k
    if torch.distributed.get_rank(group) == who:
        if what == "values":
            v = k.clone()
        elif what == "heads":
            q_rope = q_rope[..., :3, :]
        elif what == "dimensions":
            q_rope = q_rope[0]
        elif what == "columns":
            q_rope = q_rope[..., :32]
        elif what == "keys":
            k, k_rope = torch.cat([k, k_rope], -1), None
            v = k[..., :512]
    lens = torch.tensor([9, 7], dtype=torch.int32, device=device)
    table = torch.zeros(2, 2, dtype=torch.int32, device=device)
    distributed.dcp_decode(q, k, v, group, seqused_k=lens, page_table=table, q_rope=q_rope, k_rope=k_rope)


def compiled_step(group: Any, device: torch.device) -> str | None:
    """What is wrong with the call in a graph."""
    q, k, _, given = _arguments(group, device, ([1, 3, 2], [70, 3, 33], 8), 16, ("q", "k"))
    names = list(given)

    def call(q: torch.Tensor, k: torch.Tensor, *tensors: torch.Tensor) -> Any:
        return distributed.dcp_decode(q, k, k, group, block_size=16, **dict(zip(names, tensors, strict=True)))

    return cp_compiled._compare(call, (q, k, *given.values()), "aot_eager", "dcp_decode")


def _arguments(
    group: Any, device: torch.device, problem: tuple[list[int], list[int], int], block: int, separate: tuple[str, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Queries of all heads, this rank's keys and values, and the other arguments of ``attention()``."""
    batch = batch_of(*problem)
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    at, counts = here(batch.kv_lens, rank, world, block)
    own = batch.k[at].to(device)
    k, _, table = _paged(own, own, counts, 16)
    q, v = batch.q.to(device), k[..., :512]
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    call: dict[str, Any] = dict(page_table=table, seqused_k=lens, cu_seqlens_q=batch.qo_indptr(device))
    if "q" in separate:
        q, call["q_rope"] = (x.contiguous() for x in q.split([512, 64], -1))
    if "k" in separate:
        k, call["k_rope"] = (x.contiguous() for x in k.split([512, 64], -1))
        v = k
    return q, k, v, call
