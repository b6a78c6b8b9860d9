"""What trtllm_fmha_v2_prefill refuses (contract 3)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_problems import E4M3, LAYOUTS, PAGED, Mode, batch_of, block_table, call, in_caches, pack
from guards import Guarded
from problems import make_batch
from refusals import facts, refuse

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")

PLAIN, PAGES = ["CONTIGUOUS_Q_KV"], "Q_PAGED_KV_NHD"
CHUNKS = dict(mask_mode="chunked", chunked_attention_size=8)
BOTH = "window_left=5 and chunked_attention_size=8"
# Layouts, arguments in place of those of a call, and words of the refusal.
VALUES: list[tuple[list[str], dict[str, Any], list[Any]]] = [
    *[(PLAIN, dict(input_layout=x), [f"input_layout={x!r}"]) for x in ("packed_qkv", "Q_PAGED_KV", "SEPARATE")],
    *[(PLAIN, dict(mask_mode=x), [f"mask_mode={x!r}"]) for x in ("casual", "window", "")],
    *[(PLAIN, CHUNKS | dict(chunked_attention_size=x), [x]) for x in (3, 24, 100)],
    *[(PLAIN, dict(out_dtype=x), [str(x).removeprefix("torch.")]) for x in (torch.bfloat16, E4M3)],
    (PLAIN, dict(max_q_len=100, max_kv_len=70), ["max_q_len=100", "max_kv_len=70"]),
    (PAGED, dict(tables=None), ["block_tables"]),
    ([PAGES], dict(bmm1_scale=None), ["bmm1_scale"]),
    (LAYOUTS, dict(mask_mode="padding", window_left=5), ["mask_mode='padding'", "window_left=5"]),
    (LAYOUTS, CHUNKS | dict(mask_mode="padding"), ["mask_mode='padding'", "chunked_attention_size=8"]),
    (LAYOUTS, CHUNKS | dict(window_left=5), [BOTH]),
    (LAYOUTS, CHUNKS | dict(window_left=5, mask_mode="sliding_window"), [BOTH]),
]


@pytest.mark.parametrize("layout,change,words", [(x, *row[1:]) for row in VALUES for x in row[0]])
def test_values(target, layout, change, words):
    batch = batch_of(target, layout)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    given = dict(zip(("qkv", "tables"), pack(batch, layout))) | ({} if "out_dtype" in change else dict(out=out.tensor))
    error = ValueError if layout != PLAIN[0] else (ValueError, RuntimeError)
    refuse(error, lambda: call(batch, layout, Mode(), **(given | change)), *words)
    out.check_untouched("out")


KINDS: list[tuple[dict[str, Any], str]] = [
    (dict(save_softmax_stats=2), "save_softmax_stats=2"),
    (dict(tables=[[1]]), "block_tables"),
    (dict(out=3), "out"),
    (dict(chunked_attention_size=32.5), r"chunked_attention_size=32\.5"),
]


@pytest.mark.parametrize("change,words", KINDS)
def test_arguments_of_other_kinds(target, change, words):
    batch = batch_of(target, PAGES)
    given = dict(zip(("qkv", "tables"), pack(batch, PAGES)))
    refuse(TypeError, lambda: call(batch, PAGES, Mode(), **(given | change)), words)


@pytest.mark.parametrize("layout", PAGED)
def test_block_tables(target, layout):
    batch = batch_of(target, layout)
    qkv, tables = pack(batch, layout)
    offsets = dict(cum_seq_lens_q=batch.qo_indptr(), cum_seq_lens_kv=batch.kv_indptr())
    for wrong, words in (
        (tables.long(), ["block_tables", "int64", "int32"]),
        (tables[:2], [r"\(2, 5\)", "batch_size=3"]),
        (tables[:, :1], ["block_tables", max(batch.kv_lens), "1 columns"]),
        (torch.stack([tables, tables], dim=1), ["block_tables", r"\(3, 2, 5\)"]),
    ):
        refuse(ValueError, lambda: call(batch, layout, Mode(), qkv=qkv, tables=wrong, **offsets), *words)


@pytest.mark.parametrize("wrong", [-1, 99])
def test_page_numbers(target, wrong):
    if not target.is_reference:
        pytest.skip("page numbers on a GPU are not read back, so not checked")
    batch = batch_of(target, PAGES)
    paged = batch.paged(32, "NHD")
    tables, shown = block_table(paged), f"number {wrong}"
    tables[1, 0] = wrong
    refuse(ValueError, lambda: call(batch, PAGES, Mode(), qkv=(batch.q, paged.cache), tables=tables), shown)
    qkv, tables = in_caches(batch, PAGES)
    for which, first in ((0, 0), (1, len(qkv[1][0]))):  # of values as of the first block of them
        bad = tables.clone()
        bad[1, which, 0] = wrong + first
        refuse(ValueError, lambda: call(batch, PAGES, Mode(), qkv=qkv, tables=bad), "block_tables", shown)


def test_separate_caches(target):
    batch = batch_of(target, PAGES)
    (_, (k, v)), tables = in_caches(batch, PAGES)
    crooked = torch.zeros(2 * k.numel() + 64, dtype=k.dtype, device=target.device)
    shifted = crooked[32 + k.numel() :][: v.numel()].view(v.shape)
    for caches, table, words in (
        ((k, v), tables[:, 0].contiguous(), ["block_tables", r"\(3, 5\)"]),
        ((k[0], v[0]), tables, ["k_cache", "4 dimensions"]),
        ((k, v[:-1]), tables, ["v_cache", "one shape", r"\(8, 32, 2, 64\)"]),
        ((k, v.bfloat16()), tables, ["bfloat16"]),
        ((k.transpose(1, 2), v.transpose(1, 2)), tables, ["contiguous"]),
        ((v, k), tables, ["v_cache lies -73728 bytes"]),
        ((crooked[: k.numel()].view(k.shape), shifted), tables, ["v_cache lies 73792 bytes", 8192]),
    ):
        refuse(ValueError, lambda: call(batch, PAGES, Mode(), qkv=(batch.q, caches), tables=table), *words)


def test_what_holds_queries_and_keys(target):
    batch = make_batch([20], [20], 4, 4, 64, device=target.device)
    q, k, v = batch.q, batch.k, batch.v
    tables = torch.zeros(1, 1, dtype=torch.int32, device=target.device)
    for layout, qkv, error, *words in (
        ("PACKED_QKV", torch.stack([q, k], dim=1), ValueError, "qkv", r"\(20, 2, 4, 64\)"),
        ("PACKED_QKV", q, ValueError, "qkv", r"\(20, 4, 64\)", "4 dimensions"),
        ("CONTIGUOUS_Q_KV", (q, k), ValueError, "kv", r"\(20, 4, 64\)", "4 dimensions"),
        ("CONTIGUOUS_Q_KV", (q, torch.stack([k, v, v], dim=1)), ValueError, "kv", r"\(20, 3, 4, 64\)"),
        ("PACKED_QKV", (q, k, v), AssertionError, "PACKED_QKV", "qkv", "one tensor"),
        ("CONTIGUOUS_Q_KV", q, AssertionError, "CONTIGUOUS_Q_KV", "qkv", "tuple of 2"),
        ("SEPARATE_Q_K_V", torch.stack([q, k, v], dim=1), AssertionError, "SEPARATE_Q_K_V", "qkv", "tuple of 3"),
        (PAGES, q, AssertionError, PAGES, "qkv", "tuple of 2"),
    ):
        given = dict(qkv=qkv, tables=tables if layout == PAGES or error is AssertionError else None)
        refuse(error, lambda: call(batch, layout, Mode(), **given), *words)


def test_out_of_another_shape_or_type(target):
    batch = batch_of(target, "CONTIGUOUS_Q_KV")
    for shape, dtype in (((53, 4, 64), torch.float16), ((54, 4, 32), torch.float16), ((54, 4, 64), torch.float32)):
        out = Guarded(shape, dtype, target.device)
        words = ["float32"] if dtype == torch.float32 else ["out", *facts(out)]
        refuse((ValueError, RuntimeError), lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), out=out.tensor), *words)
        out.check_untouched("out")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [-1, 12])
def test_bounds_below_lengths_that_the_host_knows(target, layout, window):
    batch = batch_of(target, layout)
    of_q, of_kv = max(batch.qo_lens), max(batch.kv_lens)
    offsets = dict(cum_seq_lens_q=batch.qo_indptr(), cum_seq_lens_kv=batch.kv_indptr())
    cases = [(of_q - 1, of_q - 1 if layout == "PACKED_QKV" else of_kv, f"max_q_len={of_q - 1}", of_q)]
    if layout != "PACKED_QKV":
        assert of_q < of_kv
        cases += [(of_q, of_kv - 1, f"max_kv_len={of_kv - 1}", of_kv)]
    for max_q_len, max_kv_len, *words in cases:
        given = dict(max_q_len=max_q_len, max_kv_len=max_kv_len)
        refuse(ValueError, lambda: call(batch, layout, Mode(window_left=window), **offsets, **given), *words)


def test_offsets_behind_the_queries(target):
    if not target.is_reference:
        pytest.skip("offsets on a GPU are not read back, so not checked")
    batch = batch_of(target, "CONTIGUOUS_Q_KV")
    q, kv = pack(batch, "CONTIGUOUS_Q_KV")[0]
    words = rf"cum_seq_lens_q\[-1\]={len(q)}", f"{len(q) - 1} queries"
    refuse(ValueError, lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), qkv=(q[:-1], kv)), *words)


def test_pages_without_pages(target):
    batch = batch_of(target, "CONTIGUOUS_Q_KV")
    tables = torch.zeros(len(batch.kv_lens), 4, dtype=torch.int32, device=target.device)
    qkv, _ = pack(batch, "CONTIGUOUS_Q_KV")
    for _ in range(3):  # also where a call is found by what it was before
        refuse(ValueError, lambda: call(batch, "CONTIGUOUS_Q_KV", Mode(), qkv=qkv, tables=tables), "block_tables")
