"""Custom masks that show a range of keys to every row: kernels compute it without looking at the bits."""

from __future__ import annotations

import pytest
import torch
from mask_problems import check, flat
from problems import Options, make_batch

# (rows, keys, ranges that all rows see): none, one that begins or ends inside a word of 32 keys, one of several blocks,
# all, the longer of two, and one over the end of the 8192 keys that are looked at together.
SHAPES = [
    (150, 300, []),
    (150, 300, [(0, 64)]),
    (150, 300, [(31, 97)]),
    (150, 511, [(128, 384)]),
    (70, 300, [(0, 300)]),
    (130, 1000, [(40, 200), (300, 901)]),
    (130, 1000, [(64, 640), (700, 1000)]),
    (40, 8500, [(8000, 8450)]),
    (40, 8500, [(0, 8192)]),
]


@pytest.mark.parametrize("kind", ["single", "ragged", "paged"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window_left", [-1, 180])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ranges_that_every_row_sees(target, kind, head_dim, window_left, shape):
    rows, keys, ranges = shape
    if target.device == "cpu" and (head_dim, kind) != (64, "ragged"):
        pytest.skip("the reference looks at every bit: one kind of call and head dimension will do")
    lengths = ((rows,), (keys,)) if kind == "single" else ((7, rows, 0, 1), (33, keys, 5, 40))
    batch = make_batch(*lengths, 4, 2, head_dim, device=target.device)
    masks = batch.random_masks(0.7)
    long = masks[0 if kind == "single" else 1]
    long[:, -20:] = False  # keys that no row sees
    for begin, end in ranges:
        long[:, begin:end] = True
    options = Options(window_left=window_left, custom_masks=masks)
    check(target, kind, batch, options, needs=["custom_mask"], custom_mask=flat(masks))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_values_that_no_row_sees_beside_a_range_that_all_see(target, kind):
    batch = make_batch((90, 3), (400, 20), 4, 2, 64, device=target.device)
    masks = batch.random_masks(0.7)
    masks[0][:, :256] = True
    masks[0][:, [260, 300, 399]] = False
    options = Options(custom_masks=masks)
    for key in (260, 300, 399):
        batch.v[key] = torch.nan
    check(target, kind, batch, options, needs=["custom_mask"], custom_mask=flat(masks))
