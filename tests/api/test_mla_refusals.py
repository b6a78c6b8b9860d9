"""Latent attention: arguments that make no sense are refused in a sentence, before anything is written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from mla_problems import SCALE, buffers, flash, make, planned, trtllm, wrapper_for
from problems import indptr
from refusals import Row, rows

from cutlass_kernels import mla
from cutlass_kernels._core import errors
from cutlass_kernels._planned import latent_plans

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=BF16)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT32)


NAMED, SHAPE = "{name}={value}", "{name} has shape"
PLANS: list[Row] = [
    *rows(ValueError, NAMED, num_heads=0, head_dim_ckv=0, head_dim_kpe=-1, page_size=0, output_dtype=torch.int8),
    *rows(ValueError, NAMED + " is unknown", output_scale="row", lse_mode="base10", scale_mode="bmm"),
    *rows(ValueError, NAMED + " is unknown", query_layout="NHD", kv_cache_layout="NHD"),
    *rows(NotImplementedError, NAMED, use_profiler=True, skip_softmax=True, output_scale="per-tensor"),
    *rows(TypeError, "{name}", num_heads=1.5, causal=None, use_sinks="yes"),
    *rows(TypeError, r"plan\(\) needs {name}", num_heads=None, page_size=None),
    (dict(page_size=None, q_data_type=None), TypeError, r"plan\(\) needs page_size, q_data_type"),
    (dict(kv_indptr=indptr([1, 1], "cpu")[:2]), ValueError, "kv_indptr has 2 elements"),
    (dict(kv_indptr=ints(0, 2, 9)), ValueError, "kv_indptr ends at 9"),
    (dict(kv_len_arr=ints(30)), ValueError, "kv_len_arr has 1 elements"),
    (dict(kv_len_arr=ints(30, 17)), ValueError, r"kv_len_arr\[1\]=17, but the 1 pages"),
    (dict(kv_len_arr=ints(30, -1)), ValueError, r"kv_len_arr\[1\]=-1"),
    (dict(qo_indptr=ints(0, 2, 1)), RuntimeError, "qo_indptr decreases"),
    (dict(qo_indptr=[0, 1, 2]), TypeError, "qo_indptr is list"),
    *rows(ValueError, SHAPE, kv_indices=torch.zeros(3)),
    *[
        (dict(q_data_type=q, kv_data_type=kv), ValueError, f"kv_data_type={kv} and q_data_type={q}")
        for q, kv in ((E4M3, BF16), (HALF, BF16), (BF16, torch.float32))
    ],
    (dict(q_data_type=torch.int8, kv_data_type=torch.int8), ValueError, r"q_data_type=torch\.int8 is not served"),
]


@pytest.mark.parametrize(("change", "error", "words"), PLANS)
def test_wrong_plans_are_refused_and_leave_the_last_one(change, error, words):
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper = planned(problem)
    before = wrapper.run(*problem.halves)
    with pytest.raises(error, match=words):
        wrapper.plan(**problem.plan(**change))
    assert_bitwise(wrapper.run(*problem.halves), before)


def test_lengths_that_contradict_each_other_are_refused():
    problem = make([1, 2], [30, 7], 4, 16)
    vectors, rest = problem.split_plan()
    tables, csr, wrapper = problem.dense(), mla.MLAPlanMetadata.csr(**vectors), wrapper_for("cpu")
    shorter = {**tables, "seq_lens": ints(30, 6)}
    for given, error, words in (
        (dict(metadata=csr, kv_indices=vectors["kv_indices"]), ValueError, "metadata and kv_indices are given"),
        (vectors | tables, ValueError, "qo_indptr and cum_seq_lens_q are given"),
        (dict(metadata=vectors), TypeError, "metadata is dict"),
        ({}, TypeError, "plan.. needs qo_indptr"),
        ({x: y for x, y in tables.items() if x != "seq_lens"}, TypeError, "seq_lens: missing"),
        (vectors | dict(kv_len_arr=None), TypeError, "kv_len_arr: missing"),
        (tables | dict(max_q_len=1), ValueError, "max_q_len=1, but a request has 2 rows"),
        (tables | dict(seq_lens=torch.tensor([30, 999])), ValueError, r"seq_lens\[1\]=999, but the"),
        (tables | dict(block_tables=tables["block_tables"][:1]), ValueError, "block_tables is"),
        (
            tables | dict(block_tables=tables["block_tables"] * 0 - 1),
            ValueError,
            "block_tables holds the page number -1",
        ),
        (
            dict(metadata=mla.MLAPlanMetadata.dual(**vectors, **shorter)),
            ValueError,
            "kv_len_arr and seq_lens of the metadata differ",
        ),
    ):
        with pytest.raises(error, match=words):
            wrapper.plan(**given, **rest)


# --- runs ---

FP8_PLAN = dict(kv_data_type=E4M3)
NO_KPE = dict(head_dim_kpe=0)
OF_RUNS: list[Row] = [
    *rows(ValueError, SHAPE, q_nope=zeros(2, 3, 512), q_pe=zeros(2, 4, 32), ckv_cache=zeros(9, 8, 512)),
    *rows(ValueError, SHAPE, kpe_cache=zeros(9, 16, 1, 64), out=zeros(2, 4, 576), lse=torch.empty(2, 5)),
    *rows(ValueError, SHAPE, lse=torch.empty(2, 4).half()),
    (dict(lse=torch.empty(2, 5), return_lse=True), ValueError, "lse has shape"),
    *rows(ValueError, "{name} has dtype", q_nope=torch.zeros(2, 4, 512), kpe_cache=torch.zeros(9, 16, 64).half()),
    *rows(ValueError, "q_rope has shape", q_pe=zeros(1, 4, 64)),
    *rows(ValueError, "k_rope has shape", kpe_cache=zeros(900, 16, 64)),
    *rows(TypeError, "{name} is NoneType", q_pe=None, q_nope=None),
    *rows(TypeError, "{name} is float", lse=1.0),
    *rows(NotImplementedError, "{name}", kv_len=torch.zeros(2), page_table=torch.zeros(2, 2)),
    *rows(NotImplementedError, "{name}", profiler_buffer=torch.zeros(2), ckv_scale_arr=torch.zeros(2)),
    *rows(NotImplementedError, NAMED, o_scale=2.0, skip_softmax_threshold_scale_factor=5.0),
    *rows(ValueError, "ckv_scale and kpe_scale are for fp8 caches", ckv_scale=2.0),
    (dict(ckv_scale=2.0, kpe_scale=2.0), ValueError, "are for fp8 caches, but torch"),
    *rows(ValueError, r"{name} has shape \(4,\)", bmm1_scale=torch.ones(4)),
]
# Changes of the plan and of the run, and the refusal.
RUNS: list[tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = [
    *[({}, *row) for row in OF_RUNS],
    (dict(qo_indptr=ints(0, 1, 3)), {}, ValueError, "q_nope has 2 rows, but qo_indptr of the plan ends at 3"),
    (dict(use_sinks=True), {}, ValueError, "use_sinks=True is planned"),
    (NO_KPE, dict(kpe_cache=None), ValueError, "q_pe is given, but head_dim_kpe=0"),
    (NO_KPE, dict(q_pe=None), ValueError, "kpe_cache is given, but head_dim_kpe=0"),
    (dict(lse_mode="basee"), dict(return_lse=True), ValueError, "lse_mode='basee' is planned"),
    (
        dict(output_dtype=torch.float32),
        dict(out=torch.empty(2, 4, 512).bfloat16()),
        ValueError,
        r"out has dtype torch\.bfloat16, but output_dtype=torch\.float32",
    ),
    *[
        (dict(scale_mode=mode), given, ValueError, "pass bmm1_scale and bmm2_scale")
        for mode in ("bmm-tensor", "bmm-scalar")
        for given in ({}, dict(bmm2_scale=1.0))
    ],
    *[
        (dict(scale_mode=f"bmm-{kind}"), dict(bmm1_scale=x, bmm2_scale=x, ckv_scale=1.0), ValueError, "pass one kind")
        for kind, x in (("scalar", 1.0), ("tensor", torch.ones(1)))
    ],
    (FP8_PLAN | dict(scale_mode="kv-per-tensor"), {}, ValueError, "pass ckv_scale and kpe_scale"),
    (FP8_PLAN | dict(scale_mode="kv-per-tensor"), dict(kpe_scale=1.0), ValueError, "pass ckv_scale and kpe_scale"),
    (FP8_PLAN, dict(ckv_scale=torch.ones(2)), ValueError, r"ckv_scale has shape \(2,\)"),
    (FP8_PLAN | dict(q_data_type=E4M3), dict(ckv_scale=1.0, kpe_scale=2.0), ValueError, "differ, which fp8 queries"),
    (FP8_PLAN | dict(q_data_type=E4M3), dict(ckv_scale=1.0, kpe_scale=0), ValueError, "kpe_scale=0 must be finite and"),
]


@pytest.mark.parametrize(("plan", "change", "error", "words"), RUNS)
def test_wrong_tensors_are_refused(plan, change, error, words):
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper = wrapper_for("cpu")
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper.run(*problem.halves)
    wrapper.plan(**problem.plan(**plan))
    dtypes = [plan.get(name, BF16) for name in ("q_data_type", "kv_data_type") for _ in range(2)]
    tensors = [x.nan_to_num().to(dtype) for x, dtype in zip(problem.halves, dtypes)]
    given = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), tensors)) | change
    given.setdefault("out", out := torch.zeros(2, 4, 512, dtype=plan.get("output_dtype", BF16)))
    with pytest.raises(error, match=words):
        wrapper.run(**given)
    assert not out.any()


def test_what_is_not_refused():
    problem = make([1], [30], 4, 16)
    q_nope, _, ckv, _ = problem.halves
    planned(problem, head_dim_kpe=0).run(q_nope, None, ckv, None)
    planned(problem).run(*problem.halves, skip_softmax_threshold_scale_factor=0.0)
    parts = [x.nan_to_num().to(E4M3) for x in problem.halves]
    wrapper = planned(problem, q_data_type=E4M3, kv_data_type=E4M3)
    assert wrapper.run(*parts, ckv_scale=2.0, kpe_scale=2.0).dtype == BF16


def test_forms_of_queries_and_caches():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper, (q_nope, q_pe, *_) = planned(problem), problem.halves
    for given, error, words in (
        (dict(query=problem.q, q_pe=q_pe, kv_cache=problem.cache), TypeError, "query and q_pe are given"),
        (dict(query=problem.q, kv_cache=[]), TypeError, "kv_cache is list"),
        (dict(query=q_nope, kv_cache=problem.cache), ValueError, r"query has shape \(3, 4, 512\)"),
        (dict(kv_cache=problem.cache), TypeError, "q_nope is NoneType"),
    ):
        with pytest.raises(error, match=words):
            wrapper.run(**given)


def test_page_numbers_that_the_cache_does_not_have_are_refused():
    problem = make([2, 1], [30, 7], 4, 16)
    q_nope, q_pe, ckv, kpe = problem.halves
    most = int(problem.indices.max())
    with pytest.raises(ValueError, match=f"kv_indices holds the page number {most}, but the cache has only {most}"):
        planned(problem).run(q_nope, q_pe, ckv[:most], kpe[:most])
    negative = problem.indices.clone()
    negative[1] = -3
    with pytest.raises(ValueError, match="kv_indices holds the page number -3"):
        planned(problem, kv_indices=negative)
    # What lies behind the pages of the last request is not read.
    planned(problem, kv_indices=torch.cat([problem.indices, ints(99, -1)])).run(*problem.halves)


# --- wrappers, and plans for CUDA graphs ---

NEW_WRAPPERS = [
    (dict(use_cuda_graph=True, **{**buffers(2, 4), "kv_len_arr": None}), "needs kv_len_arr"),
    (dict(use_cuda_graph=True, **{**buffers(2, 4), "kv_indptr": ints(*[0] * 5)}), "kv_indptr has 5 elements"),
    (dict(backend="cutlass"), "cutlass is for Blackwell"),
]


@pytest.mark.parametrize("given,words", NEW_WRAPPERS)
def test_wrong_wrappers_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        wrapper_for("cpu", **given)
    with pytest.raises(TypeError, match="float_workspace_buffer is int"):
        mla.BatchMLAPagedAttentionWrapper(1024)


def test_what_does_not_fit_the_buffers_is_refused():
    wrapper = wrapper_for("cpu", use_cuda_graph=True, **buffers(2, 4))
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper.plan(**problem.plan())
    want = wrapper.run(*problem.halves)
    for lengths, words in (
        (([1, 2], [30, 7]), "first plan of this wrapper had at most 1"),
        (([1, 1], [60, 7]), "kv_indices has 5 pages"),
        (([1], [30]), "batch_size=2, but the plan has 1"),
    ):
        with pytest.raises(ValueError, match=words):
            wrapper.plan(**make(*lengths, 4, 16).plan())
        assert_bitwise(wrapper.run(*problem.halves), want)


def test_the_planner_of_the_compiled_module_counts_pages():
    problem = make([1, 1], [30, 9], 4, 16)
    wrapper, plan = planned(problem), problem.plan()
    with pytest.raises(ValueError, match="kv_lens"):
        wrapper._cached_module.plan(None, None, None, plan["qo_indptr"], plan["kv_indptr"], ints(500, 9))
    problem.check(wrapper.run(*problem.halves))


@pytest.mark.parametrize(
    "dims,dtype,why",
    [
        ((512, 64), E4M3, None),
        ((512, 64), torch.float8_e5m2, "e5m2"),
        ((512, 0), HALF, None),
        ((512, 0), E4M3, "without kpe has no kernel: use a cache of 16 bits"),
        ((256, 0), E4M3, None),
        ((600, 0), HALF, "head_dim_ckv=600"),
        ((448, 64), HALF, "head_dim_ckv=448 and head_dim_kpe=64"),
    ],
    ids=str,
)
def test_what_graphs_cannot_hold_is_known_when_planned(dims, dtype, why):
    said = latent_plans.why_not_captured(dims, dtype)
    assert said is None if why is None else said is not None and why in said


@pytest.mark.gpu
def test_plans_for_graphs_refuse_what_no_kernel_serves():
    room = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    wrapper = mla.BatchMLAPagedAttentionWrapper(room, True, **buffers(1, 2, "cuda"))
    plan = (ints(0, 1).cuda(), ints(0, 2).cuda(), ints(0, 1).cuda(), ints(20).cuda(), 128, 512, 0, 16, False, SCALE)
    with pytest.raises(errors.BackendError, match="CUDA graphs cannot hold"):
        wrapper.plan(*plan, BF16, E4M3)
    wrapper.plan(*plan, BF16, BF16)


# --- the plan-free functions ---

OF_LISTS: dict[str, Any] = dict(sparse_mla_top_k=5, block_tables=torch.zeros(2, 3, 5, dtype=INT32))
TRTLLM: list[Row] = [
    *rows(NotImplementedError, "{name}", uses_shared_paged_kv_idx=False),
    *rows(ValueError, r"block_tables has shape .* int32 tensor \[2, 3, 64\]", sparse_mla_top_k=64),
    *rows(ValueError, "sparse_mla_top_k=0 is no width of lists", sparse_mla_top_k_lens=ints(1, 1)),
    *rows(ValueError, "{name}=-5 is no width of lists", sparse_mla_top_k=-5),
    (
        OF_LISTS | dict(seq_lens=ints(1, 2, 3)),
        ValueError,
        r"seq_lens has shape \(3,\): .* \[2\], one per request, or \[2, 3\]",
    ),
    (OF_LISTS | dict(seq_lens=torch.ones(2)), ValueError, "seq_lens has shape .* and dtype torch.float32"),
    (OF_LISTS | dict(seq_lens=[1, 2]), TypeError, "seq_lens is list, not a tensor"),
    *rows(ValueError, r"uint8 with 584 bytes .* attention\(kv_format=\)", kv_cache=torch.zeros(9, 64, 584, dtype=U8)),
    *rows(ValueError, "{name} is uint8 with 640 bytes per token", kv_cache=torch.zeros(9, 64, 640, dtype=U8)),
    (
        dict(kv_cache=torch.zeros(9, 64, 528, dtype=U8), query=zeros(2, 3, 4, 512), qk_rope_head_dim=0),
        ValueError,
        "528 bytes per token, .*kv_scale_format='auto': .* kv_scale_format='arbitrary_fp32'",
    ),
    (
        dict(kv_cache=torch.zeros(9, 64, 656, dtype=U8), qk_rope_head_dim=0),
        ValueError,
        "query has shape .* make 512 columns",
    ),
    (dict(kv_cache=torch.zeros(9, 64, 656, dtype=U8), kv_lora_rank=448), ValueError, "656 bytes .* kv_lora_rank=448"),
    *rows(TypeError, "{name}", sparse_mla_top_k="64"),
    *rows(NotImplementedError, "kv_shard", enable_dcp=True),
    *rows(NotImplementedError, "Blackwell", use_fp16_softmax=True),
    *rows(ValueError, NAMED, backend="fa7"),
    *rows(ValueError, NAMED + " is unknown", return_lse_base="e"),
    *rows(ValueError, "make 320 columns", kv_lora_rank=256),
    *rows(ValueError, SHAPE, kv_cache=torch.zeros(9, 2, 16, 576), query=zeros(2, 4, 576), out=zeros(2, 3, 4, 576)),
    *rows(ValueError, SHAPE, lse=torch.zeros(2, 3, 5)),
    *rows(ValueError, SHAPE, lse=torch.zeros(3, 3, 4)),
    *rows(ValueError, "dtype torch.float16", lse=torch.zeros(6, 4).half()),
    *rows(ValueError, "dtype torch.float64", lse=torch.zeros(2, 4, 3).transpose(1, 2).double()),
    *rows(ValueError, "{name} has dtype torch.int32", out=torch.zeros(2, 3, 4, 512, dtype=INT32)),
    *rows(ValueError, "{name} has dtype torch.bool", out=torch.zeros(2, 3, 4, 512, dtype=torch.bool)),
    *rows(TypeError, "{name} is NoneType", kv_cache=None, seq_lens=None),
    (
        dict(query=zeros(2, 0, 4, 576), out=None),
        ValueError,
        r"query has shape \(2, 0, 4, 576\): each request must have at least one row",
    ),
]
IS_INT32 = r"{name} has shape .*: it must be an int32 tensor \[2"
FLASH: list[Row] = [
    *rows(ValueError, "{name} is given without indices", extra_k_cache=torch.zeros(1), extra_topk_length=ints(1, 1)),
    *rows(ValueError, "{name} is given without indices", extra_indices_in_kvcache=torch.zeros(2, 1, 64, dtype=INT32)),
    *rows(NotImplementedError, r"attention\(sinks=\)", attn_sink=torch.zeros(4)),
    *rows(ValueError, "{name} is given without indices", topk_length=ints(1, 1)),
    *rows(ValueError, SHAPE, q=zeros(2, 4, 576), k_cache=zeros(9, 64, 576)),
    *rows(ValueError, "{name} has dtype torch.uint8 .* 656, 584", k_cache=torch.zeros(9, 64, 1, 640, dtype=U8)),
    *rows(ValueError, "q has head_dim 576, but k_cache .*kv_format='v4'", k_cache=torch.zeros(9, 64, 1, 584, dtype=U8)),
    *rows(ValueError, "head_dim", k_cache=zeros(9, 64, 1, 512)),
    *rows(ValueError, NAMED, is_fp8_kvcache=True, head_dim_v=0),
    *rows(ValueError, NAMED, head_dim_v=640),
    *rows(TypeError, "{name} is NoneType", block_table=None, cache_seqlens=None),
    *rows(ValueError, IS_INT32, block_table=torch.zeros(3, 2, dtype=INT32), cache_seqlens=ints(0, 0, 0)),
    *rows(ValueError, IS_INT32, block_table=torch.zeros(2, 2).long(), cache_seqlens=torch.zeros(2).long()),
]


@pytest.mark.parametrize(("change", "error", "words"), TRTLLM)
def test_trtllm_decode_refuses_before_it_writes(change, error, words):
    problem, out = make([3, 3], [30, 7], 4, 16), torch.zeros(2, 3, 4, 512).bfloat16()
    given = dict(query=problem.q.unflatten(0, (2, 3)), kv_cache=problem.cache, workspace_buffer=torch.empty(0), out=out)
    given |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, block_tables=problem.table)
    with pytest.raises(error, match=words):
        mla.trtllm_batch_decode_with_kv_cache_mla(**{**given, "seq_lens": problem.lens, "max_seq_len": 30, **change})
    assert not out.any()


@pytest.mark.parametrize(("change", "error", "words"), FLASH)
def test_flash_mla_refuses_in_a_sentence(change, error, words):
    problem = make([1, 1], [30, 7], 4, 64)
    given = dict(q=problem.q.unsqueeze(1), k_cache=problem.cache.unsqueeze(2), block_table=problem.table)
    with pytest.raises(error, match=words):
        mla.flash_mla_with_kvcache(**{**given, "cache_seqlens": problem.lens, "head_dim_v": 512, **change})


@pytest.mark.parametrize("page", [-1, 1000])
@pytest.mark.parametrize("function", [flash, trtllm])
def test_pages_that_the_cache_does_not_have_are_refused_on_the_cpu(page, function):
    problem = make([1, 1], [40, 9], 4, 16)
    table = problem.table.clone()
    table[0, 1] = page
    with pytest.raises(ValueError, match=rf"page number {page}, but the cache has only {problem.cache.size(0)} pages"):
        function(dataclasses.replace(problem, table=table))
