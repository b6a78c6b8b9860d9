"""How long a prefill over ranks takes, by each method, and a decode step: enough to choose, and to plan a cluster.

All ranks must choose alike, so estimates are made from what every rank knows, not from clocks or device facts. What a
rank computes and receives is counted from layout and mask, without planning the call.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from . import _hardware as hw
from . import _request, _shards
from ._hardware import Cluster, message_seconds, rate_of
from ._plans import Kind, Mask, Plan, buffer_of, copies_of, grid_rows, pairs_of, stored
from ._rows import MOST_COPIES
from ._shards import Segment
from ._symmetric import MOST_BYTES, MOST_RANKS


class Work(NamedTuple):
    """Of one rank. Its row of ranks, where heads are exchanged for tokens, counts as one."""

    rows: int
    pairs: int  # (row, key) pairs that the mask shows
    planned_pairs: int  # as ``Gather.pairs`` has them
    own_keys: int
    pulled: int  # keys of other ranks,
    pulled_near: int  # and of those of this node
    copies: int  # of keys that it pulls, or messages


def visible(mask: Mask, start: int, stop: int, kv_len: int) -> int:
    """Pairs of the rows at positions ``[start, stop)``: bounds are linear between the positions where one begins."""
    cuts = {start, stop, mask.left, kv_len - mask.right}
    if mask.chunk_size > 0:
        for begin in range(start // mask.chunk_size * mask.chunk_size, stop, mask.chunk_size):
            cuts |= {begin, begin + mask.left, begin + mask.chunk_size - mask.right}
    inside = sorted(c for c in cuts if start <= c <= stop)
    total = 0
    for a, b in itertools.pairwise(inside):
        ends = [hi - lo for lo, hi in (mask.keys_of(p, p + 1, kv_len) for p in (a, b - 1))]
        total += (b - a) * sum(ends) // 2
    return total


@functools.lru_cache(256)
def slowest(kind: Kind, per_node: int) -> Work:
    """Of the rank that computes most. Ranks wait for each other, so that the others do not count; ``pulled`` and
    ``own_keys`` are the most of any rank."""
    works = of_ranks(kind, per_node)
    return Work(*map(max, zip(*works, strict=True)))._replace(pulled_near=min(w.pulled_near for w in works))


def of_ranks(kind: Kind, per_node: int) -> list[Work]:
    """Of the ranks of a column. ``per_node``: consecutive ranks of it that share a node."""
    queries, keys = ([row.segments for row in grid_rows(kind, lens)] for lens in (kind.q_lens, kind.kv_lens))
    works = []
    for rank, (q, own) in enumerate(zip(queries, keys, strict=True)):
        at = kind.among_keys(q)
        seen = [kind.mask.keys_of(s.start, s.stop, kind.kv_lens[s.request]) for s in at]
        buffer = buffer_of((Segment(s.request, lo, hi) for s, (lo, hi) in zip(at, seen, strict=True) if lo < hi), own)
        first = rank // per_node * per_node
        near = [i for i in range(first, min(first + per_node, kind.outer)) if i != rank]
        near_copies = [copies_of(i, stored(keys[i]), buffer) for i in near]
        work = Work(
            rows=_shards.count(q),
            pairs=sum(visible(kind.mask, s.start, s.stop, kind.kv_lens[s.request]) for s in at),
            planned_pairs=pairs_of((s.stop - s.start for s in at), (hi - lo for lo, hi in seen), kind.mask.right == 0),
            own_keys=_shards.count(own),
            pulled=sum(p.stop - p.start for p in buffer) - _shards.count(own),
            pulled_near=sum(c.rows for copies in near_copies for c in copies),
            # Of many ranges, one gather and one scatter, or one message. Other nodes' ranks have as many segments.
            copies=sum(n if n <= 4 * MOST_COPIES else 2 for n in map(len, near_copies))
            if kind.outer <= per_node
            else (len(own) if len(own) <= MOST_COPIES else 1) * (kind.outer - 1),
        )
        works.append(work)
    return works


# --- prefill ---

# Two H100s, 2026-11-26: copies over NVLink by the copy engines, and causal attention of 16k to 128k tokens.
LINK_BYTES_PER_SECOND = 350e9
FLOPS_PER_SECOND = 650e12

# A second group of heads costs the host 0.1 to 0.3 ms, which only longer attention hides, but for calls in a graph. It
# pays where transfers are more than 3 % of the time (H100: nine requests of 512 to 32k tokens 0.95 of linear, not 0.91;
# with a window of 4k 0.93, not 1.00).
LEAST_SECONDS = 0.5e-3
LEAST_SHARE = 0.03


def head_groups(plan: Plan, num_qo_heads: int, row_bytes: int, head_dims: int, captured: bool) -> int:
    """Groups of heads whose keys are gathered one after another; ``row_bytes`` of a key and value of all heads,
    ``head_dims`` of QK and VO together."""
    pairs, pulled = max(g.pairs for g in plan.gathers), max(g.pulled_rows for g in plan.gathers)
    return _head_groups(pairs * 2 * head_dims * num_qo_heads, pulled * row_bytes, captured)


def _head_groups(flops: float, pulled_bytes: float, captured: bool) -> int:
    seconds = flops / FLOPS_PER_SECOND
    transfer = pulled_bytes / LINK_BYTES_PER_SECOND
    return 2 if transfer > LEAST_SHARE * seconds and (captured or seconds > LEAST_SECONDS) else 1


class Problem(NamedTuple):
    """Of all ranks together."""

    layout: str
    block_size: int
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    mask: Mask
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    element_size: int

    @property
    def row_bytes(self) -> int:
        """Of a key and a value of all heads."""
        return self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo) * self.element_size

    @property
    def out_size(self) -> int:
        return max(self.element_size, 2)

    def kind(self, outer: int, inner: int) -> Kind:
        return Kind(self.layout, self.block_size, self.q_lens, self.kv_lens, self.mask, outer, inner)


class Estimate(NamedTuple):
    """Seconds of the slowest rank: those of attention, of all transfers, and what of the total is neither attention
    nor hidden."""

    comm: str
    compute: float
    transfer: float
    exposed: float  # of the transfers
    overhead: float  # launches, barriers, copies in memory, merges, and the host where it is slower
    key_bytes: float  # room for keys on a rank, its own included

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.overhead


def one_gpu(problem: Problem, cluster: Cluster) -> float:
    """Seconds of the whole problem on one."""
    work = slowest(problem.kind(1, 1), 1)
    return _attention(problem, cluster, work.rows, work.pairs, problem.num_qo_heads) + hw.CALL_START


def _attention(problem: Problem, cluster: Cluster, rows: int, pairs: int, heads: int, masked: bool = True) -> float:
    rate, tile = rate_of(cluster.gpu, problem.head_dim_qk, problem.element_size)
    mask = problem.mask
    sides = ((mask.left >= 0) + (mask.right >= 0) + 2 * (mask.chunk_size > 0)) if masked else 0
    start = tile.start + min(sides, 2) * tile.masked
    return 2 * (problem.head_dim_qk + problem.head_dim_vo) * heads * (pairs + start * rows) / rate


def allgather(problem: Problem, cluster: Cluster, captured: bool = False) -> Estimate:
    return _gathered(problem, cluster, problem.kind(cluster.world, 1), cluster.per_node, captured)


def _gathered(problem: Problem, cluster: Cluster, kind: Kind, per_node: int, captured: bool) -> Estimate:
    """Keys come in groups of heads; attention of a group starts when it is there and the group before is done.
    ``problem``: of the heads that a rank of the column has."""
    work = slowest(kind, per_node)
    compute = _attention(problem, cluster, work.rows, work.pairs, problem.num_qo_heads)
    key_bytes = float((work.own_keys + work.pulled) * problem.row_bytes)
    if kind.outer == 1:
        return Estimate("allgather", compute, 0.0, 0.0, hw.CALL_START, key_bytes)
    head_dims = problem.head_dim_qk + problem.head_dim_vo
    flops = work.planned_pairs * 2 * head_dims * problem.num_qo_heads
    count = _head_groups(flops, work.pulled * problem.row_bytes, captured)
    shares = _shares_of_heads(problem.num_kv_heads, count)
    in_node = kind.outer <= per_node
    stored = 2 * work.own_keys * problem.row_bytes / cluster.gpu.memory
    now = there = stored + (hw.BARRIER if in_node else 0.0)
    exposed = transfer = 0.0
    for share in shares:
        seconds = _transfer(work, share * problem.row_bytes, in_node)
        there, transfer = there + seconds, transfer + seconds
        exposed += max(there - now, 0.0)
        now = max(there, now) + share * compute + hw.CALL_START
    last = max(there + (hw.BARRIER if in_node else 0.0) - now, 0.0)
    host = hw.HOST_CALL + (len(shares) - 1) * (hw.HOST_GROUP_COPIES if in_node else hw.HOST_GROUP_MESSAGES)
    host += 0.0 if in_node else 2 * work.copies * len(shares) * hw.HOST_MESSAGE
    total = max(now + last, 0.0 if captured else host)
    return Estimate("allgather", compute, transfer, exposed + last, total - compute - exposed - last, key_bytes)


def _shares_of_heads(num_kv_heads: int, count: int) -> list[float]:
    """As of ``_gather._bounds``: the first of two groups is a quarter of the heads."""
    if count == 1 or num_kv_heads == 1:
        return [1.0]
    first = max(num_kv_heads // 4, 1) / num_kv_heads
    return [first, 1 - first]


def _transfer(work: Work, row_bytes: float, in_node: bool) -> float:
    if in_node:
        return work.pulled * row_bytes / hw.COPY.bandwidth + work.copies * hw.COPY.latency
    return message_seconds(work.pulled_near * row_bytes, (work.pulled - work.pulled_near) * row_bytes)


def ring(problem: Problem, cluster: Cluster, captured: bool = False) -> Estimate:
    """In each step a rank attends to the keys of one rank, merges the result, and gets those of the next."""
    kind = problem.kind(cluster.world, 1)
    work, steps, memory = slowest(kind, cluster.per_node), cluster.world, cluster.gpu.memory
    row_elements = problem.num_qo_heads * problem.head_dim_vo
    own = _attention(problem, cluster, work.rows, 0, problem.num_qo_heads)
    others = _attention(problem, cluster, work.rows, work.pairs, problem.num_qo_heads, masked=False)
    tiles = _attention(problem, cluster, work.rows, 0, problem.num_qo_heads, masked=False)
    compute = others + own + (steps - 2) * tiles
    # fp32 state: the result is read and converted, both are read, one is written. Zeroed before, converted behind.
    merge = work.rows * row_elements * (problem.out_size + 4 + 3 * 4) / memory
    around = (work.rows * row_elements * (3 * 4 + problem.out_size) + 2 * work.own_keys * problem.row_bytes) / memory
    own_bytes = work.own_keys * problem.row_bytes
    near, far = (own_bytes, 0.0) if cluster.is_node else (0.0, own_bytes)
    seconds = message_seconds(near, far)
    step = compute / steps + merge + hw.CALL_START
    exposed = (steps - 1) * max(seconds - step, 0.0)
    overhead = steps * (merge + hw.CALL_START + hw.RING_START) + around
    host = 0.0 if captured else hw.HOST_CALL + steps * hw.HOST_RING_STEP
    overhead += max(host - compute - exposed - overhead, 0.0)
    return Estimate("ring", compute, (steps - 1) * seconds, exposed, overhead, 2.0 * own_bytes)


def ulysses(problem: Problem, cluster: Cluster, captured: bool = False) -> Estimate:
    return _heads_for_tokens(problem, cluster, 1, cluster.world, captured)._replace(comm="ulysses")


def hybrid(problem: Problem, cluster: Cluster, captured: bool = False) -> Estimate:
    inner = cluster.per_node
    return _heads_for_tokens(problem, cluster, cluster.world // inner, inner, captured)._replace(comm="hybrid")


def _heads_for_tokens(problem: Problem, cluster: Cluster, outer: int, inner: int, captured: bool) -> Estimate:
    """Two exchanges, which nothing hides, around attention to the rows of ``inner`` ranks with the heads of one."""
    heads = problem.num_qo_heads // inner
    kv_heads = max(problem.num_kv_heads // inner, 1)
    here = problem._replace(num_qo_heads=heads, num_kv_heads=kv_heads)
    kind = problem.kind(outer, inner)
    estimate = _gathered(here, cluster, kind, 1, captured)  # ranks of a column are on different nodes
    rows, keys = (-(-sum(lens) // kind.world) for lens in (problem.q_lens, problem.kv_lens))
    there = rows * heads * problem.head_dim_qk * problem.element_size + keys * here.row_bytes
    back = rows * heads * problem.head_dim_vo * problem.out_size
    near = min(inner, cluster.per_node) - 1
    far = inner - 1 - near
    transfer = sum(message_seconds(near * n, far * n) + hw.HEADS_START for n in (there, back))
    # What is sent is packed and unpacked, each of which reads and writes it; what stays is copied.
    copies = (there + back) * (4 * (inner - 1) + 2) / cluster.gpu.memory
    gpu = estimate.seconds + transfer + copies
    host = 0.0 if captured else hw.HOST_CALL + hw.HOST_GROUP_MESSAGES + 8 * (inner - 1) * hw.HOST_MESSAGE
    return estimate._replace(
        transfer=estimate.transfer + transfer,
        exposed=estimate.exposed + transfer,
        overhead=estimate.overhead + copies + max(host - gpu, 0.0),
    )


def estimates(problem: Problem, cluster: Cluster, captured: bool = False) -> dict[str, Estimate | str]:
    """By method, or why it cannot serve the problem. One GPU: of ``allgather``, which then sends nothing."""
    world, inner = cluster.world, cluster.per_node
    found: dict[str, Estimate | str] = {"allgather": allgather(problem, cluster, captured)}
    if world == 1:
        return found
    found["ring"] = _fault(problem, problem.kind(world, 1), "ring") or ring(problem, cluster, captured)
    found["ulysses"] = _fault(problem, problem.kind(1, world), "ulysses") or ulysses(problem, cluster, captured)
    if cluster.is_node or world % inner or inner == 1:
        found["hybrid"] = f"{world} GPUs are not several nodes of {inner} GPUs that could exchange heads."
    else:
        kind = problem.kind(world // inner, inner)
        found["hybrid"] = _fault(problem, kind, "hybrid") or hybrid(problem, cluster, captured)
    return found


def _fault(problem: Problem, kind: Kind, comm: str) -> str | None:
    try:
        _request.check_comm(problem.num_qo_heads, problem.num_kv_heads, kind, comm)
    except ValueError as error:
        return str(error)
    return None


# Gathered keys lie beside weights and caches: a fifth of 80 GB. Above, another method is taken that needs less.
MOST_KEY_BYTES = 16e9
# Ratios of ring and ulysses to allgather err by up to 6 % in most cells of two and four GPUs; by -11 % (ulysses) and
# -8 % (ring) in 8 x 16k over two, and by 14 and 17 % in 1 x 8k over four (benchmarks/results/log/2026-11-27.md).
# "allgather", whose results are those of one GPU, is left only for what should be faster by more than the usual error.
MARGIN = 0.06


def best(found: dict[str, Estimate | str]) -> Estimate:
    """The one to take."""
    served = [e for e in found.values() if isinstance(e, Estimate)]
    fitting = [e for e in served if e.key_bytes <= MOST_KEY_BYTES] or [min(served, key=lambda e: e.key_bytes)]
    fastest = min(fitting, key=lambda e: e.seconds)
    first = next((e for e in fitting if e.comm == "allgather"), fastest)
    return fastest if fastest.seconds < (1 - MARGIN) * first.seconds else first


@functools.lru_cache(256)
def choose(problem: Problem, world: int, per_node: int) -> str:
    """What comm="auto" is of a group, whose ranks are no mesh. Figures are those of H100 on every GPU."""
    found = estimates(problem, Cluster(hw.GPUS["h100"], world, per_node))
    return best({comm: e for comm, e in found.items() if comm != "hybrid"}).comm


# --- decode steps whose cache is spread over ranks: ``dcp_decode()``, in a CUDA graph ---


class Step(NamedTuple):
    """A token of every request. Head dimensions of keys and values are one."""

    lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    element_size: int  # of the cache; queries and outputs have 16 bits


class StepEstimate(NamedTuple):
    """Seconds."""

    comm: str
    keys: float  # attention to the keys of a rank
    gather: float  # queries of all heads
    combine: float
    key_bytes: float

    @property
    def seconds(self) -> float:
        return self.keys + self.gather + self.combine


# Of a combine by messages: outputs and LSEs packed and stored, and the merge.
PACK_KERNELS = 5


def step_estimate(step: Step, cluster: Cluster, comm: str = "auto") -> StepEstimate:
    world, rows = cluster.world, len(step.lens)
    row_bytes = 2 * step.num_kv_heads * step.head_dim * step.element_size
    key_bytes = sum(-(-n // world) for n in step.lens) * row_bytes
    keys = cluster.gpu.decode_start + key_bytes / cluster.gpu.memory
    if world == 1:
        return StepEstimate("-", keys, 0.0, 0.0, key_bytes)
    # Where ranks cannot share the heads, all have all of them: nothing to gather, but states of all heads to combine.
    owned = step.num_qo_heads % world == 0
    state = rows * step.num_qo_heads * step.head_dim * 2
    to_each = state // world if owned else state
    gather, combine, comm = exchanged(to_each, cluster, owned, comm)
    return StepEstimate(comm, keys, gather, combine, key_bytes)


def exchanged(to_each: int, cluster: Cluster, owned: bool, comm: str = "auto") -> tuple[float, float, str]:
    """Seconds to gather queries and to combine, ``to_each`` bytes from each rank to each, and how."""
    world = cluster.world
    if cluster.is_node and world <= MOST_RANKS and (comm == "symmetric" or to_each <= MOST_BYTES) and comm != "a2a":
        seconds = hw.EXCHANGE.latency + (world - 1) * to_each / hw.EXCHANGE.bandwidth
        return (seconds if owned else 0.0), seconds, "symmetric"
    near = min(world, cluster.per_node) - 1
    seconds = message_seconds(near * to_each, (world - 1 - near) * to_each)
    gather = seconds + 2 * hw.SHORT_KERNEL if owned else 0.0  # the copy of own heads, and all of them in order
    return gather, seconds + PACK_KERNELS * hw.SHORT_KERNEL, "a2a"
