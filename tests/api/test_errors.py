"""Refusals: the class the contract names, a sentence with the offending value, and outputs left alone."""

from __future__ import annotations

import pytest
import torch
from guards import Guarded
from problems import make_batch
from refusals import Calls, facts, refuse

import cutlass_kernels as ck

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("layout", ["nhd", "DHN", ""])
def test_kv_layout(calls, layout):
    word = f"kv_layout={layout!r}"
    refuse(KeyError, lambda: calls.single(kv_layout=layout), word)
    refuse(KeyError, lambda: calls.decode(kv_layout=layout), word)
    refuse(KeyError, lambda: calls.ragged(layout), word)
    refuse(KeyError, lambda: calls.paged(layout), word)
    q, k, v = (x[:4] for x in calls.qkv)
    call = lambda: ck.batch_decode_with_shared_prefix_padded_kv_cache(q, k, v, k[None], v[None], layout)  # noqa: E731
    refuse(KeyError, call, word)


@pytest.mark.parametrize("mode", ["ROPE", "alibi", "none "])
def test_pos_encoding_mode(calls, mode):
    refuse(KeyError, lambda: calls.single(pos_encoding_mode=mode), mode)
    refuse(KeyError, lambda: calls.decode(pos_encoding_mode=mode), mode)
    for plan in calls.plans(pos_encoding_mode=mode):
        refuse(KeyError, plan, mode)


@pytest.mark.parametrize("backend", ["fa4", "cutlass", "trtllm-gen", ""])
def test_unknown_backend(calls, backend):
    workspace = calls.target.workspace()
    word = f"backend={backend!r}"
    refuse(ValueError, lambda: calls.single(backend=backend), word)
    refuse(ValueError, lambda: ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend), word)
    refuse(ValueError, lambda: ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend), word)


def test_group_does_not_divide(calls):
    q = torch.zeros(5, 3, 64, dtype=torch.float16, device=calls.target.device)
    words = ("num_qo_heads=3", "num_kv_heads=2")
    refuse(RuntimeError, lambda: ck.single_prefill_with_kv_cache(q, *calls.qkv[1:]), *words)
    refuse(RuntimeError, lambda: ck.single_decode_with_kv_cache(q[0], *calls.qkv[1:]), *words)
    for plan in calls.plans(heads=(3, 2, 64)):
        refuse(RuntimeError, plan, *words)


def test_decreasing_indptr(calls):
    bad = torch.tensor([0, 9, 5], dtype=torch.int32)
    refuse(RuntimeError, lambda: calls.ragged(bounds=(bad, calls.batch.kv_indptr())), "qo_indptr", 9, 5)
    refuse(RuntimeError, lambda: calls.ragged(bounds=(calls.batch.qo_indptr(), bad)), "kv_indptr", 9, 5)
    table = calls.data.table()
    refuse(RuntimeError, lambda: calls.paged(table=(bad, *table)), "qo_indptr", 9, 5)
    refuse(RuntimeError, lambda: calls.paged(table=(calls.batch.qo_indptr(), bad, *table[1:])), "paged_kv_indptr", 9, 5)


def test_rows_start_at_0(calls):
    late = torch.tensor([2, 5, 14], dtype=torch.int32)
    refuse(RuntimeError, lambda: calls.ragged(bounds=(late, calls.batch.kv_indptr())), "qo_indptr starts at 2")
    refuse(RuntimeError, lambda: calls.paged(table=(late, *calls.data.table())), "qo_indptr starts at 2")


def test_keys_may_start_elsewhere(calls):
    # Engines pass a slice of a larger batch's offsets.
    q, k, v = calls.qkv
    ragged = calls.ragged(bounds=(torch.tensor([0, 9], dtype=torch.int32), calls.batch.kv_indptr()[1:]))
    assert torch.equal(ragged.run(q[5:], k, v), calls.ragged().run(q, k, v)[5:])


def test_return_lse_is_a_bool(calls):
    factor = torch.ones(1, device=calls.target.device)
    refuse(TypeError, lambda: calls.ragged().run(*calls.qkv, factor), "return_lse", "Tensor")
    paged, data = calls.paged(), (calls.batch.q, calls.data.cache)
    refuse(TypeError, lambda: paged.run(*data, 1.0, 1.0, factor.cpu().double()[0]), "return_lse", "Tensor")


def test_table_lengths_disagree(calls):
    table = calls.data.table()
    short = torch.tensor([0, 14], dtype=torch.int32)
    refuse(ValueError, lambda: calls.paged(table=(short, *table)), "paged_kv_indptr", 3, 2)
    last = table[2][:1]
    refuse(
        ValueError,
        lambda: calls.paged(table=(calls.batch.qo_indptr(), *table[:2], last)),
        "paged_kv_last_page_len",
        1,
        2,
    )
    refuse(ValueError, lambda: calls.ragged(bounds=(short, calls.batch.kv_indptr())), "kv_indptr", 3, 2)


def test_types_against_the_plan(calls):
    # The default plan is float16: a bf16 caller who forgot to say so must hear it.
    q, k, v = (x.to(torch.bfloat16) for x in calls.qkv)
    ragged, paged = calls.ragged(), calls.paged()
    types = ("bfloat16", "float16")
    refuse(ValueError, lambda: ragged.run(q, k, v), *types, "q_data_type")
    refuse(ValueError, lambda: ragged.run(calls.qkv[0], k, v), *types, "kv_data_type")
    refuse(ValueError, lambda: paged.run(q, calls.data.cache), *types, "q_data_type")
    refuse(ValueError, lambda: paged.run(calls.qkv[0], calls.data.cache.to(torch.bfloat16)), *types, "kv_data_type")


def test_mixed_16_bit_types(calls):
    q, k, v = calls.qkv
    wrong = (ValueError, RuntimeError)
    types = ("float16", "bfloat16")
    refuse(wrong, lambda: ck.single_prefill_with_kv_cache(q, k.bfloat16(), v.bfloat16()), "q", *types)
    refuse(wrong, lambda: ck.single_prefill_with_kv_cache(q, k, v.bfloat16()), "k", "v", *types)
    refuse(wrong, lambda: ck.single_decode_with_kv_cache(q[0], k.bfloat16(), v.bfloat16()), "q", *types)


def test_row_count_against_the_plan(calls):
    ragged, paged = calls.ragged(), calls.paged()
    q, k, v = calls.qkv
    for rows in (13, 15):
        other = torch.cat([q, q])[:rows]
        refuse(ValueError, lambda: ragged.run(other, k, v), rows, 14)
        refuse(ValueError, lambda: paged.run(other, calls.data.cache), rows, 14)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize(
    "shape,dtype",
    [
        ((13, 4, 64), torch.float16),
        ((14, 4, 32), torch.float16),
        ((14, 4 * 64), torch.float16),
        ((14, 4, 64), torch.float32),
        ((14, 4, 64), torch.bfloat16),
    ],
)
def test_out(calls, kind, shape, dtype):
    wrapper = getattr(calls, kind)()
    data = calls.qkv if kind == "ragged" else (calls.batch.q, calls.data.cache)
    out = Guarded(shape, dtype, calls.target.device)
    lse = Guarded((14, 4), torch.float32, calls.target.device)
    refuse(ValueError, lambda: wrapper.run(*data, out=out.tensor, lse=lse.tensor, return_lse=True), "out", *facts(out))
    out.check_untouched("out")
    lse.check_untouched("lse")


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize(
    "shape,dtype",
    [((13, 4), torch.float32), ((14, 2), torch.float32), ((4, 14), torch.float32), ((14, 4), torch.float16)],
)
def test_lse(calls, kind, shape, dtype):
    wrapper = getattr(calls, kind)()
    data = calls.qkv if kind == "ragged" else (calls.batch.q, calls.data.cache)
    out = Guarded((14, 4, 64), torch.float16, calls.target.device)
    lse = Guarded(shape, dtype, calls.target.device)
    refuse(ValueError, lambda: wrapper.run(*data, out=out.tensor, lse=lse.tensor, return_lse=True), "lse", *facts(lse))
    out.check_untouched("out")
    lse.check_untouched("lse")


def test_lse_base_and_layout(calls):
    for wrapper, data in ((calls.ragged(), calls.qkv), (calls.paged(), (calls.batch.q, calls.data.cache))):
        out = Guarded((14, 4, 64), torch.float16, calls.target.device)
        refuse(
            ValueError,
            lambda: wrapper.run(*data, out=out.tensor, return_lse=True, lse_base="log10"),
            "lse_base='log10'",
        )
        refuse(
            ValueError,
            lambda: wrapper.run(*data, out=out.tensor, return_lse=True, lse_layout="NHD"),
            "lse_layout='NHD'",
        )
        out.check_untouched("out")
        wrong = torch.empty(14, 4, device=calls.target.device)
        shapes = (r"\(14, 4\)", r"\(4, 14\)")
        refuse(ValueError, lambda: wrapper.run(*data, lse=wrong, return_lse=True, lse_layout="HN"), "lse", *shapes)


def test_other_shapes_at_run(calls):
    q, k, v = calls.qkv
    ragged, paged = calls.ragged(), calls.paged()
    wrong = (ValueError, RuntimeError)
    refuse(wrong, lambda: ragged.run(q[:, :2], k, v), "q", r"\(14, 2, 64\)", "num_qo_heads=4")
    refuse(wrong, lambda: ragged.run(q, k[:, :1], v[:, :1]), "k has 1", "plan 2")
    refuse(wrong, lambda: ragged.run(q, k[..., :32], v), "k", "dimension 32", 64)
    refuse(wrong, lambda: ragged.run(q, k[:20], v[:20]), "k has 20", "v 20", "kv_indptr", 29)
    refuse(wrong, lambda: paged.run(q[..., :32], calls.data.cache), "q", r"\(14, 4, 32\)", "head_dim_qk=64")
    refuse(wrong, lambda: paged.run(q, calls.data.cache[:, :, :8]), "paged_kv_cache", 8, "page_size=16")
    refuse(wrong, lambda: paged.run(q, calls.data.cache[..., :32]), "k", "dimension 32", 64)
    single = ck.single_prefill_with_kv_cache
    refuse(wrong, lambda: single(q, k[:5], v[:4]), "k has 5", "v has 4")
    refuse(wrong, lambda: single(q, k[..., :32], v), "q has head_dim 64", "k 32")
    refuse(wrong, lambda: single(q[0], k, v), "q", r"\(4, 64\)", "3 dimensions")


@pytest.mark.parametrize("cache", [[1, 2], {"k": 1}, None, "cache"])
def test_cache_container(calls, cache):
    wrapper = calls.paged()
    if cache == [1, 2]:
        cache = [calls.data.k_cache, calls.data.v_cache]
    refuse(KeyError, lambda: wrapper.run(calls.batch.q, cache), type(cache).__name__)


def test_cache_rank(calls):
    wrapper = calls.paged()
    cache = calls.data.cache
    refuse(ValueError, lambda: wrapper.run(calls.batch.q, cache[0]), r"\(2, 16, 2, 64\)", "5 dimensions")
    refuse(ValueError, lambda: wrapper.run(calls.batch.q, cache[None]), r"\(1, 6, 2, 16, 2, 64\)", "5 dimensions")
    refuse(
        ValueError,
        lambda: wrapper.run(calls.batch.q, (cache, cache)),
        r"k_cache has shape \(6, 2, 16, 2, 64\)",
        "page_size",
    )


def test_window_left_at_run(calls):
    wrapper = calls.paged(window_left=4)
    out = Guarded((14, 4, 64), torch.float16, calls.target.device)
    call = lambda: wrapper.run(calls.batch.q, calls.data.cache, window_left=5, out=out.tensor)  # noqa: E731
    refuse(AssertionError, call, "window_left=5", 4)
    out.check_untouched("out")


def test_run_before_plan(target, calls):
    ragged = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
    paged = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
    refuse(RuntimeError, lambda: ragged.run(*calls.qkv), "has no plan")
    refuse(RuntimeError, lambda: paged.run(calls.batch.q, calls.data.cache), "has no plan")
    wrapper = calls.ragged()
    wrapper.reset_workspace_buffer(target.workspace())
    refuse(RuntimeError, lambda: wrapper.run(*calls.qkv), "has no plan")


def test_misaligned_workspace(target):
    crooked = target.workspace()[8:]
    words = "float_workspace_buffer must be 16-byte aligned"
    for cls in (ck.BatchPrefillWithRaggedKVCacheWrapper, ck.BatchPrefillWithPagedKVCacheWrapper):
        refuse(ValueError, lambda: cls(crooked), words)
        wrapper = cls(target.workspace())
        refuse(ValueError, lambda: wrapper.reset_workspace_buffer(crooked, target.workspace()), words)
        words_int = "int_workspace_buffer must be 16-byte aligned"
        refuse(ValueError, lambda: wrapper.reset_workspace_buffer(target.workspace(), crooked), words_int)


def test_a_small_workspace(target):
    """Kernels split the keys of one row, and need room for the results; the reference splits nothing."""
    batch = make_batch([1], [20000], 8, 1, 64, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(16), backend=target.backend)
    plan = (batch.qo_indptr(), batch.kv_indptr(), *batch.heads)
    if not target.is_reference:
        needed, _ = wrapper.workspace_size(*plan, causal=True)
        words = ("float_workspace_buffer has 16 bytes", needed, "disable_split_kv=True")
        refuse(RuntimeError, lambda: wrapper.plan(*plan, causal=True), *words)
    wrapper.plan(*plan, causal=True, disable_split_kv=not target.is_reference)
    single = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend=target.backend)
    torch.testing.assert_close(wrapper.run(batch.q, batch.k, batch.v), single, rtol=1e-3, atol=1e-3)


def test_mask_of_another_size(calls):
    short = torch.ones(7, dtype=torch.bool, device=calls.target.device)
    for plan in calls.plans(custom_mask=short):
        refuse((ValueError, RuntimeError), plan, "custom_mask", 7, 181)
    bits = torch.ones(3, dtype=torch.uint8, device=calls.target.device)
    for plan in calls.plans(packed_custom_mask=bits):
        refuse((ValueError, RuntimeError), plan, "packed_custom_mask", 3, 24)
    refuse((ValueError, RuntimeError), lambda: calls.single(custom_mask=short), "custom_mask", 7, 14 * 29)
    refuse((ValueError, RuntimeError), lambda: calls.single(packed_custom_mask=bits), "packed_custom_mask", 3, 51)
    other = torch.ones(29, 14, dtype=torch.bool, device=calls.target.device)  # as many elements as [14, 29]
    refuse(ValueError, lambda: calls.single(custom_mask=other), "custom_mask", 29, 14)
    offsets = torch.tensor([0, 1 << 20], dtype=torch.int32)
    huge = dict(bounds=(offsets, offsets), packed_custom_mask=bits)
    refuse(ValueError, lambda: calls.ragged(**huge), 1 << 37, "int32 offsets")


def test_not_implemented(calls):
    paged, cache = calls.paged(), calls.data.cache
    for name, value in (("kv_cache_sf", cache), ("use_fp16_softmax", True), ("uses_spcompress", True)):
        refuse(NotImplementedError, lambda: paged.run(calls.batch.q, cache, **{name: value}), name)
    refuse(NotImplementedError, lambda: calls.single(kv_cache_sf=cache), "kv_cache_sf")
    for cls in (ck.BatchPrefillWithRaggedKVCacheWrapper, ck.BatchPrefillWithPagedKVCacheWrapper):
        refuse(NotImplementedError, lambda: cls(calls.target.workspace(), jit_args=["x"]), "jit_args")
    for name in ("v_indptr", "o_indptr"):
        refuse(NotImplementedError, lambda: calls.ragged(**{name: calls.batch.kv_indptr()}), name)


def test_packed_4_bit_cache(calls):
    q, _k, _v = calls.qkv
    k8, v8 = (torch.zeros(20, 2, 64, dtype=torch.uint8, device=calls.target.device) for _ in range(2))
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k8, v8), "uint8", "kv_cache_sf")

    def run():
        calls.paged(kv_data_type=torch.uint8).run(q, torch.zeros_like(calls.data.cache, dtype=torch.uint8))

    refuse(ValueError, run, "uint8", "kv_cache_sf")


def test_8_bit_queries_need_a_16_bit_output(target):
    calls = Calls(target, E4M3)
    refuse((ValueError, RuntimeError), lambda: calls.single(), "o_dtype")


@pytest.mark.parametrize("head_dim", [100, 520])
def test_head_dim_without_kernel(kernel_backend, head_dim):
    q, k, v = (torch.zeros(5, 2, head_dim, dtype=torch.float16, device="cuda:0") for _ in range(3))
    call = ck.single_prefill_with_kv_cache
    refuse(RuntimeError, lambda: call(q, k, v, backend=kernel_backend), head_dim, kernel_backend)


@pytest.mark.gpu
def test_tensors_on_two_devices():
    q, k, v = (torch.zeros(5, 2, 64, dtype=torch.float16) for _ in range(3))
    refuse((ValueError, RuntimeError), lambda: ck.single_prefill_with_kv_cache(q.cuda(), k, v), "cpu", "cuda")


@pytest.mark.parametrize("entry", [0, 17, -1])
def test_last_page_len_out_of_range(calls, entry):
    table = calls.data.table()
    bad = table[2].clone()
    bad[1] = entry
    call = lambda: calls.paged(table=(calls.batch.qo_indptr(), *table[:2], bad))  # noqa: E731
    refuse((ValueError, RuntimeError), call, rf"paged_kv_last_page_len\[1\]={entry}", "page_size=16")


@pytest.mark.parametrize("wrong", [-1, 99])
def test_page_numbers(calls, wrong):
    indptr, indices, last = calls.data.table()
    bad = indices.clone()
    bad[1] = wrong
    out = Guarded(calls.batch.q.shape, torch.float16, calls.target.device)

    def run(ids, **kwargs):
        return calls.paged(table=(calls.batch.qo_indptr(), indptr, ids, last)).run(
            calls.batch.q, calls.data.cache, **kwargs
        )

    refuse(ValueError, lambda: run(bad, out=out.tensor), "paged_kv_indices", wrong)
    out.check_untouched("out")
    unused = torch.cat([indices, torch.tensor([wrong], dtype=torch.int32)])
    assert torch.equal(run(unused), run(indices))


def test_multi_item_arguments_go_together(calls):
    lens = torch.tensor([3, 3], dtype=torch.int32, device=calls.target.device).to(torch.uint32)
    for plan in calls.plans(prefix_len_ptr=lens):
        refuse((ValueError, RuntimeError), plan, "token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr")


def test_a_failed_plan_or_run_leaves_the_wrapper_usable(calls):
    wrapper = calls.paged(causal=True)
    before = wrapper.run(calls.batch.q, calls.data.cache)
    bad = torch.tensor([0, 9, 5], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="qo_indptr decreases from 9 to 5"):
        wrapper.plan(bad, *calls.data.table(), *calls.batch.heads, 16)
    for run in (wrapper.run, wrapper.forward):  # the latter with options of its own
        with pytest.raises(ValueError, match="q has 3 rows"):
            run(calls.batch.q[:3], calls.data.cache)
    assert torch.equal(wrapper.run(calls.batch.q, calls.data.cache), before)


def test_rope_turns_pairs(calls):
    words = ("head_dim=63 is odd", "ROPE_LLAMA")
    for plan in calls.plans(heads=(4, 2, 63), pos_encoding_mode="ROPE_LLAMA"):
        refuse(ValueError, plan, *words)
    q, k, v = (x[..., :63] for x in calls.qkv)
    refuse(ValueError, lambda: ck.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ROPE_LLAMA"), *words)


def test_refusals_do_not_print_tensors(calls):
    message = refuse(NotImplementedError, lambda: calls.ragged().run(*calls.qkv, o_scale=calls.qkv[0]), "o_scale")
    assert "a tensor (14, 4, 64)" in message
    message = refuse(TypeError, lambda: calls.single(causal=calls.qkv[0]), "causal")
    assert "causal=a tensor of shape (14, 4, 64)" in message


@pytest.mark.parametrize("name", ["num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"])
def test_sizes_that_are_whole_floats(calls, name):
    # Refused before anything is remembered: the same plan with integers works.
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(calls.target.workspace(), backend=calls.target.backend)
    refuse(TypeError, lambda: wrapper.plan(offsets, offsets, **{**sizes, name: float(sizes[name])}), name, "integer")
    wrapper.plan(offsets, offsets, **sizes)
    q, k = (torch.zeros(5, heads, 64, dtype=torch.float16, device=calls.target.device) for heads in (4, 2))
    assert wrapper.run(q, k, k).shape == q.shape
