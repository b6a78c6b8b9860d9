"""Direct calls of ``trtllm_fmha_v2_prefill``: what ``_C.fused_prefill`` launches, and what it leaves to Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_calls import BF16, CPU, CUDA, E4M3, HALF, INTS, Gpu, faults_of_matrix, rows_of, view

LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"]
MOST = 2**31 - 1024  # tokens that kernels count


def pages_of(layout: str, dtype: torch.dtype = HALF, page: int = 16) -> torch.Tensor:
    """A pool of ten pages."""
    return rows_of(10, 2, *((2, page) if layout.endswith("HND") else (page, 2)), 64, dtype=dtype)


def fused(layout: str, dtype: torch.dtype = HALF, page: int = 16, **changes: Any) -> dict[str, Any]:
    """Arguments in their order: two requests of 5 and 3 rows, of 20 and 10 keys but for packed tensors."""
    q = rows_of(8, 4, 64, dtype=dtype, every=2, wide=64)
    packed, paged = layout == "PACKED_QKV", layout.startswith("Q_PAGED")
    qkv = {
        "PACKED_QKV": rows_of(8, 3, 4, 64, dtype=dtype, wide=64),
        "CONTIGUOUS_Q_KV": (q, rows_of(30, 2, 2, 64, dtype=dtype, every=3)),
        "SEPARATE_Q_K_V": (q, rows_of(30, 2, 64, dtype=dtype, every=3), rows_of(30, 2, 128, dtype=dtype, every=2)),
    }
    arguments = dict(
        qkv=(q, pages_of(layout, dtype, page)) if paged else qkv[layout],
        input_layout=layout,
        max_q_len=5,
        max_kv_len=5 if packed else 20,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
        batch_size=2,
        cum_seq_lens_q=torch.tensor([0, 5, 8], dtype=INTS),
        cum_seq_lens_kv=torch.tensor([0, 5, 8] if packed else [0, 20, 30], dtype=INTS),
        block_tables=torch.zeros(2, 3, dtype=INTS) if paged else None,
        out=None,
        out_dtype=None,
        sinks=None,
        logits_soft_cap_scale=None,
        mask_mode="causal",
        window_left=-1,
        chunked_attention_size=0,
        save_softmax_stats=False,
        skip_softmax_threshold_scale_factor=0,
        backend="auto",
    )
    assert not changes.keys() - arguments.keys()
    return arguments | changes


def accepts(gpu: Gpu, layout: str, *others: Any, **changes: Any) -> bool:
    return gpu.accepts(gpu.module.fused_prefill, *fused(layout, *others, **changes).values())


def launched(gpu: Gpu, layout: str, *others: Any, **changes: Any) -> dict[str, Any]:
    assert gpu.module.fused_prefill(*fused(layout, *others, **changes).values()) is not None
    return gpu.launched()


# --- what is launched ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_as_it_is_launched(gpu: Gpu, layout: str) -> None:
    given = fused(layout)
    out = gpu.module.fused_prefill(*given.values())
    (call,) = gpu.module.take_launches()
    paged, qkv = layout.startswith("Q_PAGED"), given["qkv"]
    if layout == "PACKED_QKV":
        q, k, v = qkv.unbind(1)
    elif layout == "SEPARATE_Q_K_V":
        q, k, v = qkv
    else:
        q, (k, v) = qkv[0], qkv[1].unbind(1)
    kv_heads, dim_vo = 4 if layout == "PACKED_QKV" else 2, v.size(-1)
    if paged:
        tables = given["block_tables"]
        for name, want in (
            ("indices", tables.data_ptr()),
            ("v_indices", 0),
            ("table_stride", 3),
            ("table_width", 3),
            ("v_offset", 0),
            ("page_size", 16),
            ("num_pages", 10),
            ("k_stride_page", k.stride(0)),
            ("v_stride_page", v.stride(0)),
        ):
            assert call["pages"][name] == want, name
        k, v = (x[0].transpose(0, 1) if layout.endswith("HND") else x[0] for x in (k, v))
    else:
        assert call["pages"]["page_size"] == 0
    assert out.shape == (8, 4, dim_vo) and out.dtype == HALF
    for name, want in (
        ("q", view(q)),
        ("k", view(k)),
        ("v", view(v)),
        ("o", view(out)),
        ("lse", (0, 0, 0)),
        ("stats", 0),
        ("dtypes", ("float16",) * 3),
        ("heads", (4, kv_heads)),
        ("head_dims", (64, dim_vo)),
        ("batch_size", 2),
        ("totals", (8, 40 if paged else k.size(0))),
        ("most", (5, given["max_kv_len"])),
        ("indptrs", (given["cum_seq_lens_q"].data_ptr(), given["cum_seq_lens_kv"].data_ptr())),
        ("causal", True),
        ("window_left", -1),
        ("chunk_size", 0),
        ("scales", (pytest.approx(0.1), 0.0, 1.0)),
        ("skip_softmax_factor", 0.0),
        ("sinks", 0),
        ("device", 0),
        ("stream", 64),
    ):
        assert call[name] == want, name
    assert gpu.module.current_device() == 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_arrives(gpu: Gpu, layout: str) -> None:
    out, sinks = rows_of(8, 4, 128 if layout == "SEPARATE_Q_K_V" else 64, every=2), torch.zeros(4)
    given = dict(bmm1_scale=0, bmm2_scale=2, logits_soft_cap_scale=30, skip_softmax_threshold_scale_factor=900.0)
    places = dict(out=out, sinks=sinks, save_softmax_stats=True, backend="fa3")
    result, stats = gpu.module.fused_prefill(*fused(layout, **given, **places).values())
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
    assert launched(gpu, "Q_PAGED_KV_NHD", logits_soft_cap_scale=-1.0)["scales"][1] == 0.0


@pytest.mark.parametrize("pool_of", ["HND", "NHD"])
def test_separate_caches(gpu: Gpu, pool_of: str) -> None:
    layout = f"Q_PAGED_KV_{pool_of}"
    whole = torch.zeros(24, *((2, 16) if pool_of == "HND" else (16, 2)), 64, dtype=HALF)
    q, tables = rows_of(8, 4, 64), torch.zeros(2, 2, 5, dtype=INTS)[..., :3]
    k, v = whole[:10], whole[13:23]
    call = launched(gpu, layout, qkv=(q, (k, v)), block_tables=tables)
    token, head = (2, 1) if pool_of == "HND" else (1, 2)
    assert call["k"] == (k.data_ptr(), k.stride(token), k.stride(head))
    assert call["v"] == (v.data_ptr(), k.stride(token), k.stride(head))
    of_pages = call["pages"]
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
            given = fused(layout, qkv=(q, (k, v)), block_tables=torch.zeros(2, 2, 3, dtype=INTS))
            gpu.tell(x, strides=strides)
            assert not gpu.accepts(gpu.module.fused_prefill, *given.values()), strides
            gpu.tell(x)
            assert gpu.accepts(gpu.module.fused_prefill, *given.values())


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
        e5m2 = fused(layout, torch.float8_e5m2)
        assert not gpu.accepts(gpu.module.fused_prefill, *e5m2.values(), planned=True)
    for page, accepted in ((8, True), (12, False), (16, True)):
        assert accepts(gpu, "Q_PAGED_KV_NHD", E4M3, page) == accepted
        assert accepts(gpu, "Q_PAGED_KV_NHD", HALF, page)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_output_like_the_queries(gpu: Gpu, layout: str) -> None:
    """Where they are a contiguous tensor of their own, as wide as the values, and of the type of the output."""
    q = torch.zeros(8, 4, 64, dtype=HALF)
    given = fused(layout)
    if layout == "PACKED_QKV":
        gpu.module.fused_prefill(*given.values())
        assert [name for name, _ in gpu.made if name != "zeros"] == ["empty"]
        return
    for queries, like in ((q, True), (rows_of(8, 4, 64, every=2), False), (rows_of(16, 4, 64)[::2], False)):
        gpu.made.clear()
        others = (rows_of(30, 2, 64), rows_of(30, 2, 64)) if layout == "SEPARATE_Q_K_V" else given["qkv"][1:]
        out = gpu.module.fused_prefill(*(given | dict(qkv=(queries, *others))).values())
        assert [name for name, _ in gpu.made if name != "zeros"] == ["empty_like" if like else "empty"]
        assert out.shape == (8, 4, 64) and out.is_contiguous()
    # Of another width, or of another type.
    if layout == "SEPARATE_Q_K_V":
        wide = fused(layout, qkv=(q, rows_of(30, 2, 64), rows_of(30, 2, 128)))
        assert gpu.module.fused_prefill(*wide.values()).shape == (8, 4, 128)
    of_bytes = fused(layout, E4M3, out_dtype=HALF)
    of_bytes["qkv"] = (q.to(E4M3), *of_bytes["qkv"][1:])
    assert gpu.module.fused_prefill(*of_bytes.values()).dtype == HALF


def test_what_no_plan_is_made_for(gpu: Gpu) -> None:
    for change in (dict(bmm1_scale=1e300), dict(bmm2_scale=1e300)):
        assert not gpu.accepts(gpu.module.fused_prefill, *fused("SEPARATE_Q_K_V", **change).values(), planned=True)


def test_another_number_of_arguments(gpu: Gpu) -> None:
    for wrong in (list(fused(LAYOUTS[0]).values())[:-1], [*fused(LAYOUTS[0]).values(), None]):
        with pytest.raises(TypeError, match="number of arguments"):
            gpu.module.fused_prefill(*wrong)


# --- what is left to Python ---

LEFT_TO_PYTHON = {
    "unknown layout": dict(input_layout="Q_K_V"),
    "layout that is no text": dict(input_layout=None),
    "no tensors": dict(qkv=None),
    "longer queries than keys": dict(max_q_len=21),
    "no rows at most": dict(max_q_len=0),
    "bound in a float": dict(max_kv_len=20.0),
    "bound of rows in a float": dict(max_q_len=5.0),
    "no scale of logits": dict(bmm1_scale=None),
    "no scale of the output": dict(bmm2_scale=None),
    "bmm1_scale in a tensor": dict(bmm1_scale=torch.ones(1)),
    "bmm2_scale in a tensor": dict(bmm2_scale=torch.ones(1)),
    "cap that is no number": dict(logits_soft_cap_scale="30"),
    "requests in a float": dict(batch_size=2.0),
    "no requests": dict(batch_size=0),
    "other requests": dict(batch_size=3),
    "no indptr of queries": dict(cum_seq_lens_q=None),
    "no indptr of keys": dict(cum_seq_lens_kv=None),
    "int64 indptr of queries": dict(cum_seq_lens_q=torch.zeros(3, dtype=torch.int64)),
    "int64 indptr of keys": dict(cum_seq_lens_kv=torch.zeros(3, dtype=torch.int64)),
    "indptr of floats": dict(cum_seq_lens_q=torch.zeros(3)),
    "indptr with gaps": dict(cum_seq_lens_kv=torch.zeros(6, dtype=INTS)[::2]),
    "indptr of 2 dimensions": dict(cum_seq_lens_q=torch.zeros(3, 1, dtype=INTS)),
    "longer indptr": dict(cum_seq_lens_q=torch.zeros(4, dtype=INTS)),
    "out_dtype in a text": dict(out_dtype="float16"),
    "another type of output": dict(out_dtype=BF16),
    "out of another type": dict(out=torch.zeros(8, 4, 64, dtype=BF16)),
    "out of integers": dict(out=torch.zeros(8, 4, 64, dtype=INTS)),
    "out that is no tensor": dict(out=[0.0]),
    "out of other rows": dict(out=rows_of(7, 4, 64)),
    "mask in upper case": dict(mask_mode="CAUSAL"),
    "unknown mask": dict(mask_mode="prefix"),
    "padding in a window": dict(mask_mode="padding", window_left=3),
    "padding in a window of no keys": dict(mask_mode="padding", window_left=0),
    "padding in chunks": dict(mask_mode="padding", chunked_attention_size=4),
    "chunks of no size": dict(mask_mode="chunked"),
    "chunks of 3": dict(chunked_attention_size=3),
    "chunks below 0": dict(chunked_attention_size=-(2**63)),
    "window and chunks": dict(window_left=3, chunked_attention_size=4),
    "sliding window of no keys and chunks": dict(mask_mode="sliding_window", window_left=0, chunked_attention_size=4),
    "window in a float": dict(window_left=3.0),
    "chunks in a float": dict(chunked_attention_size=4.0),
    "negative skipping": dict(skip_softmax_threshold_scale_factor=-1.0),
    "skipping in a text": dict(skip_softmax_threshold_scale_factor="900"),
    "statistics in a number": dict(save_softmax_stats=1),
    "list of sinks": dict(sinks=[torch.zeros(4)]),
    "sinks of another size": dict(sinks=torch.zeros(2)),
    "backend": dict(backend="reference"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", LEFT_TO_PYTHON)
def test_what_is_left_to_python(gpu: Gpu, layout: str, change: str) -> None:
    changes = LEFT_TO_PYTHON[change]
    if isinstance(out := changes.get("out"), torch.Tensor) and layout == "SEPARATE_Q_K_V":
        changes = dict(out=torch.zeros(*out.shape[:2], 128, dtype=out.dtype))
    assert not accepts(gpu, layout, **changes)


Q = rows_of(8, 4, 64)
QKV_LEFT_TO_PYTHON = [
    ("PACKED_QKV", rows_of(8, 2, 4, 64)),
    ("PACKED_QKV", rows_of(8, 4, 4, 64)),
    ("PACKED_QKV", rows_of(8, 3, 64)),
    ("PACKED_QKV", rows_of(8, 3, 4, 64)[..., None]),
    ("PACKED_QKV", (Q, Q, Q)),
    ("PACKED_QKV", rows_of(0, 3, 4, 64)),
    ("PACKED_QKV", rows_of(8, 3, 0, 64)),
    ("PACKED_QKV", torch.zeros(8, 3, 4, 64, dtype=torch.int16)),
    ("PACKED_QKV", torch.zeros(8, 776, dtype=HALF).as_strided((8, 3, 4, 64), (776, 260, 64, 1))),  # unaligned k
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 3, 2, 64))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 64))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 2, 64)[..., None])),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 3, 64))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 0, 64))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 2, 128))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 2, 64, dtype=BF16))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 2, 64, dtype=torch.int16))),
    ("CONTIGUOUS_Q_KV", (Q.short(), rows_of(30, 2, 2, 64))),
    ("CONTIGUOUS_Q_KV", (Q[:0], rows_of(30, 2, 2, 64))),
    ("CONTIGUOUS_Q_KV", (Q[:, :0], rows_of(30, 2, 2, 64))),
    ("CONTIGUOUS_Q_KV", (Q, None)),
    ("CONTIGUOUS_Q_KV", (None, rows_of(30, 2, 2, 64))),
    ("CONTIGUOUS_Q_KV", (Q, rows_of(30, 2, 2, 64), Q)),
    ("CONTIGUOUS_Q_KV", [Q, rows_of(30, 2, 2, 64)]),
    ("CONTIGUOUS_Q_KV", (Q, torch.zeros(30, 264, dtype=HALF).as_strided((30, 2, 2, 64), (264, 132, 64, 1)))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64), rows_of(29, 2, 64))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64), rows_of(30, 4, 64))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 128), rows_of(30, 2, 64))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64, dtype=BF16), rows_of(30, 2, 64))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64), rows_of(30, 2, 64, dtype=BF16))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64).short(), rows_of(30, 2, 64))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64), rows_of(30, 2, 64).short())),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64), None)),
    ("SEPARATE_Q_K_V", (Q, None, rows_of(30, 2, 64))),
    ("SEPARATE_Q_K_V", (None, rows_of(30, 2, 64), rows_of(30, 2, 64))),
    ("SEPARATE_Q_K_V", (Q, rows_of(30, 2, 64))),
    ("SEPARATE_Q_K_V", [Q, rows_of(30, 2, 64), rows_of(30, 2, 64)]),
    ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 16, 3, 64))),
    ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 16, 0, 64))),
    ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 16, 2, 128))),
    ("Q_PAGED_KV_NHD", (Q, rows_of(10, 3, 16, 2, 64))),
    ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 2, 64))),
    ("Q_PAGED_KV_NHD", (Q, rows_of(10, 2, 16, 2, 64, dtype=BF16))),
    ("Q_PAGED_KV_NHD", (Q, None)),
    ("Q_PAGED_KV_NHD", (None, rows_of(10, 2, 16, 2, 64))),
    ("Q_PAGED_KV_NHD", [Q, rows_of(10, 2, 16, 2, 64)]),
]


@pytest.mark.parametrize("layout,qkv", QKV_LEFT_TO_PYTHON)
def test_tensors_that_are_left_to_python(gpu: Gpu, layout: str, qkv: Any) -> None:
    assert not accepts(gpu, layout, qkv=qkv)


def test_keys_of_an_unaligned_address(gpu: Gpu) -> None:
    kv = torch.zeros(30, 264, dtype=HALF).as_strided((30, 2, 2, 64), (264, 132, 64, 1))
    gpu.tell(kv, data=kv.data_ptr() + 8)  # the values are aligned
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
        given = fused(layout, batch_size=requests)
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            gpu.tell(given[name], shape=(requests + 1,))
        if layout.startswith("Q_PAGED"):
            gpu.tell(given["block_tables"], shape=(requests, 3))
        assert gpu.accepts(gpu.module.fused_prefill, *given.values()) == accepted


def test_packed_tensors_have_as_many_keys_as_rows(gpu: Gpu) -> None:
    assert accepts(gpu, "PACKED_QKV", max_q_len=6, max_kv_len=6)
    assert not accepts(gpu, "PACKED_QKV", max_q_len=5, max_kv_len=6)


@pytest.mark.parametrize("device", [(CUDA, 1), (CPU, 0)], ids=["another GPU", "the CPU"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_of_two_devices(gpu: Gpu, layout: str, device: tuple[int, int]) -> None:
    given = fused(layout, out=rows_of(8, 4, 128 if layout == "SEPARATE_Q_K_V" else 64), sinks=torch.zeros(4))
    of_call = [x for x in (*given.values(), *given["qkv"]) if isinstance(x, torch.Tensor)]
    if layout == "PACKED_QKV":
        of_call = of_call[: len(of_call) - len(given["qkv"])]
    for x in of_call:
        assert gpu.accepts(gpu.module.fused_prefill, *given.values())
        gpu.tell(x, device=device)
        assert not gpu.accepts(gpu.module.fused_prefill, *given.values())
        gpu.tell(x)


@pytest.mark.parametrize(
    "layout,at", [*((layout, 0) for layout in LAYOUTS[1:]), ("SEPARATE_Q_K_V", 1), ("SEPARATE_Q_K_V", 2)]
)
def test_tensors_as_no_kernel_reads_them(gpu: Gpu, layout: str, at: int) -> None:
    given = fused(layout)
    x = given["qkv"][at]
    for fault, facts in faults_of_matrix(x).items():
        assert gpu.accepts(gpu.module.fused_prefill, *given.values())
        gpu.tell(x, **facts)
        assert not gpu.accepts(gpu.module.fused_prefill, *given.values()), fault
        gpu.tell(x)
