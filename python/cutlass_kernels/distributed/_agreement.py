"""What ranks tell one another before a call: the check that they all make the same one, and facts about each."""

from __future__ import annotations

import datetime
import hashlib
import json
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ._peers import Grid, Peers, is_capturing, timeout_of

Facts = dict[str, Any]  # that ranks compare, by name
T = TypeVar("T")


class RanksDiffer(ValueError):
    """Found by all ranks."""


class RanksMissing(RuntimeError):
    """Some did not come to an exchange."""


MOST_AGREED = 4096  # kinds of calls that a group remembers
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()
_NEW = object()


def agree(grid: Grid, kind: tuple[Any, ...], prepare: Callable[[], tuple[Facts, T]]) -> T:
    """What ``prepare()`` makes of the first call of a kind. Raises on every rank if facts differ between ranks, or if
    one of them has found a fault.

    Ranks exchange facts before the first call of a kind; a rank whose later calls differ is found by the timeout of the
    group. A rank that finds a fault of its own in a later call raises it after that timeout.

    Args:
        kind: the function, and what calls of a kind have in common. A call must be new to all ranks, or to none: what
            may change on one rank alone is no part of it.
        prepare: checks the arguments; returns facts, and what later calls of the kind need, which is kept.
    """
    known = _agreed.setdefault(grid.outer.group, {})
    key: Hashable = (*kind, None if grid.inner is None else grid.inner.ranks)
    try:
        found = known.get(key, _NEW)
    except TypeError:  # of an option that has no hash, such as a list
        key = repr(key)
        found = known.get(key, _NEW)
    if found is not _NEW:
        return cast(T, found)
    error: Exception | None = None
    try:
        facts, made = prepare()
    except (RanksDiffer, RanksMissing):  # in an exchange that it makes: all know
        raise
    except Exception as found_error:  # of any type: a rank that raises must not leave the others waiting
        facts, error = {}, found_error
    if is_capturing():
        if error is not None:
            raise error
        return made
    told = {"the function": str(kind[0])} | {name: str(value) for name, value in facts.items()}
    fault = None if error is None else f"On rank {dist.get_rank()}: {_sentence(error)}"
    for peers in (grid.inner, grid.outer):
        if peers is not None and peers.world > 1:
            try:
                fault = _fault_among(peers, told, fault)
            except RanksMissing as late:  # the others are past this check, and in their call
                if fault is None:
                    raise
                raise ValueError(fault) from (error or late)
    if fault is not None:
        raise ValueError(fault) from error
    if len(known) >= MOST_AGREED:
        known.clear()  # on all ranks at once: they add the same
    known[key] = made
    return made


def form(x: torch.Tensor | Any) -> Any:
    """Of an optional argument what a kind has of it: not its numbers."""
    return (x.dtype, x.shape, x.device) if isinstance(x, torch.Tensor) else x is None


def _sentence(error: Exception) -> str:
    expected = isinstance(error, (ValueError, TypeError, RuntimeError))
    return str(error) if expected else f"{type(error).__name__}: {error}"


def _fault_among(peers: Peers, told: dict[str, str], fault: str | None) -> str | None:
    every = gather_facts(peers, "arguments of a call", [told, fault])
    for _, found in every:
        if found is not None:
            return str(found)
    for name in every[0][0]:
        if differences := _differences(peers, [theirs.get(name, "not given") for theirs, _ in every]):
            return f"Ranks disagree on {name}: {differences}. Pass the same on all of them."
    return None


def _differences(peers: Peers, values: Sequence[str]) -> str:
    """Which ranks have which value; empty where all have the same."""
    of_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in zip(peers.ranks, values, strict=True):
        of_value[value].append(rank)
    if len(of_value) == 1:
        return ""
    return "; ".join(
        f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for value, ranks in of_value.items()
    )


class _Exchanges:
    """Of a group: where its ranks meet in the store, and how often they have. The keys of groups differ:

    - Groups that were split from one may share a name and a store; their ranks differ.
    - A group that is made again, in the same processes, may have the name, the ranks and the store of the one before;
      then it is of another generation.
    """

    def __init__(self, peers: Peers, store: dist.Store) -> None:
        name = f"{peers.group.group_name} {peers.ranks}"
        begin = f"cutlass_kernels/{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
        self.begin = f"{begin}/{store.add(f'{begin}/{peers.rank}', 1)}"
        self.number = 0  # those that have succeeded

    def keys(self, number: int, world: int) -> list[str]:
        return [f"{self.begin}/{number}/{rank}" for rank in range(world)]


_exchanges: weakref.WeakKeyDictionary[dist.ProcessGroup, _Exchanges] = weakref.WeakKeyDictionary()


def gather_facts(peers: Peers, purpose: str, fact: Any) -> list[Any]:
    """What each rank states, by rank: anything that JSON has. ``RanksDiffer`` where they came for different purposes.

    Over the store of the group, on the host. NCCL would wait for ever for a rank that has died before its first
    collective; here a rank that does not come ends the others with an error, after the timeout of the group.
    """
    store = distributed_c10d._get_process_group_store(peers.group)
    if peers.group not in _exchanges:
        _exchanges[peers.group] = _Exchanges(peers, store)
    here = _exchanges[peers.group]
    keys = here.keys(here.number, peers.world)
    since, seconds = time.time(), timeout_of(peers.group)
    try:
        store.set(keys[peers.rank], json.dumps([purpose, fact]))
        store.wait(keys, datetime.timedelta(seconds=seconds))
        every = [json.loads(text) for text in store.multi_get(keys)]
    except RuntimeError as error:
        raise RanksMissing(_who_is_missing(store, peers, keys, since, seconds)) from error
    here.number += 1
    if here.number > 1:  # all ranks have read it, as they have come to the exchange after it
        store.delete_key(here.keys(here.number - 2, peers.world)[peers.rank])
    if differences := _differences(peers, [purpose for purpose, _ in every]):
        raise RanksDiffer(f"Ranks make different calls: {differences}.")
    return [fact for _, fact in every]


def _who_is_missing(store: dist.Store, peers: Peers, keys: list[str], since: float, seconds: float) -> str:
    """A sentence about an exchange that failed. It takes back what this rank has said, so that all meet in the next."""

    def came(key: str) -> bool:
        """Also a rank that has waited at the same time, and has left already."""
        left = f"{key}/left"
        return bool(store.check([key]) or (store.check([left]) and float(store.get(left)) > since))

    try:
        store.set(f"{keys[peers.rank]}/left", str(time.time()))
        store.delete_key(keys[peers.rank])
        missing = [str(rank) for rank, key in zip(peers.ranks, keys, strict=True) if not came(key)]
    except RuntimeError:
        return "The store of the group does not answer: the process that serves it, rank 0 or torchrun's, has ended."
    who = f"Rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else "Other ranks"
    return f"{who} did not come within {seconds:g} s, the timeout of the group: see what happened there."
