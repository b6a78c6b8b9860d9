"""fp8 keys and values under 16-bit queries: who reads them as they are, and what comes of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from problems import Batch, Options, expect, graph_buffers, make_batch

import cutlass_kernels as ck
from cutlass_kernels._compute import request_facts

DEVICE = "cuda:0"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
HALF = [torch.float16, torch.bfloat16]
FP8 = [E4M3, E5M2]
SHORT, FEW, SOME = request_facts.SHORT_ROWS, request_facts.FEW_ROWS, request_facts.SOME_ROWS
READERS = ["fa2", pytest.param("fa3", marks=pytest.mark.hopper)]


# --- who reads them ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "types,rows,requests,group_size,dims,feature",
    [
        ((torch.float16, E4M3), 4, 4, 8, (128, 128), "short_queries"),
        ((torch.bfloat16, E5M2), SHORT // 4, 1, 4, (64, 64), "short_queries"),
        ((torch.bfloat16, E5M2), SHORT // 4 + 1, 1, 4, (64, 64), "fp8_few_rows"),
        ((torch.bfloat16, E4M3), FEW // 2, 2, 4, (64, 64), "fp8_few_rows"),  # the average counts
        ((torch.bfloat16, E4M3), FEW // 2 + 1, 2, 4, (64, 64), "fp8_some_rows"),
        ((torch.bfloat16, E4M3), SOME, 1, 1, (80, 80), "fp8_some_rows"),
        ((torch.bfloat16, E4M3), SOME + 1, 1, 1, (80, 80), ""),
        ((torch.bfloat16, E4M3), 64, 1, 4, (256, 256), "fp8_some_rows"),
        ((torch.bfloat16, E4M3), 65, 1, 4, (256, 256), ""),
        ((torch.bfloat16, E4M3), 4, 4, 8, (72, 128), ""),  # rows of 72 bytes
        ((torch.bfloat16, E4M3), None, 4, 8, (128, 128), ""),
        ((torch.bfloat16, torch.bfloat16), 8, 4, 8, (72, 72), "short_queries"),
        ((torch.bfloat16, torch.bfloat16), 8, 4, 8, (192, 128), ""),  # which fa2 would pad
        ((torch.bfloat16, torch.bfloat16), 9, 4, 8, (128, 128), ""),
        ((torch.bfloat16, torch.bfloat16), 1, 4, 32, (128, 128), ""),  # more heads than rows of the tile
        ((torch.bfloat16, torch.float16), 4, 4, 4, (128, 128), ""),
        ((E4M3, E4M3), 4, 4, 8, (128, 128), ""),
    ],
)
def test_feature_of_rows(types, rows, requests, group_size, dims, feature):
    assert request_facts.feature_of_rows(*types, rows, requests, group_size, dims) == feature


def native_dims() -> set[int]:
    return {k["head_dim_qk"] for k in ck.list_kernels() if k["backend"] == "fa2" and k["kv_dtype"] == "float8_e4m3fn"}


@pytest.mark.parametrize(
    "features,selected",
    [
        (["short_queries"], "fa2"),
        (["short_queries", "paged", "causal", "sinks"], "fa2"),
        (["short_queries", "custom_mask", "tensor_scale"], "fa2"),
        (["short_queries", "rope"], "fa3"),  # rotation takes copies anyway
        (["fp8_few_rows"], "fa2"),
        (["fp8_few_rows", "paged"], "fa3"),  # which reads pages
        (["fp8_few_rows", "paged", "custom_mask", "alibi"], "fa3"),
        (["fp8_some_rows"], "fa3"),
        (["paged"], "fa3"),
    ],
)
def test_auto_takes_fa2_for_short_queries(features, selected, extension, clean_environment):
    facts = dict(device="cuda", compute_capability=90, q_dtype="bfloat16", kv_dtype=E4M3, features=features)
    said = ck.explain(**facts)
    if said.reasons["fa2"] or said.reasons["fa3"] or 128 not in native_dims():
        pytest.skip("this build lacks one of the backends, or the kernels that read fp8")
    assert said.selected == selected
    assert not said.reasons["reference"]


# --- what comes of it --------------------------------------------------------------------------------------------


def check(result: Any, batch: Batch, options: Options) -> None:
    out, lse = result
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline, dtype=batch.q.dtype, atol=1e-2, rtol=1e-2)
    assert_lse_close(lse, want.lse)


def paged_wrapper(backend: str = "fa2", kv_layout: str = "NHD", **graph: Any) -> ck.BatchPrefillWithPagedKVCacheWrapper:
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    return ck.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout, backend=backend, **graph)


def run_paged(
    batch: Batch,
    page_size: int,
    options: Options,
    run_kwargs: dict[str, Any] | None = None,
    backend: str = "fa2",
    as_is: bool = True,
    **plan: Any,
):
    paged = batch.paged(page_size, plan.pop("kv_layout", "NHD"))
    wrapper = paged_wrapper(backend, kv_layout=paged.kv_layout)
    types = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, page_size, **types, **options.plan_kwargs(), **plan)
    assert wrapper._backend == backend and wrapper._plan_info.schedule.as_is == as_is
    return wrapper.run(batch.q, paged.cache, return_lse=True, **(run_kwargs or {}))


def run(reader: str, batch: Batch, page_size: int, options: Options, **plan: Any):
    """Pages, or where the size is 0 the tensors themselves, which fa2 alone reads."""
    if page_size:
        return run_paged(batch, page_size, options, backend=reader, **plan)
    return run_ragged(batch, options, **plan)


def sources(*page_sizes: int) -> list[Any]:
    """(reader, size of pages or 0, type): tensors, and e5m2, are fa2's alone."""
    of_fa3 = [pytest.param("fa3", size, E4M3, marks=pytest.mark.hopper) for size in page_sizes if size]
    return [*itertools.product(["fa2"], page_sizes, FP8), *of_fa3]


SOURCES = [("fa2", 0), ("fa2", 16), pytest.param("fa3", 16, marks=pytest.mark.hopper)]  # of e4m3


def run_ragged(batch: Batch, options: Options, run_kwargs: dict[str, Any] | None = None, **plan: Any):
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa2")
    types = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **types, **options.plan_kwargs(), **plan)
    assert wrapper._plan_info.schedule.as_is
    return wrapper.run(batch.q, batch.k, batch.v, return_lse=True, **(run_kwargs or {}))


LENS = ([1, 7, 0, 20], [300, 7, 5, 130])


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("reader,page_size,fp8", sources(0, 16), ids=str)
def test_types_and_head_dims(reader, page_size, fp8, dtype, dim):
    batch = make_batch(*LENS, 4, 2, dim, dtype=dtype, kv_dtype=fp8, device=DEVICE)
    options = Options(causal=True)
    check(run(reader, batch, page_size, options), batch, options)


# More than 32 rows of four heads, on average: the kernel for tiles of more rows. Some of its tiles have fewer.
MORE_LENS = ([16, 33, 1, 0, 20], [300, 70, 5, 9, 640])


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("reader,page_size,fp8", sources(0, 5, 16), ids=str)
def test_more_rows(reader, page_size, fp8, dtype, dim):
    batch = make_batch(*MORE_LENS, 8, 2, dim, dtype=dtype, kv_dtype=fp8, device=DEVICE)
    options = Options(causal=True)
    check(run(reader, batch, page_size, options), batch, options)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 9, 12, 16, 17, 24, 32])
def test_more_rows_of_a_tile(tokens):
    # Of 16 rows of two row tiles and two groups of warps some, or all, are nobody's.
    batch = make_batch([tokens] * 3, [700, 65, 33], 8, 2, 128, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True)
    check(run_ragged(batch, options), batch, options)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 16], ids=["few rows", "more rows"])
def test_queries_beyond_fp16(rows, dim):
    # Rows of bf16 that fp16 has no numbers for get a factor; one row's does not show in others.
    batch = make_batch([rows, rows], [300, 70], 8, 2, dim, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    plain = batch.q.clone()
    options = Options(causal=True)
    want, _ = run_paged(batch, 16, options)
    for exponent in (-100, -20, -7, 16, 60):
        scale = 2.0**exponent
        batch.q.copy_(plain).mul_(scale)
        scaled = Options(causal=True, sm_scale=dim**-0.5 / scale)
        out, lse = run_paged(batch, 16, scaled)
        assert_close(out, want, atol=1e-2, rtol=1e-2)
        check((out, lse), batch, scaled)
    batch.q.copy_(plain)
    batch.q[:, 1::2] *= 2.0**-30
    batch.q[:, 3] = float("inf")
    out, _ = run_paged(batch, 16, options)
    assert_bitwise(out[:, ::2].contiguous(), want[:, ::2].contiguous())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("reader,page_size,fp8", sources(1), ids=str)
def test_every_finite_number(reader, page_size, fp8, dim, dtype):
    # A row that sees one key has its value as output. A query of ones sums up the key.
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    finite = codes[torch.isfinite(codes.view(fp8).float())]
    count = len(finite)
    batch = make_batch([1] * count, [1] * count, 4, 1, dim, dtype=dtype, kv_dtype=fp8, device=DEVICE)
    batch.q.fill_(0.0)
    step = 2.0**-7 if fp8 == torch.float8_e4m3fn else 2.0**-14  # logits below 500: the exponents' rounding stays small
    batch.q[..., 1::2] = step
    for x in (batch.k, batch.v):
        x.view(torch.uint8).copy_(finite[:, None, None].expand(x.shape))
    batch.k.view(torch.uint8)[..., ::2] = batch.k.view(torch.uint8)[..., ::2].roll(1, 0)
    out, lse = run_paged(batch, page_size, Options(sm_scale=1.0), backend=reader)
    assert torch.equal(out, batch.v.to(dtype).expand_as(out))
    want = batch.k[..., 1].float() * (dim / 2 * step)
    torch.testing.assert_close(lse, (want * 1.4426950408889634).expand_as(lse), rtol=1e-6, atol=1e-6)


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("reader", READERS)
def test_pages(reader, dim, kv_layout, page_size):
    batch = make_batch([3, 1, 18], [40, 333, 200], 4, 2, dim, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True)
    check(run_paged(batch, page_size, options, kv_layout=kv_layout, backend=reader), batch, options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (6, 2), (8, 1), (40, 8), (32, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_rows_of_a_tile(rows, heads):
    # 16 rows or fewer, 32, and more: warps share keys in one way or another.
    batch = make_batch([rows] * 3, [400, 65, 1], *heads, 128, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True)
    check(run_ragged(batch, options), batch, options)


MODES = {
    "full": Options(),
    "window": Options(causal=True, window_left=37),
    "cap": Options(causal=True, logits_soft_cap=8.0),
    "negative scale": Options(sm_scale=-0.1),
    "alibi": Options(causal=True, pos_encoding_mode="ALIBI"),
}


@pytest.mark.pairwise
@pytest.mark.gpu
@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("reader,page_size", SOURCES)
@pytest.mark.parametrize("lens", [LENS, MORE_LENS], ids=["few rows", "more rows"])
def test_modes(lens, reader, page_size, dim, name):
    batch = make_batch(*lens, 8, 2, dim, kv_dtype=E4M3, device=DEVICE)
    options = MODES[name]
    check(run(reader, batch, page_size, options), batch, options)


@pytest.mark.gpu
@pytest.mark.parametrize("split", [{}, {"disable_split_kv": True}, {"fixed_split_size": 8}], ids=str)
@pytest.mark.parametrize("rows", [[1, 5], [16, 20]], ids=["few rows", "more rows"])
@pytest.mark.parametrize("reader", READERS)
def test_sinks_and_split_keys(reader, rows, split):
    batch = make_batch(rows, [5000, 2300], 8, 2, 128, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True, sinks=torch.randn(8, device=DEVICE))
    check(run_paged(batch, 64, options, dict(sinks=options.sinks), reader, **split), batch, options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "reader,page_size,fp8",
    [("fa2", 0, E5M2), ("fa2", 5, E5M2), *(pytest.param("fa3", n, E4M3, marks=pytest.mark.hopper) for n in (5, 16))],
)
def test_masks_of_any_form(reader, page_size, fp8):
    batch = make_batch([3, 20], [300, 150], 4, 2, 64, dtype=torch.bfloat16, kv_dtype=fp8, device=DEVICE)
    masks = batch.random_masks(0.3)
    masks[0][:, 64:192] = False  # values that nobody sees
    for x in (batch.k, batch.v):
        poison_(x[70:190])
    options = Options(custom_masks=masks)
    flat = torch.cat([mask.flatten() for mask in masks])
    clean = Batch(batch.qo_lens, batch.kv_lens, batch.q, batch.k.clone(), batch.v.clone())
    for x in (clean.k, clean.v):
        x[70:190].view(torch.uint8).zero_()
    check(run(reader, batch, page_size, Options(), custom_mask=flat), clean, options)


@pytest.mark.gpu
@pytest.mark.parametrize("tensors", [False, True], ids=["floats", "tensors"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_scales(reader, dtype, tensors):
    batch = make_batch(*LENS, 4, 2, 128, dtype=dtype, kv_dtype=E4M3, device=DEVICE)
    scales: dict[str, Any] = dict(k_scale=0.7, v_scale=1.3)
    options = Options(causal=True, **scales)
    if tensors:
        scales = {name: torch.tensor([value], device=DEVICE) for name, value in scales.items()}
    check(run_paged(batch, 16, options, scales, reader), batch, options)


@pytest.mark.gpu
def test_rows_beyond_a_request_hold_anything():
    # paged() fills what nothing refers to with NaN; here the ragged rows between requests, too.
    lens = ([2, 3], [50, 70])
    batch = make_batch(*lens, 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True)
    check(run_paged(batch, 64, options), batch, options)
    k, v = (poison_(torch.empty(120 + 64, 2, 64, dtype=E4M3, device=DEVICE)) for _ in range(2))
    k[:120], v[:120] = batch.k, batch.v
    out, _ = run_ragged(batch, options)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa2")
    types = dict(q_data_type=batch.q.dtype, kv_data_type=E4M3)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **types, causal=True)
    assert_bitwise(wrapper.run(batch.q, k, v), out)


@pytest.mark.gpu
@pytest.mark.parametrize("pitch", [72, 80])
def test_caches_of_other_alignment_are_copied(pitch):
    batch = make_batch([2, 3], [50, 70], 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    wide = torch.zeros(2, 120, 2, pitch, dtype=torch.uint8, device=DEVICE).view(E4M3)
    views = Batch(batch.qo_lens, batch.kv_lens, batch.q, *(wide[i, ..., :64] for i in range(2)))
    views.k.copy_(batch.k)
    views.v.copy_(batch.v)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa2")
    types = dict(q_data_type=batch.q.dtype, kv_data_type=E4M3)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **types, causal=True)
    for _ in range(2):
        check(wrapper.run(batch.q, views.k, views.v, return_lse=True), batch, Options(causal=True))
    others = [key for key in wrapper._plan_info.other_schedules if not key[2]]
    assert len(others) == (pitch == 72)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_single_calls(rows):
    batch = make_batch([rows], [3000], 8, 2, 128, dtype=torch.bfloat16, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True, k_scale=0.5, v_scale=2.0)
    call = ck.single_prefill_with_kv_cache
    for _ in range(2):
        result = call(batch.q, batch.k, batch.v, causal=True, k_scale=0.5, v_scale=2.0, backend="fa2", return_lse=True)
        check(result, batch, options)


@pytest.mark.gpu
def test_runs_may_ask_for_copies_after_all():
    batch = make_batch([2, 3], [50, 70], 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    paged = batch.paged(8)
    wrapper = paged_wrapper()
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, kv_data_type=E4M3, causal=True)
    for mode in ("NONE", "ROPE_LLAMA", "NONE", "ROPE_LLAMA"):
        result = wrapper.forward(batch.q, paged.cache, causal=True, pos_encoding_mode=mode, return_lse=True)
        check(result, batch, Options(causal=True, pos_encoding_mode=mode))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, pytest.param(20, marks=pytest.mark.hopper)])
def test_captured_runs_follow_later_plans(rows):
    # The first plan's kernel stays, also where a later one has other averages.
    reader = "fa2" if rows == 1 else "fa3"
    steps = [([1, 1, 1], [40, 90, 50]), ([1, 0, 2], [1500, 30, 64]), ([0, 0, 1], [1, 1, 30]), ([1, 1, 1], [70, 27, 70])]
    steps = [([rows * n for n in qo_lens], kv_lens) for qo_lens, kv_lens in steps]
    batches = [make_batch(*step, 8, 2, 128, kv_dtype=E4M3, device=DEVICE, seed=n) for n, step in enumerate(steps)]

    wrapper = paged_wrapper("auto", **graph_buffers(3, 256, DEVICE))
    q = torch.zeros(3 * rows, 8, 128, dtype=torch.float16, device=DEVICE)
    cache = torch.zeros(256, 2, 8, 2, 128, device=DEVICE).to(E4M3)

    def load(batch: Batch) -> None:
        paged = batch.paged(8)
        q[: len(batch.q)] = batch.q
        cache.view(torch.uint8)[: len(paged.cache)] = paged.cache.view(torch.uint8)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, kv_data_type=E4M3, causal=True)
        assert wrapper._backend == reader and wrapper._plan_info.schedule.as_is

    load(batches[0])
    wrapper.run(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(q, cache, return_lse=True)
    for batch in batches:
        load(batch)
        graph.replay()
        check((out[: len(batch.q)], lse[: len(batch.q)]), batch, Options(causal=True))


@pytest.mark.gpu
def test_long_queries_are_computed_from_copies():
    batch = make_batch([SOME // 2 + 1], [SOME], 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    paged = batch.paged(16)
    for backend in ("auto", "fa2"):
        wrapper = paged_wrapper(backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, kv_data_type=E4M3, causal=True)
        assert not wrapper._plan_info.schedule.as_is
        check(wrapper.run(batch.q, paged.cache, return_lse=True), batch, Options(causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [{"fixed_split_size": 16}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_results_do_not_depend_on_the_batch(backend, split):
    """One row alone, and beside a prompt: neither another kernel nor another tile."""
    few = make_batch([1, 20], [2000, 600], 8, 2, 128, kv_dtype=E4M3, device=DEVICE)
    rest = make_batch([900, 1], [900, 3000], 8, 2, 128, kv_dtype=E4M3, device=DEVICE, seed=1)
    parts = [torch.cat([getattr(few, name).view(torch.uint8), getattr(rest, name).view(torch.uint8)]) for name in "kv"]
    k, v = (x.view(E4M3) for x in parts)
    many = Batch([*few.qo_lens, *rest.qo_lens], [*few.kv_lens, *rest.kv_lens], torch.cat([few.q, rest.q]), k, v)
    one = Batch(few.qo_lens[:1], few.kv_lens[:1], few.q[:1], few.k[:2000], few.v[:2000])
    results = []
    for batch in (one, few, many):
        paged = batch.paged(16)
        wrapper = paged_wrapper(backend)
        types = dict(q_data_type=batch.q.dtype, kv_data_type=E4M3, causal=True)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, **types, **split)
        results.append(wrapper.run(batch.q, paged.cache, return_lse=True))
    for (out, lse), (out_among, lse_among) in itertools.pairwise(results):
        assert_bitwise(out_among[: len(out)], out)
        assert_bitwise(lse_among[: len(lse)], lse)


@pytest.mark.gpu
def test_a_graph_wrapper_runs_fewer_rows_outside_its_graph():
    """The tile list is made for the rows of the first plan, and its tiles with it."""
    first = make_batch([16] * 4, [300] * 4, 8, 2, 128, kv_dtype=E4M3, device=DEVICE)
    later = make_batch([1] * 4, [300, 20, 7, 150], 8, 2, 128, kv_dtype=E4M3, device=DEVICE, seed=1)
    sizes = (5, 5, 100, 4)
    buffers = [torch.zeros(size, dtype=torch.int32, device=DEVICE) for size in sizes]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    wrapper = paged_wrapper(use_cuda_graph=True, **dict(zip(names, buffers)))
    options = Options(causal=True)
    for batch in (first, later):
        paged = batch.paged(16)
        types = dict(q_data_type=batch.q.dtype, kv_data_type=E4M3)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, **types, **options.plan_kwargs())
        check(wrapper.run(batch.q, paged.cache, return_lse=True), batch, options)
