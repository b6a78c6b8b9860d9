"""The mask function of transformers: once per forward pass and kind of mask, which keys do the rows see?

The answer is None where only causality hides keys, key ranges (``_key_ranges``) where each sequence sees one interval
of its keys, and otherwise the bool mask ``[batch, 1, rows, keys]`` that transformers makes for ``sdpa``.

Whether a padding mask is an interval is read back from the device once. Nothing is read back while a graph is traced or
captured, nor in a decode step on a static cache: a padding mask then stays a bool mask.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .._core.tracing import is_captured, is_traced
from . import _key_ranges
from ._key_ranges import Kind

_combiners: dict[int, weakref.ref[Any]] = {}  # configurations of models that compute with their masks, by id


class _Places(NamedTuple):
    """Where rows and keys stand in their sequences: row i at ``q_offset + i``, key j at ``kv_offset + j``."""

    batch: int
    rows: int
    keys: int
    q_offset: int | torch.Tensor
    kv_offset: int
    device: torch.device | str


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **more: Any,
) -> torch.Tensor | None:
    """What transformers calls, with the arguments of its ``sdpa_mask``."""
    kind = None
    if not use_vmap:
        skips = (allow_is_causal_skip, allow_is_bidirectional_skip)
        kind = _kind(q_length, q_offset, mask_function, local_size, skips, config)
    if kind is not None:
        places = _Places(batch_size, q_length, kv_length, q_offset, kv_offset, device)
        is_known, found = _find(kind, places, attention_mask)
        if is_known:
            return found
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
        config=config,
        **more,
    )


def _kind(
    rows: int,
    q_offset: int | torch.Tensor,
    mask_function: Callable[..., Any],
    local_size: int | None,
    skips: tuple[bool, bool],
    config: Any,
) -> Kind | None:
    """The mask without padding, where it is known. ``skips``: whether it may be left out if nothing more is hidden,
    being causal, or full. So it is neither packed, blockwise nor custom."""
    causal, full = skips
    if causal:
        if local_size is None:
            return Kind(causal=True) if mask_function is causal_mask_function else None
        chunk_size, window = (getattr(config, name, None) for name in ("attention_chunk_size", "sliding_window"))
        if local_size == chunk_size != window:
            return Kind(causal=True, chunk_size=local_size)
        return Kind(causal=True, left=local_size - 1) if local_size == window != chunk_size else None
    if full:
        if local_size is None:
            return Kind() if mask_function is bidirectional_mask_function else None
        return Kind(left=local_size, right=local_size)
    # transformers asks for a mask of decode steps on static caches, which it compiles. Models that concatenate masks,
    # or index them, ask for every mask: their prompt came first.
    if mask_function is not causal_mask_function or is_traced():
        return None
    if rows > 1:
        if config is not None:
            _combiners[id(config)] = weakref.ref(config)
        return None
    known = _combiners.get(id(config))
    if isinstance(q_offset, torch.Tensor) and (known is None or known() is not config):
        return Kind(causal=True)
    return None


def _find(kind: Kind, places: _Places, padding: torch.Tensor | None) -> tuple[bool, torch.Tensor | None]:
    """Whether the visible keys are known to be intervals; the key ranges, or None where nothing more is hidden."""
    first: int | torch.Tensor = 0
    left_padding: int | torch.Tensor = 0
    end: int | torch.Tensor = places.keys
    if padding is None:
        if is_traced():
            end = _end(kind, places)
            return isinstance(end, int) and _hides_nothing(kind, places, 0, end), None
        end = _end(kind, places)
    else:
        is_step = places.rows == 1 and isinstance(places.q_offset, torch.Tensor)
        if is_step or padding.size(0) != places.batch or is_traced() or is_captured(padding):
            return False, None
        places = places._replace(q_offset=int(places.q_offset))
        end = _end(kind, places)
        assert isinstance(end, int)
        interval = _interval(kind, places, padding, end)
        if interval is None:
            return False, None
        first, end = interval
        if kind.chunk_size:  # transformers counts chunks from the first token that is not padding
            left_padding = (padding.cumsum(-1) == 0).sum(-1)
    if kind.chunk_size:
        row = places.q_offset - left_padding
        row = row.clamp(min=0) if isinstance(row, torch.Tensor) else max(row, 0)
        first = left_padding + row // kind.chunk_size * kind.chunk_size - places.kv_offset
        first = first.clamp(max=end) if isinstance(first, torch.Tensor) else first
    if _hides_nothing(kind, places, first, end):
        return True, None
    return True, _key_ranges.write(kind, places.batch, first, end - first, places.device)


def _end(kind: Kind, places: _Places) -> int | torch.Tensor:
    """The key behind that of the last row, if rows are causal; static caches hold keys behind that."""
    if not kind.causal:
        return places.keys
    return places.q_offset + places.rows - places.kv_offset


def _hides_nothing(kind: Kind, places: _Places, first: Any, end: Any) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(end, torch.Tensor):
        return False
    if first != 0 or end != places.keys or (not kind.causal and places.rows > places.keys):
        return False
    near = (kind.left < 0 or places.keys <= kind.left + 1) and (kind.right < 0 or places.keys <= kind.right + 1)
    return near and (not kind.chunk_size or (places.kv_offset == 0 and places.keys <= kind.chunk_size))


def _interval(
    kind: Kind, places: _Places, padding: torch.Tensor, end: int
) -> tuple[int | torch.Tensor, int | torch.Tensor] | None:
    """First visible key and the one behind the last, relative to the cache, for rows that end at ``end`` if they are
    causal or have a window; None where the visible keys are no interval. Reads three numbers a request back."""
    seen = padding[:, places.kv_offset : places.kv_offset + end]
    if seen.size(1) < end:  # transformers takes what is missing for padding
        seen = torch.nn.functional.pad(seen, (0, end - seen.size(1)))
    bits, count = seen.to(torch.int8), seen.sum(1)
    first, behind = bits.argmax(1), end - bits.flip(1).argmax(1)  # 0 and end where no key is seen
    facts = list(zip(*torch.stack([first, behind, count]).tolist()))
    if any(n not in (0, e - f) for f, e, n in facts):
        return None
    is_at_end, is_at_start = all(e == end for _, e, _ in facts), all(f == 0 and n > 0 for f, _, n in facts)
    if any(n == 0 for *_, n in facts):
        first = first.where(count > 0, end)
    if is_at_end:
        aligned = kind.causal or kind.left < 0 or places.q_offset + places.rows == places.kv_offset + end
        return (0 if is_at_start else first, end) if aligned else None
    return None if kind.causal or kind.left >= 0 else (0 if is_at_start else first, behind)
