"""MultiLevelCascadeAttentionWrapper: levels of shared keys in one paged cache, merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from captures import capture
from compare import assert_bitwise, assert_close, assert_lse_close
from problems import Batch, Options, expect, indptr

import cutlass_kernels as ck

HEADS, DIM, PAGES = (4, 2), 64, 120
# For each level, rows and keys of its requests.
ONE = [([1, 3, 2], [20, 3, 40])]
TWO = [([6], [50]), ([1, 3, 2], [20, 3, 40])]
THREE = [([6], [90]), ([4, 2], [33, 0]), ([1, 3, 2], [20, 3, 40])]
DECODE = [([5], [700]), ([2, 3], [16, 48]), ([1] * 5, [1, 0, 16, 33, 5])]
EMPTY = [([4], [0]), ([2, 2], [0, 9]), ([1, 3], [0, 0])]
TREES = {"one": ONE, "two": TWO, "three": THREE, "decode": DECODE, "empty": EMPTY}


class Tree:
    """Levels of requests over pages of one cache, which each level takes at random."""

    def __init__(self, levels, device: str, page_size: int = 8, kv_layout: str = "NHD", dtype=torch.float16):
        self.levels, self.page_size = levels, page_size
        rows = sum(levels[0][0])
        self.q = torch.randn(rows, HEADS[0], DIM).to(dtype).to(device)
        inner = (page_size, HEADS[1]) if kv_layout == "NHD" else (HEADS[1], page_size)
        pages = max(PAGES, sum(-(-m // page_size) for _, kv_lens in levels for m in kv_lens))
        self.cache = torch.randn(pages, 2, *inner, DIM).to(dtype).to(device)
        ids = torch.randperm(pages).int()
        self.tables: list[tuple[torch.Tensor, ...]] = []
        self.batches: list[Batch] = []
        for qo_lens, kv_lens in levels:
            counts = [-(-m // page_size) for m in kv_lens]
            mine, ids = ids[: sum(counts)], ids[sum(counts) :]
            last = [0 if m == 0 else (m - 1) % page_size + 1 for m in kv_lens]
            parts = oracle.gather_pages(*self.cache.unbind(1), indptr(counts).tolist(), mine.tolist(), last, kv_layout)
            k, v = (torch.cat(x) for x in zip(*parts))
            self.batches.append(Batch(list(qo_lens), list(kv_lens), self.q, k, v))
            self.tables.append((indptr(qo_lens), indptr(counts), mine, torch.tensor(last, dtype=torch.int32)))

    def arrays(self, device: str = "cpu") -> list[list[torch.Tensor]]:
        """qo_indptr, kv_indptr, page numbers and lengths of last pages, each for all levels."""
        return [[x.to(device) for x in arr] for arr in zip(*self.tables)]

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*HEADS, DIM, self.page_size)

    def expect(self, causal: bool = False, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The oracle's state of each level, merged."""
        *shared, last = self.batches
        states = [expect(batch, Options(**options)) for batch in shared]
        states.append(expect(last, Options(causal=causal, **options)))
        return oracle.merge(torch.stack([x.out for x in states], 1), torch.stack([x.lse for x in states], 1))


def buffers(levels, device: str) -> list[list[torch.Tensor]]:
    """What makes a wrapper one for CUDA graphs of these levels."""

    def ints(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=device)

    counts = [len(qo_lens) for qo_lens, _ in levels]
    return [
        [ints(n + 1) for n in counts],
        [ints(n + 1) for n in counts],
        [ints(PAGES) for _ in counts],
        [*map(ints, counts)],
    ]


def planned(target, tree: Tree, kv_layout: str = "NHD", **options: Any) -> Any:
    wrapper = ck.MultiLevelCascadeAttentionWrapper(len(tree.levels), target.workspace(), kv_layout)
    wrapper.plan(*tree.arrays(), *tree.sizes, **options)
    return wrapper


def check(wrapper, tree: Tree, want: Sequence[torch.Tensor], tolerance: float = 2e-3, **run: Any) -> None:
    out, lse = wrapper.run(tree.q, tree.cache, return_lse=True, **run)
    assert_close(out, want[0], atol=tolerance, dtype=tree.q.dtype)
    assert_lse_close(lse, want[1], atol=2e-3)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", TREES)
def test_levels(target, name, causal):
    tree = Tree(TREES[name], target.device)
    check(planned(target, tree, causal=causal), tree, tree.expect(causal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_layouts_and_types(target, page_size, kv_layout, dtype):
    tree = Tree(THREE, target.device, page_size, kv_layout, dtype)
    wrapper = planned(target, tree, kv_layout, causal=True, q_data_type=dtype)
    check(wrapper, tree, tree.expect(causal=True), 2e-2 if dtype == torch.bfloat16 else 2e-3)
    tuples = tuple(tree.cache.unbind(1))
    assert_bitwise(wrapper.run(tree.q, tuples), wrapper.run(tree.q, tree.cache))


def test_it_is_attention_over_the_keys_of_all_levels(target):
    # Every request has as many keys of its own as rows, so that its rows see all shared keys in the plain form, too.
    tree, options = Tree(TWO, target.device), dict(causal=True, sm_scale=0.2, logits_soft_cap=5.0)
    shared, own = tree.batches
    ks = [torch.cat([shared.k, k]) for _, k, _ in own.requests()]
    vs = [torch.cat([shared.v, v]) for _, _, v in own.requests()]
    whole = Batch(own.qo_lens, [50 + m for m in own.kv_lens], tree.q, torch.cat(ks), torch.cat(vs))
    want = expect(whole, Options(**options))
    check(planned(target, tree, **options), tree, (want.out, want.lse))


@pytest.mark.parametrize(
    "options",
    [
        dict(sm_scale=0.3, logits_soft_cap=2.0),
        dict(window_left=5),
        dict(pos_encoding_mode="ALIBI"),
        dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=1e3),
    ],
    ids=str,
)
def test_options_hold_within_each_level(target, options):
    tree = Tree(THREE, target.device)
    check(planned(target, tree, causal=True, **options), tree, tree.expect(causal=True, **options), 3e-3)


def test_fp8_cache_with_scales(target):
    tree = Tree(TWO, target.device)
    tree.cache = tree.cache.to(torch.float8_e4m3fn)
    for batch in tree.batches:
        batch.k, batch.v = (x.to(torch.float8_e4m3fn) for x in (batch.k, batch.v))
    wrapper = planned(target, tree, causal=True, q_data_type="float16", kv_data_type="float8_e4m3fn")
    scales = dict(q_scale=1.2, k_scale=0.5, v_scale=2.0)
    check(wrapper, tree, tree.expect(causal=True, **scales), 2e-2, **scales)


def test_spellings(target):
    tree = Tree(TWO, target.device)
    wrapper = ck.cascade.MultiLevelCascadeAttentionWrapper(2, target.workspace(), "NHD")
    # ..., page_size, causal, pos, fp16_qk, sm_scale, window_left, cap, rope (2), types (2)
    args = (True, "NONE", False, 0.2, -1, 3.0, None, None, "float16", "float16")
    wrapper.begin_forward(*tree.arrays(target.device), *tree.sizes, *args)
    out = wrapper.forward(tree.q, tree.cache)
    assert_close(out, tree.expect(True, sm_scale=0.2, logits_soft_cap=3.0)[0], atol=2e-3)
    place = torch.full_like(tree.q, torch.nan)
    assert wrapper.run(tree.q, tree.cache, out=place) is place
    assert_bitwise(place, out)
    wrapper.end_forward()
    for flag in ("use_fp16_qk_reduction", "allow_fp16_qk_reduction"):
        wrapper.plan(*tree.arrays(), *tree.sizes, causal=True, **{flag: True})
        check(wrapper, tree, tree.expect(True))


def test_replans_and_new_workspaces(target):
    wrapper = ck.MultiLevelCascadeAttentionWrapper(3, target.workspace())
    for levels, own in ((THREE, None), (DECODE, 3), (THREE, None)):
        tree = Tree(levels, target.device)
        wrapper.plan(*tree.arrays(), *tree.sizes, causal=True)
        check(wrapper, tree, tree.expect(True))
        ints = None if own is None else [target.workspace(8 << 20) for _ in range(own)]
        wrapper.reset_workspace_buffer(target.workspace(), ints)
        with pytest.raises(RuntimeError, match="no plan"):
            wrapper.run(tree.q, tree.cache)


@pytest.mark.parametrize("rule", [dict(fixed_split_size=4), dict(disable_split_kv=True)], ids=str)
def test_fixed_splits(target, rule):
    tree = Tree(DECODE, target.device)
    wrapper = planned(target, tree, **rule)
    check(wrapper, tree, tree.expect())
    assert_bitwise(wrapper.run(tree.q, tree.cache), wrapper.run(tree.q, tree.cache))


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_what_is_refused(target):
    make, workspace, tree = ck.MultiLevelCascadeAttentionWrapper, target.workspace(), Tree(TWO, target.device)
    wrapper = make(2, workspace)
    arrays = tree.arrays()
    for error, words, call in (
        (ValueError, "num_levels=0", lambda: make(0, workspace)),
        (KeyError, "DHN", lambda: make(2, workspace, "DHN")),
        (ValueError, "needs qo_indptr_buf_arr", lambda: make(2, workspace, use_cuda_graph=True)),
        (ValueError, "3 tensors.*2 levels", lambda: make(2, workspace, "NHD", True, *buffers(THREE, target.device))),
        (RuntimeError, "no plan", lambda: wrapper.run(tree.q, tree.cache)),
        (ValueError, "qo_indptr_arr has 1", lambda: wrapper.plan(arrays[0][1:], *arrays[1:], *tree.sizes)),
        (ValueError, "int_workspace_buffers has 1", lambda: wrapper.reset_workspace_buffer(workspace, [workspace])),
    ):
        with pytest.raises(error, match=words):
            call()
    wrapper.plan(*arrays, *tree.sizes)
    with pytest.raises(ValueError, match="5 rows"):
        wrapper.run(tree.q[:5], tree.cache)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_a_plan_that_fails_leaves_none(target):
    # Its levels would be of two batches.
    tree = Tree(TWO, target.device)
    wrapper = ck.MultiLevelCascadeAttentionWrapper(2, target.workspace())
    offsets, *table = tree.arrays()
    for wrong, error, words in (
        ([offsets[0], indptr([3, 1, 2]).flip(0)], RuntimeError, "qo_indptr"),
        ([indptr([5]), offsets[1]], ValueError, r"\[5, 6\]"),
    ):
        wrapper.plan(offsets, *table, *tree.sizes)
        with pytest.raises(error, match=words):
            wrapper.plan(wrong, *table, *tree.sizes)
        with pytest.raises(RuntimeError, match="no plan"):
            wrapper.run(tree.q, tree.cache)


# The same numbers of requests, with no more rows than the first.
STEPS = [
    [([12], [90]), ([8, 4], [33, 7]), ([4, 4, 4], [20, 9, 40])],
    [([3], [300]), ([2, 1], [5, 64]), ([1, 1, 1], [1, 30, 100])],
    [([12], [0]), ([12, 0], [16, 0]), ([10, 2, 0], [10, 5, 0])],
    [([6], [8]), ([1, 5], [0, 90]), ([1, 3, 2], [60, 3, 2])],
]


def graph_wrapper(target) -> tuple[Any, list[list[torch.Tensor]]]:
    given = buffers(STEPS[0], target.device)
    return ck.MultiLevelCascadeAttentionWrapper(3, target.workspace(), "NHD", True, *given), given


def test_buffers_receive_the_plan(target):
    wrapper, (qo, kv, pages, last) = graph_wrapper(target)
    assert wrapper.is_cuda_graph_enabled
    for step in STEPS:
        tree = Tree(step, target.device)
        wrapper.plan(*tree.arrays(), *tree.sizes, causal=True)
        check(wrapper, tree, tree.expect(True))
        for level, table in enumerate(tree.tables):
            assert qo[level].tolist() == table[0].tolist() and kv[level].tolist() == table[1].tolist()
            assert pages[level][: len(table[2])].tolist() == table[2].tolist()
            assert last[level].tolist() == table[3].tolist()


def test_a_first_plan_that_fails_pins_nothing(target):
    wrapper, _ = graph_wrapper(target)
    tree = Tree(STEPS[0], target.device)
    offsets, *table = tree.arrays()
    fewer = [indptr([3]), *offsets[1:]]
    with pytest.raises(ValueError, match=r"qo_indptr_arr ends at \[3, 12, 12\]"):
        wrapper.plan(fewer, *table, *tree.sizes)
    wrapper.plan(offsets, *table, *tree.sizes, causal=True)
    check(wrapper, tree, tree.expect(True))


class Captured:
    """A graph of a run with static inputs, and an output if ``out`` says so."""

    def __init__(self, target, into_place: bool = False, **run: Any) -> None:
        self.wrapper, _ = graph_wrapper(target)
        self.trees = [Tree(step, target.device) for step in STEPS]
        first = self.trees[0]
        self.q, self.cache = torch.zeros_like(first.q), torch.zeros_like(first.cache)
        if into_place:
            run["out"] = torch.zeros_like(first.q)
        self.load(first)
        self.graph, self.results = capture(lambda: self.wrapper.run(self.q, self.cache, **run))

    def load(self, tree: Tree, device: str = "cpu") -> int:
        """Plans with vectors there. The number of rows."""
        self.q[: len(tree.q)], self.cache[:] = tree.q, tree.cache
        self.wrapper.plan(*tree.arrays(device), *tree.sizes, causal=True)
        return len(tree.q)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_replay_after_other_plans(kernels, where):
    captured = Captured(kernels, return_lse=True)
    out, lse = captured.results
    for tree in [*captured.trees, captured.trees[0]]:
        rows, want = captured.load(tree, kernels.device if where == "device" else "cpu"), tree.expect(True)
        captured.graph.replay()
        assert_close(out[:rows], want[0], atol=2e-3)
        assert_lse_close(lse[:rows], want[1], atol=2e-3)
        assert not out[rows:].any() and bool((lse[rows:] == -torch.inf).all())  # rows of no request


def test_replays_write_no_rows_of_out_beyond_the_last_request(kernels):
    captured = Captured(kernels, into_place=True)
    for tree in captured.trees:
        rows = captured.load(tree)
        captured.results.fill_(7.0)
        captured.graph.replay()
        assert_close(captured.results[:rows], tree.expect(True)[0], atol=2e-3)
        assert bool((captured.results[rows:] == 7.0).all())
