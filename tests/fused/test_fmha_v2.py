"""trtllm_fmha_v2_prefill: five layouts, its own masks, scales, sinks and statistics."""

from __future__ import annotations

import dataclasses
import math

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from fused_problems import LAYOUTS, PAGE, Mode, batch_for, block_table, call, check, expect, pack
from problems import make_batch

import cutlass_kernels as ck


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask_mode", ["causal", "padding", "CAUSAL"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_layouts(target, layout, mask_mode, dtype):
    check(batch_for(layout, target, dtype), layout, Mode(mask_mode=mask_mode))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [32, 40, 48, 80, 96, 104, 128, 160, 192, 256])
def test_head_dims(target, layout, head_dim):
    check(batch_for(layout, target, head_dim=head_dim), layout, Mode())


def test_value_head_dim_differs(target):
    batch = make_batch([20, 33], [70, 33], 4, 4, 192, head_dim_vo=128, device=target.device)
    check(batch, "SEPARATE_Q_K_V", Mode())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bmm1,bmm2", [(0.3, 1.0), (0.05, 0.25), (0.0, 2.0)])
def test_scales(target, layout, bmm1, bmm2):
    check(batch_for(layout, target), layout, Mode(bmm1=bmm1, bmm2=bmm2))


def test_scales_as_tensors(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    out = call(
        batch,
        "CONTIGUOUS_Q_KV",
        Mode(),
        bmm1_scale=torch.tensor(0.3, device=target.device),
        bmm2_scale=torch.tensor([0.5], device=target.device),
    )
    want, _, base = expect(batch, Mode(bmm1=0.3, bmm2=0.5))
    assert_close(out, want, base.to(out.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mode,window", [("sliding_window", 0), ("sliding_window", 7), ("Sliding_Window", 500), ("causal", 7)]
)
def test_window(target, layout, mode, window):
    check(batch_for(layout, target), layout, Mode(mask_mode=mode, window_left=window))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_window_longer_than_all_keys(target, layout):
    check(batch_for(layout, target), layout, Mode(mask_mode="sliding_window", window_left=5000))


def test_sliding_window_of_minus_one_is_causal(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    want, _, base = expect(batch, Mode())
    for mode in (Mode(mask_mode="sliding_window", window_left=-1), Mode(window_left=0)):
        got = call(batch, "CONTIGUOUS_Q_KV", mode)
        assert_close(got, want, base.to(got.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk", [1, 8, 32, 64, 1024])
def test_chunks(target, layout, chunk):
    # Rows start in the middle of a chunk, with keys cached before them.
    check(batch_for(layout, target), layout, Mode(mask_mode="chunked", chunked_attention_size=chunk))


def test_chunks_behind_a_long_past(target):
    for layout in ("CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"):
        batch = make_batch([40, 3], [300, 129], 2, 1, 64, device=target.device)
        check(batch, layout, Mode(mask_mode="chunked", chunked_attention_size=64))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mask_mode", ["causal", "padding"])
def test_soft_cap(target, layout, mask_mode):
    check(batch_for(layout, target), layout, Mode(mask_mode=mask_mode, cap=2.0, bmm1=0.4))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alibi(target, layout):
    check(batch_for(layout, target), layout, Mode(alibi=True))


def test_soft_cap_comes_before_alibi(target):
    check(batch_for("CONTIGUOUS_Q_KV", target), "CONTIGUOUS_Q_KV", Mode(alibi=True, cap=1.5, bmm1=0.5))


@pytest.mark.parametrize("layout", ["Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"])
def test_max_kv_len_is_an_upper_bound(target, layout):
    batch = batch_for(layout, target)
    got = call(batch, layout, Mode(), max_kv_len=100_000)
    want, _, base = expect(batch, Mode())
    assert_close(got, want, base.to(got.dtype))


def test_other_position_modes_are_ignored(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    want, _, base = expect(batch, Mode())
    out = call(batch, "CONTIGUOUS_Q_KV", Mode(), pos_encoding_mode="none")
    assert_close(out, want, base.to(out.dtype))
    out = call(batch, "CONTIGUOUS_Q_KV", Mode(), pos_encoding_mode="ALiBi")
    want, _, base = expect(batch, Mode(alibi=True))
    assert_close(out, want, base.to(out.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("listed", [False, True])
def test_sinks(target, layout, listed):
    batch = batch_for(layout, target)
    sinks = torch.tensor([-2.0, 0.5, 1.5, 6.0], device=target.device)
    out = call(batch, layout, Mode(bmm1=0.2), sinks=[sinks] if listed else sinks)
    want, _, base = expect(batch, Mode(bmm1=0.2, sinks=sinks))
    assert_close(out, want, base.to(out.dtype))


@pytest.mark.parametrize("bmm1", [0.0, 0.05, 0.7])
@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_stats(target, bmm1, cap, with_sinks):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    sinks = torch.tensor([-2.0, 0.5, 1.5, 6.0], device=target.device) if with_sinks else None
    mode = Mode(bmm1=bmm1, cap=cap, sinks=sinks, window_left=30)
    out, stats = call(batch, "CONTIGUOUS_Q_KV", mode, save_softmax_stats=True)
    want, want_stats, base = expect(batch, mode)
    assert_close(out, want, base.to(out.dtype))
    assert stats.shape == (54, 4, 2) and stats.dtype == torch.float32
    # Maximum and sum hang together (a maximum of part of the row gives another sum), so compare what they mean first.
    unit = math.sqrt(64) if cap else math.sqrt(64) * (bmm1 or 1 / math.sqrt(64))
    natural = stats[..., 0] * unit + stats[..., 1].log()
    expected = want_stats[..., 0] * unit + want_stats[..., 1].log()
    assert_close(natural.reshape(-1), expected.reshape(-1), name="natural lse", atol=1e-3, rtol=1e-4)
    assert_close(stats[..., 0].reshape(-1), want_stats[..., 0].reshape(-1), name="max", atol=2e-3, rtol=1e-3)
    assert_close(stats[..., 1].reshape(-1), want_stats[..., 1].reshape(-1), name="sum", atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_e4m3(target, layout, out_dtype):
    batch = batch_for(layout, target, torch.float8_e4m3fn, 128)
    out = call(batch, layout, Mode(bmm1=0.1, bmm2=0.7), out_dtype=out_dtype)
    want, _, _ = expect(batch, Mode(bmm1=0.1, bmm2=0.7))
    expected_type = torch.bfloat16 if isinstance(out_dtype, str) else out_dtype
    positive = dataclasses.replace(batch, v=batch.v.float().abs().to(batch.v.dtype))
    allowed = expect(positive, Mode(bmm1=0.1, bmm2=0.7))[0] / 16  # probabilities may be e4m3
    rtol = 0.14 if expected_type == torch.float8_e4m3fn else 2e-2
    assert_close(out.float(), want, atol=2e-2, rtol=rtol, allowed=allowed)
    assert out.dtype == expected_type


def test_e4m3_output_saturates(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target, torch.float8_e4m3fn, 128)
    out = call(batch, "CONTIGUOUS_Q_KV", Mode(bmm2=1e4), out_dtype=torch.float8_e4m3fn).float()
    assert bool(torch.isfinite(out).all()) and float(out.abs().max()) == 448.0


def test_out_is_used_and_its_type_wins(target):
    batch = batch_for("Q_PAGED_KV_NHD", target)
    out = torch.full_like(batch.q, torch.nan)
    got = call(batch, "Q_PAGED_KV_NHD", Mode(), out=out)
    assert got.data_ptr() == out.data_ptr()
    want, _, base = expect(batch, Mode())
    assert_close(out, want, base.to(out.dtype))
    fp8 = batch_for("Q_PAGED_KV_NHD", target, torch.float8_e4m3fn)
    out = torch.empty(fp8.q.shape, dtype=torch.bfloat16, device=target.device)
    got = call(fp8, "Q_PAGED_KV_NHD", Mode(), out=out, out_dtype=torch.float16)
    assert got.dtype == torch.bfloat16 and got.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("layout", ["Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"])
def test_separate_caches_with_an_expanded_table(target, layout):
    # One allocation holds K blocks and behind them V blocks; the table counts blocks from the first K block.
    batch = batch_for(layout, target)
    paged = batch.paged(PAGE, layout[-3:], "tuple")
    count = paged.k_cache.shape[0]
    whole = torch.cat([paged.k_cache, paged.v_cache])
    pages = block_table(paged)
    tables = torch.stack([pages, pages + count], dim=1).to(target.device)
    out = call(batch, layout, Mode(), qkv=(batch.q, (whole[:count], whole[count:])), tables=tables)
    want, _, base = expect(batch, Mode())
    assert_close(out, want, base.to(out.dtype))


@pytest.mark.parametrize("page", [16, 32, 128])
def test_page_sizes(target, page):
    batch = batch_for("Q_PAGED_KV_HND", target)
    paged = batch.paged(page, "HND")
    tables = block_table(paged).to(target.device)
    out = call(batch, "Q_PAGED_KV_HND", Mode(), qkv=(batch.q, paged.cache), tables=tables)
    want, _, base = expect(batch, Mode())
    assert_close(out, want, base.to(out.dtype))


def test_bounds_may_be_generous_and_seq_lens_are_not_read(target):
    batch = batch_for("Q_PAGED_KV_NHD", target)
    lens = torch.full((3,), 10**6, dtype=torch.int32, device=target.device)
    out = call(batch, "Q_PAGED_KV_NHD", Mode(), max_q_len=150, max_kv_len=160, seq_lens=lens)
    want, _, base = expect(batch, Mode())
    assert_close(out, want, base.to(out.dtype))


def test_skip_softmax_stays_close(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    out = call(batch, "CONTIGUOUS_Q_KV", Mode(), skip_softmax_threshold_scale_factor=0.01)
    want, _, _ = expect(batch, Mode())
    assert_close(out, want, atol=0.12, rtol=0.02)


def test_workspace_needs_four_bytes_and_stays_clean(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    workspace = torch.zeros(16, dtype=torch.uint8, device=target.device)
    for _ in range(2):
        out = call(batch, "CONTIGUOUS_Q_KV", Mode(), workspace_buffer=workspace)
        assert torch.count_nonzero(workspace) == 0
    want, _, base = expect(batch, Mode())
    assert_close(out, want, base.to(out.dtype))


def test_seed_positional_order(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    qkv, _ = pack(batch, "CONTIGUOUS_Q_KV")
    device = target.device
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)
    workspace = torch.zeros(64, dtype=torch.uint8, device=device)
    bounds = (batch.qo_indptr(device), batch.kv_indptr(device))
    # ..., block_tables, out, out_dtype, sinks, pos, cap, mask_mode, window_left, chunk, stats, skip factor
    tail = (None, None, None, None, None, 2.0, "sliding_window", 5, 0, True, 0)
    out, stats = ck.trtllm_fmha_v2_prefill(qkv, "CONTIGUOUS_Q_KV", workspace, lens, 33, 70, 0.3, 1.0, 3, *bounds, *tail)
    want, _, base = expect(batch, Mode(mask_mode="sliding_window", window_left=5, cap=2.0, bmm1=0.3))
    assert_close(out, want, base.to(out.dtype))
    assert stats.shape == (54, 4, 2)


def test_wrappers_and_fmha_agree_on_the_lse(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    out, stats = call(batch, "CONTIGUOUS_Q_KV", Mode(), save_softmax_stats=True)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
    ours, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    # With the default scale the stored maximum is the scaled one.
    assert_lse_close(lse, ((stats[..., 0] + stats[..., 1].log()) * oracle.LOG2E).double())
    torch.testing.assert_close(out, ours, rtol=1e-3, atol=1e-3)


def test_e4m3_keeps_its_type_unless_told(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target, torch.float8_e4m3fn, 128)
    out = call(batch, "CONTIGUOUS_Q_KV", Mode())
    assert out.dtype == torch.float8_e4m3fn
    assert_close(out.float(), expect(batch, Mode())[0], atol=5e-2, rtol=0.14)


@pytest.mark.parametrize("layout", ["Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"])
def test_values_with_a_page_order_of_their_own(target, layout):
    batch = batch_for(layout, target)
    paged = batch.paged(PAGE, layout[-3:], "tuple")
    count = paged.k_cache.shape[0]
    order = torch.randperm(count)
    moved = torch.empty_like(paged.v_cache)
    moved[order.to(target.device)] = paged.v_cache
    whole = torch.cat([paged.k_cache, moved])
    pages = block_table(paged)
    values = torch.where(pages < count, order.int()[pages.clamp(max=count - 1).long()] + count, pages)
    tables = torch.stack([pages, values], dim=1).to(target.device)
    out = call(batch, layout, Mode(), qkv=(batch.q, (whole[:count], whole[count:])), tables=tables)
    want, _, base = expect(batch, Mode())
    assert_close(out, want, base.to(out.dtype))


def test_nan_stays_nan_in_the_lse():
    stats = torch.tensor([[[float("nan"), float("nan")], [-3.4e38, 0.0]]])
    lse = ck.fmha_v2_stats_to_lse(stats, 64, 0.1)
    assert lse[0, 0].isnan() and lse[0, 1] == -torch.inf


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("bmm1", [0.0, 0.3])
def test_helper_from_stats_to_lse(target, bmm1, cap):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    mode = Mode(bmm1=bmm1, cap=cap)
    _, stats = call(batch, "CONTIGUOUS_Q_KV", mode, save_softmax_stats=True)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    options = {"sm_scale": bmm1 or None, "logits_soft_cap": cap}
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True, **options)
    _, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    assert_lse_close(ck.fmha_v2_stats_to_lse(stats, 64, bmm1, cap), lse.double())
    nothing = torch.tensor([[[torch.finfo(torch.float32).min, 0.0]]], device=target.device)
    assert ck.fmha_v2_stats_to_lse(nothing, 64, bmm1, cap).tolist() == [[-torch.inf]]
