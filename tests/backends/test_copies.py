"""Copies of wrappers: deep ones and pickled ones are wrappers of their own, which on a GPU have to be planned first."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from problems import graph_buffers, make_batch

import cutlass_kernels as ck
from cutlass_kernels import _kernels, _reference, _select

WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda wrapper: pickle.loads(pickle.dumps(wrapper))}


class Case:
    """A wrapper, and how one of its kind is planned and run."""

    def __init__(self, wrapper: Any, plan: Callable[[Any], None], run: Callable[[Any], torch.Tensor]) -> None:
        self.wrapper, self.plan, self.run = wrapper, plan, run


def batch_on(device: str, rows: int = 1):
    batch = make_batch([rows] * 3, [700, 9, 33], 4, 2, 64, device=device)
    return batch, batch.paged(16)


def ragged(target) -> Case:
    batch, _ = batch_on(target.device, 5)
    return Case(
        ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend),
        lambda wrapper: wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True),
        lambda wrapper: wrapper.run(batch.q, batch.k, batch.v),
    )


def paged(target, **options: Any) -> Case:
    batch, pages = batch_on(target.device, 5)
    return Case(
        ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend, **options),
        lambda wrapper: wrapper.plan(batch.qo_indptr(), *pages.table(), *batch.heads, 16, causal=True),
        lambda wrapper: wrapper.run(batch.q, pages.cache),
    )


def paged_for_graphs(target) -> Case:
    return paged(target, **graph_buffers(3, 60, target.device))


def decode(target) -> Case:
    batch, pages = batch_on(target.device)
    return Case(
        ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend),
        lambda wrapper: wrapper.plan(*pages.table(), *batch.heads, 16),
        lambda wrapper: wrapper.run(batch.q, pages.cache),
    )


def decode_for_graphs(target) -> Case:
    batch, pages = batch_on(target.device)
    buffers = [torch.zeros(n, dtype=torch.int32, device=target.device) for n in (4, 60, 3)]
    return Case(
        ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(target.workspace(), *buffers),
        lambda wrapper: wrapper.plan(*pages.table(), *batch.heads, 16),
        lambda wrapper: wrapper.run(batch.q, pages.cache),
    )


def shared_decode(target) -> Case:
    batch, pages = batch_on(target.device)
    return Case(
        ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(target.workspace()),
        lambda wrapper: wrapper.begin_forward(*pages.table(), *batch.heads, 16),
        lambda wrapper: wrapper.forward(batch.q, batch.k[:50], batch.v[:50], pages.cache),
    )


def shared_prefill(target) -> Case:
    batch, pages = batch_on(target.device, 5)
    return Case(
        ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(target.workspace()),
        lambda wrapper: wrapper.begin_forward(batch.qo_indptr(), *pages.table(), *batch.heads, 16),
        lambda wrapper: wrapper.forward(batch.q, batch.k[:50], batch.v[:50], pages.cache),
    )


def cascade(target) -> Case:
    batch, pages = batch_on(target.device)
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    indptr, indices, last = pages.table()
    arrays = ([ints(0, 3), batch.qo_indptr()], [ints(0, 2), indptr], [ints(0, 1), indices], [ints(16), last])
    return Case(
        ck.MultiLevelCascadeAttentionWrapper(2, target.workspace()),
        lambda wrapper: wrapper.plan(*arrays, *batch.heads, 16),
        lambda wrapper: wrapper.run(batch.q, pages.cache),
    )


CASES = [ragged, paged, paged_for_graphs, decode, decode_for_graphs, shared_decode, shared_prefill, cascade]


class Uncopied(SimpleNamespace):
    """Like a compiled plan, cannot be copied."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle 'cutlass_kernels._C.BatchPlan'")


@pytest.fixture
def compiled_plans(monkeypatch) -> None:
    """As if the reference were a kernel, whose plans cannot be copied."""

    def compute(problem: Any, backend: str, schedule: Any = None) -> None:
        _reference.compute(problem)

    monkeypatch.setattr(_select, "select", lambda requested, request: "fa2")
    monkeypatch.setattr(_select, "compute", compute)
    monkeypatch.setattr(_kernels, "reads_as_is", lambda backend, request: False)
    monkeypatch.setattr(_kernels, "Schedule", lambda *args: Uncopied(general=True, as_is=False, made=None))


class OnCpu:
    device, backend = "cpu", "auto"

    @staticmethod
    def workspace() -> torch.Tensor:
        return torch.zeros(1 << 20, dtype=torch.uint8)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_copies_have_no_plan_of_kernels(compiled_plans, case, way):
    check_that_copies_are_planned_again(case(OnCpu), way)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_copies_on_a_gpu(target, case, way):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, where plans are copied, too")
    check_that_copies_are_planned_again(case(target), way)


def check_that_copies_are_planned_again(case: Case, way: str) -> None:
    wrapper = case.wrapper
    case.plan(wrapper)
    want = case.run(wrapper).clone()
    for _ in range(3):  # remembers calls
        assert_bitwise(case.run(wrapper), want)
    other = WAYS[way](wrapper)
    if not isinstance(wrapper, ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper):  # plans by itself
        with pytest.raises(RuntimeError, match="has no plan: call plan"):
            case.run(other)
        case.plan(other)
    for each in (other, wrapper, other):
        assert_bitwise(case.run(each), want)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_copies_on_the_cpu_are_planned(case, way):
    made = case(OnCpu)
    made.plan(made.wrapper)
    want = made.run(made.wrapper)
    assert_bitwise(made.run(WAYS[way](made.wrapper)), want)


@pytest.mark.parametrize("way", WAYS)
def test_copies_are_apart_from_the_original(way):
    case = paged_for_graphs(OnCpu)
    case.plan(case.wrapper)
    want = case.run(case.wrapper)
    other = WAYS[way](case.wrapper)
    batch, pages = batch_on("cpu")
    other.plan(batch.qo_indptr(), *pages.table(), *batch.heads, 16)
    other.run(batch.q, pages.cache)
    assert other._number != case.wrapper._number
    assert_bitwise(case.run(case.wrapper), want)


def test_wrappers_that_are_copied_together_share_a_workspace():
    workspace = OnCpu.workspace()
    layers = [ck.BatchPrefillWithRaggedKVCacheWrapper(workspace) for _ in range(2)]
    for made in (copy.deepcopy(layers), pickle.loads(pickle.dumps(layers))):
        assert made[0]._float_workspace_buffer is made[1]._float_workspace_buffer is not workspace


def test_a_function_in_the_place_of_plan_is_that_of_the_copy():
    case = decode(OnCpu)
    case.wrapper.plan = functools.partial(ck.fast_decode_plan, case.wrapper)
    other = copy.deepcopy(case.wrapper)
    case.plan(other)
    assert case.wrapper._plan_info is None and case.run(other).shape == (3, 4, 64)


def test_a_shallow_copy_shares_the_plan(compiled_plans):
    case = ragged(OnCpu)
    case.plan(case.wrapper)
    want = case.run(case.wrapper)
    other = copy.copy(case.wrapper)
    assert other._number != case.wrapper._number and other._plan_info is case.wrapper._plan_info
    assert_bitwise(case.run(other), want)
