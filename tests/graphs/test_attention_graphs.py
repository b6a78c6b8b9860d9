"""attention() in CUDA graphs: captured calls follow new lengths and page tables, and nothing synchronises."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compare import assert_close
from plan_free_problems import Mask, Options, expect, keys, queries
from problems import Batch, indptr, make_batch

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
PAGE, WIDTH, DEVICE = 16, 64, "cuda:0"


class Buffers:
    """What a captured call reads: a cache of pages, a table, lengths, queries."""

    def __init__(self, requests: int, rows: int, heads: tuple[int, int], ragged: bool) -> None:
        self.heads, self.ragged = heads, ragged
        self.cache = torch.zeros(2, requests * WIDTH + 8, PAGE, heads[1], 128, dtype=torch.bfloat16, device=DEVICE)
        self.table = torch.zeros(requests, WIDTH, dtype=torch.int32, device=DEVICE)
        self.lens = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
        self.offsets = torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE)
        self.q = torch.zeros(requests * rows, heads[0], 128, dtype=torch.bfloat16, device=DEVICE)
        self.rows = rows

    def fill(self, batch: Batch) -> None:
        k, v, more = keys(batch, "table", "NHD", PAGE, False)
        pages, table = k.size(0), more["page_table"]
        self.cache.fill_(torch.nan)
        self.cache[0, :pages], self.cache[1, :pages] = k, v
        self.table.fill_(10**6)
        self.table[:, : table.size(1)] = table
        self.lens.copy_(more["seqused_k"])
        self.q.zero_()
        self.q[: batch.q.size(0)] = batch.q
        self.offsets.copy_(indptr(batch.qo_lens, DEVICE))

    def call(self, backend: str) -> torch.Tensor:
        given: dict[str, Any] = dict(page_table=self.table, seqused_k=self.lens, causal=True, backend=backend)
        if self.ragged:
            return ck.attention(self.q, *self.cache, cu_seqlens_q=self.offsets, max_seqlen_q=self.rows, **given)
        q = self.q.unflatten(0, (-1, self.rows))
        return ck.attention(q, *self.cache, **given).flatten(0, 1)


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (8, 8)])
@pytest.mark.parametrize(
    "requests,rows,ragged", [(1, 1, False), (5, 1, False), (70, 1, False), (4, 20, False), (9, 40, True)]
)
def test_replays_follow_lengths_and_tables(kernel_backend, requests, rows, ragged, heads):
    rng = random.Random(f"{requests} {rows} {heads}")
    buffers = Buffers(requests, rows, heads, ragged)

    def draw(longest: int) -> Batch:
        qo_lens = [rng.randint(0, rows) if ragged else rows for _ in range(requests)]
        kv_lens = [rng.choice([0, 1, rng.randint(0, longest), longest]) for _ in range(requests)]
        return make_batch(qo_lens, kv_lens, *heads, 128, dtype=torch.bfloat16, device=DEVICE, seed=rng.randrange(9999))

    buffers.fill(draw(100))
    buffers.call(kernel_backend)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            out = buffers.call(kernel_backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for longest in (700, 3, 1000):
        batch = draw(longest)
        buffers.fill(batch)
        out.fill_(7.0)
        graph.replay()
        want, _, base = expect(batch, Mask(causal=True), Options())
        assert_close(out[: want.size(0)], want, base)
        assert bool((out[want.size(0) :] == 7.0).all()), "rows behind the last request are not written"


@pytest.mark.parametrize("requests,rows", [(1, 1), (64, 1), (8, 64), (2, 700)])
def test_a_call_is_one_kernel_or_two(kernel_backend, requests, rows):
    buffers = Buffers(requests, rows, (32, 8), ragged=False)
    lens = [900] * requests
    buffers.fill(make_batch([rows] * requests, lens, 32, 8, 128, dtype=torch.bfloat16, device=DEVICE))
    buffers.call(kernel_backend)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.cuda.set_sync_debug_mode("error")
        try:
            buffers.call(kernel_backend)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in names if "cutlass_kernels" in name]
    assert 1 <= len(kernels) <= 2 and len(names) == len(kernels), names


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("qo_lens,kv_lens", [((1,), (9,)), ((3, 0, 70), (50, 13, 333)), ((20, 1), (33, 700))])
def test_masks_of_any_bytes_are_captured(kernel_backend, qo_lens, kv_lens, first):
    """Whatever their number, and wherever they begin."""
    batch = make_batch(list(qo_lens), list(kv_lens), 4, 2, dtype=torch.bfloat16, device=DEVICE)
    mask = Mask(bits=batch.random_masks())
    k, v, whose_keys = keys(batch, "ragged", "NHD", PAGE, False)
    q, whose_rows = queries(batch, dense=False)
    given = {**whose_rows, **whose_keys, **mask.arguments(DEVICE), "backend": kernel_backend}
    bits = given["packed_custom_mask"]
    given["packed_custom_mask"] = torch.cat([bits.new_zeros(first), bits])[first:]
    ck.attention(q, k, v, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ck.attention(q, k, v, **given)
    out.fill_(7.0)
    graph.replay()
    want, _, base = expect(batch, mask, Options())
    assert_close(out, want, base)
