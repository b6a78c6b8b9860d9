"""fa2's tiles of 256 rows, whose two groups of warps take turns with the tensor cores."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from environment import why_no_fa3
from pairs import every
from problems import Options
from test_kernels import DEVICE, attend, batch_of, check, check_repeats

pytestmark = pytest.mark.gpu

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


def case_of(case: str, dtype: torch.dtype = torch.bfloat16):
    heads, *lens = CASES[case]
    return batch_of(lens, heads, (128, 128), dtype)


@every(page_size=[None, 1, 16], case=CASES.keys(), options=OPTIONS)
def test_outputs(page_size, case, options):
    check("fa2", case_of(case), options, page_size)


@every(page_size=[None, 16], case=CASES.keys())
def test_sinks_fp16_and_repeated_calls(page_size, case):
    batch = case_of(case, torch.float16)
    sinks = torch.linspace(-2.0, 4.0, batch.q.shape[1], device=DEVICE)
    check("fa2", batch, Options(sinks=sinks), page_size)
    check_repeats("fa2", batch, 10, Options(causal=True, sinks=sinks), page_size)


@every(case=["one head", "packed"], name=["causal", "cap"])
def test_rising_maxima(case, name):
    """The maximum of a row rises in every KV block, as they come from last to first."""
    batch = case_of(case)
    batch.k[: batch.kv_lens[0]] *= torch.linspace(8.0, 0.1, batch.kv_lens[0], device=DEVICE)[:, None, None]
    check("fa2", batch, dataclasses.replace(OPTIONS[name], window_left=2000), page_size=16)


@pytest.mark.parametrize("case,kernel", [("one head", "::Turns"), ("packed, split keys", "::PackedTurns")])
def test_these_kernels_run(case, kernel):
    if why_no_fa3() is None:
        pytest.skip("in a build with fa3, fa2 has no such tiles on Hopper: CK_BACKENDS=fa2 compiles them")
    batch = case_of(case)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        attend("fa2", batch, Options(), 16)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if "attention_kernel" in event.name]
    assert any(kernel in name for name in names), names
