"""Head dimensions 96 and 192, and those padded to them: half-used panels of 64 columns, and KV blocks of 96 keys. Head
dimension 512: in fa2 tiles whose warps share rows in fours and pairs, or halves of the columns; in fa3 pairs of thread
blocks that have half of the columns each."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_repeats
from environment import why_no_fa3
from pairs import every
from planned_runs import attend
from problems import Batch, Options, expect, make_batch
from ran import counts
from targets import Target
from test_kernels import (
    CAUSAL,
    DEVICE,
    HALF,
    OPTIONS,
    batch_of,
    check,
    check_masks,
    every_kind_of_tile,
    masked_heads_and_rows,
)

import cutlass_kernels as ck

pytestmark = pytest.mark.gpu
DIMS = [(96, 96), (80, 80), (96, 48), (192, 192), (160, 160), (136, 184)]
WIDE = [(512, 512), (320, 320), (264, 512), (512, 256), (64, 512)]


def sources(wide: list[tuple[int, int]], pages_of_wide: list[int | None], pages: list[int | None]):
    """Head dimensions, with sizes of pages or none."""
    return every(**{"dims,page_size": [*itertools.product(DIMS, pages), *itertools.product(wide, pages_of_wide)]})


@pytest.mark.pairwise
@every(options=OPTIONS, dtype=HALF)
@sources(WIDE, [None, 1, 5, 16], [None, 1, 5, 8, 16, 24, 64])
@every_kind_of_tile
def test_tiles(kernel_backend, dims, options, dtype, page_size, heads, lens):
    check(kernel_backend, batch_of(lens, heads, dims, dtype), options, page_size)


@sources([(512, 512)], [None, 1, 16], [None, 1, 8, 16])
@masked_heads_and_rows
def test_masks(kernel_backend, dims, page_size, heads, rows):
    # A lane reads the bits of 32 keys: of blocks of 96 keys, three lanes of four.
    check_masks(kernel_backend, heads, rows, dims, 70 if dims[0] == 512 else 110, page_size)


@every(dims=[(96, 96), (192, 192)], page_size=[1, 8, 16, 32, 48])
def test_long_page_tables(kernel_backend, dims, page_size):
    # Boxes are looked up in batches: 24 of them where KV blocks are of 96 keys.
    batch = batch_of(([200, 1, 90, 64], [3000, 2999, 97, 1500]), (32, 32), dims)
    for name in ("full", "window"):
        check(kernel_backend, batch, OPTIONS[name], page_size)


@every(
    dims=[*DIMS, (512, 512)],
    heads=[(32, 8), (8, 8), (16, 1), (4, 2)],
    lens=[[40], [16000], [1, 1, 1], [3, 700, 0, 65, 64, 5000]],
)
def test_decode(dims, heads, lens):
    batch = batch_of(([1] * len(lens), lens), heads, dims, torch.bfloat16)
    want = expect(batch)

    def check_output(call) -> None:
        assert_close(assert_repeats(call, 3)[0], want.out, want.baseline)

    for backend in ("auto", "fa2") if why_no_fa3() else ("auto", "fa2", "fa3"):
        check_output(functools.partial(attend, backend, batch, page_size=16, form="tuple"))
    if dims[0] == dims[1]:
        paged = batch.paged(16, form="tuple")
        wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(Target(DEVICE, "auto").workspace())
        wrapper.plan(*paged.table(), *batch.heads, 16, q_data_type=torch.bfloat16)
        check_output(lambda: [wrapper.run(batch.q, paged.cache)])
        if len(lens) == 1:
            check_output(lambda: [ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v)[None]])


@every(dim=[96, 192])
def test_columns_beyond_the_head_are_left_alone(kernel_backend, dim):
    # Outputs and values are the first columns of wider rows, whose other columns no kernel may write, or read.
    batch = make_batch([300, 5], [300, 700], 32, 8, dim, device=DEVICE)
    wide = torch.full((305, 32, 256), 7.0, dtype=batch.q.dtype, device=DEVICE)
    for name in ("k", "v"):
        of_keys = torch.full((1000, 8, 256), float("nan"), dtype=batch.q.dtype, device=DEVICE)
        of_keys[..., :dim] = getattr(batch, name)
        setattr(batch, name, of_keys[..., :dim])
    attend(kernel_backend, batch, CAUSAL, run={"out": wide[..., :dim]})
    want = expect(batch, CAUSAL)
    assert_close(wide[..., :dim], want.out, want.baseline)
    assert bool((wide[..., dim:] == 7.0).all())


def test_rotary_embedding(kernel_backend):
    batch = make_batch([40, 1], [300, 77], 8, 2, 512, device=DEVICE)
    check(kernel_backend, batch, Options(causal=True, pos_encoding_mode="ROPE_LLAMA"))


def test_fixed_splits_do_not_depend_on_the_batch(kernel_backend):
    batch = make_batch([5, 33, 1], [900, 2000, 4000], 8, 2, 512, device=DEVICE)
    together = attend(kernel_backend, batch, CAUSAL, fixed_split_size=512)[0].split(batch.qo_lens)
    for out, (q, k, v) in zip(together, batch.requests()):
        alone = Batch([len(q)], [len(k)], q, k, v)
        assert_bitwise(attend(kernel_backend, alone, CAUSAL, fixed_split_size=512)[0], out)


@pytest.mark.hopper
def test_auto():
    assert ck.explain(device=DEVICE, head_dim_qk=512, num_qo_heads=8, num_kv_heads=2).selected == "fa3"
    batch = make_batch([1], [700], 8, 2, 512, dtype=torch.bfloat16, device=DEVICE)
    start = counts()
    ck.single_decode_with_kv_cache(batch.q[0], batch.k, batch.v)
    assert (counts() - start).keys() == {"fa2"}
