"""Kernels begin before the previous one ends, and wait for it: what is around them in a stream is in order.

Other kernels write what a call reads, just before it, and read what it writes, just behind; no results depend on when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bitwise

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
PAGE = 64


class Step:
    """What is written before a call, the call, and a sum of its results."""

    def __init__(self, requests: int, rows: int, keys: int, heads: tuple[int, int], dims: tuple[int, int], **options):
        self.pages, self.keys, (self.dim, self.dim_vo) = -(-keys // PAGE), keys, dims
        self.options = options
        count, kv_heads = requests * self.pages, heads[1]
        self.q = torch.zeros(requests, rows, heads[0], self.dim, dtype=torch.bfloat16, device="cuda")
        self.k = torch.zeros(count, PAGE, kv_heads, self.dim, dtype=torch.bfloat16, device="cuda")
        self.v = self.k[..., : self.dim_vo] if self.dim != self.dim_vo else torch.zeros_like(self.k)
        self.table = torch.zeros(requests, self.pages, dtype=torch.int32, device="cuda")
        self.lens = torch.zeros(requests, dtype=torch.int32, device="cuda")
        self.total = torch.zeros(*self.q.shape[:-1], self.dim_vo, device="cuda")
        self.new: dict[str, torch.Tensor] = {}

    def draw(self, seed: int) -> None:
        g = torch.Generator("cuda").manual_seed(seed)
        new = {name: torch.randn(getattr(self, name).shape, generator=g, device="cuda").bfloat16() for name in "qk"}
        if self.dim == self.dim_vo:
            new["v"] = torch.randn(self.v.shape, generator=g, device="cuda").bfloat16()
        new["table"] = torch.randperm(self.k.size(0), generator=g, device="cuda").int().view(self.table.shape)
        new["lens"] = torch.randint(0, self.keys + 1, self.lens.shape, generator=g, device="cuda").int()
        for name, tensor in new.items():
            self.new.setdefault(name, torch.empty_like(tensor)).copy_(tensor)

    def run(self, between: Callable[[], None] = lambda: None) -> None:
        for name, tensor in self.new.items():
            getattr(self, name).copy_(tensor)
            between()
        for _ in range(2):  # the second begins while the first runs
            given: dict[str, Any] = dict(page_table=self.table, seqused_k=self.lens, causal=True, **self.options)
            out = ck.attention(self.q, self.k, self.v, **given)
            between()
            self.total.add_(out)
            self.q.mul_(0.5)
            between()
        self.table.fill_(1 << 30)  # nothing reads the last ones any more
        self.lens.fill_(-1)
        self.k.fill_(torch.nan)


STEPS: dict[str, Callable[[], Step]] = {
    "prompt": lambda: Step(2, 700, 900, (8, 2), (128, 128)),
    "append": lambda: Step(1, 64, 8000, (8, 1), (128, 128)),
    "appends": lambda: Step(9, 20, 3000, (8, 2), (64, 64)),
    "decode": lambda: Step(3, 1, 9000, (8, 1), (128, 128)),
    "decodes": lambda: Step(40, 1, 2000, (32, 8), (128, 128)),
    "alone": lambda: Step(1, 64, 8000, (8, 1), (128, 128), batch_invariant=True),
    "invariant": lambda: Step(7, 30, 5000, (8, 1), (128, 128), batch_invariant=True),
    "latent": lambda: Step(9, 1, 3000, (128, 1), (576, 512)),
    "latent, few heads": lambda: Step(9, 1, 3000, (16, 1), (576, 512)),
    "pairs": lambda: Step(2, 300, 700, (4, 1), (512, 512)),
}


@pytest.mark.parametrize("name", STEPS)
def test_neighbours_in_a_stream(name):
    step = STEPS[name]()
    for seed in range(4):
        step.draw(seed)
        step.run(torch.cuda.synchronize)
        want = step.total.clone()
        step.total.zero_()
        torch.cuda.synchronize()
        step.run()
        assert_bitwise(step.total, want)
        step.total.zero_()


@pytest.mark.parametrize("name", STEPS)
def test_neighbours_in_a_graph(name):
    step = STEPS[name]()
    step.draw(0)
    step.run()  # modules are loaded, counters made
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for seed in range(4):
        step.total.zero_()
        step.draw(seed)
        step.run(torch.cuda.synchronize)
        want = step.total.clone()
        step.total.zero_()
        graph.replay()
        assert_bitwise(step.total, want)


@pytest.mark.parametrize("name", STEPS)
def test_keys_of_another_stream(name):
    step, side = STEPS[name](), torch.cuda.Stream()
    step.draw(0)
    step.run(torch.cuda.synchronize)
    want, keys, event = step.total.clone(), step.new.pop("k"), torch.cuda.Event()
    step.total.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000)
        step.k.copy_(keys)
        event.record()
    torch.cuda.current_stream().wait_event(event)
    step.run()
    assert_bitwise(step.total, want)
