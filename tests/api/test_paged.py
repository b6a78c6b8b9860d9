"""BatchPrefillWithPagedKVCacheWrapper: page tables, cache forms, plan and run."""

from __future__ import annotations

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, Paged, allowed_in_fp8, expect, make_batch

import cutlass_kernels as ck

NEEDS = ("paged",)


def planned(
    target, batch: Batch, paged: Paged, options: Options | None = None, backend: str | None = None, **extra
) -> ck.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(
        target.workspace(), paged.kv_layout, backend=backend or target.backend
    )
    kwargs = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype) | (options or Options()).plan_kwargs() | extra
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, paged.page_size, **kwargs)
    return wrapper


def run(target, batch: Batch, paged: Paged, options: Options | None = None, needs=(), run_kwargs=None, **extra):
    return target.attempt(
        lambda backend: planned(target, batch, paged, options, backend, **extra).run(
            batch.q, paged.cache, return_lse=True, **(run_kwargs or {})
        ),
        [*NEEDS, *needs],
    )


def check(target, batch: Batch, paged: Paged, options: Options | None = None, needs=(), **extra) -> None:
    out, lse = run(target, batch, paged, options, needs, **extra)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline, dtype=batch.q.dtype)
    assert_lse_close(lse, want.lse)


@pytest.mark.pairwise
@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 128])
def test_page_sizes_layouts_and_forms(target, page_size, kv_layout, form):
    batch = make_batch([9, 1, 33], [40, 130, 33], 4, 2, 64, device=target.device)
    check(target, batch, batch.paged(page_size, kv_layout, form), Options(causal=True))


@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_reduced_rank_for_page_size_one(target, kv_layout, form):
    batch = make_batch([9, 1], [40, 13], 4, 2, 64, device=target.device)
    paged = batch.paged(1, kv_layout, form)
    dim = 1 if kv_layout == "NHD" else 2
    if form == "stacked":
        paged.cache = paged.cache.squeeze(dim + 1)
        assert paged.cache.dim() == 4
    else:
        paged.cache = tuple(x.squeeze(dim) for x in paged.cache)
        assert paged.cache[0].dim() == 3
    check(target, batch, paged, Options(causal=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "qo_lens,kv_lens",
    [
        ([5], [9]),
        ([1] * 5, [1, 16, 17, 160, 3]),
        ([33, 1, 64], [33, 70, 64]),
        ([4, 0, 7], [9, 12, 7]),
        ([4, 3, 7], [0, 9, 7]),
        ([4, 3, 7], [9, 0, 7]),
        ([34, 2], [1, 16]),
        ([0, 3], [0, 0]),
    ],
)
def test_mixed_lengths(target, qo_lens, kv_lens, causal):
    batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device)
    check(target, batch, batch.paged(16), Options(causal=causal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
def test_head_dims(target, head_dim, dtype):
    if head_dim > 256 and target.backend == "fa3":
        pytest.skip("fa2 has tiles of 512 columns")
    batch = make_batch([9, 20], [50, 20], 4, 2, head_dim, dtype=dtype, device=target.device)
    check(target, batch, batch.paged(16), Options(causal=True))


@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
def test_group_sizes(target, group):
    batch = make_batch([9, 1, 17], [9, 30, 40], 2 * group, 2, 64, device=target.device)
    check(target, batch, batch.paged(16, "HND"), Options(causal=True))


def test_value_head_dim_differs(target):
    batch = make_batch([9, 20], [50, 20], 4, 2, 128, head_dim_vo=64, device=target.device)
    check(target, batch, batch.paged(16, form="tuple"), Options(causal=True), head_dim_vo=64)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_cache(target, kv_dtype):
    batch = make_batch([9, 20], [50, 20], 4, 2, 128, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=target.device)
    options = Options(causal=True, k_scale=0.8, v_scale=1.2)
    paged = batch.paged(16)
    out, lse = run(target, batch, paged, options, ["fp8_kv"], dict(k_scale=0.8, v_scale=1.2))
    want = expect(batch, options)
    assert_close(out, want.out, atol=1e-2, rtol=1e-2, dtype=torch.bfloat16)
    assert_lse_close(lse, want.lse, atol=5e-3)


def test_fp8_everything_with_head_scales(target):
    fp8 = torch.float8_e4m3fn
    batch = make_batch([9, 20], [50, 20], 4, 2, 64, dtype=fp8, device=target.device)
    scales = tuple(torch.linspace(0.6, 1.4, n, device=target.device) for n in (4, 2, 2))
    paged = batch.paged(16)

    def call(backend):
        wrapper = planned(target, batch, paged, Options(causal=True), backend, o_data_type=torch.bfloat16)
        return wrapper.run(batch.q, paged.cache, *scales)

    wide = batch.dequantized(*scales)
    out = target.attempt(call, [*NEEDS, "fp8_batch"])
    want, allowed = expect(wide, Options(causal=True)).out, allowed_in_fp8(wide, Options(causal=True))
    assert_close(out, want, atol=2e-2, rtol=2e-2, dtype=torch.bfloat16, allowed=allowed)


def test_pages_shared_between_requests(target):
    # Two requests start with the same two pages, and the second names one of them twice.
    page, heads, dim = 4, 2, 64
    cache = torch.randn(6, 2, page, heads, dim).half().to(target.device)
    indptr, indices, last = [0, 3, 7], [5, 2, 0, 5, 2, 5, 1], [2, 4]
    requests = oracle.gather_pages(cache[:, 0], cache[:, 1], indptr, indices, last, "NHD")
    q = torch.randn(8, 4, dim).half().to(target.device)
    batch = Batch([3, 5], [10, 16], q, torch.cat([k for k, _ in requests]), torch.cat([v for _, v in requests]))
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    # The index list is longer than the table needs; what follows is not a page number at all.
    table = torch.tensor([*indices, 10**6, -7], dtype=torch.int32)
    wrapper.plan(
        batch.qo_indptr(),
        torch.tensor(indptr, dtype=torch.int32),
        table,
        torch.tensor(last, dtype=torch.int32),
        4,
        heads,
        dim,
        page,
        causal=True,
    )
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(q, cache), want.out, want.baseline)


@pytest.mark.parametrize("which", range(5))
def test_index_tensors_on_either_device(target, which):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    tables = [batch.qo_indptr(), *paged.table()]
    tables = [t.to(target.device) if which == 4 or n == which else t for n, t in enumerate(tables)]
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    wrapper.plan(*tables, *batch.heads, 16, causal=True, non_blocking=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_seq_lens_hint(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    for where in ("cpu", target.device):
        lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=where)
        check(
            target,
            batch,
            paged,
            Options(causal=True),
            seq_lens=lens,
            seq_lens_q=torch.tensor(batch.qo_lens, dtype=torch.int32),
            block_tables=torch.zeros(2, 2, dtype=torch.int32),
            max_token_per_sequence=9,
            max_sequence_kv=20,
        )
    with pytest.raises(ValueError, match=r"seq_lens\[1\]=8, but the page table gives request 1 9 keys"):
        planned(target, batch, paged, seq_lens=torch.tensor([20, 8], dtype=torch.int32))


def test_run_spellings(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = planned(target, batch, paged, Options(causal=True), target.backend)
    plain = wrapper.run(batch.q, paged.cache)
    assert isinstance(plain, torch.Tensor)
    for out, lse in (
        wrapper.run(batch.q, paged.cache, return_lse=True),
        wrapper.run_return_lse(batch.q, paged.cache),
        wrapper.run(batch.q, paged.cache, None, None, True),
    ):
        assert torch.equal(out, plain) and lse.shape == (14, 4)
    want = expect(batch, Options(causal=True, k_scale=0.5, v_scale=3.0))
    for out in (
        wrapper.run(batch.q, paged.cache, 0.5, 3.0),
        wrapper.run(batch.q, paged.cache, k_scale=0.5, v_scale=3.0),
        wrapper.forward(batch.q, paged.cache, True, k_scale=0.5, v_scale=3.0),
    ):
        assert_close(out, want.out, want.baseline, atol=3e-3)
    with pytest.raises(TypeError, match="k_scale is given twice"):
        wrapper.run(batch.q, paged.cache, 0.5, k_scale=0.5)


def test_q_scale(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    out, lse = run(target, batch, paged, Options(), run_kwargs=dict(q_scale=0.25, v_scale=0.5))
    want = expect(batch, Options(q_scale=0.25, v_scale=0.5))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_out_and_lse_are_used(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = planned(target, batch, paged, Options(causal=True), target.backend)
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full((14, 4), torch.nan, device=target.device)
    got = wrapper.run(batch.q, paged.cache, out=out, lse=lse, return_lse=True)
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    want = expect(batch, Options(causal=True))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_lse_base_and_layout(target, base, layout):
    batch = make_batch([5, 9], [20, 0], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = planned(target, batch, paged, Options(causal=True), target.backend)
    want = expect(batch, Options(causal=True)).lse
    want = want * 0.6931471805599453 if base == "ln" else want
    want = want.T if layout == "HN" else want
    _, lse = wrapper.run(batch.q, paged.cache, return_lse=True, lse_base=base, lse_layout=layout)
    assert lse.is_contiguous()
    assert_lse_close(lse, want)
    mine = torch.full(want.shape, torch.nan, device=target.device)
    _, lse = wrapper.run(batch.q, paged.cache, return_lse=True, lse=mine, lse_base=base, lse_layout=layout)
    assert lse.data_ptr() == mine.data_ptr()
    assert_lse_close(mine, want)


def test_run_window_left_may_repeat_the_plan(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    options = Options(causal=True, window_left=3)
    check(target, batch, paged, options, run_kwargs=dict(window_left=3))


def test_seed_positional_plan(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
    # ..., page_size, mask, packed, causal, pos, fp16_qk, sm_scale, window_left, cap, rope (2), types (2), non_blocking
    args = (4, 2, 64, 16, None, None, True, "NONE", False, 0.2, 6, 3.0, None, None, "float16", "float16", False)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *args)
    want = expect(batch, Options(causal=True, window_left=6, logits_soft_cap=3.0, sm_scale=0.2))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_mask_at_position_nine(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    masks = batch.random_masks()
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
    wrapper.plan(batch.qo_indptr(), *paged.table(), 4, 2, 64, 16, torch.cat([m.flatten() for m in masks]))
    want = expect(batch, Options(custom_masks=masks))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_head_dim_keywords(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    want = expect(batch)
    for names in ({"head_dim": 64}, {"head_dim_qk": 64, "head_dim_vo": 64}):
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), num_qo_heads=4, num_kv_heads=2, page_size=16, **names)
        assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


def test_replan_and_forward(target):
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    for seed, (qo_lens, kv_lens, page) in enumerate(
        [([5, 9], [20, 9], 16), ([1] * 9, [4] * 9, 1), ([70], [90], 64), ([3, 0, 1], [3, 4, 50], 16)]
    ):
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device, seed=seed)
        paged = batch.paged(page)
        wrapper.begin_forward(batch.qo_indptr(), *paged.table(), *batch.heads, page, causal=True, sm_scale=0.01)
        want = expect(batch, Options(causal=True, sm_scale=0.01))
        assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)
        # forward() replaces every planned option, by its defaults where it is given none.
        assert_close(wrapper.forward(batch.q, paged.cache), expect(batch).out, expect(batch).baseline)
        options = Options(causal=True, window_left=4, logits_soft_cap=2.0, sm_scale=0.3)
        want = expect(batch, options)
        out, lse = wrapper.forward_return_lse(batch.q, paged.cache, **options.plan_kwargs())
        assert_close(out, want.out, want.baseline)
        assert_lse_close(lse, want.lse)
        wrapper.end_forward()


def test_two_wrappers_share_a_workspace(target):
    workspace = target.workspace()
    batches = [make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device, seed=s) for s in (1, 2)]
    pages = [b.paged(16) for b in batches]
    wrappers = []
    for batch, paged in zip(batches, pages):
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=target.backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, causal=True)
        wrappers.append(wrapper)
    for _ in range(2):
        for batch, paged, wrapper in zip(batches, pages, wrappers):
            want = expect(batch, Options(causal=True))
            assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


@pytest.mark.parametrize("fixed", [{"fixed_split_size": 4}, {"disable_split_kv": True}])
def test_batch_invariance(target, fixed):
    big = make_batch([5, 9, 1, 40], [200, 90, 300, 40], 4, 2, 64, device=target.device)
    paged = big.paged(16)
    small = Batch(big.qo_lens[:2], big.kv_lens[:2], big.q[:14], big.k[:290], big.v[:290])
    whole = run(target, big, paged, Options(causal=True), **fixed)
    count = int(paged.indptr[2])
    part = Paged(
        paged.cache,
        paged.k_cache,
        paged.v_cache,
        paged.indptr[:3],
        paged.indices[:count],
        paged.last_page_len[:2],
        16,
        "NHD",
    )
    alone = run(target, small, part, Options(causal=True), **fixed)
    assert torch.equal(whole[0][:14], alone[0]) and torch.equal(whole[1][:14], alone[1])


def test_workspace_size_is_enough(target):
    batch = make_batch([5, 9], [200, 90], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    plan = (batch.qo_indptr(), *paged.table(), *batch.heads, 16)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    float_bytes, int_bytes = wrapper.workspace_size(*plan, causal=True)
    assert isinstance(float_bytes, int) and isinstance(int_bytes, int)
    wrapper.reset_workspace_buffer(target.workspace(max(float_bytes, 1)), target.workspace(max(int_bytes, 1)))
    wrapper.plan(*plan, causal=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("fixed", [None, 16])
def test_workspace_size_of_vectors_on_the_device(target, fixed, graph):
    """As FlashInfer's callers use it: exact buffers, never empty, for vectors that the host does not know."""
    batch = make_batch([64] * 3, [1024] * 3, 16, 4, 128, device=target.device)
    paged = batch.paged(16)
    table = [x.to(target.device) for x in (batch.qo_indptr(), *paged.table())]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = {name: torch.full_like(x, -7) for name, x in zip(names, table)} if graph else {}
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(
        target.workspace(), use_cuda_graph=graph, backend=target.backend, **buffers
    )
    sizes = wrapper.workspace_size(*table, *batch.heads, 16, fixed_split_size=fixed)
    assert min(sizes) >= 16 and all(bool((x == -7).all()) for x in buffers.values())
    if fixed and target.backend == "fa2":
        assert sizes[0] > 4 * 3 * 64 * 16 * 128  # partial results in fp32, of every split of 256 keys
    wrapper.reset_workspace_buffer(*(target.workspace(size) for size in sizes))
    wrapper.plan(*table, *batch.heads, 16, fixed_split_size=fixed)
    want = expect(batch)
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


@pytest.mark.runs_nothing("nothing is there to be compiled")
def test_nothing_needs_prewarming(target):
    wrappers = [
        ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace()),
        ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace()),
        ck.MultiLevelCascadeAttentionWrapper(2, target.workspace()),
        ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(target.workspace()),
    ]
    for wrapper in wrappers:
        wrapper.prewarm_paged_kv_stride_variant()
        with pytest.raises(ValueError, match="variant='equal' is unknown"):
            wrapper.prewarm_paged_kv_stride_variant("equal")


def test_last_page_len_of_an_empty_request_does_not_matter(target):
    batch = make_batch([3, 4], [0, 13], 4, 2, 64, device=target.device)
    paged = batch.paged(8)
    for entry in (0, 1, 8):
        paged.last_page_len[0] = entry
        check(target, batch, paged, Options(causal=True))


@pytest.mark.parametrize("names", ["seed", "current"])
def test_fp16_flag_and_other_spellings(target, names):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    flag = {"allow_fp16_qk_reduction" if names == "seed" else "use_fp16_qk_reduction": True}
    wrapper = planned(target, batch, paged, Options(causal=True), **flag)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)
    assert_close(wrapper.forward(batch.q, paged.cache, causal=True, **flag), want.out, want.baseline)


def test_value_head_dim_at_position_nine(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
    with pytest.raises(TypeError, match="head_dim_vo is given twice"):
        wrapper.plan(batch.qo_indptr(), *paged.table(), 4, 2, 64, 16, 64, head_dim_vo=64)
    wrapper.plan(batch.qo_indptr(), *paged.table(), 4, 2, 64, 16, 64)
    want = expect(batch)
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_workspace_of_any_type(target, dtype):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    paged = batch.paged(16)
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace().view(dtype), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, causal=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, paged.cache), want.out, want.baseline)


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 5, 8, 16])
def test_pages_of_an_empty_cache_count_as_zeros(kernel_backend, page_size):
    # The table is on the device, where nobody checks it.
    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device="cuda:0")

    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(
        torch.empty(32 << 20, dtype=torch.uint8, device="cuda:0"), backend=kernel_backend
    )
    wrapper.plan(ints(0, 3), ints(0, 2), ints(0, 7), ints(page_size), 4, 2, 64, page_size)
    q = torch.randn(3, 4, 64, dtype=torch.float16, device="cuda:0")
    cache = torch.empty(0, 2, page_size, 2, 64, dtype=torch.float16, device="cuda:0")
    assert torch.count_nonzero(wrapper.run(q, cache)) == 0
