"""The fronts of latent attention: FlashInfer's wrapper, FlashMLA's functions, TensorRT-LLM's decode."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import poison_
from plan_free_problems import Mask, Options, expect, keys
from problems import Batch, make_batch

from cutlass_kernels import mla

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
SCALE = 192**-0.5


def latent(qo_lens: list[int], kv_lens: list[int], heads: int, device: str, dtype: Any = torch.bfloat16) -> Batch:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype, device=device)
    return dataclasses.replace(batch, v=batch.k[..., :512])


def wanted(batch: Batch, causal: bool) -> Any:
    return expect(batch, Mask(causal=causal), Options(descales=dict(q_descale=SCALE * 576**0.5)))


def parts(cache: torch.Tensor, separate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    ckv, kpe = cache[..., :512], cache[..., 512:]
    return (ckv.contiguous(), kpe.contiguous()) if separate else (ckv, kpe)


def planned(batch: Batch, page_size: int, causal: bool, **more: Any) -> tuple[Any, torch.Tensor]:
    k, _, given = keys(batch, "indices", "NHD", page_size, False)
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(0, device=batch.device), **more)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32)
    wrapper.plan(
        batch.qo_indptr("cpu"),
        given["kv_indptr"].cpu(),
        given["kv_indices"],
        lens,
        batch.num_qo_heads,
        512,
        64,
        page_size,
        causal,
        SCALE,
        batch.q.dtype,
        batch.k.dtype,
    )
    return wrapper, k.squeeze(2)


@devices
@pytest.mark.parametrize("separate", [False, True], ids=["views", "separate"])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("rows", [[1, 1, 1], [4, 0, 9]], ids=["decode", "append"])
@pytest.mark.parametrize("heads", [8, 128])
def test_wrapper(device, heads, rows, page_size, separate):
    batch = latent(rows, [150, 0, 333], heads, device)
    wrapper, cache = planned(batch, page_size, True)
    q_nope, q_pe = parts(batch.q, separate)
    out, lse = wrapper.run(q_nope, q_pe, *parts(cache, separate), return_lse=True)
    want, want_lse, base = wanted(batch, True)
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)
    place, lse_place = poison_(torch.empty_like(out)), poison_(torch.empty_like(lse))
    natural = wrapper.run(q_nope, q_pe, *parts(cache, separate), place, lse_place, True, return_lse_base_on_e=True)
    assert natural[0] is place and natural[1] is lse_place
    assert_close(place, want, base)
    assert_lse_close(lse_place / math.log(2), want_lse)


@devices
def test_lengths_and_pages_of_run_replace_the_planned_ones(device):
    batch = latent([1, 1], [100, 70], 16, device)
    wrapper, _ = planned(latent([1, 1], [5, 6], 16, device), 16, False)
    k, _, given = keys(batch, "table", "NHD", 16, False)
    whose = dict(kv_len=given["seqused_k"], page_table=given["page_table"])
    out = wrapper.run(*parts(batch.q, False), *parts(k.squeeze(2), False), **whose)
    want, _, base = wanted(batch, False)
    assert_close(out, want, base)


@devices
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_flash_mla(device, rows, causal):
    batch = latent([rows] * 3, [150, rows, 333], 64, device)
    k, _, given = keys(batch, "table", "NHD", 64, False)
    call = (k, given["page_table"], given["seqused_k"], 512)
    q = batch.q.unflatten(0, (3, rows))
    want, want_lse, base = wanted(batch, causal)
    metadata = [mla.get_mla_metadata(), mla.get_mla_metadata(given["seqused_k"], rows * 64, 1)]
    for schedule in metadata:
        out, lse = mla.flash_mla_with_kvcache(q, *call, *schedule, softmax_scale=SCALE, causal=causal)
        assert out.shape == (3, rows, 64, 512) and lse.shape == (3, 64, rows)
        assert_close(out.flatten(0, 1), want, base)
        assert_lse_close(lse.transpose(1, 2).flatten(0, 1) / math.log(2), want_lse)
    assert metadata[1][0].size(1) == 8 and metadata[1][1].shape == (4,)


@devices
@pytest.mark.parametrize("dims", [3, 4])
def test_trtllm_decode(device, dims):
    batch = latent([2] * 3, [150, 2, 333], 16, device)
    k, _, given = keys(batch, "table", "NHD", 32, False)
    cache = k.squeeze(2) if dims == 3 else k.transpose(1, 2)
    out = poison_(torch.empty(3, 2, 16, 512, dtype=batch.q.dtype, device=device))
    lens = (given["page_table"], given["seqused_k"], 512)
    result = mla.trtllm_batch_decode_with_kv_cache_mla(
        batch.q.unflatten(0, (3, 2)), cache, None, 128, 512, 64, *lens, out=out, bmm1_scale=SCALE, bmm2_scale=0.5
    )
    assert result is out
    want, _, base = wanted(batch, True)
    assert_close(out.flatten(0, 1) * 2, want, base)


@pytest.mark.gpu
def test_a_captured_wrapper_follows_its_plan():
    device = "cuda:0"
    first = latent([1] * 4, [300, 64, 1, 500], 128, device)
    _, _, given = keys(first, "indices", "NHD", 64, False)
    buffers = dict(
        qo_indptr=torch.zeros(5, dtype=torch.int32, device=device),
        kv_indptr=torch.zeros(5, dtype=torch.int32, device=device),
        kv_indices=torch.zeros(64, dtype=torch.int32, device=device),
        kv_len_arr=torch.zeros(4, dtype=torch.int32, device=device),
    )
    wrapper, cache = planned(first, 64, True, use_cuda_graph=True, **buffers)
    q = parts(first.q, False)
    out = torch.empty(4, 128, 512, dtype=first.q.dtype, device=device)
    call = (*q, *parts(cache, False), out)
    wrapper.run(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wrapper.run(*call)
    for lens in ([300, 64, 1, 500], [7, 64, 0, 129]):
        counts = [-(-n // 64) for n in (300, 64, 1, 500)]
        sizes = (128, 512, 64, 64, True, SCALE, torch.bfloat16, torch.bfloat16)
        indptr = torch.tensor([0, *counts]).cumsum(0)
        wrapper.plan(torch.arange(5), indptr, given["kv_indices"], torch.tensor(lens), *sizes)
        poison_(out)
        graph.replay()
        used = [x[:n] for x, n in zip(first.k.split(first.kv_lens), lens)]
        shorter = Batch(first.qo_lens, lens, first.q, torch.cat(used), torch.cat(used)[..., :512])
        want, _, base = wanted(shorter, True)
        assert_close(out, want, base)
    with pytest.raises(ValueError, match="at most 1"):
        wrapper.plan(torch.tensor([0, 2, 3, 4, 5]), indptr, given["kv_indices"], torch.tensor(lens), *sizes)


def test_what_is_refused_is_said():
    with pytest.raises(ValueError, match="needs the buffers"):
        mla.BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True)
    batch = latent([1, 1], [5, 6], 4, "cpu")
    wrapper, cache = planned(batch, 4, True)
    q, kv = parts(batch.q, False), parts(cache, False)
    with pytest.raises(RuntimeError, match="plan"):
        mla.BatchMLAPagedAttentionWrapper(torch.empty(0)).run(*q, *kv)
    with pytest.raises(ValueError, match="plan is for"):
        wrapper.run(q[0][:, :2], q[1][:, :2], *kv)
    with pytest.raises(ValueError, match="last dimension must be 64"):
        wrapper.run(q[0], q[0], *kv)
    with pytest.raises(ValueError, match="pass both"):
        wrapper.run(*q, *kv, kv_len=torch.tensor([5, 6]))
    with pytest.raises(NotImplementedError, match="profiler"):
        wrapper.run(*q, *kv, profiler_buffer=torch.empty(1))
    lens = torch.tensor([5, 6], dtype=torch.int32)
    sizes = (True, SCALE, torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match="use 512 and 64"):
        wrapper.plan(torch.arange(3), torch.tensor([0, 2, 4]), torch.arange(4), lens, 4, 256, 64, 4, *sizes)
    with pytest.raises(ValueError, match="both need 3"):
        wrapper.plan(torch.arange(2), torch.tensor([0, 2, 4]), torch.arange(4), lens, 4, 512, 64, 4, *sizes)
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="sparse"):
        mla.flash_mla_with_kvcache(batch.q.unsqueeze(1), cache.unsqueeze(2), table, lens, 512, indices=table)
    with pytest.raises(ValueError, match="head_dim_v=256"):
        mla.flash_mla_with_kvcache(batch.q.unsqueeze(1), cache.unsqueeze(2), table, lens, 256)
    with pytest.raises(ValueError, match="backend='cudnn'"):
        mla.trtllm_batch_decode_with_kv_cache_mla(
            batch.q.unsqueeze(1), cache, None, 128, 512, 64, table, lens, 4, backend="cudnn"
        )
