"""The benchmark without a GPU: its FLOPs, workloads, checks, reports, and the whole way from a case to a file."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

typer_testing = pytest.importorskip("typer.testing")
import bench  # noqa: E402
import check  # noqa: E402
import peers  # noqa: E402
import report as reporting  # noqa: E402
import shapes  # noqa: E402
import timing  # noqa: E402
from shapes import Prefill  # noqa: E402

CPU = torch.device("cpu")
FAST = timing.Settings("test", rounds=3, pause_ms=0.0, warm_ms=0.0, round_ms=0.01)
SMALL = Prefill("small", "one", (40,), (70,), 4, 2, 16, 16, window_left=9, soft_cap=5.0, sinks=True)


# --- work --------------------------------------------------------------------------------------------------------


def test_visible_pairs_are_those_of_the_mask() -> None:
    sizes = (0, 1, 2, 5, 8, 13)
    for qo, kv, causal, window in itertools.product(sizes, sizes, (False, True), (-1, 0, 1, 4, 20)):
        mask = oracle.visible(qo, kv, causal=causal, window_left=window)
        assert shapes.visible_pairs(qo, kv, causal, window) == int(mask.sum()), (qo, kv, causal, window)


def test_work_counts_both_products_of_visible_pairs() -> None:
    full = Prefill("g", "c", (3, 5), (4, 9), 6, 2, 64, 32, causal=False)
    assert full.work == 2 * 6 * (64 + 32) * (3 * 4 + 5 * 9)
    causal = Prefill("g", "c", (4,), (4,), 1, 1, 8, 8)
    assert causal.work == 2 * 16 * (1 + 2 + 3 + 4)


def test_work_of_custom_masks_is_that_of_their_bits() -> None:
    causal = Prefill("g", "c", (5,), (9,), 2, 1, 8, 8)
    for kind in ("causal", "random"):
        case = dataclasses.replace(causal, causal=False, custom_mask=kind)
        mask = shapes.make_inputs(case, CPU).mask
        assert mask is not None
        assert mask.shape == (5, 9)
        assert case.pairs == int(mask.sum())
        assert case.features == {"custom_mask", "gqa"}
        assert (case.work == causal.work) == (kind == "causal")
    assert float(shapes.random_mask(64, 512).float().mean()) == pytest.approx(shapes.DENSITY, abs=0.02)
    for wrong in ({"causal": True}, {"window_left": 3}, {"qo_lens": (1, 1), "kv_lens": (2, 2)}):
        with pytest.raises(ValueError, match="the only mask"):
            dataclasses.replace(causal, **{"causal": False, "custom_mask": "causal", **wrong})
    with pytest.raises(ValueError, match="none of 'causal'"):
        dataclasses.replace(causal, causal=False, custom_mask="tree")


def test_bytes_count_every_tensor_once() -> None:
    case = Prefill("g", "c", (3, 5), (4, 9), 6, 2, 64, 32)
    inputs = shapes.make_inputs(case, CPU)
    out = 8 * 6 * 32
    assert case.bytes == 2 * (inputs.q.numel() + inputs.k.numel() + inputs.v.numel() + out)


# --- workloads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shapes.WORKLOADS)
def test_workloads_are_consistent(name: str) -> None:
    assert set(shapes.WORKLOADS[name].units) <= set(peers.OPERATIONS[shapes.WORKLOADS[name].operation].units)
    cases = shapes.WORKLOADS[name].cases("float16")
    assert cases
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        assert case.work > 0
        assert case.features <= peers.ALL | peers.ONLY_OURS
        assert case.detail
        if isinstance(case, Prefill):
            assert case.dtype == "float16"
            assert len(case.qo_lens) == len(case.kv_lens)
            assert case.num_qo_heads % case.num_kv_heads == 0
            assert not case.causal or all(qo <= kv for qo, kv in zip(case.qo_lens, case.kv_lens))


def test_paper_workload_has_16k_tokens_of_hidden_size_2048() -> None:
    cases = shapes.paper("bfloat16")
    assert len(cases) == 36
    for case in cases:
        assert isinstance(case, Prefill)
        assert sum(case.qo_lens) == 16384
        assert case.num_qo_heads * case.head_dim_qk == 2048
        assert case.dense


def test_model_workloads_ask_for_their_features() -> None:
    gpt_oss = shapes.WORKLOADS["gpt-oss"].cases("bfloat16")
    assert {case.features for case in gpt_oss} == {
        frozenset({"causal", "gqa", "sinks", "window"}),
        frozenset({"causal", "gqa", "sinks"}),
    }
    first = gpt_oss[0]
    assert isinstance(first, Prefill)
    assert shapes.visible_pairs(1, 4096, True, first.window_left) == 128
    assert all("soft_cap" in case.features for case in shapes.WORKLOADS["gemma2"].cases("bfloat16"))
    assert all("head_dim_vo" in case.features for case in shapes.WORKLOADS["deepseek"].cases("bfloat16"))
    assert "ragged" in shapes.varlen("bfloat16")[0].features


def test_varlen_workload_is_the_same_every_time() -> None:
    assert shapes.varlen("bfloat16") == shapes.varlen("bfloat16")


def prefills(workload: str) -> list[Prefill]:
    cases = shapes.WORKLOADS[workload].cases("bfloat16")
    return [case for case in cases if isinstance(case, Prefill)]


def test_paged_workloads_stand_beside_the_same_without_pages() -> None:
    for name, sizes in (("paged", [0, 1, 5, 16, 64, 128]), ("append", [0, 16])):
        for _, group in itertools.groupby(prefills(name), lambda case: case.group):
            cases = list(group)
            assert [case.page_size for case in cases] == sizes
            assert [case.column for case in cases] == ["ragged", *(f"page {n}" for n in sizes[1:])]
            assert len({(case.qo_lens, case.kv_lens, case.work, case.bytes) for case in cases}) == 1
            assert [case.features - cases[0].features for case in cases] == [set(), *([{"paged"}] * len(sizes[1:]))]
    first = prefills("paged")[1]
    assert first.label == "hd128 1x4k page 1"
    assert "pages of 1, needs causal gqa paged" in first.detail


def test_append_workload_has_few_rows_over_many_keys() -> None:
    cases = {case.group: case for case in prefills("append")}
    assert len(cases) == 18
    assert all("append" in case.features for case in cases.values())
    skew = cases["63x 1 over 1k + 1 over 64k, 32/8 hd128"]
    assert (sum(skew.qo_lens), sum(skew.kv_lens), max(skew.kv_lens)) == (64, 63 * 1024 + 65536, 65536)
    assert "ragged" in skew.features
    mixed = cases["2k prompt + 64x 1 over 4k, 32/8 hd128"]
    assert mixed.pairs == shapes.visible_pairs(2048, 2048, True) + 64 * 4096
    rank = cases["8x 64 over 8k, 8/1 hd128"]
    assert (rank.qo_lens, rank.num_qo_heads, rank.num_kv_heads) == ((64,) * 8, 8, 1)
    single = cases["256x 1 over 2k, 32/8 hd128"]
    assert single.bytes == pytest.approx(2 * 256 * 2048 * 8 * 256, rel=0.01)


def test_masks_workload_asks_for_its_features() -> None:
    cases = prefills("masks")
    assert [case.features for case in cases[:4]] == [
        frozenset({"causal", "gqa"}),
        frozenset({"custom_mask", "gqa"}),
        frozenset({"custom_mask", "gqa"}),
        frozenset({"alibi", "causal", "gqa"}),
    ]
    assert len({case.group for case in cases}) == 3
    assert cases[0].work == cases[1].work == cases[3].work
    assert cases[2].pairs == pytest.approx(0.6 * 4096**2, rel=1e-3)
    assert [name for name, b in peers.PREFILL.items() if not b.ours and not cases[1].features - b.honours] == []


def test_host_calls_have_names_and_problems() -> None:
    cases = [case for case in shapes.WORKLOADS["calls"].cases("bfloat16") if isinstance(case, shapes.Host)]
    columns = [case.column for case in cases]
    for column in ("run() of 8", "plan() of 8, cuda offsets", "plan() of 128, cpu offsets", "paged run() of 128"):
        assert column in columns
    paged = cases[columns.index("paged plan() of 128, cuda indices")]
    assert (paged.problem.page_size, len(paged.problem.kv_lens), paged.features) == (16, 128, paged.problem.features)
    assert "paged" in paged.features
    assert "paged" not in cases[0].features


def test_workload_of_another_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="'paper' is none of host: use calls"):
        shapes.cases_of("host", ["paper"], "bfloat16")


# --- pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("dim_vo", [16, 8])
def test_pages_hold_the_same_keys_in_random_order(size: int, dim_vo: int) -> None:
    case = Prefill("g", "c", (1, 2, 3), (37, 5, 80), 4, 2, 16, dim_vo, page_size=size)
    inputs = shapes.make_inputs(case, CPU)
    without = shapes.make_inputs(dataclasses.replace(case, page_size=0), CPU)
    pages = inputs.pages
    assert pages is not None and without.pages is None
    assert torch.equal(inputs.k, without.k)
    assert isinstance(pages.cache, torch.Tensor) == (dim_vo == 16)
    k, v = pages.cache.unbind(1) if isinstance(pages.cache, torch.Tensor) else pages.cache
    assert k.shape[1:] == (size, 2, 16)
    indices = pages.indices.tolist()
    assert sorted(indices) == list(range(k.size(0)))
    assert indices != sorted(indices)
    table = (pages.indptr.tolist(), indices, pages.last_page_len.tolist())
    keys, values = zip(*oracle.gather_pages(k, v, *table, "NHD"))
    assert torch.equal(torch.cat(keys), inputs.k)
    assert torch.equal(torch.cat(values), inputs.v)
    rows = peers._page_table(pages)
    assert rows.dtype == torch.int32
    assert rows[2, : -(-80 // size)].tolist() == indices[pages.indptr[2] :]
    assert [x.dtype for x in inputs.indices(on_device=True)] == [torch.int32] * 4


# --- checking ----------------------------------------------------------------------------------------------------


def full_mask(case: Prefill, request: int) -> torch.Tensor:
    qo, kv = case.qo_lens[request], case.kv_lens[request]
    if case.custom_mask == "random":
        return shapes.random_mask(qo, kv)
    causal = case.causal or case.custom_mask == "causal"
    return oracle.visible(qo, kv, causal=causal, window_left=case.window_left)


@pytest.mark.parametrize("elements", [check.ELEMENTS, 1], ids=["all heads", "head by head"])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Prefill("g", "batch", (3, 700, 20), (3, 900, 64), 4, 4, 32, 16),
        Prefill("g", "full", (5,), (33,), 2, 1, 8, 8, causal=False),
        Prefill("g", "bits", (600,), (700,), 4, 2, 8, 8, causal=False, custom_mask="causal"),
        Prefill("g", "random bits", (600,), (700,), 4, 2, 8, 8, causal=False, custom_mask="random"),
        Prefill("g", "alibi", (9, 530), (30, 600), 8, 2, 8, 8, alibi=True),
        Prefill("g", "pages", (3, 1), (30, 600), 8, 2, 8, 8, page_size=5),
    ],
    ids=lambda case: case.column,
)
def test_expected_result_is_that_of_the_oracle(case: Prefill, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ELEMENTS", elements)
    inputs = shapes.make_inputs(case, CPU)
    expected = check.expect(case, inputs)
    qo, kv = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    outs = []
    for b in range(len(case.qo_lens)):
        keys = slice(kv[b], kv[b + 1])
        exact = oracle.attention(
            inputs.q[qo[b] : qo[b + 1]],
            inputs.k[keys],
            inputs.v[keys],
            mask=full_mask(case, b),
            sm_scale=case.head_dim_qk**-0.5,
            soft_cap=case.soft_cap or None,
            sinks=inputs.sinks,
            alibi="relative" if case.alibi else None,
        )
        outs.append(exact.out)
    torch.testing.assert_close(expected.out.double(), torch.cat(outs), atol=2e-5, rtol=2e-5)
    assert expected.coverage == "all rows"
    assert expected.largest > expected.rms > 0
    assert check.fault(torch.cat(outs).to(inputs.q.dtype), expected) is None


def test_wrong_results_are_noticed() -> None:
    inputs = shapes.make_inputs(SMALL, CPU)
    expected = check.expect(SMALL, inputs)
    right = expected.out.to(torch.bfloat16)
    assert check.fault(right, expected) is None
    wrong = right.clone()
    wrong[7, 1, 3] += 0.25
    assert "largest error" in str(check.fault(wrong, expected))
    noisy = right + (0.02 * torch.sin(torch.arange(right.numel()))).view_as(right).to(right.dtype)
    assert "error" in str(check.fault(noisy, expected))
    wrong[0, 0, 0] = math.nan
    assert check.fault(wrong, expected) == "not finite"
    assert "shape" in str(check.fault(right[1:], expected))


def test_large_cases_are_checked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROWS", 8)
    monkeypatch.setattr(check, "PAIRS", 40 * 70 * 4 / 2)
    expected = check.expect(SMALL, shapes.make_inputs(SMALL, CPU))
    assert expected.coverage == "16 of 40 rows"
    assert expected.rows.tolist() == [*range(8), *range(32, 40)]


# --- timing ------------------------------------------------------------------------------------------------------


class FakeClock:
    """Every call takes the seconds that its callable has as attribute; nothing is called but units."""

    mode = "launch"

    def __init__(self, captures: bool = True) -> None:
        self.captures = captures
        self.order: list[str] = []

    def time(self, unit: Callable[[], Any], repeats: int, monitor: timing.Monitor | None) -> float:
        return sum(unit() for _ in range(repeats))

    def graph(self, timed: timing.Timed, count: int) -> Callable[[], Any] | None:
        return (lambda: sum(timed.call() for _ in range(count))) if self.captures else None


def test_turns_interleave_and_are_long_enough() -> None:
    turns: list[str] = []
    calls = {"slow": timing.Timed(lambda: 0.004), "quick": timing.Timed(lambda: 0.0005)}
    settings = timing.Settings("test", rounds=4, pause_ms=0.0, warm_ms=1.0, round_ms=5.0)
    series = timing.interleave(calls, settings, FakeClock(), tick=turns.append)
    assert turns == ["slow", "quick", "quick", "slow"] * 2
    assert series["slow"].launches == 2
    assert series["quick"].launches == 10
    assert series["quick"].median == pytest.approx(0.0005)
    assert series["quick"].spread == pytest.approx(0.0)
    assert series["quick"].mode == "launch"
    assert len(series["slow"].seconds) == 4


def test_short_calls_are_measured_as_graphs() -> None:
    calls = {"short": timing.Timed(lambda: 1e-5), "other": timing.Timed(lambda: 1e-3)}
    settings = timing.Settings("test", rounds=2, pause_ms=0.0, warm_ms=0.0, round_ms=1.0)
    series = timing.interleave(calls, settings, FakeClock())
    assert {name: s.mode for name, s in series.items()} == {"short": "graph", "other": "graph"}
    assert series["short"].median == pytest.approx(1e-5)
    assert series["short"].launches >= 100
    refused = timing.interleave(calls, settings, FakeClock(captures=False))
    assert refused["short"].mode == "launch"
    off = timing.interleave(calls, dataclasses.replace(settings, graph="off"), FakeClock())
    assert off["short"].mode == "launch"


def test_host_clock_counts_calls_only() -> None:
    events: list[str] = []
    clock = timing.HostClock(lambda: events.append("synchronize"))
    assert clock.time(lambda: events.append("call"), timing.QUEUE + 1, None) > 0
    assert events.count("call") == timing.QUEUE + 1
    assert events[0] == events[timing.QUEUE + 1] == events[-1] == "synchronize"


# --- the whole way -----------------------------------------------------------------------------------------------


def made_up(name: str, factor: float) -> peers.Backend:
    """A peer that computes the reference's result times ``factor``, and honours nothing but causal masks and GQA."""

    def make(case: Prefill, x: shapes.Inputs) -> timing.Timed:
        ours = peers.PREFILL["reference"].make(case, x)
        return timing.Timed(lambda: ours.call() * factor)

    return peers.Backend(name, False, frozenset({"causal", "gqa"}), lambda device: None, make)


def run(cases: list[shapes.Case], backends: list[peers.Backend], operation: str = "prefill") -> reporting.Report:
    settings, clock = FAST, timing.HostClock()
    results = bench.measure(peers.OPERATIONS[operation], cases, backends, settings, CPU, clock)
    op = peers.OPERATIONS[operation]
    names, ours = [b.name for b in backends], [b.name for b in backends if b.ours]
    facts = {**bench.environment(settings, "bfloat16", None), "gpu": "none"}
    return reporting.Report(op.unit, op.higher_is_better, names, ours, ["best", "good"], facts, results)


def test_cases_are_measured_and_gaps_have_reasons() -> None:
    plain = Prefill("small", "plain", (16, 16), (16, 16), 4, 2, 16, 16)
    backends = [
        peers.PREFILL["reference"],
        peers.PREFILL["fa2"],
        made_up("good", 1.0),
        made_up("bad", 1.5),
        peers.PREFILL["torch_fa2"],
    ]
    report = run([plain, SMALL], backends)
    assert report.shown() == ["reference", "good"]
    first, second = report.cases()
    assert report.figure(first, "reference") is not None
    assert report.figure(second, "reference") is not None
    assert report.figure(first, "good") is not None
    assert report.figure(second, "good") is None
    bad = report.result(first, "bad")
    assert bad is not None and bad.failed and bad.reason.startswith("wrong result: ")
    reasons = "\n".join(report.reasons())
    assert "good, 1 of 2 cases: does not honour append, sinks, soft_cap, window" in reasons
    assert "torch_fa2, 2 of 2 cases: needs a CUDA device" in reasons
    assert "fa2, 2 of 2 cases: backend='fa2' needs CUDA tensors" in reasons
    result = report.result(first, "reference")
    assert result is not None and result.series is not None
    assert result.checked == "all rows"
    assert len(result.series.seconds) == FAST.rounds


def test_host_operation_measures_every_call() -> None:
    hosts = [c for c in shapes.WORKLOADS["calls"].cases("bfloat16") if isinstance(c, shapes.Host) and c.indptr == "cpu"]
    cases = [c for c in hosts if c.call.endswith("_plan") or c.batch <= 8]
    report = run(list(cases), [peers.HOST["auto"]], "host")
    figures = [report.figure(case, "auto") for case in report.cases()]
    assert len(figures) == len(cases) == 7
    assert all(figure is not None and figure > 0 for figure in figures)


def test_pages_masks_and_alibi_are_measured() -> None:
    plain = Prefill("small", "", (7, 1), (40, 33), 4, 2, 16, 16)
    single = Prefill("small", "causal", (20,), (33,), 4, 2, 16, 16)
    cases: list[shapes.Case] = [
        *shapes.with_pages(plain, (1, 5)),
        dataclasses.replace(plain, column="two tensors", head_dim_vo=8, page_size=16),
        *shapes.with_pages(dataclasses.replace(single, group="one"), (16,)),
        *(dataclasses.replace(single, column=f"{m} bits", causal=False, custom_mask=m) for m in ("causal", "random")),
        dataclasses.replace(single, column="alibi", alibi=True),
    ]
    report = run(cases, [peers.PREFILL["reference"], made_up("good", 1.0)])
    assert [r.reason for r in report.results if r.backend == "reference"] == [""] * len(cases)
    assert all(report.figure(case, "reference") is not None for case in report.cases())
    assert "good, 2 of 9 cases: does not honour custom_mask" in report.reasons()
    assert "good, 1 of 9 cases: does not honour alibi, append" in report.reasons()
    assert "good, 2 of 9 cases: does not honour append, paged, ragged" in report.reasons()


@pytest.mark.parametrize("case", shapes.with_pages(Prefill("g", "", (7, 1), (40, 33), 4, 2, 16, 16), (5, 16)))
def test_peers_get_the_same_problem(case: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our library in the place of FlashInfer, and a FlashAttention that gathers pages."""
    inputs = shapes.make_inputs(case, CPU)
    expected = check.expect(case, inputs)
    monkeypatch.setattr(peers, "_module", lambda name: peers.ck)
    timed = peers._flashinfer("reference", case, inputs)
    assert check.fault(timed.output(timed.call()), expected) is None
    if not case.page_size:
        return

    def attend(q: Any, k: Any, v: Any, *, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any, **more: Any) -> Any:
        assert (more["max_seqlen_q"], more["causal"]) == (7, True)
        outs = []
        for b, length in enumerate(cache_seqlens.tolist()):
            keys, values = (x[page_table[b].long()].flatten(0, 1)[:length] for x in (k, v))
            rows = slice(*cu_seqlens_q[b : b + 2].tolist())
            outs.append(peers.ck.single_prefill_with_kv_cache(q[rows], keys, values, causal=True))
        return torch.cat(outs)

    library = types.SimpleNamespace(flash_attn_with_kvcache=attend)
    monkeypatch.setattr(peers, "_module", lambda name: library)
    timed = peers._flash_attn_3(case, inputs)
    assert check.fault(timed.output(timed.call()), expected) is None


# --- reports -----------------------------------------------------------------------------------------------------


def example(higher: bool = True) -> reporting.Report:
    def result(column: str, backend: str, figure: float | None, **more: Any) -> reporting.Result:
        series = None if figure is None else timing.Series(4, "launch", [1.0, 1.1, 1.05])
        return reporting.Result(backend, "hd64 full", column, 1e12, figure, series=series, **more)

    results = [
        result("1k", "fa2", 300.0),
        result("1k", "torch_fa2", 200.0),
        result("1k", "cudnn", 400.0),
        result("2k", "fa2", 330.0),
        result("2k", "torch_fa2", 300.0),
        result("2k", "cudnn", None, reason="no such thing"),
        result("4k", "fa2", None, reason="broken", failed=True),
        result("4k", "torch_fa2", 310.0),
        result("4k", "cudnn", None, reason="no such thing"),
    ]
    names = ["fa2", "torch_fa2", "cudnn"]
    facts = {"gpu": "GPU", "dtype": "bfloat16", "mode": "burst"}
    unit = "TFLOP/s" if higher else "us"
    return reporting.Report(unit, higher, names, ["fa2"], ["best", "torch_fa2"], facts, results)


def test_ratios() -> None:
    report = example()
    one, two, three = report.cases()
    assert report.ratio(one, "fa2", "best") == pytest.approx(0.75)
    assert report.ratio(one, "fa2", "torch_fa2") == pytest.approx(1.5)
    assert report.ratio(one, "fa2", "torch_fa2+cudnn") == pytest.approx(0.75)
    assert report.ratio(two, "fa2", "best") == pytest.approx(1.1)
    assert report.ratio(three, "fa2", "best") is None
    mean, least, count = report.mean_ratio("fa2", "torch_fa2")
    assert (mean, least, count) == (pytest.approx(math.sqrt(1.5 * 1.1)), pytest.approx(1.1), 2)
    assert report.means()[0] == "fa2 / the best peer: geometric mean 0.908, least 0.750, 2 cases"


def test_ratio_above_one_is_better_for_times_too() -> None:
    report = example(higher=False)
    assert report.ratio(report.cases()[0], "fa2", "best") == pytest.approx(200 / 300)


def test_units() -> None:
    case = Prefill("small", "one", (16,), (40,), 4, 2, 16, 16)
    report = run([case], [peers.PREFILL["reference"]])
    assert report.unit == "TFLOP/s"
    ((key,), name) = report.cases(), "reference"
    result = report.result(key, name)
    assert result is not None and result.series is not None
    seconds = result.series.median
    times, rates = (report.in_unit(reporting.UNITS[unit]) for unit in ("us", "GB/s"))
    assert report.figure(key, name) == pytest.approx(1e-12 * case.work / seconds)
    assert times.figure(key, name) == pytest.approx(1e6 * seconds)
    assert rates.figure(key, name) == pytest.approx(1e-9 * case.bytes / seconds)
    assert (times.unit, times.higher_is_better, rates.higher_is_better) == ("us", False, True)
    assert reporting.cell(dataclasses.replace(result, figure=4321.9), "GB/s") == "4322"
    assert reporting.cell(dataclasses.replace(result, figure=4321.9), "us") == "4321.9"


def test_table() -> None:
    header, rows = reporting.table(example())
    assert header == ["case", "fa2", "torch_fa2", "cudnn", "fa2 / best peer", "fa2 / torch_fa2", "spread"]
    assert rows[0] == ["hd64 full 1k", "300", "200", "400", "0.75", "1.50", "9.5 %"]
    assert rows[1][3:5] == ["-", "1.10"]
    assert rows[2][1] == "failed"


def test_markdown() -> None:
    assert reporting.markdown(example()).splitlines() == [
        "| TFLOP/s | | 1k | 2k | 4k |",
        "|---|---|---|---|---|",
        "| hd64 full | **fa2** | 300 | 330 | failed |",
        "| hd64 full | torch_fa2 | 200 | 300 | 310 |",
        "| hd64 full | cudnn | 400 | - | - |",
        "| hd64 full | fa2 / best peer | 0.75 | 1.10 | - |",
        "| hd64 full | fa2 / torch_fa2 | 1.50 | 1.10 | - |",
        "",
        "- fa2 / the best peer: geometric mean 0.908, least 0.750, 2 cases",
        "- fa2 / torch_fa2: geometric mean 1.285, least 1.100, 2 cases",
    ]


def test_files(tmp_path: Path) -> None:
    report = example()
    written = reporting.write(report, tmp_path / "new", "run", [example(higher=False)])
    assert [path.suffix for path in written][:3] == [".csv", ".json", ".md"]
    with written[0].open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(report.results)
    assert rows[0]["backend"] == "fa2"
    assert float(rows[0]["figure"]) == 300.0
    assert rows[5]["reason"] == "no such thing"
    text = written[2].read_text()
    assert text.index("| TFLOP/s |") < text.index("| us |")
    loaded = json.loads(written[1].read_text())
    assert loaded["environment"]["gpu"] == "GPU"
    assert loaded["results"][0]["series"]["seconds"] == [1.0, 1.1, 1.05]


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = reporting.plot(example(), tmp_path / "run.png")
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert reporting.plot(example(), tmp_path / "none.png") is None


# --- command line ------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    return typer_testing.CliRunner().invoke(bench.app, list(arguments))


def test_dry_run_lists_cases_and_work() -> None:
    result = invoke("prefill", "--workload", "quick,gpt-oss", "--only", "16k", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("hd128 full 16k")
    assert "2,199.0 GFLOP" in lines[0]
    assert lines[-1].startswith("4 cases, ")
    window = next(line for line in lines if line.startswith("gpt-oss window"))
    assert window.endswith("honoured by fa2 fa3")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("decoding",), "'decoding'"),
        (("prefill", "--workload", "nothing"), "use quick, paper"),
        (("prefill", "--backends", "fa2,fa9"), "'fa9'"),
        (("prefill", "--dtype", "float64"), "'float64'"),
        (("prefill", "--only", "nothing"), "leaves no case"),
        (("prefill", "--unit", "GFLOP/s"), "use TFLOP/s, GB/s, us"),
        (("host", "--unit", "GB/s"), "'GB/s'"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[str, ...], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())


def test_dry_run_of_memory_bound_cases_lists_bytes() -> None:
    result = invoke("prefill", "--workload", "append", "--only", "1x 1 over 4k", "--dry-run")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == 3
    assert "16.8 MB" in lines[0]
    assert "torch_fa2" in lines[0]
    assert lines[1].endswith("honoured by fa2 fa3 flashinfer_fa2 flashinfer_fa3 flash_attn_3")
    assert "MB" not in invoke("host", "--dry-run").output


def test_list() -> None:
    result = invoke("list")
    assert result.exit_code == 0
    for name in (*peers.OPERATIONS, *shapes.WORKLOADS, *peers.PREFILL):
        assert name in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = invoke("prefill", "--workload", "quick")
    assert result.exit_code == 2
    assert "no CUDA device" in result.output
    assert "--dry-run" in result.output


@pytest.mark.gpu
def test_runs_on_a_gpu(tmp_path: Path) -> None:
    arguments = ("--only", "full 2k", "--rounds", "2", "--backends", "fa2,torch_fa2", "--out", str(tmp_path))
    result = invoke("prefill", "--workload", "quick", *arguments)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "prefill-quick.csv").exists()
    result = invoke("host", "--backends", "fa2", "--rounds", "2", "--round-ms", "2")
    assert result.exit_code == 0, result.output


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("workload", "only", "tables"),
    [
        ("paged", "hd128 16x1k (ragged|page 5)", ["TFLOP/s"]),
        ("append", "^(64x 1 over 4k|1x 16 over 32k), (64/8|8/1)", ["us", "GB/s"]),
        ("masks", "hd64", ["us", "TFLOP/s"]),
    ],
)
def test_workloads_of_pages_and_masks_run_on_a_gpu(tmp_path: Path, workload: str, only: str, tables: list[str]) -> None:
    arguments = ("--only", only, "--rounds", "2", "--backends", "fa2,torch_fa2", "--out", str(tmp_path))
    result = invoke("prefill", "--workload", workload, *arguments)
    assert result.exit_code == 0, result.output
    text = (tmp_path / f"prefill-{workload}.md").read_text()
    assert [unit for unit in ("us", "GB/s", "TFLOP/s") if f"| {unit} |" in text] == tables
