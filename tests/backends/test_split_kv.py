"""Short queries over long keys: heads that share tiles, keys that are split, and what a batch may change."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from planned_runs import paged, ragged
from problems import Batch, Options, expect, make_batch
from targets import TARGETS, Target

import cutlass_kernels as ck

DIMS = [(64, 64), (96, 96), (80, 80), (128, 128), (192, 128), (192, 192), (160, 160), (256, 256)]
OPTIONS = {
    "causal": Options(causal=True),
    "full": Options(),
    "window": Options(causal=True, window_left=300),
    "cap": Options(causal=True, logits_soft_cap=5.0),
}


@pytest.fixture(params=[target for target in TARGETS if target.marks])
def target(request: pytest.FixtureRequest) -> Target:
    """The targets with compiled kernels: the reference splits nothing."""
    return request.param


def check(got: tuple[torch.Tensor, ...], batch: Batch, options: Options) -> None:
    want = expect(batch, options)
    assert_close(got[0], want.out, want.baseline)
    assert_lse_close(got[1], want.lse)


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("page_size", [5, 16])
def test_appended_rows(target, dims, name, page_size):
    batch = make_batch([40, 3], [3000, 700], 8, 2, dims[0], head_dim_vo=dims[1], device=target.device)
    check(paged(target, batch, OPTIONS[name], page_size), batch, OPTIONS[name])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 71])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_group_sizes(target, group, rows):
    batch = make_batch([rows, 0, 1], [1500, 40, 300], 2 * group, 2, 64, dtype=torch.bfloat16, device=target.device)
    options = Options(causal=True, sinks=torch.linspace(-3.0, 5.0, 2 * group, device=target.device))
    check(ragged(target, batch, options), batch, options)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 100])
def test_a_single_request(target, name, rows):
    batch = make_batch([rows], [4000], 8, 1, 128, device=target.device)
    options = OPTIONS[name]
    got = ck.single_prefill_with_kv_cache(
        batch.q, batch.k, batch.v, return_lse=True, backend=target.backend, **options.plan_kwargs()
    )
    check(got, batch, options)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_a_prompt_among_single_rows(target, dims):
    batch = make_batch(
        [500, *[1] * 30], [500, *range(1, 1801, 60)], 8, 2, dims[0], head_dim_vo=dims[1], device=target.device
    )
    check(paged(target, batch, OPTIONS["causal"]), batch, OPTIONS["causal"])


def test_one_long_request_among_short_ones(target):
    batch = make_batch([1] * 40, [*[50] * 39, 20000], 8, 8, 64, device=target.device)
    check(ragged(target, batch, OPTIONS["causal"]), batch, OPTIONS["causal"])


@pytest.mark.parametrize("split", [{"fixed_split_size": 256}, {"fixed_split_size": 1000}, {"disable_split_kv": True}])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_fixed_splits(target, split, dims):
    batch = make_batch([40, 0, 3, 300], [3000, 5, 700, 900], 8, 2, dims[0], head_dim_vo=dims[1], device=target.device)
    for name in ("causal", "window"):
        check(paged(target, batch, OPTIONS[name], **split), batch, OPTIONS[name])


@pytest.mark.parametrize("split", [{"fixed_split_size": 512}, {"disable_split_kv": True}], ids=str)
@pytest.mark.parametrize("name", ["causal", "window"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_do_not_depend_on_the_batch(target, split, name, head_dim):
    # The first requests alone, and among others of all kinds.
    options = OPTIONS[name]
    few = make_batch([7, 130, 1], [2100, 600, 5000], 8, 2, head_dim, device=target.device)
    rest = make_batch([1] * 20 + [800], [3000] * 20 + [800], 8, 2, head_dim, device=target.device, seed=1)
    many = Batch(
        [*few.qo_lens, *rest.qo_lens],
        [*few.kv_lens, *rest.kv_lens],
        torch.cat([few.q, rest.q]),
        torch.cat([few.k, rest.k]),
        torch.cat([few.v, rest.v]),
    )
    for call in (ragged, paged):
        alone = call(target, few, options, **split)
        among = call(target, many, options, **split)
        rows = few.q.size(0)
        assert_bitwise(among[0][:rows], alone[0])
        assert_bitwise(among[1][:rows], alone[1])
        one = Batch(few.qo_lens[:1], few.kv_lens[:1], few.q[:7], few.k[:2100], few.v[:2100])
        assert_bitwise(call(target, one, options, **split)[0], alone[0][:7])


def test_runs_give_the_same_bits(target):
    batch = make_batch([64, 1, 1], [8000, 5000, 100], 8, 2, 128, device=target.device)
    first = paged(target, batch, OPTIONS["causal"])
    for _ in range(30):
        again = paged(target, batch, OPTIONS["causal"])
        assert_bitwise(again[0], first[0])
        assert_bitwise(again[1], first[1])


@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 19}, {"disable_split_kv": True}], ids=str)
def test_offsets_on_the_device(target, where, split):
    device = "cpu" if where == "cpu" else target.device
    batch = make_batch([4, 1], [3000, 1000], 8, 2, 128, device=target.device)
    pages = batch.paged(16)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    wrapper.plan(batch.qo_indptr(device), *pages.table(device), *batch.heads, 16, causal=True, **split)
    check(wrapper.run(batch.q, pages.cache, return_lse=True), batch, OPTIONS["causal"])


def test_rows_without_keys_in_split_tiles(target):
    # More rows than keys, and a window that leaves KV splits without a row that sees them.
    options = Options(causal=True, window_left=40)
    batch = make_batch([50, 2], [20, 6000], 8, 2, 64, device=target.device)
    for sinks in (None, torch.linspace(-2.0, 2.0, 8, device=target.device)):
        given = dataclasses.replace(options, sinks=sinks)
        check(ragged(target, batch, given, fixed_split_size=256), batch, given)


@pytest.mark.pairwise
@pytest.mark.parametrize("heads", [(8, 2), (7, 1), (3, 3)], ids=str)
@pytest.mark.parametrize("lens", [([40, 3], [3000, 700]), ([5], [1300]), ([1100, 7], [8192, 900])], ids=str)
@pytest.mark.parametrize("how", ["ragged", "paged", "single"])
def test_custom_masks_of_split_keys(target, heads, lens, how):
    batch = make_batch(*lens, *heads, 128, device=target.device)
    masks = batch.random_masks(0.3)
    masks[0][:, :601] = False  # the first key that a tile sees is not the first of all
    masks[0][1:3] = False
    options = Options(custom_masks=masks)
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    if how == "single":
        rows, keys = lens[0][0], lens[1][0]
        batch = Batch([rows], [keys], batch.q[:rows], batch.k[:keys], batch.v[:keys])
        call = ck.single_prefill_with_kv_cache
        got = call(batch.q, batch.k, batch.v, masks[0], return_lse=True, backend=target.backend)
        check(got, batch, Options(custom_masks=masks[:1]))
    else:
        check({"ragged": ragged, "paged": paged}[how](target, batch, options, custom_mask=flat), batch, options)


@pytest.mark.parametrize("split", [{}, {"fixed_split_size": 64, "max_sequence_kv": 4000}, {"disable_split_kv": True}])
def test_a_graph_keeps_its_rule(target, split):
    batch = make_batch([2, 1], [3000, 900], 8, 2, 64, device=target.device)

    def ints(count: int) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.int32, device=target.device)

    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        target.workspace(),
        use_cuda_graph=True,
        qo_indptr_buf=ints(3),
        kv_indptr_buf=ints(3),
        backend=target.backend,
    )
    plan = (batch.qo_indptr(), batch.kv_indptr(), *batch.heads)
    wrapper.plan(*plan, causal=True, **split)
    check(wrapper.run(batch.q, batch.k, batch.v, return_lse=True), batch, OPTIONS["causal"])
    other = {} if split else {"disable_split_kv": True}
    with pytest.raises(ValueError, match="disable_split_kv"):
        wrapper.plan(*plan, causal=True, **other)
    wrapper.plan(*plan, causal=True, **split)
    check(wrapper.run(batch.q, batch.k, batch.v, return_lse=True), batch, OPTIONS["causal"])


def test_a_fixed_size_needs_a_bound(target):
    batch = make_batch([2], [300], 8, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    plan = (batch.qo_indptr(target.device), batch.kv_indptr(target.device), *batch.heads)
    with pytest.raises(ValueError, match="max_sequence_kv"):
        wrapper.plan(*plan, causal=True, fixed_split_size=64)
    wrapper.plan(*plan, causal=True, fixed_split_size=64, max_sequence_kv=300)
    check(wrapper.run(batch.q, batch.k, batch.v, return_lse=True), batch, OPTIONS["causal"])


@pytest.mark.parametrize("how", ["ragged", "paged"])
def test_a_plan_refuses_splits_that_have_no_room_for_one_row(target, how):
    """Offsets on the device do not tell how many rows there are, but no run has less than one."""
    batch = make_batch([2], [4000], 8, 2, 64, device=target.device)
    room = 128 << 10  # 63 splits of a row, 8 heads of 64 columns and an LSE in fp32
    if how == "ragged":
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(room), backend=target.backend)
        plan = (batch.qo_indptr(target.device), batch.kv_indptr(target.device), *batch.heads)
        options, unit, tensors = dict(causal=True, max_sequence_kv=4000), 1, (batch.k, batch.v)
    else:
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(room), backend=target.backend)
        pages = batch.paged(16)
        plan = (batch.qo_indptr(target.device), *pages.table(target.device), *batch.heads, 16)
        options, unit, tensors = dict(causal=True), 16, (pages.cache,)
    wrapper.plan(*plan, **options, fixed_split_size=1024 // unit)
    with pytest.raises(RuntimeError, match=f"float_workspace_buffer has {room} bytes.* at least .*fixed_split_size"):
        wrapper.plan(*plan, **options, fixed_split_size=1)
    check(wrapper.run(batch.q, *tensors, return_lse=True), batch, OPTIONS["causal"])  # by the plan before
    wrapper.reset_workspace_buffer(target.workspace(), target.workspace(16))
    with pytest.raises(RuntimeError, match=r"int_workspace_buffer has 16 bytes.* at least "):
        wrapper.plan(*plan, **options, fixed_split_size=1024 // unit)


def test_infinite_values_of_other_rows(target):
    # Keys that only later rows see may hold infinite values: rows without keys stay 0.
    batch = make_batch([30], [10], 8, 2, 64, device=target.device)
    batch.v[0] = float("inf")
    out, lse = ragged(target, batch, Options(causal=True))
    assert (out[:20] == 0).all() and (lse[:20] == -float("inf")).all()
    assert not out[20:].isfinite().any()


def test_nan_queries_of_split_tiles(target):
    batch = make_batch([6, 1], [5000, 3000], 8, 2, 64, device=target.device)
    clean, clean_lse = ragged(target, batch, OPTIONS["causal"])
    batch.q[2, 3] = float("nan")
    out, lse = ragged(target, batch, OPTIONS["causal"])
    assert out[2, 3].isnan().all() and lse[2, 3].isnan()
    out[2, 3], lse[2, 3] = clean[2, 3], clean_lse[2, 3]
    assert_bitwise(out, clean)
    assert_bitwise(lse, clean_lse)


def test_a_small_workspace_says_what_is_needed(kernel_backend):
    batch = make_batch([16], [20000], 8, 1, 128, device="cuda:0")
    pages = batch.paged(16)

    def workspace(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device="cuda:0")

    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace(4096), "NHD", backend=kernel_backend)
    plan = (batch.qo_indptr(), *pages.table(), *batch.heads, 16)
    needed, _ = wrapper.workspace_size(*plan, causal=True)
    with pytest.raises(RuntimeError, match=f"float_workspace_buffer has 4096 bytes.* {needed}"):
        wrapper.plan(*plan, causal=True)
    wrapper.plan(*plan, causal=True, disable_split_kv=True)
    check(wrapper.run(batch.q, pages.cache, return_lse=True), batch, OPTIONS["causal"])
    wrapper.reset_workspace_buffer(workspace(needed))
    wrapper.plan(*plan, causal=True)
    check(wrapper.run(batch.q, pages.cache, return_lse=True), batch, OPTIONS["causal"])
