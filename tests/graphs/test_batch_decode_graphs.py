"""BatchDecodeWithPagedKVCacheWrapper in CUDA graphs, and in the hands of engines."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from captures import Captured, no_waiting
from problems import Batch, Options
from wrapper_problems import Wrapped, batch_for

import cutlass_kernels as ck

# --- CUDA graphs -------------------------------------------------------------------------------------------------

# Keys of the requests at capture, then of those that are replayed.
STEPS = [[40, 60, 8], [400, 20, 0], [0, 4, 300], [1, 64, 1000], [5, 0, 3]]
PAGES, PAGE = 160, 8


def captured_of(target, q_len: int = 1) -> Captured:
    return Captured(target, "decode", 3 * q_len, PAGE, PAGES)


def batch_of(target, step: int, q_len: int = 1) -> Batch:
    return batch_for("decode", target, (), STEPS[step], q_len=q_len, seed=step)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("where", ["cpu", "in buffers"])
def test_buffers_receive_the_plan(target, where, q_len):
    captured = captured_of(target, q_len)
    assert captured.wrapper.is_cuda_graph_enabled and captured.wrapper._fixed_batch_size == 3
    for step in range(len(STEPS)):
        w = captured.load(batch_of(target, step, q_len), where=where)
        captured.run()
        assert captured.wrapper._qo_indptr_buf.tolist() == w.batch.qo_indptr().tolist()
        assert captured.buffers[0].tolist() == w.pages.indptr.tolist()
        w.check(captured.out)


def test_graph_wrappers_refuse_what_does_not_fit(target):
    captured = captured_of(target, 2)
    w = captured.load(batch_of(target, 0, 2))
    of = lambda kv_lens: batch_for("decode", target, (), kv_lens, q_len=2)  # noqa: E731
    others = [
        ("batch_size=3", of([5, 6, 7, 8]), {}),
        ("paged_kv_indices_buf", of([PAGES * PAGE, 0, 1]), {}),
        ("cannot exceed the 6", batch_of(target, 0, 3), {}),
    ]
    if not target.is_reference:  # which splits nothing
        others.append(("disable_split_kv", w.batch, dict(disable_split_kv=True)))
    for words, other, rule in others:
        with pytest.raises(ValueError, match=words):
            Wrapped(target, "decode", other, PAGE, wrapper=captured.wrapper).plan(**rule)
    captured.run()  # the plan before is in force
    w.check(captured.out)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("where", ["cpu", "device", "in buffers"])
def test_replay_after_other_plans(kernels, where, q_len):
    captured = captured_of(kernels, q_len)
    where = kernels.device if where == "device" else where
    captured.load(batch_of(kernels, 0, q_len), where=where)
    graph = captured.capture()
    for step in [*range(len(STEPS)), 0]:
        captured.check_replay(graph, captured.load(batch_of(kernels, step, q_len), where=where))


def test_replay_with_fewer_rows_of_a_request(kernels):
    captured = captured_of(kernels, 4)
    captured.load(batch_of(kernels, 0, 4))
    graph = captured.capture()
    for step, q_len in enumerate([2, 4, 1, 1, 3]):
        captured.check_replay(graph, captured.load(batch_of(kernels, step, q_len)))


@pytest.mark.parametrize("rule", [dict(fixed_split_size=16), dict(disable_split_kv=True)], ids=str)
def test_replay_with_fixed_splits(kernels, rule):
    captured = captured_of(kernels)
    captured.load(batch_of(kernels, 0), **rule)
    graph = captured.capture()
    for step in range(len(STEPS)):
        captured.check_replay(graph, captured.load(batch_of(kernels, step), **rule))


def test_the_class_for_cuda_graphs(target):
    captured = captured_of(target)
    make = ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper
    captured.wrapper = make(target.workspace(), *captured.buffers, "NHD", use_tensor_cores=True)
    assert isinstance(captured.wrapper, ck.BatchDecodeWithPagedKVCacheWrapper)
    assert captured.wrapper.is_cuda_graph_enabled and captured.wrapper.use_tensor_cores
    for step in range(2):
        w = captured.load(batch_of(target, step))
        captured.run()
        w.check(captured.out)


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("graph_mode", [False, True], ids=["eager", "graph"])
def test_nothing_waits_for_the_device(kernels, where, graph_mode):
    captured = captured_of(kernels)
    if not graph_mode:
        captured.wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(kernels.workspace(), backend=kernels.backend)
    w = captured.load(batch_of(kernels, 0))
    captured.run()  # loads kernels
    table = w.vectors(kernels.device if where == "device" else "cpu")
    with no_waiting():
        for _ in range(2):
            captured.wrapper.plan(*table, *w.sizes)
            captured.run()
    w.check(captured.out)


# --- engines -----------------------------------------------------------------------------------------------------


def test_vllm_steps(target):
    """Planned by position each step: offsets on the CPU, page numbers on the device, a cache in HND, outputs given."""
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), "HND", use_tensor_cores=True)
    options = Options(window_left=30, logits_soft_cap=20.0, sm_scale=0.11, k_scale=0.9, v_scale=1.1)
    for seed, kv_lens in enumerate([[20], [21, 7], [22, 8, 100], [23, 101]]):
        w = Wrapped(target, "decode", batch_for("decode", target, (), kv_lens, seed=seed), 16, "HND", wrapper=wrapper)
        offsets, pages, last = w.vectors()
        types = dict.fromkeys(("q_data_type", "kv_data_type", "o_data_type"), torch.float16)
        given = options.plan_kwargs() | dict(pos_encoding_mode="NONE", fixed_split_size=-1, disable_split_kv=False)
        wrapper.plan(offsets, pages.to(target.device), last, *w.sizes, **given, **types)
        assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (30, 20.0, 0.11)
        for _layer in range(2):
            out = torch.full_like(w.batch.q, torch.nan)
            w.run(k_scale=0.9, v_scale=1.1, out=out)
            w.check(out, options, atol=2e-3)


def test_sglang_steps(target):
    """Pages of one token, everything on the device, options with every forward()."""
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), "NHD", use_tensor_cores=True)
    for seed, kv_lens in enumerate([[20, 7], [21, 8], [22]]):
        batch = batch_for("decode", target, (), kv_lens, seed=seed)
        w = Wrapped(target, "decode", batch, 1, form="tuple", wrapper=wrapper)
        cache = tuple(x.squeeze(1) for x in w.kv[0])
        given = dict(non_blocking=True, fixed_split_size=None, disable_split_kv=False, q_data_type=torch.float16)
        wrapper.begin_forward(*w.vectors(target.device), *w.sizes, data_type=torch.float16, **given)
        for cap in (0.0, 5.0):
            options = dict(sm_scale=0.2, logits_soft_cap=cap, k_scale=0.5, v_scale=2.0)
            w.check(wrapper.forward(batch.q.contiguous(), cache, **options), Options(**options), atol=3e-3)
        wrapper.end_forward()


@pytest.mark.parametrize("bind", [functools.partial, types.MethodType], ids=["partial", "method"])
@pytest.mark.parametrize("name", ["begin_forward", "plan"])
@pytest.mark.parametrize("graph_mode", [False, True], ids=["eager", "graph"])
def test_fast_decode_plan_in_the_place_of_plan(target, bind, name, graph_mode):
    wrapper = captured_of(target).wrapper
    if not graph_mode:
        wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    setattr(wrapper, name, bind(ck.fast_decode_plan, wrapper))
    options = Options(sm_scale=0.2, window_left=50)
    types = dict(data_type=torch.float16, q_data_type=torch.float16, non_blocking=True)
    for step in range(3):
        w = Wrapped(target, "decode", batch_of(target, step), PAGE, wrapper=wrapper)
        bound = torch.arange(len(STEPS[step]) + 1, dtype=torch.int32) * 4096
        for override in (None, w.vectors()[0], bound):
            given = options.plan_kwargs() | types | dict(global_override_indptr_cpu=override)
            getattr(wrapper, name)(*w.vectors(target.device), *w.sizes, **given)
            w.check(w.run(), options)
    wrapper.workspace_size(*w.vectors(), *w.sizes, sm_scale=9.0)
    w.check(w.run(), options)  # nothing was planned


def test_fast_decode_plan_of_several_rows(target):
    """As speculative decoding plans: rows of every request, and a bound in the place of the indptr's copy."""
    w = Wrapped(target, "decode", batch_for("decode", target, (), [20, 9, 40], q_len=3))
    bound = torch.arange(4, dtype=torch.int32) * 100
    given = dict(q_data_type=torch.float16, q_len_per_req=3, global_override_indptr_cpu=bound)
    ck.fast_decode_plan(w.wrapper, *w.vectors(target.device), *w.sizes, **given)
    w.check(w.run())
    with pytest.raises(TypeError, match="global_override_indptr_cpu=7"):
        ck.fast_decode_plan(w.wrapper, *w.vectors(), *w.sizes, global_override_indptr_cpu=7)


def test_positional_fast_decode_plan(target):
    w = Wrapped(target, "decode")
    # ..., page_size, pos, window_left, cap, types of q, kv and both, sm_scale, rope (2), non_blocking,
    # fixed_split_size, disable_split_kv
    args = ("NONE", 6, 3.0, "float16", None, None, 0.2, None, None, True, None, False)
    ck.fast_decode_plan(w.wrapper, *w.vectors(), 4, 2, 64, 16, *args)
    w.check(w.run(), Options(window_left=6, logits_soft_cap=3.0, sm_scale=0.2))
