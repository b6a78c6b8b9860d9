"""FlashMLA's functions and TensorRT-LLM's plan-free one over latent caches: names, results and places for them."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

import pytest
import quantized_caches
import torch
from captures import capture
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from mla_problems import DEVICES, SCALE, flash, make, nan_like, trtllm
from pairs import every
from quantized_problems import Quantized
from quantized_problems import make as make_quantized

from cutlass_kernels import mla
from cutlass_kernels.mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata

INT32, E4M3 = torch.int32, torch.float8_e4m3fn


@DEVICES
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    "form,causal", [("an object", True), ("an object", False), ("tensors", True), ("tensors", False), ("trtllm", True)]
)
def test_decode_steps(device, rows, heads, form, causal):
    problem = make([rows] * 4, [300, 64, rows, 0], heads, 64, device)
    if form == "trtllm":
        for cache in (problem.cache, problem.cache.unsqueeze(1)):
            out, lse = trtllm(problem, cache=cache, return_lse=True)
            assert out.shape == (4, rows, heads, 512)
            problem.check(out.flatten(0, 1), lse)
        return
    metadata = get_mla_metadata() if form == "an object" else get_mla_metadata(problem.lens, rows * heads, 1)
    out, lse = flash(problem, *metadata, SCALE, causal)
    assert out.shape == (4, rows, heads, 512) and lse.shape == (4, heads, rows)
    assert bool((lse[3] == math.inf).all()) and not out[3].any()
    lse[3] = -math.inf
    problem.check(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1) / math.log(2.0), causal)


# --- FlashMLA ---


@DEVICES
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_pages_of_any_size_and_the_default_scale(device, page_size):
    problem = make([1, 1], [70, 9], 4, page_size, device)
    out, _ = flash(problem)
    assert_bitwise(out, flash(problem, *get_mla_metadata(), 576**-0.5)[0])
    place = nan_like(out.shape, out)
    assert flash(problem, out=place)[0] is place
    assert_bitwise(place, out)


def test_an_empty_batch():
    q, cache = torch.zeros(0, 1, 16, 576).bfloat16(), torch.zeros(4, 64, 1, 576).bfloat16()
    out, lse = flash_mla_with_kvcache(q, cache, torch.zeros(0, 4, dtype=INT32), torch.zeros(0, dtype=INT32), 512)
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 16, 1)


def test_metadata_as_engines_keep_it():
    lens = torch.tensor([100, 7, 3], dtype=INT32)
    metadata, splits = get_mla_metadata(lens, 16, 1)  # SGLang copies it to the buffers of a graph
    torch.zeros(1, 8, dtype=INT32).copy_(metadata)
    torch.zeros(9, dtype=INT32)[:4].copy_(splits)
    metadata, _ = get_mla_metadata(lens, 16, 1, is_fp8_kvcache=False)  # vLLM assigns attributes
    metadata.tile_scheduler_metadata, metadata.num_splits = torch.zeros(1, 8), torch.zeros(4)
    metadata, none = get_mla_metadata()
    assert isinstance(metadata, FlashMLASchedMeta) and none is None
    assert not metadata.have_initialized
    metadata.tile_scheduler_metadata = torch.zeros(1, 8)
    problem = make([1, 1], [30, 9], 4, 16)
    flash(problem, metadata, none)
    assert metadata.have_initialized
    for given, named in (((), dict(topk=64)), ((), dict(topk=2048)), ((16, False, 64), {})):  # of sparse calls
        metadata, splits = get_mla_metadata(lens, 16, 1, *given, **named)
        assert metadata.shape == (1, 8) and splits.shape == (4,)


@DEVICES
@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize("fp8_queries", [False, True])
def test_fp8_caches_as_vllm_passes_them(device, bytes_, fp8_queries):
    problem, scale = make([2, 2], [70, 9], 4, 64, device), 0.25
    cache = problem.cache.float().nan_to_num().div(scale).to(E4M3)
    q = problem.q.unflatten(0, (2, 2))
    q = q.to(E4M3) if fp8_queries else q
    call = dict(softmax_scale=SCALE, causal=True)
    known = dataclasses.replace(problem, cache=(cache.float() * scale).to(torch.bfloat16))
    want, want_lse = flash(known, q=q.to(torch.bfloat16), **call)
    given = dataclasses.replace(problem, cache=cache.view(torch.uint8) if bytes_ else cache)
    call |= dict(descale_q=torch.ones(1, device=device), descale_k=torch.tensor([scale], device=device))
    out, lse = flash(given, None, None, q=q, is_fp8_kvcache=True, **call)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-2, rtol=1e-3)


def test_scales_of_16_bit_tensors_have_no_effect():
    problem = make([1, 1], [30, 9], 4, 16)
    scales = dict(descale_q=torch.tensor([3.0]), descale_k=torch.tensor([0.5]))
    assert_bitwise(flash(problem, **scales)[0], flash(problem)[0])
    fp8 = dataclasses.replace(problem, cache=problem.cache.nan_to_num().to(E4M3))
    assert not torch.equal(flash(fp8, **scales)[0], flash(fp8)[0])
    assert_bitwise(flash(fp8, descale_q=3.0)[0], flash(fp8)[0])


def test_names_and_positions_are_those_of_flash_mla():
    names = ["q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"]
    names += ["softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache"]
    names += ["extra_indices_in_kvcache", "topk_length", "extra_topk_length"]
    parameters = inspect.signature(flash_mla_with_kvcache).parameters
    assert list(parameters)[: len(names)] == names and parameters["causal"].default is False


@pytest.mark.gpu
def test_a_captured_step_follows_lengths_and_tables():
    problem = make([1] * 3, [900, 64, 4000], 128, 64, "cuda:0")
    problem.lens = problem.lens.clone()
    given = (*get_mla_metadata(problem.lens, 128, 1), SCALE, True)
    graph, (out, lse) = capture(lambda: flash(problem, *given))
    for other in ([900, 64, 4000], [1, 63, 2500], [0, 1, 65]):
        problem.lens.copy_(torch.tensor(other))
        poison_(out)
        graph.replay()
        want, want_lse = flash(problem, *given)
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, want_lse)
        assert bool((out[0] == 0).all()) == (other[0] == 0)


# --- TensorRT-LLM ---


@DEVICES
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_trtllm_decode_writes_results_of_any_strides(device, rows):
    problem = make([rows] * 3, [300, 64, 9], 16, 64, device)
    out, want = trtllm(problem, return_lse=True)
    # Without gaps, with gaps behind rows, and where no view joins the first two dimensions.
    places = [nan_like((3, rows, 16, 512), out), nan_like((3, rows, 16, 600), out)[..., :512]]
    places.append(nan_like((rows, 3, 16, 512), out).transpose(0, 1))
    for place in places:
        for lse in (torch.zeros(3, rows, 16, device=device), torch.zeros(3, 16, rows, device=device).transpose(1, 2)):
            for return_lse in (False, True):
                poison_(place)
                poison_(lse)
                found = trtllm(problem, out=place, lse=lse, return_lse=return_lse)
                assert (found[0] if return_lse else found) is place and torch.equal(place, out)
                assert not return_lse or found[1] is lse
                assert_bitwise(lse.reshape(-1, 16), want)


@pytest.mark.parametrize("columns", [512, 600])
def test_trtllm_decode_leaves_rows_behind_the_last_request(columns):
    problem = make([1, 3], [30, 9], 4, 16)
    query = torch.cat([problem.q, torch.zeros_like(problem.q)])
    call = dict(cum_seq_lens_q=problem.batch.qo_indptr("cpu"), max_q_len=3)
    want = trtllm(problem, problem.q, bmm1_scale=torch.tensor([SCALE]), return_lse=True, **call)
    problem.check(want[0])
    out, lse = torch.full((8, 4, columns), 7.0).to(query.dtype)[..., :512], torch.full((8, 4), 7.0)
    assert trtllm(problem, query, out=out, lse=lse, bmm1_scale=torch.tensor([SCALE]), **call) is out
    for place, first in zip((out, lse), want):
        assert_bitwise(place[:4], first)
        assert (place[4:] == 7).all()


def test_trtllm_decode_of_fp8_queries():
    problem = make([1, 1], [30, 9], 4, 16)
    fp8 = dataclasses.replace(problem, cache=problem.cache.nan_to_num().to(E4M3))
    assert trtllm(fp8, problem.q.unsqueeze(1).to(E4M3)).dtype == torch.bfloat16


def test_trtllm_decode_in_another_base():
    problem = make([1, 1], [30, 9], 4, 16)
    want, lse = trtllm(problem, return_lse=True)[1], torch.empty(2, 1, 4)
    assert_bitwise(trtllm(problem, return_lse=True, return_lse_base="base2")[1], want)
    trtllm(problem, lse=lse, return_lse_base="basee")
    torch.testing.assert_close(lse.flatten(0, 1), want * math.log(2))


# --- selected keys and quantized latent caches in FlashInfer's function ---


def of_lists(problem: Quantized, batch: int, **given: Any) -> Any:
    """trtllm_batch_decode_with_kv_cache_mla(sparse_mla_top_k=) of so many requests, over ``k`` of the problem."""
    scope = problem.scopes[0]
    query = problem.q.unflatten(0, (batch, -1))
    width = scope.indices.size(2)
    call: dict[str, Any] = dict(query=query, kv_cache=scope.view.squeeze(2), workspace_buffer=torch.empty(0))
    call |= dict(qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, max_seq_len=width, bmm1_scale=SCALE)
    call |= dict(block_tables=scope.indices.view(*query.shape[:2], width), seq_lens=None, sparse_mla_top_k=width)
    return mla.trtllm_batch_decode_with_kv_cache_mla(**call | given)


@DEVICES
@every(kind=["v3.2", "numbers"], rows=[1, 2], place=[False, True])
@pytest.mark.parametrize("lengths", ["rows", "requests", "each", "flat", "none", "offsets", "offsets requests"])
@pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
def test_trtllm_with_selected_keys(device, kind, rows, lengths, place):
    problem = make_quantized([kind], 3, device, rows=3 * rows, lists=["any", "full"], lengths=False, page_size=16)
    problem.options["sm_scale"] = SCALE
    scope, given = problem.scopes[0], {}
    if lengths in ("rows", "offsets"):
        scope.lengths = torch.arange(3 * rows, dtype=INT32, device=device) * 6
        given["sparse_mla_top_k_lens"] = scope.lengths
    elif lengths in ("each", "flat"):
        lens = torch.arange(3 * rows, dtype=torch.int64, device=device) * 9
        given["seq_lens"], scope.lengths = lens if lengths == "flat" else lens.view(3, rows), lens.clamp(max=40)
    elif lengths != "none":
        lens = torch.tensor([7, 1000, 0], device=device)
        given["seq_lens"], scope.lengths = lens.to(torch.uint32), lens.clamp(max=40).repeat_interleave(rows)
    if "offsets" in lengths:
        offsets = torch.arange(4, dtype=INT32, device=device) * rows
        given |= dict(query=problem.q, block_tables=scope.indices.squeeze(1), cum_seq_lens_q=offsets)
    out = nan_like((3, rows, 8, 512), problem.q)
    if place:
        given["out"] = out.flatten(0, 1) if "offsets" in lengths else out
    found, lse = of_lists(problem, 3, return_lse=True, **given)
    assert found is given.get("out", found) and found.shape[-2:] == (8, 512)
    want, base = problem.expected()
    assert_close(found.view(3 * rows, 8, 512), want.out, base)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("form", ["requests", "rows"])
def test_trtllm_lengths_of_ragged_rows(form):
    """Requests of 2, 0 and 3 rows, and a row behind the last."""
    problem = make_quantized(["numbers"], 5, rows=6, lists=["full"], lengths=False)
    problem.options["sm_scale"] = SCALE
    each = torch.tensor([3, 30, 1000], dtype=INT32)
    problem.scopes[0].lengths = torch.tensor([3, 3, 40, 40, 40, 0], dtype=INT32)
    given = dict(query=problem.q, block_tables=problem.scopes[0].indices.squeeze(1))
    given |= dict(seq_lens=each if form == "requests" else torch.tensor([3, 3, 99, 99, 99, 0]))
    found, lse = of_lists(problem, 6, return_lse=True, cum_seq_lens_q=torch.tensor([0, 2, 2, 5]), **given)
    want, base = problem.expected()
    assert_close(found, want.out, base)
    assert_lse_close(lse, want.lse)


@DEVICES
@pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
@pytest.mark.parametrize(
    ("kind", "lists"), [("v3.2", False), ("v3.2", True), ("v3.2_nope", False), ("v3.2_nope", True), ("numbers", True)]
)
def test_trtllm_without_rope(device, kind, lists):
    """GLM-5.3-Flash: queries of 512 columns over 656 or 528 bytes, or 512 columns of 16 bits."""
    problem = make_quantized([kind], 3, device, rows=2, lists=["full"], lengths=False, dim=512, pages=4, page_size=16)
    problem.options["sm_scale"] = SCALE
    given: dict[str, Any] = dict(qk_rope_head_dim=0, return_lse=True)
    if kind == "v3.2_nope":
        given["kv_scale_format"] = "arbitrary_fp32"
    if not lists:
        pages = torch.tensor([[3, 0], [1, 2]], dtype=INT32, device=device)
        lens = torch.tensor([20, 7], dtype=INT32, device=device)
        given |= dict(sparse_mla_top_k=0, block_tables=pages, seq_lens=lens)
        slots = pages.repeat_interleave(16, 1) * 16 + torch.arange(16, dtype=INT32, device=device).repeat(2)
        problem.scopes[0].indices, problem.scopes[0].lengths = slots.unsqueeze(1), given["seq_lens"]
        cache = problem.scopes[0].cache
        quantized_caches.filled(cache, [True] * cache.slots)
    found, lse = of_lists(problem, 2, **given)
    want, base = problem.expected()
    assert_close(found.flatten(0, 1), want.out, base)
    assert_lse_close(lse, want.lse)


@pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
def test_trtllm_scales_of_selected_keys():
    problem = make_quantized(["v3.2"], 3, lists=["full"], lengths=False)
    want = of_lists(problem, 5, bmm1_scale=0.25)
    found = of_lists(problem, 5, bmm1_scale=torch.tensor([0.25]), bmm2_scale=2.0, kv_scale_format="arbitrary_fp32")
    torch.testing.assert_close(found, want * 2, atol=1e-2, rtol=1e-2)
