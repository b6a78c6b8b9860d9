"""What the registry holds: a public name, its calls on small tensors, and what the documentation promises of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from .data import Data


def several(result: Any) -> tuple[torch.Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else () if result is None else (result,)


@dataclass(frozen=True)
class Call:
    """``run(*tensors)`` returns a tensor, several, or None."""

    run: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    places: tuple[str, ...] = ()  # arguments of run() for the caller's tensors, in the order of the results
    writes: bool = False  # to its tensors
    inputs: tuple[int, ...] | None = None  # tensors that may require gradients; None: all of 16 bits and more
    apart: bool = False  # each result depends on some of the inputs
    label: str = ""  # of a call that has to be told from others

    def __call__(self, tensors: tuple[torch.Tensor, ...] | None = None, **places: torch.Tensor) -> tuple[Any, ...]:
        """What is returned and, of a call that writes to its tensors, what they then hold."""
        if tensors is None:
            tensors = self.copies() if self.writes else self.tensors
        returned = several(self.run(*tensors, **places))
        return (*returned, *tensors) if self.writes else returned

    def copies(self) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone(memory_format=torch.preserve_format) for x in self.tensors)

    def with_grad(self) -> list[tuple[torch.Tensor, ...]]:
        """The tensors, of which one requires a gradient and is no leaf, as in a model: each of the inputs in turn."""
        of_numbers = [i for i, x in enumerate(self.tensors) if x.is_floating_point() and x.element_size() > 1]
        turns = of_numbers if self.inputs is None else self.inputs
        return [tuple(x.requires_grad_() * 1 if i == at else x for i, x in enumerate(self.copies())) for at in turns]

    def empty_places(self) -> dict[str, torch.Tensor]:
        return dict(zip(self.places, map(torch.zeros_like, self())))

    def forms(self) -> list[Call]:
        """Functions of tensors only: without places, and with all of them as the last tensors."""
        if not self.places:
            return [self]
        count, places = len(self.tensors), self.empty_places()

        def run(*tensors: torch.Tensor) -> Any:
            return self.run(*tensors[:count], **dict(zip(places, tensors[count:])))

        return [replace(self, places=()), Call(run, (*self.tensors, *places.values()), writes=True, label=self.label)]


@dataclass(frozen=True)
class Planned:
    """A wrapper, how it or a copy of it is planned, and its calls after that."""

    wrapper: Any
    plan: Callable[[Any], object]
    calls: Callable[[Any], list[Call]]


@dataclass(frozen=True)
class Entry:
    """A public function or class, by its name in the package (``mla.concat_and_cache_mla``)."""

    name: str
    make: Callable[[Data], list[Call] | list[Planned]]
    attends: bool = True  # a backend computes attention
    # "refused": a backward raises. "computed": by PyTorch. "warned": a cache carries none. "none": of no kind.
    gradients: Literal["refused", "computed", "warned", "none"] = "refused"
    # With fullgraph=True, how mode="reduce-overhead" runs it (docs/torch-compile.md). "no": it cannot be traced.
    compiles: Literal["between graphs", "captured", "no"] = "between graphs"
    threads: bool = True  # may call it at once
    merges: bool = False  # states: in a graph by PyTorch's own operators, outside of it by a kernel, with other bits

    def planned(self, x: Data) -> list[Planned]:
        return [y for y in self.make(x) if isinstance(y, Planned)]

    def calls(self, x: Data) -> list[Call]:
        calls: list[Call] = []
        for made in self.make(x):
            if isinstance(made, Planned):
                made.plan(made.wrapper)
                calls += made.calls(made.wrapper)
            else:
                calls.append(made)
        return calls


ENTRIES: dict[str, Entry] = {}


def public(name: str, **promises: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enters a function of Data, which makes the calls of a public name."""

    def enter(make: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in ENTRIES, f"{name} is in the registry twice"
        ENTRIES[name] = Entry(name, make, **promises)
        return make

    return enter


no_attention = functools.partial(public, attends=False, gradients="none", compiles="captured")
