"""BatchDecodeWithPagedKVCacheWrapper: one or a few rows of every request, planned without offsets of rows."""

from __future__ import annotations

import copy
import functools
import pickle

import oracle
import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from decode_problems import check, decode_batch, plan, planned, wanted
from problems import Batch, Options, Paged, make_batch

import cutlass_kernels as ck
from cutlass_kernels import decode
from cutlass_kernels._planned import paged_decode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


# --- what is computed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_page_sizes_layouts_and_forms(target, page_size, kv_layout, form):
    batch = decode_batch(target, [40, 1, 130, 64])
    check(target, batch, batch.paged(page_size, kv_layout, form))


@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_caches_without_the_dimension_of_page_size_one(target, kv_layout, form):
    batch = decode_batch(target, [40, 13])
    paged = batch.paged(1, kv_layout, form)
    dim = 1 if kv_layout == "NHD" else 2
    paged.cache = paged.cache.squeeze(dim + 1) if form == "stacked" else tuple(x.squeeze(dim) for x in paged.cache)
    check(target, batch, paged)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize(
    "kv_lens",
    [[0], [7], [0, 0, 0], [5, 0, 70], [0, 33, 1], [16, 32, 48], [*range(1, 129)], [33000, 3]],
    ids=lambda lens: f"{len(lens)}-requests-{sum(lens)}",
)
def test_lengths(target, kv_lens, q_len):
    batch = decode_batch(target, kv_lens, q_len, (2, 1, 64))
    check(target, batch, batch.paged(16))


@pytest.mark.runs_nothing("there are no rows")
def test_no_requests(target):
    batch = decode_batch(target, [])
    paged = batch.paged(16)
    out, lse = planned(target, batch, paged).run(batch.q, paged.cache, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_group_sizes(target, group, q_len):
    batch = decode_batch(target, [30, 9, 140], q_len, (2 * group, 2, 64))
    check(target, batch, batch.paged(16, "HND"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_head_dims(target, head_dim, dtype):
    batch = decode_batch(target, [50, 20], heads=(4, 2, head_dim), dtype=dtype)
    check(target, batch, batch.paged(16))


@pytest.mark.parametrize("q_len", [2, 3, 4, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_several_rows_of_a_request(target, q_len, page_size):
    # Also of requests with fewer keys than rows: the first rows then stand before the first key, and see none.
    batch = decode_batch(target, [q_len, 40, q_len - 1, 0, 1, 700], q_len)
    check(target, batch, batch.paged(page_size))
    check(target, batch, batch.paged(page_size), Options(window_left=2))


OPTIONS = {
    "window of one": Options(window_left=0),
    "window": Options(window_left=20),
    "wide window": Options(window_left=1000),
    "cap": Options(logits_soft_cap=3.0),
    "scale": Options(sm_scale=0.3),
    "alibi": Options(pos_encoding_mode="ALIBI"),
    "alibi, cap, window": Options(pos_encoding_mode="ALIBI", logits_soft_cap=5.0, window_left=30),
    "rope": Options(pos_encoding_mode="ROPE_LLAMA"),
    "rope of another base": Options(pos_encoding_mode="ROPE_LLAMA", rope_scale=2.0, rope_theta=5e5, window_left=30),
    "sinks": Options(sinks=torch.tensor([-1.0, 0.0, 2.0, 5.0])),
    "sinks, cap, window": Options(sinks=torch.tensor([3.0, 0.0, -2.0, 1.0]), logits_soft_cap=4.0, window_left=9),
}


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(target, name, q_len):
    options = Options(**vars(OPTIONS[name]))
    if options.sinks is not None:
        options.sinks = options.sinks.to(target.device)
    batch = decode_batch(target, [30, 9, 0, 140], q_len)
    check(target, batch, batch.paged(16), options)


@pytest.mark.parametrize("in_tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("q_len", [1, 4])
def test_fp8_caches(target, q_len, kv_dtype, in_tensors):
    batch = decode_batch(target, [50, 0, 20], q_len, (4, 2, 128), dtype=torch.bfloat16, kv_dtype=kv_dtype)
    paged, scales = batch.paged(16), dict(q_scale=1.1, k_scale=0.8, v_scale=1.2)
    want = wanted(batch, Options(**scales))
    wrapper = planned(target, batch, paged)
    if in_tensors:
        scales = {name: torch.tensor([x], device=target.device) for name, x in scales.items()}
    out, lse = wrapper.run(batch.q, paged.cache, return_lse=True, **scales)
    assert_close(out, want.out, atol=1e-2, rtol=1e-2, dtype=torch.bfloat16)
    assert_lse_close(lse, want.lse, atol=5e-3)


def test_pages_shared_between_requests(target):
    # Two requests start with the same two pages, and the second names one of them twice.
    page, heads, dim = 4, 2, 64
    cache = torch.randn(6, 2, page, heads, dim).half().to(target.device)
    offsets, indices, last = [0, 3, 7], [5, 2, 0, 5, 2, 5, 1], [2, 4]
    requests = oracle.gather_pages(cache[:, 0], cache[:, 1], offsets, indices, last, "NHD")
    q = torch.randn(2, 4, dim).half().to(target.device)
    batch = Batch([1, 1], [10, 16], q, torch.cat([k for k, _ in requests]), torch.cat([v for _, v in requests]))
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    # The list is longer than the table needs; what follows is not a page number at all.
    table = [torch.tensor(x, dtype=torch.int32) for x in (offsets, [*indices, 10**6, -7], last)]
    wrapper.plan(*table, 4, heads, dim, page)
    want = wanted(batch)
    assert_close(wrapper.run(q, cache), want.out, want.baseline)


@pytest.mark.parametrize("q_len", [1, 4])
def test_it_is_prefill_with_as_many_rows(target, q_len):
    batch = decode_batch(target, [300, 9, 0, 1400], q_len)
    paged = batch.paged(16)
    prefill = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    prefill.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, causal=q_len > 1)
    ours = planned(target, batch, paged).run(batch.q, paged.cache, return_lse=True)
    for a, b in zip(ours, prefill.run(batch.q, paged.cache, return_lse=True)):
        assert_bitwise(a, b)


# --- arguments of plan() and run() -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(4))
def test_index_tensors_on_either_device(target, which):
    batch = decode_batch(target, [20, 0, 90], 2)
    paged = batch.paged(16)
    tables = [x.to(target.device) if which in (n, 3) else x for n, x in enumerate(paged.table())]
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    want = wanted(batch)
    for _ in range(2):
        wrapper.plan(*tables, *batch.heads, 16, q_len_per_req=2)
        assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_seq_lens(target):
    batch = decode_batch(target, [20, 90])
    for where in ("cpu", target.device):
        lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=where)
        tables = torch.zeros(2, 6, dtype=torch.int32)
        check(target, batch, batch.paged(16), where=where, seq_lens=lens, block_tables=tables)


def test_run_spellings(target):
    batch = decode_batch(target, [20, 90])
    paged = batch.paged(16)
    wrapper = planned(target, batch, paged)
    plain = wrapper.run(batch.q, paged.cache)
    for out, lse in (
        wrapper.run(batch.q, paged.cache, return_lse=True),
        wrapper.run_return_lse(batch.q, paged.cache),
        wrapper.run(batch.q, paged.cache, None, None, None, True),
        wrapper.run(batch.q, paged.cache, return_lse=True, enable_pdl=True, window_left=-1, q_len_per_req=1),
    ):
        assert torch.equal(out, plain) and lse.shape == (2, 4)
    scales = dict(q_scale=2.0, k_scale=0.5, v_scale=3.0)
    want = wanted(batch, Options(**scales))
    for out in (wrapper.run(batch.q, paged.cache, 2.0, 0.5, 3.0), wrapper.run(batch.q, paged.cache, **scales)):
        assert_close(out, want.out, want.baseline, atol=3e-3)


@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_out_and_lse_are_used(target, layout):
    batch = decode_batch(target, [20, 0, 90], 2)
    paged = batch.paged(16)
    wrapper = planned(target, batch, paged)
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full((6, 4) if layout == "NH" else (4, 6), torch.nan, device=target.device)
    got = wrapper.run(batch.q, paged.cache, out=out, lse=lse, return_lse=True, lse_base="ln", lse_layout=layout)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    want = wanted(batch)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse if layout == "NH" else lse.t().contiguous(), want.lse * 0.6931471805599453)


@pytest.mark.parametrize(
    "types,q_dtype,kv_dtype",
    [
        (dict(), torch.float16, torch.float16),
        (dict(data_type="bfloat16"), torch.bfloat16, torch.bfloat16),
        (dict(q_data_type=torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (dict(data_type=E4M3), torch.float16, E4M3),
        (dict(data_type=E4M3, q_data_type=torch.bfloat16), torch.bfloat16, E4M3),
        (dict(data_type=torch.bfloat16, kv_data_type=E4M3), torch.bfloat16, E4M3),
    ],
    ids=str,
)
def test_data_types(target, types, q_dtype, kv_dtype):
    batch = decode_batch(target, [20, 90], dtype=q_dtype, kv_dtype=kv_dtype)
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    for call in (wrapper.plan, functools.partial(ck.fast_decode_plan, wrapper)):
        call(*paged.table(), *batch.heads, 16, **types)
        assert (wrapper._cached_q_data_type, wrapper._cached_kv_data_type) == (q_dtype, kv_dtype)
        assert_close(wrapper.run(batch.q, paged.cache), wanted(batch).out, atol=1e-2, rtol=1e-2, dtype=q_dtype)


def test_positional_plan(target):
    batch = decode_batch(target, [20, 9])
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace())
    # ..., page_size, pos, window_left, cap, types of q, kv, o and both, sm_scale, rope (2), non_blocking, block_tables,
    # seq_lens, fixed_split_size, disable_split_kv, q_len_per_req
    types = ("float16", "float16", None, None)
    wrapper.plan(
        *paged.table(), 4, 2, 64, 16, "NONE", 6, 3.0, *types, 0.2, None, None, True, None, None, None, False, 1
    )
    want = wanted(batch, Options(window_left=6, logits_soft_cap=3.0, sm_scale=0.2))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_replan_and_forward(target):
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    for seed, (kv_lens, q_len, page) in enumerate(
        [([20, 9], 1, 16), ([4] * 9, 2, 1), ([90], 8, 64), ([3, 0, 50], 1, 16)]
    ):
        batch = decode_batch(target, kv_lens, q_len, seed=seed)
        paged = batch.paged(page)
        wrapper.begin_forward(*paged.table(), *batch.heads, page, sm_scale=0.01, q_len_per_req=q_len)
        want = wanted(batch, Options(sm_scale=0.01))
        assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)
        # forward() replaces every planned option, by its defaults where it is given none.
        assert_close(wrapper.forward(batch.q, paged.cache), wanted(batch).out, wanted(batch).baseline)
        options = Options(window_left=4, logits_soft_cap=2.0, sm_scale=0.3, k_scale=0.5, v_scale=2.0)
        want = wanted(batch, options)
        given = dict(options.plan_kwargs(), k_scale=0.5, v_scale=2.0)
        out, lse = wrapper.forward_return_lse(batch.q, paged.cache, **given)
        assert_close(out, want.out, want.baseline, atol=3e-3)
        assert_lse_close(lse, want.lse)
        wrapper.end_forward()


def test_properties(target):
    make, workspace = ck.BatchDecodeWithPagedKVCacheWrapper, target.workspace()
    for tensor_cores in (False, True):
        wrapper = make(workspace, "NHD", False, tensor_cores)
        assert wrapper.use_tensor_cores is tensor_cores and wrapper.is_cuda_graph_enabled is False
    batch = decode_batch(target, [20, 9])
    paged = batch.paged(16)
    wrapper = planned(target, batch, paged)
    float_bytes, int_bytes = wrapper.workspace_size(*paged.table(), *batch.heads, 16)
    wrapper.reset_workspace_buffer(target.workspace(max(float_bytes, 1)), target.workspace(max(int_bytes, 1)))
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper.run(batch.q, paged.cache)
    assert wrapper.resolved_backend in (target.backend, "auto")
    plan(wrapper, batch, paged)
    assert wrapper.resolved_backend == wrapper._backend != "auto"
    assert_close(wrapper.run(batch.q, paged.cache), wanted(batch).out, wanted(batch).baseline)


@pytest.mark.parametrize("heads,requests,q_len", [((1, 1), 6, 3), ((4, 1), 5, 1), ((8, 2), 3, 1), ((4, 2), 3, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_workspace_of_the_size_that_is_told_is_enough(target, heads, requests, q_len, head_dim):
    # Few key heads and requests: how keys are split, and who merges them, is then another matter on every device.
    batch = decode_batch(target, [2000] * requests, q_len, (*heads, head_dim))
    paged = batch.paged(16)
    told = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    types = dict(q_data_type=batch.q.dtype, q_len_per_req=q_len)
    sizes = told.workspace_size(*paged.table(), *batch.heads, 16, **types)
    assert min(sizes) >= 16
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(max(sizes[0], 1)), backend=target.backend)
    wrapper.reset_workspace_buffer(*(target.workspace(max(size, 1)) for size in sizes))
    wrapper.plan(*paged.table(), *batch.heads, 16, **types)
    assert_close(wrapper.run(batch.q, paged.cache), wanted(batch).out, wanted(batch).baseline)


def test_names_are_where_engines_look():
    for name in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
        "fast_decode_plan",
    ):
        assert getattr(ck, name) is getattr(decode, name) and name in ck.__all__


def test_a_compiled_function_runs_what_is_planned(target):
    torch._dynamo.reset()
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    run = torch.compile(lambda q, cache: wrapper.run(q * 2, cache) + 1, fullgraph=True, backend="aot_eager")
    for seed, kv_lens in enumerate(([20, 9], [3, 70])):
        batch = decode_batch(target, kv_lens, seed=seed)
        paged = batch.paged(16, spare=20 - sum(-(-m // 16) for m in kv_lens))
        plan(wrapper, batch, paged)
        assert_bitwise(run(batch.q, paged.cache), wrapper.run(batch.q * 2, paged.cache) + 1)


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ready(target):
    """A planned wrapper, its batch and its pages."""
    batch = decode_batch(target, [20, 9])
    paged = batch.paged(16)
    return planned(target, batch, paged), batch, paged


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_runs_that_do_not_fit_the_plan(target, ready):
    wrapper, batch, paged = ready
    run = functools.partial(wrapper.run, batch.q, paged.cache)
    fresh = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace())
    for error, words, call in (
        (RuntimeError, "no plan", lambda: fresh.run(batch.q, paged.cache)),
        (RuntimeError, "no plan", lambda: fresh.run(batch.q, paged.cache, q_len_per_req=1)),
        (ValueError, r"bfloat16.*\bfloat16", lambda: wrapper.run(batch.q.bfloat16(), paged.cache)),
        (ValueError, "bfloat16.*kv_data_type", lambda: wrapper.run(batch.q, paged.cache.bfloat16())),
        (ValueError, "1 rows.*2 requests with q_len_per_req=1", lambda: wrapper.run(batch.q[:1], paged.cache)),
        (ValueError, "4 rows.*2 requests", lambda: wrapper.run(batch.q.repeat(2, 1, 1), paged.cache)),
        (ValueError, "3 dimensions", lambda: wrapper.run(batch.q[0], paged.cache)),
        (ValueError, "q_len_per_req=2, but 1 is planned", lambda: run(q_len_per_req=2)),
        (AssertionError, "window_left=3", lambda: run(window_left=3)),
        (KeyError, "list", lambda: wrapper.run(batch.q, [paged.k_cache, paged.v_cache])),
        (NotImplementedError, "BatchDecode.*kv_cache_sf", lambda: run(kv_cache_sf=batch.q)),
        (TypeError, "q_scale.*twice", lambda: wrapper.run(batch.q, paged.cache, 2.0, q_scale=2.0)),
        (TypeError, "speed", lambda: run(speed=2)),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize(
    "value,error", [(0, ValueError), (-1, ValueError), (1.5, TypeError), (2.0, TypeError), ("2", TypeError)]
)
def test_numbers_of_rows_that_are_none(ready, value, error):
    wrapper, batch, paged = ready
    with pytest.raises(error, match=r"q_len_per_req="):
        wrapper.plan(*paged.table(), *batch.heads, 16, q_len_per_req=value)
    # The plan before is in force.
    assert_close(wrapper.run(batch.q, paged.cache), wanted(batch).out, wanted(batch).baseline)


def test_plans_that_are_refused(target, ready):
    wrapper, batch, paged = ready
    offsets, pages, last = paged.table()
    sizes = (*batch.heads, 16)
    for error, words, call in (
        (ValueError, "this batch needs 2", lambda: wrapper.plan(offsets, pages, last[:1], *sizes)),
        (ValueError, "this batch needs 4", lambda: wrapper.plan(offsets, pages, last.repeat(2)[:3], *sizes)),
        (TypeError, "last_page_len is list", lambda: wrapper.plan(offsets, pages, [4, 9], *sizes)),
        (ValueError, "1-D int32", lambda: wrapper.plan(offsets, pages, last.float(), *sizes)),
        (RuntimeError, "decreases from 3 to 2", lambda: wrapper.plan(offsets.flip(0), pages, last, *sizes)),
        (RuntimeError, r"last_page_len\[0\]=20", lambda: wrapper.plan(offsets, pages, last + 16, *sizes)),
        (ValueError, "page number -1", lambda: wrapper.plan(offsets, pages * 0 - 1, last, *sizes)),
        (ValueError, "ends at 3", lambda: wrapper.plan(offsets, pages[:2], last, *sizes)),
        (RuntimeError, "num_qo_heads=3", lambda: wrapper.plan(offsets, pages, last, 3, 2, 64, 16)),
        (KeyError, "pos_encoding_mode='ROPE'", lambda: wrapper.plan(offsets, pages, last, *sizes, "ROPE")),
        (TypeError, "data type", lambda: wrapper.plan(offsets, pages, last, *sizes, data_type=16)),
        (
            ValueError,
            "more than 2147483647 rows",
            lambda: wrapper.plan(*paged.table(), *sizes, q_len_per_req=2**30 + 1),
        ),
    ):
        with pytest.raises(error, match=words):
            call()
        assert_close(wrapper.run(batch.q, paged.cache), wanted(batch).out, wanted(batch).baseline)
    pages = pages.clone()
    pages[0] = paged.cache.size(0)
    wrapper.plan(offsets, pages, last, *sizes)
    with pytest.raises(ValueError, match="the cache has only"):
        wrapper.run(batch.q, paged.cache)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_constructors_that_are_refused(target):
    make, workspace = ck.BatchDecodeWithPagedKVCacheWrapper, target.workspace()

    def ints(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=target.device)

    for error, words, call in (
        (KeyError, "DHN", lambda: make(workspace, "DHN")),
        (ValueError, "fa9", lambda: make(workspace, backend="fa9")),
        (NotImplementedError, "BatchDecode.*jit_args", lambda: make(workspace, jit_args=[1])),
        (ValueError, "needs paged_kv_indptr_buffer", lambda: make(workspace, "NHD", True)),
        (ValueError, "needs paged_kv_indices_buffer", lambda: make(workspace, "NHD", True, False, ints(3))),
        (
            ValueError,
            "last_page_len_buffer has 3",
            lambda: make(workspace, "NHD", True, False, ints(3), ints(9), ints(3)),
        ),
        (ValueError, "indptr_buffer is empty", lambda: make(workspace, "NHD", True, False, ints(0), ints(9), ints(0))),
        (
            ValueError,
            "indptr_buffer is .*int64",
            lambda: make(workspace, "NHD", True, False, ints(3).long(), ints(9), ints(2)),
        ),
    ):
        with pytest.raises(error, match=words):
            call()


def test_sinks_as_an_attribute(ready):
    wrapper, batch, paged = ready
    wrapper._sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=batch.q.device)
    want = wanted(batch, Options(sinks=wrapper._sinks))
    out, lse = wrapper.run(batch.q, paged.cache, return_lse=True)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_offsets_of_rows_are_made_once():
    assert paged_decode._offsets(5, 2) is paged_decode._offsets(5, 2)
    assert paged_decode._offsets(5, 2).tolist() == [0, 2, 4, 6, 8, 10]
    batch = make_batch([1] * 5, [9] * 5, 4, 2, 64)
    paged = batch.paged(4)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    plan(wrapper, batch, paged)
    wrapper._qo_indptr_buf.fill_(7)  # a caller's own, not what other plans start from
    assert paged_decode._offsets(5, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_copies_of_a_wrapper():
    batch = make_batch([1, 1], [20, 9], 4, 2, 64)
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    unplanned = pickle.loads(pickle.dumps(wrapper))
    for each in (wrapper, unplanned):
        plan(each, batch, paged)
    want = wrapper.run(batch.q, paged.cache)
    for other in (unplanned, copy.deepcopy(wrapper)):
        assert_bitwise(other.run(batch.q, paged.cache), want)


# --- splits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("rule", [dict(), dict(fixed_split_size=16), dict(disable_split_kv=True)], ids=str)
def test_long_requests_and_fixed_splits(target, rule, q_len):
    batch = decode_batch(target, [3000, 0, 17, 700], q_len, (8, 2, 128))
    check(target, batch, batch.paged(16), **rule)


@pytest.mark.parametrize("q_len", [1, 4])
def test_runs_give_the_same_bits(target, q_len):
    batch = decode_batch(target, [5000, 1, 300], q_len, (8, 2, 128))
    paged = batch.paged(16)
    first = planned(target, batch, paged).run(batch.q, paged.cache, return_lse=True)
    for _ in range(3 if target.is_reference else 20):
        again = planned(target, batch, paged).run(batch.q, paged.cache, return_lse=True)
        for a, b in zip(again, first):
            assert_bitwise(a, b)


@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("rule", [dict(fixed_split_size=32), dict(disable_split_kv=True)], ids=str)
def test_results_do_not_depend_on_the_batch(target, rule, q_len):
    if target.is_reference:
        pytest.skip("the reference computes every request by itself")
    many = decode_batch(target, [2100, 600, *[3000] * 20, 1, 0], q_len, (8, 2, 128))
    paged = many.paged(16)
    among = planned(target, many, paged, **rule).run(many.q, paged.cache, return_lse=True)
    rows, keys, pages = 2 * q_len, 2700, int(paged.indptr[2])
    few = Batch([q_len] * 2, [2100, 600], many.q[:rows], many.k[:keys], many.v[:keys])
    table = (paged.indptr[:3], paged.indices[:pages], paged.last_page_len[:2])
    part = Paged(paged.cache, paged.k_cache, paged.v_cache, *table, 16, "NHD")
    alone = planned(target, few, part, **rule).run(few.q, paged.cache, return_lse=True)
    for a, b in zip(among, alone):
        assert_bitwise(a[:rows], b)
