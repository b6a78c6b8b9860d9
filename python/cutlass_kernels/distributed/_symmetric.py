"""Memory that every rank of a node maps: copies between them by the copy engines, which leave the SMs to attention, and
exchanges of few rows by one kernel, which writes to the other GPUs, waits, and merges or copies.

Symmetric memory of torch 2.8 and newer, over NVLink. Where a group has none, messages are sent.
"""

from __future__ import annotations

import contextlib
import socket
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .._compute import kernels
from .._compute.merging import NAME_OF_STATE
from .._core import native
from ._agreement import gather_facts
from ._peers import Peers, is_capturing, timeout_of

ALIGNMENT = 1 << 21
NO_ROOM = "out of memory"  # of faults, the one that may pass


class Workspace:
    """Of a group: this rank's buffer, those of the others, and a stream for copies."""

    def __init__(self, peers: Peers, memory: torch.Tensor) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        device = memory.device
        self.size, self.device, self.rank = memory.numel(), device, peers.rank
        self.timeout = timeout_of(peers.group)  # seconds
        self.captured = False  # whether a graph may hold its addresses
        self.memory = memory.zero_()
        self.handle = symmetric.rendezvous(self.memory, peers.group.group_name)
        self.pointers: list[int] = list(self.handle.buffer_ptrs)
        self.stream = torch.cuda.Stream(device)
        self.started, self.read = torch.cuda.Event(), torch.cuda.Event()  # of that stream

    def of(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
        """A tensor that begins ``offset`` bytes into a rank's buffer."""
        tensor: torch.Tensor = self.handle.get_buffer(rank, shape, dtype, offset // dtype.itemsize)
        return tensor

    def barrier(self, channel: int) -> None:
        """The current stream waits for those of the other ranks. Concurrent barriers take channels of their own.

        A rank that does not come ends the others with a CUDA error, after the timeout of the group.
        """
        self.handle.barrier(channel, timeout_ms=int(self.timeout * 1000))


# Of each group by use. Of those that a graph was captured with, all are kept: the graph may be replayed after growth.
_kept: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, Workspace]] = weakref.WeakKeyDictionary()
_captured: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Workspace]] = weakref.WeakKeyDictionary()
_without: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # groups that cannot have any
# Sizes that could not be had, of each group by use: not asked for again, which would take a synchronization per call.
_refused: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, int]] = weakref.WeakKeyDictionary()


def workspace(peers: Peers | None, size: int, device: torch.device, use: str) -> Workspace | None:
    """At least ``size`` bytes, the same on all ranks, zeroed; None where the group has no symmetric memory.

    It is allocated together, by all ranks, when it has to grow: not while a graph is captured. ``use``: who shares it.
    """
    if peers is None or peers.world == 1 or device.type != "cuda":
        return None
    kept = _kept.setdefault(peers.group, {})
    found = kept.get(use)
    capturing = is_capturing()
    if found is not None and found.size >= size:
        if capturing and not found.captured:
            found.captured = True
            _captured.setdefault(peers.group, []).append(found)
        return found
    refused = _refused.setdefault(peers.group, {})
    if peers.group in _without or size >= refused.get(use, size + 1):
        return None
    if capturing:
        raise RuntimeError("The first call of its size allocates symmetric memory: make it before capturing a graph.")
    # By a quarter at least: prompts that come in chunks ask for more with each of them.
    wanted = max(size, found.size * 5 // 4 if found else 0)
    made = _make(peers, -(-wanted // ALIGNMENT) * ALIGNMENT, device)
    if made is None:
        refused[use] = size
    else:
        kept[use] = made
    return made


# Rendezvous that this process has made. PyTorch numbers them by process, not by group, and waits for ever where the
# ranks of a group are at different numbers (pytorch/pytorch#196082).
_rendezvous = 0


def _make(peers: Peers, size: int, device: torch.device) -> Workspace | None:
    """All ranks get one, or none does."""
    global _rendezvous
    nodes = gather_facts(peers, "the node that it is on", _node(device))
    if len(set(nodes)) > 1 or nodes[0] is None:
        _without.add(peers.group)
        return None
    torch.cuda.synchronize(device)  # the old one may be in use
    memory, fault = _allocate(size, device)
    # Before the rendezvous, in which ranks wait for one another.
    every = gather_facts(peers, "symmetric memory", [fault, _rendezvous])
    faults = [fault for fault, _ in every]
    if memory is None or any(faults):
        if any(fault not in (None, NO_ROOM) for fault in faults):
            _without.add(peers.group)
            return None
        full = [str(rank) for rank, fault in zip(peers.ranks, faults, strict=True) if fault]
        _warn(f"there is no room for {size >> 20} MiB of symmetric memory on rank {', '.join(full)}")
        return None
    if len({number for _, number in every}) > 1:
        _warn(
            "in other groups, some of its ranks have allocated symmetric memory more often than others, "
            "and PyTorch may then wait for ever"
        )
        return None
    made = None
    _rendezvous += 1
    with contextlib.suppress(RuntimeError, AttributeError):
        made = Workspace(peers, memory)
        torch.cuda.synchronize(device)  # zeroed, before another rank writes
    if all(gather_facts(peers, "symmetric memory that others see", made is not None)):
        return made
    _without.add(peers.group)
    return None


def _warn(why: str) -> None:
    warnings.warn(f"Messages are sent instead of copies over NVLink: {why}.", stacklevel=2)


def _allocate(size: int, device: torch.device) -> tuple[torch.Tensor | None, str | None]:
    """Memory, or why there is none."""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        return symmetric.empty(size, dtype=torch.uint8, device=device), None
    except (ImportError, RuntimeError, AttributeError) as error:
        return None, NO_ROOM if "out of memory" in str(error) else str(error)


def _node(device: torch.device) -> str | None:
    """The same on ranks whose GPUs reach one another's memory; None where this one reaches no other."""
    if device.type != "cuda":
        return None
    others = [i for i in range(torch.cuda.device_count()) if i != device.index]
    if any(not torch.cuda.can_device_access_peer(device, i) for i in others):
        return None
    return socket.gethostname()


# --- nodes ---

_per_node: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def ranks_per_node(peers: Peers, device: torch.device) -> int:
    """How many ranks of a group share a node, the same on every rank: the fewest of any node, 1 where GPUs cannot reach
    each other's memory. Collective at the first call with a group, so all ranks call it, whatever else they disagree
    on."""
    if peers.world == 1:
        return 1
    if peers.group not in _per_node:
        if is_capturing():
            return peers.world
        nodes = gather_facts(peers, "the node that it is on", _node(device))
        counts = [1 if node is None else nodes.count(node) for node in nodes]
        _per_node[peers.group] = min(counts)
    return _per_node[peers.group]


# --- exchanges by one kernel ---

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
    place = _place(out, peers, scatter)
    if place is None:
        return None
    own = heads // peers.world if scatter else heads
    merged, merged_lse = out.new_empty(rows, own, dim), lse.new_empty(rows, own)
    out = _aligned(out)
    states = (*_rows_of(out), lse.data_ptr(), *lse.stride())
    with torch.cuda.device(out.device):
        native._C.combine_ranks(*states, scatter, merged.data_ptr(), merged_lse.data_ptr(), *place)
    return merged, merged_lse


def gather_heads(x: torch.Tensor, peers: Peers) -> torch.Tensor | None:
    """``[rows, heads, dim]`` of every rank as ``[rows, all heads, dim]``; None without symmetric memory."""
    rows, heads, dim = x.shape
    place = _place(x, peers, False)
    if place is None:
        return None
    x = _aligned(x)
    whole = x.new_empty(rows, heads * peers.world, dim)
    with torch.cuda.device(x.device):
        native._C.gather_heads(*_rows_of(x), whole.data_ptr(), *place)
    return whole


def _rows_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Type, shape, address and strides, as kernels take them."""
    return NAME_OF_STATE[x.dtype], *x.shape, x.data_ptr(), *x.stride()[:2]


def _place(x: torch.Tensor, peers: Peers, scatter: bool) -> tuple[Any, ...] | None:
    """Where a kernel writes, as it takes that: rank, memory of all ranks, timeout and stream."""
    size = native._C.exchange_bytes(NAME_OF_STATE[x.dtype], *x.shape, peers.world, scatter)
    shared = workspace(peers, size, x.device, "exchange")
    if shared is None:
        return None
    stream = torch.cuda.current_stream(shared.device).cuda_stream
    return peers.rank, shared.pointers, shared.size, int(shared.timeout * 1e9), stream


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """Rows of 16 bytes that follow one another; a copy where x has others."""
    bits = x.data_ptr() | (x.stride(0) | x.stride(1)) * x.element_size()
    return x if x.stride(2) == 1 and bits % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
