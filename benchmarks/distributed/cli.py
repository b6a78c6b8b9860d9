"""The command line, and the run that it asks for."""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import environment
from timing import Monitor, Settings

from . import combine, decode, prefill
from .columns import Column, Operation
from .ranks import Ranks, Stuck, start
from .run import Case, one, release
from .table import Report, Result, markdown, remarks, write

OPERATIONS = {o.name: o for o in (prefill.OPERATION, decode.OPERATION, combine.OPERATION)}
GRACE = 30.0  # seconds after --limit in which a case may end before the processes do


def _arguments(about: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=OPERATIONS)
    parser.add_argument("--workload", help="of the operation, separated by commas; all but tiny by default")
    parser.add_argument("--backends", help="columns, separated by commas; 'ours' is all of ours")
    parser.add_argument(
        "--graph", action="store_true", help="measure calls replayed from a CUDA graph beside eager ones"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-ms", type=float, default=20.0, help="how long a turn lasts at least")
    parser.add_argument("--pause-ms", type=float, default=20.0, help="before each turn")
    parser.add_argument("--seed", type=int, default=0, help="of the orders of turns")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no case is begun")
    parser.add_argument("--out", type=Path, help="a folder for JSON and Markdown")
    parser.add_argument("--name", help="of the files; that of the operation by default")
    return parser.parse_args()


def _chosen(what: str, text: str | None, known: dict[str, Any], default: list[str]) -> list[Any]:
    names = [name for name in text.split(",") if name] if text else default
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"{what} {unknown[0]!r} does not exist here: use {', '.join(known)}.")
    return [known[name] for name in names]


def _columns(operation: Operation, text: str | None) -> list[Column]:
    known: dict[str, list[Column]] = {c.name: [c] for c in operation.columns}
    known["ours"] = [c for c in operation.columns if c.ours]
    chosen = _chosen("backend", text, known, [c.name for c in operation.columns])
    return list(dict.fromkeys([*one(operation), *(c for group in chosen for c in group)]))


def _facts(ranks: Ranks, settings: Settings) -> dict[str, Any]:
    facts = environment(settings, "bfloat16", Monitor() if ranks.on_gpu else None)
    facts["command"] = f"torchrun --nproc-per-node {ranks.world} {' '.join(sys.argv)}"
    facts["ranks"] = ranks.world
    if ranks.on_gpu:
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def _progress(case: str, results: list[Result], begun: float) -> None:
    figures = ", ".join(f"{r.name} {1e3 * r.seconds:.3f}" for r in results if r.series is not None)
    print(f"[{time.perf_counter() - begun:.0f} s] {case}, ms: {figures or 'nothing ran'}", flush=True)
    for r in results:
        if r.failed:
            print(f"    {r.name} failed: {r.reason}", flush=True)


def main(about: str | None = None) -> None:
    """Ends the process. ``about`` is what ``--help`` begins with."""
    arguments = _arguments(about)
    # The last resort: a rank that hangs shows where, and ends. Rank 0 has printed and written all cases before.
    faulthandler.dump_traceback_later(arguments.limit + GRACE, exit=True)
    begun = time.perf_counter()
    operation = OPERATIONS[arguments.operation]
    columns = _columns(operation, arguments.backends)
    default = list(operation.default) if arguments.device == "cuda" else ["tiny"]
    cases = [c for make in _chosen("workload", arguments.workload, operation.workloads, default) for c in make()]
    ranks = start(arguments.device)
    torch.set_grad_enabled(False)
    on_cpu = arguments.device == "cpu"
    settings = Settings("burst", arguments.rounds, 0.0 if on_cpu else arguments.pause_ms, 5.0, arguments.round_ms)
    if on_cpu:
        modes = ["eager"]
    elif operation.only_graphs:
        modes = ["graph"]
    else:
        modes = ["eager", "graph"] if arguments.graph else ["eager"]
    report = Report(operation.name, operation.unit, ranks.world, _facts(ranks, settings), [])
    order = random.Random(arguments.seed)  # the same on all ranks
    code = 0
    for case in cases:
        if ranks.worst(time.perf_counter() - begun)[0] > arguments.limit:
            report.results += [Result(case.column, c.name, modes[0], c.ours, reason="--limit is over") for c in columns]
            continue
        try:
            results = Case(ranks, operation, case, modes).run(columns, settings, order)
        except Stuck as error:
            print(f"{case.column}, rank {ranks.rank}: stuck: {error}", flush=True)
            code = 1
            break
        report.results += results
        if ranks.rank == 0:
            _progress(case.column, results, begun)
            if arguments.out is not None:
                write(report, arguments.out, arguments.name or operation.name)
        release()
    if ranks.rank == 0:
        if arguments.out is not None:
            write(report, arguments.out, arguments.name or operation.name)
        facts = report.environment
        print(f"\n{ranks.world} x {facts.get('gpu', 'CPU')}, torch {facts['torch']}, commit {facts['commit']}\n")
        print(markdown(report))
        print("\n".join(f"- {line}" for line in remarks(report)))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not the ordinary way out: destroying NCCL communicators that captured graphs refer to can wait for ever, and so
    # can any of them after Stuck. Everything has been written.
    os._exit(code)
