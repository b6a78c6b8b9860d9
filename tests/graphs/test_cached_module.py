"""Graph wrappers as SGLang plans them for speculative decoding: through their buffers and ``cached_module.plan``.

Before a graph is captured, the engine plans with index vectors on the device. Before each replay it writes the buffers
of the wrapper itself and calls the planner with lengths from the CPU. On the CPU a run stands for the replay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
from captures import Captured, no_waiting
from compare import assert_close, assert_lse_close
from problems import Batch, Options, expect, indptr, make_batch

import cutlass_kernels as ck

# Rows and keys of the requests at capture, then those of replays: as many rows for each, as engines have, and others.
STEPS = [
    ([4, 4, 4], [40, 60, 8]),
    ([4, 4, 4], [400, 4, 29]),
    ([4, 4, 4], [4, 0, 1000]),
    ([9, 0, 2], [50, 3, 700]),
    ([1, 1, 1], [1, 64, 5]),
]
LAYER = dict(causal=True, sm_scale=0.2, window_left=300, logits_soft_cap=8.0)  # options that engines give to forward()
MOST_KEYS = 1100
INDEX_BUFFERS = ("_qo_indptr_buf", "_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf")


def planner_arguments(wrapper: Any, batch: Batch, page_size: int) -> list[Any]:
    """The positional arguments of the planner, with lengths on the CPU."""
    page_counts = [-(-m // page_size) for m in batch.kv_lens]
    rows = sum(batch.qo_lens)
    return [
        wrapper._float_workspace_buffer,
        wrapper._int_workspace_buffer,
        wrapper._pin_memory_int_workspace_buffer,
        batch.qo_indptr(),
        indptr(page_counts),
        torch.tensor(batch.kv_lens, dtype=torch.int32),
        wrapper._max_total_num_rows or rows,
        len(batch.qo_lens),
        batch.num_qo_heads,
        batch.num_kv_heads,
        page_size,
        wrapper.is_cuda_graph_enabled,
        batch.q.size(2),
        batch.v.size(2),
        False,  # causal: what is planned here says nothing of the mask
        -1,
        -1,  # fixed_split_size
        False,
        0,
        0,
    ]


def plan_through_buffers(
    wrapper: Any, batch: Batch, table: tuple[torch.Tensor, ...], page_size: int, mask: torch.Tensor | None = None
) -> None:
    """What the engine binds in the place of ``begin_forward``. ``table`` lies on the device; ``mask`` is packed."""
    assert wrapper.is_cuda_graph_enabled and wrapper._cached_module is not None
    wrapper._qo_indptr_last = wrapper._batch_size = sum(batch.qo_lens)  # private names that are FlashInfer's alone
    wrapper._prefix_len_ptr = wrapper._token_pos_in_items_ptr = wrapper._max_item_len_ptr = None
    wrapper._token_pos_in_items_len = 0
    for name, vector in zip(INDEX_BUFFERS, table):
        getattr(wrapper, name)[: len(vector)].copy_(vector, non_blocking=True)
    if mask is not None:
        bits_per_request = [(n * m + 7) // 8 for n, m in zip(batch.qo_lens, batch.kv_lens)]
        wrapper._mask_indptr_buf.copy_(indptr(bits_per_request), non_blocking=True)
        wrapper._custom_mask_buf[: len(mask)].copy_(mask, non_blocking=True)
    wrapper._cached_q_data_type = wrapper._cached_kv_data_type = torch.float16
    wrapper._cached_o_data_type = wrapper._block_tables = None
    in_effect = wrapper._options
    wrapper._plan_info = wrapper._cached_module.plan(*planner_arguments(wrapper, batch, page_size))
    assert wrapper._options is in_effect


class Engine(Captured):
    """What it runs is captured where there is a GPU. ``layer``: options of its forward()."""

    def __init__(self, target, page_size: int = 1, mask_buffer: torch.Tensor | None = None, **layer: Any):
        pages = MOST_KEYS // page_size + 8
        super().__init__(target, "paged", sum(STEPS[0][0]), page_size, pages, "tuple", mask_buffer)
        self.layer = layer
        self.replay: Callable[[], None] = self.run

    def table(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        """Writes q and the cache; the index vectors, on the device."""
        return self.write(batch).vectors(self.target.device)

    def run(self) -> None:
        plan = self.wrapper._plan_info
        rows = len(self.q) if plan.total_q is None else plan.total_q
        self.out, self.lse = self.wrapper.forward_return_lse(self.q[:rows], *self.kv, **self.layer)

    def start(self, batch: Batch, mask: torch.Tensor | None = None) -> None:
        """Plans with index vectors on the device, as engines do, runs, captures, and puts the other planner in."""
        types = dict(q_data_type=torch.float16, kv_data_type=torch.float16, non_blocking=True)
        self.wrapper.begin_forward(*self.table(batch), *batch.heads, self.page_size, custom_mask=mask, **types)
        self.run()
        if not self.target.is_reference:
            self.replay = self.capture().replay
        self.wrapper.begin_forward = functools.partial(plan_through_buffers, self.wrapper)

    def step(self, batch: Batch, options: Options, mask: torch.Tensor | None = None) -> None:
        """Plans another batch, replays, and compares."""
        table = self.table(batch)
        with no_waiting(not self.target.is_reference):
            self.wrapper.begin_forward(batch, table, self.page_size, mask)
        self.replay()
        rows, want = len(batch.q), expect(batch, options)
        assert_close(self.out[:rows], want.out, want.baseline)
        assert_lse_close(self.lse[:rows], want.lse)


def batches(target) -> list[Batch]:
    return [make_batch(*step, 4, 2, 64, device=target.device, seed=n) for n, step in enumerate(STEPS)]


@pytest.mark.parametrize("layer", [dict(causal=True), LAYER], ids=["causal", "all options"])
@pytest.mark.parametrize("page_size", [1, 8])
def test_other_lengths(target, page_size, layer):
    engine, steps = Engine(target, page_size, **layer), batches(target)
    engine.start(steps[0])
    before = engine.wrapper._options
    for batch in [*steps, steps[0]]:
        engine.step(batch, Options(**layer))
        assert engine.wrapper._options is before  # of the layer, not of the planner
        assert engine.wrapper._plan_info.total_q == sum(batch.qo_lens)


@pytest.mark.parametrize("first", [0, 1], ids=["aligned", "misaligned"])
def test_other_masks(target, first):
    """Draft trees: the engine packs the bits of a mask into the wrapper's buffer itself."""
    steps = batches(target)
    masks = [batch.random_masks() for batch in steps]
    packed = [torch.cat([oracle.pack_bits(x, "little") for x in step]).to(target.device) for step in masks]
    buffer = torch.full((first + max(map(len, packed)),), 255, dtype=torch.uint8, device=target.device)
    engine = Engine(target, mask_buffer=buffer[first:])
    engine.start(steps[0], torch.cat([x.flatten() for x in masks[0]]))
    for n in [*range(len(steps)), 0]:
        engine.step(steps[n], Options(custom_masks=masks[n]), packed[n])


def test_ordinary_plans_in_between(target):
    engine, steps = Engine(target, causal=True), batches(target)
    engine.start(steps[0])
    for batch in steps[1:]:
        table = engine.table(batch)
        engine.wrapper.plan(*table, *batch.heads, 1, causal=False)
        engine.replay()
        assert_close(engine.out[: len(batch.q)], expect(batch, Options(causal=True)).out)
        engine.step(batch, Options(causal=True))


def test_arguments_of_older_releases(target):
    """The last four came later. A number of pages per KV split is that of the first plan."""
    engine, (batch, *_) = Engine(target, 8), batches(target)
    wrapper, table = engine.wrapper, engine.table(batch)
    wrapper.plan(*table, *batch.heads, 8, fixed_split_size=4, causal=True)
    wrapper._plan_info = wrapper._cached_module.plan(*planner_arguments(wrapper, batch, 8)[:16], 4)
    assert_close(wrapper.run(batch.q, *engine.kv), expect(batch, Options(causal=True)).out)
    if not target.is_reference:
        with pytest.raises(ValueError, match="fixed_split_size"):
            wrapper._cached_module.plan(*planner_arguments(wrapper, batch, 8)[:16])


@pytest.mark.runs_nothing("plans only")
def test_wrappers_without_a_module(target):
    batch = batches(target)[0]
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), *batch.paged(8).table(), *batch.heads, 8)
    assert wrapper._cached_module is None  # no buffers
    assert Engine(target).wrapper._cached_module is None  # no plan
    assert ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace())._cached_module is None  # fast_decode_plan() plans


@pytest.mark.runs_nothing("refuses")
def test_refusals(target):
    engine, (batch, *_) = Engine(target), batches(target)
    wrapper, table = engine.wrapper, engine.table(batch)
    wrapper.plan(*table, *batch.heads, 1, seq_lens_q=torch.tensor(batch.qo_lens))
    module, planned = wrapper._cached_module, wrapper._plan_info
    more = make_batch([5, 4, 4], [40, 60, 8], 4, 2, 64)
    for position, value, error, message in [
        (0, target.workspace(), ValueError, "float_workspace_buffer is not the wrapper's"),
        (1, target.workspace(), ValueError, "int_workspace_buffer is not the wrapper's"),
        (3, batch.qo_lens, ValueError, "qo_indptr .* must be a CPU tensor"),
        (3, more.qo_indptr(), ValueError, "13.*12" if not target.is_reference else ""),
        (5, None, ValueError, "kv_lens .* must be a CPU tensor"),
        (5, torch.ones(2, dtype=torch.int32), ValueError, "seq_lens"),
        (7, 2, ValueError, "batch_size=3"),
        (9, 3, RuntimeError, "num_kv_heads"),
        (18, 16, NotImplementedError, "num_colocated_ctas"),
    ]:
        if message:
            args = planner_arguments(wrapper, batch, 1)
            args[position] = value
            with pytest.raises(error, match=message):
                module.plan(*args)
    with pytest.raises(TypeError):
        module.plan(*planner_arguments(wrapper, batch, 1)[:15])
    assert wrapper._plan_info is planned
