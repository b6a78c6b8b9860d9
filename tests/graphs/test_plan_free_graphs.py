"""attention() and FlashInfer's plan-free functions in CUDA graphs.

Captured calls follow new lengths, page tables, scales and masks, and nothing synchronises.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import capture, no_waiting
from compare import assert_close
from environment import choose_backend
from plan_free_problems import Mask, Options, expect, keys, queries
from problems import Batch, indptr, make_batch

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
PAGE, WIDTH, DEVICE = 16, 64, "cuda:0"
SCALE = 128**-0.5


@pytest.fixture
def backend(kernel_backend, monkeypatch):
    """In place of "auto", which FlashInfer's functions ask for, stands a compiled backend."""
    choose_backend(monkeypatch, kernel_backend)
    return kernel_backend


class Buffers:
    """What a captured call reads: a cache of pages, a table, lengths, queries, offsets, scales, a mask."""

    def __init__(self, requests: int, rows: int, heads: tuple[int, int], backend: str = "auto") -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=DEVICE)

        self.requests, self.rows, self.backend = requests, rows, backend
        self.cache = zeros(requests * WIDTH + 8, 2, PAGE, heads[1], 128, dtype=torch.bfloat16)
        self.q = zeros(requests * rows, heads[0], 128, dtype=torch.bfloat16)
        self.out, self.mask = torch.zeros_like(self.q), zeros(requests, rows, 4, dtype=torch.uint8)
        self.table, self.lens, self.offsets = zeros(requests, WIDTH), zeros(requests), zeros(requests + 1)
        self.scales = torch.ones(2, device=DEVICE)
        unread = zeros(16, dtype=torch.uint8)
        self.tensors = (self.q, self.cache, unread, self.table, self.lens)

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

    def check(self, out: torch.Tensor, batch: Batch, mask: Mask | None = None, options: Options | None = None) -> None:
        want, _, base = expect(batch, mask or Mask(causal=True), options or Options())
        assert_close(out[: want.size(0)], want, base)

    def check_replay(self, graph: torch.cuda.CUDAGraph, out: torch.Tensor, batch: Batch, **of_batch: Any) -> None:
        self.fill(batch)
        out.fill_(7.0)
        graph.replay()
        self.check(out, batch, **of_batch)
        assert bool((out[sum(batch.qo_lens) :] == 7.0).all()), "rows behind the last request are not written"

    def dense(self) -> torch.Tensor:
        return self.attention(self.q.unflatten(0, (-1, self.rows))).flatten(0, 1)

    def ragged(self) -> torch.Tensor:
        return self.attention(self.q, cu_seqlens_q=self.offsets, max_seqlen_q=self.rows)

    def attention(self, q: torch.Tensor, **whose: Any) -> torch.Tensor:
        pages = dict(page_table=self.table, seqused_k=self.lens)
        return ck.attention(q, *self.cache.unbind(1), causal=True, backend=self.backend, **pages, **whose)

    def decode(self) -> torch.Tensor:
        given = dict(kv_layout="NHD", q_len_per_req=self.rows, out=self.out)
        return ck.trtllm_batch_decode_with_kv_cache(*self.tensors, WIDTH * PAGE, *self.scales.unbind(), **given)

    def masked(self) -> torch.Tensor:
        given = dict(out=self.out, q_len_per_req=self.rows, mask=self.mask)
        return ck.xqa_batch_decode_with_kv_cache(*self.tensors, WIDTH * PAGE, SCALE, **given)

    def context(self) -> torch.Tensor:
        lengths = (self.rows, WIDTH * PAGE, SCALE, 1.0, self.requests, self.offsets, None)
        return ck.trtllm_batch_context_with_kv_cache(*self.tensors, *lengths, kv_layout="NHD", out=self.out)


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    call()
    with no_waiting():
        return capture(call, warm_up=0)


def draw(rng: random.Random, qo_lens: list[int], least: int, longest: int, heads: tuple[int, int]) -> Batch:
    kv_lens = [rng.choice([least, least + 1, rng.randint(least, longest), longest]) for _ in qo_lens]
    sizes = (*heads, 128)
    return make_batch(qo_lens, kv_lens, *sizes, dtype=torch.bfloat16, device=DEVICE, seed=rng.randrange(9999))


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (8, 8)])
@pytest.mark.parametrize(
    "requests,rows,ragged", [(1, 1, False), (5, 1, False), (70, 1, False), (4, 20, False), (9, 40, True)]
)
def test_replays_follow_lengths_and_tables(backend, requests, rows, ragged, heads):
    rng = random.Random(f"{requests} {rows} {heads}")
    buffers = Buffers(requests, rows, heads, backend)

    def some(longest: int) -> Batch:
        qo_lens = [rng.randint(0, rows) if ragged else rows for _ in range(requests)]
        return draw(rng, qo_lens, 0, longest, heads)

    buffers.fill(some(100))
    graph, out = captured(buffers.ragged if ragged else buffers.dense)
    for longest in (700, 3, 1000):
        buffers.check_replay(graph, out, some(longest))


def test_prompts_follow_offsets(backend):
    rng, buffers = random.Random(0), Buffers(6, 40, (8, 2))
    buffers.fill(draw(rng, [40] * 6, 0, 100, (8, 2)))
    graph, out = captured(buffers.context)
    for longest in (700, 3, 1000):
        buffers.check_replay(graph, out, draw(rng, [rng.randint(0, 40) for _ in range(6)], 0, longest, (8, 2)))


@pytest.mark.parametrize("heads", [(32, 8), (8, 1)])
@pytest.mark.parametrize("requests,rows", [(1, 1), (70, 1), (9, 3)])
def test_decodes_follow_lengths_tables_and_scales(backend, requests, rows, heads):
    rng = random.Random(f"{requests} {rows} {heads}")
    buffers = Buffers(requests, rows, heads)
    buffers.fill(draw(rng, [rows] * requests, 0, 100, heads))
    graph, out = captured(buffers.decode)
    for longest, bmm1, bmm2 in ((700, 0.05, 1.0), (3, 0.2, 0.5), (1000, 0.1, 2.0)):
        buffers.scales.copy_(torch.tensor([bmm1, bmm2]))
        options = Options(descales=dict(q_descale=bmm1 / SCALE, v_descale=bmm2))
        buffers.check_replay(graph, out, draw(rng, [rows] * requests, 0, longest, heads), options=options)


@pytest.mark.parametrize("rows", [2, 8])
def test_masks_follow_their_tensor(backend, rows):
    rng, generator = random.Random(rows), torch.Generator().manual_seed(rows)
    buffers = Buffers(5, rows, (8, 2))
    buffers.fill(draw(rng, [rows] * 5, rows, 100, (8, 2)))
    graph, out = captured(buffers.masked)
    for longest in (700, rows, 1000):
        batch = draw(rng, [rows] * 5, rows, longest, (8, 2))
        drafts = torch.rand(5, rows, rows, generator=generator) < 0.5
        buffers.mask[..., 0] = (drafts.int() << torch.arange(rows)).sum(-1).to(torch.uint8).to(DEVICE)
        before = [torch.ones(rows, m - rows, dtype=torch.bool) for m in batch.kv_lens]
        whole = [torch.cat(x, 1).to(DEVICE) for x in zip(before, drafts)]
        buffers.check_replay(graph, out, batch, mask=Mask(bits=whole))


@pytest.mark.parametrize(
    "requests,rows,call",
    [(1, 1, "dense"), (64, 1, "dense"), (8, 64, "dense"), (2, 700, "dense"), (8, 1, "decode"), (8, 4, "decode")],
)
def test_a_call_is_one_kernel_or_two(backend, requests, rows, call):
    buffers = Buffers(requests, rows, (32, 8), backend)
    lens = [900] * requests
    buffers.fill(make_batch([rows] * requests, lens, 32, 8, 128, dtype=torch.bfloat16, device=DEVICE))
    run = getattr(buffers, call)
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        with no_waiting():
            run()
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
    graph, out = capture(lambda: ck.attention(q, k, v, **given))
    out.fill_(7.0)
    graph.replay()
    want, _, base = expect(batch, mask, Options())
    assert_close(out, want, base)
