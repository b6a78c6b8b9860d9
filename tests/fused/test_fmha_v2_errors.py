"""What trtllm_fmha_v2_prefill refuses (contract 3)."""

from __future__ import annotations

import pytest
import torch
from fused_problems import LAYOUTS, PAGE, Mode, batch_for, block_table, call, pack
from guards import Guarded
from problems import make_batch
from refusals import facts, refuse

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")


@pytest.mark.parametrize("layout", ["packed_qkv", "Q_PAGED_KV", "SEPARATE"])
def test_unknown_layout(target, layout):
    batch = batch_for("SEPARATE_Q_K_V", target)
    refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=(batch.q, batch.k, batch.v)), f"input_layout={layout!r}")


@pytest.mark.parametrize("mode", ["casual", "window", ""])
def test_unknown_mask_mode(target, mode):
    refuse(
        ValueError,
        lambda: call(batch_for("CONTIGUOUS_Q_KV", target), "CONTIGUOUS_Q_KV", Mode(mask_mode=mode)),
        f"mask_mode={mode!r}",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masks_that_exclude_each_other(target, layout):
    batch = batch_for(layout, target)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    for mode, *words in (
        (Mode(mask_mode="padding", window_left=5), "mask_mode='padding'", "window_left=5"),
        (Mode(mask_mode="padding", chunked_attention_size=8), "mask_mode='padding'", "chunked_attention_size=8"),
        (
            Mode(mask_mode="chunked", chunked_attention_size=8, window_left=5),
            "window_left=5 and chunked_attention_size=8",
        ),
        (
            Mode(mask_mode="sliding_window", chunked_attention_size=8, window_left=5),
            "window_left=5 and chunked_attention_size=8",
        ),
    ):
        refuse(ValueError, lambda: call(batch, layout, mode, out=out.tensor), *words)
    out.check_untouched("out")


@pytest.mark.parametrize("size", [3, 24, 100])
def test_chunk_size_is_a_power_of_two(target, size):
    mode = Mode(mask_mode="chunked", chunked_attention_size=size)
    refuse(
        (ValueError, RuntimeError), lambda: call(batch_for("CONTIGUOUS_Q_KV", target), "CONTIGUOUS_Q_KV", mode), size
    )


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_16_bit_input_keeps_its_type(target, out_dtype):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    words = str(out_dtype).removeprefix("torch.")
    refuse(ValueError, lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), out_dtype=out_dtype), words)


@pytest.mark.parametrize("layout", ["Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"])
def test_block_tables(target, layout):
    batch = batch_for(layout, target)
    qkv, tables = pack(batch, layout)
    refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=qkv, tables=None), "block_tables")
    refuse(
        ValueError, lambda: call(batch, layout, Mode(), qkv=qkv, tables=tables.long()), "block_tables", "int64", "int32"
    )
    refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=qkv, tables=tables[:2]), r"\(2, 5\)", "batch_size=3")
    given = dict(cum_seq_lens_q=batch.qo_indptr(), cum_seq_lens_kv=batch.kv_indptr(), qkv=qkv, tables=tables[:, :1])
    refuse(ValueError, lambda: call(batch, layout, Mode(), **given), "block_tables", max(batch.kv_lens), "1 columns")
    three = torch.stack([tables, tables], dim=1)
    refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=qkv, tables=three), "block_tables", r"\(3, 2, 5\)")


def separate_caches(batch):
    """Keys and values in blocks of one allocation, and the block table of either (the values' counted from theirs)."""
    paged = batch.paged(PAGE, "NHD", "tuple")
    k, v = torch.cat([paged.k_cache, paged.v_cache]).chunk(2)
    return k, v, block_table(paged)


@pytest.mark.parametrize("wrong", [-1, 99])
def test_page_numbers(target, wrong):
    if not target.is_reference:
        pytest.skip("page numbers on a GPU are not read back, so not checked")
    layout = "Q_PAGED_KV_NHD"
    batch = batch_for(layout, target)
    k, v, flat = separate_caches(batch)
    bad = flat.clone()
    bad[1, 0] = wrong
    shown = f"number {wrong}"
    refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=(batch.q, pack(batch, layout)[0][1]), tables=bad), shown)
    for keys, values in ((bad, flat), (flat, bad)):
        tables = torch.stack([keys, values + len(k)], dim=1)
        refuse(
            ValueError, lambda: call(batch, layout, Mode(), qkv=(batch.q, (k, v)), tables=tables), "block_tables", shown
        )


def test_separate_caches(target):
    layout = "Q_PAGED_KV_NHD"
    batch = batch_for(layout, target)
    k, v, flat = separate_caches(batch)
    tables = torch.stack([flat, flat + len(k)], dim=1).to(target.device)

    def attempt(qkv, tables=tables):
        return lambda: call(batch, layout, Mode(), qkv=(batch.q, qkv), tables=tables)

    refuse(ValueError, attempt((k, v), flat.to(target.device)), "block_tables", r"\(3, 5\)")
    refuse(ValueError, attempt((k[0], v[0])), "k_cache", "4 dimensions")
    refuse(ValueError, attempt((k, v[:-1])), "v_cache", "one shape", r"\(8, 32, 2, 64\)")
    refuse(ValueError, attempt((k, v.bfloat16())), "bfloat16")
    refuse(ValueError, attempt((k.transpose(1, 2), v.transpose(1, 2))), "contiguous")
    refuse(ValueError, attempt((v, k)), "v_cache lies -73728 bytes")
    crooked = torch.zeros(2 * k.numel() + 64, dtype=k.dtype, device=target.device)
    shifted = crooked[32 + k.numel() :][: v.numel()].view(v.shape)
    refuse(ValueError, attempt((crooked[: k.numel()].view(k.shape), shifted)), "v_cache lies 73792 bytes", 8192)


def test_shapes_of_packed_forms(target):
    batch = make_batch([20], [20], 4, 4, 64, device=target.device)
    q, k, v = batch.q, batch.k, batch.v
    bad = [
        ("PACKED_QKV", torch.stack([q, k], dim=1), "qkv", r"\(20, 2, 4, 64\)"),
        ("PACKED_QKV", q, "qkv", r"\(20, 4, 64\)", "4 dimensions"),
        ("CONTIGUOUS_Q_KV", (q, k), "kv", r"\(20, 4, 64\)", "4 dimensions"),
        ("CONTIGUOUS_Q_KV", (q, torch.stack([k, v, v], dim=1)), "kv", r"\(20, 3, 4, 64\)"),
    ]
    for layout, qkv, *words in bad:
        refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=qkv), *words)


def test_containers(target):
    batch = make_batch([20], [20], 4, 4, 64, device=target.device)
    q, k, v = batch.q, batch.k, batch.v
    for layout, qkv, needed in [
        ("PACKED_QKV", (q, k, v), "one tensor"),
        ("CONTIGUOUS_Q_KV", q, "tuple of 2"),
        ("SEPARATE_Q_K_V", torch.stack([q, k, v], dim=1), "tuple of 3"),
        ("Q_PAGED_KV_NHD", q, "tuple of 2"),
    ]:
        tables = torch.zeros(1, 1, dtype=torch.int32, device=target.device)
        refuse(AssertionError, lambda: call(batch, layout, Mode(), qkv=qkv, tables=tables), layout, "qkv", needed)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "CONTIGUOUS_Q_KV"])
def test_stats_of_other_layouts(target, layout):
    batch = batch_for(layout, target)
    for mode in (Mode(), Mode(cap=3.0, bmm1=0.4)):
        got = call(batch, layout, mode, save_softmax_stats=True)
        plain = call(batch, "CONTIGUOUS_Q_KV", mode, save_softmax_stats=True)
        torch.testing.assert_close(got, plain, rtol=1e-3, atol=1e-3)


def test_out_of_another_shape_or_type(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    for shape, dtype in (((53, 4, 64), torch.float16), ((54, 4, 32), torch.float16), ((54, 4, 64), torch.float32)):
        out = Guarded(shape, dtype, target.device)
        words = ["float32"] if dtype == torch.float32 else ["out", *facts(out)]
        refuse((ValueError, RuntimeError), lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), out=out.tensor), *words)
        out.check_untouched("out")


def test_longer_queries_than_bounds(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    refuse(
        (ValueError, RuntimeError),
        lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), max_q_len=100, max_kv_len=70),
        "max_q_len=100",
        "max_kv_len=70",
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [-1, 12])
def test_bounds_below_lengths_that_the_host_knows(target, layout, window):
    batch = batch_for(layout, target)
    longest = max(batch.qo_lens), max(batch.kv_lens)
    offsets = dict(cum_seq_lens_q=batch.qo_indptr(), cum_seq_lens_kv=batch.kv_indptr())
    cases = [(longest[0] - 1, longest[1], f"max_q_len={longest[0] - 1}", longest[0])]
    if layout == "PACKED_QKV":
        cases = [(longest[0] - 1, longest[0] - 1, f"max_q_len={longest[0] - 1}", longest[0])]
    else:
        assert longest[0] < longest[1]
        cases += [(longest[0], longest[1] - 1, f"max_kv_len={longest[1] - 1}", longest[1])]
    for max_q_len, max_kv_len, *words in cases:
        given = dict(max_q_len=max_q_len, max_kv_len=max_kv_len)
        refuse(ValueError, lambda: call(batch, layout, Mode(window_left=window), **offsets, **given), *words)


def test_offsets_behind_the_queries(target):
    if not target.is_reference:
        pytest.skip("offsets on a GPU are not read back, so not checked")
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    q, kv = pack(batch, "CONTIGUOUS_Q_KV")[0]
    words = rf"cum_seq_lens_q\[-1\]={len(q)}", f"{len(q) - 1} queries"
    refuse(ValueError, lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), qkv=(q[:-1], kv)), *words)


def test_pages_without_pages(target):
    batch = batch_for("CONTIGUOUS_Q_KV", target)
    tables = torch.zeros(len(batch.kv_lens), 4, dtype=torch.int32, device=target.device)
    qkv, _ = pack(batch, "CONTIGUOUS_Q_KV")
    for _ in range(3):  # also where a call is found by what it was before
        refuse(ValueError, lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), qkv=qkv, tables=tables), "block_tables")


def test_arguments_of_other_kinds(target):
    batch = batch_for("Q_PAGED_KV_NHD", target)
    qkv, tables = pack(batch, "Q_PAGED_KV_NHD")
    assert tables is not None
    refuse(TypeError, lambda: call(batch, "Q_PAGED_KV_NHD", Mode(), qkv=qkv, tables=tables.tolist()), "block_tables")
    refuse(TypeError, lambda: call(batch, "Q_PAGED_KV_NHD", Mode(), out=3), "out")
    refuse(
        TypeError,
        lambda: call(batch, "Q_PAGED_KV_NHD", Mode(), chunked_attention_size=32.5),
        r"chunked_attention_size=32\.5",
    )
    refuse(ValueError, lambda: call(batch, "Q_PAGED_KV_NHD", Mode(), bmm1_scale=None), "bmm1_scale")
