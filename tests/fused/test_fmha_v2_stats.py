"""Softmax statistics of trtllm_fmha_v2_prefill: exact maxima and sums, from one kernel."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_problems import (
    LAYOUTS,
    LENGTHS,
    NOT_PACKED,
    PAGED,
    SINKS,
    Mode,
    batch_of,
    block_table,
    check_stats,
    tensors_of,
)
from problems import make_batch

STATS_MODES = {
    "causal": Mode(),
    "window": Mode(mask_mode="sliding_window", window_left=21),
    "chunks": Mode(mask_mode="chunked", chunked_attention_size=32),
    "padding": Mode(mask_mode="padding", bmm1=0.3, bmm2=0.5),
    "cap": Mode(cap=2.0, bmm1=0.4),
    "alibi": Mode(alibi=True, bmm1=0.3),
    "alibi and cap": Mode(alibi=True, cap=1.5, bmm1=0.5),
    "negative": Mode(bmm1=-0.2),
}


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", STATS_MODES)
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_stats_of_every_mode(target, layout, mode, sinks):
    check_stats(batch_of(target, layout, "uneven"), layout, dataclasses.replace(STATS_MODES[mode], sinks=sinks))


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    "head_dim,dtype", [(64, torch.bfloat16), (96, torch.float16), (128, torch.bfloat16), (256, torch.float16)]
)
def test_stats_of_every_head_dim(target, layout, lengths, head_dim, dtype):
    check_stats(batch_of(target, layout, lengths, dtype, head_dim), layout, Mode(window_left=150))


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mode", ["causal", "alibi and cap"])
def test_stats_of_e4m3(target, layout, lengths, head_dim, mode):
    batch = batch_of(target, layout, lengths, torch.float8_e4m3fn, head_dim)
    check_stats(batch, layout, STATS_MODES[mode], out_dtype=torch.float16)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("factor", [0.3, -0.3, 0.0])
def test_stats_with_scales_in_tensors(target, layout, dtype, cap, factor):
    batch, mode = batch_of(target, layout, "uneven", dtype), Mode(cap=cap, bmm1=factor, bmm2=0.7)
    check_stats(batch, layout, mode, out_dtype=torch.float16, **tensors_of(target, mode))


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_stats_of_rows_without_keys(target, layout, head_dim, dtype):
    batch = make_batch([20, 70, 3, 5], [4, 40, 0, 1], 4, 2, head_dim, dtype=dtype, device=target.device)
    chunks = Mode(mask_mode="chunked", chunked_attention_size=16, cap=3.0)
    for mode in (Mode(sinks=SINKS), Mode(mask_mode="padding", sinks=SINKS), chunks):
        check_stats(batch, layout, mode, max_kv_len=70, out_dtype=torch.float16)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("heads", [(8, 1), (8, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("lengths", [([1, 1], [3000, 700]), ([1, 2, 0, 1], [2500, 40, 7, 1300]), ([40], [2000])])
def test_keys_of_short_queries_are_not_split(target, layout, heads, lengths):
    batch = make_batch(*lengths, *heads, 128, dtype=torch.bfloat16, device=target.device)
    check_stats(batch, layout, Mode())
    fp8 = make_batch(*lengths, *heads, 128, dtype=torch.float8_e4m3fn, device=target.device)
    check_stats(fp8, layout, Mode(), out_dtype=torch.float16)


@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("lengths", ["five rows", "two tiles"])
def test_stats_of_short_queries(target, layout, lengths):
    check_stats(batch_of(target, layout, lengths), layout, Mode())


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("mask_mode", ["causal", "padding"])
def test_stats_of_large_tiles(target, head_dim, mask_mode):
    if target.is_reference:
        pytest.skip("the reference has no tiles, and takes half a minute")
    batch = make_batch([400, 240], [450, 333], 70, 10, head_dim, device=target.device)
    check_stats(batch, "CONTIGUOUS_Q_KV", Mode(mask_mode=mask_mode))


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [1, 12, 16])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_stats_of_pages(target, layout, page, lengths):
    batch = batch_of(target, layout, lengths)
    paged = batch.paged(page, layout[-3:])
    check_stats(batch, layout, Mode(), qkv=(batch.q, paged.cache), tables=block_table(paged).to(target.device))


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", [([1, 5], [700, 600]), ([64, 3], [500, 100]), ([150, 130], [400, 450])], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("step", [1e-3, -1e-3, 0.02, -0.02])
def test_maxima_rise_little_by_little(target, lengths, head_dim, step):
    # From block to block by less, or by more, than the headroom of a softmax that need not know the maximum.
    batch = make_batch(*lengths, 4, 2, head_dim, dtype=torch.bfloat16, device=target.device)
    for _, k, _ in batch.requests():
        place = torch.arange(len(k), device=target.device)
        k.copy_((k.float() * 0.1 + step * place[:, None, None]).to(k.dtype))
    batch = dataclasses.replace(batch, q=batch.q.abs())
    for mode in (Mode(mask_mode="padding"), Mode(window_left=200)):
        check_stats(batch, "SEPARATE_Q_K_V", mode)
