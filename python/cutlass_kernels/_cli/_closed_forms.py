"""Attention problems whose result can be written down: what the reference is checked against.

Equal keys give every visible value the same weight, so the output is a mean and the LSE the logarithm of a count. A
query that picks one key gives that key's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..cascade import merge_state
from ..decode import single_decode_with_kv_cache
from ..prefill import (
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    single_prefill_with_kv_cache_return_lse,
)

LOG2E = math.log2(math.e)
Pair = tuple[torch.Tensor, torch.Tensor]  # output, LSE
_QO_HEADS, _KV_HEADS, _DIM = _HEADS = 4, 2, 64
_QO_LENS, _KV_LENS = (1, 0, 20, 33), (9, 4, 20, 12)  # of the batches


@dataclass(frozen=True)
class Place:
    """Where inputs are, and in which type."""

    device: torch.device
    dtype: torch.dtype

    def randn(self, tokens: int, heads: int = _KV_HEADS) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens + heads + _DIM)
        return torch.randn(tokens, heads, _DIM, generator=generator).to(self.dtype).to(self.device)

    def zeros(self, rows: int) -> torch.Tensor:
        """Queries to which all keys are equal."""
        return torch.zeros(rows, _QO_HEADS, _DIM, device=self.device, dtype=self.dtype)

    def workspace(self) -> torch.Tensor:
        return torch.empty(64 << 20, dtype=torch.uint8, device=self.device)


def _single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> Pair:
    return single_prefill_with_kv_cache_return_lse(q, k, v, backend="reference", **options)  # type: ignore[arg-type]


def _per_qo_head(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(_QO_HEADS // _KV_HEADS, dim=1)


def _means(v: torch.Tensor, rows: int, causal: bool, window_left: int = -1) -> Pair:
    """Mean of the values each row sees, and how many (double precision, from prefix sums)."""
    keys = v.size(0)
    position = torch.arange(rows, device=v.device) + keys - rows
    high = (position + 1 if causal else torch.full_like(position, keys)).clamp(0, keys)
    low = (position - window_left if window_left >= 0 else torch.zeros_like(position)).clamp(0, keys)
    count = (high - low).clamp(min=0).double()
    sums = torch.cat([v.new_zeros(1, *v.shape[1:], dtype=torch.float64), v.double().cumsum(0)])
    mean = (sums[high] - sums[low]) / count.clamp(min=1)[:, None, None]
    return _per_qo_head(mean), count


def _state(mean: torch.Tensor, count: torch.Tensor) -> Pair:
    """Output and LSE of zero queries."""
    return mean, count.log2()[:, None].expand(-1, _QO_HEADS)


def _equal_keys(at: Place) -> Iterator[tuple[Pair, Pair]]:
    for rows, keys, causal, window_left, cap in (
        (40, 90, False, -1, 0.0),
        (90, 90, True, -1, 0.0),
        (40, 90, True, 7, 0.0),
        (60, 25, True, -1, 0.0),  # the first rows see no key
        (1, 300, True, 64, 0.0),
        (40, 90, True, -1, 1.5),
    ):
        q, v = at.randn(rows, _QO_HEADS), at.randn(keys)
        k = at.randn(1).expand(keys, -1, -1).contiguous()
        mean, count = _means(v, rows, causal, window_left)
        logit = (q.double() * _per_qo_head(k[:1]).double()).sum(-1) * _DIM**-0.5
        if cap:
            logit = cap * torch.tanh(logit / cap)
        computed = _single(q, k, v, causal=causal, window_left=window_left, logits_soft_cap=cap or None)
        yield computed, (mean, logit * LOG2E + count.log2()[:, None])


def _counts(at: Place) -> Iterator[tuple[Pair, Pair]]:
    for rows, keys, causal in ((5, 1000, False), (200, 200, True), (7, 0, False), (8, 3, True)):
        v = at.randn(keys)
        yield _single(at.zeros(rows), at.randn(keys), v, causal=causal), _state(*_means(v, rows, causal))


def _sinks(at: Place) -> Iterator[tuple[Pair, Pair]]:
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=at.device)
    for rows, keys in ((30, 30), (6, 2)):
        v = at.randn(keys)
        mean, count = _means(v, rows, causal=True)
        total = count[:, None] + sinks.double().exp()
        computed = _single(at.zeros(rows), at.randn(keys), v, causal=True, sinks=sinks)
        yield computed, (mean * (count[:, None] / total)[..., None], total.log2())


def _one_key(at: Place) -> Iterator[tuple[Pair, Pair]]:
    keys = _DIM
    k = torch.eye(keys, _DIM, device=at.device, dtype=at.dtype)[:, None].expand(-1, _KV_HEADS, -1).contiguous()
    v = at.randn(keys)
    picked = torch.arange(keys, device=at.device).flip(0)
    q = 512.0 * _per_qo_head(k)[picked]  # the other keys weigh exp(-64) each
    known = _per_qo_head(v)[picked].double(), torch.full((keys, _QO_HEADS), 64.0 * LOG2E, device=at.device)
    yield _single(q, k, v, sm_scale=0.125), known


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _batch(at: Place) -> tuple[torch.Tensor, list[torch.Tensor], Pair]:
    """Zero queries and random values of a causal batch, and what they give."""
    values = [at.randn(n) for n in _KV_LENS]
    means, counts = zip(*(_means(v, rows, causal=True) for v, rows in zip(values, _QO_LENS)))
    return at.zeros(sum(_QO_LENS)), values, _state(torch.cat(means), torch.cat(counts))


def _ragged(at: Place) -> Iterator[tuple[Pair, Pair]]:
    q, values, known = _batch(at)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(at.workspace(), "NHD", backend="reference")
    wrapper.plan(_offsets(_QO_LENS), _offsets(_KV_LENS), *_HEADS, causal=True, q_data_type=at.dtype)
    v = torch.cat(values)
    yield wrapper.run(q, torch.ones_like(v), v, return_lse=True), known


def _paged(at: Place) -> Iterator[tuple[Pair, Pair]]:
    q, values, known = _batch(at)
    for page_size in (1, 8):
        pages = [-(-len(v) // page_size) for v in values]
        cache = at.zeros(1).new_full((sum(pages), 2, page_size, _KV_HEADS, _DIM), math.nan)
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
        tokens = cache[:, 1]
        for v, ids in zip(values, order.split(pages)):
            for index, row in enumerate(v):
                tokens[ids[index // page_size], index % page_size] = row
        cache[:, 0] = 1.0
        wrapper = BatchPrefillWithPagedKVCacheWrapper(at.workspace(), "NHD", backend="reference")
        last = torch.tensor([(n - 1) % page_size + 1 for n in _KV_LENS], dtype=torch.int32)
        table = (_offsets(tuple(pages)), order.to(torch.int32), last)
        wrapper.plan(_offsets(_QO_LENS), *table, *_HEADS, page_size, causal=True, q_data_type=at.dtype)
        yield wrapper.run(q, cache, return_lse=True), known


def _decode(at: Place) -> Iterator[tuple[Pair, Pair]]:
    for keys in (1, 777):
        v = at.randn(keys)
        mean, lse = _state(*_means(v, 1, causal=False))
        computed = single_decode_with_kv_cache(at.zeros(1)[0], at.randn(keys), v, backend="reference", return_lse=True)
        yield computed, (mean[0], lse[0])


def _merged(at: Place) -> Iterator[tuple[Pair, Pair]]:
    rows = 11
    q, v = at.zeros(rows), at.randn(100)
    halves = [_single(q, torch.ones_like(part), part) for part in v.split([30, 70])]
    yield merge_state(*halves[0], *halves[1]), _state(*_means(v, rows, causal=False))


FORMS: dict[str, Callable[[Place], Iterator[tuple[Pair, Pair]]]] = {
    "equal keys: mean of the values": _equal_keys,
    "zero queries: LSE counts keys": _counts,
    "sinks: a key without value": _sinks,
    "one key picked out": _one_key,
    "ragged batch": _ragged,
    "paged batch": _paged,
    "decode": _decode,
    "merged halves": _merged,
}
