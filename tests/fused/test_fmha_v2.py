"""trtllm_fmha_v2_prefill: five layouts, its own masks, scales, sinks and statistics."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from fused_problems import (
    E4M3,
    LAYOUTS,
    MODES,
    NOT_PACKED,
    PAGED,
    SHORT,
    SINKS,
    Mode,
    batch_of,
    block_table,
    call,
    check,
    check_stats,
    expect,
    in_caches,
    pack,
    tensors_of,
)
from problems import make_batch

import cutlass_kernels as ck

HALF = [torch.float16, torch.bfloat16]
# Lengths, a mode, and sizes of the batch. Rows of chunks start in the middle of one, with keys cached before them.
CASES: list[tuple[str, Mode, dict[str, Any]]] = [
    *[("usual", Mode(x), dict(dtype=y)) for x in ("causal", "padding", "CAUSAL") for y in HALF],
    *[("usual", Mode(), dict(head_dim=x)) for x in (32, 40, 48, 80, 96, 104, 128, 160, 192, 256)],
    *[("usual", Mode(bmm1=x, bmm2=y), {}) for x, y in ((0.3, 1.0), (0.05, 0.25), (0.0, 2.0))],
    *[("usual", Mode("sliding_window", x), {}) for x in (-1, 0, 7, 5000)],
    *[("usual", Mode(x, y), {}) for x, y in (("Sliding_Window", 500), ("causal", 7), ("causal", 0))],
    *[("usual", Mode("chunked", chunked_attention_size=x), {}) for x in (1, 8, 32, 64, 1024)],
    *[("usual", Mode(x, cap=2.0, bmm1=0.4), {}) for x in ("causal", "padding")],
    *[("usual", x, {}) for x in (Mode(alibi=True), Mode(alibi=True, cap=1.5, bmm1=0.5), Mode(bmm1=0.2, sinks=SINKS))],
    *[("uneven", x, {}) for x in MODES.values()],
    *[(x, MODES[y], {}) for x in ("even", "empty", "decode") for y in ("causal", "window")],
    ("uneven", Mode(sinks=SINKS, window_left=50), dict(head_dim=128, dtype=torch.bfloat16)),
    ("uneven", Mode(sinks=SINKS, window_left=50), dict(head_dim=256)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths,mode,sizes", CASES, ids=lambda x: str(x) or "causal")
def test_values(target, layout, lengths, mode, sizes):
    check(batch_of(target, layout, lengths, **sizes), layout, mode)


def test_chunks_behind_a_long_past(target):
    for layout in ("CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"):
        batch = make_batch([40, 3], [300, 129], 2, 1, 64, device=target.device)
        check(batch, layout, Mode(mask_mode="chunked", chunked_attention_size=64))


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("lengths", SHORT)
@pytest.mark.parametrize("mode", ["causal", "padding", "window"])
def test_short_queries(target, layout, lengths, mode):
    """Their keys are split by the kernel itself, without a list."""
    check(batch_of(target, layout, lengths), layout, MODES[mode])


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", ["five rows", "two tiles"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype,head_dim", [(torch.bfloat16, 128), (torch.float16, 256), (torch.bfloat16, 80)])
def test_masks_and_head_dims_of_short_queries(target, lengths, mode, sinks, dtype, head_dim):
    mode = dataclasses.replace(MODES[mode], sinks=torch.linspace(-2.0, 6.0, 8) if sinks else None)
    for layout in ("CONTIGUOUS_Q_KV", "Q_PAGED_KV_NHD"):
        check(batch_of(target, layout, lengths, dtype, head_dim), layout, mode)


def test_value_head_dim_differs(target):
    batch = make_batch([20, 133], [70, 133], 4, 4, 192, head_dim_vo=128, device=target.device)
    check(batch, "SEPARATE_Q_K_V", Mode())
    check_stats(batch, "SEPARATE_Q_K_V", Mode(bmm1=0.1))


OTHER_FORMS: dict[str, tuple[Mode, dict[str, Any]]] = {
    "a scale without dimensions": (Mode(bmm1=0.3), dict(bmm1_scale=torch.tensor(0.3))),
    "a list of sinks": (Mode(bmm1=0.2, sinks=SINKS), dict(sinks=[SINKS])),
    "no positions": (Mode(), dict(pos_encoding_mode="none")),
    "another spelling": (Mode(alibi=True), dict(pos_encoding_mode="ALiBi")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", OTHER_FORMS)
def test_other_forms_of_arguments(target, layout, form):
    mode, given = OTHER_FORMS[form]
    batch = batch_of(target, layout)
    moved = {x: [z.to(target.device) for z in y] if isinstance(y, list) else y for x, y in given.items()}
    check(batch, layout, mode, **{x: y.to(target.device) if torch.is_tensor(y) else y for x, y in moved.items()})
    if form == "a scale without dimensions":
        check(batch, layout, Mode(bmm1=0.3, bmm2=0.5), atol=1e-3, **tensors_of(target, Mode(bmm1=0.3, bmm2=0.5)))


OUTPUTS = [torch.float16, torch.bfloat16, E4M3, "bfloat16"]
OF_E4M3 = [
    *[(x, "usual", y, False) for x in LAYOUTS for y in OUTPUTS],
    *[(x, "uneven", torch.float16, y) for x in LAYOUTS for y in (False, True)],
    *itertools.product(
        ["CONTIGUOUS_Q_KV", "Q_PAGED_KV_HND"],
        ["five rows", "few rows", "two tiles"],
        [torch.float16, E4M3],
        [False, True],
    ),
]


@pytest.mark.parametrize("layout,lengths,out_dtype,tensors", OF_E4M3)
def test_e4m3(target, layout, lengths, out_dtype, tensors):
    batch, mode = batch_of(target, layout, lengths, E4M3, 128), Mode(bmm1=0.1, bmm2=0.7)
    out = check(batch, layout, mode, out_dtype=out_dtype, **(tensors_of(target, mode) if tensors else {}))
    assert out.dtype == (torch.bfloat16 if isinstance(out_dtype, str) else out_dtype)


def test_types_of_outputs(target):
    """Those of queries, unless told; of a given output, its own."""
    batch = batch_of(target, "CONTIGUOUS_Q_KV", dtype=E4M3, head_dim=128)
    out = call(batch, "CONTIGUOUS_Q_KV", Mode())
    assert out.dtype == E4M3
    assert_close(out.float(), expect(batch, Mode())[0], atol=5e-2, rtol=0.14)
    out = call(batch, "CONTIGUOUS_Q_KV", Mode(bmm2=1e4), out_dtype=E4M3).float()
    assert bool(torch.isfinite(out).all()) and float(out.abs().max()) == 448.0
    fp8 = batch_of(target, "Q_PAGED_KV_NHD", dtype=E4M3)
    out = torch.empty(fp8.q.shape, dtype=torch.bfloat16, device=target.device)
    got = call(fp8, "Q_PAGED_KV_NHD", Mode(), out=out, out_dtype=torch.float16)
    assert got.dtype == torch.bfloat16 and got.data_ptr() == out.data_ptr()


def test_skip_softmax_stays_close(target):
    batch = batch_of(target, "CONTIGUOUS_Q_KV")
    out = call(batch, "CONTIGUOUS_Q_KV", Mode(), skip_softmax_threshold_scale_factor=0.01)
    assert_close(out, expect(batch, Mode())[0], atol=0.12, rtol=0.02)


def test_seed_positional_order(target):
    batch = batch_of(target, "CONTIGUOUS_Q_KV")
    qkv, _ = pack(batch, "CONTIGUOUS_Q_KV")
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=target.device)
    workspace = torch.zeros(64, dtype=torch.uint8, device=target.device)
    bounds = (batch.qo_indptr(target.device), batch.kv_indptr(target.device))
    # ..., block_tables, out, out_dtype, sinks, pos, cap, mask_mode, window_left, chunk, stats, skip factor
    tail = (None, None, None, None, None, 2.0, "sliding_window", 5, 0, True, 0)
    out, stats = ck.trtllm_fmha_v2_prefill(qkv, "CONTIGUOUS_Q_KV", workspace, lens, 33, 70, 0.3, 1.0, 3, *bounds, *tail)
    want, _, base = expect(batch, Mode(mask_mode="sliding_window", window_left=5, cap=2.0, bmm1=0.3))
    assert_close(out, want, base.to(out.dtype))
    assert stats.shape == (54, 4, 2)


# --- pages ---


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [12, 16, 32])
@pytest.mark.parametrize("between", [0, 7])
@pytest.mark.parametrize("own_order", [False, True])
def test_separate_caches(target, layout, page, between, own_order):
    for lengths in ("usual", "uneven"):
        batch = batch_of(target, layout, lengths)
        qkv, tables = in_caches(batch, layout, page, between, own_order)
        check(batch, layout, Mode(), qkv=qkv, tables=tables)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [8, 16, 12, 1, 128])
@pytest.mark.parametrize("mode", ["causal", "window"])
def test_unused_pages_and_entries(target, layout, page, mode):
    # Pages that no request has, and the ends of pages, hold NaN; entries that no key refers to are any numbers.
    batch = batch_of(target, layout, "uneven")
    paged = batch.paged(page, layout[-3:], spare=5)
    assert bool(torch.isnan(paged.cache).any())
    tables = block_table(paged)
    unused = tables == 10**6
    tables[unused] = torch.randint(-(2**31), 2**31 - 1, (int(unused.sum()),), dtype=torch.int32)
    check(batch, layout, MODES[mode], qkv=(batch.q, paged.cache), tables=tables.to(target.device))


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [12, 32])
def test_block_tables_of_any_stride(target, layout, page):
    batch = batch_of(target, layout, "uneven")
    paged = batch.paged(page, layout[-3:])
    tables = block_table(paged).to(target.device)
    wide = torch.full((tables.size(0), 2 * tables.size(1)), -1, dtype=torch.int32, device=target.device)
    wide[:, : tables.size(1)] = tables
    spread = torch.stack([tables, tables], dim=2)[:, :, 0]
    for view in (wide[:, : tables.size(1)], spread):
        check(batch, layout, Mode(), qkv=(batch.q, paged.cache), tables=view)


# --- layouts that agree ---


@pytest.mark.parametrize("lengths", ["usual", "uneven", "even", "empty", "decode"])
@pytest.mark.parametrize("mode", ["causal", "window", "cap"])
def test_layouts_agree_bit_by_bit(target, lengths, mode):
    batch = batch_of(target, "PACKED_QKV", lengths)
    outputs = [call(batch, layout, MODES[mode]) for layout in LAYOUTS[:3]]
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])


AGREEING = [
    *itertools.product(["uneven", "even", "empty", "decode"], ["causal", "window", "cap"], [torch.bfloat16, E4M3]),
    *itertools.product(SHORT, ["causal"], [torch.float16]),
]


@pytest.mark.parametrize("lengths,mode,dtype", AGREEING)
def test_paged_layouts_agree_bit_by_bit(target, lengths, mode, dtype):
    batch, outputs = batch_of(target, PAGED[0], lengths, dtype), []
    for layout in PAGED:
        caches, tables = in_caches(batch, layout)
        outputs += [call(batch, layout, MODES[mode], **given) for given in ({}, dict(qkv=caches, tables=tables))]
    assert all(torch.equal(outputs[0].view(torch.uint8), other.view(torch.uint8)) for other in outputs[1:])


# --- from statistics to LSEs ---


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("bmm1", [0.0, 0.05, 0.3, 0.7])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_lse_of_stats(target, bmm1, cap, sinks):
    """Maximum and sum hang together: a maximum of part of the row gives another sum, but the same LSE. Sinks are not in
    it."""
    batch = batch_of(target, "CONTIGUOUS_Q_KV")
    mode = Mode(bmm1=bmm1, cap=cap, sinks=sinks, window_left=30)
    check_stats(batch, "CONTIGUOUS_Q_KV", mode)
    _, stats = call(batch, "CONTIGUOUS_Q_KV", mode, save_softmax_stats=True)
    unit = math.sqrt(64) if cap else math.sqrt(64) * (bmm1 or 1 / math.sqrt(64))
    natural, expected = (x[..., 0] * unit + x[..., 1].log() for x in (stats, expect(batch, mode)[1]))
    assert_close(natural.reshape(-1), expected.reshape(-1), name="natural lse", atol=1e-3, rtol=1e-4)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    options = {"sm_scale": bmm1 or None, "logits_soft_cap": cap, "window_left": 30}
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True, **options)
    _, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    assert_lse_close(ck.fmha_v2_stats_to_lse(stats, 64, bmm1, cap), lse.double())
    nothing = torch.tensor([[[torch.finfo(torch.float32).min, 0.0]]], device=target.device)
    assert ck.fmha_v2_stats_to_lse(nothing, 64, bmm1, cap).tolist() == [[-torch.inf]]


def test_nan_stays_nan_in_the_lse():
    stats = torch.tensor([[[float("nan"), float("nan")], [-3.4e38, 0.0]]])
    lse = ck.fmha_v2_stats_to_lse(stats, 64, 0.1)
    assert lse[0, 0].isnan() and lse[0, 1] == -torch.inf
