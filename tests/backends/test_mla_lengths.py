"""Latent attention (MLA) of batches whose lengths differ much."""

from __future__ import annotations

import random

import pytest
import torch
from pairs import every
from plan_free_problems import Mask
from test_mla import CAUSAL, check, check_captured, latent_batch

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]


def lengths(kind: str, count: int, mean: int) -> list[int]:
    rng = random.Random(count)
    if kind == "one long":
        return [1] * (count // 2) + [mean * 40] + [rng.randint(0, mean) for _ in range(count - count // 2 - 1)]
    if kind == "rising":
        return [1 + 2 * mean * i // count for i in range(count)]
    return [rng.choice([0, 1, rng.randint(0, mean), rng.randint(0, 4 * mean)]) for _ in range(count)]


@every(kind=["random", "rising", "one long"], page_size=[16, 5])
@pytest.mark.parametrize(
    ("count", "heads", "rows", "mean"),
    [
        (160, 128, 1, 300),  # tiles of two packs of heads
        (100, 128, 2, 200),  # and of two tokens
        (290, 16, 1, 400),
        (140, 16, 5, 100),
        (33, 96, 8, 300),
        (5, 128, 40, 300),  # more tiles than are split evenly
        (700, 16, 1, 50),
        (1000, 8, 1, 20),
        (1100, 8, 1, 20),  # more than are split
    ],
)
def test_every_request_is_computed_once(count, heads, rows, mean, kind, page_size):
    kv_lens = lengths(kind, count, mean)
    batch = latent_batch([rows] * count, kv_lens, heads, "cuda:0")
    check(batch, "fa3", "table", CAUSAL, page_size, dense=True)


@every(
    kind=["random", "one long"],
    mask=[Mask(), Mask(causal=True, window=(900, -1)), Mask(causal=True, chunk_size=700)],
    form=["ragged", "indices"],
)
def test_masks_leave_some_keys(form, mask, kind):
    batch = latent_batch([2] * 150, [max(n, 2) for n in lengths(kind, 150, 600)], 64, "cuda:0", torch.float16)
    check(batch, "fa3", form, mask)


def test_keys_of_requests_without_rows():
    kv_lens = lengths("random", 90, 900)
    check(latent_batch([i % 3 % 2 for i in range(90)], kv_lens, 128, "cuda:0"), "fa3", "indices", CAUSAL)


@every(num_splits=[0, 4])
def test_queries_of_different_lengths(num_splits):
    rng = random.Random(3)
    qo_lens = [rng.choice([0, 1, 2, 9]) for _ in range(180)]
    batch = latent_batch(qo_lens, [n + rng.choice([0, 3, 1000]) for n in qo_lens], 64, "cuda:0")
    check(batch, "fa3", "indices", CAUSAL, num_splits=num_splits)


@every(**{"heads": [16, 128], "count,most": [(170, 2048), (2, 4096), (1, 8192)]})
def test_a_captured_call_follows_lengths_that_begin_to_differ(count, most, heads):
    others = [[most // 2] * count, [1000] * count, [1] * (count - 1) + [most - 1]]
    others += [[min(n, most) for n in lengths(kind, count, 500)] for kind in ("random", "one long", "rising")]
    check_captured(latent_batch([1] * count, [most] * count, heads, "cuda:0"), [*others, [most] * count], "fa3")


@every(rows=[0, 1])
def test_padding_among_requests(rows):
    rng = random.Random(7)
    kv_lens = [0 if i % 7 else rng.randint(900, 1100) for i in range(256)]
    check(
        latent_batch([rows if n == 0 else 1 for n in kv_lens], kv_lens, 16, "cuda:0"), "fa3", "table", Mask(causal=True)
    )


def test_equal_lengths_in_several_splits():
    for count, keys in ((2, 9000), (20, 3000), (66, 1000), (140, 700)):
        check(latent_batch([1] * count, [keys] * count, 128, "cuda:0"), "fa3", "table", CAUSAL)
