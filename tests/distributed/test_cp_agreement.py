"""Ranks whose calls differ all raise the same error; groups that are alike do not mix up what their ranks tell."""

from __future__ import annotations

from typing import Any

import cp_calls
import cp_groups
import pytest
from ranks import Failed

pytestmark = pytest.mark.runs_nothing("ranks are other processes")


def check(processes: Any, shape: int | tuple[int, int], told: str, function: Any, *args: Any) -> None:
    world = shape if isinstance(shape, int) else shape[0] * shape[1]
    if world > processes.world:
        pytest.skip(f"needs {world} GPUs, this machine has {processes.world}")
    with pytest.raises(Failed, match=told) as failed:
        processes.run(function, shape, *args)
    assert sorted(failed.value.messages) == list(range(world))
    assert len(set(failed.value.messages.values())) == 1


@pytest.mark.parametrize(
    "what, told",
    [
        ("rows", r"On rank {who}: q has 7 rows"),
        ("dimensions", r"On rank {who}: q has shape \(\)|On rank {who}: IndexError"),
        ("head_dim", r"On rank {who}: q has head_dim 64 and k 32"),
        ("causal", r"Ranks disagree on the mask: .*\(True.* on rank {who}\b"),
        ("dtype", r"Ranks disagree on dtypes: .*bfloat16.* on rank {who}\b"),
        ("seqlens", r"Ranks disagree on seqlens: .* on rank {who}\b"),
        ("sinks", r"On rank {who}: sinks has shape \(3,\)"),
        ("scales", r"On rank {who}: k_descale has shape \(3,\)"),
    ],
)
@pytest.mark.parametrize("shape", [2, (2, 1), (2, 2)], ids=["2", "2x1", "2x2"])
@pytest.mark.parametrize("who", [0, 1])
def test_prefill(processes, who, shape, what, told):
    world = shape if isinstance(shape, int) else shape[0] * shape[1]
    check(processes, shape, told.format(who=who), cp_calls.disagreeing, who, what, {"seqlens": [8 * world]})


@pytest.mark.parametrize("who", [0, 2])
def test_functions(gloo, who):
    told = rf"Ranks (make different calls|disagree on the function): .* on rank {who}\b"
    check(gloo, 3, told, cp_calls.disagreeing, who, "function", {"seqlens": [24]})


@pytest.mark.parametrize(
    "what, told",
    [
        ("rows", r"On rank {who}: seqused_k has 2 elements, but this batch needs 1"),
        ("head_dim", r"On rank {who}: k has shape .* and v|On rank {who}: q has head_dim 64 and k 32"),
        ("cache", r"On rank {who}: k has shape \(4, 2, 64\)"),
        ("table", r"On rank {who}: page_table is \(1, 2\)"),
        ("sinks", r"On rank {who}: sinks has shape \(2,\)"),
        ("scales", r"On rank {who}: k_descale has shape \(3,\)"),
        ("block_size", r"Ranks disagree on options: \(4, .*\(2, .* on rank {who}\b|\(2, .* on rank {who}; \(4,"),
    ],
)
@pytest.mark.parametrize("who", [0, 1])
def test_decode(processes, who, what, told):
    check(processes, 2, told.format(who=who), cp_calls.disagreeing_decode, who, what)


def test_after_an_error_ranks_agree_again(processes):
    """An error of all ranks, then one of a single rank in a call of a kind that the others know."""
    assert processes.run(cp_groups.agrees_after_errors, 2) == [True, True]


def test_who_is_missing(gloo):
    first, second = gloo.run(cp_groups.tells_who_is_missing, 2)
    assert first[0].startswith("Rank 1 did not come within 1 s") and first[1:] == [0, 1]
    assert second[0].startswith("Rank 0 did not come within 1 s") and second[1:] == [0, 1]


def test_backends_may_differ(gloo):
    assert gloo.run(cp_groups.other_backend, 2) == [True, True]


def test_groups_that_share_a_store_and_a_name(gloo):
    assert gloo.run(cp_groups.siblings, 4) == [True] * 4


def test_a_group_that_is_made_again(gloo):
    assert gloo.run(cp_groups.made_again, 4) == [True] * 4


def test_symmetric_memory_that_some_ranks_cannot_get(gloo):
    """On the CPU, with memory that is none: what ranks agree on."""
    assert gloo.run(cp_groups.symmetric_memory, 2) == [[], []]
