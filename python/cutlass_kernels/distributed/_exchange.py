"""Exchanges of few rows between the GPUs of a node: one kernel writes to the others, waits, and merges or copies."""

from __future__ import annotations

from typing import Any

import torch

from .._compute import kernels
from .._compute.merging import NAME_OF_STATE
from .._core import native
from . import _symmetric
from ._peers import Peers
from ._symmetric import Workspace

MOST_RANKS = 16  # kMostRanks of ranks.h
MOST_BYTES = 4 << 20  # to send to a rank; above, NCCL has more of the links


def serves(x: torch.Tensor, peers: Peers) -> bool:
    """Whether there is a kernel for ``[rows, heads, dim]`` of this kind, leaving the group aside."""
    return (
        x.is_cuda
        and 1 < peers.world <= MOST_RANKS
        and x.dtype in NAME_OF_STATE
        and x.size(2) * x.element_size() % 16 == 0
        and kernels.move(x)
    )


def combine(
    out: torch.Tensor, lse: torch.Tensor, peers: Peers, scatter: bool
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The state over the keys of all ranks; None where the group has no symmetric memory."""
    rows, heads, dim = out.shape
    workspace = _workspace(out, peers, scatter)
    if workspace is None:
        return None
    own = heads // peers.world if scatter else heads
    merged, merged_lse = out.new_empty(rows, own, dim), lse.new_empty(rows, own)
    out = _aligned(out)
    with torch.cuda.device(out.device):
        native._C.combine_ranks(
            NAME_OF_STATE[out.dtype],
            rows,
            heads,
            dim,
            out.data_ptr(),
            *out.stride()[:2],
            lse.data_ptr(),
            *lse.stride(),
            scatter,
            merged.data_ptr(),
            merged_lse.data_ptr(),
            *_ranks(workspace, peers),
        )
    return merged, merged_lse


def gather_heads(x: torch.Tensor, peers: Peers) -> torch.Tensor | None:
    """``[rows, heads, dim]`` of every rank as ``[rows, all heads, dim]``; None without symmetric memory."""
    rows, heads, dim = x.shape
    workspace = _workspace(x, peers, False)
    if workspace is None:
        return None
    x = _aligned(x)
    whole = x.new_empty(rows, heads * peers.world, dim)
    with torch.cuda.device(x.device):
        native._C.gather_heads(
            NAME_OF_STATE[x.dtype],
            rows,
            heads,
            dim,
            x.data_ptr(),
            *x.stride()[:2],
            whole.data_ptr(),
            *_ranks(workspace, peers),
        )
    return whole


def _workspace(x: torch.Tensor, peers: Peers, scatter: bool) -> Workspace | None:
    size = native._C.exchange_bytes(NAME_OF_STATE[x.dtype], *x.shape, peers.world, scatter)
    return _symmetric.workspace(peers, size, x.device, "exchange")


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows of 16 bytes that follow one another; a copy where x has others."""
    bits = x.data_ptr() | (x.stride(0) | x.stride(1)) * x.element_size()
    return x if x.stride(2) == 1 and bits % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _ranks(workspace: Workspace, peers: Peers) -> tuple[Any, ...]:
    stream = torch.cuda.current_stream(workspace.device).cuda_stream
    return peers.rank, workspace.pointers, workspace.size, int(workspace.timeout * 1e9), stream
