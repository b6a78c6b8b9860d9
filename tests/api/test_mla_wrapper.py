"""BatchMLAPagedAttentionWrapper: values, plans and CUDA graphs. What it refuses: test_mla_refusals.py."""

from __future__ import annotations

import copy
import inspect
import math
import types

import pytest
import torch
from captures import capture
from compare import assert_bitwise
from mla_problems import DEVICES, PLACES, SCALE, Problem, apart, buffers, make, nan_like, planned, wrapper_for
from torch._dynamo.backends.registry import lookup_backend

import cutlass_kernels as ck
from cutlass_kernels import mla

INT32, E4M3 = torch.int32, torch.float8_e4m3fn


def check(problem: Problem, backend: str, causal: bool = True, separate: bool = False, **plan) -> None:
    wrapper = planned(problem, backend, causal=causal, **plan)
    q_nope, q_pe, ckv, kpe = (apart(x) if separate else x for x in problem.halves)
    out = nan_like(q_nope.shape, q_nope)
    result, lse = wrapper.run(q_nope, q_pe, ckv, kpe, out=out, return_lse=True)
    assert result is out and lse.shape == q_nope.shape[:2]
    problem.check(out, lse, causal)


@PLACES
@pytest.mark.parametrize("page_size", [8, 16, 64, 128])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("rows", [1, 3])
def test_decode_steps(place, page_size, heads, rows):
    check(make([rows] * 4, [300, rows, 64, 0], heads, page_size, place[0]), place[1])


@PLACES
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("on", ["cpu", None], ids=["CPU lengths", "lengths on the device"])
def test_appends_of_any_lengths(place, causal, on):
    check(make([5, 0, 1, 40], [80, 33, 0, 40], 16, 16, place[0]), place[1], causal, device=on)


@PLACES
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("separate", [False, True], ids=["one cache", "two caches"])
def test_caches_in_two_tensors_and_pages_of_any_size(place, page_size, separate):
    backend = "auto" if place[1] == "fa3" and page_size % 8 else place[1]  # then fa2
    check(make([1, 2, 3], [70, 0, 9], 16, page_size, place[0]), backend, separate=separate)


@DEVICES
def test_an_empty_batch_and_empty_requests(device):
    wrapper = wrapper_for(device)
    empty, none = torch.zeros(1, dtype=INT32, device=device), torch.zeros(0, dtype=INT32, device=device)
    sizes = (16, 512, 64, 64, True, SCALE, torch.bfloat16, torch.bfloat16)
    wrapper.plan(empty, empty, none, none, *sizes)
    cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16, device=device)
    q = torch.zeros(0, 16, 576, dtype=torch.bfloat16, device=device)
    parts = [x for whole in (q, cache) for x in whole.split([512, 64], -1)]
    out, lse = wrapper.run(*parts, return_lse=True)
    assert out.shape == (0, 16, 512) and lse.shape == (0, 16)
    check(make([0, 0, 2], [0, 5, 0], 4, 16, device), "auto")


def test_a_cache_of_no_position():
    problem = make([1, 2], [30, 7], 4, 16)
    q_nope, q_pe, ckv, kpe = problem.halves
    wrapper = planned(problem, head_dim_kpe=0)
    out = wrapper.run(q_nope, q_pe[..., :0], ckv, kpe[..., :0])
    keys = ckv.unsqueeze(2)
    lens = dict(cu_seqlens_q=problem.batch.qo_indptr("cpu"), page_table=problem.table, seqused_k=problem.lens)
    assert_bitwise(out, ck.attention(q_nope, keys, keys, causal=True, sm_scale=SCALE, **lens))


def test_lse_in_base_e_and_into_a_tensor():
    """Whether or not it is returned. Rows behind the last request are not written."""
    problem = make([2, 1], [30, 7], 4, 16)
    wrapper = planned(problem)
    out, lse = wrapper.run(*problem.halves, return_lse=True)
    place = torch.full((4, 3), torch.nan).t()
    assert_bitwise(wrapper.run(*problem.halves, lse=place), out)
    assert_bitwise(place.contiguous(), lse)
    place = torch.empty(3, 4)
    _, natural = wrapper.run(*problem.halves, lse=place, return_lse=True, return_lse_base_on_e=True)
    assert natural is place
    torch.testing.assert_close(natural, lse * math.log(2.0))
    q_nope, q_pe, ckv, kpe = problem.halves
    longer = [torch.cat([x, torch.zeros_like(x)]) for x in (q_nope, q_pe)]
    places = torch.full((6, 4, 512), 7.0).to(q_nope.dtype), torch.full((6, 4), 7.0)
    wrapper.run(*longer, ckv, kpe, out=places[0], lse=places[1])
    for place, first in zip(places, (out, lse)):
        assert_bitwise(place[:3], first)
        assert (place[3:] == 7).all()


def test_plans_keep_what_lengths_were():
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper, plan = wrapper_for("cpu"), problem.plan()
    wrapper.plan(**plan)
    before = wrapper.run(*problem.halves)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"):
        plan[name].zero_()
    assert_bitwise(wrapper.run(*problem.halves), before)


def test_a_later_plan_has_its_own_options():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper, fresh = wrapper_for("cpu"), wrapper_for("cpu")
    wrapper.plan(**problem.plan())
    for each in (wrapper, fresh):
        each.plan(**problem.plan(causal=False, sm_scale=0.5))
    assert_bitwise(wrapper.run(*problem.halves), fresh.run(*problem.halves))


@DEVICES
@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.5, 0.25), (0.25, 0.5)])
@pytest.mark.parametrize("heads", [4, 64])
def test_fp8_caches(device, scales, heads):
    problem = make([1, 3], [50, 9], heads, 16, device)
    cache = problem.cache.float().nan_to_num()
    ckv, kpe = cache.split([512, 64], -1)
    ckv8, kpe8 = (x.div(scale).to(E4M3) for x, scale in zip((ckv, kpe), scales))
    wrapper = planned(problem, kv_data_type=E4M3)
    q_nope, q_pe, *_ = problem.halves
    out = wrapper.run(q_nope, q_pe, ckv8, kpe8, ckv_scale=scales[0], kpe_scale=scales[1])
    known = torch.cat([x.float() * scale for x, scale in zip((ckv8, kpe8), scales)], -1).to(torch.bfloat16)
    want = planned(problem).run(q_nope, q_pe, *known.split([512, 64], -1))
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)


def test_a_step_that_is_compiled():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper = planned(problem)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    step = torch.compile(lambda *x: wrapper.run(*x), backend=backend, fullgraph=True)
    parts = [apart(x) for x in problem.halves]
    ckv, kpe = (torch.cat([x] * 8) for x in parts[2:])
    for lens in ([30, 7], [50, 9], [120, 64], [3, 200]):  # later plans need no new graph
        wrapper.plan(**make([1, 2], lens, 4, 16).plan(kv_indices=torch.arange(40, dtype=INT32) % ckv.size(0)))
        call = (*parts[:2], ckv, kpe)
        assert_bitwise(step(*call), wrapper.run(*call))
    assert len(graphs) == 1
    other = copy.copy(wrapper)
    other.plan(**make([1, 2], [5, 6], 4, 16).plan(kv_indices=torch.arange(40, dtype=INT32) % ckv.size(0)))
    assert_bitwise(torch.compile(other.run, backend="aot_eager")(*call), other.run(*call))


# --- CUDA graphs ---


@pytest.mark.parametrize("on", ["cpu", None], ids=["CPU lengths", "lengths on the device"])
def test_plans_of_a_wrapper_for_graphs_go_to_its_buffers(on):
    given = buffers(3, 40)
    wrapper = wrapper_for("cpu", use_cuda_graph=True, **given)
    for lens in ([300, 7, 64], [0, 100, 3]):
        problem = make([1, 1, 1], lens, 4, 16)
        plan = problem.plan(device=on)
        wrapper.plan(**plan)
        assert wrapper._kv_indices_buf is given["kv_indices"]
        assert given["kv_len_arr"].tolist() == lens
        problem.check(wrapper.run(*problem.halves))


def test_the_planner_of_the_compiled_module_takes_lengths():
    given = buffers(2, 40)
    wrapper = wrapper_for("cpu", use_cuda_graph=True, **given)
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper._cached_module.plan(None, None, None, given["qo_indptr"], given["kv_indptr"], given["kv_len_arr"])
    wrapper.plan(**make([1, 1], [30, 7], 4, 16).plan())
    problem = make([1, 1], [9, 100], 4, 16)
    given["kv_indices"][: problem.indices.numel()].copy_(problem.indices)  # as SGLang does
    workspaces, plan = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, None), problem.plan()
    lengths = (plan["qo_indptr"], plan["kv_indptr"], plan["kv_len_arr"])
    wrapper._cached_module.plan(*workspaces, *lengths, 4, 512, True)
    problem.check(wrapper.run(*problem.halves))


def test_what_all_wrappers_have():
    """A representation, the size of workspaces, and new ones."""
    given = buffers(2, 40)
    for wrapper in (wrapper_for("cpu"), wrapper_for("cpu", use_cuda_graph=True, **given)):
        problem = make([3, 1], [30, 7], 4, 16)
        assert "not planned" in repr(wrapper)
        assert wrapper.workspace_size(**problem.plan()) == (16, 16)
        assert "not planned" in repr(wrapper) and not any(x.any() for x in given.values())
        with pytest.raises(TypeError, match="plan\\(\\) needs num_heads"):
            wrapper.workspace_size(**problem.plan() | {"num_heads": None})
        wrapper.plan(**problem.plan())
        for fact in ("2 requests, 4 rows", "num_heads=4", "head_dim_kpe=64", "page_size=16", "causal=", "device='cpu'"):
            assert fact in repr(wrapper)
        graph = wrapper.is_cuda_graph_enabled
        assert graph == ("use_cuda_graph=True" in repr(wrapper))
        want = wrapper.run(*problem.halves)
        workspace = torch.empty(32, dtype=torch.uint8)
        with pytest.raises(ValueError, match="float_workspace_buffer must be 16-byte aligned"):
            wrapper.reset_workspace_buffer(workspace[1:])
        assert_bitwise(wrapper.run(*problem.halves), want)
        wrapper.reset_workspace_buffer(workspace)
        assert wrapper._float_workspace_buffer is workspace
        with pytest.raises(RuntimeError, match="has no plan"):
            wrapper.run(*problem.halves)
        if graph:  # captured runs still count on the first plan
            with pytest.raises(ValueError, match="the first plan of this wrapper had at most 3"):
                wrapper.plan(**make([4, 1], [30, 7], 4, 16).plan())
        wrapper.plan(**problem.plan())
        assert_bitwise(wrapper.run(*problem.halves), want)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [pytest.param("fa3", marks=pytest.mark.hopper), "fa2"])
@pytest.mark.parametrize("on", ["cpu", None], ids=["CPU lengths", "lengths on the device"])
def test_a_captured_run_follows_later_plans(on, backend):
    device = "cuda:0"
    wrapper = wrapper_for(device, backend, use_cuda_graph=True, **buffers(3, 256, device))
    first = make([1, 1, 1], [1000, 7, 64], 16, 64, device)
    cache = torch.zeros(256, 64, 576, dtype=torch.bfloat16, device=device)
    q = first.q.clone()
    parts = [x for whole in (q, cache) for x in whole.split([512, 64], -1)]
    wrapper.plan(**first.plan(device=on))
    graph, (out, lse) = capture(lambda: wrapper.run(*parts, return_lse=True))
    for lens in ([1000, 7, 64], [3, 2000, 65], [0, 1, 3000]):
        problem = make([1, 1, 1], lens, 16, 64, device)
        q.copy_(problem.q)
        cache[: problem.cache.size(0)].copy_(problem.cache)
        wrapper.plan(**problem.plan(device=on))
        graph.replay()
        problem.check(out, lse)


# --- arguments, the newer ones of FlashInfer too ---


def test_names_and_positions_are_those_of_flashinfer():
    made = mla.BatchMLAPagedAttentionWrapper
    names = [list(inspect.signature(f).parameters)[1:] for f in (made.__init__, made.plan, made.run)]
    assert names[0] == ["float_workspace_buffer", "use_cuda_graph", *buffers(1, 1), "backend"]
    plan = ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe"]
    plan += ["page_size", "causal", "sm_scale", "q_data_type", "kv_data_type", "use_profiler"]
    newer = ["metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len", "query_layout", "kv_cache_layout"]
    newer += ["lse_mode", "output_dtype", "output_scale", "scale_mode", "skip_softmax", "enable_pdl", "use_sinks"]
    assert names[1] == plan + newer
    run = ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse", "return_lse", "profiler_buffer", "kv_len"]
    run += ["page_table", "return_lse_base_on_e", "o_scale", "query", "kv_cache", "ckv_scale", "ckv_scale_arr"]
    run += ["kpe_scale", "sinks", "skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"]
    assert names[2] == run


@pytest.mark.parametrize("form", ["csr", "dense", "dual", "flat"])
@pytest.mark.parametrize("graphs", [False, True])
def test_lengths_come_in_many_forms(form, graphs):
    problem = make([1, 3, 0, 2], [30, 90, 0, 16], 4, 16)
    want = planned(problem).run(*problem.halves)
    vectors, rest = problem.split_plan()
    tables = problem.dense()
    metadata = {
        "csr": lambda: mla.MLAPlanMetadata.csr(**vectors),
        "dense": lambda: mla.MLAPlanMetadata.dense(**tables, max_q_len=3),
        "dual": lambda: mla.MLAPlanMetadata.dual(**vectors, **tables),
    }
    given = tables if form == "flat" else dict(metadata=metadata[form]())
    wrapper = wrapper_for(use_cuda_graph=graphs, **(buffers(4, 40) if graphs else {}))
    wrapper.plan(**given, **rest)
    assert_bitwise(wrapper.run(*problem.halves), want)


def test_metadata_of_another_class_with_the_same_fields():
    problem = make([1], [30], 4, 16)
    vectors, rest = problem.split_plan()
    other = types.SimpleNamespace(**vectors, cum_seq_lens_q=None, block_tables=None, seq_lens=None, max_q_len=None)
    wrapper = wrapper_for()
    wrapper.plan(metadata=other, **rest)
    assert_bitwise(wrapper.run(*problem.halves), planned(problem).run(*problem.halves))


def test_queries_and_cache_in_one_tensor_or_in_pairs():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper = planned(problem, query_layout="packed", kv_cache_layout="split", enable_pdl=True)
    q_nope, q_pe, ckv, kpe = problem.halves
    want = wrapper.run(q_nope, q_pe, ckv, kpe)
    for query in (problem.q, (q_nope, q_pe), ((q_nope, q_pe), problem.q)):
        for kv_cache in (problem.cache, (ckv, kpe), (problem.cache, (ckv, kpe))):
            assert_bitwise(wrapper.run(query=query, kv_cache=kv_cache), want)
    assert_bitwise(wrapper.run(q_nope, q_pe, kv_cache=problem.cache), want)


@DEVICES
def test_sinks(device):
    problem = make([1, 2], [30, 7], 4, 16, device)
    sinks = torch.linspace(-1, 3, 4, device=device)
    wrapper = planned(problem, use_sinks=True)
    out, lse = wrapper.run(*problem.halves, sinks=sinks, return_lse=True)
    problem.check(out, lse, sinks=sinks)


@DEVICES
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("heads", [4, 64])
def test_scales_of_both_products(device, as_tensor, heads):
    problem = make([1, 2], [30, 7], heads, 16, device)
    wrapper = planned(problem, scale_mode="bmm-tensor" if as_tensor else "bmm-scalar", sm_scale=7.0)
    scales = dict(bmm1_scale=SCALE * 0.5, bmm2_scale=2.0)
    given = {name: torch.tensor([x], device=device) if as_tensor else x for name, x in scales.items()}
    problem.check(wrapper.run(*problem.halves, **given), descale=0.5, v_descale=2.0)


def test_what_a_plan_says_of_its_results_holds():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper = planned(problem, lse_mode="basee", output_dtype=torch.float32)
    out, lse = wrapper.run(*problem.halves, return_lse=True, return_lse_base_on_e=True)
    assert out.dtype == torch.float32 and wrapper.run(*problem.halves).dtype == torch.float32
    torch.testing.assert_close(lse, planned(problem).run(*problem.halves, return_lse=True)[1] * math.log(2))


def test_a_bound_of_query_lengths_comes_with_either_form_of_lengths():
    problem = make([1, 3], [30, 9], 4, 16)
    want = planned(problem).run(*problem.halves)
    assert_bitwise(planned(problem, max_q_len=8).run(*problem.halves), want)
    vectors, plan = problem.split_plan()
    wrapper = wrapper_for()
    wrapper.plan(metadata=mla.MLAPlanMetadata(*vectors.values(), max_q_len=8), **plan)
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
