"""Calls that the compiled module finds again by itself (``_found``): those that a key found before, and no others."""

from __future__ import annotations

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from cutlass_kernels import _found


class Repeat:
    """What a key has found: says with what it was run."""

    def __init__(self, name: str = "repeat") -> None:
        self.name, self.runs = name, []

    def run(self, *args: object) -> str:
        self.runs.append(args)
        return self.name


@pytest.fixture(autouse=True)
def compiled() -> None:
    if _found._maker() is None:
        pytest.skip("there are no compiled kernels, or this torch does not describe tensors to them")


def tensors(**changes: object) -> dict[str, object]:
    given = dict(
        q=torch.zeros(5, 4, 64), k=torch.zeros(7, 2, 64), v=torch.zeros(7, 2, 64), out=None, lse=None, sinks=None
    )
    return given | dict(return_lse=False, number=None, name="NHD") | changes


def calls_with(repeat: Repeat, **changes: object) -> _found.Calls:
    calls = _found.Calls()
    calls.found(repeat, None, *tensors(**changes).values())
    return calls


def test_equal_calls_are_found_with_their_own_tensors():
    repeat = Repeat()
    calls = calls_with(repeat)
    assert _found.Calls().again(*tensors().values()) is None
    given = tensors()
    assert calls.again(*given.values()) == "repeat"
    run = repeat.runs[-1]
    assert all(x is y for x, y in zip(run[:3], list(given.values())[:3], strict=True)) and run[3:] == (
        *[None] * 3,
        False,
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(q=torch.zeros(6, 4, 64)),
        dict(q=torch.zeros(5, 4, 128)[..., ::2]),
        dict(q=torch.zeros(20, 64)),
        dict(q=torch.zeros(5, 4, 64).half()),
        dict(q=torch.zeros(5, 4, 64, dtype=torch.int32)),
        dict(q=torch.nn.Parameter(torch.zeros(5, 4, 64))),
        dict(q=torch.zeros(5, 4, 64, device="meta")),
        dict(q=None),
        dict(q=[1.0]),
        dict(v=None),
        dict(v=(torch.zeros(7, 2, 64), torch.zeros(7, 2, 64))),
        dict(out=torch.zeros(5, 4, 64)),
        dict(lse=torch.zeros(5, 4)),
        dict(sinks=torch.zeros(4)),
        dict(return_lse=True),
        dict(return_lse=0),
        dict(number=0),
        dict(number=0.0),
        dict(number=False),
        dict(number=torch.zeros(1)),
        dict(name="HND"),
        dict(more=None),
    ],
    ids=lambda change: "-".join(f"{name}={str(x)[:12]}".replace("\n", "") for name, x in change.items()),
)
def test_other_calls_are_not_found(change):
    assert calls_with(Repeat()).again(*tensors(**change).values()) is None


@pytest.mark.parametrize("number", [None, True, False, 0, -1, 2**62, 0.0, 0.5, -0.5])
def test_numbers_are_known_by_type_and_value(number):
    calls = calls_with(Repeat(), number=number)
    for other in (None, True, False, 0, 1, -1, 2**62, 0.0, 1.0, 0.5, -0.5, 2**70):
        same = type(other) is type(number) and other == number
        assert (calls.again(*tensors(number=other).values()) is not None) == same


def test_what_was_given_last_is_found():
    calls = calls_with(Repeat())
    calls.found(repeat := Repeat("other"), None, *tensors().values())
    assert calls.find(*tensors().values()) is repeat and calls.find(*tensors(name="HND").values()) is None
    assert not repeat.runs
    assert calls.again(*tensors().values()) == "other"


def test_a_pair_is_keys_and_values():
    k, v = torch.zeros(2, 7, 2, 64)
    repeat = Repeat()
    calls = calls_with(repeat, k=k, v=v)
    assert calls.again(*tensors(k=(k, v), v=None).values()) == "repeat"
    assert repeat.runs[-1][1] is k and repeat.runs[-1][2] is v
    calls.found(repeat, None, *tensors(k=k, v=None).values())
    for pair in ((k,), (k, v, v), [k, v], (k, None), (None, v)):
        assert calls.again(*tensors(k=pair, v=None).values()) is None


def test_tensors_of_no_elements_are_left_to_the_keys():
    empty = torch.zeros(0, 4, 64)
    assert calls_with(Repeat(), q=empty).again(*tensors(q=empty).values()) is None


def test_what_a_call_needs_lives_as_long_as_it_is_known():
    repeat, options = Repeat(), Repeat("options")
    watched = weakref.ref(repeat), weakref.ref(options)
    calls = calls_with(repeat, name=options)
    del repeat
    assert calls.again(*tensors(name=options).values()) == "repeat"
    del options
    gc.collect()
    assert all(x() is not None for x in watched)  # another object never gets the address of these
    for rows in range(1, _found.MOST + 1):
        calls.found(Repeat(), None, *tensors(q=torch.zeros(rows, 1, 1)).values())
    assert all(x() is None for x in watched)
    watched = weakref.ref(last := Repeat())
    calls.found(last, None, *tensors().values())
    del last, calls
    assert watched() is None


def test_errors_of_a_call_are_the_callers():
    def fail(*args: object) -> None:
        raise RuntimeError("no memory is left.")

    calls = calls_with(SimpleNamespace(run=fail))
    with pytest.raises(RuntimeError, match="no memory is left"):
        calls.again(*tensors().values())


def test_a_call_may_forget_itself_while_it_runs():
    calls = _found.Calls()

    def run(*args: object) -> str:
        for rows in range(1, _found.MOST + 1):
            calls.found(Repeat(), None, *tensors(q=torch.zeros(rows, 1, 1)).values())
        return "done"

    calls.found(SimpleNamespace(run=run), None, *tensors().values())
    assert calls.again(*tensors().values()) == "done"
    assert calls.again(*tensors().values()) is None


def test_copies_know_calls_of_their_own():
    calls = calls_with(Repeat())
    calls["key"] = "call"
    for other in (copy.copy(calls), copy.deepcopy(calls)):
        assert type(other) is _found.Calls and other == {"key": "call"}
        assert other.again(*tensors().values()) is None


def test_without_the_compiled_module_keys_find_all(monkeypatch):
    monkeypatch.setattr(_found, "_maker", lambda: None)
    assert calls_with(Repeat()).again(*tensors().values()) is None
