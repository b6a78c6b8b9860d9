"""The cost model against measured and published figures, and what its command line prints."""

from __future__ import annotations

import json
import random
import re
import shlex
from typing import Any

import pytest
import torch
from paths import ROOT

from cutlass_kernels.distributed import __main__ as plan_report
from cutlass_kernels.distributed import _cost
from cutlass_kernels.distributed.__main__ import EXAMPLES, count, main
from cutlass_kernels.distributed._cost import Problem
from cutlass_kernels.distributed._hardware import GPUS, Cluster
from cutlass_kernels.distributed._plans import Kind, Mask, plan_of

K, M = 1 << 10, 1 << 20
PAGE = (ROOT / "docs" / "scaling.md").read_text()
CAUSAL = Mask(right=0)


def unequal() -> tuple[int, ...]:
    draw, lens, left = random.Random(1), [], 128 * K
    while left:
        lens.append(min(draw.randint(512, 32768), left))
        left -= lens[-1]
    return tuple(lens)


def problem(
    *lens: int, mask: Mask = CAUSAL, heads: tuple[int, int] = (32, 8), layout: str = "zigzag", size: int = 2
) -> Problem:
    return Problem(layout, 256, lens, lens, mask, *heads, 128, 128, size)


def cluster(world: int, per_node: int = 8, gpu: str = "h100") -> Cluster:
    return Cluster(GPUS[gpu], world, per_node)


# Rows of the page: ms of two and of four H200, by method and problem. The rows of 8k gave RING_START and HEADS_START.
ROW = re.compile(r"^\| (?:`(\w+)`, )?(\d.+?) \| ([\d.]+) ms \| \S+ \| \S+ \| ([\d.]+) ms \|", re.MULTILINE)
MEASURED = {(comm or "allgather", name): (float(two), float(four)) for comm, name, two, four in ROW.findall(PAGE)}
# benchmarks/results/log, 2026-11-27, second: ms of one H200, in the run of two and in that of four.
ONE = {
    "1 x 8k": (0.741, 0.745),
    "1 x 16k": (2.873, 2.897),
    "1 x 64k": (50.95, 51.42),
    "1 x 128k": (208.9, 209.8),
    "9 requests of 512 to 32k": (32.53, 33.02),
    "8 x 16k": (24.61, 24.87),
    "1 x 128k, window of 4k": (11.90, 12.00),
}
# What the page lists as missed: expected over measured parts of linear.
MISSED = {
    ("allgather", "1 x 8k", 4): 1.197,
    ("allgather", "1 x 8k, in a graph", 4): 1.221,
    ("ring", "1 x 16k", 4): 1.165,
    ("ring", "8 x 16k", 4): 1.221,
    ("ulysses", "1 x 128k, window of 4k", 2): 1.140,
    ("ulysses", "1 x 128k, window of 4k", 4): 1.103,
}
# us of one GPU; the page has those of several. Two H100, 2026-11-27: constants of H100 are fitted to these rows. Four
# H200, 2026-11-27, second, and two, 2026-11-28: predicted from those of one H200.
DECODE = {
    "1 x 128k, 2 H100": 183.5,
    "64 x 8k, 2 H100": 704.7,
    "1 x 128k, 2 H200": 126.5,
    "64 x 8k, 2 H200": 475.8,
    "1 x 128k, 4 H200": 128.6,
    "64 x 8k, 4 H200": 487.0,
}


def lens_of(name: str) -> tuple[int, ...]:
    """Of "64 x 8k"."""
    if name == "9 requests of 512 to 32k":
        return unequal()
    requests, tokens = name.split(" x ")
    return (count(tokens),) * int(requests)


def problem_of(name: str) -> Problem:
    lens, _, window = name.partition(", window of ")
    return problem(*lens_of(lens), mask=Mask(count(window), 0) if window else CAUSAL)


def test_the_page_has_every_measurement():
    assert len(MEASURED) == 21
    assert {name.removesuffix(", in a graph") for _, name in MEASURED} == set(ONE)


@pytest.mark.parametrize("comm, name", MEASURED)
def test_prefill(comm, name):
    """A row of the page. Parts of linear are within 10 %, but for those that are listed as missed. Times are of GPUs
    that compute all the time: calls of less than 10 ms, which come after a pause, are up to 13 % faster."""
    plain = name.removesuffix(", in a graph")
    asked, captured = problem_of(plain), name != plain or comm != "allgather"
    expected_one = _cost.one_gpu(asked, cluster(1, gpu="h200")) * 1e3
    cells = [name if comm == "allgather" else f"`{comm}`, {name}"]
    for world, one, time in zip((2, 4), ONE[plain], MEASURED[comm, name], strict=True):
        assert expected_one == pytest.approx(one, rel=0.14)
        estimate: Any = _cost.estimates(asked, cluster(world, gpu="h200"), captured)[comm]
        expected = estimate.seconds * 1e3
        part, expected_part = one / world / time, expected_one / world / expected
        if (miss := MISSED.get((comm, name, world))) is None:
            assert expected_part == pytest.approx(part, rel=0.10)
        else:
            assert expected_part / part == pytest.approx(miss, abs=0.005)
        if comm == "allgather":
            assert expected == pytest.approx(time, rel=0.14)
        cells += [f"{time:.4g} ms", f"{part:.2f}", f"{expected_part:.2f}"]
    assert f"| {' | '.join(cells)} |" in PAGE


@pytest.mark.parametrize("name", DECODE)
def test_decode(name):
    (several,) = map(float, re.findall(rf"^\| {name} \| ([\d.]+) us \|", PAGE, re.MULTILINE))
    lens, world, gpu = re.fullmatch(r"(.*), (\d) (\w+)", name).groups()  # type: ignore[union-attr]
    step = _cost.Step(lens_of(lens), 32, 8, 128, 2)
    one, expected = (_cost.step_estimate(step, cluster(n, gpu=gpu.lower())).seconds * 1e6 for n in (1, int(world)))
    assert one == pytest.approx(DECODE[name], rel=0.10)
    assert expected == pytest.approx(several, rel=0.10)
    assert f"| {name} | {several:.4g} us | {expected:.3g} us |" in PAGE


def test_combine_over_two_gpus():
    """64 rows x 32 heads x 128 (2026-11-27). Latencies are from it."""
    to_each = 64 * 32 * 128 * 2 // 2
    for comm, measured in (("symmetric", 6.8), ("a2a", 26.4)):
        _, combine, took = _cost.exchanged(to_each, cluster(2), True, comm)
        assert took == comm
        assert combine * 1e6 == pytest.approx(measured, rel=0.10)


def test_published_over_128_gpus():
    """Llama 3 405B (128/8 heads), 1M tokens on 16 nodes of 8 H100 in 77 s, 93 % (arXiv 2411.01783): heads over the GPUs
    of a node, tokens over nodes, in a ring. So a GPU has 16/1 heads, and 16 ranks have no NVLink between them. A weak
    check: whatever is between 0.84 and 1 passes, and the 77 s are not of attention alone."""
    asked, nodes = problem(M, heads=(16, 1)), cluster(16, per_node=1)
    for estimate in (_cost.ring(asked, nodes), _cost.allgather(asked, nodes)):
        assert _cost.one_gpu(asked, nodes) / 16 / estimate.seconds == pytest.approx(0.93, rel=0.10)


@pytest.mark.parametrize("head_dim, within", [(64, 0.09), (128, 0.04), (256, 0.04)])
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_over_lengths(head_dim, within, causal):
    """TFLOP/s of 512 to 16k tokens on an H200, which were fitted: short runs, at 787 TFLOP/s instead of 706."""
    group = f"hd{head_dim} {'causal' if causal else 'full'}"
    results = json.loads((ROOT / "docs" / "data" / "prefill.json").read_text())["results"]
    row = [x["figure"] for x in results if (x["group"], x["backend"]) == (group, "fa3")]
    assert len(row) == 6
    gpu = GPUS["h200"]._replace(flops=787e12)
    for i, measured in enumerate(row):
        n = 512 << i
        asked = problem(n, mask=CAUSAL if causal else Mask())._replace(head_dim_qk=head_dim, head_dim_vo=head_dim)
        pairs = _cost.visible(asked.mask, 0, n, n)
        seconds = _cost._attention(asked, Cluster(gpu, 1, 8), n, pairs, 32)
        assert 4 * head_dim * 32 * pairs / seconds / 1e12 == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("mask", [CAUSAL, Mask(), Mask(17, 0), Mask(9, 4), Mask(right=0, chunk_size=24), Mask(30, -1)])
def test_pairs_are_those_of_the_mask(mask):
    for n, m in ((70, 70), (33, 128), (1, 1)):
        start = m - n
        seen = sum(hi - lo for lo, hi in (mask.keys_of(p, p + 1, m) for p in range(start, m)))
        assert _cost.visible(mask, start, m, m) == seen


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "interleaved"])
@pytest.mark.parametrize("mask", [CAUSAL, Mask(), Mask(300, 0)])
@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)])
def test_work_is_that_of_the_plan(layout, mask, shape):
    lens = (4000, 17, 1024)
    kind = Kind(layout, 64, lens, lens, mask, *shape)
    plan = plan_of(kind)
    works = _cost.of_ranks(kind, 8)
    for work, gather, row in zip(works, plan.gathers, plan.q_grid_rows, strict=True):
        assert (work.rows, work.pulled, work.planned_pairs) == (row.rows, gather.pulled_rows, gather.pairs)
    pairs = sum(_cost.visible(mask, 0, n, n) for n in lens)
    assert sum(w.pairs for w in works) == pairs


@pytest.mark.parametrize("comm", ["allgather", "ring", "hybrid"])
@pytest.mark.parametrize("tokens", [128 * K, M])
def test_more_gpus_compute_less_each_and_no_less_together(comm, tokens):
    asked = problem(tokens, heads=(64, 8))
    before = None
    for world in (16, 32, 64, 128, 256, 512, 1024):
        estimate: Any = _cost.estimates(asked, cluster(world))[comm]
        assert min(estimate.compute, estimate.transfer, estimate.exposed, estimate.overhead) >= 0
        if before is not None:
            assert before.compute / 2.01 < estimate.compute < before.compute
        before = estimate


def test_auto_is_what_measured_best_on_two_gpus():
    for name in ONE:
        assert _cost.choose(problem_of(name), 2, 2) == "allgather"


@pytest.mark.parametrize(
    "asked, world, per_node, comm",
    [
        (problem(1), 2, 2, "allgather"),
        (problem(128 * K), 1, 1, "allgather"),
        (problem(128 * K, heads=(32, 32)), 16, 8, "ulysses"),  # keys of all heads between nodes take longer
        (problem(128 * K, heads=(30, 30)), 16, 8, "allgather"),  # 16 ranks cannot share the heads
        (problem(10 * M, heads=(64, 8)), 8, 8, "ulysses"),  # gathered keys of 43 GB
        (problem(10 * M, heads=(60, 20)), 16, 8, "ring"),
        (problem(10 * M, heads=(60, 20), mask=Mask(4 * K, 0)), 16, 8, "allgather"),
        (problem(0, 5), 3, 3, "allgather"),
        (problem(), 4, 4, "allgather"),
    ],
)
def test_auto(asked, world, per_node, comm):
    assert _cost.choose(asked, world, per_node) == comm


@pytest.mark.parametrize("text, value", [("4096", 4096), ("128k", 128 * K), ("1M", M), ("1.5K", 1536), ("10m", 10 * M)])
def test_counts_with_suffixes(text, value):
    assert count(text) == value


@pytest.mark.parametrize(
    "arguments, told",
    [
        ("plan", "Pass either --tokens"),
        ("plan --tokens 4k --seqlens 1k,2k", "Pass either --tokens"),
        ("plan --tokens 0", "'0' is not a whole number"),
        ("plan --tokens 1.3", "'1.3' is not a whole number"),
        ("plan --tokens 12q", "'12q' is not a whole number"),
        ("plan --tokens nan", "'nan' is not a whole number"),
        ("plan --tokens 4k --gpus 0", "'0' is not a whole number"),
        ("plan --tokens 4k --heads 6/4", "'6/4' is not query heads/key heads"),
        ("plan --tokens 4k --heads 8/0", "'8/0' is not query heads/key heads"),
        ("plan --tokens 4k --full --window 8", "--window needs a causal mask"),
        ("plan --tokens 4k --gpus 3 --comm ulysses", "3 ranks cannot share 64 query heads"),
        ("plan --tokens 4k --gpus 4 --comm hybrid", "4 GPUs are not several nodes of 8 GPUs"),
        ("plan --tokens 4k --window 8 --comm ring", "serves causal masks and none"),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(arguments))
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "--tokens 1M --gpus 16 --full",
        "--seqlens 4k,64k,1k --gpus 8 --layout interleaved --gpu h200 --dtype fp8",
        "--tokens 8k --requests 64 --mode decode --gpus 2 --heads 32/8",
        "--tokens 128k --gpus 1",
        "--tokens 128k --gpus 24 --heads 96/8 --head-dim 64 --curve --graph",
        "--tokens 128k --gpus 64 --comm ulysses --curve",
    ],
)
def test_prints_a_table(arguments, capsys):
    main(["plan", *shlex.split(arguments)])
    lines = capsys.readouterr().out.splitlines()
    rows = [line.count("|") for line in lines if line.startswith("|")]
    assert len(rows) >= 3 and len(set(rows)) == 1
    assert max(map(len, lines)) <= 160
    assert lines[-1].startswith("Expected, not measured")


def test_help_shows_defaults_and_examples_that_run(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(f"({default})" in text for default in ("8", "h100", "prefill", "64/8", "128", "bf16", "zigzag"))
    for line in EXAMPLES.splitlines()[1:]:
        main(shlex.split(line.strip().removeprefix("python -m cutlass_kernels.distributed")))


COMMANDS = re.findall(
    r"^python -m cutlass_kernels\.distributed (plan .*?)(?: *#.*)?$", PAGE.replace(" \\\n", ""), re.MULTILINE
)


@pytest.mark.parametrize("arguments", COMMANDS)
def test_commands_of_the_page_run(arguments, capsys):
    main(shlex.split(arguments))
    out = capsys.readouterr().out
    assert arguments != COMMANDS[0] or out.strip() in PAGE


def test_curve_of_the_page():
    rows = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \| ", line)]
    assert rows == [_curve_row(1 << i) for i in range(11)], "\n".join(_curve_row(1 << i) for i in range(11))


def _curve_row(world: int) -> str:
    cells = [str(world)]
    for tokens in (128 * K, M, 10 * M):
        asked = problem(tokens, heads=(64, 8))
        best = _cost.best(_cost.estimates(asked, cluster(world)))
        efficiency = _cost.one_gpu(asked, cluster(1)) / world / best.seconds
        cells.append(f"{best.comm if world > 1 else '-'}, {plan_report._time(best.seconds)}, {efficiency:.2f}")
    step = _cost.Step((M,), 64, 8, 128, 2)
    here, one = (_cost.step_estimate(step, cluster(n)).seconds for n in (world, 1))
    cells.append(f"{plan_report._time(here)}, {one / here:.1f} x")
    return f"| {' | '.join(cells)} |"


def test_nodes_of_one_rank_need_no_group():
    from cutlass_kernels.distributed import _peers, _symmetric

    assert _symmetric.ranks_per_node(_peers.Peers(None, 0, (0,)), torch.device("cpu")) == 1  # type: ignore[arg-type]
