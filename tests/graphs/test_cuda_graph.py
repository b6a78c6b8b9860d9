"""Capture once, re-plan, replay: the captured kernels read lengths and tables from the wrapper's buffers."""

from __future__ import annotations

import gc
import math
import warnings

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, graph_buffers, make_batch

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
    """A wrapper with static inputs and outputs, captured after its first plan; with a buffer for masks if given one."""

    def __init__(self, target, kind: str, mask_buffer: torch.Tensor | None = None):
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

        masks = {} if mask_buffer is None else dict(custom_mask_buf=mask_buffer, mask_indptr_buf=ints(size + 1))
        if kind == "ragged":
            self.wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
                target.workspace(),
                use_cuda_graph=True,
                qo_indptr_buf=ints(size + 1),
                kv_indptr_buf=ints(size + 1),
                backend=target.backend,
                **masks,
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
                **masks,
            )

    def load(self, batch: Batch, indices_on: str = "cpu", **plan) -> None:
        plan = plan or dict(causal=True)
        self.q[: len(batch.q)] = batch.q
        if self.kind == "ragged":
            self.k[: len(batch.k)], self.v[: len(batch.v)] = batch.k, batch.v
            bounds = batch.qo_indptr(indices_on), batch.kv_indptr(indices_on)
            self.wrapper.plan(*bounds, *batch.heads, **plan)
        else:
            paged = batch.paged(8)
            self.cache[: len(paged.cache)] = paged.cache
            self.wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, **plan)

    def run(self, **scales) -> None:
        data = (self.cache,) if self.kind == "paged" else (self.k, self.v)
        self.wrapper.run(self.q, *data, out=self.out, lse=self.lse, return_lse=True, **scales)

    def capture(self, **scales) -> torch.cuda.CUDAGraph:
        self.run(**scales)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(**scales)
        return graph

    def check_replay(self, graph: torch.cuda.CUDAGraph, batch: Batch, options: Options) -> None:
        self.out.fill_(7.0)
        self.lse.fill_(7.0)
        graph.replay()
        rows, want = len(batch.q), expect(batch, options)
        assert_close(self.out[:rows], want.out, want.baseline)
        assert_lse_close(self.lse[:rows], want.lse)
        # Rows behind the last request keep what was there.
        assert bool((self.out[rows:] == 7.0).all()) and bool((self.lse[rows:] == 7.0).all())


@pytest.mark.parametrize("fixed", [None, 16])
def test_workspace_size_counts_the_room_of_the_buffers(target, fixed):
    batch = make_batch([1, 1], [500, 900], 4, 2, 64, device=target.device)
    paged = batch.paged(8)
    buffers = graph_buffers(2, 20 * paged.indices.numel(), target.device)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend, **buffers)
    plan = (batch.qo_indptr(), *paged.table(), *batch.heads, 8)
    options = dict(causal=True, fixed_split_size=fixed)
    sizes = wrapper.workspace_size(*plan, **options)
    wrapper.reset_workspace_buffer(*(target.workspace(max(size, 16)) for size in sizes))
    wrapper.plan(*plan, **options)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_replay_after_other_plans(target, kind):
    captured = Captured(target, kind)
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]
    captured.load(batches[0])
    graph = captured.capture()
    for batch in [*batches, batches[0]]:
        captured.load(batch)
        captured.check_replay(graph, batch, CAUSAL)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_replays_convert_no_lse_beyond_the_last_request(target, kind):
    captured = Captured(target, kind)
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]
    captured.load(batches[0])
    graph = captured.capture(lse_base="ln")
    for batch in [*batches, batches[0]]:
        captured.load(batch)
        captured.lse.fill_(7.0)
        graph.replay()
        rows = len(batch.q)
        assert_lse_close(captured.lse[:rows] / math.log(2.0), expect(batch, CAUSAL).lse)
        assert bool((captured.lse[rows:] == 7.0).all())


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "misaligned"])
def test_replay_with_other_masks(target, kind, first):
    # Room for no more than the masks, up to the last bit: kernels read words of 32.
    steps = [([8, 8, 8], [40, 60, 8]), ([3, 20, 1], [90, 29, 1]), ([8, 0, 4], [8, 0, 31]), ([1, 5, 3], [700, 0, 5])]
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(steps)]
    room = max(sum((n * m + 7) // 8 for n, m in zip(*step)) for step in steps)
    buffer = torch.full((first + room,), 255, dtype=torch.uint8, device=target.device)
    captured = Captured(target, kind, buffer[first:])
    masks = [batch.random_masks() for batch in batches]
    captured.load(batches[0], custom_mask=torch.cat([m.reshape(-1) for m in masks[0]]))
    graph = captured.capture()
    for batch, given in [*zip(batches, masks), (batches[0], masks[0])]:
        captured.load(batch, custom_mask=torch.cat([m.reshape(-1) for m in given]))
        captured.check_replay(graph, batch, Options(custom_masks=given))
        for causal in (True, False):  # the mask that stands for none
            captured.load(batch, causal=causal)
            captured.check_replay(graph, batch, Options(causal=causal))


def test_replay_of_items(target):
    def load(batch: Batch) -> list[oracle.MultiItem]:
        items = [oracle.MultiItem(max(m - 7, 0), (0, 1, 2, 0, 1, 2, 3)) for m in batch.kv_lens]
        prefix = torch.tensor([x.prefix_len for x in items], dtype=torch.int32).to(torch.uint32)
        positions = torch.tensor([x.token_pos for x in items], dtype=torch.int32).reshape(-1).to(torch.uint16)
        captured.load(
            batch,
            prefix_len_ptr=prefix,
            token_pos_in_items_ptr=positions,
            token_pos_in_items_len=7,
            max_item_len_ptr=torch.tensor([3, 3, 3], dtype=torch.int32).to(torch.uint16),
        )
        return items

    captured = Captured(target, "ragged", torch.zeros(1000, dtype=torch.uint8, device=target.device))
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS[:3])]
    load(batches[0])
    graph = captured.capture()
    for batch in [*batches, batches[0]]:
        captured.check_replay(graph, batch, Options(multi_items=load(batch)))


@pytest.mark.parametrize("first", ["NONE", "ALIBI"])
def test_replay_after_a_plan_of_another_kind(target, first):
    # Tiles of other sizes must not take the place of those that a graph counts on.
    captured = Captured(target, "ragged")
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]
    captured.load(batches[0], causal=True, pos_encoding_mode=first)
    graph = captured.capture()
    for batch in batches:
        captured.load(batch, causal=True, pos_encoding_mode="NONE" if first == "ALIBI" else "ALIBI")
        captured.wrapper.run(batch.q, captured.k, captured.v)
        captured.check_replay(graph, batch, Options(causal=True, pos_encoding_mode=first))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_replay_with_scales_in_tensors(target, kind):
    captured = Captured(target, kind)
    batches = [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]
    scales = {name: torch.ones(1, device=target.device) for name in ("q_scale", "v_scale")}
    captured.load(batches[0])
    graph = captured.capture(**scales)
    for n, batch in enumerate(batches):
        captured.load(batch)
        scales["q_scale"].fill_(0.5 + n)
        scales["v_scale"].fill_(1.0 - 0.2 * n)
        captured.check_replay(graph, batch, Options(causal=True, q_scale=0.5 + n, v_scale=1.0 - 0.2 * n))


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


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_attention_in_pytorch_cannot_be_captured(target):
    batch = make_batch([8, 3], [40, 60], 4, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend="reference")
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads)
    out = torch.zeros_like(batch.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ck.BackendError, match="a CUDA graph cannot hold"):
        wrapper.run(batch.q, batch.k, batch.v, out=out)


@pytest.mark.runs_nothing("plans are refused")
@pytest.mark.parametrize("dtype, head_dim", [(torch.float32, 64), (torch.float16, 60), (torch.float16, 520)])
def test_plans_for_graphs_without_a_kernel_are_refused(target, dtype, head_dim):
    batch = make_batch([8, 3], [40, 60], 4, 2, 64, device=target.device)
    offsets = [torch.zeros(3, dtype=torch.int32, device=target.device) for _ in "qk"]
    buffers = dict(zip(("qo_indptr_buf", "kv_indptr_buf"), offsets))
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), use_cuda_graph=True, **buffers)
    refused = r"a CUDA graph cannot hold|the environment puts"
    with warnings.catch_warnings(), pytest.raises(ck.BackendError, match=refused):
        warnings.simplefilter("ignore")
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), 4, 2, head_dim, q_data_type=dtype, kv_data_type=dtype)


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


def test_captures_keep_no_memory(target):
    batch = make_batch([20], [5000], 4, 2, 64, device=target.device)
    q, k, v = batch.q, batch.k, batch.v
    out, decoded = torch.zeros_like(q), torch.zeros_like(q[-1])
    unread, offsets = torch.zeros(16, device=target.device), (batch.qo_indptr(q.device), batch.kv_indptr(q.device))

    def call() -> None:
        ck.single_prefill_with_kv_cache(q, k, v, causal=True, out=out)
        ck.single_decode_with_kv_cache(q[-1], k, v, out=decoded)
        numbers = (20, 5000, 0.125, 1.0, 1)
        ck.trtllm_fmha_v2_prefill([q, k, v], "SEPARATE_Q_K_V", unread, unread, *numbers, *offsets, out=out)

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph.replay()
        torch.cuda.synchronize()

    def reserved() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    call()
    capture()
    before = reserved()
    for _ in range(10):
        capture()
    assert reserved() <= before


def test_a_graph_has_its_counters_for_itself(target):
    """Though nothing else refers to them: what is allocated and written later lies elsewhere."""
    batch = make_batch([20], [5000], 4, 2, 64, device=target.device)
    results = torch.zeros_like(batch.q), torch.zeros_like(batch.q[-1])

    def call() -> None:
        ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend=target.backend, out=results[0])
        ck.single_decode_with_kv_cache(batch.q[-1], batch.k, batch.v, backend=target.backend, out=results[1])

    call()
    wanted = [x.clone() for x in results]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
        call()
    gc.collect()
    others = [torch.full((2048,), 7, dtype=torch.int32, device=target.device) for _ in range(500)]
    for _ in range(3):
        for x in results:
            x.zero_()
        graph.replay()
        for x, want in zip(results, wanted):
            assert torch.equal(x, want)
    assert all(bool((x == 7).all()) for x in others)


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
