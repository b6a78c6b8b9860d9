"""Tensors that kernels write to get a new version, so that autograd notices when saved tensors change."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from problems import graph_buffers, make_batch
from public_calls import ATTENTION, PAGE, public_call
from test_repeat import repeated  # noqa: F401

import cutlass_kernels as ck
from cutlass_kernels import _dispatch, _fmha_calls, _problem

REPEATED = ["single_prefill", "single_decode", "ragged", "paged", "paged tuple", "decode"]


def assert_new_versions(call, *tensors: torch.Tensor) -> None:
    before = [x._version for x in tensors]
    call()
    assert all(x._version > version for x, version in zip(tensors, before))


@pytest.mark.parametrize("name", ATTENTION)
def test_of_places(target, name):
    call = public_call(name, target)
    places = call.places()
    if not places:
        pytest.skip("this function writes to no tensor of the caller")
    for _ in range(4):  # the later calls repeat the first
        assert_new_versions(lambda: call(**places), *places.values())
    for x, place in places.items():
        for _ in range(4):
            assert_new_versions(lambda x=x, place=place: call(**{x: place}), place)


@pytest.mark.parametrize("name", REPEATED)
def test_of_places_in_repeated_calls(repeated, name):  # noqa: F811
    call = public_call(name, SimpleNamespace(device="cpu", backend="reference", workspace=workspace))
    places = call.places()
    for count in range(4):
        assert_new_versions(lambda: call(**places), *places.values())
        assert len(repeated) == count


def workspace() -> torch.Tensor:
    return torch.zeros(1 << 20, dtype=torch.uint8)


def test_of_places_in_repeated_fused_calls(monkeypatch):
    call = public_call("fused paged", SimpleNamespace(device="cpu", backend="reference"))
    places = call.places()
    monkeypatch.setattr(_fmha_calls, "table", lambda: (lambda *args: args[4], None))
    assert_new_versions(lambda: call(**places), places["out"])


def test_of_results_that_kernels_compute(monkeypatch):
    q, k, v, out = torch.zeros(4, 5, 2, 8).unbind(0)
    lse = torch.zeros(5, 2)
    output = _problem.Output(out, lse)
    problem = _problem.Problem(q, _problem.RaggedKv(k, v), _problem.Logits(1.0), output)
    monkeypatch.setattr(_dispatch, "_kernels", lambda: SimpleNamespace(compute=lambda *args: "call"))
    assert_new_versions(lambda: _dispatch.compute(problem, "fa2"), out, lse)


def test_of_tensors_that_memory_kernels_write_to(monkeypatch):
    does = lambda *args: True  # noqa: E731
    kernels = SimpleNamespace(
        merges=does, merge_state_in_place=does, append=does, get_batch_indices_positions=lambda *args: None
    )
    monkeypatch.setattr(_dispatch, "memory_kernels", lambda *tensors: kernels)
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


@pytest.mark.gpu
def test_of_the_buffers_of_a_graph(target):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, where there are no CUDA graphs")
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=target.device)
    paged = batch.paged(PAGE)
    buffers = graph_buffers(2, 16, target.device)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend, **buffers)
    plan = lambda: wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, PAGE)  # noqa: E731
    for _ in range(2):
        assert_new_versions(plan, *(x for x in buffers.values() if isinstance(x, torch.Tensor)))


@pytest.mark.parametrize("name", ["single_prefill", "ragged", "fused"])
def test_saved_tensors_are_protected(target, name):
    call = public_call(name, target)
    out = call.places()["out"]
    for _ in range(4):
        factor = torch.ones_like(out).requires_grad_()
        product = factor * out  # saves out
        call(out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_saved_tensors_are_protected_in_repeated_calls(repeated):  # noqa: F811
    call = public_call("ragged", SimpleNamespace(device="cpu", backend="reference", workspace=workspace))
    out = call.places()["out"]
    for count in range(3):
        product = torch.ones_like(out).requires_grad_() * out
        call(out=out)
        assert len(repeated) == count
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("name", REPEATED)
def test_inference_tensors_have_none(repeated, name):  # noqa: F811
    call = public_call(name, SimpleNamespace(device="cpu", backend="reference", workspace=workspace))
    with torch.inference_mode():
        places = call.places()
        for _ in range(2):
            call(**places)
    assert len(repeated) == 1
    with torch.no_grad():  # the first call below this mode computes, which torch refuses for such tensors on the CPU
        call(**places)
    assert len(repeated) == 2
