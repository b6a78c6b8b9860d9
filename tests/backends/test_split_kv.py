"""Short queries over long keys: heads that share tiles, keys that are split, and what a batch may change."""

from __future__ import annotations

import pytest
import torch
from compare import assert_all_bitwise, assert_bitwise, assert_repeats
from pairs import every
from planned_runs import compare, paged, ragged, single, wrapped
from problems import Batch, Options, make_batch
from test_kernels import batch_of

DIMS = [(64, 64), (96, 96), (80, 80), (128, 128), (192, 128), (192, 192), (160, 160), (256, 256)]
OPTIONS = {
    "causal": Options(causal=True),
    "full": Options(),
    "window": Options(causal=True, window_left=300),
    "cap": Options(causal=True, logits_soft_cap=5.0),
}
CAUSAL = OPTIONS["causal"]


@pytest.mark.pairwise
@every(dims=DIMS, options=OPTIONS, page_size=[5, 16])
def test_appended_rows(kernels, dims, options, page_size):
    batch = batch_of(([40, 3], [3000, 700]), (8, 2), dims, device=kernels.device)
    compare(paged(kernels, batch, options, page_size), batch, options)


@every(group=[1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 71], rows=[1, 5, 33])
def test_group_sizes(kernels, group, rows):
    batch = make_batch([rows, 0, 1], [1500, 40, 300], 2 * group, 2, 64, dtype=torch.bfloat16, device=kernels.device)
    options = Options(causal=True, sinks=torch.linspace(-3.0, 5.0, 2 * group, device=kernels.device))
    compare(ragged(kernels, batch, options), batch, options)


@every(options=OPTIONS, rows=[1, 2, 17, 64, 100])
def test_a_single_request(kernels, options, rows):
    batch = make_batch([rows], [4000], 8, 1, 128, device=kernels.device)
    compare(single(kernels.backend, batch, options), batch, options)


@every(dims=DIMS)
def test_a_prompt_among_single_rows(kernels, dims):
    batch = batch_of(([500, *[1] * 30], [500, *range(1, 1801, 60)]), (8, 2), dims, device=kernels.device)
    compare(paged(kernels, batch, CAUSAL), batch, CAUSAL)


def test_one_long_request_among_short_ones(kernels):
    batch = make_batch([1] * 40, [*[50] * 39, 20000], 8, 8, 64, device=kernels.device)
    compare(ragged(kernels, batch, CAUSAL), batch, CAUSAL)


@every(split=[{"fixed_split_size": 256}, {"fixed_split_size": 1000}, {"disable_split_kv": True}], dims=DIMS)
def test_fixed_splits(kernels, split, dims):
    batch = batch_of(([40, 0, 3, 300], [3000, 5, 700, 900]), (8, 2), dims, device=kernels.device)
    for name in ("causal", "window"):
        compare(paged(kernels, batch, OPTIONS[name], **split), batch, OPTIONS[name])


@every(split=[{"fixed_split_size": 512}, {"disable_split_kv": True}], name=["causal", "window"], head_dim=[64, 128])
def test_results_do_not_depend_on_the_batch(kernels, split, name, head_dim):
    # The first requests alone, and among others of all kinds.
    few = make_batch([7, 130, 1], [2100, 600, 5000], 8, 2, head_dim, device=kernels.device)
    rest = make_batch([1] * 20 + [800], [3000] * 20 + [800], 8, 2, head_dim, device=kernels.device, seed=1)
    one = Batch(few.qo_lens[:1], few.kv_lens[:1], few.q[:7], few.k[:2100], few.v[:2100])
    for call in (ragged, paged):
        alone, among, first = (
            call(kernels, batch, OPTIONS[name], **split) for batch in (few, few.followed_by(rest), one)
        )
        assert_all_bitwise([x[: len(few.q)] for x in among], alone)
        assert_bitwise(first[0], alone[0][:7])


def test_runs_give_the_same_bits(kernels):
    batch = make_batch([64, 1, 1], [8000, 5000, 100], 8, 2, 128, device=kernels.device)
    assert_repeats(lambda: paged(kernels, batch, CAUSAL), 30)


@every(where=["cpu", "device"], split=[{}, {"fixed_split_size": 19 * 16}, {"disable_split_kv": True}])
def test_offsets_on_the_device(kernels, where, split):
    batch = make_batch([4, 1], [3000, 1000], 8, 2, 128, device=kernels.device)
    where = kernels.device if where == "device" else where
    compare(paged(kernels, batch, CAUSAL, where=where, **split), batch, CAUSAL)


def test_rows_without_keys_in_split_tiles(kernels):
    # More rows than keys, and a window that leaves KV splits without a row that sees them.
    batch = make_batch([50, 2], [20, 6000], 8, 2, 64, device=kernels.device)
    for sinks in (None, torch.linspace(-2.0, 2.0, 8, device=kernels.device)):
        options = Options(causal=True, window_left=40, sinks=sinks)
        compare(ragged(kernels, batch, options, fixed_split_size=256), batch, options)


@pytest.mark.pairwise
@every(
    heads=[(8, 2), (7, 1), (3, 3)],
    lens=[([40, 3], [3000, 700]), ([5], [1300]), ([1100, 7], [8192, 900])],
    how=["ragged", "paged", "single"],
)
def test_custom_masks_of_split_keys(kernels, heads, lens, how):
    batch = make_batch(*lens, *heads, 128, device=kernels.device)
    masks = batch.random_masks(0.3)
    masks[0][:, :601] = False  # the first key that a tile sees is not the first of all
    masks[0][1:3] = False
    options = Options(custom_masks=masks)
    if how == "single":
        batch = Batch([lens[0][0]], [lens[1][0]], *batch.requests()[0])
        options = Options(custom_masks=masks[:1])
        compare(single(kernels.backend, batch, options), batch, options)
    else:
        compare({"ragged": ragged, "paged": paged}[how](kernels, batch, options), batch, options)


@every(split=[{}, {"fixed_split_size": 64, "max_sequence_kv": 4000}, {"disable_split_kv": True}])
def test_a_graph_keeps_its_rule(kernels, split):
    batch = make_batch([2, 1], [3000, 900], 8, 2, 64, device=kernels.device)
    buffers = {
        f"{name}_buf": torch.zeros(3, dtype=torch.int32, device=kernels.device) for name in ("qo_indptr", "kv_indptr")
    }
    call = wrapped(kernels.backend, batch, use_cuda_graph=True, **buffers)
    for _ in range(2):
        call.plan(CAUSAL, **split).check()
        with pytest.raises(ValueError, match="disable_split_kv"):
            call.plan(CAUSAL, **({} if split else {"disable_split_kv": True}))


def test_a_fixed_size_needs_a_bound(kernels):
    call = wrapped(kernels.backend, make_batch([2], [300], 8, 2, 64, device=kernels.device))
    with pytest.raises(ValueError, match="max_sequence_kv"):
        call.plan(CAUSAL, where=kernels.device, fixed_split_size=64)
    call.plan(CAUSAL, where=kernels.device, fixed_split_size=64, max_sequence_kv=300).check()


@every(page_size=[None, 16])
def test_a_plan_refuses_splits_that_have_no_room_for_one_row(kernels, page_size):
    """Offsets on the device do not tell how many rows there are, but no run has less than one."""
    room, unit = 128 << 10, page_size or 1  # 63 splits of a row, 8 heads of 64 columns and an LSE in fp32
    batch = make_batch([2], [4000], 8, 2, 64, device=kernels.device)
    call = wrapped(kernels.backend, batch, page_size, workspace=kernels.workspace(room))
    given = {"where": kernels.device, **({} if page_size else {"max_sequence_kv": 4000})}
    call.plan(CAUSAL, fixed_split_size=1024 // unit, **given)
    with pytest.raises(RuntimeError, match=f"float_workspace_buffer has {room} bytes.* at least .*fixed_split_size"):
        call.plan(CAUSAL, fixed_split_size=1, **given)
    call.check()  # by the plan before
    call.wrapper.reset_workspace_buffer(kernels.workspace(), kernels.workspace(16))
    with pytest.raises(RuntimeError, match=r"int_workspace_buffer has 16 bytes.* at least "):
        call.plan(CAUSAL, fixed_split_size=1024 // unit, **given)


def test_infinite_values_of_other_rows(kernels):
    # Keys that only later rows see may hold infinite values: rows without keys stay 0.
    batch = make_batch([30], [10], 8, 2, 64, device=kernels.device)
    batch.v[0] = float("inf")
    out, lse = ragged(kernels, batch, CAUSAL)
    assert (out[:20] == 0).all() and (lse[:20] == -float("inf")).all()
    assert not out[20:].isfinite().any()


def test_nan_queries_of_split_tiles(kernels):
    batch = make_batch([6, 1], [5000, 3000], 8, 2, 64, device=kernels.device)
    clean = ragged(kernels, batch, CAUSAL)
    batch.q[2, 3] = float("nan")
    found = ragged(kernels, batch, CAUSAL)
    for x, y in zip(found, clean):
        assert x[2, 3].isnan().all()
        x[2, 3] = y[2, 3]
    assert_all_bitwise(found, clean)


def test_a_small_workspace_says_what_is_needed(kernels):
    batch = make_batch([16], [20000], 8, 1, 128, device=kernels.device)
    call = wrapped(kernels.backend, batch, 16, workspace=kernels.workspace(4096))
    needed, _ = call.wrapper.workspace_size(*call.vectors(), *call.sizes, causal=True)
    with pytest.raises(RuntimeError, match=f"float_workspace_buffer has 4096 bytes.* {needed}"):
        call.plan(CAUSAL)
    call.plan(CAUSAL, disable_split_kv=True).check()
    call.wrapper.reset_workspace_buffer(kernels.workspace(needed))
    call.plan(CAUSAL).check()
