"""Sequences of calls as serving engines make them: keyword plans each step, shared workspaces, forward(), merging.

The spellings follow vLLM (plan / run with keywords, HND caches, attribute checks before run) and SGLang (begin_forward
/ forward with run-time options, page size 1, separate K and V buffers, extend = ragged part merged with a paged part).
"""

from __future__ import annotations

import gc
import itertools
import random
from dataclasses import replace

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from planned_runs import compare
from problems import Batch, Options, expect, indptr, make_batch
from wrapper_problems import Wrapped

import cutlass_kernels as ck

PRIVATE = [
    "_causal", "_pos_encoding_mode", "_window_left", "_logits_soft_cap", "_sm_scale", "_rope_scale",
    "_rope_theta", "_use_fp16_qk_reduction", "_backend", "_plan_info", "_kv_layout", "_qo_indptr_buf",
    "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf", "_float_workspace_buffer",
    "_int_workspace_buffer", "_cached_q_data_type", "_cached_kv_data_type", "_use_cuda_graph",
    "_fixed_batch_size", "_max_total_num_rows",
]  # fmt: skip


class Engine:
    """A growing cache of paged keys and values for several requests, as a scheduler keeps it."""

    def __init__(self, target, page_size: int, kv_layout: str, heads=(4, 2, 64), pages: int = 64):
        self.device, self.page_size, self.kv_layout, self.heads = target.device, page_size, kv_layout, heads
        _, kv_heads, dim = heads
        inner = (page_size, kv_heads) if kv_layout == "NHD" else (kv_heads, page_size)
        self.cache = torch.full((pages, 2, *inner, dim), torch.nan, dtype=torch.float16, device=target.device)
        self.free = torch.randperm(pages).tolist()
        self.pages: dict[int, list[int]] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def append(self, request: int, count: int) -> None:
        _, kv_heads, dim = self.heads
        k, v = torch.randn(2, count, kv_heads, dim).half().to(self.device)
        old = self.keys.get(request, k[:0])
        self.keys[request] = torch.cat([old, k])
        self.values[request] = torch.cat([self.values.get(request, v[:0]), v])
        table = self.pages.setdefault(request, [])
        while len(table) * self.page_size < len(self.keys[request]):
            table.append(self.free.pop())
        for place in range(len(old), len(old) + count):
            page, slot = table[place // self.page_size], place % self.page_size
            for part, data in enumerate((self.keys[request], self.values[request])):
                if self.kv_layout == "NHD":
                    self.cache[page, part, slot] = data[place]
                else:
                    self.cache[page, part, :, slot] = data[place]

    def table(self, requests: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ids = [p for r in requests for p in self.pages[r]]
        last = [(len(self.keys[r]) - 1) % self.page_size + 1 for r in requests]
        return (
            indptr([len(self.pages[r]) for r in requests]),
            torch.tensor(ids, dtype=torch.int32),
            torch.tensor(last, dtype=torch.int32),
        )

    def batch(self, requests: list[int], qo_lens: list[int]) -> Batch:
        q = torch.randn(sum(qo_lens), self.heads[0], self.heads[2]).half().to(self.device)
        ks, vs = [self.keys[r] for r in requests], [self.values[r] for r in requests]
        return Batch(qo_lens, [len(k) for k in ks], q, torch.cat(ks), torch.cat(vs))


def test_vllm_steps(target):
    """Prefill and decode requests mixed, planned anew each step, several layers per plan, outputs given."""
    engine = Engine(target, 16, "HND")
    workspace = target.workspace()
    prefill = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    decode = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
    steps = [
        ([1, 2], [37, 5], []),
        ([3], [20], [1, 2]),
        ([], [], [1, 2, 3]),
        ([2], [9], [1, 3]),
    ]
    options = Options(causal=True, window_left=30, logits_soft_cap=20.0, sm_scale=0.11)
    for new, counts, running in steps:
        for request, count in zip(new, counts):
            engine.append(request, count)
        for request in running:
            engine.append(request, 1)
        for wrapper, requests, qo_lens in ((prefill, new, counts), (decode, running, [1] * len(running))):
            if not requests:
                continue
            wrapper.plan(
                indptr(qo_lens),
                *engine.table(requests),
                *engine.heads,
                16,
                **options.plan_kwargs(),
                **dict.fromkeys(("q_data_type", "kv_data_type", "o_data_type"), torch.float16),
                fixed_split_size=-1,
                disable_split_kv=False,
                non_blocking=True,
            )
            assert wrapper._causal is True and wrapper._window_left == 30
            assert wrapper._logits_soft_cap == 20.0 and wrapper._sm_scale == 0.11
        for _layer in range(2):
            for wrapper, requests, qo_lens in ((decode, running, [1] * len(running)), (prefill, new, counts)):
                if not requests:
                    continue
                batch = engine.batch(requests, qo_lens)
                out = torch.full_like(batch.q, torch.nan)
                wrapper.run(batch.q, engine.cache, k_scale=0.9, v_scale=1.1, out=out)
                want = expect(batch, replace(options, k_scale=0.9, v_scale=1.1))
                assert_close(out, want.out, want.baseline)


@pytest.mark.runs_nothing("plans only")
def test_vllm_expects_these_values_after_plan(target):
    engine = Engine(target, 16, "HND")
    engine.append(1, 20)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "HND")
    wrapper.plan(indptr([5]), *engine.table([1]), *engine.heads, 16, causal=True, sm_scale=0.2)
    # "not given" reads as no window and a cap of zero.
    assert wrapper._window_left == -1
    assert wrapper._logits_soft_cap == 0.0
    assert wrapper._sm_scale == 0.2
    assert wrapper._causal is True


@pytest.mark.runs_nothing("plans only")
@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_private_attributes(target, kind):
    workspace = target.workspace()
    wrapped = Wrapped(target, kind, backend="auto", workspace=workspace)
    wrapper = wrapped.plan(Options(causal=True, window_left=7)).wrapper
    for name in PRIVATE:
        assert hasattr(wrapper, name) or (kind == "ragged" and name.startswith("_paged")), name
    assert wrapper._causal is True and wrapper._window_left == 7 and wrapper._pos_encoding_mode == "NONE"
    assert wrapper._plan_info is not None and wrapper._kv_layout == "NHD"
    assert wrapper._backend == target.backend
    assert wrapper._cached_q_data_type == torch.float16 and wrapper._cached_kv_data_type == torch.float16
    assert wrapper._float_workspace_buffer.data_ptr() == workspace.data_ptr()
    assert wrapper._use_cuda_graph is False and wrapper.is_cuda_graph_enabled is False
    assert wrapper._qo_indptr_buf.tolist() == [0, 5, 14]


def test_setting_planned_attributes_before_run(target):
    # Fast-plan paths of engines assign these and expect run() to obey.
    wrapped = Wrapped(target, "paged", backend="auto").plan()
    wrapper = wrapped.wrapper
    wrapper._causal, wrapper._sm_scale, wrapper._window_left, wrapper._logits_soft_cap = True, 0.3, 4, 2.0
    wrapped.check(options=Options(causal=True, sm_scale=0.3, window_left=4, logits_soft_cap=2.0))


def test_sglang_extend(target):
    """New tokens among themselves (ragged, causal) merged with the cached prefix (paged, not causal)."""
    page, heads, dim = 1, (4, 2), 64
    prefix, new = [30, 0, 7], [5, 9, 1]
    workspace = target.workspace()
    ragged = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    paged = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
    tokens = sum(prefix)
    k_buffer, v_buffer = torch.randn(2, tokens + 10, heads[1], dim).half().to(target.device)
    ids = torch.randperm(tokens + 10)[:tokens].int()
    q = torch.randn(sum(new), heads[0], dim).half().to(target.device)
    k, v = torch.randn(2, sum(new), heads[1], dim).half().to(target.device)
    ones = torch.ones(3, dtype=torch.int32, device=target.device)
    bounds = indptr(new, target.device)
    ragged.begin_forward(bounds, bounds, heads[0], heads[1], dim, q_data_type=torch.float16)
    paged.begin_forward(
        bounds,
        indptr(prefix, target.device),
        ids.to(target.device),
        ones,
        heads[0],
        heads[1],
        dim,
        page,
        q_data_type=torch.float16,
        kv_data_type=torch.float16,
        custom_mask=None,
        non_blocking=True,
    )
    for cap in (None, 10.0):
        o1, s1 = ragged.forward_return_lse(q, k, v, causal=True, sm_scale=0.2, logits_soft_cap=cap)
        o2, s2 = paged.forward_return_lse(q, (k_buffer, v_buffer), causal=False, sm_scale=0.2, logits_soft_cap=cap)
        out, lse = ck.merge_state(o1, s1, o2, s2)
        ks, vs, start, place = [], [], 0, 0
        for p, n in zip(prefix, new):
            mine = ids[start : start + p].long().to(target.device)
            ks.append(torch.cat([k_buffer[mine], k[place : place + n]]))
            vs.append(torch.cat([v_buffer[mine], v[place : place + n]]))
            start, place = start + p, place + n
        whole = Batch(new, [p + n for p, n in zip(prefix, new)], q, torch.cat(ks), torch.cat(vs))
        want = expect(whole, Options(causal=True, sm_scale=0.2, logits_soft_cap=cap))
        assert_close(out, want.out, atol=2e-3)
        assert_lse_close(lse, want.lse)
    ragged.end_forward()
    paged.end_forward()


def test_sglang_paged_layers_with_different_windows(target):
    """One plan, several layers, each with its own window and cap passed to forward()."""
    batch = make_batch([6, 1, 12], [30, 17, 12], 4, 2, 64, device=target.device)
    paged = batch.paged(1, "NHD", "tuple")
    cache = (paged.k_cache.squeeze(1), paged.v_cache.squeeze(1))
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD")
    wrapper.begin_forward(batch.qo_indptr(target.device), *paged.table(target.device), *batch.heads, 1)
    for window, cap in itertools.product((-1, 4, 0), (0.0, 5.0)):
        given = dict(causal=True, window_left=window, logits_soft_cap=cap, sm_scale=0.1, k_scale=0.5, v_scale=2.0)
        want = expect(batch, Options(**given))
        assert_close(wrapper.forward(batch.q, cache, **given), want.out, want.baseline)


def test_speculative_decoding_with_tree_masks(target):
    """Draft trees: every step another mask, through one wrapper, and back to no mask."""
    wrapper = None
    for step in range(3):
        batch = make_batch([4, 4], [20 + step, 9 + step], 4, 2, 64, device=target.device, seed=step)
        masks = []
        for n, m in zip(batch.qo_lens, batch.kv_lens):
            tree = torch.rand(n, n) < 0.5
            tree.fill_diagonal_(True)
            masks.append(torch.cat([torch.ones(n, m - n, dtype=torch.bool), tree.tril()], dim=1).to(target.device))
        wrapped = Wrapped(target, "paged", batch, 4, wrapper=wrapper, backend="auto")
        wrapped.plan(Options(custom_masks=masks)).check()
        wrapped.plan(Options(causal=True)).check()
        wrapper = wrapped.wrapper


def test_plans_and_runs_interleave_on_one_workspace(target):
    workspace = target.workspace()
    made = []
    for seed in range(3):
        batch = make_batch([3 + seed, 8], [40, 8 + seed], 4, 2, 64, device=target.device, seed=seed)
        made.append(Wrapped(target, "ragged", batch, workspace=workspace).plan(Options(causal=True)))
    workspace.fill_(255)
    for wrapped in [*made, *reversed(made)]:
        wrapped.check()
        workspace.fill_(255)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_reset_workspace(target, kind):
    wrapped = Wrapped(target, kind, backend="auto").plan(Options(causal=True))
    first = wrapped.run()
    fresh = target.workspace()
    wrapped.wrapper.reset_workspace_buffer(fresh, torch.zeros(8 << 20, dtype=torch.uint8, device=target.device))
    assert wrapped.wrapper._float_workspace_buffer.data_ptr() == fresh.data_ptr()
    assert torch.equal(wrapped.plan(Options(causal=True)).run(), first)


def buffers(device: str, count: int, fill: int) -> list[torch.Tensor]:
    """Index vectors of ``count`` requests and up to 20 pages, as the paged wrapper takes them for graphs."""
    sizes = (count + 1, count + 1, 20, count)
    return [torch.full((n,), fill, dtype=torch.int32, device=device) for n in sizes]


def test_graph_buffers_receive_the_plan(target):
    qo, table, ids, last = buffers(target.device, 2, -1)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", True, qo, table, ids, last)
    assert wrapper.is_cuda_graph_enabled
    for seed, (qo_lens, kv_lens) in enumerate([([5, 9], [40, 30]), ([3, 4], [20, 9]), ([7, 7], [60, 70])]):
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device, seed=seed)
        wrapped = Wrapped(target, "paged", batch, 8, wrapper=wrapper).plan(Options(causal=True))
        paged = wrapped.pages
        assert qo.tolist() == batch.qo_indptr().tolist() and table.tolist() == paged.indptr.tolist()
        assert last.tolist() == paged.last_page_len.tolist()
        assert ids[: paged.indices.numel()].tolist() == paged.indices.tolist()
        wrapped.check()


@pytest.mark.parametrize("alias", ["qk_indptr_buf", "mask_indptr_buf"])
def test_graph_wrapper_with_mask_buffers(target, alias):
    mask_buffer = torch.zeros(500, dtype=torch.uint8, device=target.device)
    mask_bounds = torch.zeros(3, dtype=torch.int32, device=target.device)
    names = [f"{name}_buf" for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")]
    given = dict(zip(names, buffers(target.device, 2, 0)), custom_mask_buf=mask_buffer, use_cuda_graph=True)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", **given, **{alias: mask_bounds})
    for seed in range(2):
        batch = make_batch([5, 9], [21 + seed, 30], 4, 2, 64, device=target.device, seed=seed)
        masks = batch.random_masks()
        wrapped = Wrapped(target, "paged", batch, 8, wrapper=wrapper).plan(Options(custom_masks=masks))
        packed = [oracle.pack_bits(m, "little") for m in masks]
        assert mask_bounds.tolist() == [0, len(packed[0]), len(packed[0]) + len(packed[1])]
        assert torch.equal(mask_buffer[: int(mask_bounds[-1])].cpu(), torch.cat(packed))
        wrapped.check()


def test_decode_wrapper(target):
    """The decode wrapper engines use; same contract as one-row prefill."""
    batch = make_batch([1, 1, 1], [30, 1, 64], 4, 2, 64, device=target.device)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=target.device)
    options = Options(window_left=20, logits_soft_cap=4.0, sm_scale=0.2, sinks=sinks)
    for kv_layout in ("NHD", "HND"):
        Wrapped(target, "decode", batch, 16, kv_layout, backend="auto").plan(options).check()


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_sinks_as_an_attribute(target, kind):
    # Engines assign the sinks of a layer once; run() without the argument must not drop them.
    wrapped = Wrapped(target, kind, backend="auto").plan(Options(causal=True))
    assert wrapped.wrapper._sinks is None
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=target.device)
    wrapped.wrapper._sinks = sinks
    wrapped.check(options=Options(causal=True, sinks=sinks))


class Shelf:
    """Pages whose contents stay; every batch takes some of them at random, as often as it likes."""

    page_size, heads = 16, (4, 2, 64)

    def __init__(self, device: str):
        self.cache = torch.randn(48, 2, self.page_size, *self.heads[1:]).half().to(device)

    def batch(self, qo_lens: list[int], kv_lens: list[int], draw: random.Random) -> tuple[Batch, tuple]:
        """The batch without pages, and its page table."""
        counts = [-(-m // self.page_size) for m in kv_lens]
        ids = torch.tensor([draw.randrange(len(self.cache)) for _ in range(sum(counts))], dtype=torch.int32)
        last = [m - self.page_size * max(n - 1, 0) for m, n in zip(kv_lens, counts)]
        keep = torch.cat([torch.arange(n * self.page_size) < m for m, n in zip(kv_lens, counts)]).to(self.cache.device)
        k, v = (x[ids.to(x.device).long()].flatten(0, 1)[keep] for x in self.cache.unbind(1))
        q = torch.randn(sum(qo_lens), self.heads[0], self.heads[2]).half().to(self.cache.device)
        return Batch(qo_lens, kv_lens, q, k, v), (indptr(counts), ids, torch.tensor(last, dtype=torch.int32))


def draw_options(batch: Batch, draw: random.Random) -> tuple[Options, dict]:
    """A mask of some kind, as the oracle and as plan() take it."""
    kind = draw.choice(["causal", "full", "window", "cap", "mask"])
    if kind == "mask":
        masks = batch.random_masks()
        return Options(custom_masks=masks), {"custom_mask": torch.cat([m.flatten() for m in masks])}
    options = Options(causal=kind != "full")
    if kind == "window":
        options.window_left = draw.randint(0, 90)
    if kind == "cap":
        options.logits_soft_cap = 10.0
    return options, options.plan_kwargs()


def test_hundreds_of_replans(target):
    """Batches of any size and mask through two wrappers on one workspace: no plan marks the next, or keeps memory."""
    on_gpu = target.device != "cpu"
    shelf, workspace, steps = Shelf(target.device), target.workspace(), 200 if on_gpu else 40
    paged = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=target.backend)
    ragged = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=target.backend)
    most = 12 if on_gpu else 5  # requests
    largest = [70] * most, [300] * most

    def step(lens: tuple[list[int], list[int]], draw: random.Random, check: bool) -> None:
        batch, table = shelf.batch(*lens, draw)
        options, given = draw_options(batch, draw)
        kwargs = {"q_data_type": torch.float16, **given}
        paged.plan(batch.qo_indptr(), *table, *batch.heads, shelf.page_size, **kwargs)
        ragged.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **kwargs)
        if draw.random() < 0.3:
            workspace.fill_(255)  # nothing in it outlives a run
        out, lse = paged.run(batch.q, shelf.cache, return_lse=True)
        other, other_lse = ragged.run(batch.q, batch.k, batch.v, return_lse=True)
        torch.testing.assert_close(out, other, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse, other_lse, atol=2e-3, rtol=1e-5)
        if check:
            compare((out, lse), batch, options)

    def standing() -> tuple[int, int]:
        """Tensors and bytes of the device that are there after a step that is always the same."""
        step(([5, 9], [20, 9]), random.Random(0), check=True)
        gc.collect()
        tensors = sum(type(x) is torch.Tensor for x in gc.get_objects())
        return tensors, torch.cuda.memory_allocated() if on_gpu else 0

    draw = random.Random(1)
    step(largest, draw, check=True)  # what grows with the size of a batch has grown
    before = standing()
    for number in range(steps):
        qo_lens = [draw.choice([1, 1, draw.randint(0, 70)]) for _ in range(draw.choice([1, 2, 5, most]))]
        kv_lens = [draw.choice([n, 0, n + draw.randint(0, 230), n + draw.randint(0, 230)]) for n in qo_lens]
        step((qo_lens, kv_lens), draw, check=number % 4 == 0)
    after = standing()
    assert after[0] <= before[0], "plans leave tensors behind"  # a plan makes some only when somebody asks for them
    assert after[1] <= before[1] + 64 * steps, "plans leave memory behind"  # a leaked tensor is 512 bytes or more
