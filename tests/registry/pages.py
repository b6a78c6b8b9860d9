"""Writing to pages, and rotating what is written."""

from __future__ import annotations

from typing import Any

import torch

import cutlass_kernels as ck

from .data import PAGE, Data
from .entry import Call, no_attention


def _new(x: Data) -> tuple[torch.Tensor, torch.Tensor]:
    return x.k[:3], x.v[:3]


@no_attention("append_paged_kv_cache", gradients="warned")
def _append(x: Data) -> list[Call]:
    places = (x.here(0, 1, -1), x.here(17, 4, 4))
    indptr, indices, last = x.table_here
    new, table = _new(x), (indices, indptr, last)

    def stacked(*t):
        ck.append_paged_kv_cache(*t)

    def swapped(key, value, owner, position, cache, *table):
        ck.append_paged_kv_cache(key, value, owner, position, cache, *table, "HND")
        return cache * 2

    def pair(key, value, owner, position, cache, *table):
        k_cache, v_cache = cache.unbind(1)  # two views, which the graph has to write to in place
        ck.append_paged_kv_cache(key, value, owner, position, (k_cache, v_cache), *table)
        return cache.clone()

    wide = tuple(y.long() for y in places)
    return [
        Call(run, (*new, *where, cache, *table), writes=True, inputs=(0, 1))
        for run, where, cache in (
            (stacked, places, x.cache),
            (stacked, wide, x.cache.float()),
            (stacked, places, x.cache.to(torch.float8_e4m3fn)),
            (swapped, places, x.cache.transpose(2, 3).contiguous()),
            (pair, places, x.cache),
        )
    ]


@no_attention("append_paged_kv_cache_by_slot", gradients="warned")
def _append_by_slot(x: Data) -> list[Call]:
    function, slots = ck.append_paged_kv_cache_by_slot, x.here(35, -1, 18)
    new, scales = _new(x), (x.one + 1, x.randn(2).abs() + 1)

    def halves(key, value, cache, slots):
        function(key, value * 2, *cache.unbind(1), slots, 0.5)
        return cache.clone()

    def side_by_side(key, value, cache, slots, k_scale, v_scale):
        function(key, value, *cache.transpose(1, 2).chunk(2, -1), slots, k_scale, v_scale, "HND")
        return cache * 2

    def added(key, value, k_cache, v_cache, slots):
        function(key, value, k_cache, v_cache, slots)
        return k_cache + v_cache

    separate = (x.cache[:, 0].clone(), x.cache[:, 1].clone())
    return [
        Call(halves, (*new, x.cache, slots), writes=True, inputs=(0, 1)),
        Call(halves, (*new, x.cache.to(torch.float8_e4m3fn), slots), writes=True, inputs=(0, 1)),
        Call(side_by_side, (*new, torch.cat(separate, -1), slots.long(), *scales), writes=True, inputs=(0, 1)),
        Call(added, (*new, *separate, slots), writes=True, inputs=(0, 1)),
    ]


@no_attention("get_batch_indices_positions")
def _positions(x: Data) -> list[Call]:
    function, offsets, lengths = ck.get_batch_indices_positions, x.here(0, 2, 5), x.here(7, 9)
    places = (x.here(*range(6)), x.here(*range(6)))
    return [
        Call(lambda *t: function(*t, 5), (offsets, lengths)),
        Call(lambda cum, lens, q: function(cum, lens, q.shape[0]), (offsets.long(), lengths.long(), x.q)),
        Call(lambda cum, lens, *given: function(cum, lens, 6, *given), (offsets, lengths, *places), writes=True),
    ]


@no_attention("get_seq_lens")
def _seq_lens(x: Data) -> list[Call]:
    tensors = (x.here(0, 2, 5), x.here(7, 9))
    return [Call(lambda *t: ck.get_seq_lens(*t, PAGE), y) for y in (tensors, tuple(z.long() for z in tensors))]


def _turns(x: Data) -> torch.Tensor:
    angles = x.here(*range(10))[:, None] * (torch.arange(32, device=x.device) + 1) / 32
    return torch.cat([angles.cos(), angles.sin()], -1)


@no_attention("apply_rope_with_cos_sin_cache", gradients="computed")
def _rope(x: Data) -> list[Call]:
    tensors = x.here(3, 0, 9), x.q[:3], x.k[:3]
    flat = tensors[0], x.q[:3].flatten(1), x.k[:3].flatten(1)

    def rotate(positions: Any, q: Any, k: Any, table: Any) -> Any:
        return ck.apply_rope_with_cos_sin_cache(positions, q, k, 64, table)

    return [Call(rotate, (*tensors, _turns(x))), Call(rotate, (*flat, _turns(x)))]


@no_attention("apply_rope_with_cos_sin_cache_inplace", gradients="computed")
def _rope_in_place(x: Data) -> list[Call]:
    def rotate(positions, q, k, table):
        ck.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, table, False)
        return q + 1, k * 2

    return [Call(rotate, (x.here(3, 0, 9), x.q[:3].clone(), x.k[:3].clone(), _turns(x)), writes=True)]


@no_attention("rope_append_paged_kv_cache_by_slot", gradients="warned")
def _rope_append(x: Data) -> list[Call]:
    def step(q, k, v, positions, table, cache, slots, scale):
        ck.rope_append_paged_kv_cache_by_slot(q, k, v, positions, table, *cache.unbind(1), slots, 0.5, scale)
        return q * 1, cache.clone()

    new = x.q[:3].clone(), *_new(x), x.here(3, 0, 9), _turns(x)
    slots, scale = x.here(35, -1, 18), x.randn(2).abs() + 1
    caches = (x.cache.clone(), x.cache.to(torch.float8_e4m3fn))
    return [Call(step, (*new, cache, slots, scale), writes=True, inputs=(1, 2)) for cache in caches]
