"""e4m3 queries, keys, values and outputs of trtllm_fmha_v2_prefill."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from compare import assert_close
from fused_problems import (
    E4M3,
    LAYOUTS,
    MODES,
    PAGED,
    Mode,
    batch_of,
    call,
    expect,
    on_gpu,
    pack,
)
from guards import Guarded
from problems import Batch, make_batch

E4M3_MODES = {
    **MODES,
    "sinks": Mode(sinks=torch.tensor([-2.0, 0.5, 1.5, 6.0]), window_left=50),
    "negative": Mode(bmm1=0.1, bmm2=-3.0),
}


def steps(x: torch.Tensor) -> torch.Tensor:
    """How far e4m3 numbers as large as ``x`` are apart."""
    exponent = torch.frexp(x.nan_to_num(0.0).abs().clamp(2.0**-6, 448.0)).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent - 3)


class InE4M3:
    """The oracle's output rounded to e4m3. Results may be a step away; and as far as probabilities are rounded, by what
    that may make of the sum of absolute values: those of e4m3 by a sixteenth, beside what tensor cores lose of logits.
    """

    def __init__(self, batch: Batch, mode: Mode, target) -> None:
        self.exact = expect(batch, mode)[0]
        self.rounded = self.exact.clamp(-448.0, 448.0).float().to(E4M3).double()
        self.lost = torch.zeros_like(self.exact)
        if not target.is_reference:
            fp8 = target.backend == "fa3"
            positive = dataclasses.replace(batch, v=batch.v.float().abs().to(batch.v.dtype))
            sums = expect(positive, dataclasses.replace(mode, bmm2=abs(mode.bmm2)))[0].nan_to_num(0.0)
            self.lost = sums * 0.08 + 4e-3 * abs(mode.bmm2) if fp8 else sums * 2.0**-10

    def check(self, out: torch.Tensor) -> None:
        assert out.dtype == E4M3
        got = out.double()
        largest = torch.maximum(self.rounded.nan_to_num(0.0).abs(), got.nan_to_num(0.0).abs())
        assert_close(got, self.rounded, atol=0.0, rtol=0.0, allowed=steps(largest) + self.lost)


def check_e4m3(batch: Batch, layout: str, mode: Mode, target, **extra) -> torch.Tensor:
    if mode.sinks is not None:
        mode = dataclasses.replace(mode, sinks=mode.sinks.to(target.device))
    out = call(batch, layout, mode, out_dtype=E4M3, **extra)
    InE4M3(batch, mode, target).check(out)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lengths,mode",
    [("uneven", m) for m in E4M3_MODES] + list(itertools.product(["even", "empty", "decode"], ["causal", "alibi"])),
)
def test_e4m3_output(target, layout, lengths, mode):
    check_e4m3(batch_of(target, layout, lengths, E4M3, 128), layout, E4M3_MODES[mode], target)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [32, 40, 64, 80, 112, 256])
@pytest.mark.parametrize("lengths", ["even", "decode"])
def test_e4m3_output_of_head_dims(target, layout, head_dim, lengths):
    check_e4m3(batch_of(target, layout, lengths, E4M3, head_dim), layout, Mode(), target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["uneven", "decode"])
def test_e4m3_output_with_scales_in_tensors(target, layout, lengths):
    batch, mode = batch_of(target, layout, lengths, E4M3, 128), Mode(bmm1=0.1, bmm2=0.7)
    scales = {name: torch.tensor([value], device=target.device) for name, value in (("1", 0.1), ("2", 0.7))}
    check_e4m3(batch, layout, mode, target, bmm1_scale=scales["1"], bmm2_scale=scales["2"])


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["even", "decode"])
@pytest.mark.parametrize("alibi,bmm2", [(False, 1e4), (False, -1e9), (True, 1e9)])
def test_e4m3_output_saturates(target, layout, lengths, alibi, bmm2):
    # The larger scale is beyond float16, too.
    batch, mode = batch_of(target, layout, lengths, E4M3, 128), Mode(alibi=alibi, bmm2=bmm2)
    out, want = call(batch, layout, mode, out_dtype=E4M3), InE4M3(batch, mode, target)
    want.check(out)
    assert not bool(out.float().isnan().any())
    beyond = want.exact.abs() > 480 + 2 * want.lost
    assert float(beyond.float().mean()) > 0.05
    assert torch.equal(out.float()[beyond], 448 * want.exact[beyond].sign().float())


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "PACKED_QKV"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("alibi", [False, True])
def test_e4m3_rows_without_keys_are_zero(target, layout, head_dim, alibi):
    for qo_lens, kv_lens in (([40, 133, 5, 3], [7, 134, 0, 2]), ([1, 3, 2, 4], [0, 2, 5, 0])):
        batch = make_batch(qo_lens, kv_lens, 4, 2, head_dim, dtype=E4M3, device=target.device)
        out = check_e4m3(batch, layout, Mode(alibi=alibi), target, max_kv_len=200)
        empty = (expect(batch, Mode(alibi=alibi))[0] == 0).all(-1)
        assert bool(empty.any()) and bool((out.float()[empty] == 0).all())


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["even", "decode"])
@pytest.mark.parametrize("alibi", [False, True])
def test_nan_stays_nan_in_e4m3(target, layout, lengths, alibi):
    batch = batch_of(target, layout, lengths, E4M3, 128)
    values = batch.v.float()
    values[-1, 0, 77] = torch.nan
    batch = dataclasses.replace(batch, v=values.to(E4M3))
    out = check_e4m3(batch, layout, Mode(mask_mode="padding", alibi=alibi), target)
    assert bool(torch.isnan(out.float()).any())


@pytest.mark.parametrize("layout", ["CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", *PAGED])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_e4m3_output_of_split_keys(target, layout, head_dim):
    batch = make_batch([1, 3], [1500, 1100], 4, 2, head_dim, dtype=E4M3, device=target.device)
    for mode in (Mode(), E4M3_MODES["sinks"], Mode(bmm2=3e4)):
        check_e4m3(batch, layout, mode, target)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["uneven", "decode"])
@pytest.mark.parametrize("mode,head_dim", [("causal", 80), ("causal", 128), ("alibi", 64)])
def test_e4m3_writes_stay_inside(target, layout, lengths, mode, head_dim):
    # Rows that begin at multiples of 16 bytes, and of 8, which the kernels of fp8 do not write.
    batch = batch_of(target, layout, lengths, E4M3, head_dim)
    want = InE4M3(batch, MODES[mode], target)
    rows, heads, _ = batch.q.shape
    for token_gap, head_gap in ((0, 0), (80, 16), (8, 0)):
        strides = (heads * (head_dim + head_gap) + token_gap, head_dim + head_gap, 1)
        out = Guarded((rows, heads, head_dim), E4M3, target.device, strides)
        call(batch, layout, MODES[mode], out=out.tensor)
        want.check(out.tensor)
        out.check("out")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["causal", "alibi"])
def test_e4m3_rows_beyond_all_requests_are_not_written(target, layout, mode):
    batch = batch_of(target, layout, "even", E4M3, 128)
    out = torch.full(batch.q.shape, 3.0, device=target.device).to(E4M3)
    qo, kv = batch.qo_indptr(), batch.kv_indptr()
    qo[-1] = qo[-2] + 3
    if layout == "PACKED_QKV":
        kv = qo
    offsets = dict(cum_seq_lens_q=qo.to(target.device), cum_seq_lens_kv=kv.to(target.device))
    call(batch, layout, MODES[mode], out=out, **offsets)
    assert bool((out[int(qo[-1]) :].float() == 3.0).all())
    assert not bool((out[: int(qo[-1])].float() == 3.0).all(-1).any())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["causal", "alibi"])
def test_replays_of_e4m3_write_no_rows_beyond_lengths_that_shrank(target, layout, mode):
    on_gpu(target)
    batch = batch_of(target, layout, "even", E4M3, 128)
    qkv, tables = pack(batch, layout)
    qo, kv = batch.qo_indptr(target.device), batch.kv_indptr(target.device)
    given = dict(
        qkv=qkv,
        tables=tables,
        cum_seq_lens_q=qo,
        cum_seq_lens_kv=qo if layout == "PACKED_QKV" else kv,
        workspace_buffer=torch.zeros(16, dtype=torch.uint8, device=target.device),
        seq_lens=torch.zeros(len(batch.qo_lens), dtype=torch.int32, device=target.device),
    )
    out, eager = torch.empty_like(batch.q), torch.empty_like(batch.q)
    every_byte = torch.arange(out.numel(), device=target.device).to(torch.uint8).view(out.shape)
    call(batch, layout, MODES[mode], out=out, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(batch, layout, MODES[mode], out=out, **given)
    for last in (65, 3, 0):  # rows of the last request
        qo[-1] = qo[-2] + last
        for result, run in ((out, graph.replay), (eager, lambda: call(batch, layout, MODES[mode], out=eager, **given))):
            result.view(torch.uint8).copy_(every_byte)
            run()
        rows = int(qo[-1])
        for result in (out, eager):
            assert torch.equal(result[rows:].view(torch.uint8), every_byte[rows:])
        assert torch.equal(out[:rows].view(torch.uint8), eager[:rows].view(torch.uint8))
        assert not bool((out[:rows].view(torch.uint8) == every_byte[:rows]).all(-1).any())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_calls_of_e4m3(target, layout):
    batch = batch_of(target, layout, "uneven", E4M3, 128)
    qkv, tables = pack(batch, layout)
    want, out = InE4M3(batch, Mode(), target), torch.empty_like(batch.q)
    for _ in range(3):
        out.view(torch.uint8).fill_(0x7F)
        assert call(batch, layout, Mode(), qkv=qkv, tables=tables, out=out).data_ptr() == out.data_ptr()
        want.check(out)
        want.check(call(batch, layout, Mode(), qkv=qkv, tables=tables))
        assert call(batch, layout, Mode(), qkv=qkv, tables=tables, out_dtype=torch.float16).dtype == torch.float16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["causal", "alibi"])
def test_captured_calls_of_e4m3(target, layout, mode):
    on_gpu(target)
    batch = batch_of(target, layout, "uneven", E4M3, 128)
    qkv, tables = pack(batch, layout)
    want, out = InE4M3(batch, MODES[mode], target), torch.zeros_like(batch.q)
    offsets = dict(
        cum_seq_lens_q=batch.qo_indptr(target.device),
        cum_seq_lens_kv=batch.kv_indptr(target.device),
        workspace_buffer=torch.zeros(16, dtype=torch.uint8, device=target.device),
        seq_lens=torch.zeros(len(batch.qo_lens), dtype=torch.int32, device=target.device),
    )

    def run() -> None:
        call(batch, layout, MODES[mode], qkv=qkv, tables=tables, out=out, **offsets)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(2):
        out.view(torch.uint8).fill_(0x7F)
        graph.replay()
        torch.cuda.synchronize()
        want.check(out)
