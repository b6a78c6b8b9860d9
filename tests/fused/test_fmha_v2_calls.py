"""trtllm_fmha_v2_prefill on devices: one kernel per call, which reads lengths and block tables there."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from captures import disturbed
from compare import assert_bitwise, assert_close
from fused_problems import (
    E4M3,
    LAYOUTS,
    LENGTHS,
    MODES,
    NOT_PACKED,
    PAGE,
    PAGED,
    SHORT,
    Captured,
    Mode,
    batch_for,
    batch_of,
    call,
    check,
    check_e4m3,
    check_stats,
    expect,
    in_caches,
    kernels_of,
    on_device,
    on_gpu,
    pack,
)
from guards import Guarded
from problems import indptr, make_batch


def of_layouts(usual: list[tuple], short: list[tuple]) -> list[tuple]:
    """Cases of all layouts, and those of short queries over many keys, which are not packed."""
    return [(x, *case) for x in LAYOUTS for case in usual] + [(x, *case) for x in NOT_PACKED for case in short]


BOUNDS = of_layouts(
    [("uneven", more, more) for more in (1, 1000, 10**6)],
    [
        (lengths, *most)
        for lengths in ("five rows", "few rows", "two tiles")
        for most in ((64, 10_000), (64, 10**6), (5000, 10_000), (10**6, 10**6))
    ],
)


@pytest.mark.parametrize("layout,lengths,of_q,of_kv", BOUNDS)
def test_bounds_may_be_larger_than_any_request(target, layout, lengths, of_q, of_kv):
    """And ``seq_lens`` is not read."""
    batch = batch_of(target, layout, lengths)
    if lengths == "uneven":
        of_q = of_kv = max(batch.kv_lens) + of_q
    lens = torch.full((len(batch.kv_lens),), 10**6, dtype=torch.int32, device=target.device)
    check(batch, layout, max_q_len=of_q, max_kv_len=of_kv, seq_lens=lens)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", None])
def test_offsets_on_either_device(target, layout, device):
    batch = batch_of(target, layout, "uneven")
    qkv, tables = pack(batch, layout)
    offsets = dict(cum_seq_lens_q=batch.qo_indptr(device or target.device))
    offsets["cum_seq_lens_kv"] = batch.kv_indptr(device or target.device)
    for moved in {tables, None if tables is None else tables.cpu()}:
        check(batch, layout, qkv=qkv, tables=moved, **offsets)


# What a call of some steps is given: query and key lengths (packed: query lengths), heads, columns of the block table,
# and the bounds. The third call of a kind goes another way than the second, and that another than the first.
REPEATED = {
    "prompts": (
        [([20, 3, 41], [3, 40, 8]), ([1, 60, 3], [20, 30, 1]), ([64, 0, 0], [0, 7, 44])],
        (4, 2),
        8,
        (128, 128),
    ),
    "splits": ([([2, 3], [3998, 87]), ([1, 4], [49, 1996]), ([4, 1], [0, 4089])] * 2, (8, 2), 256, (4, 4096)),
}


@pytest.mark.parametrize("layout,kind", of_layouts([("prompts",)], [("splits",)]))
def test_calls_follow_their_tensors(target, layout, kind):
    """Other addresses, lengths and tables, the same sizes."""
    lengths, heads, width, (of_q, of_kv) = REPEATED[kind]
    workspace = torch.zeros(16, dtype=torch.uint8, device=target.device)
    for step in lengths:
        batch = batch_for(target, layout, *step, heads)
        qkv, tables = pack(batch, layout)
        if tables is not None:
            wide = torch.full((len(batch.qo_lens), width), -1, dtype=torch.int32, device=target.device)
            wide[:, : tables.size(1)] = tables[:, :width]
            tables = wide
        most = dict(max_q_len=of_q, max_kv_len=of_kv, workspace_buffer=workspace, qkv=qkv, tables=tables)
        for _ in range(2):
            out = torch.full_like(batch.q, torch.nan)
            for checked in (check, check_stats):
                checked(batch, layout, Mode(), out=out, **most)
                checked(batch, layout, Mode(), **most)
        assert torch.count_nonzero(workspace) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_repeated_calls_of_e4m3(target, layout):
    batch = batch_of(target, layout, "uneven", E4M3, 128)
    qkv, tables = pack(batch, layout)
    out = torch.empty_like(batch.q)
    for _ in range(3):
        out.view(torch.uint8).fill_(0x7F)
        assert check_e4m3(batch, layout, Mode(), target, qkv=qkv, tables=tables, out=out).data_ptr() == out.data_ptr()
        check_e4m3(batch, layout, Mode(), target, qkv=qkv, tables=tables)
        assert call(batch, layout, Mode(), qkv=qkv, tables=tables, out_dtype=torch.float16).dtype == torch.float16


# --- writes ---


WRITES = [(x, torch.float16, "causal", 64) for x in LENGTHS] + [
    (x, E4M3, *y) for x in ("uneven", "decode") for y in (("causal", 80), ("causal", 128), ("alibi", 64))
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths,dtype,mode,head_dim", WRITES)
def test_writes_stay_inside(target, layout, lengths, dtype, mode, head_dim):
    # Rows that begin at multiples of 16 bytes, and of 8, which the kernels of fp8 do not write.
    batch, mode = batch_of(target, layout, lengths, dtype, head_dim), MODES[mode]
    rows, heads, _ = batch.q.shape
    for token_gap, head_gap in ((0, 0), (80, 16), (8, 0)) if dtype == E4M3 else ((0, 0),):
        strides = (heads * (head_dim + head_gap) + token_gap, head_dim + head_gap, 1)
        out = Guarded((rows, heads, head_dim), dtype, target.device, strides)
        if dtype == E4M3:
            check_e4m3(batch, layout, mode, target, out=out.tensor)
        else:
            check(batch, layout, mode, out=out.tensor)
        out.check("out")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype,mode", [(torch.float16, "causal"), (E4M3, "causal"), (E4M3, "alibi")])
def test_queries_beyond_all_requests_are_not_written(target, layout, dtype, mode):
    # Offsets end before the tensors do.
    batch = batch_of(target, layout, "even", dtype, 128 if dtype == E4M3 else 64)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    qo, kv = batch.qo_indptr(), batch.kv_indptr()
    qo[-1] = qo[-2] + 3
    if layout == "PACKED_QKV":
        kv = qo
    offsets = dict(cum_seq_lens_q=qo.to(target.device), cum_seq_lens_kv=kv.to(target.device))
    call(batch, layout, MODES[mode], out=out.tensor, **offsets)
    out.check("out")
    nan = out.tensor.float().isnan()
    assert bool(nan[int(qo[-1]) :].all()) and not bool(nan[: int(qo[-1])].any())


@pytest.mark.runs_nothing("without requests, no kernel is launched")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_request(target, layout):
    # All rows are beyond all requests.
    batch = batch_of(target, layout, "even")
    qkv, tables = pack(batch, layout)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    none = torch.zeros(1, dtype=torch.int32, device=target.device)
    given = dict(qkv=qkv, tables=None if tables is None else tables[:0], out=out.tensor, batch_size=0)
    call(batch, layout, Mode(), cum_seq_lens_q=none, cum_seq_lens_kv=none, **given)
    out.check_untouched("out")


# --- offsets and tables that make no sense ---


def nonsense(first: int, second: int, last: int) -> dict[str, list[int]]:
    return {
        "negative": [-5, first, second, last],
        "beyond": [0, first, second, 10**9],
        "far beyond": [0, 2**31 - 1, second, last],
        "lowest": [0, -(2**31), second, last],
    }


NONSENSE = {
    "prompts": nonsense(70, 134, 199) | {"decreasing": [0, 150, 20, 199]},
    "splits": nonsense(3, 4, 8)
    | {
        "decreasing": [0, 2500, 20, 5000],
        "highest": [2**31 - 1] * 4,
        "from the lowest to the highest": [-(2**31), -(2**31), 2**31 - 1, 2**31 - 1],
    },
}
SENSELESS = of_layouts(
    list(itertools.product(["even"], [70, 100_000], NONSENSE["prompts"])),
    list(itertools.product(["ones", "few rows", "two tiles"], [None], NONSENSE["splits"])),
)


@pytest.mark.parametrize("layout,lengths,most,wrong", SENSELESS)
@pytest.mark.parametrize("which", ["q", "kv", "both"])
def test_offsets_that_make_no_sense(target, layout, lengths, most, wrong, which):
    on_gpu(target)
    batch = batch_of(target, layout, lengths)
    bad = torch.tensor(NONSENSE["splits" if lengths in SHORT else "prompts"][wrong], dtype=torch.int64)
    bad = torch.cat([bad, bad[-1:].expand(len(batch.qo_lens) - 3)]).to(torch.int32).to(target.device)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    named = {"q": ["cum_seq_lens_q"], "kv": ["cum_seq_lens_kv"], "both": ["cum_seq_lens_q", "cum_seq_lens_kv"]}
    bounds = {}
    if most is not None:
        bounds = dict(max_q_len=most, max_kv_len=max(most, max(batch.kv_lens) if layout != "PACKED_QKV" else most))
    call(batch, layout, Mode(), out=out.tensor, **bounds, **dict.fromkeys(named[which], bad))
    torch.cuda.synchronize()
    out.check("out")
    check(batch, layout)  # whatever blocks count with is as it was


@pytest.mark.parametrize("layout", ["CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V"])
def test_offsets_that_begin_late(target, layout):
    # Keys before the first offset are nobody's.
    batch = batch_of(target, layout, "few rows")
    k, v = (torch.cat([torch.full_like(x[:700], torch.nan), x]) for x in (batch.k, batch.v))
    qkv = (batch.q, torch.stack([k, v], dim=1)) if layout == "CONTIGUOUS_Q_KV" else (batch.q, k, v)
    check(batch, layout, qkv=qkv, cum_seq_lens_kv=batch.kv_indptr(target.device) + 700)


@pytest.mark.parametrize("layout,too_short", of_layouts([("bounds",)], []) + [(x, "tables") for x in PAGED])
def test_requests_that_are_too_long(target, layout, too_short):
    """Of bounds, or of block tables. The other requests are computed."""
    on_gpu(target)
    batch = batch_of(target, layout, "uneven" if too_short == "bounds" else "even")
    qkv, tables = pack(batch, layout)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    if too_short == "bounds":
        fits, given = [n <= 64 for n in batch.qo_lens], dict(tables=tables, max_q_len=64, max_kv_len=64)
    else:
        narrow = tables[:, : (max(batch.kv_lens) - 1) // PAGE].contiguous()
        fits, given = [m <= narrow.size(1) * PAGE for m in batch.kv_lens], dict(tables=narrow)
    assert not all(fits)
    call(batch, layout, Mode(), qkv=qkv, out=out.tensor, **given)
    torch.cuda.synchronize()
    out.check("out")
    want, _, base = expect(batch, Mode())
    for (begin, end), computed in zip(itertools.pairwise(indptr(batch.qo_lens).tolist()), fits):
        rows = slice(begin, end)
        if computed:
            assert_close(out.tensor[rows], want[rows], base[rows])
        elif too_short == "tables":
            assert bool(torch.isnan(out.tensor[rows]).all())


# --- CUDA graphs, kernels and repeats ---

STEPS = [
    ([40, 40, 40, 40], [0, 10, 60, 3]),
    ([1, 1, 150, 1], [80, 0, 20, 70]),
    ([0, 0, 0, 7], [0, 3, 0, 300]),
    ([160, 0, 0, 0], [200, 0, 0, 0]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
    ([13, 64, 65, 2], [1, 2, 3, 4]),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mode,dtype", [("causal", torch.float16), ("window", torch.float16), ("causal", E4M3), ("alibi", E4M3)]
)
def test_captured_calls_follow_lengths_and_tables(target, layout, mode, dtype):
    on_gpu(target)
    dim = 128 if dtype == E4M3 else 64
    batches = [batch_for(target, layout, *step, (4, 2), dim, dtype=dtype) for step in STEPS]
    Captured(target, layout, MODES[mode], requests=4, rows=160, keys=384, dtype=dtype).follow(batches)


@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("rows", [3, 12, 36])
def test_captured_calls_of_short_queries(target, layout, rows):
    # Tiles of decoding that their last block merges, others of them, and packed heads.
    on_gpu(target)
    steps = [
        ([rows // 3] * 3, [4000, 4000, 4000]),
        ([1, 1, 1], [4000, 0, 70]),
        ([0, 0, rows - rows // 4], [0, 0, 4000]),
        ([rows, 0, 0], [10, 3000, 0]),
        ([0, 0, 0], [0, 0, 0]),
        ([rows // 6, rows // 4, rows // 2], [100, 300, 900]),
    ]
    batches = [batch_for(target, layout, *step, (8, 2), 64) for step in steps]
    Captured(target, layout, Mode(), requests=3, rows=rows, keys=4096, heads=(8, 2)).follow(batches)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("stats", [False, True], ids=["", "stats"])
@pytest.mark.parametrize("dtype", [torch.float16, E4M3], ids=["fp16", "e4m3"])
def test_a_call_is_one_kernel(target, layout, separate, dtype, stats):
    on_gpu(target)
    if separate and layout not in PAGED:
        pytest.skip("only pages may lie in caches of their own")
    if dtype == E4M3 and (stats or target.backend != "fa3"):
        pytest.skip("is computed from copies")
    batch = batch_of(target, layout, "uneven", dtype=dtype)
    qkv, tables = in_caches(batch, layout) if separate else pack(batch, layout)
    given = on_device(batch, tables, qkv)
    for _ in range(2):
        names = kernels_of(lambda: call(batch, layout, Mode(window_left=30), save_softmax_stats=stats, **given))
        assert len(names) == 1 and "attention_kernel" in names[0], names


@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("lengths", [name for name in SHORT if name != "empty requests"])
def test_a_call_of_short_queries_is_a_kernel_and_a_merge(target, layout, lengths):
    on_gpu(target)
    batch = batch_of(target, layout, lengths)
    qkv, tables = pack(batch, layout)
    given = on_device(batch, tables, qkv)
    for _ in range(2):
        names = kernels_of(lambda: call(batch, layout, Mode(), **given))
        # Partial results of up to four rows are combined by the last thread block of fa2's kernel.
        in_block = lengths in ("one row", "five rows", "ones")
        fa2 = any("fa2::" in name for name in names)
        wanted = ["attention_kernel"] if fa2 and in_block else ["attention_kernel", "combine_splits"]
        if fa2 and lengths in ("one request", "two tiles", "long"):  # more rows than a tile of decoding holds
            wanted = ["write_list_kernel", *wanted]
        assert len(names) == len(wanted) and all(map(str.__contains__, names, wanted)), names


CAPPED = {
    "window": (Mode("sliding_window", 33, cap=10.0), (16, 2)),
    "chunks": (Mode("chunked", chunked_attention_size=32, cap=10.0), (16, 2)),
    "causal": (Mode(cap=10.0), (8, 8)),
    "no cap": (Mode("sliding_window", 33), (16, 2)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mode", CAPPED)
def test_soft_caps_have_the_same_bits_in_every_run(target, mode, head_dim, dtype):
    """Of prompts whose last KV block is not full and holds what other tiles left there."""
    if target.is_reference:
        pytest.skip("the reference has no tiles")
    (options, heads), layout = CAPPED[mode], "Q_PAGED_KV_NHD"
    rows, keys = [1, 592, 176, 256, 511, 81, 831], [1, 592, 176, 2049, 3369, 3208, 831]
    batch = make_batch(rows, keys, *heads, head_dim, dtype=dtype, device=target.device)
    qkv, tables = pack(batch, layout)
    run = lambda: call(batch, layout, options, qkv=qkv, tables=tables)  # noqa: E731
    want, stream, chance = run(), torch.cuda.Stream(target.device), random.Random(0)
    for _ in range(12):
        assert_bitwise(disturbed(run, stream, chance), want)
    torch.cuda.synchronize()
