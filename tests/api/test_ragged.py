"""BatchPrefillWithRaggedKVCacheWrapper: plan, re-plan, run in all its spellings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compare import assert_close, assert_lse_close
from problems import Batch, Options, allowed_in_fp8, expect, make_batch
from targets import Target

import cutlass_kernels as ck
from cutlass_kernels._compute import selection


def planned(target, batch: Batch, options: Options | None = None, backend: str | None = None, **extra):
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=backend or target.backend)
    kwargs = dict(q_data_type=batch.q.dtype, kv_data_type=batch.k.dtype) | (options or Options()).plan_kwargs() | extra
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **kwargs)
    return wrapper


def check(target, batch: Batch, options: Options | None = None, needs=(), **extra) -> None:
    out, lse = target.attempt(
        lambda backend: planned(target, batch, options, backend, **extra).run(
            batch.q, batch.k, batch.v, return_lse=True
        ),
        needs,
    )
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline, dtype=batch.q.dtype)
    assert_lse_close(lse, want.lse)


MIXES = [
    ([5], [9]),
    ([1, 1, 1], [7, 1, 130]),
    ([33, 1, 64, 5], [33, 70, 64, 200]),
    ([4, 0, 7], [9, 12, 7]),
    ([4, 3, 7], [9, 0, 7]),
    pytest.param([0, 0], [5, 0], marks=pytest.mark.runs_nothing("without query rows, no kernel is launched")),
    ([100, 3], [20, 2]),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qo_lens,kv_lens", MIXES)
def test_mixed_lengths(target, qo_lens, kv_lens, causal):
    batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device)
    check(target, batch, Options(causal=causal))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dims(target, head_dim, dtype):
    batch = make_batch([20, 31], [40, 31], 4, 2, head_dim, dtype=dtype, device=target.device)
    check(target, batch, Options(causal=True))


def test_mla_head_dims_with_lse(target):
    batch = make_batch([20, 31], [40, 31], 4, 4, 192, head_dim_vo=128, dtype=torch.bfloat16, device=target.device)
    check(target, batch, Options(causal=True), needs=["head_dim_vo"], head_dim_vo=128)


@pytest.mark.parametrize("group", [1, 3, 5, 8, 16])
def test_group_sizes(target, group):
    batch = make_batch([9, 1, 17], [9, 30, 40], 2 * group, 2, 64, device=target.device)
    check(target, batch, Options(causal=True))


def test_batch_of_128(target):
    qo_lens = [1 + (7 * b) % 5 for b in range(128)]
    kv_lens = [n + (5 * b) % 23 for b, n in enumerate(qo_lens)]
    check(target, make_batch(qo_lens, kv_lens, 2, 1, 64, device=target.device), Options(causal=True))


def test_hnd(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)

    def call(backend):
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "HND", backend=backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        k, v = batch.k.transpose(0, 1).contiguous(), batch.v.transpose(0, 1).contiguous()
        return wrapper.run(batch.q, k, v)

    want = expect(batch, Options(causal=True))
    assert_close(target.attempt(call), want.out, want.baseline)


@pytest.mark.parametrize("where", ["cpu", "device", "mixed"])
def test_index_tensors_on_either_device(target, where):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    qo, kv = batch.qo_indptr(), batch.kv_indptr()
    if where != "cpu":
        qo = qo.to(target.device)
    if where == "device":
        kv = kv.to(target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    wrapper.plan(qo, kv, *batch.heads, causal=True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_plan_keeps_its_own_copy_of_the_index_tensors(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    qo, kv = batch.qo_indptr(), batch.kv_indptr()
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    wrapper.plan(qo, kv, *batch.heads, causal=True)
    qo.zero_()
    kv.zero_()
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_out_and_lse_are_used(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = planned(target, batch, Options(causal=True))
    out = torch.full_like(batch.q, torch.nan)
    lse = torch.full((14, 4), torch.nan, device=target.device)
    got = wrapper.run(batch.q, batch.k, batch.v, out=out, lse=lse, return_lse=True)
    want = expect(batch, Options(causal=True))
    assert got[0].data_ptr() == out.data_ptr() and got[1].data_ptr() == lse.data_ptr()
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def test_run_spellings(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = planned(target, batch, Options(causal=True))
    plain = wrapper.run(batch.q, batch.k, batch.v)
    assert isinstance(plain, torch.Tensor)
    pairs = [
        wrapper.run(batch.q, batch.k, batch.v, return_lse=True),
        wrapper.run(batch.q, batch.k, batch.v, True),
        wrapper.run_return_lse(batch.q, batch.k, batch.v),
    ]
    for out, lse in pairs:
        assert torch.equal(out, plain) and torch.equal(lse, pairs[0][1])


def test_seed_positional_plan(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
    # ..., head_dim, mask, packed, causal, pos, fp16_qk, window_left, cap, sm_scale, rope (2), types (2)
    wrapper.plan(
        batch.qo_indptr(),
        batch.kv_indptr(),
        4,
        2,
        64,
        None,
        None,
        True,
        "NONE",
        False,
        6,
        3.0,
        0.2,
        None,
        None,
        "float16",
        "float16",
    )
    want = expect(batch, Options(causal=True, window_left=6, logits_soft_cap=3.0, sm_scale=0.2))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_seed_positional_mask(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    masks = batch.random_masks()
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), 4, 2, 64, torch.cat([m.flatten() for m in masks]))
    want = expect(batch, Options(custom_masks=masks))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_head_dim_keywords(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    want = expect(batch)
    for names in ({"head_dim": 64}, {"head_dim_qk": 64}, {"head_dim_qk": 64, "head_dim_vo": 64}):
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), num_qo_heads=4, num_kv_heads=2, **names)
        assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


@pytest.mark.parametrize("spelling", [torch.bfloat16, "bfloat16"])
def test_data_type_spellings(target, spelling):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, dtype=torch.bfloat16, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, q_data_type=spelling)
    want = expect(batch)
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline, dtype=torch.bfloat16)


def test_replan_with_other_batches(target):
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    for seed, (qo_lens, kv_lens) in enumerate(
        [([5, 9], [20, 9]), ([1] * 9, [4] * 9), ([70], [90]), ([3, 0, 1], [3, 4, 50])]
    ):
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=target.device, seed=seed)
        causal = seed % 2 == 0
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=causal)
        want = expect(batch, Options(causal=causal))
        for _ in range(2):
            assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_replan_without_mask_forgets_the_mask(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
    mask = torch.zeros(5 * 20 + 9 * 9, dtype=torch.bool, device=target.device)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, custom_mask=mask)
    assert torch.count_nonzero(wrapper.run(batch.q, batch.k, batch.v)) == 0
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads)
    want = expect(batch)
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_forward_resets_the_planned_options(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), "NHD", backend=target.backend)
    wrapper.begin_forward(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True, logits_soft_cap=1.0)
    want = expect(batch)
    assert_close(wrapper.forward(batch.q, batch.k, batch.v), want.out, want.baseline)
    options = Options(causal=True, window_left=4, logits_soft_cap=2.0, sm_scale=0.3)
    want = expect(batch, options)
    out, lse = wrapper.forward_return_lse(batch.q, batch.k, batch.v, **options.plan_kwargs())
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)
    # forward() stored what it was given, so a following run() uses that.
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)
    wrapper.end_forward()


def test_scales_always_apply(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = planned(target, batch, Options(causal=True, logits_soft_cap=3.0))
    out, lse = wrapper.run(batch.q, batch.k, batch.v, q_scale=0.5, k_scale=1.7, v_scale=0.4, return_lse=True)
    want = expect(batch, Options(causal=True, logits_soft_cap=3.0, q_scale=0.5, k_scale=1.7, v_scale=0.4))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)
    # Scales are of one run only.
    want = expect(batch, Options(causal=True, logits_soft_cap=3.0))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("layout", ["NH", "HN"])
def test_lse_base_and_layout(target, base, layout):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = planned(target, batch, Options(causal=True))
    _, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True, lse_base=base, lse_layout=layout)
    want = expect(batch, Options(causal=True)).lse
    want = want * 0.6931471805599453 if base == "ln" else want
    want = want.T if layout == "HN" else want
    assert lse.is_contiguous()
    assert_lse_close(lse, want)


@pytest.mark.parametrize("out_type", [None, torch.bfloat16, torch.float16], ids=["default", "bf16", "fp16"])
def test_fp8_everything(target, out_type):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, dtype=torch.float8_e4m3fn, device=target.device)
    scales = (
        torch.linspace(0.5, 1.5, 4, device=target.device),
        torch.linspace(0.8, 1.2, 2, device=target.device),
        torch.linspace(0.6, 1.9, 2, device=target.device),
    )

    def call(backend):
        extra = {} if out_type is None else {"o_data_type": out_type}
        return planned(target, batch, Options(causal=True), backend, **extra).run(batch.q, batch.k, batch.v, *scales)

    out = call(target.backend)  # fa2 converts them, and warns
    wide = batch.dequantized(*scales)
    # An 8-bit output type is not written; bf16 takes its place.
    want, allowed = expect(wide, Options(causal=True)).out, allowed_in_fp8(wide, Options(causal=True))
    assert_close(out, want, atol=2e-2, rtol=2e-2, dtype=out_type or torch.bfloat16, allowed=allowed)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("out_type", [None, torch.float16], ids=["default", "fp16"])
def test_fp8_on_fa2_is_converted(device, out_type, fp8, monkeypatch):
    target = Target(device, "fa2")
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, dtype=fp8, device=device)
    wide = out_type or torch.bfloat16
    if device == "cpu":  # without a GPU, the reference computes what fa2 is asked for

        def select(requested, request):
            assert requested == "fa2" and {request.q_dtype, request.kv_dtype, request.o_dtype} == {wide}
            return "reference"

        monkeypatch.setattr(selection, "select", select)
    options = Options(causal=True, q_scale=0.5, k_scale=1.5, v_scale=2.0)
    with pytest.warns(ck.PerformanceWarning, match=f"fa2.*{wide}"):
        wrapper = planned(target, batch, Options(causal=True), "fa2", o_data_type=out_type)
    out = wrapper.run(batch.q, batch.k, batch.v, q_scale=0.5, k_scale=1.5, v_scale=2.0)
    assert out.dtype == wide
    assert_close(out, expect(batch, options).out, atol=5e-2, rtol=5e-2, dtype=wide)


def test_a_numpy_integer_is_a_head_dim(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), 4, 2, 64, np.int64(64), None, None, True)
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


def test_the_widest_window(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    want = expect(batch, Options(causal=True))
    wrapper = planned(target, batch, window_left=2**40, causal=True)
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


@pytest.mark.parametrize("where", [("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")])
def test_nothing_synchronises(kernel_backend, where):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device="cuda:0")
    qo, kv = batch.qo_indptr(where[0]), batch.kv_indptr(where[1])
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=kernel_backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            wrapper.plan(qo, kv, *batch.heads, causal=True)
            out, lse = wrapper.run(batch.q, batch.k, batch.v, return_lse=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = expect(batch, Options(causal=True))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("fixed", [{"fixed_split_size": 4}, {"disable_split_kv": True}])
def test_batch_invariance(target, fixed):
    big = make_batch([5, 9, 1, 40], [200, 90, 300, 40], 4, 2, 64, device=target.device)
    small = Batch(big.qo_lens[:2], big.kv_lens[:2], big.q[:14], big.k[:290], big.v[:290])
    both = []
    for batch in (big, small):
        wrapper = planned(target, batch, Options(causal=True), **fixed)
        both.append(wrapper.run(batch.q, batch.k, batch.v, return_lse=True))
    assert torch.equal(both[0][0][:14], both[1][0]) and torch.equal(both[0][1][:14], both[1][1])


def test_accepted_and_ignored_arguments(target):
    batch = make_batch([5, 9], [20, 9], 4, 2, 64, device=target.device)
    wrapper = planned(
        target,
        batch,
        Options(causal=True),
        seq_lens=torch.tensor([20, 9], dtype=torch.int32),
        seq_lens_q=torch.tensor([5, 9], dtype=torch.int32),
        max_token_per_sequence=9,
        max_sequence_kv=20,
        non_blocking=True,
    )
    want = expect(batch, Options(causal=True))
    assert_close(wrapper.run(batch.q, batch.k, batch.v, enable_pdl=False), want.out, want.baseline)
