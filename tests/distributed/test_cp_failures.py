"""A rank that fails ends the others with an error, within the timeout of the group; none of them hangs."""

from __future__ import annotations

import re
from typing import Any

import cp_failures
import pytest
import torch
from failing_ranks import Outcome, outcomes

pytestmark = pytest.mark.runs_nothing("ranks are other processes")

# Seconds: the timeout of the group, and how much later a rank may end. PyTorch's watchdog writes a stack trace before,
# which took 6 s.
LIMITS = {"cpu": (2, 5), "cuda": (10, 30)}
METHODS = [
    "prefill allgather",
    "prefill ring",
    "prefill ulysses",
    "combine a2a",
    "combine ag_rs",
    "decode a2a",
    "decode ag_rs",
]


def run(device: str, stays: bool, function: Any, method: str, before: int) -> dict[int, Outcome]:
    world = 3 if device == "cpu" else min(torch.cuda.device_count(), 3)
    if world < 2:
        pytest.skip(f"needs two GPUs, this machine has {world}")
    found = outcomes(device, world, *LIMITS[device], stays, function, method, before)
    expected = set(range(world)) - ({cp_failures.LEAVES} if function is cp_failures.one_leaves else set())
    assert set(found) == expected, found
    return found


def check_that_all_end(found: dict[int, Outcome], how: tuple[str, ...] = ("raised",)) -> None:
    assert all(outcome.how in how and outcome.what for outcome in found.values()), found


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("method", METHODS)
def test_a_rank_that_dies(method, before):
    """Before the first call, or after one."""
    found = run("cpu", False, cp_failures.one_leaves, method, before)
    check_that_all_end(found)
    if before == 0:
        assert all("Rank 1 did not come within 2 s" in outcome.what for outcome in found.values()), found


@pytest.mark.parametrize("method", ["prefill allgather", "prefill ring", "combine a2a", "decode ag_rs"])
def test_a_rank_that_raises_elsewhere(method):
    """It lives, but makes no more calls: only the timeout tells the others."""
    found = run("cpu", True, cp_failures.one_leaves, method, 1)
    check_that_all_end(found)
    assert all("Timed out" in outcome.what for outcome in found.values())


# Each takes half a minute. The kernels of "symmetric", and the barriers of "allgather", wait on the GPU.
@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "method, stays, before",
    [
        ("prefill allgather", False, 0),
        ("prefill allgather", False, 1),
        ("prefill ring", True, 1),
        ("combine a2a", False, 1),
        ("combine symmetric", False, 1),
        ("combine symmetric", True, 1),
        ("decode symmetric", False, 1),
    ],
)
def test_a_rank_that_fails_with_nccl(method, stays, before):
    """PyTorch's watchdog ends processes."""
    check_that_all_end(run("cuda", stays, cp_failures.one_leaves, method, before), ("raised", "ended"))


@pytest.mark.parametrize(
    "method, told",
    [
        ("prefill allgather", "On rank 1: q has 5 rows"),
        ("combine a2a", r"Ranks disagree on the shape of out: .* on ranks 0, 2; .* on rank 1"),
        ("decode a2a", r"Ranks disagree on .* on ranks 0, 2; .* on rank 1"),
    ],
)
def test_a_first_call_that_differs(method, told):
    found = run("cpu", False, cp_failures.one_differs, method, 0)
    assert all(outcome.how == "raised" for outcome in found.values()), found
    assert len({outcome.what for outcome in found.values()}) == 1
    assert re.match(f"ValueError: {told}", found[0].what), found


@pytest.mark.parametrize("method", ["prefill allgather", "combine a2a"])
def test_a_later_call_that_differs(method):
    """The others are past the check. The rank that has found a fault tells it."""
    found = run("cpu", False, cp_failures.one_differs, method, 1)
    check_that_all_end(found)
    if method.startswith("prefill"):
        assert "q has 5 rows" in found[cp_failures.LEAVES].what, found
