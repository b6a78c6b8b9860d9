"""Keys of all ranks in one place, then FlashAttention-2: the simplest peers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from inputs import Inputs
from problem import Problem
from timing import Timed

from cutlass_kernels import distributed as cp

from . import kernels
from .ranks import Ranks
from .ring import halves_of


def gather_fa2(ranks: Ranks, case: Problem, x: Inputs) -> Timed:
    """All keys are gathered and put in order; then one call, whose segments are the parts of this rank's requests."""
    lens, device = case.qo_lens, x.q.device
    rows_of = [cp.cp_indices(lens, rank, ranks.world) for rank in range(ranks.world)]
    most = max(len(rows) for rows in rows_of)
    order = torch.empty(sum(lens), dtype=torch.int64)
    for rank, held in enumerate(rows_of):
        order[held] = torch.arange(len(held)) + rank * most
    order = order.to(device)

    # The keys of both parts of a request start at its first token; the part says where they end.
    segments, starts, ends, begin = [], [], [], 0
    for n, halves in zip(lens, halves_of(lens, ranks.rank, ranks.world)):
        last = 2 * ranks.world - 1 - ranks.rank
        segments += list(halves)
        starts += [begin, begin]
        ends += [(ranks.rank + 1) * n // (2 * ranks.world), (last + 1) * n // (2 * ranks.world)]
        begin += n
    rows = kernels.lengths(segments, device)
    keys = kernels.Lengths(torch.tensor([*starts, begin], dtype=torch.int32, device=device), max(ends))
    used = torch.tensor(ends, dtype=torch.int32, device=device)
    padded = [t if t.size(0) == most else t.new_zeros(most, *t.shape[1:]) for t in (x.k, x.v)]
    gathered = [t.new_empty(most * ranks.world, *t.shape[1:]) for t in (x.k, x.v)]

    def call() -> torch.Tensor:
        works = []
        for mine, sent, whole in zip((x.k, x.v), padded, gathered):
            if sent is not mine:  # ranks with one token less than others
                sent[: mine.size(0)] = mine
            works.append(dist.all_gather_into_tensor(whole, sent, group=ranks.group, async_op=True))
        for work in works:
            work.wait()
        k, v = (whole.index_select(0, order) for whole in gathered)
        return kernels.fa2(x.q, k, v, rows, keys, True, used, case.window_left).out

    return Timed(call)


def halo_fa2(ranks: Ranks, case: Problem, x: Inputs) -> Timed:
    """With a window: part r of W on rank r, and the last keys of the rank before it; one call."""
    halo, rank = case.window_left, ranks.rank
    own = x.k.size(0)
    room = halo if rank else 0
    k, v = (t.new_empty(room + own, *t.shape[1:]) for t in (x.k, x.v))
    rows, keys = kernels.lengths([own], x.q.device), kernels.lengths([room + own], x.q.device)

    def call() -> torch.Tensor:
        messages = []
        for mine, whole in ((x.k, k), (x.v, v)):
            if rank + 1 < ranks.world:
                messages.append(dist.P2POp(dist.isend, mine[own - halo :], rank + 1, ranks.group))
            if rank:
                messages.append(dist.P2POp(dist.irecv, whole[:halo], rank - 1, ranks.group))
        works = dist.batch_isend_irecv(messages) if messages else []
        k[room:], v[room:] = x.k, x.v
        for work in works:
            work.wait()
        return kernels.fa2(x.q, k, v, rows, keys, True, None, case.window_left).out

    return Timed(call)
