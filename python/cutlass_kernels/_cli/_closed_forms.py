"""Attention problems whose result can be written down: what the reference is checked against.

Equal keys give every visible value the same weight, so the output is a mean and the LSE the logarithm of a count. A
query that picks one key gives that key's value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
_QO_HEADS, _KV_HEADS, _DIM = 4, 2, 64


@dataclass(frozen=True)
class Form:
    """A named problem: ``run`` yields (computed, known) pairs."""

    name: str
    run: Callable[[torch.device, torch.dtype], Iterator[tuple[Pair, Pair]]]


def forms() -> list[Form]:
    """All problems, in the order of the table."""
    return [
        Form("equal keys: mean of the values", _equal_keys),
        Form("zero queries: LSE counts keys", _counts),
        Form("sinks: a key without value", _sinks),
        Form("one key picked out", _one_key),
        Form("ragged batch", _ragged),
        Form("paged batch", _paged),
        Form("decode", _decode),
        Form("merged halves", _merged),
    ]


def _randn(*shape: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def _per_qo_head(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(_QO_HEADS // _KV_HEADS, dim=1)


def _means(v: torch.Tensor, rows: int, causal: bool, window_left: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the values each row sees, and how many (double precision, from prefix sums)."""
    keys = v.size(0)
    position = torch.arange(rows, device=v.device) + keys - rows
    high = (position + 1 if causal else torch.full_like(position, keys)).clamp(0, keys)
    low = (position - window_left if window_left >= 0 else torch.zeros_like(position)).clamp(0, keys)
    count = (high - low).clamp(min=0).double()
    sums = torch.cat([v.new_zeros(1, *v.shape[1:], dtype=torch.float64), v.double().cumsum(0)])
    mean = (sums[high] - sums[low]) / count.clamp(min=1)[:, None, None]
    return _per_qo_head(mean), count


def _equal_keys(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    scale = _DIM**-0.5
    for rows, keys, causal, window_left, cap in (
        (40, 90, False, -1, 0.0),
        (90, 90, True, -1, 0.0),
        (40, 90, True, 7, 0.0),
        (60, 25, True, -1, 0.0),  # the first rows see no key
        (1, 300, True, 64, 0.0),
        (40, 90, True, -1, 1.5),
    ):
        q = _randn(rows, _QO_HEADS, _DIM, device=device, dtype=dtype)
        k = _randn(1, _KV_HEADS, _DIM, device=device, dtype=dtype).expand(keys, -1, -1).contiguous()
        v = _randn(keys, _KV_HEADS, _DIM, device=device, dtype=dtype)
        mean, count = _means(v, rows, causal, window_left)
        logit = (q.double() * _per_qo_head(k[:1]).double()).sum(-1) * scale
        if cap:
            logit = cap * torch.tanh(logit / cap)
        yield (
            single_prefill_with_kv_cache_return_lse(
                q,
                k,
                v,
                causal=causal,
                window_left=window_left,
                logits_soft_cap=cap or None,
                backend="reference",
            ),
            (mean, logit * LOG2E + count.log2()[:, None]),
        )


def _counts(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    for rows, keys, causal in ((5, 1000, False), (200, 200, True), (7, 0, False), (8, 3, True)):
        q = torch.zeros(rows, _QO_HEADS, _DIM, device=device, dtype=dtype)
        k, v = (_randn(keys, _KV_HEADS, _DIM, device=device, dtype=dtype) for _ in range(2))
        mean, count = _means(v, rows, causal)
        computed = single_prefill_with_kv_cache_return_lse(q, k, v, causal=causal, backend="reference")
        yield computed, (mean, count.log2()[:, None].expand(-1, _QO_HEADS))


def _sinks(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0], device=device)
    for rows, keys in ((30, 30), (6, 2)):
        q = torch.zeros(rows, _QO_HEADS, _DIM, device=device, dtype=dtype)
        k, v = (_randn(keys, _KV_HEADS, _DIM, device=device, dtype=dtype) for _ in range(2))
        mean, count = _means(v, rows, causal=True)
        total = count[:, None] + sinks.double().exp()
        yield (
            single_prefill_with_kv_cache_return_lse(q, k, v, causal=True, sinks=sinks, backend="reference"),
            (mean * (count[:, None] / total)[..., None], total.log2()),
        )


def _one_key(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    keys = _DIM
    k = torch.eye(keys, _DIM, device=device, dtype=dtype)[:, None].expand(-1, _KV_HEADS, -1).contiguous()
    v = _randn(keys, _KV_HEADS, _DIM, device=device, dtype=dtype)
    picked = torch.arange(keys, device=device).flip(0)
    q = 512.0 * _per_qo_head(k)[picked]  # the other keys weigh exp(-64) each
    computed = single_prefill_with_kv_cache_return_lse(q, k, v, sm_scale=0.125, backend="reference")
    yield computed, (_per_qo_head(v)[picked].double(), torch.full((keys, _QO_HEADS), 64.0 * LOG2E, device=device))


_QO_LENS, _KV_LENS = (1, 0, 20, 33), (9, 4, 20, 12)


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def _batch(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], Pair]:
    """Zero queries and random values of a causal batch, and what they give."""
    q = torch.zeros(sum(_QO_LENS), _QO_HEADS, _DIM, device=device, dtype=dtype)
    values = [_randn(n, _KV_HEADS, _DIM, device=device, dtype=dtype) for n in _KV_LENS]
    known = [_means(v, rows, causal=True) for v, rows in zip(values, _QO_LENS)]
    mean, count = torch.cat([mean for mean, _ in known]), torch.cat([count for _, count in known])
    return q, values, (mean, count.log2()[:, None].expand(-1, _QO_HEADS))


def _ragged(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    q, values, known = _batch(device, dtype)
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="reference")
    heads = (_QO_HEADS, _KV_HEADS, _DIM)
    wrapper.plan(_offsets(_QO_LENS), _offsets(_KV_LENS), *heads, causal=True, q_data_type=dtype)
    v = torch.cat(values)
    yield wrapper.run(q, torch.ones_like(v), v, return_lse=True), known


def _paged(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    q, values, known = _batch(device, dtype)
    for page_size in (1, 8):
        pages = [-(-len(v) // page_size) for v in values]
        cache = torch.full((sum(pages), 2, page_size, _KV_HEADS, _DIM), math.nan, device=device, dtype=dtype)
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
        tokens = cache[:, 1]
        for v, ids in zip(values, order.split(pages)):
            for index, row in enumerate(v):
                tokens[ids[index // page_size], index % page_size] = row
        cache[:, 0] = 1.0
        workspace = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="reference")
        last = torch.tensor([(n - 1) % page_size + 1 for n in _KV_LENS], dtype=torch.int32)
        table = (_offsets(tuple(pages)), order.to(torch.int32), last)
        heads = (_QO_HEADS, _KV_HEADS, _DIM)
        wrapper.plan(_offsets(_QO_LENS), *table, *heads, page_size, causal=True, q_data_type=dtype)
        yield wrapper.run(q, cache, return_lse=True), known


def _decode(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    for keys in (1, 777):
        q = torch.zeros(_QO_HEADS, _DIM, device=device, dtype=dtype)
        k, v = (_randn(keys, _KV_HEADS, _DIM, device=device, dtype=dtype) for _ in range(2))
        mean, count = _means(v, 1, causal=False)
        out, lse = single_decode_with_kv_cache(q, k, v, backend="reference", return_lse=True)
        yield (out, lse), (mean[0], count.log2().expand(_QO_HEADS))


def _merged(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[Pair, Pair]]:
    rows = 11
    q = torch.zeros(rows, _QO_HEADS, _DIM, device=device, dtype=dtype)
    v = _randn(100, _KV_HEADS, _DIM, device=device, dtype=dtype)
    mean, count = _means(v, rows, causal=False)
    halves = [
        single_prefill_with_kv_cache_return_lse(q, torch.ones_like(part), part, backend="reference")
        for part in v.split([30, 70])
    ]
    yield merge_state(*halves[0], *halves[1]), (mean, count.log2()[:, None].expand(-1, _QO_HEADS))
