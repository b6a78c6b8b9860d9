"""How many ranks of a group share a node: found once, by all ranks together."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from . import _symmetric
from ._agreement import gather_facts
from ._peers import Peers, is_capturing

_known: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def ranks_per_node(peers: Peers, device: torch.device) -> int:
    """The same on every rank: the fewest of any node, 1 where GPUs cannot reach each other's memory. Collective at the
    first call with a group, so all ranks call it, whatever else they disagree on."""
    if peers.world == 1:
        return 1
    if peers.group not in _known:
        if is_capturing():
            return peers.world
        nodes = gather_facts(peers, "the node that it is on", _symmetric._node(device))
        counts = [1 if node is None else nodes.count(node) for node in nodes]
        _known[peers.group] = min(counts)
    return _known[peers.group]
