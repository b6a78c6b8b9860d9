"""FlashMLA's functions: names, results and what they refuse."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from guards import poison_
from mla_problems import DEVICES, SCALE, make, nan_like

from cutlass_kernels.mla import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata

INT32 = torch.int32


@DEVICES
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("new_form", [True, False], ids=["an object", "tensors"])
def test_decode_steps(device, rows, heads, causal, new_form):
    problem = make([rows] * 4, [300, 64, rows, 0], heads, 64, device)
    q = problem.q.unflatten(0, (4, rows))
    metadata, splits = get_mla_metadata() if new_form else get_mla_metadata(problem.lens, rows * heads, 1)
    out, lse = flash_mla_with_kvcache(
        q, problem.cache.unsqueeze(2), problem.table, problem.lens, 512, metadata, splits, SCALE, causal
    )
    assert out.shape == (4, rows, heads, 512) and lse.shape == (4, heads, rows)
    want, want_lse, base = problem.expected(causal)
    assert_close(out.flatten(0, 1), want, base)
    assert_lse_close(lse.transpose(1, 2).flatten(0, 1) / math.log(2.0), want_lse)


@DEVICES
@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_pages_of_any_size_and_the_default_scale(device, page_size):
    problem = make([1, 1], [70, 9], 4, page_size, device)
    given = (problem.q.unsqueeze(1), problem.cache.unsqueeze(2), problem.table, problem.lens, 512)
    out, _ = flash_mla_with_kvcache(*given)
    assert_bitwise(out, flash_mla_with_kvcache(*given, *get_mla_metadata(), 576**-0.5)[0])
    place = nan_like(out.shape, out)
    assert flash_mla_with_kvcache(*given, out=place)[0] is place
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
    metadata.tile_scheduler_metadata = torch.zeros(1, 8)
    for topk in (dict(topk=64), dict(topk=2048)):
        with pytest.raises(NotImplementedError, match="topk"):
            get_mla_metadata(lens, 16, 1, **topk)
    with pytest.raises(NotImplementedError, match="topk"):
        get_mla_metadata(lens, 16, 1, 16, False, 64)


@DEVICES
@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize("fp8_queries", [False, True])
def test_fp8_caches_as_vllm_passes_them(device, bytes_, fp8_queries):
    problem = make([2, 2], [70, 9], 4, 64, device)
    scale = 0.25
    cache = problem.cache.float().nan_to_num().div(scale).to(torch.float8_e4m3fn)
    q = problem.q.unflatten(0, (2, 2))
    call = dict(softmax_scale=SCALE, causal=True)
    if fp8_queries:
        q = q.to(torch.float8_e4m3fn)
    known = (cache.float() * scale).to(torch.bfloat16)
    want, want_lse = flash_mla_with_kvcache(
        q.to(torch.bfloat16), known.unsqueeze(2), problem.table, problem.lens, 512, **call
    )
    given = cache.view(torch.uint8) if bytes_ else cache
    descales = dict(descale_q=torch.ones(1, device=device), descale_k=torch.tensor([scale], device=device))
    out, lse = flash_mla_with_kvcache(
        q, given.unsqueeze(2), problem.table, problem.lens, 512, None, None, is_fp8_kvcache=True, **call, **descales
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-2, rtol=1e-3)


def test_names_and_positions_are_those_of_flash_mla():
    names = ["q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits"]
    names += ["softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache"]
    names += ["extra_indices_in_kvcache", "topk_length", "extra_topk_length"]
    parameters = inspect.signature(flash_mla_with_kvcache).parameters
    assert list(parameters)[: len(names)] == names and parameters["causal"].default is False


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (dict(indices=torch.zeros(2, 1, 64, dtype=INT32)), NotImplementedError, "indices=.* sparse attention"),
        (dict(extra_k_cache=torch.zeros(1)), NotImplementedError, "extra_k_cache"),
        (dict(topk_length=torch.zeros(1)), NotImplementedError, "topk_length"),
        (dict(attn_sink=torch.zeros(4)), NotImplementedError, r"attention\(sinks=\)"),
        (dict(q=torch.zeros(2, 4, 576).bfloat16()), ValueError, "q has shape"),
        (dict(k_cache=torch.zeros(9, 64, 576).bfloat16()), ValueError, "k_cache has shape"),
        (dict(k_cache=torch.zeros(9, 64, 1, 656, dtype=torch.uint8)), ValueError, "656 bytes"),
        (dict(k_cache=torch.zeros(9, 64, 1, 512).bfloat16()), ValueError, "head_dim"),
        (dict(is_fp8_kvcache=True), ValueError, "is_fp8_kvcache=True"),
        (dict(block_table=None), TypeError, "block_table is NoneType"),
        (dict(block_table=torch.zeros(3, 2, dtype=INT32)), ValueError, "block_table has shape"),
        (dict(cache_seqlens=None), TypeError, "cache_seqlens is NoneType"),
        (dict(cache_seqlens=torch.zeros(3, dtype=INT32)), ValueError, "cache_seqlens has shape"),
        (dict(head_dim_v=0), ValueError, "head_dim_v=0"),
        (dict(head_dim_v=640), ValueError, "head_dim_v=640"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(change, error, words):
    problem = make([1, 1], [30, 7], 4, 64)
    given = dict(q=problem.q.unsqueeze(1), k_cache=problem.cache.unsqueeze(2), block_table=problem.table)
    given |= dict(cache_seqlens=problem.lens, head_dim_v=512)
    with pytest.raises(error, match=words):
        flash_mla_with_kvcache(**{**given, **change})


@pytest.mark.gpu
def test_a_captured_step_follows_lengths_and_tables():
    problem = make([1] * 3, [900, 64, 4000], 128, 64, "cuda:0")
    cache, lens = problem.cache.unsqueeze(2), problem.lens.clone()
    metadata, splits = get_mla_metadata(lens, 128, 1)
    given = (problem.q.unsqueeze(1), cache, problem.table, lens, 512, metadata, splits, SCALE, True)
    flash_mla_with_kvcache(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_mla_with_kvcache(*given)
    for other in ([900, 64, 4000], [1, 63, 2500], [0, 1, 65]):
        lens.copy_(torch.tensor(other))
        poison_(out)
        graph.replay()
        want, want_lse = flash_mla_with_kvcache(*given)
        torch.testing.assert_close(out, want, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(lse, want_lse)
        assert bool((out[0] == 0).all()) == (other[0] == 0)
