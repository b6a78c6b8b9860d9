"""What a call needs is not made from host memory while a CUDA graph is captured: replays would read it there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import fused_problems
import oracle
import pytest
import torch
from captures import capture
from compare import assert_close
from problems import Batch, Options, expect, make_batch
from torch.utils._python_dispatch import TorchDispatchMode
from wrapper_problems import Wrapped

import cutlass_kernels as ck
from cutlass_kernels._compute import fused_kernels
from cutlass_kernels._core import checks

CPU = torch.device("cpu")
META = torch.device("meta")  # stands for a GPU
HEADS = (6, 3)  # of no other test: their slopes, and calls with them, are new
LAYOUT = "SEPARATE_Q_K_V"


@pytest.fixture
def no_slopes(monkeypatch) -> dict:
    """As if no call had asked for slopes yet."""
    made: dict = {}
    monkeypatch.setattr(checks, "_slopes", made)
    return made


@pytest.fixture
def capturing(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


class Devices(TorchDispatchMode):
    """Where the results of operators lie."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.add(result.device.type)
        return result


# --- slopes ---


def test_slopes_have_the_bits_of_exact_ones(no_slopes):
    for heads in range(1, 513):
        slopes = checks.alibi_slopes(heads, CPU)
        assert torch.equal(slopes, torch.tensor(oracle.alibi_slopes(heads), dtype=torch.float32))
        assert slopes is checks.alibi_slopes(heads, CPU) and checks.are_kept(slopes)


def test_slopes_of_a_capture_are_computed_on_the_device(no_slopes, capturing, monkeypatch):
    monkeypatch.setattr(checks, "without_modes", contextlib.nullcontext)  # it would hide the operators from Devices
    with Devices() as devices:
        slopes = checks.alibi_slopes(12, META)
    assert devices.seen == {"meta"} and slopes.shape == (12,) and slopes.dtype == torch.float32


def test_slopes_of_a_capture_are_its_own(no_slopes, capturing, monkeypatch):
    captured = checks.alibi_slopes(12, META)
    assert not checks.are_kept(captured)  # they are there only once the graph has run
    with monkeypatch.context() as ended:
        ended.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        kept = checks.alibi_slopes(12, META)
    assert kept is not captured and checks.are_kept(kept) and not checks.are_kept(captured)
    assert checks.alibi_slopes(12, META) is kept  # a capture reads them, too


@pytest.mark.gpu
def test_slopes_are_the_same_on_the_gpu(no_slopes):
    for heads in (1, 7, 8, 12, 40, 71, 128, 513, 2047):
        graph, slopes = capture(lambda heads=heads: checks.alibi_slopes(heads, torch.device("cuda:0")), warm_up=0)
        graph.replay()
        assert torch.equal(slopes.cpu(), checks.alibi_slopes(heads, CPU))


# --- calls with slopes ---

Case = tuple[Callable[[], torch.Tensor], torch.Tensor, torch.Tensor]


def prefill(target, batch: Batch) -> Case:
    options = dict(causal=True, pos_encoding_mode="ALIBI", backend=target.backend)
    want = expect(batch, Options(causal=True, pos_encoding_mode="ALIBI"))
    call = lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, **options)  # noqa: E731
    return call, want.out, want.baseline


def decode(target, batch: Batch) -> Case:
    last = Batch([1], batch.kv_lens, batch.q[-1:], batch.k, batch.v)
    want = expect(last, Options(pos_encoding_mode="ALIBI"), decode=True)
    options = dict(pos_encoding_mode="ALIBI", backend=target.backend)
    call = lambda: ck.single_decode_with_kv_cache(last.q[0], last.k, last.v, **options)  # noqa: E731
    return call, want.out[0], want.baseline[0]


def forward(target, batch: Batch) -> Case:
    """With an option that the plan did not know."""
    options, w = Options(causal=True, pos_encoding_mode="ALIBI"), Wrapped(target, "ragged", batch).plan()
    want = w.expect(options)
    return lambda: w.wrapper.forward(batch.q, *w.kv, **options.plan_kwargs()), want.out, want.baseline


def fused(target, batch: Batch) -> Case:
    mode = fused_problems.Mode(alibi=True, bmm1=0.5)
    unread = torch.zeros(16, dtype=torch.uint8, device=target.device)
    given = dict(
        workspace_buffer=unread,
        seq_lens=unread,
        cum_seq_lens_q=batch.qo_indptr(target.device),
        cum_seq_lens_kv=batch.kv_indptr(target.device),
    )
    want, _, baseline = fused_problems.expect(batch, mode)
    return lambda: fused_problems.call(batch, LAYOUT, mode, **given), want, baseline


@pytest.mark.parametrize("case", [prefill, decode, forward, fused])
def test_the_first_call_with_slopes_may_be_captured(kernels, no_slopes, case):
    case(kernels, make_batch([11], [77], 4, 2, 64, device=kernels.device))[0]()  # loads kernels
    call, want, baseline = case(kernels, make_batch([11], [77], *HEADS, 64, device=kernels.device))
    graph, out = capture(call, warm_up=0)
    assert (HEADS[0], out.device) not in no_slopes
    for _ in range(3):  # before the graph has run, which alone would write its slopes
        assert_close(call(), want, baseline)
    graph.replay()
    assert_close(out, want, baseline)


# --- index tensors ---


def test_index_tensors_in_pageable_memory_are_refused():
    offsets = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cum_seq_lens_q \(shape \(3,\)\) lies in pageable CPU memory.*cuda:0"):
        fused_kernels.captured("cum_seq_lens_q", offsets, torch.device("cuda:0"))
    for other in (None, [0, 3], offsets.to(META)):
        assert fused_kernels.captured("block_tables", other, META) is other


@pytest.mark.runs_nothing("calls are refused before a backend computes")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "e4m3"])
def test_a_captured_call_refuses_offsets_in_pageable_memory(kernels, dtype):
    batch = make_batch([11, 5], [77, 9], 4, 2, 64, dtype=dtype, device=kernels.device)
    unread = torch.zeros(16, dtype=torch.uint8, device=kernels.device)
    given = dict(workspace_buffer=unread, seq_lens=unread, out_dtype=torch.float16)
    offsets = dict(cum_seq_lens_q=batch.qo_indptr(), cum_seq_lens_kv=batch.kv_indptr(kernels.device))
    call = lambda: fused_problems.call(batch, LAYOUT, fused_problems.Mode(), **given, **offsets)  # noqa: E731
    with pytest.raises(ValueError, match=r"cum_seq_lens_q .* pageable"):
        capture(call, warm_up=0)


@pytest.mark.parametrize("mask_mode", ["causal", "padding"])
def test_a_captured_call_follows_offsets_in_pinned_memory(kernels, mask_mode):
    steps = [([11, 5], [77, 9]), ([6, 10], [40, 46]), ([16, 0], [86, 0])]
    batches = [make_batch(*step, 4, 2, 64, device=kernels.device, seed=n) for n, step in enumerate(steps)]
    first, mode = batches[0], fused_problems.Mode(mask_mode=mask_mode)
    q, k, v = (x.clone() for x in (first.q, first.k, first.v))
    unread = torch.zeros(16, dtype=torch.uint8, device=kernels.device)
    pinned = [x.pin_memory() for x in (first.qo_indptr(), first.kv_indptr())]
    given = dict(workspace_buffer=unread, seq_lens=unread, max_q_len=16, max_kv_len=86)
    offsets = dict(cum_seq_lens_q=pinned[0], cum_seq_lens_kv=pinned[1])

    def call() -> torch.Tensor:
        return fused_problems.call(first, LAYOUT, mode, qkv=(q, k, v), **given, **offsets)

    graph, out = capture(call)
    for batch in batches:
        for x, y in ((q, batch.q), (k, batch.k), (v, batch.v), (pinned[0], batch.qo_indptr())):
            x.copy_(y)
        pinned[1].copy_(batch.kv_indptr())
        graph.replay()
        torch.cuda.synchronize()
        want, _, baseline = fused_problems.expect(batch, mode)
        assert_close(out, want, baseline)


def test_a_shared_prefix_is_planned_before_the_capture(kernels):
    batch = make_batch([3, 2], [20, 33], 4, 2, 64, device=kernels.device)
    paged, shared = batch.paged(16), make_batch([1], [50], 4, 2, 64, device=kernels.device)
    wrapper = ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(kernels.workspace())
    wrapper.begin_forward(batch.qo_indptr(), *paged.table(), *batch.heads, 16)
    call = lambda: wrapper.forward(batch.q, shared.k, shared.v, paged.cache)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"run forward\(\) once before the capture"):
        capture(call, warm_up=0)
    want = call()
    graph, out = capture(call, warm_up=0)
    graph.replay()
    torch.testing.assert_close(out, want)
