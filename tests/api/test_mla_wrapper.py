"""BatchMLAPagedAttentionWrapper and the plan-free function beside it."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from mla_problems import DEVICES, PLACES, SCALE, Problem, apart, make, nan_like
from problems import indptr
from torch._dynamo.backends.registry import lookup_backend

import cutlass_kernels as ck
from cutlass_kernels import mla
from cutlass_kernels._core.autograd import NO_BACKWARD

INT32 = torch.int32


def wrapper_for(device: str, backend: str = "auto", **options) -> mla.BatchMLAPagedAttentionWrapper:
    return mla.BatchMLAPagedAttentionWrapper(
        torch.empty(1024, dtype=torch.uint8, device=device), backend=backend, **options
    )


def check(problem: Problem, backend: str, causal: bool = True, separate: bool = False, **plan) -> None:
    wrapper = wrapper_for(problem.cache.device, backend)
    wrapper.plan(**problem.plan(causal, **plan))
    q_nope, q_pe, ckv, kpe = (apart(x) if separate else x for x in problem.halves)
    out = nan_like(q_nope.shape, q_nope)
    result, lse = wrapper.run(q_nope, q_pe, ckv, kpe, out=out, return_lse=True)
    assert result is out and lse.shape == q_nope.shape[:2]
    want, want_lse, base = problem.expected(causal)
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)


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
    wrapper = wrapper_for("cpu")
    wrapper.plan(**problem.plan(head_dim_kpe=0))
    out = wrapper.run(q_nope, q_pe[..., :0], ckv, kpe[..., :0])
    keys = ckv.unsqueeze(2)
    lens = dict(cu_seqlens_q=problem.batch.qo_indptr("cpu"), page_table=problem.table, seqused_k=problem.lens)
    assert_bitwise(out, ck.attention(q_nope, keys, keys, causal=True, sm_scale=SCALE, **lens))


def test_lse_in_base_e_and_into_a_tensor():
    problem = make([2, 1], [30, 7], 4, 16)
    wrapper = wrapper_for("cpu")
    wrapper.plan(**problem.plan())
    out, lse = wrapper.run(*problem.halves, return_lse=True)
    place = torch.empty(3, 4)
    _, natural = wrapper.run(*problem.halves, lse=place, return_lse=True, return_lse_base_on_e=True)
    assert natural is place
    torch.testing.assert_close(natural, lse * math.log(2.0))
    assert_bitwise(wrapper.run(*problem.halves), out)
    with pytest.raises(ValueError, match="lse has shape"):
        wrapper.run(*problem.halves, lse=torch.empty(3, 5), return_lse=True)


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
    ckv8, kpe8 = (x.div(scale).to(torch.float8_e4m3fn) for x, scale in zip((ckv, kpe), scales))
    wrapper = wrapper_for(device)
    wrapper.plan(**problem.plan(kv_data_type=torch.float8_e4m3fn))
    q_nope, q_pe, *_ = problem.halves
    out = wrapper.run(q_nope, q_pe, ckv8, kpe8, ckv_scale=scales[0], kpe_scale=scales[1])
    known = torch.cat([x.float() * scale for x, scale in zip((ckv8, kpe8), scales)], -1).to(torch.bfloat16)
    exact = wrapper_for(device)
    exact.plan(**problem.plan())
    torch.testing.assert_close(out, exact.run(q_nope, q_pe, *known.split([512, 64], -1)), atol=1e-2, rtol=1e-2)


def test_a_step_that_is_compiled():
    problem = make([1, 2], [30, 7], 4, 16)
    wrapper = wrapper_for("cpu")
    wrapper.plan(**problem.plan())
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


def test_there_is_no_backward():
    problem = make([1], [5], 2, 16)
    wrapper = wrapper_for("cpu")
    wrapper.plan(**problem.plan())
    q_nope, q_pe, ckv, kpe = problem.halves
    out = wrapper.run(q_nope.detach().requires_grad_(), q_pe, ckv, kpe)
    with pytest.raises(RuntimeError, match=NO_BACKWARD[:20]):
        out.sum().backward()


# --- CUDA graphs ---


def buffers(batch: int, pages: int, device: str) -> dict[str, torch.Tensor]:
    sizes = dict(qo_indptr=batch + 1, kv_indptr=batch + 1, kv_indices=pages, kv_len_arr=batch)
    return {name: torch.zeros(size, dtype=INT32, device=device) for name, size in sizes.items()}


@pytest.mark.parametrize("on", ["cpu", None], ids=["CPU lengths", "lengths on the device"])
def test_plans_of_a_wrapper_for_graphs_go_to_its_buffers(on):
    given = buffers(3, 40, "cpu")
    wrapper = wrapper_for("cpu", use_cuda_graph=True, **given)
    for lens in ([300, 7, 64], [0, 100, 3]):
        problem = make([1, 1, 1], lens, 4, 16)
        plan = problem.plan(device=on)
        wrapper.plan(**plan)
        assert wrapper._kv_indices_buf is given["kv_indices"]
        assert given["kv_len_arr"].tolist() == lens
        want, _, base = problem.expected(True)
        assert_close(wrapper.run(*problem.halves), want, base)


def test_what_does_not_fit_the_buffers_is_refused():
    wrapper = wrapper_for("cpu", use_cuda_graph=True, **buffers(2, 4, "cpu"))
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper.plan(**problem.plan())
    with pytest.raises(ValueError, match="first plan of this wrapper had at most 1"):
        wrapper.plan(**make([1, 2], [30, 7], 4, 16).plan())
    with pytest.raises(ValueError, match="kv_indices has 5 pages"):
        wrapper.plan(**make([1, 1], [60, 7], 4, 16).plan())
    with pytest.raises(ValueError, match="batch_size=2, but the plan has 1"):
        wrapper.plan(**make([1], [30], 4, 16).plan())
    assert_bitwise(wrapper.run(*problem.halves), wrapper.run(*problem.halves))
    with pytest.raises(ValueError, match="needs kv_len_arr"):
        wrapper_for("cpu", use_cuda_graph=True, **{**buffers(2, 4, "cpu"), "kv_len_arr": None})
    with pytest.raises(ValueError, match="kv_indptr has 5 elements"):
        wrapper_for("cpu", use_cuda_graph=True, **{**buffers(2, 4, "cpu"), "kv_indptr": torch.zeros(5, dtype=INT32)})


def test_the_planner_of_the_compiled_module_takes_lengths():
    given = buffers(2, 40, "cpu")
    wrapper = wrapper_for("cpu", use_cuda_graph=True, **given)
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper._cached_module.plan(None, None, None, given["qo_indptr"], given["kv_indptr"], given["kv_len_arr"])
    wrapper.plan(**make([1, 1], [30, 7], 4, 16).plan())
    problem = make([1, 1], [9, 100], 4, 16)
    given["kv_indices"][: problem.indices.numel()].copy_(problem.indices)  # as SGLang does
    sizes = (4, 512, True)
    workspaces = (wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, None)
    plan = problem.plan()
    lengths = (plan["qo_indptr"], plan["kv_indptr"], plan["kv_len_arr"])
    wrapper._cached_module.plan(*workspaces, *lengths, *sizes)
    want, _, base = problem.expected(True)
    assert_close(wrapper.run(*problem.halves), want, base)


def test_what_all_wrappers_have():
    """A representation, the size of workspaces, and new ones."""
    given = buffers(2, 40, "cpu")
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
    wrapper.run(*parts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wrapper.run(*parts, return_lse=True)
    for lens in ([1000, 7, 64], [3, 2000, 65], [0, 1, 3000]):
        problem = make([1, 1, 1], lens, 16, 64, device)
        q.copy_(problem.q)
        cache[: problem.cache.size(0)].copy_(problem.cache)
        wrapper.plan(**problem.plan(device=on))
        graph.replay()
        want, want_lse, base = problem.expected(True)
        assert_close(out, want, base)
        assert_lse_close(lse, want_lse)


# --- arguments ---


def test_names_and_positions_are_those_of_flashinfer():
    names = [list(inspect.signature(f).parameters)[1:] for f in (wrapper_for_class.__init__, wrapper_for_class.plan)]
    assert names[0] == ["float_workspace_buffer", "use_cuda_graph", *buffers(1, 1, "cpu"), "backend"]
    plan = ["qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr", "num_heads", "head_dim_ckv", "head_dim_kpe"]
    plan += ["page_size", "causal", "sm_scale", "q_data_type", "kv_data_type", "use_profiler"]
    newer = ["metadata", "cum_seq_lens_q", "block_tables", "seq_lens", "max_q_len", "query_layout", "kv_cache_layout"]
    newer += ["lse_mode", "output_dtype", "output_scale", "scale_mode", "skip_softmax", "enable_pdl", "use_sinks"]
    assert names[1] == plan + newer
    run = ["q_nope", "q_pe", "ckv_cache", "kpe_cache", "out", "lse", "return_lse", "profiler_buffer", "kv_len"]
    run += ["page_table", "return_lse_base_on_e", "o_scale", "query", "kv_cache", "ckv_scale", "ckv_scale_arr"]
    run += ["kpe_scale", "sinks", "skip_softmax_threshold_scale_factor", "bmm1_scale", "bmm2_scale"]
    assert list(inspect.signature(wrapper_for_class.run).parameters)[1:] == run


wrapper_for_class = mla.BatchMLAPagedAttentionWrapper


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(num_heads=0), ValueError, "num_heads=0"),
        (dict(num_heads=1.5), TypeError, "num_heads"),
        (dict(head_dim_ckv=0), ValueError, "head_dim_ckv=0"),
        (dict(head_dim_kpe=-1), ValueError, "head_dim_kpe=-1"),
        (dict(page_size=0), ValueError, "page_size=0"),
        (dict(kv_indptr=indptr([1, 1], "cpu")[:2]), ValueError, "kv_indptr has 2 elements"),
        (dict(kv_indptr=torch.tensor([0, 2, 9], dtype=INT32)), ValueError, "kv_indptr ends at 9"),
        (dict(kv_len_arr=torch.tensor([30], dtype=INT32)), ValueError, "kv_len_arr has 1 elements"),
        (dict(kv_len_arr=torch.tensor([30, 17], dtype=INT32)), ValueError, r"kv_len_arr\[1\]=17, but the 1 pages"),
        (dict(kv_len_arr=torch.tensor([30, -1], dtype=INT32)), ValueError, r"kv_len_arr\[1\]=-1"),
        (dict(qo_indptr=torch.tensor([0, 2, 1], dtype=INT32)), RuntimeError, "qo_indptr decreases"),
        (dict(qo_indptr=[0, 1, 2]), TypeError, "qo_indptr is list"),
        (dict(kv_indices=torch.zeros(3)), ValueError, "kv_indices has shape"),
        (dict(causal=None), TypeError, "causal"),
        (dict(use_profiler=True), NotImplementedError, "use_profiler=True"),
    ],
)
def test_wrong_plans_are_refused_and_leave_the_last_one(change, error, words):
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper = wrapper_for("cpu")
    wrapper.plan(**problem.plan())
    before = wrapper.run(*problem.halves)
    with pytest.raises(error, match=words):
        wrapper.plan(**{**problem.plan(), **change})
    assert_bitwise(wrapper.run(*problem.halves), before)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(q_nope=torch.zeros(2, 3, 512).bfloat16()), ValueError, "q_nope has shape"),
        (dict(q_nope=torch.zeros(2, 4, 512)), ValueError, "q_nope has dtype"),
        (dict(q_pe=torch.zeros(2, 4, 32).bfloat16()), ValueError, "q_pe has shape"),
        (dict(q_pe=torch.zeros(1, 4, 64).bfloat16()), ValueError, "q_rope has shape"),
        (dict(q_pe=None), TypeError, "q_pe is NoneType"),
        (dict(ckv_cache=torch.zeros(9, 8, 512).bfloat16()), ValueError, "ckv_cache has shape"),
        (dict(kpe_cache=torch.zeros(9, 16, 1, 64).bfloat16()), ValueError, "kpe_cache has shape"),
        (dict(kpe_cache=torch.zeros(9, 16, 64).half()), ValueError, "kpe_cache has dtype"),
        (dict(kpe_cache=torch.zeros(900, 16, 64).bfloat16()), ValueError, "k_rope has shape"),
        (dict(out=torch.zeros(2, 4, 576).bfloat16()), ValueError, "out has shape"),
        (dict(kv_len=torch.zeros(2)), NotImplementedError, "kv_len"),
        (dict(page_table=torch.zeros(2, 2)), NotImplementedError, "page_table"),
        (dict(o_scale=2.0), NotImplementedError, "o_scale=2.0"),
        (dict(profiler_buffer=torch.zeros(2)), NotImplementedError, "profiler_buffer"),
        (dict(ckv_scale_arr=torch.zeros(2)), NotImplementedError, "ckv_scale_arr"),
        (dict(ckv_scale=2.0), ValueError, "ckv_scale and kpe_scale are for fp8 caches"),
    ],
)
def test_wrong_tensors_are_refused(change, error, words):
    problem = make([1, 1], [30, 7], 4, 16)
    wrapper = wrapper_for("cpu")
    with pytest.raises(RuntimeError, match="no plan"):
        wrapper.run(*problem.halves)
    wrapper.plan(**problem.plan())
    given = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), problem.halves))
    with pytest.raises(error, match=words):
        wrapper.run(**{**given, **change})


def test_wrong_scales_and_backends_are_refused():
    problem = make([1], [5], 2, 16)
    wrapper = wrapper_for("cpu")
    fp8 = torch.float8_e4m3fn
    wrapper.plan(**problem.plan(q_data_type=fp8, kv_data_type=fp8))
    parts = [x.nan_to_num().to(fp8) for x in problem.halves]
    with pytest.raises(ValueError, match="differ, which fp8 queries"):
        wrapper.run(*parts, ckv_scale=1.0, kpe_scale=2.0)
    with pytest.raises(ValueError, match="kpe_scale=0 must be finite and positive"):
        wrapper.run(*parts, ckv_scale=1.0, kpe_scale=0)
    assert wrapper.run(*parts, ckv_scale=2.0, kpe_scale=2.0).dtype == torch.bfloat16
    wrapper.plan(**problem.plan())
    with pytest.raises(ValueError, match="are for fp8 caches, but torch"):
        wrapper.run(*problem.halves, ckv_scale=2.0, kpe_scale=2.0)
    with pytest.raises(ValueError, match="cutlass is for Blackwell"):
        wrapper_for("cpu", "cutlass")
    with pytest.raises(TypeError, match="float_workspace_buffer is int"):
        mla.BatchMLAPagedAttentionWrapper(1024)


# --- the plan-free function ---


@DEVICES
@pytest.mark.parametrize("form", ["three", "four"])
@pytest.mark.parametrize("rows", [1, 2])
def test_trtllm_decode(device, form, rows):
    problem = make([rows] * 3, [300, 64, 9], 16, 64, device)
    cache = problem.cache if form == "three" else problem.cache.unsqueeze(1)
    query = problem.q.unflatten(0, (3, rows))
    given = (torch.empty(0), 128, 512, 64, problem.table, problem.lens, 320)
    out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(query, cache, *given, bmm1_scale=SCALE, return_lse=True)
    assert out.shape == (3, rows, 16, 512) and lse.shape == (3 * rows, 16)
    want, want_lse, base = problem.expected(True)
    assert_close(out.flatten(0, 1), want, base)
    assert_lse_close(lse, want_lse)
    for place in (nan_like((3, rows, 16, 512), query), nan_like((3, rows, 16, 600), query)[..., :512]):
        nested = torch.zeros(3, rows, 16, device=query.device)
        result = mla.trtllm_batch_decode_with_kv_cache_mla(
            query, cache, *given, bmm1_scale=SCALE, out=place, lse=nested
        )
        assert result is place
        assert_bitwise(place, out)
        assert_bitwise(nested.flatten(0, 1), lse)


def test_trtllm_decode_of_lengths_that_differ_and_with_tensors_as_scales():
    problem = make([1, 3], [30, 9], 4, 16)
    given = (torch.empty(0), 128, 512, 64, problem.table, problem.lens, 32)
    call = dict(cum_seq_lens_q=problem.batch.qo_indptr("cpu"), max_q_len=3)
    scale = torch.tensor([SCALE])
    out = mla.trtllm_batch_decode_with_kv_cache_mla(problem.q, problem.cache, *given, bmm1_scale=scale, **call)
    want, _, base = problem.expected(True)
    assert_close(out, want, base)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(sparse_mla_top_k=64), NotImplementedError, "sparse_mla_top_k=64"),
        (dict(enable_dcp=True), NotImplementedError, "kv_shard"),
        (dict(use_fp16_softmax=True), NotImplementedError, "Blackwell"),
        (dict(uses_shared_paged_kv_idx=False), NotImplementedError, "uses_shared_paged_kv_idx"),
        (dict(backend="fa7"), ValueError, "backend='fa7'"),
        (dict(kv_lora_rank=256), ValueError, "make 320 columns"),
        (dict(kv_cache=torch.zeros(9, 2, 16, 576)), ValueError, "kv_cache has shape"),
        (dict(kv_cache=None), TypeError, "kv_cache is NoneType"),
        (dict(seq_lens=None), TypeError, "seq_lens is NoneType"),
        (dict(query=torch.zeros(2, 4, 576).bfloat16()), ValueError, "query has shape"),
        (dict(out=torch.zeros(2, 1, 4, 576).bfloat16()), ValueError, "out has shape"),
    ],
)
def test_trtllm_decode_refuses_in_a_sentence(change, error, words):
    problem = make([1, 1], [30, 7], 4, 16)
    given = dict(query=problem.q.unsqueeze(1), kv_cache=problem.cache, workspace_buffer=torch.empty(0))
    given |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, block_tables=problem.table)
    given |= dict(seq_lens=problem.lens, max_seq_len=30)
    with pytest.raises(error, match=words):
        mla.trtllm_batch_decode_with_kv_cache_mla(**{**given, **change})
