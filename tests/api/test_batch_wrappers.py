"""The wrappers of batches, ragged, in pages and of decode steps: what they compute, and all spellings of calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import torch
from captures import no_waiting
from compare import assert_close
from problems import Batch, Options, allowed_in_fp8, expect, make_batch
from targets import Target
from wrapper_problems import Wrapped, batch_for

import cutlass_kernels as ck
from cutlass_kernels._compute import selection

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CAUSAL = Options(causal=True)
each_kind = pytest.mark.parametrize("kind", ["ragged", "paged", "decode"])
prefill = pytest.mark.parametrize("kind", ["ragged", "paged"])
in_pages = pytest.mark.parametrize("kind", ["paged", "decode"])
layouts = pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
forms = pytest.mark.parametrize("form", ["stacked", "tuple"])


def causal(kind: str, **options: Any) -> Options:
    """Decode steps take no such option."""
    return Options(causal=kind != "decode", **options)


# --- what is computed --------------------------------------------------------------------------------------------


@pytest.mark.pairwise
@forms
@layouts
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 128])
@in_pages
def test_page_sizes_layouts_and_forms(target, kind, page_size, kv_layout, form):
    batch = batch_for(kind, target, (9, 1, 33, 1, 2), (40, 130, 33, 1, 64))
    Wrapped(target, kind, batch, page_size, kv_layout, form).plan(causal(kind)).check()


@forms
@layouts
@in_pages
def test_caches_without_the_dimension_of_page_size_one(target, kind, kv_layout, form):
    w = Wrapped(target, kind, batch_for(kind, target, (9, 1), (40, 13)), 1, kv_layout, form)
    dim, cache = 1 if kv_layout == "NHD" else 2, w.kv[0]
    w.kv = (cache.squeeze(dim + 1) if form == "stacked" else tuple(x.squeeze(dim) for x in cache),)
    w.plan(causal(kind)).check()


MIXES = [
    ([5], [9]),
    ([1, 1, 1], [7, 1, 130]),
    ([1] * 5, [1, 16, 17, 160, 3]),
    ([33, 1, 64, 5], [33, 70, 64, 200]),
    ([4, 0, 7], [9, 12, 7]),
    ([4, 3, 7], [0, 9, 7]),
    ([4, 3, 7], [9, 0, 7]),
    ([34, 2], [1, 16]),
    ([0, 3], [0, 0]),
    pytest.param([0, 0], [5, 0], marks=pytest.mark.runs_nothing("without query rows, no kernel is launched")),
    ([100, 3], [20, 2]),
]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("qo_lens,kv_lens", MIXES)
@prefill
def test_mixed_lengths(target, kind, qo_lens, kv_lens, is_causal):
    Wrapped(target, kind, batch_for(kind, target, qo_lens, kv_lens)).plan(Options(causal=is_causal)).check()


HEAD_DIMS = {"ragged": [64, 96, 128, 256], "paged": [64, 128, 256, 512], "decode": [64, 128, 256]}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("kind,head_dim", [(kind, dim) for kind, dims in HEAD_DIMS.items() for dim in dims])
def test_head_dims(target, kind, head_dim, dtype):
    if head_dim > 256 and target.backend == "fa3":
        pytest.skip("fa2 has tiles of 512 columns")
    batch = batch_for(kind, target, (9, 20, 31), (50, 20, 40), (4, 2, head_dim), dtype=dtype)
    Wrapped(target, kind, batch).plan(causal(kind)).check()


@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
@pytest.mark.parametrize("kind,kv_layout", [("ragged", "NHD"), ("paged", "HND")])
def test_group_sizes(target, kind, kv_layout, group):
    batch = batch_for(kind, target, (9, 1, 17), (9, 30, 40), (2 * group, 2, 64))
    Wrapped(target, kind, batch, kv_layout=kv_layout).plan(CAUSAL).check()


def test_batch_of_128(target):
    qo_lens = [1 + (7 * b) % 5 for b in range(128)]
    kv_lens = [n + (5 * b) % 23 for b, n in enumerate(qo_lens)]
    Wrapped(target, "ragged", batch_for("ragged", target, qo_lens, kv_lens, (2, 1, 64))).plan(CAUSAL).check()


def test_keys_with_heads_first(target):
    Wrapped(target, "ragged", kv_layout="HND").plan(CAUSAL).check()


def test_value_head_dim_differs(target):
    batch = make_batch([9, 20], [50, 20], 4, 2, 128, head_dim_vo=64, device=target.device)
    Wrapped(target, "paged", batch, form="tuple").plan(CAUSAL).check()
    batch = make_batch([20, 31], [40, 31], 4, 4, 192, head_dim_vo=128, dtype=torch.bfloat16, device=target.device)
    Wrapped(target, "ragged", batch).plan(CAUSAL).check()


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_fp8_cache(target, kv_dtype):
    batch = batch_for("paged", target, (9, 20), (50, 20), (4, 2, 128), dtype=torch.bfloat16, kv_dtype=kv_dtype)
    Wrapped(target, "paged", batch).plan(Options(causal=True, k_scale=0.8, v_scale=1.2)).check()


@pytest.mark.parametrize(
    "kind,out_type",
    [("ragged", None), ("ragged", torch.bfloat16), ("ragged", torch.float16), ("paged", torch.bfloat16)],
    ids=str,
)
def test_fp8_everything_with_head_scales(target, kind, out_type):
    batch = batch_for(kind, target, (9, 20), (50, 20), dtype=E4M3)
    ranges = ((0.5, 1.5, 4), (0.8, 1.2, 2), (0.6, 1.9, 2))
    scales = tuple(torch.linspace(*x, device=target.device) for x in ranges)

    def call(backend):
        w = Wrapped(target, kind, batch, backend=backend).plan(
            CAUSAL, **({"o_data_type": out_type} if out_type else {})
        )
        return w.wrapper.run(batch.q, *w.kv, *scales)

    # Of ragged keys, fa2 converts all, and warns.
    out = call(target.backend) if kind == "ragged" else target.attempt(call, ["fp8_batch"])
    wide = batch.dequantized(*scales)
    # An 8-bit output type is not written; bf16 takes its place.
    want, allowed = expect(wide, CAUSAL).out, allowed_in_fp8(wide, CAUSAL)
    assert_close(out, want, atol=2e-2, rtol=2e-2, dtype=out_type or torch.bfloat16, allowed=allowed)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("out_type", [None, torch.float16], ids=["default", "fp16"])
def test_fp8_on_fa2_is_converted(device, out_type, fp8, monkeypatch):
    target, wide = Target(device, "fa2"), out_type or torch.bfloat16
    if device == "cpu":  # without a GPU, the reference computes what fa2 is asked for

        def select(requested, request):
            assert requested == "fa2" and {request.q_dtype, request.kv_dtype, request.o_dtype} == {wide}
            return "reference"

        monkeypatch.setattr(selection, "select", select)
    w = Wrapped(target, "ragged", batch_for("ragged", target, (5, 9), (20, 9), dtype=fp8))
    with pytest.warns(ck.PerformanceWarning, match=f"fa2.*{wide}"):
        w.plan(CAUSAL, o_data_type=out_type)
    scales = dict(q_scale=0.5, k_scale=1.5, v_scale=2.0)
    out = w.run(**scales)
    assert out.dtype == wide
    assert_close(out, expect(w.batch, Options(causal=True, **scales)).out, atol=5e-2, rtol=5e-2, dtype=wide)


@in_pages
@pytest.mark.parametrize("indptr,indices", [([0, 3, 7], [5, 2, 0, 5, 2, 5, 1]), ([0, 2, 4], [0, 0, 0, 0])], ids=str)
def test_pages_shared_between_requests(target, kind, indptr, indices):
    """Two requests start with the same pages, and name one of them twice."""
    last = [2, 4] if indptr[1] == 3 else [4, 4]
    cache = torch.randn(6, 2, 4, 2, 64).half().to(target.device)
    requests = oracle.gather_pages(cache[:, 0], cache[:, 1], indptr, indices, last, "NHD")
    k, v = (torch.cat(x) for x in zip(*requests))
    rows = [1, 1] if kind == "decode" else [3, 5]
    q = torch.randn(sum(rows), 4, 64).half().to(target.device)
    w = Wrapped(target, kind, Batch(rows, [len(x) for x, _ in requests], q, k, v), 4)
    # The list is longer than the table needs; what follows is not a page number at all.
    table = (indptr, [*indices, 10**6, -7], last)
    w.pages.indptr, w.pages.indices, w.pages.last_page_len = (torch.tensor(x, dtype=torch.int32) for x in table)
    w.kv = (cache,)
    w.plan(causal(kind)).check(w.run())


def test_last_page_len_of_an_empty_request_does_not_matter(target):
    w = Wrapped(target, "paged", batch_for("paged", target, (3, 4), (0, 13)), 8)
    for entry in (0, 1, 8):
        w.pages.last_page_len[0] = entry
        w.plan(CAUSAL).check()


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 5, 8, 16])
def test_pages_of_an_empty_cache_count_as_zeros(kernel_backend, page_size):
    # The table is on the device, where nobody checks it.
    batch = make_batch([3], [2 * page_size], 4, 2, 64, device="cuda:0")
    w = Wrapped(Target("cuda:0", kernel_backend), "paged", batch, page_size)
    w.pages.indices = torch.tensor([0, 7], dtype=torch.int32)
    w.kv = (torch.empty_like(w.pages.cache[:0]),)
    assert torch.count_nonzero(w.plan(where="cuda:0").run()) == 0


# --- arguments of plan() and run() -------------------------------------------------------------------------------


@each_kind
def test_index_tensors_on_either_device(target, kind):
    batch = batch_for(kind, target, (5, 9, 2), (20, 0, 90), q_len=2)
    count = len(Wrapped(target, kind, batch).vectors())
    for moved in ((), *((n,) for n in range(count)), range(count)):
        w = Wrapped(target, kind, batch)
        vectors = [x.to(target.device) if n in moved else x for n, x in enumerate(w.vectors())]
        w.vectors = lambda where, vectors=vectors: vectors
        for non_blocking in (False, True):
            w.plan(causal(kind), non_blocking=non_blocking).check(w.run())


@each_kind
def test_plan_keeps_its_own_copy_of_the_index_tensors(target, kind):
    w = Wrapped(target, kind)
    vectors = [x.clone() for x in w.vectors()]
    w.vectors = lambda where: vectors
    w.plan(causal(kind))
    for x in vectors:
        x.zero_()
    w.check(w.run())


@each_kind
def test_hints_that_change_nothing(target, kind):
    w = Wrapped(target, kind)
    lens, rows = (torch.tensor(x, dtype=torch.int32) for x in (w.batch.kv_lens, w.batch.qo_lens))
    hints = {} if kind == "ragged" else dict(block_tables=torch.zeros(2, 2, dtype=torch.int32))
    if kind != "decode":
        hints |= dict(seq_lens_q=rows, max_token_per_sequence=9, max_sequence_kv=20)
    for where, lens_on in (("cpu", "cpu"), ("cpu", target.device), (target.device, target.device)):
        w.plan(causal(kind), where, seq_lens=lens.to(lens_on), non_blocking=True, **hints)
        w.check(w.run(return_lse=True, enable_pdl=False))
    if kind == "paged":
        with pytest.raises(ValueError, match=r"seq_lens\[1\]=8, but the page table gives request 1 9 keys"):
            w.plan(seq_lens=torch.tensor([20, 8], dtype=torch.int32))


BEFORE_RETURN_LSE = {"ragged": (), "paged": (None, None), "decode": (None, None, None)}


@each_kind
def test_run_spellings(target, kind):
    w = Wrapped(target, kind).plan(causal(kind))
    data, more = (w.batch.q, *w.kv), dict(q_len_per_req=1, window_left=-1) if kind == "decode" else {}
    plain = w.run()
    assert isinstance(plain, torch.Tensor)
    pairs = [
        w.run(return_lse=True),
        w.wrapper.run_return_lse(*data),
        w.wrapper.run(*data, *BEFORE_RETURN_LSE[kind], True),
        w.run(return_lse=True, enable_pdl=True, **more),
    ]
    for out, lse in pairs:
        assert torch.equal(out, plain) and torch.equal(lse, pairs[0][1]) and lse.shape == w.batch.q.shape[:2]


def test_scales_by_position(target):
    w = Wrapped(target, "paged").plan(CAUSAL)
    data, scales = (w.batch.q, *w.kv), dict(k_scale=0.5, v_scale=3.0)
    for out in (w.wrapper.run(*data, 0.5, 3.0), w.run(**scales), w.wrapper.forward(*data, True, **scales)):
        w.check(out, Options(causal=True, **scales), atol=3e-3)
    with pytest.raises(TypeError, match="k_scale is given twice"):
        w.wrapper.run(*data, 0.5, k_scale=0.5)
    w = Wrapped(target, "decode").plan()
    scales = dict(q_scale=2.0, k_scale=0.5, v_scale=3.0)
    for out in (w.wrapper.run(w.batch.q, *w.kv, 2.0, 0.5, 3.0), w.run(**scales)):
        w.check(out, Options(**scales), atol=3e-3)


@each_kind
def test_scales_are_of_one_run(target, kind):
    options, scales = causal(kind, logits_soft_cap=3.0), dict(q_scale=0.5, k_scale=1.7, v_scale=0.4)
    w = Wrapped(target, kind).plan(options)
    w.check(w.run(return_lse=True, **scales), causal(kind, logits_soft_cap=3.0, **scales))
    w.check(w.run())


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("layout", ["NH", "HN"])
@each_kind
def test_places_for_results_and_forms_of_the_lse(target, kind, base, layout):
    w = Wrapped(target, kind, batch_for(kind, target, (5, 9, 3), (20, 0, 90), q_len=2)).plan(causal(kind))
    form = dict(return_lse=True, lse_base=base, lse_layout=layout)
    own = w.run(**form)
    assert own[1].is_contiguous()
    places = [torch.full_like(x, torch.nan) for x in own]
    got = w.run(out=places[0], lse=places[1], **form)
    assert [x.data_ptr() for x in got] == [x.data_ptr() for x in places]
    for out, lse in (own, places):
        w.check((out, (lse.T if layout == "HN" else lse) / (0.6931471805599453 if base == "ln" else 1.0)))


def test_run_window_left_may_repeat_the_plan(target):
    w = Wrapped(target, "paged").plan(Options(causal=True, window_left=3))
    w.check(w.run(return_lse=True, window_left=3))


POSITIONS = {
    # head_dim, mask, packed, causal, pos, fp16_qk, window_left, cap, sm_scale, rope (2), types (2)
    "ragged": (64, None, None, True, "NONE", False, 6, 3.0, 0.2, None, None, "float16", "float16"),
    # ..., page_size, mask, packed, causal, pos, fp16_qk, sm_scale, window_left, cap, rope (2), types (2), non_blocking
    "paged": (64, 16, None, None, True, "NONE", False, 0.2, 6, 3.0, None, None, "float16", "float16", False),
    # ..., page_size, pos, window_left, cap, types of q, kv, o and both, sm_scale, rope (2), non_blocking, block_tables,
    # seq_lens, fixed_split_size, disable_split_kv, q_len_per_req
    "decode": (64, 16, "NONE", 6, 3.0, "float16", "float16", None, None, 0.2, None, None, True, *[None] * 3, False, 1),
}


@each_kind
def test_positional_plan(target, kind):
    w = Wrapped(target, kind)
    w.wrapper.plan(*w.vectors(), 4, 2, *POSITIONS[kind])
    w.check(w.run(), causal(kind, window_left=6, logits_soft_cap=3.0, sm_scale=0.2))


@prefill
def test_mask_by_position(target, kind):
    w = Wrapped(target, kind)
    masks = w.batch.random_masks()
    w.wrapper.plan(*w.vectors(), *w.sizes, torch.cat([m.flatten() for m in masks]))
    w.check(w.run(), Options(custom_masks=masks))


def test_value_head_dim_at_position_nine(target):
    w = Wrapped(target, "paged")
    with pytest.raises(TypeError, match="head_dim_vo is given twice"):
        w.wrapper.plan(*w.vectors(), 4, 2, 64, 16, 64, head_dim_vo=64)
    w.wrapper.plan(*w.vectors(), 4, 2, 64, 16, 64)
    w.check(w.run())


@prefill
def test_head_dim_keywords(target, kind):
    page = {"page_size": 16} if kind == "paged" else {}
    for names in ({"head_dim": 64}, {"head_dim_qk": 64}, {"head_dim_qk": 64, "head_dim_vo": 64}):
        w = Wrapped(target, kind)
        w.wrapper.plan(*w.vectors(), num_qo_heads=4, num_kv_heads=2, **page, **names)
        w.check(w.run())


def test_a_numpy_integer_is_a_head_dim(target):
    w = Wrapped(target, "ragged")
    w.wrapper.plan(*w.vectors(), 4, 2, 64, np.int64(64), None, None, True)
    w.check(w.run(), CAUSAL)


@pytest.mark.parametrize("spelling", [torch.bfloat16, "bfloat16"])
def test_data_type_spellings(target, spelling):
    w = Wrapped(target, "ragged", batch_for("ragged", target, (5, 9), (20, 9), dtype=torch.bfloat16))
    w.wrapper.plan(*w.vectors(), *w.sizes, q_data_type=spelling)
    w.check(w.run())


def test_the_widest_window(target):
    w = Wrapped(target, "ragged").plan(window_left=2**40, causal=True)
    w.check(w.run(), CAUSAL)


@pytest.mark.parametrize("name", ["allow_fp16_qk_reduction", "use_fp16_qk_reduction"])
def test_fp16_flag_in_both_spellings(target, name):
    w = Wrapped(target, "paged").plan(CAUSAL, **{name: True})
    w.check(w.run())
    w.check(w.wrapper.forward(w.batch.q, *w.kv, causal=True, **{name: True}))


# Rows and keys, page size, and rows of each request of a decode step.
STEPS = [
    ((5, 9), (20, 9), 16, 1),
    ((1,) * 9, (4,) * 9, 1, 2),
    ((70,), (90,), 64, 8),
    ((3, 0, 1), (3, 4, 50), 16, 1),
    ((3, 1, 1), (3, 0, 50), 16, 1),
]


@each_kind
def test_replan_and_forward(target, kind):
    wrapper = None
    for seed, (qo_lens, kv_lens, page, q_len) in enumerate(STEPS):
        rows = [q_len] * len(kv_lens) if kind == "decode" else qo_lens
        batch = make_batch(rows, kv_lens, 4, 2, 64, device=target.device, seed=seed)
        w = Wrapped(target, kind, batch, page, wrapper=wrapper)
        wrapper, data = w.wrapper, (batch.q, *w.kv)
        w.plan(causal(kind, sm_scale=0.01), method="begin_forward")
        for _ in range(2):
            w.check(w.run())
        # forward() replaces every planned option, by its defaults where it is given none.
        w.check(wrapper.forward(*data), Options())
        options = causal(kind, window_left=4, logits_soft_cap=2.0, sm_scale=0.3)
        w.check(wrapper.forward_return_lse(*data, **options.plan_kwargs()), options)
        w.check(w.run(), options)  # it stores what it is given
        scales = dict(k_scale=0.5, v_scale=2.0)
        scaled = Options(**vars(options) | scales)
        w.check(wrapper.forward_return_lse(*data, **options.plan_kwargs(), **scales), scaled, atol=3e-3)
        wrapper.end_forward()


# --- workspaces, splits, waiting ---------------------------------------------------------------------------------


@each_kind
def test_two_wrappers_share_a_workspace(target, kind):
    workspace, made = target.workspace(), []
    for seed in (1, 2):
        batch = batch_for(kind, target, (5, 9, 1), (2000, 9, 30 * seed), seed=seed)
        made.append(Wrapped(target, kind, batch, workspace=workspace).plan(causal(kind)))
    for w in [*made, *made]:
        w.check(w.run())
        if kind == "decode":
            workspace.fill_(255)  # nothing in it outlives a run


@pytest.mark.parametrize("fixed", [{"fixed_split_size": 4}, {"disable_split_kv": True}])
@prefill
def test_batch_invariance(target, kind, fixed):
    big = Wrapped(target, kind, batch_for(kind, target, (5, 9, 1, 40), (200, 90, 300, 40))).plan(CAUSAL, **fixed)
    whole = big.run(return_lse=True)
    for a, b in zip(whole, big.first(2).plan(CAUSAL, **fixed).run(return_lse=True)):
        assert torch.equal(a[:14], b)


@prefill
def test_workspace_size_is_enough(target, kind):
    w = Wrapped(target, kind, batch_for(kind, target, (5, 9), (200, 90)))
    sizes = w.wrapper.workspace_size(*w.vectors(), *w.sizes, causal=True)
    assert all(isinstance(size, int) for size in sizes)
    w.wrapper.reset_workspace_buffer(*(target.workspace(max(size, 1)) for size in sizes))
    w.plan(CAUSAL).check(w.run())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("fixed", [None, 16])
def test_workspace_size_of_vectors_on_the_device(target, fixed, graph):
    """As FlashInfer's callers use it: exact buffers, never empty, for vectors that the host does not know."""
    batch = make_batch([64] * 3, [1024] * 3, 16, 4, 128, device=target.device)
    table = Wrapped(target, "paged", batch).vectors(target.device)
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = {name: torch.full_like(x, -7) for name, x in zip(names, table)} if graph else {}
    w = Wrapped(target, "paged", batch, use_cuda_graph=graph, **buffers)
    sizes = w.wrapper.workspace_size(*w.vectors(target.device), *w.sizes, fixed_split_size=fixed)
    assert min(sizes) >= 16 and all(bool((x == -7).all()) for x in buffers.values())
    if fixed and target.backend == "fa2":
        assert sizes[0] > 4 * 3 * 64 * 16 * 128  # partial results in fp32, of every split of 256 keys
    w.wrapper.reset_workspace_buffer(*(target.workspace(size) for size in sizes))
    w.plan(where=target.device, fixed_split_size=fixed).check(w.run())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_workspace_of_any_type(target, dtype):
    w = Wrapped(target, "paged", workspace=target.workspace().view(dtype)).plan(CAUSAL)
    w.check(w.run())


@pytest.mark.runs_nothing("nothing is there to be compiled")
def test_nothing_needs_prewarming(target):
    for wrapper in (
        ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace()),
        ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace()),
        ck.MultiLevelCascadeAttentionWrapper(2, target.workspace()),
        ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(target.workspace()),
    ):
        wrapper.prewarm_paged_kv_stride_variant()
        with pytest.raises(ValueError, match="variant='equal' is unknown"):
            wrapper.prewarm_paged_kv_stride_variant("equal")


@pytest.mark.parametrize("where", [("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_nothing_synchronises(kernel_backend, where):
    w = Wrapped(Target("cuda:0", kernel_backend), "ragged")
    vectors = [x.to(device) for x, device in zip(w.vectors(), where)]
    w.vectors = lambda where: vectors
    with no_waiting():
        for _ in range(2):
            got = w.plan(CAUSAL).run(return_lse=True)
    w.check(got)
