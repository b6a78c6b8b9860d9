"""What ranks tell one another before a call: the check that they all make the same one, and facts about each."""

from __future__ import annotations

import datetime
import itertools
import json
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ._peers import Grid, Peers, is_capturing, timeout_of

MOST_AGREED = 4096  # kinds of calls that a group remembers
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()


def agree(grid: Grid, facts: dict[str, Any], fault: str | None) -> None:
    """Raises on every rank if facts differ between ranks, or if one of them has found a fault.

    Ranks exchange them before the first call of its kind; a rank whose later calls differ is found by the timeout of
    the group. A rank that finds a fault of its own in a later call raises it after that timeout.
    """
    key = hash(tuple(map(str, facts.values())))
    if fault is not None:
        fault = f"On rank {dist.get_rank()}: {fault}"
    groups = [peers for peers in (grid.inner, grid.outer) if peers is not None]
    for peers in groups:
        known = _agreed.setdefault(peers.group, set())
        if peers.world > 1 and (fault is not None or key not in known) and not is_capturing():
            try:
                fault = _fault_among(peers, facts, fault)
            except RuntimeError as error:  # the others are past this check, and in their call
                if fault is None:
                    raise
                raise ValueError(fault) from error
    if fault is not None:
        raise ValueError(fault)
    if is_capturing():
        return
    for peers in groups:
        known = _agreed[peers.group]
        if len(known) >= MOST_AGREED:
            known.clear()  # on all ranks at once: they add the same
        known.add(key)


def _fault_among(peers: Peers, facts: dict[str, Any], fault: str | None) -> str | None:
    every = gather_facts(peers, ({name: str(value) for name, value in facts.items()}, fault))
    for _, found in every:
        if found is not None:
            return str(found)
    for name in facts:
        values: dict[str, list[int]] = defaultdict(list)
        for rank, (theirs, _) in zip(peers.ranks, every, strict=True):
            values[theirs.get(name, "not given")].append(rank)
        if len(values) > 1:
            told = "; ".join(
                f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                for value, ranks in values.items()
            )
            return f"Ranks disagree on {name}: {told}. Pass the same on all of them."
    return None


# Of each group, numbers for the exchanges to come.
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()


def gather_facts(peers: Peers, fact: Any) -> list[Any]:
    """What each rank states, by rank: anything that JSON has.

    Over the store of the group, on the host. NCCL would wait for ever for a rank that has died before its first
    collective; here a rank that does not come ends the others with an error, after the timeout of the group.
    """
    store = distributed_c10d._get_process_group_store(peers.group)
    number = next(_numbers.setdefault(peers.group, itertools.count()))
    keys = [f"cutlass_kernels/{number}/{rank}" for rank in range(peers.world)]
    store.set(keys[peers.rank], json.dumps(fact))
    seconds = timeout_of(peers.group)
    try:
        store.wait(keys, datetime.timedelta(seconds=seconds))
    except RuntimeError as error:
        missing = [str(rank) for rank, key in zip(peers.ranks, keys, strict=True) if not store.check([key])]
        told = f"Rank{'s' * (len(missing) > 1)} {', '.join(missing)} did not come within {seconds:g} s"
        raise RuntimeError(f"{told}, the timeout of the group: see what happened there.") from error
    every = [json.loads(text) for text in store.multi_get(keys)]
    if number > 0:  # all ranks have read it, as they have come to the exchange after it
        store.delete_key(f"cutlass_kernels/{number - 1}/{peers.rank}")
    return every
