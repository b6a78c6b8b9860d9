"""Masks among the draft tokens of a decode step."""

from __future__ import annotations

import pytest
import torch
from plan_free_problems import Mask
from problems import Batch, make_batch
from trtllm_problems import DECODE, XQA, cache_and_table, compare, decode_batch, scale_of


def packed(masks: list[torch.Tensor], width: int, device: str) -> torch.Tensor:
    """Masks ``[n, n]`` of requests as rows of bits, uint16 ``[rows, words]``."""
    words = []
    for mask in masks:
        for row in mask.tolist():
            number = sum(1 << c for c, seen in enumerate(row) if seen)
            words.append([number >> 16 * i & 0xFFFF for i in range((width + 31) // 32 * 2)])
    return torch.tensor(words, dtype=torch.int32).to(torch.uint16).to(device)


def draft_problem(batch: Batch, generator: torch.Generator) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masks of draft tokens, and those of all keys that they mean."""
    drafts, whole = [], []
    for n, m in zip(batch.qo_lens, batch.kv_lens):
        draft = torch.rand(n, n, generator=generator) < 0.5
        drafts.append(draft)
        all_keys = torch.ones(n, m, dtype=torch.bool)
        all_keys[:, m - n :] = draft
        whole.append(all_keys.to(batch.device))
    return drafts, whole


@pytest.mark.parametrize("function", [DECODE, XQA])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 40])
@pytest.mark.parametrize("window", [-1, 6])
def test_masks_of_draft_tokens(target, function, rows, window):
    kv_lens = [rows, rows + 7, 200, 129]
    batch = make_batch([rows] * 4, kv_lens, 8, 2, 64, device=target.device)
    drafts, whole = draft_problem(batch, torch.Generator().manual_seed(rows))
    bits = packed(drafts, rows, target.device).view(4, rows, -1)
    given = dict(q_len_per_req=rows, window_left=window, kv_layout="HND", mask=bits)
    out = function(batch.q, *cache_and_table(batch), scale_of(batch), **given)
    compare(batch, out, Mask(window=(window, -1), bits=whole))


def test_masks_of_drafts_whose_lengths_differ(target):
    batch = make_batch([3, 0, 33, 1], [70, 5, 40, 16], 8, 2, 64, device=target.device)
    drafts, whole = draft_problem(batch, torch.Generator().manual_seed(0))
    given = dict(q_len_per_req=33, q_cu_seq_lens=batch.qo_indptr(target.device))
    mask = packed(drafts, 33, target.device)
    cache = cache_and_table(batch, "NHD")
    compare(batch, XQA(batch.q, *cache, scale_of(batch), mask=mask, **given), Mask(bits=whole))


@pytest.mark.parametrize("width", [2, 40])
@pytest.mark.parametrize("function", [DECODE, XQA])
def test_rows_of_a_mask_bound_the_drafts(target, function, width):
    """More rows in all than a row has bits, and no bound of the drafts: the default of ``q_len_per_req`` is none."""
    batch = make_batch([2, 1, width] * 14, [70, 5, 41] * 14, 8, 2, 64, device=target.device)
    drafts, whole = draft_problem(batch, torch.Generator().manual_seed(0))
    offsets = {"cum_seq_lens_q" if function is DECODE else "q_cu_seq_lens": batch.qo_indptr(target.device)}
    mask = packed(drafts, width, target.device)
    assert mask.shape == (batch.q.size(0), 2 if width == 2 else 4)
    cache = cache_and_table(batch)
    compare(batch, function(batch.q, *cache, scale_of(batch), kv_layout="HND", mask=mask, **offsets), Mask(bits=whole))


def test_drafts_that_are_longer_than_rows_of_their_mask():
    batch = make_batch([3, 33], [70, 40], 8, 2, 64)
    given = dict(q_cu_seq_lens=batch.qo_indptr("cpu"), mask=torch.zeros(36, 2, dtype=torch.uint16))
    with pytest.raises(ValueError, match="a request has 33 draft tokens, but rows of mask"):
        XQA(batch.q, *cache_and_table(batch, "NHD"), scale_of(batch), **given)


def test_a_causal_mask_is_the_default(target):
    batch = decode_batch(target, 3)
    mask = packed([torch.ones(3, 3).tril()] * 4, 3, target.device).view(4, 3, -1)
    cache = cache_and_table(batch, "NHD")
    compare(batch, XQA(batch.q, *cache, scale_of(batch), q_len_per_req=3, mask=mask))


def test_padding_of_a_graph_with_a_mask(target):
    """Requests of length 0, and a bound of lengths beyond the table."""
    batch = make_batch([2] * 3, [40, 0, 1], 8, 2, 64, device=target.device)
    mask = packed([torch.ones(2, 2).tril()] * 3, 2, target.device).view(3, 2, -1)
    cache, workspace, table, lens, _ = cache_and_table(batch, "NHD")
    out = XQA(batch.q, cache, workspace, table, lens, 10**6, scale_of(batch), q_len_per_req=2, mask=mask)
    compare(batch, out)


# --- other arguments ---
