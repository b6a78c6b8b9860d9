"""Rows written to slots of a paged cache with PyTorch."""

from __future__ import annotations

import torch


def write(stored: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes ``stored [n, ...]`` to slots of ``cache [pages, page_size, ...]``, in place. Slots that it does not have
    are skipped.

    Nothing is read back: skipped tokens repeat the write of the first that is not skipped, or write what is there.
    """
    page_size, room = cache.size(1), cache.size(0) * cache.size(1)
    inside = (slots >= 0) & (slots < room)
    token = torch.where(inside, torch.arange(slots.numel(), device=slots.device), inside.to(torch.int32).argmax())
    slots = slots[token].clamp(0, room - 1)
    page, entry = slots // page_size, slots % page_size
    cache[page, entry] = torch.where(inside.any(), stored[token], cache[page, entry])
