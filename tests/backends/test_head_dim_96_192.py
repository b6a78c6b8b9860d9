"""Head dimensions 96 and 192, and those padded to them: half-used panels of 64 columns, and KV blocks of 96 keys."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise, assert_close
from environment import why_no_fa3
from problems import Options, expect, make_batch
from test_kernels import OPTIONS, attend, check, check_masks, every_kind_of_tile, masked_heads_and_rows

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
DIMS = [(96, 96), (80, 80), (96, 48), (192, 192), (160, 160), (136, 184)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("page_size", [None, 1, 5, 8, 16, 24, 64])
@every_kind_of_tile
def test_tiles(kernel_backend, dims, name, dtype, page_size, heads, lens):
    batch = make_batch(*lens, *heads, dims[0], head_dim_vo=dims[1], dtype=dtype, device=DEVICE)
    check(kernel_backend, batch, OPTIONS[name], page_size=page_size)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 8, 16])
@masked_heads_and_rows
def test_masks(kernel_backend, dims, page_size, heads, rows):
    # A lane reads the bits of 32 keys: of blocks of 96 keys, three lanes of four.
    check_masks(kernel_backend, heads, rows, dims, 110, page_size)


@pytest.mark.parametrize("dims", [(96, 96), (192, 192)], ids=str)
@pytest.mark.parametrize("page_size", [1, 8, 16, 32, 48])
def test_long_page_tables(kernel_backend, dims, page_size):
    # Boxes are looked up in batches: 24 of them where KV blocks are of 96 keys.
    lens = [200, 1, 90, 64], [3000, 2999, 97, 1500]
    batch = make_batch(*lens, 32, 32, dims[0], head_dim_vo=dims[1], device=DEVICE)
    for name in ("full", "window"):
        check(kernel_backend, batch, OPTIONS[name], page_size=page_size)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (16, 1)])
@pytest.mark.parametrize("lens", [[40], [16000], [3, 700, 0, 65, 64, 5000]], ids=str)
def test_decode(dims, heads, lens):
    batch = make_batch([1] * len(lens), lens, *heads, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, device=DEVICE)
    want = expect(batch)
    for backend in ("auto", "fa2") if why_no_fa3() else ("auto", "fa2", "fa3"):
        out, _ = attend(backend, batch, Options(), page_size=16)
        assert_close(out, want.out, want.baseline)
        assert_bitwise(attend(backend, batch, Options(), page_size=16)[0], out)


@pytest.mark.parametrize("dim", [96, 192])
def test_columns_beyond_the_head_are_left_alone(kernel_backend, dim):
    # Outputs and values are the first columns of wider rows, whose other columns no kernel may write, or read.
    batch = make_batch([300, 5], [300, 700], 32, 8, dim, device=DEVICE)
    wide = torch.full((305, 32, 256), 7.0, dtype=batch.q.dtype, device=DEVICE)
    for name in ("k", "v"):
        of_keys = torch.full((1000, 8, 256), float("nan"), dtype=batch.q.dtype, device=DEVICE)
        of_keys[..., :dim] = getattr(batch, name)
        setattr(batch, name, of_keys[..., :dim])
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE), backend=kernel_backend
    )
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
    wrapper.run(batch.q, batch.k, batch.v, out=wide[..., :dim])
    want = expect(batch, Options(causal=True))
    assert_close(wide[..., :dim], want.out, want.baseline)
    assert bool((wide[..., dim:] == 7.0).all())
