"""BatchDecodeWithPagedKVCacheWrapper in CUDA graphs, and in the hands of engines."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from compare import assert_close, assert_lse_close
from decode_problems import decode_batch, plan, q_len_of, wanted
from problems import Batch, Options, expect, indptr, make_batch

import cutlass_kernels as ck

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# --- CUDA graphs -------------------------------------------------------------------------------------------------

# Keys of the requests at capture, then of those that are replayed.
STEPS = [[40, 60, 8], [400, 20, 0], [0, 4, 300], [1, 64, 1000], [5, 0, 3]]
PAGES, PAGE = 160, 8


class Graphed:
    """A graph wrapper with static inputs and outputs."""

    def __init__(self, target, q_len: int):
        self.target, self.q_len = target, q_len

        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=target.device)

        requests = len(STEPS[0])
        self.buffers = (ints(requests + 1), ints(PAGES), ints(requests))
        self.wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(
            target.workspace(), "NHD", True, False, *self.buffers, backend=target.backend
        )
        self.q = torch.zeros(q_len * requests, 4, 64, dtype=torch.float16, device=target.device)
        self.out, self.lse = torch.zeros_like(self.q), torch.zeros(*self.q.shape[:2], device=target.device)
        self.cache = torch.zeros(PAGES, 2, PAGE, 2, 64, dtype=torch.float16, device=target.device)

    def batch(self, step: int, q_len: int | None = None) -> Batch:
        return decode_batch(self.target, STEPS[step], q_len or self.q_len, seed=step)

    def load(self, batch: Batch, where: str = "cpu", in_buffers: bool = False, **rule) -> None:
        paged = batch.paged(PAGE)
        self.q[: len(batch.q)] = batch.q
        self.cache[: len(paged.cache)] = paged.cache
        if not in_buffers:
            return plan(self.wrapper, batch, paged, where=where, **rule)
        for buffer, x in zip(self.buffers, paged.table()):  # as engines do with kernels of their own
            buffer[: len(x)] = x.to(buffer.device)
        types = dict(q_data_type=torch.float16, q_len_per_req=q_len_of(batch))
        return self.wrapper.plan(*self.buffers, *batch.heads, PAGE, **types, **rule)

    def run(self) -> None:
        self.wrapper.run(self.q, self.cache, out=self.out, lse=self.lse, return_lse=True)

    def capture(self) -> torch.cuda.CUDAGraph:
        self.run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph

    def check_replay(self, graph: torch.cuda.CUDAGraph, batch: Batch) -> None:
        self.out.fill_(7.0)
        self.lse.fill_(7.0)
        graph.replay()
        rows, want = len(batch.q), wanted(batch)
        assert_close(self.out[:rows], want.out, want.baseline)
        assert_lse_close(self.lse[:rows], want.lse)
        # Rows behind the last request keep what was there.
        assert bool((self.out[rows:] == 7.0).all()) and bool((self.lse[rows:] == 7.0).all())


@pytest.fixture
def on_cuda(target):
    if target.is_reference:
        pytest.skip("a CUDA graph needs CUDA kernels")


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("in_buffers", [False, True], ids=["copied", "in-buffers"])
def test_buffers_receive_the_plan(target, in_buffers, q_len):
    graphed = Graphed(target, q_len)
    assert graphed.wrapper.is_cuda_graph_enabled and graphed.wrapper._fixed_batch_size == 3
    for step in range(len(STEPS)):
        batch = graphed.batch(step)
        graphed.load(batch, in_buffers=in_buffers)
        graphed.run()
        assert graphed.wrapper._qo_indptr_buf.tolist() == batch.qo_indptr().tolist()
        counts = [-(-m // PAGE) for m in STEPS[step]]
        assert graphed.buffers[0].tolist() == indptr(counts).tolist()
        want = wanted(batch)
        assert_close(graphed.out, want.out, want.baseline)


def test_graph_wrappers_refuse_what_does_not_fit(target):
    graphed = Graphed(target, 2)
    batch = graphed.batch(0)
    graphed.load(batch)
    others = [
        ("batch_size=3", decode_batch(target, [5, 6, 7, 8], 2), {}),
        ("paged_kv_indices_buf", decode_batch(target, [PAGES * PAGE, 0, 1], 2), {}),
        ("cannot exceed the 6", graphed.batch(0, 3), {}),
    ]
    if not target.is_reference:  # which splits nothing
        others.append(("disable_split_kv", batch, dict(disable_split_kv=True)))
    for words, other, rule in others:
        with pytest.raises(ValueError, match=words):
            plan(graphed.wrapper, other, other.paged(PAGE), **rule)
    graphed.run()  # the plan before is in force
    assert_close(graphed.out, wanted(batch).out, wanted(batch).baseline)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("indices", ["cpu", "device", "in-buffers"])
def test_replay_after_other_plans(target, on_cuda, indices, q_len):
    graphed = Graphed(target, q_len)
    where = target.device if indices == "device" else "cpu"
    load = functools.partial(graphed.load, where=where, in_buffers=indices == "in-buffers")
    load(graphed.batch(0))
    graph = graphed.capture()
    for step in [*range(len(STEPS)), 0]:
        batch = graphed.batch(step)
        load(batch)
        graphed.check_replay(graph, batch)


def test_replay_with_fewer_rows_of_a_request(target, on_cuda):
    graphed = Graphed(target, 4)
    graphed.load(graphed.batch(0))
    graph = graphed.capture()
    for step, q_len in enumerate([2, 4, 1, 1, 3]):
        batch = graphed.batch(step, q_len)
        graphed.load(batch)
        graphed.check_replay(graph, batch)


@pytest.mark.parametrize("rule", [dict(fixed_split_size=16), dict(disable_split_kv=True)], ids=str)
def test_replay_with_fixed_splits(target, on_cuda, rule):
    graphed = Graphed(target, 1)
    graphed.load(graphed.batch(0), **rule)
    graph = graphed.capture()
    for step in range(len(STEPS)):
        batch = graphed.batch(step)
        graphed.load(batch, **rule)
        graphed.check_replay(graph, batch)


def test_the_class_for_cuda_graphs(target):
    graphed = Graphed(target, 1)
    workspace = target.workspace()
    wrapper = ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *graphed.buffers, "NHD", use_tensor_cores=True)
    assert isinstance(wrapper, ck.BatchDecodeWithPagedKVCacheWrapper)
    assert wrapper.is_cuda_graph_enabled and wrapper.use_tensor_cores
    graphed.wrapper = wrapper
    for step in range(2):
        batch = graphed.batch(step)
        graphed.load(batch)
        graphed.run()
        assert_close(graphed.out, wanted(batch).out, wanted(batch).baseline)


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("graph_mode", [False, True], ids=["eager", "graph"])
def test_nothing_waits_for_the_device(target, on_cuda, where, graph_mode):
    graphed = Graphed(target, 1)
    if not graph_mode:
        graphed.wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    batch = graphed.batch(0)
    graphed.load(batch)
    graphed.run()  # loads kernels
    paged = batch.paged(PAGE)
    graphed.cache[: len(paged.cache)] = paged.cache
    table = paged.table(target.device if where == "device" else "cpu")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            graphed.wrapper.plan(*table, *batch.heads, PAGE)
            graphed.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(graphed.out, wanted(batch).out, wanted(batch).baseline)


# --- engines -----------------------------------------------------------------------------------------------------


def test_vllm_steps(target):
    """Planned by position each step: offsets on the CPU, page numbers on the device, a cache in HND, outputs given."""
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), "HND", use_tensor_cores=True)
    options = Options(window_left=30, logits_soft_cap=20.0, sm_scale=0.11, k_scale=0.9, v_scale=1.1)
    for seed, kv_lens in enumerate([[20], [21, 7], [22, 8, 100], [23, 101]]):
        batch = decode_batch(target, kv_lens, seed=seed)
        paged = batch.paged(16, "HND")
        offsets, pages, last = paged.table()
        wrapper.plan(
            offsets,
            pages.to(target.device),
            last,
            *batch.heads,
            16,
            pos_encoding_mode="NONE",
            sm_scale=0.11,
            window_left=30,
            logits_soft_cap=20.0,
            q_data_type=torch.float16,
            kv_data_type=torch.float16,
            o_data_type=torch.float16,
            fixed_split_size=-1,
            disable_split_kv=False,
        )
        assert (wrapper._window_left, wrapper._logits_soft_cap, wrapper._sm_scale) == (30, 20.0, 0.11)
        want = wanted(batch, options)
        for _layer in range(2):
            out = torch.full_like(batch.q, torch.nan)
            wrapper.run(batch.q, paged.cache, k_scale=0.9, v_scale=1.1, out=out)
            assert_close(out, want.out, want.baseline, atol=2e-3)


def test_sglang_steps(target):
    """Pages of one token, everything on the device, options with every forward()."""
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), "NHD", use_tensor_cores=True)
    for seed, kv_lens in enumerate([[20, 7], [21, 8], [22]]):
        batch = decode_batch(target, kv_lens, seed=seed)
        paged = batch.paged(1, "NHD", "tuple")
        cache = (paged.k_cache.squeeze(1), paged.v_cache.squeeze(1))
        wrapper.begin_forward(
            *paged.table(target.device),
            *batch.heads,
            1,
            data_type=torch.float16,
            q_data_type=torch.float16,
            non_blocking=True,
            fixed_split_size=None,
            disable_split_kv=False,
        )
        for cap in (0.0, 5.0):
            given = dict(sm_scale=0.2, logits_soft_cap=cap, k_scale=0.5, v_scale=2.0)
            want = wanted(batch, Options(**given))
            out = wrapper.forward(batch.q.contiguous(), cache, **given)
            assert_close(out, want.out, want.baseline, atol=3e-3)
        wrapper.end_forward()


@pytest.mark.parametrize("bind", [functools.partial, types.MethodType], ids=["partial", "method"])
@pytest.mark.parametrize("name", ["begin_forward", "plan"])
@pytest.mark.parametrize("graph_mode", [False, True], ids=["eager", "graph"])
def test_fast_decode_plan_in_the_place_of_plan(target, bind, name, graph_mode):
    graphed = Graphed(target, 1)
    wrapper = graphed.wrapper
    if not graph_mode:
        wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    setattr(wrapper, name, bind(ck.fast_decode_plan, wrapper))
    for step in range(3):
        batch = graphed.batch(step)
        paged = batch.paged(PAGE)
        bound = torch.arange(len(batch.kv_lens) + 1, dtype=torch.int32) * 4096
        for override in (None, paged.table()[0], bound):
            options = dict(sm_scale=0.2, window_left=50, non_blocking=True)
            getattr(wrapper, name)(
                *paged.table(target.device),
                *batch.heads,
                PAGE,
                data_type=torch.float16,
                q_data_type=torch.float16,
                global_override_indptr_cpu=override,
                **options,
            )
            want = wanted(batch, Options(sm_scale=0.2, window_left=50))
            assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)
    wrapper.workspace_size(*paged.table(), *batch.heads, PAGE, sm_scale=9.0)
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)  # nothing was planned


def test_fast_decode_plan_of_several_rows(target):
    """As speculative decoding plans: rows of every request, and a bound in the place of the indptr's copy."""
    q_len, kv_lens = 3, [20, 9, 40]
    batch = make_batch([q_len] * 3, kv_lens, 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    bound = torch.arange(4, dtype=torch.int32) * 100
    ck.fast_decode_plan(
        wrapper,
        *paged.table(target.device),
        *batch.heads,
        16,
        q_data_type=torch.float16,
        q_len_per_req=q_len,
        global_override_indptr_cpu=bound,
    )
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)
    with pytest.raises(TypeError, match="global_override_indptr_cpu=7"):
        ck.fast_decode_plan(wrapper, *paged.table(), *batch.heads, 16, global_override_indptr_cpu=7)


def test_positional_fast_decode_plan(target):
    batch = decode_batch(target, [20, 9])
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace())
    # ..., page_size, pos, window_left, cap, types of q, kv and both, sm_scale, rope (2), non_blocking,
    # fixed_split_size, disable_split_kv
    types = ("float16", None, None)
    ck.fast_decode_plan(
        wrapper, *paged.table(), 4, 2, 64, 16, "NONE", 6, 3.0, *types, 0.2, None, None, True, None, False
    )
    want = wanted(batch, Options(window_left=6, logits_soft_cap=3.0, sm_scale=0.2))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_two_wrappers_share_a_workspace(target):
    workspace = target.workspace()
    made = []
    for seed in (1, 2):
        batch = decode_batch(target, [2000, 9, 30 * seed], seed=seed)
        paged = batch.paged(16)
        wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(workspace, backend=target.backend)
        plan(wrapper, batch, paged)
        made.append((wrapper, batch, paged, wanted(batch)))
    for wrapper, batch, paged, want in [*made, *made]:
        assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)
        workspace.fill_(255)  # nothing in it outlives a run
