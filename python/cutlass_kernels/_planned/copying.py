"""Copies of the batch wrappers: shallow, deep (as for a second set of a model's weights) and pickled ones.

A shallow copy shares the plan and all buffers. Later plans of either leave the other as it is: the next of each puts
index data into a new buffer (but not those for CUDA graphs, which keep sharing). A deep or pickled copy has buffers of
its own, so it has no plan for kernels: such a plan holds addresses of the buffers that it was made with. A plan of the
reference is copied. How much room a plan needs is found by planning a copy, too.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from .._compute.selection import KERNEL_BACKENDS
from .._graphs import operators
from .batch_plans import Plan

LEAST_WORKSPACE = 16  # bytes: no plan is told that it needs an empty buffer
W = TypeVar("W", bound="Part")
C = TypeVar("C", bound="Copied")


class Part:
    """A wrapper, or an object that it changes when it plans or runs. A shallow copy has copies of all parts below."""

    def __copy__(self: W) -> W:
        other = object.__new__(type(self))
        other.__setstate__({name: _apart(value, self, other) for name, value in self.__dict__.items()})
        return other

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def _apart(value: Any, original: Part, other: Part) -> Any:
    """An attribute of ``original`` as ``other``, its shallow copy, has it."""
    if isinstance(value, Part):
        return copy.copy(value)
    if type(value) is list:
        return [_apart(x, original, other) for x in value]
    if isinstance(value, functools.partial):  # engines put one with the wrapper in the place of plan()
        args = (other if x is original else x for x in value.args)
        return functools.partial(value.func, *args, **value.keywords)
    return value


class DryRun(Part):
    """A wrapper whose plan() ends before it writes anything where ``dry_run`` is set."""

    _dry_run = False
    _needed = (LEAST_WORKSPACE, LEAST_WORKSPACE)  # what a dry run found
    _use_cuda_graph: bool

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether index data is kept in the buffers given to the constructor."""
        return self._use_cuda_graph

    def plan(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes ``(float_workspace, int_workspace)`` that plan() with the same arguments, and its runs, need.

        The float workspace holds the partial results of KV splits; latent attention takes its memory from PyTorch. Both
        sizes are at least 16, so that a buffer of this size has an address. Arguments are checked as in plan(). Nothing
        is planned or written.

        If qo_indptr is a CUDA tensor, its last element is read back: unlike plan(), this waits for the device.
        """
        probe = Part.__copy__(self)  # which plans nothing, and so leaves what it shares
        probe._dry_run = True
        type(self).plan(probe, *args, **kwargs)  # not a function that is bound to this wrapper
        return probe._needed


class Copied(Part):
    """What makes copies of a wrapper. Its constructor sets the attributes."""

    _number: int
    _plan_info: Plan | None
    _stored: Mapping[str, Any]
    _use_cuda_graph: bool
    _graph_mask: bool
    _shares_int_workspace = False  # with a copy, whose plan may be in it

    def __copy__(self: C) -> C:
        other = super().__copy__()
        if not self._use_cuda_graph:
            self._shares_int_workspace = other._shares_int_workspace = True
            if self._plan_info is not None and self._plan_info.schedule is not None:
                self._plan_info.schedule.share()
        return other

    def __getstate__(self) -> dict[str, Any]:
        """What deep copies and pickles get."""
        state, plan = self.__dict__ | {"_shares_int_workspace": False}, self._plan_info
        if plan is None:
            return state
        if plan.backend not in KERNEL_BACKENDS:
            return state | {"_plan_info": plan.without_memory()}
        state["_plan_info"] = None
        if not self._use_cuda_graph:  # else these are buffers, not vectors of the plan
            state["_stored"] = dict.fromkeys(self._stored)
        if not self._graph_mask:
            state["_custom_mask_buf"] = state["_mask_indptr_buf"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = operators.number_of(self)  # compiled functions know a wrapper by it: a copy is another
