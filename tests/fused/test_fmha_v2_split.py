"""trtllm_fmha_v2_prefill of few short queries over many keys: these are split by the kernel itself, without a list."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compare import assert_close
from fused_problems import (
    E4M3,
    LAYOUTS,
    MODES,
    PAGED,
    RAGGED,
    Mode,
    call,
    check,
    check_stats,
    expect,
    in_caches,
    kernels_of,
    on_device,
    on_gpu,
    pack,
)
from guards import Guarded
from problems import Batch, make_batch

import cutlass_kernels as ck

# In PACKED_QKV no request has more keys than rows.
LAYOUTS = [layout for layout in LAYOUTS if layout != "PACKED_QKV"]
# Query lengths, and lengths of the keys before them. Four heads share a key head: up to 4 rows of a request are a tile
# of decoding, up to 16 or 32 one of packed heads.
SHORT = {
    "one row": ([1], [4000]),
    "one request": ([7], [3001]),
    "decode": ([1, 1, 1, 1, 1], [6000, 3, 0, 1200, 77]),
    "few rows": ([3, 1, 4], [2500, 900, 0]),
    "two tiles": ([20, 33, 1, 48], [2000, 10, 4100, 0]),
    "long": ([200, 130], [22900, 1000]),
    "empty": ([0, 2, 0], [0, 2000, 700]),
    "equal": ([4, 4, 4], [2044, 2044, 2044]),
    "ones": ([1, 1, 1], [2499, 19, 2499]),
}


def short_batch(target, lengths: str = "few rows", dtype=torch.float16, head_dim: int = 64) -> Batch:
    qo_lens, past = SHORT[lengths]
    kv_lens = [n + m for n, m in zip(qo_lens, past)]
    return make_batch(qo_lens, kv_lens, 8, 2, head_dim, dtype=dtype, device=target.device)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", SHORT)
@pytest.mark.parametrize("mode", ["causal", "padding", "window"])
def test_lengths(target, layout, lengths, mode):
    check(short_batch(target, lengths), layout, MODES[mode])


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", ["decode", "two tiles"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype,head_dim", [(torch.bfloat16, 128), (torch.float16, 256), (torch.bfloat16, 80)])
def test_masks_and_head_dims(target, lengths, mode, sinks, dtype, head_dim):
    sink = torch.linspace(-2.0, 6.0, 8, device=target.device) if sinks else None
    batch, mode = short_batch(target, lengths, dtype, head_dim), dataclasses.replace(MODES[mode], sinks=sink)
    check(batch, "CONTIGUOUS_Q_KV", mode)
    check(batch, "Q_PAGED_KV_NHD", mode)


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", ["CONTIGUOUS_Q_KV", "Q_PAGED_KV_HND"])
@pytest.mark.parametrize("lengths", ["decode", "few rows", "two tiles"])
@pytest.mark.parametrize("scaled", [False, True], ids=["numbers", "tensors"])
def test_e4m3(target, layout, lengths, scaled):
    batch, mode = short_batch(target, lengths, E4M3, 128), Mode(bmm1=0.1, bmm2=0.7)
    scales = dict(bmm1_scale=0.1, bmm2_scale=0.7)
    if scaled:
        scales = {name: torch.tensor([value], device=target.device) for name, value in scales.items()}
    positive = dataclasses.replace(batch, v=batch.v.float().abs().to(batch.v.dtype))
    allowed, want = expect(positive, mode)[0] / 16, expect(batch, mode)[0]
    for out_dtype, more in ((torch.float16, 0.0), (E4M3, 1 / 16)):
        out = call(batch, layout, mode, out_dtype=out_dtype, **scales)
        assert out.dtype == out_dtype
        assert_close(out.float(), want, atol=2e-2, rtol=2e-2 + more, allowed=allowed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["decode", "two tiles"])
def test_statistics_are_of_whole_rows(target, layout, lengths):
    check_stats(short_batch(target, lengths), layout, Mode())


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["decode", "few rows", "two tiles"])
@pytest.mark.parametrize("most", [(64, 10_000), (64, 10**6), (5000, 10_000), (10**6, 10**6)])
def test_bounds_may_be_larger_than_any_request(target, layout, lengths, most):
    check(short_batch(target, lengths), layout, Mode(), max_q_len=most[0], max_kv_len=most[1])


@pytest.mark.parametrize("lengths", SHORT)
def test_layouts_of_pages_agree_bit_by_bit(target, lengths):
    batch, outputs = short_batch(target, lengths), []
    for layout in PAGED:
        caches, tables = in_caches(batch, layout)
        outputs += [call(batch, layout, Mode(), **given) for given in ({}, dict(qkv=caches, tables=tables))]
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("given", [False, True], ids=["new output", "given output"])
def test_repeated_calls(target, layout, given):
    # The third call of a kind goes another way than the second, and that another than the first.
    workspace = torch.zeros(16, dtype=torch.uint8, device=target.device)
    for qo_lens, kv_lens in (([2, 3], [4000, 90]), ([1, 4], [50, 2000]), ([4, 1], [4, 4090])) * 2:
        batch = make_batch(qo_lens, kv_lens, 8, 2, 64, device=target.device)
        out = torch.full_like(batch.q, torch.nan) if given else None
        qkv, tables = pack(batch, layout)
        if tables is not None:
            wide = torch.full((2, 256), -1, dtype=torch.int32, device=target.device)
            wide[:, : tables.size(1)] = tables
            tables = wide
        bounds = dict(max_q_len=4, max_kv_len=4096)
        check(batch, layout, Mode(), qkv=qkv, tables=tables, out=out, workspace_buffer=workspace, **bounds)


NONSENSE = {
    "negative": [-5, 3, 4, 8],
    "beyond": [0, 3, 4, 10**9],
    "far beyond": [0, 2**31 - 1, 4, 8],
    "decreasing": [0, 2500, 20, 5000],
    "lowest": [0, -(2**31), 4, 8],
    "highest": [2**31 - 1] * 4,
    "from the lowest to the highest": [-(2**31), -(2**31), 2**31 - 1, 2**31 - 1],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrong", NONSENSE)
@pytest.mark.parametrize("which", ["q", "kv", "both"])
@pytest.mark.parametrize("lengths", ["ones", "few rows", "two tiles"])
def test_offsets_that_make_no_sense(target, layout, wrong, which, lengths):
    on_gpu(target)
    batch = short_batch(target, lengths)
    bad = torch.tensor(NONSENSE[wrong], dtype=torch.int64)
    bad = torch.cat([bad, bad[-1:].expand(len(batch.qo_lens) - 3)]).to(torch.int32).to(target.device)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    offsets = {}
    if which != "kv":
        offsets["cum_seq_lens_q"] = bad
    if which != "q":
        offsets["cum_seq_lens_kv"] = bad
    call(batch, layout, Mode(), out=out.tensor, **offsets)
    torch.cuda.synchronize()
    out.check("out")
    check(batch, layout, Mode())  # whatever blocks count with is as it was


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout in RAGGED])
def test_offsets_that_begin_late(target, layout):
    # Keys before the first offset are nobody's.
    batch = short_batch(target)
    before = make_batch([1], [700], 8, 2, 64, device=target.device)
    k, v = (torch.cat([torch.full_like(getattr(before, x), torch.nan), getattr(batch, x)]) for x in "kv")
    qkv = (batch.q, torch.stack([k, v], dim=1)) if layout == "CONTIGUOUS_Q_KV" else (batch.q, k, v)
    check(batch, layout, Mode(), qkv=qkv, cum_seq_lens_kv=batch.kv_indptr(target.device) + 700)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [3, 12, 36])
def test_captured_calls_follow_lengths(target, layout, rows):
    # Tiles of decoding that their last block merges, others of them, and packed heads.
    on_gpu(target)
    a, b, c = rows // 6, rows // 4, rows // 2
    steps = [
        ([rows // 3] * 3, [4000, 4000, 4000]),
        ([1, 1, 1], [4000, 0, 70]),
        ([0, 0, rows - b], [0, 0, 4000]),
        ([rows, 0, 0], [10, 3000, 0]),
        ([0, 0, 0], [0, 0, 0]),
        ([a, b, c], [100, 300, 900]),
    ]
    batches = [
        make_batch(qo_lens, [n + m for n, m in zip(qo_lens, past)], 8, 2, 64, device=target.device)
        for qo_lens, past in steps
    ]
    keys = max(sum(batch.kv_lens) for batch in batches)
    q = torch.zeros(rows, 8, 64, dtype=torch.float16, device=target.device)
    out = torch.empty_like(q)
    cum_q, cum_kv = torch.zeros(2, 4, dtype=torch.int32, device=target.device)
    tables = None
    if layout in PAGED:
        largest = max((pack(batch, layout) for batch in batches[:4]), key=lambda packed: len(packed[0][1]))
        kv, tables = torch.zeros_like(largest[0][1]), torch.zeros(3, 160, dtype=torch.int32, device=target.device)
    elif layout == "CONTIGUOUS_Q_KV":
        kv = torch.zeros(keys, 2, 2, 64, dtype=q.dtype, device=target.device)
    else:
        kv = torch.zeros(2, keys, 2, 64, dtype=q.dtype, device=target.device)
    qkv = (q, kv[0], kv[1]) if layout == "SEPARATE_Q_K_V" else (q, kv)

    def run() -> None:
        empty = torch.zeros(0, dtype=torch.uint8)
        ck.trtllm_fmha_v2_prefill(qkv, layout, empty, cum_kv, rows, 4096, 0.0, 1.0, 3, cum_q, cum_kv, tables, out=out)

    def load(batch: Batch) -> None:
        cum_q.copy_(batch.qo_indptr())
        cum_kv.copy_(batch.kv_indptr())
        q[: len(batch.q)] = batch.q
        if layout == "SEPARATE_Q_K_V":
            kv[0, : len(batch.k)], kv[1, : len(batch.v)] = batch.k, batch.v
        elif sum(batch.kv_lens):
            packed, of_batch = pack(batch, layout)
            kv[: len(packed[1])] = packed[1]
            if tables is not None:
                tables.fill_(2**31 - 1)
                tables[:, : of_batch.size(1)] = of_batch[:, :160]
        out.fill_(torch.nan)

    load(batches[0])
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for batch in (*batches, *reversed(batches)):
        load(batch)
        graph.replay()
        torch.cuda.synchronize()
        count = sum(batch.qo_lens)
        if count:
            want, _, base = expect(batch, Mode())
            assert_close(out[:count], want, base)
        assert bool(torch.isnan(out[count:]).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [name for name in SHORT if name != "empty"])
def test_a_call_is_a_kernel_and_a_merge(target, layout, lengths):
    on_gpu(target)
    batch = short_batch(target, lengths)
    qkv, tables = pack(batch, layout)
    given = on_device(batch, tables, qkv)
    for _ in range(2):
        names = kernels_of(lambda: call(batch, layout, Mode(), **given))
        # Partial results of up to four rows are combined by the last thread block of fa2's kernel.
        in_block = lengths in ("one row", "decode", "ones")
        fa2 = any("fa2::" in name for name in names)
        wanted = ["attention_kernel"] if fa2 and in_block else ["attention_kernel", "combine_splits"]
        if fa2 and lengths in ("one request", "two tiles", "long"):  # more rows than a tile of decoding holds
            wanted = ["write_list_kernel", *wanted]
        assert len(names) == len(wanted) and all(map(str.__contains__, names, wanted)), names
