"""Ranks whose calls differ all raise the same error; groups that are alike do not mix up what their ranks tell."""

from __future__ import annotations

import cp_calls
import cp_groups
import pytest

pytestmark = pytest.mark.runs_nothing("ranks are other processes")


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
    processes.refuses(told.format(who=who), cp_calls.disagreeing, shape, "prefill", who, what)


@pytest.mark.parametrize("who", [0, 2])
def test_functions(gloo, who):
    told = rf"Ranks (make different calls|disagree on the function): .* on rank {who}\b"
    gloo.refuses(told, cp_calls.disagreeing, 3, "prefill", who, "function")


@pytest.mark.parametrize(
    "name, what, told",
    [
        ("decode", "rows", r"On rank {who}: seqused_k has 2 elements, but this batch needs 1"),
        ("decode", "head_dim", r"On rank {who}: k has shape .* and v|On rank {who}: q has head_dim 64 and k 32"),
        ("decode", "cache", r"On rank {who}: k has shape \(4, 2, 64\)"),
        ("decode", "table", r"On rank {who}: page_table is \(1, 2\)"),
        ("decode", "sinks", r"On rank {who}: sinks has shape \(2,\)"),
        ("decode", "scales", r"On rank {who}: k_descale has shape \(3,\)"),
        ("decode", "block_size", r"on options: \(4, .*\(2, .* on rank {who}\b|on options: \(2, .* on rank {who}; \(4,"),
        ("latent", "values", r"On rank {who}: k_rope is given, but v .* is not k in the same memory"),
        ("latent", "heads", r"On rank {who}: q_rope has shape .*, 6, 64\) and q .*, 8, 512\)"),
        ("latent", "dimensions", r"On rank {who}: q_rope has shape \(1, 4, 64\): it must be \[B, n, heads, D\]"),
        ("latent", "columns", r"On rank {who}: q has head_dim 544 and k 576"),
        ("latent", "keys", r"Ranks disagree on the cache: .*576.* on rank {who}\b"),
    ],
)
@pytest.mark.parametrize("who", [0, 1])
def test_decode(processes, who, name, what, told):
    processes.refuses(told.format(who=who), cp_calls.disagreeing, 2, name, who, what)


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
