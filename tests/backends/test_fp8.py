"""Attention that is e4m3 throughout: what kernels of fp8 compute, and which problems get copies of 16 bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from problems import Batch, Options, allowed_in_fp8, expect, graph_buffers, make_batch

import cutlass_kernels as ck
from cutlass_kernels._compute import half_precision, kernels
from cutlass_kernels._compute.request_facts import Layout, Request

DEVICE = "cuda:0"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DIMS = [64, 128, 256]
GPU = [pytest.mark.gpu, pytest.mark.hopper]

OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window_left=50),
    "window alone": Options(window_left=200),
    "cap": Options(causal=True, logits_soft_cap=2.0),
    "negative scale": Options(sm_scale=-0.1),
    "scales": Options(causal=True, q_scale=0.5, k_scale=1.7, v_scale=-1.3),
}


# --- who computes ------------------------------------------------------------------------------------------------


def request(features: str = "", dtype=E4M3, o=torch.bfloat16, dims=(128, 128), layout: Layout | None = None) -> Request:
    return Request("cuda", 90, dtype, dtype, o, 8, 2, *dims, frozenset(features.split()), layout)


@pytest.fixture
def reads_as_is(extension):
    if not any(kernel["q_dtype"] == "float8_e4m3fn" for kernel in kernels.kernels()):
        pytest.skip("this build has no fp8 kernels")
    return kernels.reads_as_is


READ = ["", "causal window soft_cap sinks paged", "head_scale", "tensor_scale paged", "chunk"]
COPIED = ["custom_mask", "multi_item", "alibi", "rope", "fp8_copies", "stats", "head_scale rope"]


@pytest.mark.parametrize("features", READ)
@pytest.mark.parametrize("o", [torch.float16, torch.bfloat16, E4M3], ids=str)
def test_fp8_is_read_as_it_is(reads_as_is, features, o):
    assert reads_as_is("fa3", request(features, o=o))
    assert not reads_as_is("fa2", request(features, o=o))


@pytest.mark.parametrize("features", COPIED)
def test_what_kernels_of_fp8_lack_is_computed_from_copies(reads_as_is, features):
    asked = request(features)
    assert not reads_as_is("fa3", asked)
    prepared = half_precision.prepared_request(asked)
    assert prepared is not None and prepared.q_dtype == torch.bfloat16
    assert prepared.features == asked.features - {"rope", "fp8_copies"}


@pytest.mark.parametrize("changed", [dict(dtype=E5M2), dict(o=E5M2), dict(o=torch.float32), dict(dims=(512, 512))])
def test_other_types_and_sizes_are_not(reads_as_is, changed):
    assert not reads_as_is("fa3", request(**changed))


def test_strides_that_maps_do_not_take_are_copied(reads_as_is):
    assert reads_as_is("fa3", request(layout=Layout(2, 2, ())))
    assert not reads_as_is("fa3", request(layout=Layout(2, 2, (("k", 0, 128),))))


@pytest.mark.parametrize("features", [*READ, *COPIED])
@pytest.mark.parametrize("o", ["bfloat16", "float8_e4m3fn"])
def test_fa3_serves_both(reads_as_is, features, o):
    said = ck.explain(device="cuda", compute_capability=90, q_dtype=E4M3, o_dtype=o, features=features.split())
    assert said.selected == "fa3", said


def test_e5m2_is_not_written(reads_as_is):
    said = ck.explain(device="cuda", compute_capability=90, q_dtype=E4M3, o_dtype=E5M2)
    assert said.selected == "reference" and "float8_e5m2" in str(said.reasons["fa3"]), said


# --- what is computed --------------------------------------------------------------------------------------------


def check(out: torch.Tensor, lse: torch.Tensor | None, batch: Batch, options: Options, lse_rtol: float = 1e-5) -> None:
    want = expect(batch, options)
    assert_close(out, want.out, atol=2e-2, rtol=1e-2, allowed=allowed_in_fp8(batch, options))
    # Rounding errors are independent of one another, so that on the whole far less is lost than an element may lose.
    error = (out.double() - want.out).square().mean().sqrt()
    size = allowed_in_fp8(batch, options).square().mean().sqrt() * 16
    assert float(error) <= 0.03 * float(size) + 2e-3
    if lse is not None:
        assert_lse_close(lse, want.lse, atol=5e-3, rtol=lse_rtol)


def scales_of(options: Options) -> dict[str, Any]:
    return dict(q_scale=options.q_scale, k_scale=options.k_scale, v_scale=options.v_scale)


def attend(
    batch: Batch, options: Options, o_dtype=torch.bfloat16, page_size: int = 0, layout: str = "NHD", **run: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """By the wrappers of fa3; a page size says which."""
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    types = dict(q_data_type=E4M3, kv_data_type=E4M3, o_data_type=o_dtype)
    run = {**scales_of(options), **run}
    if page_size:
        paged = batch.paged(page_size, layout)
        of_pages = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, layout, backend="fa3")
        of_pages.plan(batch.qo_indptr(), *paged.table(), *batch.heads, page_size, **types, **options.plan_kwargs())
        return of_pages.run(batch.q, paged.cache, return_lse=True, **run)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **types, **options.plan_kwargs())
    return wrapper.run(batch.q, batch.k, batch.v, return_lse=True, **run)


def fp8_batch(qo_lens: list[int], kv_lens: list[int], heads=4, kv_heads=2, dim=128, seed: int = 0) -> Batch:
    return make_batch(qo_lens, kv_lens, heads, kv_heads, dim, dtype=E4M3, device=DEVICE, seed=seed)


def gpu(test):
    for mark in GPU:
        test = mark(test)
    return test


# Tiles of 128 or 192 rows and blocks of 128 keys: just below, at and just beyond; requests without rows, or keys.
LENS = ([200, 0, 5, 128, 1, 300, 70], [200, 60, 0, 129, 700, 520, 30])


@gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", OPTIONS)
def test_ragged(dim, name):
    batch = fp8_batch(*LENS, dim=dim)
    check(*attend(batch, OPTIONS[name]), batch, OPTIONS[name])


@pytest.mark.pairwise
@gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("page_size,layout", [(8, "NHD"), (16, "HND"), (24, "NHD"), (64, "NHD"), (256, "HND")])
@pytest.mark.parametrize("name", ["full", "window"])
def test_pages_with_nan_in_what_is_not_used(dim, page_size, layout, name):
    batch = fp8_batch(*LENS, dim=dim)
    check(*attend(batch, OPTIONS[name], page_size=page_size, layout=layout), batch, OPTIONS[name])


@gpu
@pytest.mark.parametrize("page_size", [1, 5, 12])
def test_other_pages_are_copied(page_size):
    batch = fp8_batch([30, 7], [100, 90])
    check(*attend(batch, OPTIONS["causal"], page_size=page_size), batch, OPTIONS["causal"])


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_nan_beside_a_request(dim):
    # What lies behind the last key of a request, and keys that nobody sees.
    batch = fp8_batch([100, 90], [100, 333], dim=dim)
    options = Options(causal=True, window_left=20)
    for x in (batch.k, batch.v):
        x.view(torch.uint8)[100 : 100 + 333 - 90 - 20] = 0x7F
    wide = dataclasses.replace(batch, k=torch.nan_to_num(batch.k.float()), v=torch.nan_to_num(batch.v.float()))
    out, lse = attend(batch, options)
    check(out, lse, dataclasses.replace(wide, q=batch.q.float()), options)


@pytest.mark.pairwise
@gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lens", [(1000, 1000), (129, 4097), (64, 100), (3, 2000), (700, 300)], ids=str)
def test_single(dim, causal, lens):
    batch = fp8_batch([lens[0]], [lens[1]], dim=dim)
    options = Options(causal=causal)
    call = ck.single_prefill_with_kv_cache
    for o_dtype in (torch.float16, torch.bfloat16):
        kwargs: dict[str, Any] = dict(o_dtype=o_dtype, causal=causal, backend="fa3")
        out, lse = call(batch.q, batch.k, batch.v, return_lse=True, **kwargs)
        assert out.dtype == o_dtype
        check(out, lse, batch, options)
        assert_bitwise(call(batch.q, batch.k, batch.v, **kwargs), out)


@gpu
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (6, 2)], ids=str)
def test_short_queries_share_keys(dim, heads):
    batch = fp8_batch([1, 3, 1, 2, 0], [1, 500, 3000, 129, 7], *heads, dim=dim)
    for name in ("causal", "cap"):
        check(*attend(batch, OPTIONS[name]), batch, OPTIONS[name])
        check(*attend(batch, OPTIONS[name], page_size=16), batch, OPTIONS[name])


@gpu
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("lens", [LENS, ([1, 4, 1], [300, 2000, 5])], ids=["rows", "packed"])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_scales_of_heads(lens, page_size, soft_cap):
    batch = fp8_batch(*lens, 8, 2)
    scales = tuple(torch.linspace(0.3, 1.9, n, device=DEVICE) for n in (8, 2, 2))
    options = Options(causal=True, logits_soft_cap=soft_cap)
    q_scale, k_scale, v_scale = scales
    out, lse = attend(batch, options, page_size=page_size, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    # Logits are up to 3.6 times those of the other tests, and so is what tensor cores lose of them: they add products
    # of fp8 with about 14 bits.
    check(out, lse, batch.dequantized(*scales), options, lse_rtol=1e-3)


@gpu
def test_scales_that_are_not_positive():
    batch = fp8_batch([150], [300], 4, 2)
    scales = (torch.tensor([-1.0, 0.0, 0.5, 2.0], device=DEVICE), torch.ones(2, device=DEVICE))
    scales = (*scales, torch.tensor([-2.0, 0.0], device=DEVICE))
    out, lse = attend(batch, Options(), q_scale=scales[0], k_scale=scales[1], v_scale=scales[2])
    wide = batch.dequantized(*scales)
    want, allowed = expect(wide), allowed_in_fp8(wide)
    assert_close(out, want.out, atol=2e-2, rtol=1e-2, allowed=allowed)
    assert_lse_close(lse, want.lse, atol=5e-3)


@gpu
@pytest.mark.parametrize("lens", [([300, 0, 40], [300, 10, 0]), ([1, 2], [700, 0])], ids=["rows", "packed"])
def test_sinks(lens):
    batch = fp8_batch(*lens, 8, 2)
    sinks = torch.linspace(-2, 4, 8, device=DEVICE)
    options = Options(causal=True, sinks=sinks)
    check(*attend(batch, options, sinks=sinks), batch, options)


@gpu
@pytest.mark.parametrize("dim", DIMS)
def test_maxima_that_rise(dim):
    # Blocks are taken from the last to the first, so keys that grow towards the first raise the maximum at each step:
    # gently, which P's headroom takes, a little more than that, and by far more.
    for step in (0.3, 2.0, 6.0, 40.0):
        batch = fp8_batch([200], [2000], dim=dim)
        growth = step * torch.linspace(1.0, 0.0, 2000, device=DEVICE)[:, None, None]
        q, k = torch.full_like(batch.q.float(), 1.0), batch.k.float() * 0.1 + growth
        batch = dataclasses.replace(batch, q=q.to(E4M3), k=k.to(E4M3))
        options = Options(sm_scale=1.0 / dim * 8)
        check(*attend(batch, options), batch, options)


@gpu
@pytest.mark.parametrize("level", [-448.0, 0.0, 448.0])
def test_equal_and_extreme_logits(level):
    batch = fp8_batch([140], [600])
    batch = dataclasses.replace(batch, q=torch.full_like(batch.q.float(), 1.0).to(E4M3))
    k = torch.full_like(batch.k.float(), level)
    batch = dataclasses.replace(batch, k=k.to(E4M3))
    options = Options(causal=True, sm_scale=1.0)
    out, lse = attend(batch, options)
    want = expect(batch, options)
    assert_close(out, want.out, atol=2e-2, rtol=1e-2, allowed=allowed_in_fp8(batch, options))
    torch.testing.assert_close(lse.double(), want.lse.double(), rtol=1e-6, atol=5e-3)


@gpu
def test_nan_in_what_is_seen_stays_nan():
    batch = fp8_batch([130], [130], 2, 1, dim=128)
    batch.q.view(torch.uint8)[7, 0] = 0x7F
    batch.v.view(torch.uint8)[100, 0, 5] = 0x7F
    out, _ = attend(batch, Options(causal=True))
    assert bool(torch.isnan(out[7, 0]).all())
    assert bool(torch.isnan(out[100:, :, 5]).all())
    clean = torch.isnan(out)
    clean[7, 0], clean[:, :, 5] = False, False
    assert not bool(clean.any())


@gpu
@pytest.mark.parametrize("mode", ["custom mask", "ROPE_LLAMA", "ALIBI", "page of 5", "8-byte rows"])
def test_what_gets_copies(mode):
    batch = fp8_batch([40, 9], [150, 9])
    options, page_size = Options(causal=True), 0
    if mode == "page of 5":
        page_size = 5
    elif mode == "8-byte rows":
        padded = [torch.cat([x, x[..., :8]], -1)[..., :-8] for x in (batch.q, batch.k, batch.v)]
        batch = dataclasses.replace(batch, q=padded[0], k=padded[1], v=padded[2])
        assert batch.q.stride(1) % 16 == 8
    elif mode == "custom mask":
        masks = batch.random_masks()
        options = Options(custom_masks=masks)
        workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
        flat = torch.cat([mask.reshape(-1) for mask in masks])
        types = dict(q_data_type=E4M3, o_data_type=torch.bfloat16)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, custom_mask=flat, **types)
        out, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
        check(out, lse, batch, options)
        return
    else:
        options = Options(causal=True, pos_encoding_mode=mode)
    check(*attend(batch, options, page_size=page_size), batch, options)


@gpu
@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_runs_may_change_between_copies_and_none(kind):
    batch = fp8_batch([40, 9], [150, 30])
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)
    types = dict(q_data_type=E4M3, kv_data_type=E4M3, o_data_type=torch.bfloat16, causal=True)
    wrapper: Any
    if kind == "ragged":
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa3")
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **types)
        tensors = (batch.k, batch.v)
    else:
        paged = batch.paged(16)
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa3")
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, **types)
        tensors = (paged.cache,)
    for mode in ("NONE", "ALIBI", "NONE", "ROPE_LLAMA", "ALIBI", "NONE"):
        options = Options(causal=True, pos_encoding_mode=mode)
        out = wrapper.forward(batch.q, *tensors, causal=True, pos_encoding_mode=mode)
        check(out, None, batch, options)


@gpu
def test_captured_runs_follow_later_plans():
    steps = [([4, 4], [40, 90]), ([1, 7], [150, 7]), ([8, 0], [33, 5]), ([4, 4], [40, 90])]
    batches = [fp8_batch(*step, dim=64, seed=n) for n, step in enumerate(steps)]

    workspace = torch.zeros(16 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa3", **graph_buffers(2, 64, DEVICE))
    q = torch.zeros(8, 4, 64, device=DEVICE).to(E4M3)
    cache = torch.zeros(32, 2, 8, 2, 64, device=DEVICE).to(E4M3)
    options = Options(causal=True)

    def load(batch: Batch) -> None:
        paged = batch.paged(8)
        q[: len(batch.q)] = batch.q
        cache.view(torch.uint8)[: len(paged.cache)] = paged.cache.view(torch.uint8)
        types = dict(q_data_type=E4M3, o_data_type=torch.bfloat16)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, causal=True, **types)

    load(batches[0])
    wrapper.run(q, cache)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(q, cache, return_lse=True)
    for batch in batches[1:]:
        load(batch)
        graph.replay()
        check(out[: len(batch.q)], lse[: len(batch.q)], batch, options)
