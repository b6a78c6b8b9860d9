"""Direct calls of ``trtllm_fmha_v2_prefill``: what ``_C.fused_prefill`` launches, and what it leaves to Python. What
all direct calls leave to it: test_direct_calls.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from direct_calls import LAYOUTS, expect, fused, pages_of
from recorded_calls import BF16, E4M3, HALF, INTS, Gpu, rows_of, view

MOST = 2**31 - 1024  # tokens that kernels count


def accepts(gpu: Gpu, layout: str, *others: Any, **changes: Any) -> bool:
    return fused(gpu, layout, *others).accepts(**changes)


def launched(gpu: Gpu, layout: str, *others: Any, **changes: Any) -> dict[str, Any]:
    return fused(gpu, layout, *others).launched(**changes)


# --- what is launched ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_as_it_is_launched(gpu: Gpu, layout: str) -> None:
    direct = fused(gpu, layout)
    out, given = direct(), direct.given
    call = gpu.launched()
    paged, qkv = layout.startswith("Q_PAGED"), given["qkv"]
    if layout == "PACKED_QKV":
        q, k, v = qkv.unbind(1)
    elif layout == "SEPARATE_Q_K_V":
        q, k, v = qkv
    else:
        q, (k, v) = qkv[0], qkv[1].unbind(1)
    kv_heads, dim_vo = 4 if layout == "PACKED_QKV" else 2, v.size(-1)
    if paged:
        indices, strides = given["block_tables"].data_ptr(), dict(k_stride_page=k.stride(0), v_stride_page=v.stride(0))
        of_pages = dict(
            indices=indices, v_indices=0, table_stride=3, table_width=3, v_offset=0, page_size=16, num_pages=10
        )
        assert {**of_pages, **strides}.items() <= call["pages"].items()
        k, v = (x[0].transpose(0, 1) if layout.endswith("HND") else x[0] for x in (k, v))
    else:
        assert call["pages"]["page_size"] == 0
    assert out.shape == (8, 4, dim_vo) and out.dtype == HALF
    expect(
        call,
        q=view(q),
        k=view(k),
        v=view(v),
        o=view(out),
        dtypes=("float16",) * 3,
        heads=(4, kv_heads),
        head_dims=(64, dim_vo),
        batch_size=2,
        totals=(8, 40 if paged else k.size(0)),
        most=(5, given["max_kv_len"]),
        indptrs=(given["cum_seq_lens_q"].data_ptr(), given["cum_seq_lens_kv"].data_ptr()),
        scales=(pytest.approx(0.1), 0.0, 1.0),
    )
    assert gpu.module.current_device() == 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_arrives(gpu: Gpu, layout: str) -> None:
    out, sinks = rows_of(8, 4, 128 if layout == "SEPARATE_Q_K_V" else 64, every=2), torch.zeros(4)
    numbers = dict(bmm1_scale=0, bmm2_scale=2, logits_soft_cap_scale=30, skip_softmax_threshold_scale_factor=900.0)
    places = dict(out=out, sinks=sinks, save_softmax_stats=True, backend="fa3")
    result, stats = fused(gpu, layout)(**numbers, **places)
    assert result is out and stats.shape == (8, 4, 2) and stats.dtype == torch.float32
    call = gpu.launched()
    assert call["o"] == view(out) and call["stats"] == stats.data_ptr() and call["sinks"] == sinks.data_ptr()
    assert call["scales"] == (0.125, 30.0, 2.0) and call["skip_softmax_factor"] == 900.0 and call["backend"] == "fa3"


@pytest.mark.parametrize(
    "changes,causal,window,chunk",
    [
        (dict(mask_mode="padding"), False, -1, 0),
        (dict(mask_mode="causal"), True, -1, 0),
        (dict(mask_mode="causal", window_left=0), True, -1, 0),
        (dict(mask_mode="causal", window_left=9), True, 9, 0),
        (dict(mask_mode="causal", window_left=2**40), True, MOST, 0),
        (dict(mask_mode="causal", chunked_attention_size=32), True, -1, 32),
        (dict(mask_mode="sliding_window"), True, -1, 0),
        (dict(mask_mode="sliding_window", window_left=0), True, 0, 0),
        (dict(mask_mode="chunked", chunked_attention_size=1), True, -1, 1),
        (dict(mask_mode="chunked", chunked_attention_size=2**40), True, -1, MOST),
        (dict(mask_mode="chunked", chunked_attention_size=4, window_left=0), True, -1, 4),
    ],
)
def test_masks(gpu: Gpu, changes: dict[str, Any], causal: bool, window: int, chunk: int) -> None:
    call = launched(gpu, "SEPARATE_Q_K_V", **changes)
    assert (call["causal"], call["window_left"], call["chunk_size"]) == (causal, window, chunk)


def test_bounds(gpu: Gpu) -> None:
    call = launched(gpu, "SEPARATE_Q_K_V", max_q_len=2**40, max_kv_len=2**40)
    assert call["most"] == (MOST, MOST) and call["totals"] == (8, 30)
    for longest, keys in ((79, 158), (80, 160), (81, 160), (2**62, 160)):
        assert launched(gpu, "Q_PAGED_KV_NHD", max_kv_len=longest)["totals"] == (8, keys)
    pool = pages_of("Q_PAGED_KV_NHD")
    gpu.tell(pool, shape=(1 << 28, *pool.shape[1:]))
    assert launched(gpu, "Q_PAGED_KV_NHD", qkv=(rows_of(8, 4, 64), pool), max_kv_len=2**62)["totals"] == (8, 1 << 30)


@pytest.mark.parametrize("pool_of", ["HND", "NHD"])
def test_separate_caches(gpu: Gpu, pool_of: str) -> None:
    layout = f"Q_PAGED_KV_{pool_of}"
    whole = torch.zeros(24, *((2, 16) if pool_of == "HND" else (16, 2)), 64, dtype=HALF)
    q, tables = rows_of(8, 4, 64), torch.zeros(2, 2, 5, dtype=INTS)[..., :3]
    k, v = whole[:10], whole[13:23]
    of_call = launched(gpu, layout, qkv=(q, (k, v)), block_tables=tables)
    token, head = (2, 1) if pool_of == "HND" else (1, 2)
    assert of_call["k"] == (k.data_ptr(), k.stride(token), k.stride(head))
    assert of_call["v"] == (v.data_ptr(), k.stride(token), k.stride(head))
    of_pages = of_call["pages"]
    assert of_pages["v_offset"] == 13 and of_pages["num_pages"] == 10
    assert of_pages["indices"] == tables.data_ptr() and of_pages["v_indices"] == tables[:, 1].data_ptr()
    assert of_pages["table_stride"] == 10 and of_pages["table_width"] == 3
    wide = torch.zeros(24, *whole.shape[1:3], 128, dtype=HALF)
    for wrong in (
        (whole[10:20], whole[:10]),  # keys behind values
        (whole[:10], whole[:10]),
        (whole[:10], whole[10:21]),
        (whole[:20:2], whole[1:20:2]),
        (whole[:10], whole.view(-1)[10 * 2048 + 8 :][: 10 * 2048].view(10, *whole.shape[1:])),
        (whole[:10], wide[:10]),
        (wide[:10, ..., :64], wide[10:20, ..., :64]),
        (k, v, v),
        [k, v],
        (k[:, 0], v[:, 0]),
        (k, v[..., :32]),
    ):
        assert not accepts(gpu, layout, qkv=(q, wrong), block_tables=tables)
    assert not accepts(gpu, layout, qkv=(q, (k, v)), block_tables=tables[:, 0])
    assert not accepts(gpu, layout, qkv=(q, (k, v)), block_tables=torch.zeros(2, 3, 3, dtype=INTS))
    assert not accepts(gpu, layout, qkv=(q, (k, v)), block_tables=torch.zeros(2, 2, 3, 1, dtype=INTS))
    assert not accepts(gpu, layout, qkv=(q, (k, v)), block_tables=gpu.tell(tables, strides=(10, -5, 1)))
    # The tokens, the heads and the pages of each are where block tables expect them.
    for x in (k, v):
        for at in range(3):
            strides = (*x.stride()[:at], x.stride(at) + 8, *x.stride()[at + 1 :])
            call = fused(gpu, layout, qkv=(q, (k, v)), block_tables=torch.zeros(2, 2, 3, dtype=INTS))
            gpu.tell(x, strides=strides)
            assert not call.accepts(), strides
            gpu.tell(x)
            assert call.accepts()


def test_fp8(gpu: Gpu) -> None:
    for layout in LAYOUTS:
        for wanted, o_dtype in (
            (dict(), "float8_e4m3fn"),
            (dict(out_dtype=E4M3), "float8_e4m3fn"),
            (dict(out_dtype=HALF), "float16"),
            (dict(out_dtype=BF16), "bfloat16"),
        ):
            call = launched(gpu, layout, E4M3, **wanted)
            assert call["dtypes"] == ("float8_e4m3fn", "float8_e4m3fn", o_dtype)
        assert not accepts(gpu, layout, E4M3, out_dtype=torch.float32)
        assert not accepts(gpu, layout, E4M3, out_dtype=torch.float8_e5m2)
        assert not fused(gpu, layout, torch.float8_e5m2).accepts(planned=True)
    for page, accepted in ((8, True), (12, False), (16, True)):
        assert accepts(gpu, "Q_PAGED_KV_NHD", E4M3, page) == accepted
        assert accepts(gpu, "Q_PAGED_KV_NHD", HALF, page)


def test_an_output_that_is_not_like_the_queries(gpu: Gpu) -> None:
    """Parts of a tensor, or of another width or another type."""
    q = torch.zeros(8, 4, 64, dtype=HALF)
    fused(gpu, "PACKED_QKV")()
    assert [name for name, _ in gpu.made if name != "zeros"] == ["empty"]
    wide = fused(gpu, "SEPARATE_Q_K_V", qkv=(q, rows_of(30, 2, 64), rows_of(30, 2, 128)))
    assert wide().shape == (8, 4, 128)
    for layout in LAYOUTS[1:]:
        of_bytes = fused(gpu, layout, E4M3, out_dtype=HALF)
        assert of_bytes(qkv=(q.to(E4M3), *of_bytes.given["qkv"][1:])).dtype == HALF


# --- what is left to Python ---


@pytest.mark.parametrize(
    "changes",
    [
        dict(mask_mode="padding", window_left=3),
        dict(mask_mode="padding", window_left=0),
        dict(mask_mode="padding", chunked_attention_size=4),
        dict(mask_mode="chunked"),
        dict(window_left=3, chunked_attention_size=4),
        dict(mask_mode="sliding_window", window_left=0, chunked_attention_size=4),
        dict(cum_seq_lens_q=torch.zeros(6, dtype=INTS)[::2]),
        dict(cum_seq_lens_kv=torch.zeros(3)),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_left_to_python(gpu: Gpu, layout: str, changes: dict[str, Any]) -> None:
    assert not accepts(gpu, layout, **changes)


Q = rows_of(8, 4, 64)


@pytest.mark.parametrize(
    "layout,qkv",
    [
        ("PACKED_QKV", (Q, Q, Q)),
        ("PACKED_QKV", rows_of(8, 4, 4, 64)),
        ("PACKED_QKV", rows_of(0, 3, 4, 64)),
        ("PACKED_QKV", rows_of(8, 3, 0, 64)),
        ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 3, 2, 64))),
        ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 3, 64))),  # heads that do not divide
        ("CONTIGUOUS_Q_KV", (Q[:0], rows_of(30, 2, 2, 64))),
        ("CONTIGUOUS_Q_KV", (Q[:, :0], rows_of(30, 2, 2, 64))),
        ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 2, 64), Q)),
        ("CONTIGUOUS_Q_KV", [Q, rows_of(30, 2, 2, 64)]),
        ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64))),
        ("SEPARATE_Q_K_V", [Q, rows_of(30, 2, 64), rows_of(30, 2, 64)]),
        ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 16, 3, 64))),
        ("Q_PAGED_KV_NHD", (Q, rows_of(10, 3, 16, 2, 64))),
        ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 2, 64))),
        ("Q_PAGED_KV_NHD", [Q, rows_of(10, 2, 16, 2, 64)]),
        *((layout, None) for layout in LAYOUTS),
    ],
)
def test_tensors_that_are_left_to_python(gpu: Gpu, layout: str, qkv: Any) -> None:
    assert not accepts(gpu, layout, qkv=qkv)


def test_keys_of_an_unaligned_address(gpu: Gpu) -> None:
    kv = torch.zeros(30, 264, dtype=HALF).as_strided((30, 2, 2, 64), (264, 132, 64, 1))
    assert not accepts(gpu, "CONTIGUOUS_Q_KV", qkv=(Q, kv))  # the values are not
    gpu.tell(kv, data=kv.data_ptr() + 8)
    assert not accepts(gpu, "CONTIGUOUS_Q_KV", qkv=(Q, kv))


@pytest.mark.parametrize(
    "tables,accepted",
    [
        (torch.zeros(2, 3, dtype=INTS), True),
        (torch.zeros(2, 8, dtype=INTS)[:, :3], True),
        (torch.zeros(2, 0, dtype=INTS), True),
        (None, False),
        (torch.zeros(3, 3, dtype=INTS), False),
        (torch.zeros(2, 3), False),
        (torch.zeros(2, 3, dtype=torch.int64), False),
        (torch.zeros(2, 2, 3, dtype=INTS), False),
        (torch.zeros(6, dtype=INTS), False),
        (torch.zeros(2, 3, 1, dtype=INTS), False),
        (torch.zeros(3, 2, dtype=INTS).t(), False),
        (torch.zeros(2, 6, dtype=INTS)[:, ::2], False),
        (torch.zeros(1, 3, dtype=INTS).expand(2, 3), False),
    ],
)
def test_block_tables(gpu: Gpu, tables: torch.Tensor | None, accepted: bool) -> None:
    assert accepts(gpu, "Q_PAGED_KV_NHD", block_tables=tables) == accepted
    for layout in LAYOUTS[:3]:
        assert accepts(gpu, layout, block_tables=tables) == (tables is None)


def test_the_table_of_one_request_may_have_any_stride(gpu: Gpu) -> None:
    one = dict(batch_size=1, cum_seq_lens_q=torch.zeros(2, dtype=INTS), cum_seq_lens_kv=torch.zeros(2, dtype=INTS))
    tables = torch.zeros(1, 3, dtype=INTS).as_strided((1, 3), (1, 1))
    call = launched(gpu, "Q_PAGED_KV_NHD", **one, block_tables=tables)
    assert call["pages"]["table_stride"] == call["pages"]["table_width"] == 3
    empty = launched(
        gpu, "Q_PAGED_KV_NHD", **one, block_tables=torch.zeros(1, 0, dtype=INTS).as_strided((1, 0), (0, 1))
    )
    assert empty["pages"]["table_stride"] == 1 and empty["pages"]["table_width"] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_many_requests(gpu: Gpu, layout: str) -> None:
    for requests, accepted in ((0, False), (1, True), (2**31 - 1, False)):
        call = fused(gpu, layout, batch_size=requests)
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            gpu.tell(call.given[name], shape=(requests + 1,))
        if layout.startswith("Q_PAGED"):
            gpu.tell(call.given["block_tables"], shape=(requests, 3))
        assert call.accepts() == accepted


def test_packed_tensors_have_as_many_keys_as_rows(gpu: Gpu) -> None:
    assert accepts(gpu, "PACKED_QKV", max_q_len=6, max_kv_len=6)
    assert not accepts(gpu, "PACKED_QKV", max_q_len=5, max_kv_len=6)
