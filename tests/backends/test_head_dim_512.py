"""Head dimension 512: in fa2 tiles whose warps share rows in fours and pairs, or halves of the columns; in fa3 pairs of
thread blocks that have half of the columns each."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise, assert_close
from problems import Options, expect, make_batch
from ran import counts
from test_kernels import OPTIONS, check, check_masks, every_kind_of_tile, masked_heads_and_rows

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"
DIMS = [(512, 512), (320, 320), (264, 512), (512, 256), (64, 512)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("page_size", [None, 1, 5, 16])
@every_kind_of_tile
def test_tiles(kernel_backend, dims, name, dtype, page_size, heads, lens):
    batch = make_batch(*lens, *heads, dims[0], head_dim_vo=dims[1], dtype=dtype, device=DEVICE)
    check(kernel_backend, batch, OPTIONS[name], page_size=page_size)


@pytest.mark.parametrize("page_size", [None, 1, 16])
@masked_heads_and_rows
def test_masks(kernel_backend, page_size, heads, rows):
    check_masks(kernel_backend, heads, rows, (512, 512), 70, page_size)


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (16, 1), (4, 2)])
@pytest.mark.parametrize("lens", [[40], [16000], [1, 1, 1], [3, 700, 0, 65, 64, 5000]], ids=str)
def test_decode(heads, lens):
    batch = make_batch([1] * len(lens), lens, *heads, 512, dtype=torch.bfloat16, device=DEVICE)
    paged = batch.paged(16, form="tuple")
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE))
    wrapper.plan(*paged.table(), *batch.heads, 16, q_data_type=torch.bfloat16)
    want = expect(batch)
    out = wrapper.run(batch.q, paged.cache)
    assert_close(out, want.out, want.baseline)
    for _ in range(3):
        assert_bitwise(wrapper.run(batch.q, paged.cache), out)
    if len(lens) == 1:
        single = ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v)
        assert_close(single[None], want.out, want.baseline)


def test_rotary_embedding(kernel_backend):
    batch = make_batch([40, 1], [300, 77], 8, 2, 512, device=DEVICE)
    check(kernel_backend, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"))


def test_fixed_splits_do_not_depend_on_the_batch(kernel_backend):
    batch = make_batch([5, 33, 1], [900, 2000, 4000], 8, 2, 512, device=DEVICE)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=DEVICE)

    def run(of: list[int]) -> list[torch.Tensor]:
        rows = [slice(*batch.qo_indptr()[b : b + 2].tolist()) for b in of]
        keys = [slice(*batch.kv_indptr()[b : b + 2].tolist()) for b in of]
        lens = [batch.qo_lens[b] for b in of], [batch.kv_lens[b] for b in of]
        part = make_batch(*lens, 8, 2, 512, device=DEVICE)
        part.q, part.k, part.v = (
            torch.cat([x[at] for at in places]) for x, places in ((batch.q, rows), (batch.k, keys), (batch.v, keys))
        )
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=kernel_backend)
        wrapper.plan(part.qo_indptr(), part.kv_indptr(), *batch.heads, causal=True, fixed_split_size=512)
        return list(wrapper.run(part.q, part.k, part.v).split(lens[0]))

    together = run([0, 1, 2])
    for b in range(3):
        assert_bitwise(run([b])[0], together[b])


@pytest.mark.hopper
def test_auto():
    assert ck.explain(device=DEVICE, head_dim_qk=512, num_qo_heads=8, num_kv_heads=2).selected == "fa3"
    batch = make_batch([1], [700], 8, 2, 512, dtype=torch.bfloat16, device=DEVICE)
    start = counts()
    ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v)
    assert (counts() - start).keys() == {"fa2"}
