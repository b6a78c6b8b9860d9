"""fa2's tiles of 256 rows, whose two groups of warps take turns with the tensor cores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from compare import assert_bitwise
from environment import why_no_fa3
from problems import Options, make_batch
from test_kernels import attend, check

pytestmark = pytest.mark.gpu
DEVICE = "cuda:0"

# Rows of one head and packed heads; tiles that are partly empty, requests without rows or with fewer keys than others,
# KV splits, numbers of KV blocks that stages do not divide.
CASES = {
    "one head": ((16, 16), [1500, 0, 1400, 1, 1111], [2400, 7, 2900, 900, 1111]),
    "one head, one request": ((20, 20), [2100], [2500]),
    "packed": ((32, 8), [64, 128, 100, 64, 128, 64, 77, 128], [3000, 4096, 65, 2500, 3001, 3500, 4000, 129]),
    "packed, split keys": ((32, 8), [300], [20000]),
    "packed by seven": ((28, 4), [130, 70, 200, 130, 68, 200], [6000, 5000, 7000, 6001, 5999, 6500]),
}
OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window_left=1500),
    "cap": Options(causal=True, logits_soft_cap=5.0),
    "alibi": Options(causal=True, pos_encoding_mode="ALIBI"),
}


@pytest.fixture(autouse=True)
def preferred(extension, request):
    from cutlass_kernels import _C

    _C.prefer_tile("turns" if request.node.callspec.params["case"].startswith("one head") else "packed_turns")
    yield
    _C.prefer_tile("")


@pytest.fixture(autouse=True)
def returned_memory():
    """Expected values take gigabytes, which other processes of the test run may need afterwards."""
    yield
    torch.cuda.empty_cache()


def batch_of(case: str, dtype: torch.dtype = torch.bfloat16):
    heads, qo_lens, kv_lens = CASES[case]
    return make_batch(qo_lens, kv_lens, *heads, 128, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_outputs(page_size, case, name):
    check("fa2", batch_of(case), OPTIONS[name], page_size=page_size)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("page_size", [None, 16])
def test_sinks_fp16_and_repeated_calls(page_size, case):
    batch = batch_of(case, torch.float16)
    sinks = torch.linspace(-2.0, 4.0, batch.q.shape[1], device=DEVICE)
    check("fa2", batch, Options(), sinks, page_size)
    out, lse = attend("fa2", batch, Options(causal=True), sinks, page_size)
    for _ in range(10):
        again = attend("fa2", batch, Options(causal=True), sinks, page_size)
        assert_bitwise(again[0], out)
        assert_bitwise(again[1], lse)


@pytest.mark.parametrize("case", ["one head", "packed"])
@pytest.mark.parametrize("name", ["causal", "cap"])
def test_rising_maxima(case, name):
    """The maximum of a row rises in every KV block, as they come from last to first."""
    batch = batch_of(case)
    batch.k[: batch.kv_lens[0]] *= torch.linspace(8.0, 0.1, batch.kv_lens[0], device=DEVICE)[:, None, None]
    options = dataclasses.replace(OPTIONS[name], window_left=2000)
    check("fa2", batch, options, page_size=16)


@pytest.mark.parametrize("case,kernel", [("one head", "::Turns"), ("packed, split keys", "::PackedTurns")])
def test_these_kernels_run(case, kernel):
    if why_no_fa3() is None:
        pytest.skip("in a build with fa3, fa2 has no such tiles on Hopper: CK_BACKENDS=fa2 compiles them")
    batch = batch_of(case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend("fa2", batch, Options(), None, 16)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "attention_kernel" in event.name]
    assert any(kernel in name for name in names), names
