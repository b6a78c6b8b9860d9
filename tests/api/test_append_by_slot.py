"""append_paged_kv_cache_by_slot(): new keys and values at slots of a cache, converted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from problems import randn

import cutlass_kernels as ck

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """One token's ``[heads, dim]`` as the cache holds it."""
    wide = x.float() / torch.tensor(scale, dtype=torch.float32)
    if dtype in FP8:
        limit = torch.finfo(dtype).max
        wide = wide.clamp(-limit, limit)
    return wide.to(dtype)


def expect(new: torch.Tensor, cache: torch.Tensor, slots: list[int], scale: Any) -> torch.Tensor:
    """The cache ``[pages, page_size, heads, dim]`` afterwards, a token and a head at a time."""
    result = cache.clone()
    bits = result.view(torch.uint8) if cache.dtype in FP8 else result
    for token, slot in enumerate(slots):
        if not 0 <= slot < cache.size(0) * cache.size(1):
            continue
        for head in range(new.size(1)):
            factor = scale if isinstance(scale, float) else float(scale[head if scale.numel() > 1 else 0])
            value = stored(new[token, head], factor, cache.dtype)
            place = slot // cache.size(1), slot % cache.size(1), head
            bits[place] = value.view(torch.uint8) if cache.dtype in FP8 else value
    return result


def check(device: str, dtype: torch.dtype, cache_dtype: torch.dtype, rng: random.Random) -> None:
    pages, page_size, heads = rng.randint(1, 5), rng.choice([1, 5, 16]), rng.choice([1, 2, 8])
    dims = rng.choice([(64, 64), (128, 64), (20, 12), (192, 128)])
    layout, form = rng.choice(["NHD", "HND"]), rng.choice(["plain", "one allocation", "side by side"])
    room, generator = pages * page_size, torch.Generator().manual_seed(rng.randrange(1 << 30))
    count = rng.randint(0, min(room, 20))
    slots = rng.sample(range(room), count)
    slots = [-1 if rng.random() < 0.2 else x for x in slots]
    tokens = count + rng.choice([0, 3])
    qkv = randn((tokens, heads, 2 * sum(dims)), dtype, "cpu", generator) * rng.choice([1.0, 300.0])
    key, value = qkv[..., : dims[0]], qkv[..., dims[0] : sum(dims)]
    caches = []
    if form == "side by side":
        both = randn((pages, page_size, heads, sum(dims)), torch.float16, "cpu", generator).to(cache_dtype)
        caches = [both[..., : dims[0]], both[..., dims[0] :]]
    elif form == "one allocation" and dims[0] == dims[1]:
        both = randn((pages, 2, page_size, heads, dims[0]), torch.float16, "cpu", generator).to(cache_dtype)
        caches = [both[:, 0], both[:, 1]]
    else:
        shape = (pages, page_size, heads)
        caches = [randn((*shape, d), torch.float16, "cpu", generator).to(cache_dtype) for d in dims]
    scales: list[Any] = [rng.choice([1.0, 0.25, torch.tensor([0.7]), torch.rand(heads) + 0.5]) for _ in range(2)]
    want = [expect(x, c, slots, s) for x, c, s in zip((key, value), caches, scales)]

    def placed(x: torch.Tensor) -> torch.Tensor:
        """On the device, with the same strides."""
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device).copy_(x)

    given = [placed(x if layout == "NHD" else x.transpose(1, 2)) for x in caches]
    mapping = torch.tensor(slots, dtype=rng.choice([torch.int64, torch.int32]), device=device)
    moved = [x.to(device) if isinstance(x, torch.Tensor) else x for x in scales]
    ck.append_paged_kv_cache_by_slot(placed(key), placed(value), *given, mapping, *moved, kv_layout=layout)
    for cache, wanted in zip(given, want):
        assert_bitwise(cache.cpu() if layout == "NHD" else cache.transpose(1, 2).cpu(), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, *FP8])
@pytest.mark.parametrize("seed", range(12))
def test_random_calls(device, dtype, cache_dtype, seed):
    check(device, dtype, cache_dtype or dtype, random.Random(f"{dtype} {cache_dtype} {seed}"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FP8)
def test_what_fp8_cannot_hold(device, dtype):
    key = torch.tensor([1e4, -1e30, math.inf, -math.inf, math.nan, 0.0, 1e-9, 3.0]).bfloat16().view(1, 1, 8).to(device)
    cache = torch.zeros(1, 1, 1, 8, device=device).to(dtype)
    ck.append_paged_kv_cache_by_slot(key, key, cache, cache.clone(), torch.zeros(1, dtype=torch.int64, device=device))
    limit = torch.finfo(dtype).max
    found = cache.float().flatten().tolist()
    large = 1e4 if dtype == torch.float8_e5m2 else limit
    assert found[0] == pytest.approx(large, rel=0.13) and found[1:4] == [-limit, limit, -limit]
    assert math.isnan(found[4]) and found[5:] == [0.0, 0.0, 3.0]


@pytest.mark.gpu
def test_slots_behind_the_cache_are_skipped():
    key = torch.ones(3, 2, 64, dtype=torch.float16, device="cuda")
    whole = torch.zeros(4, 4, 2, 64, dtype=torch.float16, device="cuda")
    slots = torch.tensor([8, 1 << 40, 5], device="cuda")
    ck.append_paged_kv_cache_by_slot(key, key, whole[:2], whole[:2].clone(), slots)
    assert int(whole.count_nonzero()) == 2 * 64 and bool((whole[1, 1] == 1).all())


@pytest.mark.gpu
def test_graphs_follow_new_slots():
    key = torch.randn(4, 2, 64, device="cuda").bfloat16()
    caches = [torch.zeros(4, 16, 2, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.full((4,), -1, device="cuda")
    ck.append_paged_kv_cache_by_slot(key, key, *caches, slots)
    graph, scale = torch.cuda.CUDAGraph(), torch.tensor(2.0, device="cuda")
    with torch.cuda.graph(graph):
        ck.append_paged_kv_cache_by_slot(key, key, *caches, slots, 0.5, scale)
    slots.copy_(torch.tensor([3, 60, -1, 17]))
    graph.replay()
    want = expect(key.cpu(), torch.zeros(4, 16, 2, 64).to(torch.float8_e4m3fn), [3, 60, -1, 17], 0.5)
    assert_bitwise(caches[0].cpu(), want)


WRONG = [
    ("must be \\[tokens, heads, columns\\]", dict(key=torch.zeros(2, 3, 64).half())),
    ("is str, not a tensor", dict(value="v")),
    ("use the same, or fp8 caches", dict(key_cache=torch.zeros(2, 4, 2, 64), value_cache=torch.zeros(2, 4, 2, 64))),
    (
        "each pair must have one",
        dict(value=torch.zeros(2, 2, 64).bfloat16(), value_cache=torch.zeros(2, 4, 2, 64).bfloat16()),
    ),
    ("1-D, int64 or int32", dict(slot_mapping=torch.zeros(2))),
    ("slot_mapping has 3 entries", dict(slot_mapping=torch.zeros(3).long())),
    ("slot_mapping holds 8, but the cache has 8 slots", dict(slot_mapping=torch.tensor([0, 8]))),
    ("k_scale has shape", dict(k_scale=torch.ones(3))),
]


@pytest.mark.parametrize("message,change", WRONG, ids=[x[0] for x in WRONG])
def test_what_makes_no_sense_is_refused(message, change):
    new, cache = torch.zeros(2, 2, 64).half(), torch.zeros(2, 4, 2, 64).half()
    given = dict(key=new, value=new, key_cache=cache, value_cache=cache.clone(), slot_mapping=torch.tensor([0, 1]))
    with pytest.raises((ValueError, TypeError), match=message):
        ck.append_paged_kv_cache_by_slot(**(given | change))


def test_compiled():
    new, cache = torch.randn(2, 2, 64).half(), torch.zeros(2, 4, 2, 64).half()
    caches = [cache.clone(), cache.clone()]
    slots = torch.tensor([5, -1])
    compiled = torch.compile(ck.append_paged_kv_cache_by_slot, fullgraph=True, backend="aot_eager")
    compiled(new, new, *caches, slots, 0.5)
    ck.append_paged_kv_cache_by_slot(new, new, cache, cache.clone(), slots, 0.5)
    assert torch.equal(caches[0], cache)
