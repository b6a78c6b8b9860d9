"""e4m3 queries, keys, values and outputs of trtllm_fmha_v2_prefill."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_problems import (
    E4M3,
    LAYOUTS,
    MODES,
    NOT_PACKED,
    SINKS,
    InE4M3,
    Mode,
    batch_of,
    call,
    check_e4m3,
    expect,
    tensors_of,
)
from problems import make_batch

E4M3_MODES = {**MODES, "sinks": Mode(sinks=SINKS, window_left=50), "negative": Mode(bmm1=0.1, bmm2=-3.0)}


CASES = [
    *[("uneven", mode, 128) for mode in E4M3_MODES],
    *[(lengths, mode, 128) for lengths in ("even", "empty", "decode") for mode in ("causal", "alibi")],
    *[(lengths, "causal", dim) for lengths in ("even", "decode") for dim in (32, 40, 64, 80, 112, 256)],
    *[(lengths, "scales in tensors", 128) for lengths in ("uneven", "decode")],
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths,mode,head_dim", CASES)
def test_e4m3_output(target, layout, lengths, mode, head_dim):
    batch, tensors = batch_of(target, layout, lengths, E4M3, head_dim), mode == "scales in tensors"
    mode = Mode(bmm1=0.1, bmm2=0.7) if tensors else E4M3_MODES[mode]
    check_e4m3(batch, layout, mode, target, **(tensors_of(target, mode) if tensors else {}))


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["even", "decode"])
@pytest.mark.parametrize("alibi,bmm2", [(False, 1e4), (False, -1e9), (True, 1e9)])
def test_e4m3_output_saturates(target, layout, lengths, alibi, bmm2):
    # The larger scale is beyond float16, too.
    batch, mode = batch_of(target, layout, lengths, E4M3, 128), Mode(alibi=alibi, bmm2=bmm2)
    out, want = call(batch, layout, mode, out_dtype=E4M3), InE4M3(batch, mode, target)
    want.check(out)
    assert not bool(out.float().isnan().any())
    beyond = want.exact.abs() > 480 + 2 * want.lost
    assert float(beyond.float().mean()) > 0.05
    assert torch.equal(out.float()[beyond], 448 * want.exact[beyond].sign().float())


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("alibi", [False, True])
def test_e4m3_rows_without_keys_are_zero(target, layout, head_dim, alibi):
    for qo_lens, kv_lens in (([40, 133, 5, 3], [7, 134, 0, 2]), ([1, 3, 2, 4], [0, 2, 5, 0])):
        batch = make_batch(qo_lens, kv_lens, 4, 2, head_dim, dtype=E4M3, device=target.device)
        out = check_e4m3(batch, layout, Mode(alibi=alibi), target, max_kv_len=200)
        empty = (expect(batch, Mode(alibi=alibi))[0] == 0).all(-1)
        assert bool(empty.any()) and bool((out.float()[empty] == 0).all())


@pytest.mark.pairwise
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", ["even", "decode"])
@pytest.mark.parametrize("alibi", [False, True])
def test_nan_stays_nan_in_e4m3(target, layout, lengths, alibi):
    batch = batch_of(target, layout, lengths, E4M3, 128)
    values = batch.v.float()
    values[-1, 0, 77] = torch.nan
    batch = dataclasses.replace(batch, v=values.to(E4M3))
    out = check_e4m3(batch, layout, Mode(mask_mode="padding", alibi=alibi), target)
    assert bool(torch.isnan(out.float()).any())


@pytest.mark.parametrize("layout", NOT_PACKED)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_e4m3_output_of_split_keys(target, layout, head_dim):
    batch = make_batch([1, 3], [1500, 1100], 4, 2, head_dim, dtype=E4M3, device=target.device)
    for mode in (Mode(), E4M3_MODES["sinks"], Mode(bmm2=3e4)):
        check_e4m3(batch, layout, mode, target)
