"""Calls that repeat an earlier one (``_repeat``): the results and errors of calls that do not."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels import _dispatch, _found, _masks, _plan, _reference


class Watched:
    """What a kernel's call is to its callers, for the reference: counts instead of computing."""

    def __init__(self, log: list[tuple[int, ...]]) -> None:
        self.log = log

    def is_possible(self, outside_graphs: bool) -> bool:
        return True

    def model(self) -> Watched:
        return self

    def resumed(self, schedule: object, rows: int) -> Watched:
        return Watched(self.log)

    def direct(self, *facts: object) -> None:
        return None

    def again(self, *addresses: int) -> None:
        self.log.append(addresses)


@pytest.fixture
def repeated(monkeypatch) -> list[tuple[int, ...]]:
    """Addresses of the repeated calls of the reference, made repeatable for the test."""
    log: list[tuple[int, ...]] = []

    def compute(problem, backend, schedule=None):
        _reference.compute(problem)
        return Watched(log)

    monkeypatch.setattr(_dispatch, "compute", compute)
    monkeypatch.setattr("cutlass_kernels.single._calls", _found.Calls())
    monkeypatch.setattr("cutlass_kernels.decode._calls", _found.Calls())
    return log


def planned(kind: str, target=None, batch=None, **options):
    """A wrapper, and a function that runs it on copies of its tensors at new addresses."""
    device = "cpu" if target is None else target.device
    batch = batch or make_batch([5, 3], [20, 33], 4, 2, 64, device=device)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8) if target is None else target.workspace()
    backend = "reference" if target is None else target.backend
    if kind == "paged":
        paged = batch.paged(16)
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, **options)
        kv = (paged.cache,)
    else:
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **options)
        kv = (batch.k, batch.v)

    def run(q=None, **kwargs):
        return wrapper.run(batch.q.clone() if q is None else q, *(x.clone() for x in kv), **kwargs)

    run.table = paged.table if kind == "paged" else lambda device: (batch.kv_indptr(device),)
    return wrapper, batch, run


@pytest.fixture(params=["paged", "ragged"])
def kind(request) -> str:
    return request.param


def test_equal_runs_are_repeated_with_their_own_addresses(repeated, kind):
    _, batch, run = planned(kind)
    run()
    assert not repeated
    q, out, lse, sinks = batch.q.clone(), torch.zeros_like(batch.q), torch.zeros(8, 4), torch.zeros(4)
    result = run(q)
    assert repeated[-1][0] == q.data_ptr() and repeated[-1][3] == result.data_ptr() and repeated[-1][4:] == (0, 0)
    for _ in range(2):
        result = run(q, out=out, lse=lse, sinks=sinks, k_scale=0.5, return_lse=True)
    assert result[0] is out and result[1] is lse and len(repeated) == 2
    assert repeated[-1][3:] == (out.data_ptr(), lse.data_ptr(), sinks.data_ptr())
    if kind == "paged":
        assert repeated[-1][2] - repeated[-1][1] == 16 * 2 * 64 * 2  # values behind the keys of a page


def test_the_third_run_is_what_the_second_is(repeated, kind):
    wrapper, batch, run = planned(kind)
    run(return_lse=True)
    for count in range(1, 5):
        q = batch.q.clone()
        result, lse = run(q, return_lse=True)
        assert len(repeated) == count
        assert repeated[-1][0] == q.data_ptr() and repeated[-1][3:5] == (result.data_ptr(), lse.data_ptr())
    wrapper._causal = True
    run(return_lse=True)
    assert len(repeated) == 4
    for _ in range(2):
        wrapper._causal = False  # assigned, not changed
        run(return_lse=True)
    run(batch.q.view(-1)[: 8 * 4 * 64].view(8, 4, 64), return_lse=True)
    assert len(repeated) == 7
    with pytest.raises(ValueError, match="rows"):
        run(batch.q[1:], return_lse=True)


def test_runs_of_a_pair_and_by_forward(repeated):
    wrapper, batch, _ = planned("paged")
    paged = batch.paged(16, form="tuple")
    for count in range(4):
        wrapper.run(batch.q, paged.cache)
        assert len(repeated) == count
    assert repeated[-1][1:3] == (paged.k_cache.data_ptr(), paged.v_cache.data_ptr())
    for count in range(4):
        wrapper.forward(batch.q, paged.cache, causal=True, sm_scale=0.2)
        assert len(repeated) == 3 + count
    for wrong in ((paged.k_cache, None), (paged.k_cache,), [paged.k_cache, paged.v_cache]):
        with pytest.raises((ValueError, KeyError)):
            wrapper.run(batch.q, wrong)
    for wrong in (3.0, torch.zeros(1)):
        with pytest.raises(TypeError):
            wrapper.forward(batch.q, paged.cache, window_left=wrong)
    assert wrapper._causal is True and wrapper._sm_scale == 0.2


@pytest.mark.parametrize(
    "change",
    [
        lambda wrapper: setattr(wrapper, "_causal", True),
        lambda wrapper: setattr(wrapper, "_window_left", 3),
        lambda wrapper: setattr(wrapper, "_logits_soft_cap", 2.0),
        lambda wrapper: setattr(wrapper, "_sm_scale", 0.2),
        lambda wrapper: setattr(wrapper, "_pos_encoding_mode", "ALIBI"),
        lambda wrapper: setattr(wrapper, "_sinks", torch.zeros(4)),
    ],
)
def test_changed_options_are_another_run(repeated, kind, change):
    wrapper, _, run = planned(kind)
    before = run()
    change(wrapper)
    assert not torch.equal(run(), before)
    assert not repeated


def test_options_that_may_change_are_never_remembered(repeated, kind):
    wrapper, _, run = planned(kind)
    wrapper._logits_soft_cap = 2.0
    before = run()
    run()
    assert len(repeated) == 1
    cap = torch.tensor(2.0)  # equal to it
    wrapper._logits_soft_cap = cap
    for _ in range(3):
        assert torch.equal(run(), before)
    cap.fill_(0.5)
    assert not torch.equal(run(), before) and len(repeated) == 1
    wrapper._logits_soft_cap = 2.0
    run()
    assert len(repeated) == 2


def test_a_pair_is_no_argument_of_ragged_runs_and_single_calls(repeated):
    wrapper, batch, run = planned("ragged")
    for _ in range(3):
        run()
        ck.single_prefill_with_kv_cache(batch.q[:5], batch.k, batch.v)
    pair = (batch.k, batch.v)
    for wrong in (
        lambda: wrapper.run(batch.q, pair, None),
        lambda: ck.single_prefill_with_kv_cache(batch.q[:5], pair, None),
        lambda: ck.single_decode_with_kv_cache(batch.q[0], pair, None),
    ):
        with pytest.raises(TypeError):
            wrong()


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(k_scale=0.5),
        dict(v_scale=torch.tensor(2.0)),
        dict(return_lse=True),
        dict(return_lse=True, lse_base="ln"),
        dict(return_lse=True, lse_layout="HN"),
        dict(sinks=torch.zeros(4, dtype=torch.float16)),
        dict(out=torch.zeros(8, 8, 64, dtype=torch.float16)[:, ::2]),
        dict(q=torch.zeros(8, 4, 128, dtype=torch.float16)[..., :64]),
        dict(q=torch.zeros(8 * 4 * 64 + 4, dtype=torch.float16)[4:].view(8, 4, 64)),
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
def test_other_arguments_are_another_run(repeated, kind, kwargs):
    _, _, run = planned(kind)
    run()
    run(**kwargs)
    assert not repeated


def test_a_new_plan_forgets(repeated, kind):
    wrapper, batch, run = planned(kind)
    run()
    if kind == "ragged":
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
    else:
        wrapper.plan(batch.qo_indptr(), *batch.paged(16).table(), *batch.heads, 16, causal=True)
    run()
    assert not repeated
    wrapper.reset_workspace_buffer(torch.zeros(1 << 20, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="no plan"):
        run()


def test_what_raised_still_raises(repeated, kind):
    wrapper, batch, run = planned(kind, window_left=3)
    run(k_scale=2.0, return_lse=True)
    faults = [
        (ValueError, dict(q=batch.q.float())),
        (ValueError, dict(q=batch.q[1:])),
        (ValueError, dict(out=torch.zeros(8, 4, 64))),
        (ValueError, dict(lse=torch.zeros(8, 5))),
        (ValueError, dict(lse_base="log3")),
        (TypeError, dict(k_scale=[2.0])),
        (TypeError, dict(k_scale=2.0, return_lse=1)),
        (TypeError, dict(q=[1.0])),
        (TypeError, dict(out=[1.0])),
        (AssertionError, dict(window_left=4)),
        (NotImplementedError, dict(kv_cache_sf=torch.zeros(1))),
    ]
    for error, kwargs in faults:
        with pytest.raises(error):
            run(**kwargs)
    wrapper._window_left = 3.0
    with pytest.raises(TypeError):
        run(k_scale=2.0, return_lse=True)
    assert not repeated


def test_single_calls(repeated, monkeypatch, clean_environment):
    batch = make_batch([9], [20], 4, 2, 64)

    def call(**kwargs):
        return ck.single_prefill_with_kv_cache(batch.q.clone(), batch.k.clone(), batch.v.clone(), **kwargs)

    call(causal=True)
    out = call(causal=True)
    assert len(repeated) == 1 and repeated[-1][3] == out.data_ptr()
    for kwargs in (dict(), dict(window_left=2), dict(sm_scale=0.1), dict(custom_mask=torch.ones(9, 20).bool())):
        call(**kwargs)
    for error, kwargs in (
        (KeyError, dict(kv_layout="DHN")),
        (TypeError, dict(causal=True, window_left=2.0)),
        (ValueError, dict(causal=True, out=torch.zeros(9, 4, 64)[1:])),
        (NotImplementedError, dict(causal=True, kv_cache_sf=batch.k)),
    ):
        with pytest.raises(error):
            call(**kwargs)
    clean_environment.setenv("CUTLASS_KERNELS_BACKEND", "fa9")
    with pytest.raises(ValueError, match="fa9"):
        call(causal=True)
    assert len(repeated) == 1


def test_single_decode_calls(repeated, clean_environment):
    batch = make_batch([1], [20], 4, 2, 64)

    def call(**kwargs):
        return ck.single_decode_with_kv_cache(batch.q[0].clone(), batch.k.clone(), batch.v.clone(), **kwargs)

    want = call()
    for count in range(1, 4):
        out = call()
        assert len(repeated) == count and repeated[-1][3] == out.data_ptr() and out.shape == want.shape == (4, 64)
    call(return_lse=True)
    for count in range(4, 6):
        out, lse = call(return_lse=True)
        assert repeated[-1][3:5] == (out.data_ptr(), lse.data_ptr()) and lse.shape == (4,) and len(repeated) == count
    given = torch.zeros(4, 64, dtype=torch.float16)
    for _ in range(2):
        assert call(out=given).data_ptr() == given.data_ptr()
    assert repeated[-1][3] == given.data_ptr() and len(repeated) == 6
    for kwargs in (dict(window_left=2), dict(q_scale=0.5), dict(sm_scale=0.1), dict(scale_q=0.5)):
        call(**kwargs)
    for error, kwargs in (
        (KeyError, dict(kv_layout="DHN")),
        (TypeError, dict(window_left=2.0)),
        (ValueError, dict(out=torch.zeros(3, 64))),
        (NotImplementedError, dict(kv_cache_sf=batch.k)),
    ):
        with pytest.raises(error):
            call(**kwargs)
    assert len(repeated) == 6


def test_memory_of_calls_is_bounded(repeated):
    from cutlass_kernels import single

    for rows in range(1, 2 * _found.MOST):
        batch = make_batch([rows], [20], 2, 2, 16)
        ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v)
        assert len(single._calls) <= _found.MOST


@pytest.mark.parametrize("options", [dict(), dict(causal=True, logits_soft_cap=2.0), dict(pos_encoding_mode="ALIBI")])
def test_repeated_runs_give_the_same(target, kind, options):
    _, batch, run = planned(kind, target, **options)
    sinks = torch.randn(4, device=target.device)
    for kwargs in (dict(), dict(return_lse=True), dict(k_scale=0.5, v_scale=2.0), dict(sinks=sinks, return_lse=True)):
        first, *others = [x if isinstance(x, tuple) else (x,) for x in (run(**kwargs) for _ in range(4))]
        for other in others:
            for a, b in zip(first, other):
                assert_bitwise(a, b)
        out = torch.full_like(batch.q, torch.nan)
        for _ in range(4):
            run(out=out.fill_(torch.nan), **kwargs)
            assert_bitwise(out, first[0])
    other = torch.randn(8, 4, 64).to(batch.q)
    assert_bitwise(run(other), planned(kind, target, batch, **options)[2](other))


def test_first_runs_of_later_plans_give_the_same(target, kind):
    """They resume those of earlier plans where these had as many rows."""
    wrapper, _, _ = planned(kind, target, causal=True)
    batches = [([5, 3], [20, 33]), ([8], [7]), ([1, 1, 6], [900, 0, 40]), ([4, 4], [20, 33]), ([5, 3], [20, 33])]
    for qo_lens, kv_lens in batches:
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device)
        paged = batch.paged(16)
        if kind == "paged":
            cache = torch.zeros(64, *paged.cache.shape[1:]).to(paged.cache)  # the same for all of them
            cache[: paged.cache.size(0)] = paged.cache
            table, kv = (batch.qo_indptr(), *paged.table(), *batch.heads, 16), (cache,)
        else:
            table, kv = (batch.qo_indptr(), batch.kv_indptr(), *batch.heads), (batch.k, batch.v)
        fresh = type(wrapper)(target.workspace(), backend=target.backend)
        for plans in (wrapper, fresh):
            plans.plan(*table, causal=True)
        assert_bitwise(wrapper.run(batch.q, *kv), fresh.run(batch.q, *kv))
        if wrapper._plan_info.kind.calls and kind == "paged":
            assert len(wrapper._plan_info.kind.calls) == 1


def test_resumed_runs_refuse_what_others_refuse(target):
    wrapper, batch, _ = planned("paged", target)
    paged = batch.paged(16)
    table = paged.table()
    wrapper.run(batch.q, paged.cache)
    indices = table[1].clone()
    indices[0] = paged.cache.size(0)
    wrapper.plan(batch.qo_indptr(), table[0], indices, table[2], *batch.heads, 16)
    with pytest.raises(ValueError, match="the cache has only"):
        wrapper.run(batch.q, paged.cache)
    wrapper.plan(torch.tensor([0, 5, 7]).int(), *table, *batch.heads, 16)
    with pytest.raises(ValueError, match="q has 8 rows"):
        wrapper.run(batch.q, paged.cache)


E4M3 = torch.float8_e4m3fn


@pytest.fixture
def chosen(monkeypatch, repeated) -> list[tuple[str, frozenset[str]]]:
    """The choices of a backend, as backends and features; the kernels stand for the reference, and fa2 for what reads
    fp8 as it is. Their calls are repeatable."""
    log: list[tuple[str, frozenset[str]]] = []

    def select(requested, request):
        log.append((requested, request.features))
        return requested if requested != "auto" else "fa2" if "short_queries" in request.features else "fa3"

    def make_schedule(backend, request, offsets, workspace, copies):
        return SimpleNamespace(general=offsets.general, as_is="short_queries" in request.features)

    monkeypatch.setattr(_dispatch, "select", select)
    monkeypatch.setattr(_plan, "make_schedule", make_schedule)
    return log


def test_what_a_kind_of_plans_depends_on(chosen, clean_environment):
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))

    def features(qo_lens=(5, 3), page_size=16, **options):
        batch = make_batch(qo_lens, [20] * len(qo_lens), 4, 2, 64)
        types = dict(dict(q_data_type="float16", kv_data_type=E4M3), **options)
        wrapper.plan(batch.qo_indptr(), *batch.paged(page_size).table(), *batch.heads, page_size, **types)
        assert wrapper._backend == wrapper._plan_info.backend
        return wrapper._plan_info.request.features, wrapper._backend

    for _ in range(2):  # the second time, everything is known
        assert features() == ({"paged", "short_queries"}, "fa2")
        assert features([100]) == ({"paged"}, "fa3")
        assert features([60, 40]) == ({"paged", "short_queries"}, "fa2")
        assert features(causal=True) == ({"paged", "short_queries", "causal"}, "fa2")
        for page_size, more in ((16, set()), (12, {"fp8_copies"})):
            assert features(page_size=page_size, q_data_type=E4M3, o_data_type="float16") == ({"paged"} | more, "fa3")
        assert len(chosen) == 5
    wrapper._requested_backend = "fa3"
    assert features() == ({"paged", "short_queries"}, "fa3")
    wrapper._requested_backend = "auto"
    clean_environment.setenv("CUTLASS_KERNELS_BACKEND", "fa3")
    features()
    assert len(chosen) == 7


def test_runs_that_read_fp8_otherwise_are_not_resumed(chosen, repeated, kind):
    wrapper, batch, _ = planned(kind, batch=make_batch([60, 40], [16, 16], 4, 2, 64, kv_dtype=E4M3))
    wrapper._requested_backend = "fa2"
    paged = batch.paged(16)
    kv = (paged.cache,) if kind == "paged" else (batch.k, batch.v)

    def first_run_is_resumed(qo_lens, kv_lens):
        count, last = len(repeated), torch.tensor([16] * len(kv_lens)).int()
        qo, ends = torch.tensor([0, *qo_lens]).cumsum(0).int(), torch.tensor([0, *kv_lens]).cumsum(0).int()
        table = (ends // 16, paged.indices, last) if kind == "paged" else (ends,)
        sizes = (16,) if kind == "paged" else ()
        wrapper.plan(qo, *table, *batch.heads, *sizes, q_data_type=batch.q.dtype, kv_data_type=E4M3)
        wrapper.run(batch.q, *kv)
        return len(repeated) > count

    assert not first_run_is_resumed([60, 40], [16, 16])
    assert first_run_is_resumed([40, 60], [0, 32])
    assert not first_run_is_resumed([100], [32])  # too many rows a request
    assert first_run_is_resumed([100], [16])
    assert not first_run_is_resumed([40, 60], [0, 32])
    assert first_run_is_resumed([60, 40], [16, 16])


def test_first_runs_of_later_plans_over_fp8_give_the_same(target, kind):
    wrapper, _, _ = planned(kind, target)
    types = dict(q_data_type=torch.float16, kv_data_type=E4M3)
    for qo_lens, kv_lens in [([100], [60]), ([60, 40], [28, 32]), ([40, 60], [30, 30]), ([100], [60])]:
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, dtype=torch.float16, kv_dtype=E4M3, device=target.device)
        paged = batch.paged(16)
        if kind == "paged":
            table, kv = (batch.qo_indptr(), *paged.table(), *batch.heads, 16), (paged.cache,)
        else:
            table, kv = (batch.qo_indptr(), batch.kv_indptr(), *batch.heads), (batch.k, batch.v)
        fresh = type(wrapper)(target.workspace(), backend=target.backend)
        for plans in (wrapper, fresh):
            plans.plan(*table, **types)
        assert wrapper._plan_info.request == fresh._plan_info.request
        assert_bitwise(wrapper.run(batch.q, *kv), fresh.run(batch.q, *kv))


def test_repeated_single_calls_give_the_same(target):
    for rows, keys in ((9, 20), (1, 5000), (200, 300)):
        batch = make_batch([rows], [keys], 4, 2, 64, device=target.device)
        call = lambda: ck.single_prefill_with_kv_cache(  # noqa: E731
            batch.q.clone(), batch.k.clone(), batch.v.clone(), causal=True, return_lse=True, backend=target.backend
        )
        first = call()
        for _ in range(3):
            for a, b in zip(first, call()):
                assert_bitwise(a, b)


@pytest.mark.gpu
def test_runs_with_rows_known_to_the_device_alone(target, kind):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, which takes no CUDA offsets")
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=target.device)
    wrapper, _, run = planned(kind, target, batch)
    want = run(return_lse=True)
    size = (16,) if kind == "paged" else ()
    wrapper.plan(batch.qo_indptr(target.device), *run.table(target.device), *batch.heads, *size)
    for _ in range(3):
        for a, b in zip(run(return_lse=True), want):
            torch.testing.assert_close(a, b, atol=2e-3, rtol=2e-3)


@pytest.mark.gpu
def test_repeated_runs_in_a_graph_and_on_another_stream(target, kind):
    if target.is_reference:
        pytest.skip("the reference is tested on the CPU, where there are no CUDA graphs")
    wrapper, batch, _ = planned(kind, target)
    q, out = batch.q.clone(), torch.zeros_like(batch.q)
    kv = (batch.paged(16).cache,) if kind == "paged" else (batch.k, batch.v)
    for _ in range(2):
        wrapper.run(q, *kv, out=out)
    want = out.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out.zero_()
        wrapper.run(q, *kv, out=out)
    stream.synchronize()
    assert_bitwise(out, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(q, *kv, out=out)
    out.zero_()
    graph.replay()
    assert_bitwise(out, want)


def test_a_copy_of_a_wrapper_is_another():
    wrapper, batch, _ = planned("ragged")
    other = copy.deepcopy(wrapper)
    assert other._number != wrapper._number
    assert_bitwise(other.run(batch.q, batch.k, batch.v), wrapper.run(batch.q, batch.k, batch.v))


def test_a_default_device_is_not_ours():
    # Sizes of masks are computed on the CPU, wherever tensors are made by default.
    q, k, v = (torch.randn(9, 2, 16) for _ in range(3))
    mask = torch.ones(9, 9, dtype=torch.bool)
    with torch.device("meta"):
        bits, offsets = _masks.pack_mask(mask, [9], [9])
    assert bits.device.type == "cpu" and offsets.tolist() == [0, 11]
    assert_bitwise(ck.single_prefill_with_kv_cache(q, k, v, mask), ck.single_prefill_with_kv_cache(q, k, v))
