"""Measures every tile of a backend over random problems, and fits the constants of the estimate that chooses tiles.

    python benchmarks/tile_times.py measure tiles.json --backend fa3 --head-dims 64,128,256 --seconds 60
    python benchmarks/tile_times.py fit tiles.json [more.json ...]   # needs scipy, no GPU
    python benchmarks/tile_times.py sample tests/backends/tile_times.json tiles.json [more.json ...]

``measure`` forces each candidate in turn, in CUDA graphs that are replayed in an order drawn anew. ``fit`` prints, for
each tile, the `TileTime` of ``cutlass_kernels/src/*/config.h``, and the constants of ``src/plan/estimate.cpp``: those
with which the tile of the least estimate takes the least time, and estimates are right where that leaves a choice.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

HEADS = [(32, 8), (8, 1), (64, 8), (16, 16), (32, 32), (8, 8), (28, 4), (16, 2), (5, 1)]
ROWS = [8, 12, 20, 33, 48, 64, 65, 80, 100, 128, 150, 200, 256, 300, 400, 512, 700, 1024, 1500, 2048, 4096]
KEYS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
REQUESTS = [1, 1, 1, 2, 3, 4, 8, 16, 32]
MOST_FLOP, MOST_KEY_BYTES = 4e11, 6e8
MULTIPROCESSORS = 132  # constants are those of an H200
CONSTANTS = ["kCall", "kCombine", "kList", "kTraffic (bytes per us and SM)", "kAlone"]
FIRST_GUESS = [2.5, 3.0, 12.0, 3e4, 2.0]  # of kAlone, what it is to the rest of 1


def random_problem(dice: random.Random, head_dims: list[int]) -> dict[str, Any] | None:
    heads, kv_heads = dice.choice(HEADS)
    rows, requests, dim = dice.choice(ROWS), dice.choice(REQUESTS), dice.choice(head_dims)
    keys = dice.choice([rows, rows, *(max(rows, k) for k in KEYS)])
    if 4.0 * requests * rows * keys * dim * heads > MOST_FLOP or requests * keys * kv_heads * dim * 4 > MOST_KEY_BYTES:
        return None
    if rows * (heads // kv_heads) <= 16:
        return None  # decode: one tile
    causal = dice.random() < 0.7
    return dict(dim=dim, heads=heads, kv_heads=kv_heads, requests=requests, rows=rows, keys=keys, causal=causal)


def measure(args: argparse.Namespace) -> None:
    import torch

    import cutlass_kernels as ck

    _C: Any = ck._core.native._C

    dtype = getattr(torch, args.dtype)
    dice, found = random.Random(args.seed), []
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        p = random_problem(dice, [int(dim) for dim in args.head_dims.split(",")])
        if p is None:
            continue
        dim, dim_vo, n = p["dim"], args.head_dim_vo or p["dim"], p["requests"]
        q = torch.randn(n * p["rows"], p["heads"], dim, device="cuda").to(dtype)
        k = torch.randn(n * p["keys"], p["kv_heads"], dim, device="cuda").to(dtype)
        v = torch.randn(n * p["keys"], p["kv_heads"], dim_vo, device="cuda").to(dtype)
        starts = torch.arange(n + 1, device="cuda", dtype=torch.int32)
        how: dict[str, Any] = dict(cu_seqlens_k=starts * p["keys"])
        if args.page_size:
            p["keys"] = max(p["keys"] // args.page_size, 1) * args.page_size
            table = torch.arange(n * p["keys"] // args.page_size, device="cuda", dtype=torch.int32).reshape(n, -1)
            k = k[: table.numel() * args.page_size].reshape(-1, args.page_size, *k.shape[1:])
            v = v[: table.numel() * args.page_size].reshape(-1, args.page_size, *v.shape[1:])
            how = dict(page_table=table, seqused_k=torch.full((n,), p["keys"], device="cuda", dtype=torch.int32))
        if args.alibi:
            how["alibi_slopes"] = torch.rand(p["heads"], device="cuda")
        how |= dict(cu_seqlens_q=starts * p["rows"], max_seqlen_q=p["rows"], max_seqlen_k=p["keys"])
        how |= dict(causal=p["causal"], backend=args.backend)
        _C.prefer_tile("")
        facts = _C.candidates(
            args.backend, args.dtype, args.dtype, p["heads"], p["kv_heads"], dim, dim_vo, n, n * p["rows"],
            n * p["keys"], p["causal"], args.page_size, 90, MULTIPROCESSORS, args.alibi, True,
        )  # fmt: skip
        # Of a tile with and without a list, the one that is estimated to be faster is what runs.
        best = {f["name"]: f for f in sorted(facts, key=lambda f: -f["us"])}
        graphs: dict[str, Any] = {}
        for name in ("", *best):
            _C.prefer_tile(name)
            ck.attention(q, k, v, **how)
            torch.cuda.synchronize()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(3):
                    ck.attention(q, k, v, **how)
        times = replayed(graphs)
        p |= dict(backend=args.backend, dtype=args.dtype, dim_vo=dim_vo, page_size=args.page_size, alibi=args.alibi)
        found.append(p | {"taken": times[""], "tiles": [f | {"measured": times[f["name"]]} for f in best.values()]})
    _C.prefer_tile("")
    Path(args.file).write_text(json.dumps(found))
    print(f"{len(found)} problems")


def replayed(graphs: dict[str, Any], calls: int = 3, rounds: int = 5) -> dict[str, float]:
    """Median microseconds of a call."""
    import torch

    begin, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name in graphs}
    repeats = 1
    for turn in range(rounds + 1):
        for name in random.sample(list(graphs), len(graphs)):
            torch.cuda._sleep(100000)
            begin.record()
            for _ in range(repeats):
                graphs[name].replay()
            done.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(done) * 1e3 / repeats / calls)
        if turn == 0:
            repeats = max(1, min(40, int(1000 / calls / max(times[""][0], 1e-3))))
            times = {name: [] for name in graphs}
    return {name: sorted(t)[len(t) // 2] for name, t in times.items()}


def fit(args: argparse.Namespace) -> None:
    import numpy as np
    from scipy.optimize import least_squares, minimize

    problems = [p for file in args.files for p in json.loads(Path(file).read_text()) if len(p["tiles"]) > 1]
    rows = [row_of(i, p, tile) for i, p in enumerate(problems) for tile in p["tiles"]]
    x = {name: np.array([row[name] for row in rows], float) for name in rows[0] if name != "tile"}
    tiles = sorted({row["tile"] for row in rows})
    which = np.array([tiles.index(row["tile"]) for row in rows])
    count, measured = len(tiles), x["measured"]
    starts = np.flatnonzero(np.r_[True, np.diff(x["problem"]) > 0])
    sizes = np.diff(np.r_[starts, len(rows)])
    over_best = np.log(measured / np.repeat(np.minimum.reduceat(measured, starts), sizes))

    def estimate(p: Any) -> Any:
        start, per_key = np.exp(p[:count])[which], np.exp(p[count : 2 * count])[which]
        call, combine, list_, traffic, odds = np.exp(p[2 * count :])
        alone = odds / (1 + odds)
        at_once = x["sms"] * x["per_sm"]
        waves = np.ceil(x["blocks"] / at_once) - 1
        others = np.ceil((x["blocks"] - waves * at_once) / x["sms"]) - 1
        speed = np.where(x["per_sm"] > 1, alone + (1 - alone) * others / np.maximum(x["per_sm"] - 1, 1), 1)
        compute = np.maximum(
            x["blocks"] / at_once * (start + per_key * x["mean"]),
            waves * (start + per_key * x["mean"]) + (start + per_key * x["least"]) * speed,
        )
        compute = np.maximum(compute, (start + per_key * x["most"]) * np.where(waves > 0, 1, speed))
        per_us = traffic * MULTIPROCESSORS
        body = np.maximum(compute, x["bytes"] / per_us)
        return call + body + x["partial_bytes"] / per_us + x["combines"] * combine + x["list"] * list_

    def loss(p: Any) -> float:
        """The share of time that the choice loses, and a little of the error."""
        logs = np.log(estimate(p))
        weight = np.exp((np.repeat(np.minimum.reduceat(logs, starts), sizes) - logs) / 0.02)
        lost = np.add.reduceat(weight * np.minimum(over_best, 0.7), starts) / np.add.reduceat(weight, starts)
        error = (logs - np.log(measured)) / 0.05
        return float(lost.mean() + 0.0025 * np.mean(np.sqrt(1 + error**2) - 1))

    p = np.log([*[3.0] * count, *[0.02] * count, *FIRST_GUESS])
    p = least_squares(lambda p: np.log(estimate(p) / measured), p, loss="soft_l1", f_scale=0.05, max_nfev=100).x
    p = minimize(loss, p, method="L-BFGS-B", options={"maxiter": args.steps, "maxfun": 10**6}).x
    for i, tile in enumerate(tiles):
        print(f"{tile:40} kTime{{{math.exp(p[i]):.1f}, {1e3 * math.exp(p[count + i]):.1f}}}")
    values = list(np.exp(p[2 * count :]))
    values[4] = values[4] / (1 + values[4])
    print(", ".join(f"{name} {value:.4g}" for name, value in zip(CONSTANTS, values, strict=True)))
    estimates = estimate(p)
    picked = np.array([s + np.argmin(estimates[s : s + n]) for s, n in zip(starts, sizes, strict=True)])
    taken = np.array([problem["taken"] for problem in problems])
    best = np.minimum.reduceat(measured, starts)
    for name, times in (("these constants", measured[picked]), ("the build", taken)):
        lost = times / best
        print(
            f"{len(problems)} problems, by {name}: {np.exp(np.log(lost).mean()):.4f} of the fastest tile's time in the "
            f"mean, {np.quantile(lost, 0.95):.3f} at 95 %, {lost.max():.2f} at most"
        )
    print(f"estimates differ from measured times by {np.median(abs(np.log(estimates / measured))):.1%} in the median")


def sample(args: argparse.Namespace) -> None:
    """A few problems of each kind, one per line: what a test compares choices with."""
    kinds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for file in args.files:
        for p in json.loads(Path(file).read_text()):
            if len(p["tiles"]) > 1:
                kind = tuple(p[name] for name in ("backend", "dtype", "dim", "dim_vo", "page_size", "alibi"))
                kinds.setdefault(kind, []).append(p)
    lines = []
    for _, problems in sorted(kinds.items()):
        for p in random.Random(7).sample(problems, min(args.count, len(problems))):
            times = {tile["name"]: round(tile["measured"], 1) for tile in p.pop("tiles")}
            del p["taken"]
            lines.append(json.dumps(p | {"us": times}, separators=(",", ":")))
    Path(args.out).write_text("[\n" + ",\n".join(lines) + "\n]\n")


def row_of(problem: int, p: dict[str, Any], tile: dict[str, Any]) -> dict[str, Any]:
    """What the estimate reads of a tile: as in src/plan/estimate.cpp."""
    splits, packs = tile["splits"], p["heads"] // max(tile["packed_heads"], 1)
    first = max(p["keys"] - p["rows"] + min(tile["rows"], p["rows"]), 0) if p["causal"] else p["keys"]
    bytes_of_element = 1 if "float8" in p["dtype"] else 2
    both = (p["dim"] + p["dim_vo"]) * bytes_of_element
    rows = p["requests"] * p["rows"] * p["heads"]
    where = "".join((" paged" if p["page_size"] else "", " alibi" if p["alibi"] else ""))
    return {
        "problem": problem,
        "tile": f"{p['backend']} {p['dtype']} {p['dim']}/{p['dim_vo']}{where} {tile['name']}",
        "measured": tile["measured"],
        "blocks": -(-p["rows"] // tile["rows"]) * p["requests"] * packs * splits,
        "sms": MULTIPROCESSORS // tile["blocks_per_tile"],
        "per_sm": tile["blocks_per_sm"],
        "most": p["keys"] / splits,
        "least": first / splits,
        "mean": (p["keys"] + first) / 2 / splits,
        "bytes": (rows + p["requests"] * p["keys"] * p["kv_heads"]) * both,
        "partial_bytes": rows * splits * p["dim_vo"] * 8 if splits > 1 else 0,
        "combines": tile["combines"],
        "list": tile["list"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("file")
    measuring.add_argument("--backend", default="fa3")
    measuring.add_argument("--dtype", default="bfloat16")
    measuring.add_argument("--head-dims", default="64,128,256")
    measuring.add_argument("--head-dim-vo", type=int, default=0)
    measuring.add_argument("--page-size", type=int, default=0)
    measuring.add_argument("--alibi", action="store_true")
    measuring.add_argument("--seconds", type=float, default=60)
    measuring.add_argument("--seed", type=int, default=1)
    measuring.set_defaults(run=measure)
    fitting = commands.add_parser("fit")
    fitting.add_argument("files", nargs="+")
    fitting.add_argument("--steps", type=int, default=80)
    fitting.set_defaults(run=fit)
    sampling = commands.add_parser("sample")
    sampling.add_argument("out")
    sampling.add_argument("files", nargs="+")
    sampling.add_argument("--count", type=int, default=16)
    sampling.set_defaults(run=sample)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
