"""Places that calls of latent attention write to, and arguments that must fit the plan."""

from __future__ import annotations

import dataclasses
import math
import types

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from mla_problems import DEVICES, SCALE, make

from cutlass_kernels import mla

INT32 = torch.int32


def decode(problem, query, **options):
    """The plan-free function over the pages of a problem."""
    given = (torch.empty(0), 128, 512, 64, problem.table, problem.lens, 320)
    return mla.trtllm_batch_decode_with_kv_cache_mla(query, problem.cache, *given, bmm1_scale=SCALE, **options)


@pytest.mark.parametrize("return_lse", [False, True])
def test_trtllm_decode_writes_results_of_any_strides(return_lse):
    problem = make([3, 3], [30, 9], 16, 16)
    query = problem.q.unflatten(0, (2, 3))
    out, want = decode(problem, query, return_lse=True)
    lse = torch.empty(2, 16, 3).transpose(1, 2)  # no view joins its first two dimensions
    lse.fill_(torch.nan)
    place = torch.full((3, 2, 16, 512), torch.nan, dtype=out.dtype).transpose(0, 1)  # the same
    found = decode(problem, query, out=place, lse=lse, return_lse=return_lse)
    assert (found[0] if return_lse else found) is place and torch.equal(place, out)
    assert not return_lse or found[1] is lse
    assert_bitwise(lse.reshape(6, 16), want)


@pytest.mark.parametrize(
    ("lse", "words"),
    [
        (torch.zeros(2, 3, 15), "lse has shape"),
        (torch.zeros(3, 3, 16), "lse has shape"),
        (torch.zeros(6, 16).half(), "dtype torch.float16"),
        (torch.zeros(2, 16, 3).transpose(1, 2).double(), "dtype torch.float64"),
    ],
)
def test_trtllm_decode_checks_the_lse_before_it_writes(lse, words):
    problem = make([3, 3], [30, 9], 16, 16)
    out = torch.zeros(2, 3, 16, 512, dtype=problem.q.dtype)
    with pytest.raises(ValueError, match=words):
        decode(problem, problem.q.unflatten(0, (2, 3)), out=out, lse=lse)
    assert not out.any()


@pytest.mark.parametrize("columns", [512, 600])
def test_trtllm_decode_leaves_rows_behind_the_last_request(columns):
    problem = make([1, 3], [30, 9], 4, 16)
    query = torch.cat([problem.q, torch.zeros_like(problem.q)])
    call = dict(cum_seq_lens_q=problem.batch.qo_indptr("cpu"), max_q_len=3)
    want = decode(problem, problem.q, return_lse=True, **call)
    out, lse = torch.full((8, 4, columns), 7.0).to(query.dtype)[..., :512], torch.full((8, 4), 7.0)
    assert decode(problem, query, out=out, lse=lse, **call) is out
    for place, first in zip((out, lse), want):
        assert_bitwise(place[:4], first)
        assert (place[4:] == 7).all()


def test_trtllm_decode_of_fp8_queries():
    problem = make([1, 1], [30, 9], 4, 16)
    fp8 = dataclasses.replace(problem, cache=problem.cache.nan_to_num().to(torch.float8_e4m3fn))
    assert decode(fp8, problem.q.unsqueeze(1).to(torch.float8_e4m3fn)).dtype == torch.bfloat16


def test_trtllm_decode_of_requests_without_rows():
    problem = make([1, 1], [30, 9], 4, 16)
    with pytest.raises(ValueError, match=r"query has shape \(2, 0, 4, 576\): each request must have at least one row"):
        decode(problem, problem.q.new_zeros(2, 0, 4, 576))


def test_trtllm_decode_in_another_base():
    problem = make([1, 1], [30, 9], 4, 16)
    query, lse = problem.q.unsqueeze(1), torch.empty(2, 1, 4)
    want = decode(problem, query, return_lse=True)[1]
    assert_bitwise(decode(problem, query, return_lse=True, return_lse_base="base2")[1], want)
    decode(problem, query, lse=lse, return_lse_base="basee")
    torch.testing.assert_close(lse.flatten(0, 1), want * math.log(2))
    with pytest.raises(ValueError, match="return_lse_base='e' is unknown"):
        decode(problem, query, return_lse_base="e")


# --- the wrapper ---


def planned(problem, **plan):
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8))
    wrapper.plan(**problem.plan(**plan))
    return wrapper


def test_a_given_lse_is_written_whether_or_not_it_is_returned():
    problem = make([2, 1], [30, 7], 4, 16)
    wrapper = planned(problem)
    out, want = wrapper.run(*problem.halves, return_lse=True)
    lse = torch.full((4, 3), torch.nan).t()
    found = wrapper.run(*problem.halves, lse=lse)
    assert_bitwise(found, out)
    assert_bitwise(lse.contiguous(), want)


def test_a_wrong_lse_is_refused_before_the_output_is_written():
    problem = make([2, 1], [30, 7], 4, 16)
    wrapper = planned(problem)
    for lse, words in ((torch.empty(3, 5), "lse has shape"), (torch.empty(3, 4).half(), "lse has shape")):
        out = torch.zeros(3, 4, 512, dtype=problem.q.dtype)
        with pytest.raises(ValueError, match=words):
            wrapper.run(*problem.halves, out=out, lse=lse)
        assert not out.any()
    with pytest.raises(TypeError, match="lse is float"):
        wrapper.run(*problem.halves, lse=1.0)


def test_rows_behind_the_last_request_are_not_written():
    problem = make([2, 1], [30, 7], 4, 16)
    wrapper = planned(problem)
    want = wrapper.run(*problem.halves, return_lse=True)
    q_nope, q_pe, ckv, kpe = problem.halves
    longer = [torch.cat([x, torch.zeros_like(x)]) for x in (q_nope, q_pe)]
    out, lse = torch.full((6, 4, 512), 7.0).to(q_nope.dtype), torch.full((6, 4), 7.0)
    wrapper.run(*longer, ckv, kpe, out=out, lse=lse)
    for place, first in zip((out, lse), want):
        assert_bitwise(place[:3], first)
        assert (place[3:] == 7).all()


def test_fewer_rows_than_planned_are_refused():
    problem = make([2, 1], [30, 7], 4, 16)
    q_nope, q_pe, ckv, kpe = problem.halves
    with pytest.raises(ValueError, match="q_nope has 2 rows, but qo_indptr of the plan ends at 3"):
        planned(problem).run(q_nope[:2], q_pe[:2], ckv, kpe)


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
    longer = torch.cat([problem.indices, torch.tensor([99, -1], dtype=INT32)])
    planned(problem, kv_indices=longer).run(*problem.halves)


def test_fp8_queries_need_an_fp8_cache():
    problem = make([2, 1], [30, 7], 4, 16)
    fp8 = torch.float8_e4m3fn
    for q, kv in ((fp8, torch.bfloat16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        with pytest.raises(ValueError, match=f"kv_data_type={kv} and q_data_type={q}"):
            planned(problem, q_data_type=q, kv_data_type=kv)
    with pytest.raises(ValueError, match=r"q_data_type=torch\.int8 is not served"):
        planned(problem, q_data_type=torch.int8, kv_data_type=torch.int8)


# --- FlashInfer's newer arguments ---


def dense(problem, device=None):
    """The same lengths as block tables, whose unused entries are -1."""
    pages = -(-problem.lens // problem.page_size)
    table = torch.where(torch.arange(problem.table.size(1)) < pages[:, None], problem.table, -1).to(INT32)
    return dict(cum_seq_lens_q=problem.batch.qo_indptr("cpu"), block_tables=table, seq_lens=problem.lens)


CSR = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


def split_plan(problem, **changes):
    """Index vectors and other arguments of a plan."""
    plan = problem.plan(**changes)
    return {name: plan.pop(name) for name in CSR}, plan


@pytest.mark.parametrize("form", ["csr", "dense", "dual", "flat"])
@pytest.mark.parametrize("graphs", [False, True])
def test_lengths_come_in_many_forms(form, graphs):
    problem = make([1, 3, 0, 2], [30, 90, 0, 16], 4, 16)
    want = planned(problem).run(*problem.halves)
    vectors, rest = split_plan(problem)
    tables = dense(problem)
    metadata = {
        "csr": lambda: mla.MLAPlanMetadata.csr(**vectors),
        "dense": lambda: mla.MLAPlanMetadata.dense(**tables, max_q_len=3),
        "dual": lambda: mla.MLAPlanMetadata.dual(**vectors, **tables),
    }
    given = tables if form == "flat" else dict(metadata=metadata[form]())
    sizes = dict(qo_indptr=5, kv_indptr=5, kv_indices=40, kv_len_arr=4) if graphs else {}
    buffers = {name: torch.zeros(size, dtype=INT32) for name, size in sizes.items()}
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8), graphs, **buffers)
    wrapper.plan(**given, **rest)
    assert_bitwise(wrapper.run(*problem.halves), want)


def test_metadata_of_another_class_with_the_same_fields():
    problem = make([1], [30], 4, 16)
    vectors, rest = split_plan(problem)
    other = types.SimpleNamespace(**vectors, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None)
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8))
    wrapper.plan(metadata=other, **rest)
    assert_bitwise(wrapper.run(*problem.halves), planned(problem).run(*problem.halves))


def test_lengths_that_contradict_each_other_are_refused():
    problem = make([1, 2], [30, 7], 4, 16)
    vectors, rest = split_plan(problem)
    tables = dense(problem)
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.uint8))

    def refused(words, error=ValueError, **given):
        with pytest.raises(error, match=words):
            wrapper.plan(**given, **rest)

    metadata = mla.MLAPlanMetadata.csr(**vectors)
    refused("metadata and kv_indices are given", metadata=metadata, kv_indices=vectors["kv_indices"])
    refused("qo_indptr and cum_seq_lens_q are given", **vectors, **tables)
    refused("metadata is dict", TypeError, metadata=vectors)
    refused("plan.. needs qo_indptr", TypeError)
    refused(
        "seq_lens: missing", TypeError, cum_seq_lens_q=tables["cum_seq_lens_q"], block_tables=tables["block_tables"]
    )
    refused("kv_len_arr: missing", TypeError, **{**vectors, "kv_len_arr": None})
    refused("max_q_len=1, but a request has 2 rows", **tables, max_q_len=1)
    refused(r"seq_lens\[1\]=999, but the", **{**tables, "seq_lens": torch.tensor([30, 999])})
    refused("block_tables is", **{**tables, "block_tables": tables["block_tables"][:1]})
    refused("block_tables holds the page number -1", **{**tables, "block_tables": tables["block_tables"] * 0 - 1})
    other = {**tables, "seq_lens": torch.tensor([30, 6], dtype=INT32)}
    refused("kv_len_arr and seq_lens of the metadata differ", metadata=mla.MLAPlanMetadata.dual(**vectors, **other))
    with pytest.raises(TypeError, match=r"plan\(\) needs page_size, q_data_type"):
        wrapper.plan(**vectors, **{**rest, "page_size": None, "q_data_type": None})


def test_queries_and_cache_in_one_tensor_or_in_pairs():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper = planned(problem, query_layout="packed", kv_cache_layout="split", enable_pdl=True)
    q_nope, q_pe, ckv, kpe = problem.halves
    want = wrapper.run(q_nope, q_pe, ckv, kpe)
    for query in (problem.q, (q_nope, q_pe), ((q_nope, q_pe), problem.q)):
        for kv_cache in (problem.cache, (ckv, kpe), (problem.cache, (ckv, kpe))):
            assert_bitwise(wrapper.run(query=query, kv_cache=kv_cache), want)
    assert_bitwise(wrapper.run(q_nope, q_pe, kv_cache=problem.cache), want)
    with pytest.raises(TypeError, match="query and q_pe are given"):
        wrapper.run(query=problem.q, q_pe=q_pe, kv_cache=problem.cache)
    with pytest.raises(TypeError, match="kv_cache is list"):
        wrapper.run(query=problem.q, kv_cache=[])
    with pytest.raises(ValueError, match=r"query has shape \(3, 4, 512\)"):
        wrapper.run(query=q_nope, kv_cache=problem.cache)
    with pytest.raises(TypeError, match="q_nope is NoneType"):
        wrapper.run(kv_cache=problem.cache)


@DEVICES
def test_sinks(device):
    problem = make([1, 2], [30, 7], 4, 16, device)
    sinks = torch.linspace(-1, 3, 4, device=device)
    wrapper = planned(problem, use_sinks=True)
    out, lse = wrapper.run(*problem.halves, sinks=sinks, return_lse=True)
    want, want_lse, base = problem.expected(True, sinks=sinks)
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)
    with pytest.raises(ValueError, match="use_sinks=True is planned"):
        wrapper.run(*problem.halves)


@DEVICES
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("heads", [4, 64])
def test_scales_of_both_products(device, as_tensor, heads):
    problem = make([1, 2], [30, 7], heads, 16, device)
    wrapper = planned(problem, scale_mode="bmm-tensor" if as_tensor else "bmm-scalar", sm_scale=7.0)
    scales = dict(bmm1_scale=SCALE * 0.5, bmm2_scale=2.0)
    given = {name: torch.tensor([x], device=device) if as_tensor else x for name, x in scales.items()}
    want, _, base = problem.expected(True, descale=0.5, v_descale=2.0)
    assert_close(wrapper.run(*problem.halves, **given), want, base)
    with pytest.raises(ValueError, match="pass bmm1_scale and bmm2_scale"):
        wrapper.run(*problem.halves)
    with pytest.raises(ValueError, match="pass one kind"):
        wrapper.run(*problem.halves, **given, ckv_scale=1.0)


def test_what_a_plan_says_of_its_results_holds():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper = planned(problem, lse_mode="basee", output_dtype=torch.float32)
    out, lse = wrapper.run(*problem.halves, return_lse=True, return_lse_base_on_e=True)
    assert out.dtype == torch.float32 and wrapper.run(*problem.halves).dtype == torch.float32
    torch.testing.assert_close(lse, planned(problem).run(*problem.halves, return_lse=True)[1] * math.log(2))
    with pytest.raises(ValueError, match="lse_mode='basee' is planned"):
        wrapper.run(*problem.halves, return_lse=True)
    with pytest.raises(ValueError, match=r"out has dtype torch\.bfloat16, but output_dtype=torch\.float32"):
        wrapper.run(*problem.halves, out=torch.empty(3, 4, 512, dtype=torch.bfloat16))
    wrapper = planned(problem, kv_data_type=torch.float8_e4m3fn, scale_mode="kv-per-tensor")
    q_nope, q_pe, *cache = problem.halves
    with pytest.raises(ValueError, match="pass ckv_scale and kpe_scale"):
        wrapper.run(q_nope, q_pe, *(x.nan_to_num().to(torch.float8_e4m3fn) for x in cache))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(skip_softmax=True), NotImplementedError, "skip_softmax=True"),
        (dict(output_scale="per-tensor"), NotImplementedError, "output_scale='per-tensor'"),
        (dict(output_scale="row"), ValueError, "output_scale='row' is unknown"),
        (dict(lse_mode="base10"), ValueError, "lse_mode='base10' is unknown"),
        (dict(scale_mode="bmm"), ValueError, "scale_mode='bmm' is unknown"),
        (dict(query_layout="NHD"), ValueError, "query_layout='NHD' is unknown"),
        (dict(kv_cache_layout="NHD"), ValueError, "kv_cache_layout='NHD' is unknown"),
        (dict(output_dtype=torch.int8), ValueError, r"output_dtype=torch\.int8"),
        (dict(use_sinks="yes"), TypeError, "use_sinks"),
    ],
)
def test_what_a_plan_refuses(change, error, words):
    with pytest.raises(error, match=words):
        planned(make([1, 1], [30, 7], 4, 16), **change)


def test_runs_do_not_skip_keys():
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper = planned(problem)
    with pytest.raises(NotImplementedError, match=r"skip_softmax_threshold_scale_factor=5\.0"):
        wrapper.run(*problem.halves, skip_softmax_threshold_scale_factor=5.0)
    wrapper.run(*problem.halves, skip_softmax_threshold_scale_factor=0.0)
