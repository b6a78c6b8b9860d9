"""Every public call with arguments of another kind in the place of each of its tensors: what it does not take, it
refuses in words of its own, before anything is computed."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from registry import Data, Entry, each

import cutlass_kernels as ck

HOME = str(Path(ck.__file__).parent)
# What Python and PyTorch say where nobody has looked before.
FOREIGN = re.compile(
    r"object has no attribute|is not subscriptable|unsupported operand|has no len|not iterable|to unpack|"
    r"[Dd]imension (out of range|specified)|0-d(im)? tensor|must match the size|is not supported for"
)


def others(x: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield from (("None", None), ("text", "text"), ("a number", 3), ("a list", [1, 2]))
    yield "no dimension", x.new_zeros(())
    yield "more dimensions", x[None, None]
    if x.dtype != torch.uint32:
        yield "complex numbers", x.to(torch.complex64)


def is_our_own(error: Exception) -> bool:
    """Whether a sentence of this library says what is wrong, or nothing of it has been called."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename.startswith(HOME)]
    named = isinstance(error, (ValueError, TypeError, RuntimeError, KeyError, AssertionError))
    return not frames or (named and " " in str(error) and not FOREIGN.search(str(error)))


@pytest.mark.runs_nothing("most calls are refused")
@each()
def test_what_is_no_such_tensor_is_refused_in_words(target, entry: Entry):
    wrong = []
    for call in entry.calls(Data(target)):
        for at, x in enumerate(call.tensors):
            for kind, other in others(x):
                tensors: list[Any] = [*call.copies()]
                tensors[at] = other
                try:
                    with torch.no_grad():
                        call.run(*tensors)
                except Exception as error:
                    if not is_our_own(error):
                        wrong.append(f"tensor {at}, {kind}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.runs_nothing("a call without such tensors is none")
@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool], ids=str)
@each(lambda entry: entry.attends)
def test_factors_are_real_numbers(target, entry: Entry, dtype):
    for call in entry.calls(Data(target)):
        for at, x in enumerate(call.tensors):
            if x.dtype == torch.float32:
                tensors = [*call.copies()]
                tensors[at] = x.to(dtype)
                with pytest.raises((TypeError, ValueError)):
                    call.run(*tensors)


@pytest.mark.runs_nothing("calls are refused")
@each(lambda entry: entry.attends)
def test_results_need_memory_of_their_own(target, entry: Entry):
    """Tensors for results whose elements share memory are refused, before another result is written."""
    for call in entry.calls(Data(target)):
        for name in call.places:
            places = call.empty_places()
            if places[name].numel() < 2:
                continue
            places[name] = places[name].flatten()[:1].expand(places[name].shape)
            with pytest.raises((ValueError, RuntimeError), match=r"share memory|must be contiguous|is not contiguous"):
                call.run(*call.copies(), **places)
            assert not any(x.any() for x in places.values())
