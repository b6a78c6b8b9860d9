"""What a rank needs of the keys of the others, and where it puts them. Numbers only: no tensors, no communication.

A rank gathers keys into a buffer in which those of a request that it needs stand in their order. Then a query segment
is a request of one ordinary call of ``attention()``: its rows stand last among the keys ``[lo, hi)`` that it sees, as
the bottom-right alignment of masks has it. A window makes these ranges short, so that only a halo is sent.
"""

from __future__ import annotations

from typing import NamedTuple

from ._shards import Segments


class Mask(NamedTuple):
    """As of ``attention()``; causal is ``right == 0``. -1 is no limit."""

    left: int = -1
    right: int = -1
    chunk_size: int = 0

    def keys_of(self, start: int, stop: int, kv_len: int) -> tuple[int, int]:
        """The keys ``[lo, hi)`` that rows at positions ``[start, stop)`` see together."""
        lo, hi = 0, kv_len
        if self.left >= 0:
            lo = max(start - self.left, 0)
        if self.right >= 0:
            hi = min(stop + self.right, kv_len)
        if self.chunk_size > 0:
            lo = max(lo, start // self.chunk_size * self.chunk_size)
            hi = min(hi, ((stop - 1) // self.chunk_size + 1) * self.chunk_size)
            lo = lo // self.chunk_size * self.chunk_size  # attention() counts chunks from the first key
        return lo, max(lo, hi)


class Copy(NamedTuple):
    """Rows ``[row, row + rows)`` of the sender's keys, as it stores them, become rows from ``to`` on of a buffer."""

    sender: int
    row: int
    to: int
    rows: int


class Call(NamedTuple):
    """The query segments that have one mask: ``rows`` of each segment are used, of others none."""

    mask: Mask
    rows: tuple[int, ...]


class GatherPlan(NamedTuple):
    """Of one rank."""

    buffer_rows: int
    copies: tuple[Copy, ...]  # into its buffer, its own keys among them
    q_rows: tuple[int, ...]  # of its query segments,
    key_rows: tuple[int, ...]  # rows of the buffer where their keys begin,
    key_counts: tuple[int, ...]  # and how many these are
    calls: tuple[Call, ...]


class _StoredKeys(NamedTuple):
    """Keys ``[start, stop)`` of a request, from row ``row`` on of some storage."""

    request: int
    start: int
    stop: int
    row: int


def make(
    q_shards: tuple[Segments, ...], kv_shards: tuple[Segments, ...], kv_lens: tuple[int, ...], mask: Mask
) -> tuple[GatherPlan, ...]:
    """Plans of all ranks. Positions of ``q_shards`` are those of ``kv_shards``: rows stand among the keys."""
    stored = [_storage(segments) for segments in kv_shards]
    return tuple(
        _make_one(q_shards[rank], kv_shards[rank], rank, stored, kv_lens, mask) for rank in range(len(q_shards))
    )


def _make_one(
    queries: Segments, own: Segments, rank: int, stored: list[list[_StoredKeys]], kv_lens: tuple[int, ...], mask: Mask
) -> GatherPlan:
    seen = [mask.keys_of(q.start, q.stop, kv_lens[q.request]) for q in queries]
    wanted = [(q.request, lo, hi) for q, (lo, hi) in zip(queries, seen, strict=True) if lo < hi]
    buffer = _storage_of(sorted({*wanted, *((s.request, s.start, s.stop) for s in own)}))
    copies: list[Copy] = []
    for sender, pieces in enumerate(stored):
        copies += _copies(sender, pieces, buffer)
    begins = []
    for q, (lo, hi) in zip(queries, seen, strict=True):
        piece = next((p for p in buffer if p.request == q.request and p.start <= lo and hi <= p.stop), None)
        begins.append(0 if lo == hi or piece is None else piece.row + lo - piece.start)
    return GatherPlan(
        buffer_rows=buffer[-1].row + buffer[-1].stop - buffer[-1].start if buffer else 0,
        copies=tuple(copies),
        q_rows=tuple(q.stop - q.start for q in queries),
        key_rows=tuple(begins),
        key_counts=tuple(hi - lo for lo, hi in seen),
        calls=_calls(queries, seen, mask),
    )


def _calls(queries: Segments, seen: list[tuple[int, int]], mask: Mask) -> tuple[Call, ...]:
    """``attention()`` counts positions from the last key. Where that is ``shift`` keys behind a segment's last row,
    windows are shifted, too."""
    rows: dict[Mask, list[int]] = {}
    for i, (q, (lo, hi)) in enumerate(zip(queries, seen, strict=True)):
        shift = hi - q.stop
        own = mask
        if lo < hi and shift != 0 and (mask.left >= 0 or mask.right >= 0):
            left = mask.left + shift if mask.left >= 0 else -1
            right = mask.right - shift if mask.right >= 0 else -1
            own = Mask(left, right, mask.chunk_size)
        rows.setdefault(own, [0] * len(queries))[i] = q.stop - q.start
    return tuple(Call(own, tuple(n)) for own, n in rows.items())


def _storage(segments: Segments) -> list[_StoredKeys]:
    """Segments, one after another."""
    pieces, row = [], 0
    for request, start, stop in segments:
        pieces.append(_StoredKeys(request, start, stop, row))
        row += stop - start
    return pieces


def _storage_of(ranges: list[tuple[int, int, int]]) -> list[_StoredKeys]:
    """``(request, start, stop)``, ascending, one after another; those that touch or overlap are one."""
    merged: list[tuple[int, int, int]] = []
    for request, start, stop in ranges:
        if merged and merged[-1][0] == request and start <= merged[-1][2]:
            merged[-1] = (request, merged[-1][1], max(stop, merged[-1][2]))
        else:
            merged.append((request, start, stop))
    pieces, row = [], 0
    for request, start, stop in merged:
        pieces.append(_StoredKeys(request, start, stop, row))
        row += stop - start
    return pieces


def _copies(sender: int, pieces: list[_StoredKeys], buffer: list[_StoredKeys]) -> list[Copy]:
    """Both lists ascend, and neither overlaps itself."""
    copies, first = [], 0
    for piece in pieces:
        while first < len(buffer) and (buffer[first].request, buffer[first].stop) <= (piece.request, piece.start):
            first += 1
        for room in buffer[first:]:
            if (room.request, room.start) >= (piece.request, piece.stop):
                break
            start, stop = max(piece.start, room.start), min(piece.stop, room.stop)
            copies.append(Copy(sender, piece.row + start - piece.start, room.row + start - room.start, stop - start))
    return copies
