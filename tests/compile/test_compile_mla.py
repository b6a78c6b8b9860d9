"""torch.compile(fullgraph=True) around the functions of cutlass_kernels.mla."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_bitwise
from mla_problems import DEVICES, SCALE, make

from cutlass_kernels.mla import (
    concat_and_cache_mla,
    flash_mla_with_kvcache,
    get_mla_metadata,
    trtllm_batch_decode_with_kv_cache_mla,
)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@DEVICES
def test_flash_mla(device):
    problem = make([2, 2], [300, 64], 16, 64, device)
    metadata, splits = get_mla_metadata(problem.lens, 32, 1)

    def decode(q, cache, table, lens):
        return flash_mla_with_kvcache(q, cache, table, lens, 512, metadata, splits, SCALE, causal=True)

    given = (problem.q.unflatten(0, (2, 2)), problem.cache.unsqueeze(2), problem.table, problem.lens)
    for got, want in zip(compiled(decode)(*given), decode(*given), strict=True):
        assert_bitwise(got, want)


@DEVICES
def test_trtllm(device):
    problem = make([1, 1], [300, 64], 16, 64, device)
    workspace = torch.empty(1 << 20, dtype=torch.uint8, device=device)

    def decode(q, cache, table, lens):
        sizes = (128, 512, 64)
        return trtllm_batch_decode_with_kv_cache_mla(q, cache, workspace, *sizes, table, lens, 320, bmm1_scale=SCALE)

    given = (problem.q.unsqueeze(1), problem.cache, problem.table, problem.lens)
    assert_bitwise(compiled(decode)(*given), decode(*given))


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
def test_writing_by_slots(device, dtype):
    ckv, kpe = torch.randn(3, 512).to(device, torch.bfloat16), torch.randn(3, 64).to(device, torch.bfloat16)
    slots = torch.tensor([3, -1, 70], device=device)
    scale = torch.tensor(0.5, device=device)
    written, want = (torch.zeros(2, 64, 576, device=device).to(dtype) for _ in range(2))

    def write(ckv, kpe, cache, slots):
        concat_and_cache_mla(ckv, kpe, cache, slots, "auto" if dtype == torch.bfloat16 else "fp8", scale)

    compiled(write)(ckv, kpe, written, slots)
    write(ckv, kpe, want, slots)
    assert want.view(torch.uint8).any()
    assert_bitwise(written, want)
