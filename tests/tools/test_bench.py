"""The benchmark without a GPU: checks, reports, and the whole way from a case to a file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

typer_testing = pytest.importorskip("typer.testing")
import bench  # noqa: E402
import check  # noqa: E402
import measure  # noqa: E402
import report as reporting  # noqa: E402
import timing  # noqa: E402
from backend import Backend, Case, module  # noqa: E402
from inputs import Inputs, make_inputs  # noqa: E402
from operations import OPERATIONS, WORKLOADS, fused, prefill  # noqa: E402
from operations.append_by_slot import Append, expect_stored, make_entries  # noqa: E402
from operations.fused import Fused  # noqa: E402
from operations.host import Host  # noqa: E402
from operations.merge import Merge, expect_merged, make_states  # noqa: E402
from operations.rope import Rope, expect_rotated, make_tokens  # noqa: E402
from operations.shared_prefix import SharedPrefix  # noqa: E402
from problem import Problem, random_mask, with_pages  # noqa: E402

import cutlass_kernels as ck  # noqa: E402

CPU = torch.device("cpu")
PREFILL = OPERATIONS["prefill"].backends
FAST = timing.Settings("test", rounds=3, pause_ms=0.0, warm_ms=0.0, round_ms=0.01)
SMALL = Problem("small", "one", (40,), (70,), 4, 2, 16, 16, window_left=9, soft_cap=5.0, sinks=True)


# --- checking ----------------------------------------------------------------------------------------------------


def full_mask(case: Problem, request: int) -> torch.Tensor:
    qo, kv = case.qo_lens[request], case.kv_lens[request]
    if case.custom_mask == "random":
        return random_mask(qo, kv)
    causal = case.causal or case.custom_mask == "causal"
    return oracle.visible(qo, kv, causal=causal, window_left=case.window_left)


@pytest.mark.parametrize("elements", [check.ELEMENTS, 1], ids=["all heads", "head by head"])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Problem("g", "batch", (3, 700, 20), (3, 900, 64), 4, 4, 32, 16),
        Problem("g", "full", (5,), (33,), 2, 1, 8, 8, causal=False),
        Problem("g", "bits", (600,), (700,), 4, 2, 8, 8, causal=False, custom_mask="causal"),
        Problem("g", "random bits", (600,), (700,), 4, 2, 8, 8, causal=False, custom_mask="random"),
        Problem("g", "alibi", (9, 530), (30, 600), 8, 2, 8, 8, alibi=True),
        Problem("g", "pages", (3, 1), (30, 600), 8, 2, 8, 8, page_size=5),
    ],
    ids=lambda case: case.column,
)
def test_expected_result_is_that_of_the_oracle(case: Problem, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ELEMENTS", elements)
    inputs = make_inputs(case, CPU)
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
    assert expected.plain.largest > expected.plain.rms > 0
    assert check.fault(torch.cat(outs).to(inputs.q.dtype), expected) is None


@pytest.mark.parametrize("elements", [check.ELEMENTS, 1], ids=["at once", "token by token"])
@pytest.mark.parametrize("states", [2, 5])
def test_expected_merge_is_that_of_the_oracle(states: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ELEMENTS", elements)
    case = Merge(7, states, 3, 16)
    inputs = make_states(case, CPU)
    expected = expect_merged(inputs)
    torch.testing.assert_close(expected.out.double(), oracle.merge(inputs.v, inputs.s)[0], atol=2e-6, rtol=2e-6)
    for name in ("auto", "torch"):
        timed = OPERATIONS["merge"].backends[name].make(case, inputs)
        assert check.fault(timed.output(timed.call()), expected) is None
    assert check.fault(inputs.v[:, 0], expected) is not None
    read = sum(x.numel() * x.element_size() for x in (inputs.v, inputs.s))
    assert case.bytes == pytest.approx(read * (states + 1) / states)


def test_wrong_results_are_noticed() -> None:
    inputs = make_inputs(SMALL, CPU)
    expected = check.expect(SMALL, inputs)
    right = expected.out.to(torch.bfloat16)
    assert check.fault(right, expected) is None
    wrong = right.clone()
    wrong[7, 1, 3] += 0.25
    assert "largest error" in str(check.fault(wrong, expected))
    noisy = right + (0.02 * torch.sin(torch.arange(right.numel()))).view_as(right).to(right.dtype)
    assert "error" in str(check.fault(noisy, expected))
    wrong[0, 0, 0] = math.nan
    assert "NaN positions differ: 1 unexpected at [(0, 0, 0)]" in str(check.fault(wrong, expected))
    assert "shape" in str(check.fault(right[1:], expected))


def test_large_cases_are_checked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROWS", 8)
    monkeypatch.setattr(check, "PAIRS", 40 * 70 * 4 / 2)
    expected = check.expect(SMALL, make_inputs(SMALL, CPU))
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
    series = timing.interleave(calls, settings, FakeClock(), random.Random(0), tick=turns.append)
    assert [set(turns[i : i + 2]) for i in range(0, 8, 2)] == [{"slow", "quick"}] * 4
    assert series["slow"].launches == 2
    assert series["quick"].launches == 10
    assert series["quick"].median == pytest.approx(0.0005)
    assert series["quick"].spread == pytest.approx(0.0)
    assert series["quick"].mode == "launch"
    assert len(series["slow"].seconds) == 4


def test_the_order_of_every_round_is_drawn() -> None:
    def orders(seed: int) -> list[tuple[str, ...]]:
        turns: list[str] = []
        calls = {name: timing.Timed(lambda: 1e-3) for name in "abc"}
        settings = timing.Settings("test", rounds=50, pause_ms=0.0, warm_ms=0.0, round_ms=1.0, graph="off")
        timing.interleave(calls, settings, FakeClock(), random.Random(seed), tick=turns.append)
        return [tuple(turns[i : i + 3]) for i in range(0, 150, 3)]

    first = orders(1)
    assert set(first) == set(itertools.permutations("abc"))
    assert orders(1) == first
    assert orders(2) != first


def test_short_calls_are_measured_as_graphs() -> None:
    calls = {"short": timing.Timed(lambda: 1e-5), "other": timing.Timed(lambda: 1e-3)}
    settings = timing.Settings("test", rounds=2, pause_ms=0.0, warm_ms=0.0, round_ms=1.0)
    series = timing.interleave(calls, settings, FakeClock(), random.Random(0))
    assert {name: s.mode for name, s in series.items()} == {"short": "graph", "other": "graph"}
    assert series["short"].median == pytest.approx(1e-5)
    assert series["short"].launches >= 100
    refused = timing.interleave(calls, settings, FakeClock(captures=False), random.Random(0))
    assert refused["short"].mode == "launch"
    off = timing.interleave(calls, dataclasses.replace(settings, graph="off"), FakeClock(), random.Random(0))
    assert off["short"].mode == "launch"


def test_host_clock_counts_calls_only() -> None:
    events: list[str] = []
    clock = timing.HostClock(lambda: events.append("synchronize"))
    assert clock.time(lambda: events.append("call"), timing.QUEUE + 1, None) > 0
    assert events.count("call") == timing.QUEUE + 1
    assert events[0] == events[timing.QUEUE + 1] == events[-1] == "synchronize"


# --- the whole way -----------------------------------------------------------------------------------------------


def made_up(name: str, factor: float) -> Backend:
    """A peer that computes the reference's result times ``factor``, and honours nothing but causal masks and GQA."""

    def make(case: Problem, x: Inputs) -> timing.Timed:
        ours = PREFILL["reference"].make(case, x)
        return timing.Timed(lambda: ours.call() * factor)

    return Backend(name, False, frozenset({"causal", "gqa"}), lambda device: None, make)


def run(cases: list[Case], backends: list[Backend], operation: str = "prefill") -> reporting.Report:
    settings, clock = FAST, timing.HostClock()
    results = measure.measure(OPERATIONS[operation], cases, backends, settings, CPU, clock)
    op = OPERATIONS[operation]
    names, ours = [b.name for b in backends], [b.name for b in backends if b.ours]
    facts = {**measure.environment(settings, "bfloat16", None), "gpu": "none"}
    return reporting.Report(op.unit, op.higher_is_better, names, ours, ["best", "good"], facts, results)


def test_cases_are_measured_and_gaps_have_reasons() -> None:
    plain = Problem("small", "plain", (16, 16), (16, 16), 4, 2, 16, 16)
    backends = [
        PREFILL["reference"],
        PREFILL["fa2"],
        made_up("good", 1.0),
        made_up("bad", 1.5),
        PREFILL["torch_fa2"],
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
    hosts = [c for c in WORKLOADS["calls"].cases("bfloat16") if isinstance(c, Host) and c.indptr == "cpu"]
    cases = [c for c in hosts if c.call.endswith("_plan") or c.batch <= 8]
    report = run(list(cases), [OPERATIONS["host"].backends["auto"]], "host")
    figures = [report.figure(case, "auto") for case in report.cases()]
    assert len(figures) == len(cases) == 9
    assert all(figure is not None and figure > 0 for figure in figures)


def test_pages_masks_and_alibi_are_measured() -> None:
    plain = Problem("small", "", (7, 1), (40, 33), 4, 2, 16, 16)
    single = Problem("small", "causal", (20,), (33,), 4, 2, 16, 16)
    cases: list[Case] = [
        *with_pages(plain, (1, 5)),
        dataclasses.replace(plain, column="two tensors", head_dim_vo=8, page_size=16),
        *with_pages(dataclasses.replace(single, group="one"), (16,)),
        *(dataclasses.replace(single, column=f"{m} bits", causal=False, custom_mask=m) for m in ("causal", "random")),
        dataclasses.replace(single, column="alibi", alibi=True),
    ]
    report = run(cases, [PREFILL["reference"], made_up("good", 1.0)])
    assert [r.reason for r in report.results if r.backend == "reference"] == [""] * len(cases)
    assert all(report.figure(case, "reference") is not None for case in report.cases())
    assert "good, 2 of 9 cases: does not honour custom_mask" in report.reasons()
    assert "good, 1 of 9 cases: does not honour alibi, append" in report.reasons()
    assert "good, 2 of 9 cases: does not honour append, paged, ragged" in report.reasons()


@pytest.mark.parametrize("cache", ["float16", "float8_e4m3fn"])
def test_expected_appends_are_what_both_store(cache: str) -> None:
    case = Append(37, 2, 64, cache, "float16")
    for name in ("auto", "torch"):
        inputs = make_entries(case, CPU)
        timed = OPERATIONS["append_by_slot"].backends[name].make(case, inputs)
        assert check.fault(timed.output(timed.call()), expect_stored(inputs)) is None, name
        inputs.key_cache.view(torch.uint8)[0, 0, 0, 0] ^= 0x40
        assert check.fault(inputs.stored(), expect_stored(inputs)) is not None


@pytest.mark.parametrize("cache", [None, "float16", "float8_e4m3fn"])
def test_expected_keys_are_what_both_rotate(cache: str | None) -> None:
    case = Rope(37, 4, 2, 64, cache, "float16")
    for name in ("auto", "two_calls"):
        inputs = make_tokens(case, CPU)
        timed = OPERATIONS["rope"].backends[name].make(case, inputs)
        timed.call()
        assert check.fault(timed.output(timed.call()), expect_rotated(inputs)) is None, name
        inputs.positions += 1
        assert check.fault(timed.output(None), expect_rotated(make_tokens(case, CPU))) is not None


@pytest.mark.parametrize(
    "layout", ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"]
)
def test_layouts_hold_the_problem(layout: str) -> None:
    heads, page_size = (4, 4) if layout == "PACKED_QKV" else (4, 2), 8 if "PAGED" in layout else 0
    case = Fused(Problem("g", "c", (7, 20), (7, 20), *heads, 16, 16, page_size=page_size), layout)
    operation = OPERATIONS["fused"]
    inputs = operation.inputs(case, CPU)
    timed = fused.fused(ck, case, inputs)
    assert check.fault(timed.output(timed.call()), operation.expect(case, inputs)) is None


@pytest.mark.parametrize("name", ["levels", "shared", "plain", "copies"])
def test_shared_prefixes_are_shared(name: str) -> None:
    case = SharedPrefix(Problem("g", "c", (1,) * 3, (43,) * 3, 4, 2, 16, 16, page_size=4), 32)
    operation = OPERATIONS["shared_prefix"]
    inputs = operation.inputs(case, CPU)
    timed = operation.backends[name].make(case, inputs)
    assert check.fault(timed.output(timed.call()), operation.expect(case, inputs)) is None
    assert case.bytes == case.problem.bytes - 2 * 2 * 32 * 2 * 32


@pytest.mark.parametrize(("batch", "page_size"), [(1, 0), (3, 16)])
def test_decode_has_a_token_per_request(batch: int, page_size: int) -> None:
    case = Problem("g", "c", (1,) * batch, (40,) * batch, 4, 2, 16, 16, page_size=page_size)
    operation = OPERATIONS["decode"]
    inputs = operation.inputs(case, CPU)
    timed = operation.backends["reference"].make(case, inputs)
    for _ in range(2):  # the second call reads another copy of the pages
        assert check.fault(timed.output(timed.call()), operation.expect(case, inputs)) is None


@pytest.mark.parametrize("case", with_pages(Problem("g", "", (7, 1), (40, 33), 4, 2, 16, 16), (5, 16)))
def test_peers_get_the_same_problem(case: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our library in the place of FlashInfer, and a FlashAttention that gathers pages."""
    inputs = make_inputs(case, CPU)
    expected = check.expect(case, inputs)
    monkeypatch.setattr(prefill, "module", lambda name: ck)
    timed = prefill.flashinfer("reference", case, inputs)
    assert check.fault(timed.output(timed.call()), expected) is None
    if not case.page_size:
        return

    def attend(q: Any, k: Any, v: Any, *, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any, **more: Any) -> Any:
        assert (more["max_seqlen_q"], more["causal"]) == (7, True)
        outs = []
        for b, length in enumerate(cache_seqlens.tolist()):
            keys, values = (x[page_table[b].long()].flatten(0, 1)[:length] for x in (k, v))
            rows = slice(*cu_seqlens_q[b : b + 2].tolist())
            outs.append(ck.single_prefill_with_kv_cache(q[rows], keys, values, causal=True))
        return torch.cat(outs)

    library = types.SimpleNamespace(flash_attn_with_kvcache=attend)
    monkeypatch.setattr(prefill, "module", lambda name: library)
    timed = prefill.flash_attn_3(case, inputs)
    assert check.fault(timed.output(timed.call()), expected) is None


def test_a_peer_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    module.cache_clear()
    case = Problem("g", "", (7, 1), (40, 33), 4, 2, 16, 16, page_size=16)
    reasons = [PREFILL[f"flashinfer_{name}"].why_not(case, torch.device("cuda")) for name in ("fa2", "fa3")]
    module.cache_clear()
    assert all(reason is not None and reason.startswith("flashinfer cannot be imported: ") for reason in reasons)


def test_units() -> None:
    case = Problem("small", "one", (16,), (40,), 4, 2, 16, 16)
    report = run([case], [PREFILL["reference"]])
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
        (("merge", "--dtype", "float8_e4m3fn"), "no type of states"),
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
    for name in (*OPERATIONS, *WORKLOADS, *PREFILL):
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
    result = invoke("merge", "--backends", "auto,torch", "--rounds", "2", "--round-ms", "2")
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
