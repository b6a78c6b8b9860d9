"""BatchDecodeWithPagedKVCacheWrapper: one or a few rows of every request, planned without offsets of rows."""

from __future__ import annotations

import copy
import functools
import pickle
from dataclasses import replace

import pytest
import torch
from compare import assert_bitwise, assert_close
from problems import Options, make_batch
from wrapper_problems import Wrapped, batch_for

import cutlass_kernels as ck
from cutlass_kernels import decode
from cutlass_kernels._planned import paged_decode

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
q_lens = pytest.mark.parametrize("q_len", [1, 4])


def wrapped(target, kv_lens=(20, 9), q_len=1, heads=(4, 2, 64), page_size=16, kv_layout="NHD", **options) -> Wrapped:
    batch = make_batch([q_len] * len(kv_lens), kv_lens, *heads, device=target.device, **options)
    return Wrapped(target, "decode", batch, page_size, kv_layout)


# --- what is computed --------------------------------------------------------------------------------------------


@q_lens
@pytest.mark.parametrize(
    "kv_lens",
    [[0], [7], [0, 0, 0], [5, 0, 70], [0, 33, 1], [16, 32, 48], [*range(1, 129)], [33000, 3]],
    ids=lambda lens: f"{len(lens)}-requests-{sum(lens)}",
)
def test_lengths(target, kv_lens, q_len):
    wrapped(target, kv_lens, q_len, (2, 1, 64)).plan().check()


@pytest.mark.runs_nothing("there are no rows")
def test_no_requests(target):
    out, lse = wrapped(target, []).plan().run(return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


@q_lens
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8, 16])
def test_group_sizes(target, group, q_len):
    wrapped(target, [30, 9, 140], q_len, (2 * group, 2, 64), kv_layout="HND").plan().check()


@pytest.mark.parametrize("q_len", [2, 3, 4, 8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_several_rows_of_a_request(target, q_len, page_size):
    # Also of requests with fewer keys than rows: the first rows then stand before the first key, and see none.
    w = wrapped(target, [q_len, 40, q_len - 1, 0, 1, 700], q_len, page_size=page_size)
    for options in (Options(), Options(window_left=2)):
        w.plan(options).check()


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


@q_lens
@pytest.mark.parametrize("name", OPTIONS)
def test_options(target, name, q_len):
    sinks = OPTIONS[name].sinks
    options = replace(OPTIONS[name], sinks=None if sinks is None else sinks.to(target.device))
    wrapped(target, [30, 9, 0, 140], q_len).plan(options).check()


@pytest.mark.parametrize("in_tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@q_lens
def test_fp8_caches(target, q_len, kv_dtype, in_tensors):
    scales = dict(q_scale=1.1, k_scale=0.8, v_scale=1.2)
    w = wrapped(target, [50, 0, 20], q_len, (4, 2, 128), dtype=torch.bfloat16, kv_dtype=kv_dtype).plan()
    given = {name: torch.tensor([x], device=target.device) for name, x in scales.items()} if in_tensors else scales
    w.check(w.run(return_lse=True, **given), Options(**scales))


@q_lens
def test_it_is_prefill_with_as_many_rows(target, q_len):
    w = wrapped(target, [300, 9, 0, 1400], q_len).plan()
    prefill = Wrapped(target, "paged", w.batch)
    prefill.pages, prefill.kv = w.pages, w.kv
    prefill.plan(Options(causal=q_len > 1))
    for a, b in zip(w.run(return_lse=True), prefill.run(return_lse=True)):
        assert_bitwise(a, b)


# --- plan() and what is around it --------------------------------------------------------------------------------


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
    w = wrapped(target, [20, 90], dtype=q_dtype, kv_dtype=kv_dtype)
    for call in (w.wrapper.plan, functools.partial(ck.fast_decode_plan, w.wrapper)):
        call(*w.vectors(), *w.sizes, **types)
        assert (w.wrapper._cached_q_data_type, w.wrapper._cached_kv_data_type) == (q_dtype, kv_dtype)
        assert_close(w.run(), w.expect().out, atol=1e-2, rtol=1e-2, dtype=q_dtype)


def test_properties(target):
    make, workspace = ck.BatchDecodeWithPagedKVCacheWrapper, target.workspace()
    for tensor_cores in (False, True):
        wrapper = make(workspace, "NHD", False, tensor_cores)
        assert wrapper.use_tensor_cores is tensor_cores and wrapper.is_cuda_graph_enabled is False
    w = wrapped(target).plan()
    sizes = w.wrapper.workspace_size(*w.vectors(), *w.sizes)
    w.wrapper.reset_workspace_buffer(*(target.workspace(max(size, 1)) for size in sizes))
    with pytest.raises(RuntimeError, match="no plan"):
        w.run()
    assert w.wrapper.resolved_backend in (target.backend, "auto")
    w.plan()
    assert w.wrapper.resolved_backend == w.wrapper._backend != "auto"
    w.check(w.run())


@pytest.mark.parametrize("heads,requests,q_len", [((1, 1), 6, 3), ((4, 1), 5, 1), ((8, 2), 3, 1), ((4, 2), 3, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_workspace_of_the_size_that_is_told_is_enough(target, heads, requests, q_len, head_dim):
    # Few key heads and requests: how keys are split, and who merges them, is then another matter on every device.
    w = wrapped(target, [2000] * requests, q_len, (*heads, head_dim))
    types = dict(q_data_type=w.batch.q.dtype, q_len_per_req=q_len)
    sizes = w.wrapper.workspace_size(*w.vectors(), *w.sizes, **types)
    assert min(sizes) >= 16
    make = ck.BatchDecodeWithPagedKVCacheWrapper
    w.wrapper = make(target.workspace(sizes[0]), backend=target.backend)
    w.wrapper.reset_workspace_buffer(*(target.workspace(size) for size in sizes))
    w.plan().check(w.run())


def test_names_are_where_engines_look():
    names = "BatchDecodeWithPagedKVCacheWrapper", "CUDAGraphBatchDecodeWithPagedKVCacheWrapper", "fast_decode_plan"
    for name in names:
        assert getattr(ck, name) is getattr(decode, name) and name in ck.__all__


def test_a_compiled_function_runs_what_is_planned(target):
    torch._dynamo.reset()
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    run = torch.compile(lambda q, cache: wrapper.run(q * 2, cache) + 1, fullgraph=True, backend="aot_eager")
    cache = torch.zeros(20, 2, 16, 2, 64, dtype=torch.float16, device=target.device)
    for seed, kv_lens in enumerate(([20, 9], [3, 70])):
        w = Wrapped(target, "decode", batch_for("decode", target, (), kv_lens, seed=seed), wrapper=wrapper).plan()
        cache[: len(w.pages.cache)] = w.pages.cache
        assert_bitwise(run(w.batch.q, cache), wrapper.run(w.batch.q * 2, cache) + 1)


# --- refusals ----------------------------------------------------------------------------------------------------


def refused(*attempts):
    """Rows of error, words and a call."""
    for error, words, call in attempts:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_runs_that_do_not_fit_the_plan(target):
    w = wrapped(target).plan()
    fresh, run, q, (cache,) = wrapped(target), w.wrapper.run, w.batch.q, w.kv
    refused(
        (RuntimeError, "no plan", lambda: fresh.run()),
        (RuntimeError, "no plan", lambda: fresh.run(q_len_per_req=1)),
        (ValueError, r"bfloat16.*\bfloat16", lambda: run(q.bfloat16(), cache)),
        (ValueError, "bfloat16.*kv_data_type", lambda: run(q, cache.bfloat16())),
        (ValueError, "1 rows.*2 requests with q_len_per_req=1", lambda: run(q[:1], cache)),
        (ValueError, "4 rows.*2 requests", lambda: run(q.repeat(2, 1, 1), cache)),
        (ValueError, "3 dimensions", lambda: run(q[0], cache)),
        (ValueError, "q_len_per_req=2, but 1 is planned", lambda: w.run(q_len_per_req=2)),
        (AssertionError, "window_left=3", lambda: w.run(window_left=3)),
        (KeyError, "list", lambda: run(q, [*cache.unbind(1)])),
        (NotImplementedError, "BatchDecode.*kv_cache_sf", lambda: w.run(kv_cache_sf=q)),
        (TypeError, "q_scale.*twice", lambda: run(q, cache, 2.0, q_scale=2.0)),
        (TypeError, "speed", lambda: w.run(speed=2)),
    )


NO_ROWS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), (2.0, TypeError), ("2", TypeError)]


def test_plans_that_are_refused(target):
    w = wrapped(target).plan()
    offsets, pages, last = w.vectors()
    sizes, plan = w.sizes, w.wrapper.plan
    rows = [(error, "q_len_per_req=", lambda x=x: plan(*w.vectors(), *sizes, q_len_per_req=x)) for x, error in NO_ROWS]
    for attempt in (
        *rows,
        (ValueError, "this batch needs 2", lambda: plan(offsets, pages, last[:1], *sizes)),
        (ValueError, "this batch needs 4", lambda: plan(offsets, pages, last.repeat(2)[:3], *sizes)),
        (TypeError, "last_page_len is list", lambda: plan(offsets, pages, [4, 9], *sizes)),
        (ValueError, "1-D int32", lambda: plan(offsets, pages, last.float(), *sizes)),
        (RuntimeError, "decreases from 3 to 2", lambda: plan(offsets.flip(0), pages, last, *sizes)),
        (RuntimeError, r"last_page_len\[0\]=20", lambda: plan(offsets, pages, last + 16, *sizes)),
        (ValueError, "page number -1", lambda: plan(offsets, pages * 0 - 1, last, *sizes)),
        (ValueError, "ends at 3", lambda: plan(offsets, pages[:2], last, *sizes)),
        (RuntimeError, "num_qo_heads=3", lambda: plan(offsets, pages, last, 3, 2, 64, 16)),
        (KeyError, "pos_encoding_mode='ROPE'", lambda: plan(offsets, pages, last, *sizes, "ROPE")),
        (TypeError, "data type", lambda: plan(offsets, pages, last, *sizes, data_type=16)),
        (ValueError, "more than 2147483647 rows", lambda: plan(*w.vectors(), *sizes, q_len_per_req=2**30 + 1)),
    ):
        refused(attempt)
        w.check(w.run())  # the plan before is in force
    pages = pages.clone()
    pages[0] = w.pages.cache.size(0)
    plan(offsets, pages, last, *sizes)
    refused((ValueError, "the cache has only", w.run))


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_constructors_that_are_refused(target):
    make = functools.partial(ck.BatchDecodeWithPagedKVCacheWrapper, target.workspace())

    def graph(*buffers: torch.Tensor):
        return make("NHD", True, False, *buffers)

    def ints(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=target.device)

    refused(
        (KeyError, "DHN", lambda: make("DHN")),
        (ValueError, "fa9", lambda: make(backend="fa9")),
        (NotImplementedError, "BatchDecode.*jit_args", lambda: make(jit_args=[1])),
        (ValueError, "needs paged_kv_indptr_buffer", lambda: make("NHD", True)),
        (ValueError, "needs paged_kv_indices_buffer", lambda: graph(ints(3))),
        (ValueError, "last_page_len_buffer has 3", lambda: graph(ints(3), ints(9), ints(3))),
        (ValueError, "indptr_buffer is empty", lambda: graph(ints(0), ints(9), ints(0))),
        (ValueError, "indptr_buffer is .*int64", lambda: graph(ints(3).long(), ints(9), ints(2))),
    )


# --- attributes, copies, splits ----------------------------------------------------------------------------------


def test_sinks_as_an_attribute(target):
    w = wrapped(target).plan()
    w.wrapper._sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=target.device)
    w.check(w.run(return_lse=True), Options(sinks=w.wrapper._sinks))


def test_offsets_of_rows_are_made_once():
    assert paged_decode._offsets(5, 2) is paged_decode._offsets(5, 2)
    assert paged_decode._offsets(5, 2).tolist() == [0, 2, 4, 6, 8, 10]
    batch = make_batch([1] * 5, [9] * 5, 4, 2, 64)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    wrapper.plan(*batch.paged(4).table(), *batch.heads, 4)
    wrapper._qo_indptr_buf.fill_(7)  # a caller's own, not what other plans start from
    assert paged_decode._offsets(5, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_copies_of_a_wrapper():
    batch = make_batch([1, 1], [20, 9], 4, 2, 64)
    paged = batch.paged(16)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    unplanned = pickle.loads(pickle.dumps(wrapper))
    for each in (wrapper, unplanned):
        each.plan(*paged.table(), *batch.heads, 16)
    want = wrapper.run(batch.q, paged.cache)
    for other in (unplanned, copy.deepcopy(wrapper)):
        assert_bitwise(other.run(batch.q, paged.cache), want)


@q_lens
@pytest.mark.parametrize("rule", [dict(), dict(fixed_split_size=16), dict(disable_split_kv=True)], ids=str)
def test_long_requests_and_fixed_splits(target, rule, q_len):
    wrapped(target, [3000, 0, 17, 700], q_len, (8, 2, 128)).plan(**rule).check()


@q_lens
def test_runs_give_the_same_bits(target, q_len):
    w = wrapped(target, [5000, 1, 300], q_len, (8, 2, 128))
    first = w.plan().run(return_lse=True)
    for _ in range(3 if target.is_reference else 20):
        w.wrapper = wrapped(target).wrapper
        for a, b in zip(w.plan().run(return_lse=True), first):
            assert_bitwise(a, b)


@q_lens
@pytest.mark.parametrize("rule", [dict(fixed_split_size=32), dict(disable_split_kv=True)], ids=str)
def test_results_do_not_depend_on_the_batch(target, rule, q_len):
    if target.is_reference:
        pytest.skip("the reference computes every request by itself")
    many = wrapped(target, [2100, 600, *[3000] * 20, 1, 0], q_len, (8, 2, 128))
    among = many.plan(**rule).run(return_lse=True)
    for a, b in zip(among, many.first(2).plan(**rule).run(return_lse=True)):
        assert_bitwise(a[: 2 * q_len], b)
