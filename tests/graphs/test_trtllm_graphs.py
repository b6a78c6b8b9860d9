"""FlashInfer's plan-free functions in CUDA graphs: captured calls follow new lengths, tables, scales and masks."""

from __future__ import annotations

import random

import pytest
import torch
from compare import assert_close
from plan_free_problems import Mask, Options, expect, keys
from problems import Batch, indptr, make_batch

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
PAGE, WIDTH, DEVICE = 16, 64, "cuda:0"
SCALE = 128**-0.5


class Buffers:
    """What a captured call reads: a cache of pages, a table, lengths, queries, offsets, scales, a mask."""

    def __init__(self, requests: int, rows: int, heads: tuple[int, int]) -> None:
        self.cache = torch.zeros(requests * WIDTH + 8, 2, PAGE, heads[1], 128, dtype=torch.bfloat16, device=DEVICE)
        self.table = torch.zeros(requests, WIDTH, dtype=torch.int32, device=DEVICE)
        self.lens = torch.zeros(requests, dtype=torch.int32, device=DEVICE)
        self.offsets = torch.zeros(requests + 1, dtype=torch.int32, device=DEVICE)
        self.q = torch.zeros(requests * rows, heads[0], 128, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.zeros_like(self.q)
        self.scales = torch.ones(2, device=DEVICE)
        self.mask = torch.zeros(requests, rows, 4, dtype=torch.uint8, device=DEVICE)
        self.requests, self.rows = requests, rows
        self.workspace = torch.empty(16, dtype=torch.uint8, device=DEVICE)

    def fill(self, batch: Batch) -> None:
        k, v, more = keys(batch, "table", "NHD", PAGE, False)
        pages, table = k.size(0), more["page_table"]
        self.cache.fill_(torch.nan)
        self.cache[:pages, 0], self.cache[:pages, 1] = k, v
        self.table.fill_(10**6)
        self.table[:, : table.size(1)] = table
        self.lens.copy_(more["seqused_k"])
        self.q.zero_()
        self.q[: batch.q.size(0)] = batch.q
        self.offsets.copy_(indptr(batch.qo_lens, DEVICE))

    def decode(self) -> torch.Tensor:
        return ck.trtllm_batch_decode_with_kv_cache(
            self.q,
            self.cache,
            self.workspace,
            self.table,
            self.lens,
            WIDTH * PAGE,
            self.scales[0],
            self.scales[1],
            kv_layout="NHD",
            q_len_per_req=self.rows,
            out=self.out,
        )

    def masked(self) -> torch.Tensor:
        return ck.xqa_batch_decode_with_kv_cache(
            self.q,
            self.cache,
            self.workspace,
            self.table,
            self.lens,
            WIDTH * PAGE,
            SCALE,
            out=self.out,
            q_len_per_req=self.rows,
            mask=self.mask,
        )

    def context(self) -> torch.Tensor:
        return ck.trtllm_batch_context_with_kv_cache(
            self.q,
            self.cache,
            self.workspace,
            self.table,
            self.lens,
            self.rows,
            WIDTH * PAGE,
            SCALE,
            1.0,
            self.requests,
            self.offsets,
            None,
            kv_layout="NHD",
            out=self.out,
        )


def captured(call) -> torch.cuda.CUDAGraph:
    call()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return graph


def draw(rng: random.Random, qo_lens: list[int], least: int, longest: int, heads: tuple[int, int]) -> Batch:
    kv_lens = [rng.choice([least, rng.randint(least, longest), longest]) for _ in qo_lens]
    sizes = (*heads, 128)
    return make_batch(qo_lens, kv_lens, *sizes, dtype=torch.bfloat16, device=DEVICE, seed=rng.randrange(9999))


@pytest.fixture
def backend(kernel_backend, monkeypatch):
    """In place of "auto", which these functions ask for, stands a compiled backend."""
    from environment import choose_backend

    choose_backend(monkeypatch, kernel_backend)
    return kernel_backend


@pytest.mark.parametrize("heads", [(32, 8), (8, 1)])
@pytest.mark.parametrize("requests,rows", [(1, 1), (70, 1), (9, 3)])
def test_decodes_follow_lengths_tables_and_scales(backend, requests, rows, heads):
    rng = random.Random(f"{requests} {rows} {heads}")
    buffers = Buffers(requests, rows, heads)
    buffers.fill(draw(rng, [rows] * requests, 0, 100, heads))
    graph = captured(buffers.decode)
    for longest, bmm1, bmm2 in ((700, 0.05, 1.0), (3, 0.2, 0.5), (1000, 0.1, 2.0)):
        batch = draw(rng, [rows] * requests, 0, longest, heads)
        buffers.fill(batch)
        buffers.scales.copy_(torch.tensor([bmm1, bmm2]))
        graph.replay()
        options = Options(descales=dict(q_descale=bmm1 / SCALE, v_descale=bmm2))
        want, _, base = expect(batch, Mask(causal=True), options)
        assert_close(buffers.out, want, base)


@pytest.mark.parametrize("rows", [2, 8])
def test_masks_follow_their_tensor(backend, rows):
    rng, generator = random.Random(rows), torch.Generator().manual_seed(rows)
    buffers = Buffers(5, rows, (8, 2))
    buffers.fill(draw(rng, [rows] * 5, rows, 100, (8, 2)))
    graph = captured(buffers.masked)
    for longest in (700, rows, 1000):
        batch = draw(rng, [rows] * 5, rows, longest, (8, 2))
        buffers.fill(batch)
        drafts = torch.rand(5, rows, rows, generator=generator) < 0.5
        numbers = (drafts.int() << torch.arange(rows)).sum(-1).to(torch.uint8)
        buffers.mask[..., 0] = numbers.to(DEVICE)
        graph.replay()
        whole = []
        for draft, m in zip(drafts, batch.kv_lens):
            whole.append(torch.cat([torch.ones(rows, m - rows, dtype=torch.bool), draft], 1).to(DEVICE))
        want, _, base = expect(batch, Mask(bits=whole), Options())
        assert_close(buffers.out, want, base)


def test_prompts_follow_offsets(backend):
    rng = random.Random(0)
    buffers = Buffers(6, 40, (8, 2))
    buffers.fill(draw(rng, [40] * 6, 0, 100, (8, 2)))
    graph = captured(buffers.context)
    for longest in (700, 3, 1000):
        batch = draw(rng, [rng.randint(0, 40) for _ in range(6)], 0, longest, (8, 2))
        buffers.fill(batch)
        buffers.out.fill_(7.0)
        graph.replay()
        want, _, base = expect(batch, Mask(causal=True), Options())
        assert_close(buffers.out[: want.size(0)], want, base)
        assert bool((buffers.out[want.size(0) :] == 7.0).all()), "rows behind the last request are not written"


@pytest.mark.parametrize("rows", [1, 4])
def test_a_decode_is_one_kernel_or_two(backend, rows):
    buffers = Buffers(8, rows, (32, 8))
    buffers.fill(make_batch([rows] * 8, [900] * 8, 32, 8, 128, dtype=torch.bfloat16, device=DEVICE))
    buffers.decode()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        buffers.decode()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in names if "cutlass_kernels" in name]
    assert 1 <= len(kernels) <= 2 and len(names) == len(kernels), names
