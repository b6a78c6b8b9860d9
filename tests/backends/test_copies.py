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


def pod(target) -> Case:
    batch, pages = batch_on(target.device)
    return Case(
        ck.PODWithPagedKVCacheWrapper(target.workspace()),
        lambda wrapper: wrapper.plan(*pages.table(), *batch.heads, 16),
        lambda wrapper: wrapper.run(batch.q, batch.k[:50], batch.v[:50], batch.q, pages.cache)[1],
    )


def batch_pod(target) -> Case:
    batch, pages = batch_on(target.device)
    tables = (batch.qo_indptr(), *pages.table())
    return Case(
        ck.BatchPODWithPagedKVCacheWrapper(target.workspace()),
        lambda wrapper: wrapper.plan(*tables, *tables, *batch.heads, 16),
        lambda wrapper: wrapper.run(batch.q, pages.cache, batch.q, pages.cache)[1],
    )


def batch_attention(target) -> Case:
    batch, pages = batch_on(target.device)
    lens, half = torch.tensor([700, 9, 33], dtype=torch.int32), {"q_data_type": "float16", "kv_data_type": "float16"}
    return Case(
        ck.BatchAttention(device=target.device),
        lambda wrapper: wrapper.plan(batch.qo_indptr(), *pages.table()[:2], lens, 4, 2, 64, 64, 16, **half),
        lambda wrapper: wrapper.run(batch.q, pages.cache)[0],
    )


def block_tensors(target, heads_first: bool) -> list[torch.Tensor]:
    q, k, v = torch.randn(3, 128, 4, 64, device=target.device).half()
    return [x.transpose(0, 1) if heads_first else x for x in (q, k[:, :2], v[:, :2])]


def block_sparse(target) -> Case:
    tensors, lists = block_tensors(target, False), (torch.tensor([0, 1, 3]).int(), torch.tensor([0, 0, 1]).int())
    return Case(
        ck.BlockSparseAttentionWrapper(target.workspace(), backend=target.backend),
        lambda wrapper: wrapper.plan(*lists, 128, 128, 64, 64, 4, 2, 64),
        lambda wrapper: wrapper.run(*tensors),
    )


def block_sparse_per_head(target) -> Case:
    tensors, pattern = block_tensors(target, False), torch.tensor([[[True, False], [True, True]]] * 2)
    return Case(
        ck.BlockSparseAttentionWrapper(target.workspace(), backend=target.backend),
        lambda wrapper: wrapper.plan(None, None, 128, 128, 64, 64, 4, 2, 64, block_mask=pattern),
        lambda wrapper: wrapper.run(*tensors),
    )


def variable_blocks(target) -> Case:
    tensors, pattern = block_tensors(target, True), torch.tensor([[[True, False], [True, True]]] * 2)
    sizes = torch.tensor([[48, 80]] * 2)
    return Case(
        ck.VariableBlockSparseAttentionWrapper(target.workspace(), backend=target.backend),
        lambda wrapper: wrapper.plan(pattern, sizes, sizes, 4, 2, 64),
        lambda wrapper: wrapper.run(*tensors),
    )


def latent(target) -> Case:
    q, cache = torch.randn(2, 16, 576), torch.randn(8, 16, 576)
    q, cache = q.to(target.device, torch.float16), cache.to(target.device, torch.float16)
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    lengths, sizes = (ints(0, 1, 2), ints(0, 2, 3), ints(4, 0, 7), ints(20, 5)), (16, 512, 64, 16, True, 192**-0.5)
    return Case(
        ck.BatchMLAPagedAttentionWrapper(target.workspace(), backend=target.backend),
        lambda wrapper: wrapper.plan(*lengths, *sizes, torch.float16, torch.float16),
        lambda wrapper: wrapper.run(query=q, kv_cache=cache),
    )


SINGLE = [ragged, paged, paged_for_graphs, decode, decode_for_graphs]
SEVERAL = [shared_decode, shared_prefill, cascade, pod, batch_pod, batch_attention, block_sparse]
# Their plans hold no addresses, and are copied.
COPIED_PLANS = [block_sparse_per_head, variable_blocks, latent]
CASES = SINGLE + SEVERAL
EVERY_CASE = CASES + COPIED_PLANS


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
@pytest.mark.parametrize("case", EVERY_CASE)
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


@pytest.mark.parametrize("way", [copy.copy, *WAYS.values()])
@pytest.mark.parametrize("case", EVERY_CASE)
def test_planning_a_copy_leaves_the_original(case, way):
    made = case(OnCpu)
    before = repr(made.wrapper)
    other = way(made.wrapper)
    made.plan(other)
    want = made.run(other)
    with pytest.raises(RuntimeError, match=r"has no (plan|batch): call"):
        made.run(made.wrapper)
    assert repr(made.wrapper) == before
    made.plan(made.wrapper)
    assert_bitwise(made.run(made.wrapper), want)


def test_a_shallow_copy_with_other_dtypes_leaves_the_original():
    made = shared_prefill(OnCpu)
    batch, pages = batch_on("cpu", 5)
    made.plan(made.wrapper)
    want, other = made.run(made.wrapper), copy.copy(made.wrapper)
    q, k, v, cache = (x.bfloat16() for x in (batch.q, batch.k, batch.v, pages.cache))
    for _ in range(2):
        other.forward(q, k[:50], v[:50], cache)
        assert_bitwise(made.run(made.wrapper), want)


@pytest.mark.parametrize("case", [block_sparse, block_sparse_per_head, variable_blocks])
def test_options_of_a_shallow_copy_are_its_own(case):
    made = case(OnCpu)
    made.plan(made.wrapper)
    want, other = made.run(made.wrapper), copy.copy(made.wrapper)
    other.forward(*block_tensors(OnCpu, case is variable_blocks), sm_scale=0.5)
    assert_bitwise(made.run(made.wrapper), want)


def test_a_function_in_the_place_of_plan_is_that_of_a_shallow_copy():
    case = decode(OnCpu)
    case.wrapper.plan = functools.partial(ck.fast_decode_plan, case.wrapper)
    other = copy.copy(case.wrapper)
    case.plan(other)
    assert case.wrapper._plan_info is None and case.run(other).shape == (3, 4, 64)
