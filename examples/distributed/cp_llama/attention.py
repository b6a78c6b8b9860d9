"""The attention function that transformers calls, over the ranks of a group or on one device.

transformers passes unknown keywords of ``model(...)`` on to its attention function: ``step`` tells it what the tokens
of this forward pass are. No global state is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cutlass_kernels import append_paged_kv_cache_by_slot, attention
from cutlass_kernels.distributed import cp_prefill, dcp_decode

from .pages import Pages

NAME = "cutlass_kernels_context_parallel"


class Attention(Protocol):
    """Who computes. A rank passes its own queries and keys, ``[rows, heads, D]``, requests one after another."""

    name: str
    rank: int
    world: int

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: list[int], page_size: int, scale: float
    ) -> torch.Tensor:
        """``[rows, Hq, D]``: attention of whole prompts, whose lengths are ``seqlens``."""

    def decode(self, q: torch.Tensor, layer: torch.Tensor, pages: Pages, lens: torch.Tensor, scale: float) -> Any:
        """``[B, 1, Hq, D]``: attention of the last token of every request. All ranks pass all heads and get all."""

    def sum(self, x: torch.Tensor) -> None:
        """Adds up the tensors of all ranks, in place."""

    def barrier(self) -> None: ...


class Ranks:
    """All ranks of a group. ``mesh``: what prefill takes as its group, a mesh (nodes, ranks of a node) for "hybrid"."""

    def __init__(self, group: dist.ProcessGroup, mesh: DeviceMesh | None, comm: str) -> None:
        self.group, self.mesh, self.comm = group, mesh, comm
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.name = f"{self.world} ranks"

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: list[int], page_size: int, scale: float
    ) -> torch.Tensor:
        out = cp_prefill(
            q,
            k,
            v,
            self.group if self.mesh is None else self.mesh,
            seqlens=seqlens,
            layout="interleaved",
            block_size=page_size,
            comm=self.comm,
            causal=True,
            sm_scale=scale,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def decode(self, q: torch.Tensor, layer: torch.Tensor, pages: Pages, lens: torch.Tensor, scale: float) -> Any:
        # Weights are replicated: every rank has the queries of all heads, and needs the output of all.
        return dcp_decode(
            q,
            layer[0],
            layer[1],
            self.group,
            seqused_k=lens,
            page_table=pages.table,
            block_size=pages.page_size,
            gather_heads=False,
            sm_scale=scale,
        )

    def sum(self, x: torch.Tensor) -> None:
        dist.all_reduce(x, group=self.group)

    def barrier(self) -> None:
        dist.barrier(self.group)


class OneDevice:
    """The same model on this device alone, to compare with."""

    name, rank, world = "one device", 0, 1

    def prefill(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqlens: list[int], page_size: int, scale: float
    ) -> torch.Tensor:
        indptr = torch.tensor([0, *seqlens]).cumsum(0).to(q.device, torch.int32)
        most = max(seqlens)
        return attention(
            q,
            k,
            v,
            cu_seqlens_q=indptr,
            cu_seqlens_k=indptr,
            max_seqlen_q=most,
            max_seqlen_k=most,
            causal=True,
            sm_scale=scale,
        )

    def decode(self, q: torch.Tensor, layer: torch.Tensor, pages: Pages, lens: torch.Tensor, scale: float) -> Any:
        return attention(q, layer[0], layer[1], page_table=pages.table, seqused_k=lens, causal=True, sm_scale=scale)

    def sum(self, x: torch.Tensor) -> None: ...

    def barrier(self) -> None: ...


@dataclass(frozen=True)
class Step:
    """One forward pass, for all layers."""

    attention: Attention
    pages: Pages
    slots: torch.Tensor  # int64 [rows], of the new keys; -1: another rank holds them
    seqlens: list[int] | None = None  # of a prefill
    lens: torch.Tensor | None = None  # of a decode step: int32 [B], the new token included


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    *,
    step: Step,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer.

    q, k, v are ``[1, heads, rows, D]`` in a prefill, ``[B, heads, 1, D]`` in a decode step; the output has heads third.
    """
    assert isinstance(module.layer_idx, int)
    layer = step.pages.layers[module.layer_idx]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # [rows, heads, D]
    append_paged_kv_cache_by_slot(k, v, layer[0], layer[1], step.slots)
    if step.seqlens is not None:
        out = step.attention.prefill(q, k, v, step.seqlens, step.pages.page_size, scaling)
    else:
        assert step.lens is not None
        out = step.attention.decode(q.unsqueeze(1), layer, step.pages, step.lens, scaling)
    return out.view(query.size(0), query.size(2), *out.shape[-2:]), None


def register() -> str:
    """Makes ``attn_implementation=NAME`` known to transformers. It has no mask function: masks are not made."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    return NAME
