"""trtllm_fmha_v2_prefill on devices: one kernel per call, which reads lengths and block tables there."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from compare import assert_close
from fused_problems import (
    E4M3,
    LAYOUTS,
    LENGTHS,
    MODES,
    PAGE,
    PAGED,
    RAGGED,
    Mode,
    batch_of,
    block_table,
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
from problems import Batch, indptr, make_batch

import cutlass_kernels as ck


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "lengths,mode",
    [("uneven", mode) for mode in MODES] + list(itertools.product(["even", "empty", "decode"], ["causal", "window"])),
)
def test_lengths_and_masks(target, layout, lengths, mode):
    check(batch_of(target, layout, lengths), layout, MODES[mode])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim,dtype", [(128, torch.bfloat16), (256, torch.float16)])
def test_head_dims(target, layout, head_dim, dtype):
    sinks = torch.tensor([-2.0, 0.5, 1.5, 6.0], device=target.device)
    check(batch_of(target, layout, "uneven", dtype, head_dim), layout, Mode(sinks=sinks, window_left=50))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaled", [False, True], ids=["numbers", "tensors"])
def test_e4m3(target, layout, scaled):
    # Probabilities may be e4m3, too: a sixteenth of what absolute values would sum up to.
    batch, mode = batch_of(target, layout, "uneven", torch.float8_e4m3fn, 128), Mode(bmm1=0.1, bmm2=0.7)
    scales = dict(bmm1_scale=0.1, bmm2_scale=0.7)
    if scaled:
        scales = {name: torch.tensor([value], device=target.device) for name, value in scales.items()}
    out = call(batch, layout, mode, out_dtype=torch.float16, **scales)
    positive = dataclasses.replace(batch, v=batch.v.float().abs().to(batch.v.dtype))
    allowed = expect(positive, mode)[0] / 16
    assert_close(out.float(), expect(batch, mode)[0], atol=2e-2, rtol=2e-2, allowed=allowed)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("more", [1, 1000, 10**6])
def test_bounds_may_be_larger_than_any_request(target, layout, more):
    batch = batch_of(target, layout)
    most = max(batch.kv_lens) + more
    check(batch, layout, Mode(), max_q_len=most, max_kv_len=most)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", None])
def test_offsets_on_either_device(target, layout, device):
    batch = batch_of(target, layout)
    device = device or target.device
    qkv, tables = pack(batch, layout)
    for moved in {tables, None if tables is None else tables.cpu()}:
        check(
            batch,
            layout,
            Mode(),
            qkv=qkv,
            tables=moved,
            cum_seq_lens_q=batch.qo_indptr(device),
            cum_seq_lens_kv=batch.kv_indptr(device),
        )


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [8, 16, 12, 1, 128])
@pytest.mark.parametrize("mode", ["causal", "window"])
def test_unused_pages_and_entries(target, layout, page, mode):
    # Pages that no request has, and the ends of pages, hold NaN; entries that no key refers to are any numbers.
    batch = batch_of(target, layout)
    paged = batch.paged(page, layout[-3:], spare=5)
    assert bool(torch.isnan(paged.cache).any())
    tables = block_table(paged)
    unused = tables == 10**6
    tables[unused] = torch.randint(-(2**31), 2**31 - 1, (int(unused.sum()),), dtype=torch.int32)
    check(batch, layout, MODES[mode], qkv=(batch.q, paged.cache), tables=tables.to(target.device))


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [12, 32])
def test_block_tables_of_any_stride(target, layout, page):
    batch = batch_of(target, layout)
    paged = batch.paged(page, layout[-3:])
    tables = block_table(paged).to(target.device)
    wide = torch.full((tables.size(0), 2 * tables.size(1)), -1, dtype=torch.int32, device=target.device)
    wide[:, : tables.size(1)] = tables
    spread = torch.stack([tables, tables], dim=2)[:, :, 0]
    for view in (wide[:, : tables.size(1)], spread):
        check(batch, layout, Mode(), qkv=(batch.q, paged.cache), tables=view)


@pytest.mark.parametrize("layout", PAGED)
@pytest.mark.parametrize("page", [12, 16])
def test_separate_caches_apart_from_each_other(target, layout, page):
    # Between keys and values lie blocks that are neither's; entries that count to them are no pages.
    batch = batch_of(target, layout)
    paged = batch.paged(page, layout[-3:], "tuple")
    count, between = paged.k_cache.shape[0], 7
    nothing = torch.full_like(paged.k_cache[:1], torch.nan).expand(between, *paged.k_cache.shape[1:])
    whole = torch.cat([paged.k_cache, nothing, paged.v_cache])
    pages = block_table(paged)
    tables = torch.stack([pages, pages + count + between], dim=1).to(target.device)
    caches = (whole[:count], whole[count + between :])
    check(batch, layout, Mode(), qkv=(batch.q, caches), tables=tables)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", ["causal", "window", "cap"])
def test_layouts_agree_bit_by_bit(target, lengths, mode):
    qo_lens, _ = LENGTHS[lengths]
    batch = make_batch(qo_lens, qo_lens, 4, 4, 64, device=target.device)
    outputs = [call(batch, layout, MODES[mode]) for layout in RAGGED]
    for other in outputs[1:]:
        assert torch.equal(outputs[0], other)


@pytest.mark.pairwise
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("mode", ["causal", "window", "cap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
def test_paged_layouts_agree_bit_by_bit(target, lengths, mode, dtype):
    batch = batch_of(target, PAGED[0], lengths, dtype)
    outputs = []
    for layout in PAGED:
        caches, tables = in_caches(batch, layout)
        outputs += [call(batch, layout, MODES[mode], **given) for given in ({}, dict(qkv=caches, tables=tables))]
    for other in outputs[1:]:
        assert torch.equal(outputs[0].view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_calls_follow_their_tensors(target, layout):
    # Other addresses, lengths and tables, the same sizes.
    workspace = torch.zeros(16, dtype=torch.uint8, device=target.device)
    for qo_lens, past in (([20, 3, 41], [3, 40, 8]), ([1, 60, 3], [20, 30, 1]), ([64, 0, 0], [0, 7, 44])):
        kv_lens = qo_lens if layout == "PACKED_QKV" else [n + m for n, m in zip(qo_lens, past)]
        heads = (4, 4) if layout == "PACKED_QKV" else (4, 2)
        batch = make_batch(qo_lens, kv_lens, *heads, 64, device=target.device)
        qkv, tables = pack(batch, layout)
        if tables is not None:
            wide = torch.full((3, 8), -1, dtype=torch.int32, device=target.device)
            wide[:, : tables.size(1)] = tables[:, :8]
            tables = wide
        most = dict(max_q_len=128, max_kv_len=128, workspace_buffer=workspace)
        for _ in range(2):
            out = torch.full_like(batch.q, torch.nan)
            check(batch, layout, Mode(), qkv=qkv, tables=tables, out=out, **most)
            check(batch, layout, Mode(), qkv=qkv, tables=tables, **most)
            check_stats(batch, layout, Mode(), qkv=qkv, tables=tables, out=out, **most)
            check_stats(batch, layout, Mode(), qkv=qkv, tables=tables, **most)
        assert torch.count_nonzero(workspace) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_writes_stay_inside(target, layout, lengths):
    batch = batch_of(target, layout, lengths)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    check(batch, layout, Mode(), out=out.tensor)
    out.check("out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_beyond_all_requests_are_not_written(target, layout):
    # Offsets end before the tensors do.
    batch = batch_of(target, layout, "even")
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    qo, kv = batch.qo_indptr(), batch.kv_indptr()
    qo[-1] = qo[-2] + 3
    if layout == "PACKED_QKV":
        kv = qo
    offsets = dict(cum_seq_lens_q=qo.to(target.device), cum_seq_lens_kv=kv.to(target.device))
    call(batch, layout, Mode(), out=out.tensor, **offsets)
    out.check("out")
    assert bool(torch.isnan(out.tensor[int(qo[-1]) :]).all())
    assert not bool(torch.isnan(out.tensor[: int(qo[-1])]).any())


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


NONSENSE = {
    "negative": [-5, 70, 134, 199],
    "beyond": [0, 70, 134, 10**9],
    "far beyond": [0, 2**31 - 1, 134, 199],
    "decreasing": [0, 150, 20, 199],
    "lowest": [0, -(2**31), 134, 199],
}


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("wrong", NONSENSE)
@pytest.mark.parametrize("which", ["q", "kv", "both"])
@pytest.mark.parametrize("most", [70, 100_000])
def test_offsets_that_make_no_sense(target, layout, wrong, which, most):
    on_gpu(target)
    batch = batch_of(target, layout, "even")
    bad = torch.tensor(NONSENSE[wrong], dtype=torch.int64).to(torch.int32).to(target.device)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    offsets = {}
    if which != "kv":
        offsets["cum_seq_lens_q"] = bad
    if which != "q":
        offsets["cum_seq_lens_kv"] = bad
    bounds = dict(max_q_len=most, max_kv_len=max(most, max(batch.kv_lens) if layout != "PACKED_QKV" else most))
    call(batch, layout, Mode(), out=out.tensor, **bounds, **offsets)
    torch.cuda.synchronize()
    out.check("out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_requests_longer_than_the_bound(target, layout):
    on_gpu(target)
    batch = batch_of(target, layout)
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    call(batch, layout, Mode(), out=out.tensor, max_q_len=64, max_kv_len=64)
    torch.cuda.synchronize()
    out.check("out")
    want, _, base = expect(batch, Mode())
    bounds = indptr(batch.qo_lens)
    for begin, end in itertools.pairwise(bounds.tolist()):
        if end - begin <= 64:
            rows = slice(begin, end)
            assert_close(out.tensor[rows], want[rows], base[rows])


@pytest.mark.parametrize("layout", PAGED)
def test_requests_longer_than_their_tables(target, layout):
    on_gpu(target)
    batch = batch_of(target, layout, "even")
    qkv, tables = pack(batch, layout)
    narrow = tables[:, : (max(batch.kv_lens) - 1) // PAGE].contiguous()
    out = Guarded(batch.q.shape, batch.q.dtype, target.device)
    call(batch, layout, Mode(), qkv=qkv, tables=narrow, out=out.tensor)
    torch.cuda.synchronize()
    out.check("out")
    fits = [m <= narrow.size(1) * PAGE for m in batch.kv_lens]
    assert not all(fits)
    want, _, base = expect(batch, Mode())
    for (begin, end), computed in zip(itertools.pairwise(indptr(batch.qo_lens).tolist()), fits):
        rows = slice(begin, end)
        if computed:
            assert_close(out.tensor[rows], want[rows], base[rows])
        else:
            assert bool(torch.isnan(out.tensor[rows]).all())


class Captured:
    """A captured call with buffers that its replays read."""

    ROWS, REQUESTS, KEYS, WIDTH, PAGES = 160, 4, 400, 12, 40

    def __init__(self, target, layout: str, mode: Mode):
        self.layout, self.mode, device = layout, mode, target.device
        self.kv_heads = 4 if layout == "PACKED_QKV" else 2
        half = dict(dtype=torch.float16, device=device)
        ints = dict(dtype=torch.int32, device=device)
        self.q = torch.zeros(self.ROWS, 4, 64, **half)
        self.out = torch.zeros_like(self.q)
        self.cum_q, self.cum_kv = torch.zeros(2, self.REQUESTS + 1, **ints)
        self.tables = None
        if layout in PAGED:
            self.tables = torch.zeros(self.REQUESTS, self.WIDTH, **ints)
            shape = (PAGE, 2) if layout.endswith("NHD") else (2, PAGE)
            self.kv = torch.zeros(self.PAGES, 2, *shape, 64, **half)
            self.qkv = (self.q, self.kv)
        elif layout == "PACKED_QKV":
            self.qkv = self.kv = torch.zeros(self.ROWS, 3, 4, 64, **half)
        elif layout == "CONTIGUOUS_Q_KV":
            self.kv = torch.zeros(self.KEYS, 2, 2, 64, **half)
            self.qkv = (self.q, self.kv)
        else:
            self.kv = torch.zeros(2, self.KEYS, 2, 64, **half)
            self.qkv = (self.q, self.kv[0], self.kv[1])

    def load(self, batch: Batch) -> None:
        qkv, tables = pack(batch, self.layout)
        self.cum_q.copy_(batch.qo_indptr())
        self.cum_kv.copy_(batch.kv_indptr())
        if self.layout == "PACKED_QKV":
            self.kv[: len(qkv)] = qkv
        else:
            self.q[: len(batch.q)] = batch.q
            if self.layout == "SEPARATE_Q_K_V":
                self.kv[0, : len(batch.k)], self.kv[1, : len(batch.v)] = batch.k, batch.v
            else:
                self.kv[: len(qkv[1])] = qkv[1]
        if tables is not None:
            self.tables.fill_(2**31 - 1)
            self.tables[:, : tables.size(1)] = tables[:, : self.WIDTH]
        self.out.fill_(torch.nan)

    def run(self) -> None:
        most = self.ROWS if self.layout == "PACKED_QKV" else 384
        ck.trtllm_fmha_v2_prefill(
            self.qkv,
            self.layout,
            torch.zeros(0, dtype=torch.uint8),
            self.cum_kv,
            self.ROWS,
            most,
            self.mode.bmm1,
            self.mode.bmm2,
            self.REQUESTS,
            self.cum_q,
            self.cum_kv,
            self.tables,
            out=self.out,
            mask_mode=self.mode.mask_mode,
            window_left=self.mode.window_left,
        )

    def check(self, batch: Batch) -> None:
        want, _, base = expect(batch, self.mode)
        rows = len(want)
        assert_close(self.out[:rows], want, base)
        assert bool(torch.isnan(self.out[rows:]).all())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", ["causal", "window"])
def test_captured_calls_follow_lengths_and_tables(target, layout, mode):
    on_gpu(target)
    steps = [
        ([40, 40, 40, 40], [0, 10, 60, 3]),
        ([1, 1, 150, 1], [80, 0, 20, 70]),
        ([0, 0, 0, 7], [0, 3, 0, 300]),
        ([160, 0, 0, 0], [200, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([13, 64, 65, 2], [1, 2, 3, 4]),
    ]
    batches = []
    for qo_lens, past in steps:
        packed = layout == "PACKED_QKV"
        kv_lens = qo_lens if packed else [n + m for n, m in zip(qo_lens, past)]
        batches.append(make_batch(qo_lens, kv_lens, 4, 4 if packed else 2, 64, device=target.device))
    captured = Captured(target, layout, MODES[mode])
    captured.load(batches[0])
    captured.run()
    torch.cuda.synchronize()
    captured.check(batches[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for batch in (*batches, *reversed(batches)):
        captured.load(batch)
        graph.replay()
        torch.cuda.synchronize()
        if sum(batch.qo_lens):
            captured.check(batch)
        else:
            assert bool(torch.isnan(captured.out).all())


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
    batch = batch_of(target, layout, dtype=dtype)
    qkv, tables = pack(batch, layout)
    if separate:
        qkv, tables = in_caches(batch, layout)
    given = on_device(batch, tables, qkv)
    for _ in range(2):
        names = kernels_of(lambda: call(batch, layout, Mode(window_left=30), save_softmax_stats=stats, **given))
        assert len(names) == 1 and "attention_kernel" in names[0], names
