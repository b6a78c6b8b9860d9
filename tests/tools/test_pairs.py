"""Samples of stacked parameters hold every pair of values that the cases hold."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pairs
import pytest


def pairs_in(cases: list[tuple[Any, ...]]) -> set[Any]:
    return set(itertools.chain.from_iterable(itertools.combinations(enumerate(case), 2) for case in cases))


def check(cases: list[tuple[Any, ...]]) -> list[int]:
    chosen = pairs.sample(cases)
    assert chosen == sorted(set(chosen)) == pairs.sample(list(cases))
    assert pairs_in([cases[index] for index in chosen]) == pairs_in(cases)
    return chosen


@pytest.mark.parametrize(
    "sizes,count",
    [((3, 9, 4), 36), ((3, 2, 7, 2), 21), ((2, 4, 3, 6), 24), ((2, 2, 2), 4), ((3, 3, 3, 3), 9), ((1, 5, 1), 5)],
    ids=str,
)
def test_every_pair_of_a_product_occurs(sizes, count):
    assert len(check(list(itertools.product(*map(range, sizes))))) == count  # as few as there can be


def test_every_pair_of_chosen_cases_occurs():
    drawn = random.Random(0)
    for _ in range(20):
        product = list(itertools.product(range(3), "abcd", (None, 1.5), range(3)))
        check(drawn.sample(product, drawn.randrange(1, len(product))))


def test_no_case_of_two_parameters_or_fewer_is_left_out():
    assert pairs.sample([]) == []
    assert pairs.sample([(), ()]) == [0, 1]
    assert pairs.sample([(1,), (1,)]) == [0, 1]
    assert check([(0, "a"), (0, "b"), (1, "a")]) == [0, 1, 2]


class Item:
    """As much of an item of pytest as there is to look at."""

    parent, originalname = None, "test"

    def __init__(self, decorators: list[str], params: dict[str, Any], marked: bool = True) -> None:
        self.decorators, self.callspec, self.marked = decorators, SimpleNamespace(params=params), marked

    def get_closest_marker(self, name: str) -> bool | None:
        return True if self.marked and name == "pairwise" else None

    def iter_markers(self, name: str) -> list[Any]:
        return [SimpleNamespace(args=(names,)) for names in self.decorators]


def items_of(places: list[str], marked: bool = True) -> list[Item]:
    shapes, options, dtypes = [([1], [9]), ([2], [9])], [{"a": 1}, {"a": 1}, {}], ["x", "y"]
    return [
        Item(["rows, keys", "option"], dict(target=place, rows=r, keys=k, option=option, dtype=dtype), marked)
        for place, (r, k), option, dtype in itertools.product(places, shapes, options, dtypes)
    ]


def test_every_place_has_a_sample_of_its_own():
    items = items_of(["cpu", "cuda"])
    outside = pairs.outside_of_samples(items)
    for place in ("cpu", "cuda"):
        assert len([x for x in items if x.callspec.params["target"] == place and x not in outside]) == 6


def test_values_of_one_decorator_stay_together():
    assert pairs.axes_of(items_of(["cpu"])[0]) == [["rows", "keys"], ["option"], ["dtype"]]


def test_tests_without_the_mark_are_not_sampled():
    assert pairs.outside_of_samples(items_of(["cpu"], marked=False)) == set()
