"""Capture once, re-plan, replay: the captured kernels read lengths and tables from the wrapper's buffers."""

from __future__ import annotations

import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
CAUSAL = Options(causal=True)
# Lengths at capture, then those of the replays: never more rows in all, but distributed differently.
STEPS = [
    ([8, 8, 8], [40, 60, 8]),
    ([3, 20, 1], [400, 20, 1]),
    ([8, 0, 4], [8, 0, 300]),
    ([1, 1, 1], [1, 64, 1000]),
    ([5, 5, 5], [5, 0, 3]),
]
MAX_KV = 1100


@pytest.fixture(autouse=True)
def only_on_cuda(target):
    if target.is_reference:
        pytest.skip("a CUDA graph needs CUDA kernels")


class Captured:
    """A wrapper with static inputs and outputs, captured after its first plan."""

    def __init__(self, target, kind: str):
        self.target, self.kind = target, kind
        size = len(STEPS[0][0])
        rows = sum(STEPS[0][0])
        self.q = torch.zeros(rows, 4, 64, dtype=torch.float16, device=target.device)
        self.out = torch.zeros_like(self.q)
        self.lse = torch.zeros(rows, 4, device=target.device)
        self.k, self.v = torch.zeros(2, MAX_KV, 2, 64, dtype=torch.float16, device=target.device)
        self.cache = torch.zeros(MAX_KV // 8 + 8, 2, 8, 2, 64, dtype=torch.float16, device=target.device)

        def ints(n: int) -> torch.Tensor:
            return torch.zeros(n, dtype=torch.int32, device=target.device)

        if kind == "ragged":
            self.wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
                target.workspace(),
                use_cuda_graph=True,
                qo_indptr_buf=ints(size + 1),
                kv_indptr_buf=ints(size + 1),
                backend=target.backend,
            )
        else:
            self.wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(
                target.workspace(),
                use_cuda_graph=True,
                qo_indptr_buf=ints(size + 1),
                paged_kv_indptr_buf=ints(size + 1),
                paged_kv_indices_buf=ints(len(self.cache)),
                paged_kv_last_page_len_buf=ints(size),
                backend=target.backend,
            )

    def load(self, batch: Batch, indices_on: str = "cpu") -> None:
        self.q[: len(batch.q)] = batch.q
        if self.kind == "ragged":
            self.k[: len(batch.k)], self.v[: len(batch.v)] = batch.k, batch.v
            bounds = batch.qo_indptr(indices_on), batch.kv_indptr(indices_on)
            self.wrapper.plan(*bounds, *batch.heads, causal=True)
        else:
            paged = batch.paged(8)
            self.cache[: len(paged.cache)] = paged.cache
            self.wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True)

    def run(self) -> None:
        data = (self.cache,) if self.kind == "paged" else (self.k, self.v)
        self.wrapper.run(self.q, *data, out=self.out, lse=self.lse, return_lse=True)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_replay_after_other_plans(target, kind):
    if kind == "paged" and not target.serves("paged"):
        pytest.skip(f"{target.backend} serves no paged caches yet, and PyTorch's attention cannot be captured")
    captured = Captured(target, kind)
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]
    captured.load(batches[0])
    captured.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for batch in [*batches, batches[0]]:
        captured.load(batch)
        captured.out.fill_(7.0)
        captured.lse.fill_(7.0)
        graph.replay()
        rows = len(batch.q)
        want = expect(batch, CAUSAL)
        assert_close(captured.out[:rows], want.out, want.baseline)
        assert_lse_close(captured.lse[:rows], want.lse)
        # Rows behind the last request keep what was there.
        assert bool((captured.out[rows:] == 7.0).all()) and bool((captured.lse[rows:] == 7.0).all())


def test_capture_before_any_run(target):
    """Offsets on the device: nothing but the captured runs themselves knows the work."""
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]
    captured = Captured(target, "ragged")
    captured.load(batches[0], target.device)
    ck.single_prefill_with_kv_cache(batches[0].q, batches[0].k, batches[0].v, backend=target.backend)  # loads kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    captured.run()  # before the graph has made its own list
    for batch in [*batches, batches[0]]:
        want = expect(batch, CAUSAL)
        rows = len(batch.q)
        captured.load(batch, target.device)
        for run in (graph.replay, captured.run, graph.replay):
            captured.out.fill_(7.0)
            run()
            assert_close(captured.out[:rows], want.out, want.baseline)


def test_capture_with_offsets_on_the_device_outside_graph_mode(target):
    batch = make_batch([8, 3], [40, 60], 4, 2, 64, device=target.device)
    want = expect(batch, CAUSAL)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(target.device), batch.kv_indptr(target.device), *batch.heads, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(batch.q, batch.k, batch.v)
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)
    graph.replay()
    assert_close(out, want.out, want.baseline)


def test_rows_of_the_first_run_bound_later_ones(target):
    captured = Captured(target, "ragged")
    batch = make_batch(*STEPS[1], 4, 2, 64, device=target.device)
    captured.load(batch, target.device)
    captured.run()
    more = make_batch([9, 9, 9], [40, 60, 9], 4, 2, 64, device=target.device)
    with pytest.raises(ValueError, match=r"27.*24"):
        captured.wrapper.plan(more.qo_indptr(), more.kv_indptr(), *more.heads)
    with pytest.raises(ValueError, match=r"27.*24"):
        captured.wrapper.run(more.q, captured.k, captured.v)


def test_attention_in_pytorch_cannot_be_captured(target):
    batch = make_batch([8, 3], [40, 60], 4, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend="reference")
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads)
    out = torch.zeros_like(batch.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ck.BackendError, match="captured"):
        wrapper.run(batch.q, batch.k, batch.v, out=out)


def test_capture_of_single_calls(target):
    batch = make_batch([20], [300], 4, 2, 64, device=target.device)
    q, k, v = batch.q.clone(), batch.k.clone(), batch.v.clone()

    def both():
        prefill = ck.single_prefill_with_kv_cache(q, k, v, causal=True, backend=target.backend)
        return prefill, ck.single_decode_with_kv_cache(q[-1], k, v)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, decoded = both()
    other = make_batch([20], [300], 4, 2, 64, device=target.device, seed=1)
    for x, y in ((q, other.q), (k, other.k), (v, other.v)):
        x.copy_(y)
    graph.replay()
    want = expect(other, CAUSAL)
    assert_close(out, want.out, want.baseline)
    assert_close(decoded, want.out[-1], want.baseline[-1])


def test_graphs_replayed_side_by_side(target):
    """Graphs captured on one stream, replayed on two at once, beside calls on a third: no state is shared."""
    batches = [make_batch([700], [700], 32, 8, 64, device=target.device, seed=seed) for seed in range(2)]

    def call(batch: Batch) -> torch.Tensor:
        return ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend=target.backend)

    wanted = [call(batch) for batch in batches]
    for batch, want in zip(batches, wanted):
        assert_close(want, expect(batch, CAUSAL).out)
    torch.cuda.synchronize()
    graphs, outs = [], []
    for batch in batches:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([call(batch) for _ in range(4)])
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = call(batches[0])
        torch.cuda.synchronize()
        assert torch.equal(eager, wanted[0])
        for results, want in zip(outs, wanted):
            for out in results:
                assert torch.equal(out, want)
                out.zero_()
        torch.cuda.synchronize()


def test_wrappers_replayed_side_by_side(target):
    batches = [make_batch([300, 150], [300, 400], 32, 8, 64, device=target.device, seed=seed) for seed in range(2)]
    graphs, outs, wanted = [], [], []
    for batch in batches:
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        wanted.append(wrapper.run(batch.q, batch.k, batch.v))
        assert_close(wanted[-1], expect(batch, CAUSAL).out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([wrapper.run(batch.q, batch.k, batch.v) for _ in range(4)])
        graphs.append((graph, wrapper))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for (graph, _), stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for results, want in zip(outs, wanted):
            assert all(torch.equal(out, want) for out in results)


def test_runs_on_the_current_stream(target):
    batch = make_batch([64], [512], 4, 2, 64, device=target.device)
    want = expect(batch, CAUSAL)
    stream = torch.cuda.Stream()
    q = torch.zeros_like(batch.q)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        q.copy_(batch.q)  # a kernel on another stream would still see zeros
        out = ck.single_prefill_with_kv_cache(q, batch.k, batch.v, causal=True, backend=target.backend)
    stream.synchronize()
    assert_close(out, want.out, want.baseline)
