"""Capture once, re-plan, replay: the captured kernels read lengths and tables from the wrapper's buffers."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable

import oracle
import pytest
import torch
from captures import Captured, capture
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, graph_buffers, make_batch
from wrapper_problems import Wrapped

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
kinds = pytest.mark.parametrize("kind", ["ragged", "paged"])


@pytest.fixture(autouse=True)
def only_on_cuda(target):
    if target.is_reference:
        pytest.skip("a CUDA graph needs CUDA kernels")


@pytest.fixture
def batches(target) -> list[Batch]:
    return batches_of(target, STEPS)


def batches_of(target, steps: list[tuple[list[int], list[int]]]) -> list[Batch]:
    return [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(steps)]


@pytest.mark.parametrize("fixed", [None, 16])
def test_workspace_size_counts_the_room_of_the_buffers(target, fixed):
    batch = make_batch([1, 1], [500, 900], 4, 2, 64, device=target.device)
    buffers = graph_buffers(2, 20 * (63 + 113), target.device)
    w = Wrapped(target, "paged", batch, 8, **buffers)
    sizes = w.wrapper.workspace_size(*w.vectors(), *w.sizes, causal=True, fixed_split_size=fixed)
    w.wrapper.reset_workspace_buffer(*(target.workspace(max(size, 16)) for size in sizes))
    w.plan(CAUSAL, fixed_split_size=fixed).check(w.run())


@kinds
def test_replay_after_other_plans(target, batches, kind):
    captured = Captured(target, kind)
    captured.load(batches[0], CAUSAL)
    graph = captured.capture()
    for batch in [*batches, batches[0]]:
        captured.check_replay(graph, captured.load(batch, CAUSAL))


@kinds
def test_replays_convert_no_lse_beyond_the_last_request(target, batches, kind):
    captured = Captured(target, kind)
    captured.load(batches[0], CAUSAL)
    graph = captured.capture(lse_base="ln")
    for batch in [*batches, batches[0]]:
        w = captured.load(batch, CAUSAL)
        captured.lse.fill_(7.0)
        graph.replay()
        rows = len(batch.q)
        assert_lse_close(captured.lse[:rows] / math.log(2.0), w.expect().lse)
        assert bool((captured.lse[rows:] == 7.0).all())


@kinds
@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "misaligned"])
def test_replay_with_other_masks(target, kind, first):
    # Room for no more than the masks, up to the last bit: kernels read words of 32.
    steps = [([8, 8, 8], [40, 60, 8]), ([3, 20, 1], [90, 29, 1]), ([8, 0, 4], [8, 0, 31]), ([1, 5, 3], [700, 0, 5])]
    batches = batches_of(target, steps)
    room = max(sum((n * m + 7) // 8 for n, m in zip(*step)) for step in steps)
    buffer = torch.full((first + room,), 255, dtype=torch.uint8, device=target.device)
    captured = Captured(target, kind, mask_buffer=buffer[first:])
    masks = [batch.random_masks() for batch in batches]
    captured.load(batches[0], Options(custom_masks=masks[0]))
    graph = captured.capture()
    for batch, given in [*zip(batches, masks), (batches[0], masks[0])]:
        captured.check_replay(graph, captured.load(batch, Options(custom_masks=given)))
        for causal in (True, False):  # the mask that stands for none
            captured.check_replay(graph, captured.load(batch, Options(causal=causal)))


def test_replay_of_items(target, batches):
    captured = Captured(target, "ragged", mask_buffer=torch.zeros(1000, dtype=torch.uint8, device=target.device))

    def load(batch: Batch) -> Wrapped:
        items = [oracle.MultiItem(max(m - 7, 0), (0, 1, 2, 0, 1, 2, 3)) for m in batch.kv_lens]
        prefix = torch.tensor([x.prefix_len for x in items], dtype=torch.int32).to(torch.uint32)
        positions = torch.tensor([x.token_pos for x in items], dtype=torch.int32).reshape(-1).to(torch.uint16)
        longest = torch.tensor([3, 3, 3], dtype=torch.int32).to(torch.uint16)
        given = dict(prefix_len_ptr=prefix, token_pos_in_items_ptr=positions, max_item_len_ptr=longest)
        return captured.load(batch, Options(multi_items=items), token_pos_in_items_len=7, **given)

    load(batches[0])
    graph = captured.capture()
    for batch in [*batches[:3], batches[0]]:
        captured.check_replay(graph, load(batch))


@pytest.mark.parametrize("first", ["NONE", "ALIBI"])
def test_replay_after_a_plan_of_another_kind(target, batches, first):
    # Tiles of other sizes must not take the place of those that a graph counts on.
    captured, options = Captured(target, "ragged"), Options(causal=True, pos_encoding_mode=first)
    captured.load(batches[0], options)
    graph = captured.capture()
    for batch in batches:
        w = captured.load(batch, Options(causal=True, pos_encoding_mode="NONE" if first == "ALIBI" else "ALIBI"))
        captured.wrapper.run(batch.q, *captured.kv)
        captured.check_replay(graph, w, options)


@kinds
def test_replay_with_scales_in_tensors(target, batches, kind):
    captured = Captured(target, kind)
    scales = {name: torch.ones(1, device=target.device) for name in ("q_scale", "v_scale")}
    captured.load(batches[0], CAUSAL)
    graph = captured.capture(**scales)
    for n, batch in enumerate(batches):
        w, now = captured.load(batch, CAUSAL), dict(q_scale=0.5 + n, v_scale=1.0 - 0.2 * n)
        for name, value in now.items():
            scales[name].fill_(value)
        captured.check_replay(graph, w, Options(causal=True, **now))


def test_capture_before_any_run(target, batches):
    """Offsets on the device: nothing but the captured runs themselves knows the work."""
    captured = Captured(target, "ragged")
    captured.load(batches[0], CAUSAL, target.device)
    ck.single_prefill_with_kv_cache(batches[0].q, batches[0].k, batches[0].v, backend=target.backend)  # loads kernels
    graph, _ = capture(captured.run, warm_up=0)
    captured.run()  # before the graph has made its own list
    for batch in [*batches, batches[0]]:
        w = captured.load(batch, CAUSAL, target.device)
        for run in (graph.replay, captured.run, graph.replay):
            captured.out.fill_(7.0)
            run()
            w.check(captured.out[: len(batch.q)])


def test_capture_with_offsets_on_the_device_outside_graph_mode(target):
    w = Wrapped(target, "ragged", make_batch([8, 3], [40, 60], 4, 2, 64, device=target.device))
    w.plan(CAUSAL, target.device)
    graph, out = capture(w.run, warm_up=0)
    w.check(w.run())
    graph.replay()
    w.check(out)


def test_rows_of_the_first_run_bound_later_ones(target):
    captured = Captured(target, "ragged")
    captured.load(make_batch(*STEPS[1], 4, 2, 64, device=target.device), CAUSAL, target.device)
    captured.run()
    more = make_batch([9, 9, 9], [40, 60, 9], 4, 2, 64, device=target.device)
    with pytest.raises(ValueError, match=r"27.*24"):
        captured.wrapper.plan(more.qo_indptr(), more.kv_indptr(), *more.heads)
    with pytest.raises(ValueError, match=r"27.*24"):
        captured.wrapper.run(more.q, *captured.kv)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_attention_in_pytorch_cannot_be_captured(target):
    batch = make_batch([8, 3], [40, 60], 4, 2, 64, device=target.device)
    w = Wrapped(target, "ragged", batch, backend="reference").plan()
    out = torch.zeros_like(batch.q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ck.BackendError, match="a CUDA graph cannot hold"):
        w.run(out=out)


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

    graph, (out, decoded) = capture(both)
    other = make_batch([20], [300], 4, 2, 64, device=target.device, seed=1)
    for x, y in ((q, other.q), (k, other.k), (v, other.v)):
        x.copy_(y)
    graph.replay()
    want = expect(other, CAUSAL)
    assert_close(out, want.out, want.baseline)
    assert_close(decoded, want.out[-1], want.baseline[-1])


Call = Callable[[], torch.Tensor]


def many_tiles(target, seed: int) -> tuple[Call, Batch]:
    batch = make_batch([700], [700], 32, 8, 64, device=target.device, seed=seed)
    options = dict(causal=True, backend=target.backend)
    return lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, **options), batch


def planned(target, seed: int) -> tuple[Call, Batch]:
    batch = make_batch([300, 150], [300, 400], 32, 8, 64, device=target.device, seed=seed)
    return Wrapped(target, "ragged", batch).plan(CAUSAL).run, batch


@pytest.mark.parametrize("make", [many_tiles, planned])
def test_graphs_replayed_side_by_side(target, make):
    """Graphs captured on one stream, replayed on two at once, beside calls on a third: no state is shared."""
    made = [make(target, seed) for seed in range(2)]
    wanted = [call() for call, _ in made]
    for want, (_, batch) in zip(wanted, made):
        assert_close(want, expect(batch, CAUSAL).out)
    graphs = [capture(lambda call=call: [call() for _ in range(4)], warm_up=0) for call, _ in made]
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for (graph, _), stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
        # The workspace of a wrapper is that of its replays.
        eager = made[0][0]() if make is many_tiles else wanted[0]
        torch.cuda.synchronize()
        assert torch.equal(eager, wanted[0])
        for (_, results), want in zip(graphs, wanted):
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

    def replay_once() -> None:
        capture(call, warm_up=0)[0].replay()
        torch.cuda.synchronize()

    def reserved() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    call()
    replay_once()
    before = reserved()
    for _ in range(10):
        replay_once()
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
    graph, _ = capture(lambda: (call(), call()), warm_up=0)
    gc.collect()
    others = [torch.full((2048,), 7, dtype=torch.int32, device=target.device) for _ in range(500)]
    for _ in range(3):
        for x in results:
            x.zero_()
        graph.replay()
        for x, want in zip(results, wanted):
            assert torch.equal(x, want)
    assert all(bool((x == 7).all()) for x in others)


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
