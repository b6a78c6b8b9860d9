"""What ranks run in the tests of decode steps by lists of selected tokens: every rank makes the whole problem."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import oracle
import quantized_caches
import torch
from captures import no_waiting
from cp_calls import LATENT, captured, held_by, on
from problems import randn

from cutlass_kernels import attention, distributed

INT32 = torch.int32
PAGE = 16


@dataclass
class Selection:
    """Rows of requests, and the positions of the tokens that each of them sees.

    ``window``: slots of a second cache, which every rank stores as a whole.
    """

    kv_lens: list[int]
    q: torch.Tensor  # [rows, heads, 576]
    requests: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows, K]
    lengths: torch.Tensor | None  # [rows]
    stored: torch.Tensor  # [tokens, 576], or bytes [tokens, 656]: one request after the other
    window: torch.Tensor  # [rows, W], maybe of no columns
    window_cache: torch.Tensor  # [pages, PAGE, 1, 576]

    def expected(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and LSE of base 2 by the oracle, and the output of PyTorch in 16 bits."""
        begins = torch.tensor([0, *itertools.accumulate(self.kv_lens)])[self.requests][:, None]
        seen = (self.positions >= 0) & (self.positions < torch.tensor(self.kv_lens)[self.requests][:, None])
        if self.lengths is not None:
            seen &= torch.arange(seen.size(1)) < self.lengths[:, None]
        slots = torch.where(seen, self.positions + begins, -1)
        first = _numbers(self.stored)
        slots = torch.cat([slots, torch.where(self.window >= 0, self.window + first.size(0), -1)], 1).unsqueeze(1)
        keys = torch.cat([first, self.window_cache.flatten(0, 1).double()[:, 0]]).unsqueeze(1)
        want = oracle.selected(self.q, keys, keys[..., : LATENT[0]], slots, **options)
        narrow, dtype = keys.to(self.q.dtype), self.q.dtype
        base = oracle.selected(self.q, narrow, narrow[..., : LATENT[0]], slots, arithmetic=dtype, **options)
        return want.out, want.lse, base.out.to(dtype)


def _numbers(stored: torch.Tensor) -> torch.Tensor:
    if stored.dtype != torch.uint8:
        return stored.double()
    return torch.stack([quantized_caches.read("v3.2", token, 1, 0) for token in stored])


def make(problem: dict[str, Any]) -> Selection:
    """``problem["lists"]`` says in turn what rows list: "any" tokens and numbers that are none, "none", "one" token
    again and again, tokens of "rank 1" alone (of ``problem["shard"]``), or "all" in order."""
    rng, generator = random.Random(problem.get("seed", 0)), torch.Generator().manual_seed(problem.get("seed", 0))
    kv_lens, width, rows = problem["kv_lens"], problem["width"], problem["rows"]
    requests = [row // max(rows // len(kv_lens), 1) for row in range(rows)]
    if problem.get("any_order"):
        requests = [rng.randrange(len(kv_lens)) for _ in range(rows)]
    lists = problem.get("lists", ["any"])
    listed = [lists[i % len(lists)] for i in range(rows)]
    positions = [_positions(rng, x, width, kv_lens[b], *problem["shard"]) for x, b in zip(listed, requests)]
    lengths = [rng.choice([0, width, rng.randint(0, width)]) for _ in requests] if problem.get("lengths") else None
    shape = (sum(kv_lens), sum(LATENT))
    stored = randn(shape, torch.float32, "cpu", generator).bfloat16()
    if problem.get("quantized"):
        cache = quantized_caches.empty("v3.2", pages=1, page_size=shape[0])
        stored = quantized_caches.filled(cache, [True] * shape[0]).view.flatten(0, 2)
    window = torch.randint(-2, 3 * PAGE, (rows, problem.get("window", 0)), generator=generator, dtype=INT32)
    return Selection(
        kv_lens,
        randn((rows, problem.get("heads", 12), sum(LATENT)), torch.float32, "cpu", generator).bfloat16(),
        torch.tensor(requests),
        torch.tensor(positions, dtype=INT32).view(rows, width),
        None if lengths is None else torch.tensor(lengths, dtype=INT32),
        stored,
        window,
        randn((3, PAGE, 1, sum(LATENT)), torch.float32, "cpu", generator).bfloat16(),
    )


def _positions(rng: random.Random, kind: str, width: int, tokens: int, world: int, block: int) -> list[int]:
    nothing = [-1, -5, -(2**31), 2**31 - 1, tokens + world * block * 1000]
    here = {"none": [], "one": [rng.randrange(tokens)] if tokens else []}.get(kind, list(range(tokens)))
    if kind == "all":
        return [*here, *[-1] * width][:width]
    if kind == "rank 1":
        here = [g for g in here if g // block % world == 1]
    share = rng.choice([0.0, 0.3, 0.9])
    return [rng.choice(nothing) if not here or rng.random() < share else rng.choice(here) for _ in range(width)]


def step(device: torch.device, problem: dict[str, Any], rank: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Queries of all heads, this rank's cache in pages, and its lists. What no token fills is NaN."""
    selection, (world, block) = make(problem), problem["shard"]
    at, counts = held_by(selection.kv_lens, rank, world, block)
    width = max(-(-n // PAGE) for n in counts)
    table = torch.randperm(len(counts) * width, generator=torch.Generator().manual_seed(rank)).view(-1, width)
    stored = selection.stored
    nothing: Any = 255 if stored.dtype == torch.uint8 else math.nan
    cache = torch.full((max(table.numel(), 1), PAGE, 1, stored.size(1)), nothing, dtype=stored.dtype)
    for b, part in enumerate(stored[at].split(counts)):
        for i, page in enumerate(part.split(PAGE) if counts[b] else ()):
            cache[table[b, i], : page.size(0), 0] = page
    given: dict[str, Any] = dict(block_size=block, page_table=table.to(device, INT32), page_size=PAGE)
    if problem.get("any_order"):
        given["batch_indices"] = selection.requests.to(device, INT32)
    if selection.lengths is not None:
        given["topk_length"] = selection.lengths.to(device)
    compact = problem.get("compact", True)
    positions = selection.positions.to(device)
    own = distributed.dcp_local_indices(positions, rank, world, compact=compact, **given)
    lists, lengths = own if isinstance(own, tuple) else (own, None)
    call = dict(kv_indices_per_token=lists.unsqueeze(1), topk_length=lengths)
    if selection.window.size(1):
        mine = selection.window if rank == world - 1 else selection.window.fill_(-1)  # counts once
        call |= dict(extra_k=selection.window_cache.to(device), extra_indices_per_token=mine.unsqueeze(1).to(device))
    q = selection.q.to(device)
    return q.unflatten(0, (len(counts), -1)) if problem.get("by_request") else q, cache.to(device), call


def decode(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any]) -> Any:
    """This rank's heads, or all: ``options`` are those of ``dcp_decode()``."""
    grid = distributed._peers.grid_of(group)
    q, cache, call = step(device, problem, grid.rank)
    if options.get("gather_heads", True):
        q = q.chunk(grid.world, -2)[grid.rank]
    values = cache if cache.dtype == torch.uint8 else cache[..., : LATENT[0]]
    call |= on(device, options)
    out, lse = distributed.dcp_decode(q, cache, values, group, return_lse=True, **call)
    return out.cpu(), lse.cpu()


def decode_in_two_calls(group: Any, device: torch.device, problem: dict[str, Any], options: dict[str, Any]) -> Any:
    """The same by ``attention()`` and ``dcp_combine()``, for engines that gather queries themselves."""
    rank, options = torch.distributed.get_rank(group), on(device, options)
    q, cache, call = step(device, problem, rank)
    call |= dict(sm_scale=options.pop("sm_scale"), lse_base=options.get("lse_base", 2))
    sinks = options.pop("sinks", None)
    call["sinks"] = sinks if rank == 0 else None
    state = attention(q, cache, cache[..., : LATENT[0]], return_lse=True, **call)
    out, lse = distributed.dcp_combine(*state, group, return_lse=True, **options)
    return out.cpu(), lse.cpu()


def refused(group: Any, device: torch.device, options: dict[str, Any]) -> None:
    problem = dict(kv_lens=[40], rows=1, width=8, shard=(2, 1))
    decode(group, device, problem, options)


def differs(group: Any, device: torch.device) -> None:
    """One rank alone passes lists."""
    rank = torch.distributed.get_rank(group)
    q, cache, call = step(device, dict(kv_lens=[40], rows=1, width=8, shard=(2, 1), by_request=True), rank)
    if rank == 0:
        table = torch.zeros(1, 2, dtype=INT32, device=device)
        call = dict(page_table=table, seqused_k=torch.tensor([40], dtype=INT32, device=device))
    distributed.dcp_decode(q[..., :6, :], cache, cache[..., : LATENT[0]], group, **call)


def replayed(group: Any, device: torch.device, comm: str, compact: bool) -> bool:
    """Whether a captured step, which makes its lists itself, follows new positions and lengths."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    problem = dict(kv_lens=[700, 90, 1], rows=6, width=200, shard=(world, 4), heads=16, lengths=True)
    _, cache, _ = step(device, problem, rank)
    cache, most = cache.nan_to_num(), cache.size(0) * PAGE * world
    table = torch.arange(cache.size(0), dtype=INT32, device=device).view(3, -1)
    q = torch.zeros(6, 16 // world, sum(LATENT), device=device, dtype=torch.bfloat16)
    positions = torch.zeros(6, 200, dtype=INT32, device=device)
    lengths = torch.zeros(6, dtype=INT32, device=device)
    given = dict(block_size=4, page_table=table, page_size=PAGE, topk_length=lengths, compact=compact)

    def call() -> torch.Tensor:
        with no_waiting(device.type == "cuda" and not torch.cuda.is_current_stream_capturing()):
            own = distributed.dcp_local_indices(positions, rank, world, **given)
        lists, counts = own if isinstance(own, tuple) else (own, None)
        selected = dict(kv_indices_per_token=lists.unsqueeze(1), topk_length=counts, sm_scale=0.05, comm=comm)
        out: torch.Tensor = distributed.dcp_decode(q, cache, cache[..., : LATENT[0]], group, **selected)
        return out

    graph, out = captured(call)
    good = True
    for turn in range(5):
        q.normal_(generator=torch.Generator(device).manual_seed(10 * turn + rank))
        same = torch.Generator(device).manual_seed(turn)  # on all ranks
        positions.random_(-1, most, generator=same)
        lengths.random_(0, 201, generator=same)
        graph.replay()
        good = good and bool(out.isfinite().all()) and torch.equal(out, call())
    return good
