"""Functions of process groups, of one rank: more are in tests/distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cutlass_kernels import distributed

from .data import Data
from .entry import Call, no_attention, public


@contextlib.contextmanager
def group_of_one() -> Iterator[Any]:
    """For one call: other tests make groups of their own in this process."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _in_a_group(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*tensors: torch.Tensor) -> Any:
        with group_of_one() as group:
            return function(*tensors, group)

    return run


# A group is made outside of what is compiled (tests/distributed/test_cp_compile.py), and by one thread.
ALONE = dict(threads=False, compiles="no")


@public("distributed.cp_prefill", **ALONE)
def _prefill(x: Data) -> list[Call]:
    whole = lambda *t: distributed.cp_prefill(*t, kv_seqlens=[x.m], causal=True, return_lse=True)  # noqa: E731
    return [Call(_in_a_group(whole), x.qkv)]


@public("distributed.dcp_decode", **ALONE)
def _decode(x: Data) -> list[Call]:
    def call(q, k, v, used, table, group):
        return distributed.dcp_decode(q, k, v, group, seqused_k=used, page_table=table)

    tensors = (x.q[None, :1], *(y.clone() for y in x.cache.unbind(1)), x.sizes_here(20), x.here(1, 2)[None])
    return [Call(_in_a_group(call), tensors)]


@no_attention("distributed.dcp_combine", **ALONE)
def _combine(x: Data) -> list[Call]:
    return [Call(_in_a_group(lambda *t: distributed.dcp_combine(*t, return_lse=True)), x.state)]


@no_attention("distributed.cp_split", **ALONE)
def _split(x: Data) -> list[Call]:
    return [Call(_in_a_group(lambda *t: distributed.cp_split(*t)), (x.q,))]


@no_attention("distributed.cp_restore", **ALONE)
def _restore(x: Data) -> list[Call]:
    return [Call(_in_a_group(lambda *t: distributed.cp_restore(*t)), (x.q,))]


@no_attention("distributed.cp_indices", **ALONE)
def _indices(x: Data) -> list[Call]:
    return [Call(lambda q: distributed.cp_indices([3, 2], 1, 2, device=q.device), (x.q,))]


@no_attention("distributed.cp_positions", **ALONE)
def _positions(x: Data) -> list[Call]:
    return [Call(lambda q: distributed.cp_positions([3, 2], 1, 2, device=q.device), (x.q,))]


@no_attention("distributed.dcp_local_lengths", **ALONE)
def _lengths(x: Data) -> list[Call]:
    return [Call(lambda lens: distributed.dcp_local_lengths(lens, 1, 2), (x.here(20, 7),))]


@no_attention("distributed.dcp_local_indices")
def _lists(x: Data) -> list[Call]:
    def paged(lists: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor) -> Any:
        return distributed.dcp_local_indices(lists, 1, 2, page_table=table, page_size=4, topk_length=lengths)

    lists = x.here(7, 2, 5, -1, 9, 1).view(2, 3)
    plain = lambda lists: distributed.dcp_local_indices(lists, 1, 2, compact=False)  # noqa: E731
    return [Call(paged, (lists, x.here(3, 2), x.here(1, 0, 2, 3).view(2, 2))), Call(plain, (lists,))]
