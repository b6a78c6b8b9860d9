"""What ``python -m cutlass_kernels.distributed plan`` prints."""

from __future__ import annotations

from . import _cost, _cost_decode, _shards
from ._cost import Estimate, Problem
from ._cost_decode import Step
from ._hardware import Cluster

LEAST_ROWS = 128  # of a tile of fa3
_ERROR = "Expected, not measured: off by up to 10 % on two and four GPUs, in a few cases by more (docs/scaling.md)."
_MESH = " It needs a DeviceMesh of two dimensions: nodes, and GPUs of a node."


def prefill(problem: Problem, cluster: Cluster, captured: bool, comm: str | None, curve: bool) -> str:
    """Raises ValueError where ``comm`` cannot serve the problem."""
    one = _cost.one_gpu(problem, cluster)
    head = f"Prefill of {_told(problem.q_lens)} tokens, one layer, {problem.num_qo_heads}/{problem.num_kv_heads} heads"
    lines = [f"{head}. One GPU: {_time(one)}.", ""]
    if curve:
        return "\n".join([*lines, *_prefill_curve(problem, cluster, captured, comm, one), "", _ERROR]) + "\n"
    found = _found(problem, cluster, captured, comm)
    lines += _header("method", "attention", "transfers", "exposed", "overhead", "total", "efficiency", "keys per GPU")
    for name, estimate in found.items():
        if isinstance(estimate, Estimate):
            lines.append("| " + " | ".join([name, *_cells(estimate), *_tail(estimate, one, cluster)]) + " |")
    lines += ["", *(f"Not {name}: {why}" for name, why in found.items() if isinstance(why, str))]
    lines += [_why(found), *_warnings(problem, cluster), _ERROR]
    return "\n".join(lines) + "\n"


def _found(problem: Problem, cluster: Cluster, captured: bool, comm: str | None) -> dict[str, Estimate | str]:
    found = _cost.estimates(problem, cluster, captured)
    if comm is None or cluster.world == 1:
        return found
    if isinstance(found[comm], str):
        raise ValueError(found[comm])
    return {comm: found[comm]}


def _prefill_curve(problem: Problem, cluster: Cluster, captured: bool, comm: str | None, one: float) -> list[str]:
    lines = _header("GPUs", "method", "attention", "exposed", "overhead", "total", "efficiency", "keys per GPU")
    for world in _powers(cluster.world):
        here = cluster._replace(world=world)
        try:
            best = _cost.best(_found(problem, here, captured, comm))
        except ValueError:
            lines.append(f"| {world} | - | | | | | | |")
            continue
        compute, _, exposed, overhead = _cells(best)
        cells = [str(world), best.comm, compute, exposed, overhead, *_tail(best, one, here)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _header(*names: str) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _cells(estimate: Estimate) -> list[str]:
    return [_time(x) for x in (estimate.compute, estimate.transfer, estimate.exposed, estimate.overhead)]


def _tail(estimate: Estimate, one: float, cluster: Cluster) -> list[str]:
    efficiency = one / cluster.world / estimate.seconds
    return [_time(estimate.seconds), f"{efficiency:.2f}", f"{estimate.key_bytes / 1e9:.2f} GB"]


def _why(found: dict[str, Estimate | str]) -> str:
    served = [e for e in found.values() if isinstance(e, Estimate)]
    best, fastest = _cost.best(found), min(served, key=lambda e: e.seconds)
    if len(served) == 1:
        return f"Takes {best.comm}."
    if best.key_bytes > _cost.MOST_KEY_BYTES:
        return f"Takes {best.comm}: needs least memory for keys, though above {_cost.MOST_KEY_BYTES / 1e9:.0f} GB."
    if best is fastest:
        return f"Takes {best.comm}: the fastest.{_MESH if best.comm == 'hybrid' else ''}"
    if fastest.key_bytes > _cost.MOST_KEY_BYTES:
        limit = f"{_cost.MOST_KEY_BYTES / 1e9:.0f} GB"
        return f"Takes {best.comm}: the keys of {fastest.comm}, the fastest, need more than {limit} on each GPU."
    faster = 1 - fastest.seconds / best.seconds
    return (
        f"Takes {best.comm}: {fastest.comm} would be {faster:.1%} faster, less than the model errs, and results "
        f"of {best.comm} are those of one GPU."
    )


def _warnings(problem: Problem, cluster: Cluster) -> list[str]:
    shards = _shards.split(problem.layout, problem.q_lens, cluster.world, problem.block_size)
    rows = [s.stop - s.start for segments in shards for s in segments]
    if cluster.world > 1 and rows and sum(rows) < LEAST_ROWS * len(rows):
        return [
            f"Segments of ranks have fewer than {LEAST_ROWS} rows, less than a tile of fa3: by allgather and ring, "
            "attention takes about 1.3 times as long as expected here."
        ]
    return []


def decode(step: Step, cluster: Cluster, curve: bool) -> str:
    one = _cost_decode.estimate(step, cluster._replace(world=1)).seconds
    lines = [
        f"Decode of {len(step.lens)} x 1 token over {_told(step.lens)} keys, one layer, {step.num_qo_heads}/"
        f"{step.num_kv_heads} heads, in a CUDA graph. One GPU: {_time(one)}.",
        "",
        *_header("GPUs", "method", "attention", "queries", "combine", "step", "speed-up", "keys per GPU"),
    ]
    totals = {}
    for world in _powers(cluster.world) if curve else [cluster.world]:
        e = _cost_decode.estimate(step, cluster._replace(world=world))
        totals[world] = e.seconds
        times = [_time(x) for x in (e.keys, e.gather, e.combine, e.seconds)]
        cells = [str(world), e.comm, *times, f"{one / e.seconds:.2f}", f"{e.key_bytes / 1e9:.2f} GB"]
        lines.append("| " + " | ".join(cells) + " |")
    if curve:
        lines += ["", f"Fastest on {min(totals, key=lambda w: totals[w])} GPUs."]
    lines += ["", _ERROR]
    return "\n".join(lines) + "\n"


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]


def _told(lens: tuple[int, ...]) -> str:
    if len(set(lens)) == 1:
        return f"{len(lens)} x {_number(lens[0])}"
    return f"{len(lens)} requests, in all {_number(sum(lens))}"


def _number(n: int) -> str:
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:.0f} {unit}"
    return f"{seconds * 1e6:.3g} us"
