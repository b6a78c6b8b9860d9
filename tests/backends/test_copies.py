"""Copies of wrappers: deep ones and pickled ones are wrappers of their own, which on a GPU have to be planned first."""

from __future__ import annotations

import copy
import functools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_all_bitwise
from pairs import every
from registry import ENTRIES, Data, Entry, Planned, each
from targets import Target

import cutlass_kernels as ck
from cutlass_kernels._compute import kernels, reference, selection

ON_CPU = Target("cpu", "auto")
WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper))}


wrappers = each(lambda entry: hasattr(getattr(ck, entry.name, None), "plan"))


def run(planned: Planned, wrapper: Any) -> tuple[torch.Tensor, ...]:
    return planned.calls(wrapper)[0]()


def planned(name: str, number: int = 0) -> Planned:
    return ENTRIES[name].planned(Data(ON_CPU))[number]


class Uncopied(SimpleNamespace):
    """Like a compiled plan, cannot be copied."""

    def share(self) -> None:
        pass

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'cutlass_kernels._C.BatchPlan'")


@pytest.fixture
def compiled_plans(monkeypatch) -> None:
    """As if the reference were a kernel, whose plans cannot be copied."""

    def compute(problem: Any, backend: str, schedule: Any = None) -> None:
        reference.compute(problem)

    monkeypatch.setattr(selection, "select", lambda requested, request: "fa2")
    monkeypatch.setattr(selection, "compute", compute)
    monkeypatch.setattr(kernels, "reads_as_is", lambda backend, request: False)
    monkeypatch.setattr(kernels, "Schedule", lambda *args: Uncopied(general=True, as_is=False, made=None))


@pytest.mark.runs_nothing("the reference computes in place of a kernel")
@every(way=WAYS.keys())
@wrappers
def test_copies_have_no_plan_of_kernels(compiled_plans, entry, way):
    check_that_copies_are_planned_again(entry, ON_CPU, way)


@pytest.mark.gpu
@every(way=WAYS.keys())
@wrappers
def test_copies_on_a_gpu(target, entry, way):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, where plans are copied, too")
    check_that_copies_are_planned_again(entry, target, way)


def check_that_copies_are_planned_again(entry: Entry, target: Any, way: str) -> None:
    for made in entry.planned(Data(target)):
        wrapper = made.wrapper
        made.plan(wrapper)
        want = run(made, wrapper)
        for _ in range(3):  # remembers calls
            assert_all_bitwise(run(made, wrapper), want)
        other = WAYS[way](wrapper)
        if has_a_compiled_plan(wrapper):
            with pytest.raises(RuntimeError, match="has no plan: call plan"):
                run(made, other)
            made.plan(other)
        for one in (other, wrapper, other):
            assert_all_bitwise(run(made, one), want)


def has_a_compiled_plan(wrapper: Any) -> bool:
    """Not those whose plan is tensors, nor the one that plans by itself."""
    others = (ck.BatchMLAPagedAttentionWrapper, ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper)
    return getattr(wrapper, "_heads", None) is None and not isinstance(wrapper, others)


@every(way=WAYS.keys())
@wrappers
def test_copies_on_the_cpu_are_planned(entry, way):
    for made in entry.planned(Data(ON_CPU)):
        made.plan(made.wrapper)
        assert_all_bitwise(run(made, WAYS[way](made.wrapper)), run(made, made.wrapper))


@pytest.mark.runs_nothing("the reference computes in place of a kernel")
def test_shallow_copies_leave_the_memory_of_each_other_s_plan(compiled_plans):
    made = planned("BatchPrefillWithPagedKVCacheWrapper")
    made.plan(made.wrapper)
    memory = made.wrapper._int_workspace_buffer
    other = copy.copy(made.wrapper)
    assert other._int_workspace_buffer is memory  # its plan is there
    for wrapper in (other, made.wrapper):
        made.plan(wrapper)
        assert wrapper._int_workspace_buffer is not memory
        memory_of_its_own = wrapper._int_workspace_buffer
        made.plan(wrapper)
        assert wrapper._int_workspace_buffer is memory_of_its_own
    given = copy.copy(other), torch.zeros(64, dtype=torch.uint8)
    given[0].reset_workspace_buffer(given[0]._float_workspace_buffer, given[1])
    made.plan(given[0])
    assert given[0]._int_workspace_buffer is given[1]
    assert not copy.deepcopy(other)._shares_int_workspace


@pytest.mark.parametrize("way", [*WAYS, "copy"])
@wrappers
def test_copies_are_apart_from_the_original(target, entry, way):
    pairs = list(zip(entry.planned(Data(target)), entry.planned(Data(target, again=True)), strict=True))
    if way == "copy":
        pairs = [x for x in pairs if not getattr(x[0].wrapper, "_use_cuda_graph", False)]
        if not pairs:
            pytest.skip("a shallow copy shares the buffers of graphs")
    for made, again in pairs:
        made.plan(made.wrapper)
        want = run(made, made.wrapper)
        other = (WAYS | {"copy": copy.copy})[way](made.wrapper)
        again.plan(other)
        found = run(again, other)
        assert_all_bitwise(run(made, made.wrapper), want)
        again.plan(again.wrapper)
        assert_all_bitwise(run(again, again.wrapper), found)
        assert not all(map(torch.equal, found, want)), "the plans are the same"
        assert getattr(other, "_number", 1) != getattr(made.wrapper, "_number", 0)


def test_wrappers_that_are_copied_together_share_a_workspace():
    workspace = ON_CPU.workspace()
    layers = [ck.BatchPrefillWithRaggedKVCacheWrapper(workspace) for _ in range(2)]
    for made in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert made[0]._float_workspace_buffer is made[1]._float_workspace_buffer is not workspace


@every(way=[copy.deepcopy, copy.copy])
def test_a_function_in_the_place_of_plan_is_that_of_the_copy(way):
    case = planned("BatchDecodeWithPagedKVCacheWrapper")
    case.wrapper.plan = functools.partial(ck.fast_decode_plan, case.wrapper)
    other = way(case.wrapper)
    case.plan(other)
    assert case.wrapper._plan_info is None and run(case, other)[0].shape == (2, 4, 64)


def test_a_shallow_copy_shares_the_plan(compiled_plans):
    case = planned("BatchPrefillWithRaggedKVCacheWrapper")
    case.plan(case.wrapper)
    want = run(case, case.wrapper)
    other = copy.copy(case.wrapper)
    assert other._number != case.wrapper._number and other._plan_info is case.wrapper._plan_info
    assert_all_bitwise(run(case, other), want)


@pytest.mark.parametrize("way", [copy.copy, *WAYS.values()])
@wrappers
def test_planning_a_copy_leaves_the_original(entry, way):
    for made in entry.planned(Data(ON_CPU)):
        before = repr(made.wrapper)
        other = way(made.wrapper)
        made.plan(other)
        want = run(made, other)
        with pytest.raises(RuntimeError, match=r"has no (plan|batch): call"):
            run(made, made.wrapper)
        assert repr(made.wrapper) == before
        made.plan(made.wrapper)
        assert_all_bitwise(run(made, made.wrapper), want)


@pytest.mark.parametrize("name", ["BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"])
def test_options_of_a_shallow_copy_are_its_own(name):
    for made in ENTRIES[name].planned(Data(ON_CPU)):
        made.plan(made.wrapper)
        want, other = run(made, made.wrapper), copy.copy(made.wrapper)
        other.forward(*made.calls(other)[0].tensors, sm_scale=0.5)
        assert_all_bitwise(run(made, made.wrapper), want)
