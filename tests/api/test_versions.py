"""Tensors that kernels write to get a new version, so that autograd notices when saved tensors change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from problems import graph_buffers
from registry import Data, each, usual
from wrapper_problems import Wrapped

import cutlass_kernels as ck
from cutlass_kernels._caches import page_functions
from cutlass_kernels._compute import kernels, merging, selection
from cutlass_kernels._core import native, problems
from cutlass_kernels._planned import batch_plans

WRITING = ["single_prefill", "single_decode", "ragged", "paged", "paged pair", "decode"]


def assert_new_versions(call, *tensors: torch.Tensor) -> None:
    before = [x._version for x in tensors]
    call()
    assert all(x._version > version for x, version in zip(tensors, before))


@each(lambda entry: entry.attends)
def test_of_places(target, entry):
    calls = [call for call in entry.calls(Data(target)) if call.places]
    if not calls:
        pytest.skip("this function writes to no tensor of the caller")
    for call in calls:
        places = call.empty_places()
        for _ in range(2):
            assert_new_versions(lambda: call(**places), *places.values())
        for x, place in places.items():
            for _ in range(4):
                assert_new_versions(lambda x=x, place=place: call(**{x: place}), place)


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8)


def test_of_results_that_kernels_compute(monkeypatch):
    q, k, v, out = torch.zeros(4, 5, 2, 8).unbind(0)
    lse = torch.zeros(5, 2)
    output = problems.Output(out, lse)
    problem = problems.Problem(q, problems.RaggedKv(k, v), problems.Logits(1.0), output)
    monkeypatch.setattr(kernels, "compute", lambda *args: None)
    assert_new_versions(lambda: selection.compute(problem, "fa2"), out, lse)


def test_of_tensors_that_memory_kernels_write_to(monkeypatch):
    does = lambda *args: True  # noqa: E731
    for module, function in (
        (kernels, "move"),
        (merging, "_has_kernel"),
        (merging, "_launch_in_place"),
        (page_functions, "_launch_append"),
        (page_functions, "_launch_positions"),
        (native, "append_by_slot"),
    ):
        monkeypatch.setattr(module, function, does)
    check_tensors_of_memory_kernels("cpu")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_of_merged_states_and_caches(device):
    check_tensors_of_memory_kernels(device)


def check_tensors_of_memory_kernels(device: str) -> None:
    v, s = torch.zeros(2, 3, 4, 64, device=device), torch.zeros(2, 3, 4, device=device)
    own = v[0].clone(), s[0].clone()
    assert_new_versions(lambda: ck.merge_state_in_place(*own, v[1], s[1]), *own)
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32, device=device)  # noqa: E731
    places = ints(0, 0), ints(0, 0)
    append_indptr, kv_indptr, indices, last = ints(0, 1, 2), ints(0, 1, 2), ints(0, 1), ints(1, 1)
    found = lambda: ck.get_batch_indices_positions(append_indptr, ints(1, 1), 2, *places)  # noqa: E731
    assert_new_versions(found, *places)
    new = (v[0, :2], v[1, :2], ints(0, 1), ints(0, 0))
    stacked = torch.zeros(2, 2, 16, 4, 64, device=device)
    pair = stacked[:, 0].clone(), stacked[:, 1].clone()
    assert_new_versions(lambda: ck.append_paged_kv_cache(*new, pair, indices, kv_indptr, last), *pair)
    assert_new_versions(lambda: ck.append_paged_kv_cache(*new, stacked, indices, kv_indptr, last), stacked)
    for caches in (pair, stacked.unbind(1), [x.half() for x in pair]):
        key, value = (x.to(caches[0].dtype) for x in new[:2])
        assert_new_versions(lambda: ck.append_paged_kv_cache_by_slot(key, value, *caches, ints(0, 17)), *caches)


@pytest.mark.runs_nothing("plans only")
def test_of_the_buffers_of_a_graph(kernels):
    buffers = graph_buffers(2, 16, kernels.device)
    w = Wrapped(kernels, "paged", **buffers)
    for _ in range(2):
        assert_new_versions(w.plan, *(x for x in buffers.values() if isinstance(x, torch.Tensor)))


@pytest.mark.parametrize("name", ["single_prefill", "ragged", "fused"])
def test_saved_tensors_are_protected(target, name):
    call = usual(name, target)
    out = call.empty_places()["out"]
    for _ in range(4):
        factor = torch.ones_like(out).requires_grad_()
        product = factor * out  # saves out
        call(out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("name", WRITING)
def test_inference_tensors_have_none(name):
    call = usual(name, SimpleNamespace(device="cpu", backend="reference", workspace=workspace))
    with torch.inference_mode():
        places = call.empty_places()
        for _ in range(2):
            call(**places)


def test_of_places_that_direct_calls_write_to(monkeypatch):
    for name in ("single_prefill", "single_decode", "fused_prefill"):
        monkeypatch.setattr(native, name, lambda *args: "done")
    q, k, v = torch.zeros(3, 5, 2, 8).half().unbind(0)
    out, lse = torch.zeros(5, 2, 8).half(), torch.zeros(5, 2)
    assert_new_versions(lambda: ck.single_prefill_with_kv_cache(q, k, v, out=out, lse=lse), out, lse)
    assert_new_versions(lambda: ck.single_decode_with_kv_cache(q[0], k, v, out=out[0], lse=lse[0]), out, lse)
    lengths, offsets = torch.tensor([5]).int(), torch.tensor([0, 5]).int()
    fused = ((q, k, v), "SEPARATE_Q_K_V", torch.zeros(16).byte(), lengths, 5, 5, 0.1, 1.0, 1, offsets, offsets)
    assert_new_versions(lambda: ck.trtllm_fmha_v2_prefill(*fused, out=out), out)


@pytest.mark.parametrize("name", ["ragged", "paged", "decode"])
def test_of_places_that_direct_runs_write_to(name, monkeypatch):
    cpu = SimpleNamespace(device="cpu", backend="reference", workspace=workspace)
    places = usual(name, cpu).empty_places()
    monkeypatch.setattr(batch_plans.Plan, "_make_direct", lambda self, most_rows: lambda *args: "done")
    call = usual(name, cpu)
    assert_new_versions(lambda: call.run(*call.tensors, **places), *places.values())
