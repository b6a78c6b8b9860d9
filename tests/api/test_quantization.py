"""packbits and segment_packbits, bit for bit those of numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from problems import indptr

import cutlass_kernels as ck

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda:0", id="cuda", marks=pytest.mark.gpu)]


def bits(x: torch.Tensor, bitorder: str) -> torch.Tensor:
    return torch.from_numpy(np.packbits(x.numpy(), bitorder=bitorder))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 10, 99, 128, 999, 5000, 131072, 999999])
def test_packbits(count, bitorder, device):
    x = torch.rand(count) < 0.5
    packed = ck.packbits(x.to(device), bitorder)
    assert packed.dtype == torch.uint8 and packed.device == torch.device(device)
    assert torch.equal(packed.cpu(), bits(x, bitorder))


@pytest.mark.parametrize("device", DEVICES)
def test_big_is_the_default(device):
    x = torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.bool, device=device)
    assert ck.packbits(x).tolist() == [128, 128]
    assert ck.packbits(x, "little").tolist() == [1, 1]
    packed, _ = ck.segment_packbits(x, torch.tensor([0, 9], device=device))
    assert packed.tolist() == [128, 128]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_any_number_but_zero_is_one(dtype, device):
    x = torch.tensor([0, 2, 0, 4, 128, 0, 1, 0, 7], dtype=dtype, device=device)
    assert torch.equal(ck.packbits(x, "little").cpu(), bits(x.cpu() != 0, "little"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("batch", [1, 10, 99, 999])
def test_segments(batch, dtype, bitorder, device):
    """The b-th holds b bits, and begins at a byte."""
    bounds = torch.cumsum(torch.arange(batch + 1), 0).to(dtype)
    x = torch.rand(int(bounds[-1])) < 0.5
    packed, places = ck.segment_packbits(x.to(device), bounds.to(device), bitorder)
    assert places.dtype == torch.int32 and places.device == torch.device(device)
    assert packed.dtype == torch.uint8 and packed.device == torch.device(device)
    pieces = [bits(piece, bitorder) for piece in x.tensor_split(bounds[1:-1].long())]
    assert places.tolist() == [0, *np.cumsum([len(piece) for piece in pieces]).tolist()]
    assert torch.equal(packed.cpu(), torch.cat(pieces))


@pytest.mark.parametrize("device", DEVICES)
def test_empty_segments(device):
    x = torch.ones(11, dtype=torch.bool, device=device)
    packed, places = ck.segment_packbits(x, indptr([0, 3, 0, 8, 0], device), "little")
    assert places.tolist() == [0, 0, 1, 1, 2, 2]
    assert packed.tolist() == [7, 255]
    packed, places = ck.segment_packbits(x[:0], indptr([0, 0], device), "little")
    assert packed.numel() == 0 and places.tolist() == [0, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_unknown_bit_order(device):
    x = torch.ones(8, dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError, match="middle"):
        ck.packbits(x, "middle")
    with pytest.raises(RuntimeError, match="middle"):
        ck.segment_packbits(x, indptr([8], device), "middle")


def test_also_found_in_the_quantization_module():
    assert ck.quantization.packbits is ck.packbits
    assert ck.quantization.segment_packbits is ck.segment_packbits
