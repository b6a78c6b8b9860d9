"""Stacked parameters, and samples of them: every two values that some case combines, a case of the sample does, too."""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import pytest
import torch

# Parameters that say where a case runs. Each of their values has a sample of its own.
PLACES = {"target", "kernels", "kernel_backend", "device"}


def every(**axes: Iterable[Any] | Mapping[str, Any]) -> Callable[[Any], Any]:
    """Parametrizes a test by all combinations: ``@every(dim=[64, 128], options={"full": Options()})``.

    A mapping names its values. Others are named as they are written.
    """

    def decorate(test: Any) -> Any:
        for name, values in axes.items():
            ids: Any = _written
            if isinstance(values, Mapping):
                values, ids = values.values(), list(values)
            test = pytest.mark.parametrize(name, list(values), ids=ids)(test)
        return test

    return decorate


def _written(value: Any) -> str | None:
    named = isinstance(value, (tuple, list, dict, torch.dtype)) or dataclasses.is_dataclass(value)
    return str(value) if named else None  # None: as pytest names it


def sample(cases: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Indices of the chosen cases, in order. A case has one value for each parameter.

    Greedy: the next case is the one with the most missing pairs, and the first of several. What a case adds never
    grows, so the case at the top of the heap is the best one if its count is up to date.
    """
    if not cases or len(cases[0]) < 3:
        return list(range(len(cases)))
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing = set().union(*pairs)
    heap = [(-len(own), index) for index, own in enumerate(pairs)]
    heapq.heapify(heap)
    chosen = []
    while missing:
        count, index = heapq.heappop(heap)
        adds = len(pairs[index] & missing)
        if adds < -count:
            heapq.heappush(heap, (-adds, index))
            continue
        missing -= pairs[index]
        chosen.append(index)
    return sorted(chosen)


def axes_of(item: Any) -> list[list[str]]:
    """Names of parameters, those of one decorator together: a tuple of values that somebody chose stays whole."""
    names = [mark.args[0] for mark in item.iter_markers("parametrize")]
    stacked = [[x.strip() for x in name.split(",")] if isinstance(name, str) else list(name) for name in names]
    others = item.callspec.params.keys() - set(chain(*stacked))  # of fixtures
    return [axis for axis in (*stacked, *([name] for name in sorted(others))) if not PLACES.intersection(axis)]


def outside_of_samples(items: Iterable[Any]) -> set[Any]:
    """The cases of tests marked ``pairwise`` that are not in the sample of their test and place."""
    groups: dict[tuple[object, ...], list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") is not None:
            place = tuple(id(item.callspec.params.get(name)) for name in sorted(PLACES))
            groups[item.parent, item.originalname, place].append(item)
    outside = set()
    for group in groups.values():
        axes = axes_of(group[0])
        # All cases of a test share the objects of their values, some of which have no hash.
        cases = [tuple(tuple(id(x.callspec.params[name]) for name in axis) for axis in axes) for x in group]
        chosen = set(sample(cases))
        outside.update(item for index, item in enumerate(group) if index not in chosen)
    return outside
