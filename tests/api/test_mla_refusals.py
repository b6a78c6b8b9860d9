"""Latent attention: arguments that make no sense, scales that do not count, pages that are none."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compare import assert_bitwise, assert_close
from mla_problems import SCALE, make

from cutlass_kernels import mla
from cutlass_kernels._core import errors as errors
from cutlass_kernels._planned import latent_plans

INT32, E4M3 = torch.int32, torch.float8_e4m3fn


def planned(problem, **options) -> mla.BatchMLAPagedAttentionWrapper:
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8))
    wrapper.plan(**problem.plan(**options))
    return wrapper


def flash(problem, **options):
    given = (problem.q.unsqueeze(1), problem.cache.unsqueeze(2), problem.table, problem.lens, 512)
    return mla.flash_mla_with_kvcache(*given, softmax_scale=SCALE, **options)[0]


def test_flash_mla_takes_no_notice_of_scales_of_16_bit_tensors():
    problem = make([1, 1], [30, 9], 4, 16)
    scales = dict(descale_q=torch.tensor([3.0]), descale_k=torch.tensor([0.5]))
    assert_bitwise(flash(problem, **scales), flash(problem))
    fp8 = dataclasses.replace(problem, cache=problem.cache.nan_to_num().to(E4M3))
    assert not torch.equal(flash(fp8, **scales), flash(fp8))
    assert_bitwise(flash(fp8, descale_q=3.0), flash(fp8))


def test_flash_mla_names_its_own_arguments():
    problem = make([1, 1], [30, 9], 4, 16)
    for name, tensors in (("cache_seqlens", "lens"), ("block_table", "table")):
        given = getattr(problem, tensors)
        for wrong in (given[:1], given.long()):
            with pytest.raises(ValueError, match=rf"{name} has shape .*: it must be an int32 tensor \[2"):
                flash(dataclasses.replace(problem, **{tensors: wrong}))


@pytest.mark.parametrize("page", [-1, 1000])
def test_pages_that_the_cache_does_not_have_are_refused_on_the_cpu(page):
    problem = make([1, 1], [40, 9], 4, 16)
    table = problem.table.clone()
    table[0, 1] = page
    with pytest.raises(ValueError, match=rf"page number {page}, but the cache has only {problem.cache.size(0)} pages"):
        flash(dataclasses.replace(problem, table=table))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_outputs_have_floating_point_types(dtype):
    problem = make([1, 1], [30, 9], 4, 16)
    given = (torch.empty(0), 128, 512, 64, problem.table, problem.lens, 320)
    out = torch.zeros(2, 1, 4, 512, dtype=dtype)
    with pytest.raises(ValueError, match=f"out has dtype {dtype}"):
        mla.trtllm_batch_decode_with_kv_cache_mla(problem.q.unsqueeze(1), problem.cache, *given, out=out)


def test_a_bound_of_query_lengths_comes_with_either_form_of_lengths():
    problem = make([1, 3], [30, 9], 4, 16)
    want = planned(problem).run(*problem.halves)
    assert_bitwise(planned(problem, max_q_len=8).run(*problem.halves), want)
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
    plan = problem.plan()
    metadata = mla.MLAPlanMetadata(*(plan.pop(name) for name in names), max_q_len=8)
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8))
    wrapper.plan(metadata=metadata, **plan)
    assert_bitwise(wrapper.run(*problem.halves), want)


def test_scales_that_differ_widely_do_not_overflow():
    problem = make([1, 3], [50, 9], 4, 16)
    q_nope, q_pe, *cache = (x.nan_to_num() for x in problem.halves)
    q_nope, q_pe, (ckv, kpe) = q_nope.half(), q_pe.half(), (x.to(E4M3) for x in cache)
    wrapper = planned(problem, q_data_type=torch.float16, kv_data_type=E4M3)
    out = wrapper.run(q_nope, q_pe, ckv, kpe, ckv_scale=2.0**-17, kpe_scale=1.0)
    keys = torch.cat([ckv.float() * 2.0**-17, kpe.float()], -1)
    exact = planned(problem, q_data_type=torch.float32, kv_data_type=torch.float32)
    want = exact.run(q_nope.float(), q_pe.float(), *keys.split([512, 64], -1))
    assert want.isfinite().all()
    torch.testing.assert_close(out.float() * 2**17, want * 2**17, atol=2e-2, rtol=2e-2)


def test_columns_of_a_position_that_is_not_planned_are_refused():
    problem = make([1], [30], 4, 16)
    q_nope, q_pe, ckv, kpe = problem.halves
    wrapper = planned(problem, head_dim_kpe=0)
    wrapper.run(q_nope, None, ckv, None)
    with pytest.raises(ValueError, match="q_pe is given, but head_dim_kpe=0"):
        wrapper.run(q_nope, q_pe, ckv, None)
    with pytest.raises(ValueError, match="kpe_cache is given, but head_dim_kpe=0"):
        wrapper.run(q_nope, None, ckv, kpe)


def test_both_scales_of_a_mode_are_needed():
    problem = make([1], [30], 4, 16)
    with pytest.raises(ValueError, match="pass bmm1_scale and bmm2_scale"):
        planned(problem, scale_mode="bmm-scalar").run(*problem.halves, bmm2_scale=1.0)
    q_nope, q_pe, *cache = problem.halves
    cache = [x.nan_to_num().to(E4M3) for x in cache]
    with pytest.raises(ValueError, match="pass ckv_scale and kpe_scale"):
        planned(problem, scale_mode="kv-per-tensor", kv_data_type=E4M3).run(q_nope, q_pe, *cache, kpe_scale=1.0)
    with pytest.raises(ValueError, match=r"bmm1_scale has shape \(4,\)"):
        planned(problem).run(*problem.halves, bmm1_scale=torch.ones(4))
    with pytest.raises(ValueError, match=r"ckv_scale has shape \(2,\)"):
        planned(problem, kv_data_type=E4M3).run(q_nope, q_pe, *cache, ckv_scale=torch.ones(2))


def test_the_planner_of_the_compiled_module_counts_pages():
    problem = make([1, 1], [30, 9], 4, 16)
    wrapper, plan = planned(problem), problem.plan()
    lengths = (plan["qo_indptr"], plan["kv_indptr"], torch.tensor([500, 9], dtype=INT32))
    with pytest.raises(ValueError, match="kv_lens"):
        wrapper._cached_module.plan(None, None, None, *lengths)
    want, _, base = problem.expected(True)
    assert_close(wrapper.run(*problem.halves), want, base)


@pytest.mark.parametrize(
    "dims,dtype,why",
    [
        ((512, 64), E4M3, None),
        ((512, 64), torch.float8_e5m2, "e5m2"),
        ((512, 0), torch.float16, None),
        ((512, 0), E4M3, "without kpe has no kernel: use a cache of 16 bits"),
        ((256, 0), E4M3, None),
        ((600, 0), torch.float16, "head_dim_ckv=600"),
        ((448, 64), torch.float16, "head_dim_ckv=448 and head_dim_kpe=64"),
    ],
    ids=str,
)
def test_what_graphs_cannot_hold_is_known_when_planned(dims, dtype, why):
    said = latent_plans.why_not_captured(dims, dtype)
    assert said is None if why is None else said is not None and why in said


@pytest.mark.gpu
def test_plans_for_graphs_refuse_what_no_kernel_serves():
    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=INT32, device="cuda")

    buffers = dict(qo_indptr=ints(0, 0), kv_indptr=ints(0, 0), kv_indices=ints(0, 0), kv_len_arr=ints(0))
    room = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    wrapper = mla.BatchMLAPagedAttentionWrapper(room, True, *buffers.values())
    sizes = (128, 512, 0, 16, False, SCALE)
    with pytest.raises(errors.BackendError, match="CUDA graphs cannot hold"):
        wrapper.plan(ints(0, 1), ints(0, 2), ints(0, 1), ints(20), *sizes, torch.bfloat16, E4M3)
    wrapper.plan(ints(0, 1), ints(0, 2), ints(0, 1), ints(20), *sizes, torch.bfloat16, torch.bfloat16)
