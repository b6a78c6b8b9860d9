"""append_paged_kv_cache_by_slot(): new keys and values at slots of a cache, converted."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from captures import capture
from compare import assert_bitwise
from problems import randn
from refusals import rows

import cutlass_kernels as ck

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype in FP8 else x


def stored(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[..., heads, dim]`` as the cache holds it, by one scale ``[1, 1]`` or one per head ``[heads, 1]``."""
    wide = x.float() / scale
    if dtype in FP8:
        limit = torch.finfo(dtype).max
        wide = wide.clamp(-limit, limit)
    return wide.to(dtype)


def expect(new: torch.Tensor, cache: torch.Tensor, slots: list[int], scale: Any) -> torch.Tensor:
    """The cache ``[pages, page_size, heads, dim]`` afterwards, a token at a time."""
    result, scales = cache.clone(), torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1)
    for token, slot in enumerate(slots):
        if 0 <= slot < cache.size(0) * cache.size(1):
            value = stored(new[token], scales, cache.dtype)
            bits(result)[slot // cache.size(1), slot % cache.size(1)] = bits(value)
    return result


def append(key: torch.Tensor, slots: list[int] | torch.Tensor, *caches: torch.Tensor, **scales: Any) -> Any:
    """Keys as values too, to one cache and a copy of it or to two."""
    mapping = torch.as_tensor(slots, device=key.device)
    caches = caches if len(caches) == 2 else (caches[0], caches[0].clone())
    ck.append_paged_kv_cache_by_slot(key, key, *caches, mapping, **scales)
    return caches[0]


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
    random = lambda *shape: randn(shape, torch.float16, "cpu", generator).to(cache_dtype)  # noqa: E731
    if form == "side by side":
        caches = random(pages, page_size, heads, sum(dims)).split(dims, -1)
    elif form == "one allocation" and dims[0] == dims[1]:
        caches = random(pages, 2, page_size, heads, dims[0]).unbind(1)
    else:
        caches = [random(pages, page_size, heads, d) for d in dims]
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", [None, *FP8])
def test_every_number_by_many_scales(dtype, cache_dtype):
    """All 65536 numbers of a head each, by scales of which some are powers of two."""
    generator = torch.Generator().manual_seed(7)
    special = [0.3, 1 / 3, 1.0, 1 + 2**-23, 1 - 2**-24, 0.75, 7.0, 1e-3, 0.5, -0.7, 2.0**-110, 1e38, 2.0**-99, 17 / 16]
    scales = torch.tensor(special + (torch.rand(18, generator=generator) * 4 + 1e-3).tolist())
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    heads = scales.numel()
    key = patterns[torch.randperm(2**16, generator=generator)].view(1024, 1, 64).expand(-1, heads, -1)
    caches = torch.zeros(2, 64, 16, heads, 64, device="cuda").to(cache_dtype or dtype).unbind()
    slots = torch.randperm(1024, generator=generator)
    new, factors = (key, key.flip(0).contiguous()), scales.cuda()
    ck.append_paged_kv_cache_by_slot(*(x.cuda() for x in new), *caches, slots.cuda(), factors, factors)
    for x, found in zip(new, caches):
        rows = found.flatten(0, 1).cpu().view(torch.uint8)[slots].view(found.dtype)
        want = stored(x, scales[:, None], found.dtype)
        assert bool((rows.float().isnan() == want.float().isnan()).all())
        seen = ~want.float().isnan()  # its sign and payload are not specified
        rows, want = (y.view(torch.uint8 if cache_dtype else torch.int16)[seen] for y in (rows, want))
        assert_bitwise(rows, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FP8)
def test_what_fp8_cannot_hold(device, dtype):
    key = torch.tensor([1e4, -1e30, math.inf, -math.inf, math.nan, 0.0, 1e-9, 3.0]).bfloat16().view(1, 1, 8).to(device)
    cache = append(key, [0], torch.zeros(1, 1, 1, 8, device=device).to(dtype))
    limit = torch.finfo(dtype).max
    found = cache.float().flatten().tolist()
    large = 1e4 if dtype == torch.float8_e5m2 else limit
    assert found[0] == pytest.approx(large, rel=0.13) and found[1:4] == [-limit, limit, -limit]
    assert math.isnan(found[4]) and found[5:] == [0.0, 0.0, 3.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_device_stores_the_same_nan(device, dtype):
    """CPUs keep the sign of some NaNs, depending on the type and on the length of a row."""
    for count in (1, 7, 8, 64):
        key = torch.full((1, 1, count), math.nan, dtype=dtype)
        key.view(torch.int16)[..., ::2] |= -(1 << 15)
        for cache_dtype in (dtype, *FP8):
            cache = append(key.to(device), [0], torch.zeros(1, 1, 1, count).to(cache_dtype).to(device))
            found = cache.cpu().view(torch.int8 if cache_dtype in FP8 else torch.int16)
            assert set(found.flatten().tolist()) == {torch.iinfo(found.dtype).max}


@pytest.mark.parametrize("device", DEVICES)
def test_subnormal_numbers_are_kept(device):
    key = torch.tensor([1e-40, -1e-40, 1e-39, -0.0] * 2, dtype=torch.bfloat16, device=device).view(1, 1, 8)
    cache = append(key, [0], torch.ones(1, 1, 1, 8, dtype=torch.bfloat16, device=device))
    assert_bitwise(cache.cpu(), key.cpu().view(1, 1, 1, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("cache_dtype", [torch.float16, *FP8])
def test_nothing_is_written_for_padding(device, cache_dtype):
    key = torch.ones(3, 2, 64, dtype=torch.float16, device=device)
    caches = [torch.zeros(2, 4, 2, 64, device=device).to(cache_dtype) for _ in range(2)]
    for slots in ([-1, -1, -1], [-1, -(2**31), -7], []):
        append(key, torch.tensor(slots, dtype=torch.int32), *caches)
    append(key, [-(2**63)] * 3, *caches)
    assert not any(x.float().count_nonzero() for x in caches)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [0.5, "one element", "0-d", "per head", "strided"])
def test_forms_of_scales(device, value):
    """Numbers, tensors of one element and tensors per head, of any stride."""
    factors = torch.tensor([0.5, 9.0, 0.25, 9.0], device=device)
    scale, want = {
        "one element": (factors[:1], [2, 2]),
        "0-d": (factors[0], [2, 2]),
        "per head": (factors[::2].contiguous(), [2, 4]),
        "strided": (factors[::2], [2, 4]),
    }.get(value, (value, [2, 2]))
    key = torch.ones(1, 2, 8, dtype=torch.bfloat16, device=device)
    caches = [torch.zeros(1, 1, 2, 8, device=device).bfloat16() for _ in range(2)]
    append(key, [0], *caches, v_scale=scale)
    assert caches[0][0, 0, :, 0].tolist() == [1, 1] and caches[1][0, 0, :, 0].tolist() == want


@pytest.mark.gpu
def test_slots_behind_the_cache_are_skipped():
    key = torch.ones(3, 2, 64, dtype=torch.float16, device="cuda")
    whole = torch.zeros(4, 4, 2, 64, dtype=torch.float16, device="cuda")
    append(key, [8, 1 << 40, 5], whole[:2])
    assert int(whole.count_nonzero()) == 2 * 64 and bool((whole[1, 1] == 1).all())


@pytest.mark.gpu
def test_graphs_follow_new_slots():
    key = torch.randn(4, 2, 64, device="cuda").bfloat16()
    caches = [torch.zeros(4, 16, 2, 64, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    slots = torch.full((4,), -1, device="cuda")
    scale = torch.tensor(2.0, device="cuda")
    graph, _ = capture(lambda: ck.append_paged_kv_cache_by_slot(key, key, *caches, slots, 0.5, scale))
    slots.copy_(torch.tensor([3, 60, -1, 17]))
    graph.replay()
    want = expect(key.cpu(), torch.zeros(4, 16, 2, 64).to(torch.float8_e4m3fn), [3, 60, -1, 17], 0.5)
    assert_bitwise(caches[0].cpu(), want)


ANY = (ValueError, TypeError, KeyError)
WRONG = [
    *rows(ANY, r"this cache takes \[tokens, 2, 64\] with kv_layout='NHD'\.$", key=torch.zeros(2, 3, 64).half()),
    *rows(ANY, "kv_layout='HND' fits", value=torch.zeros(2, 4, 64).half()),
    *rows(ANY, "{name} is str, not a tensor", value="v"),
    *rows(ANY, "{name} is NoneType, not a tensor", key_cache=None),
    *rows(ANY, "{name} has stride 2 in its last dimension", key_cache=torch.zeros(2, 4, 2, 128).half()[..., ::2]),
    *rows(ANY, r"{name} \(3, 4, 2, 64\)", value_cache=torch.zeros(3, 4, 2, 64).half()),
    *rows(ANY, "{name} is on meta, but key_cache is on cpu", value=torch.zeros(2, 2, 64, device="meta").half()),
    (dict(key_cache=torch.zeros(2, 4, 2, 64), value_cache=torch.zeros(2, 4, 2, 64)), ANY, "or fp8 caches"),
    (
        dict(key=torch.zeros(2, 2, 64).short(), key_cache=torch.zeros(2, 4, 2, 64).short()),
        ANY,
        "has dtype torch.int16",
    ),
    (
        dict(value=torch.zeros(2, 2, 64).bfloat16(), value_cache=torch.zeros(2, 4, 2, 64).bfloat16()),
        ANY,
        "each pair must have one",
    ),
    *rows(ANY, "1-D, int64 or int32", slot_mapping=torch.zeros(2)),
    *rows(ANY, "{name} has 3 entries, but key and value have only 2", slot_mapping=torch.zeros(3).long()),
    *rows(ANY, "{name} holds 8, but the cache has 8 slots", slot_mapping=torch.tensor([0, 8])),
    *rows(ANY, "{name} has shape", k_scale=torch.ones(3), v_scale=torch.ones(2, 1)),
    *rows(ANY, "{name}={value} is 0.0 in fp32", k_scale=0.0, v_scale=1e-50),
    *rows(ANY, r"{name}=1e\+50 is inf in fp32", v_scale=torch.tensor(1e50, dtype=torch.float64)),
    *rows(ANY, "{name}={value} is not finite", k_scale=math.nan),
    *rows(ANY, "{name}={value} is not a number", v_scale="x"),
    *rows(ANY, "{name}={value} is not a layout", kv_layout="NDH"),
]


@pytest.mark.parametrize("change,error,message", WRONG)
def test_what_makes_no_sense_is_refused(change, error, message):
    new, caches = torch.ones(2, 2, 64).half(), torch.zeros(2, 2, 4, 2, 64).half().unbind()
    given = dict(key=new, value=new, key_cache=caches[0], value_cache=caches[1], slot_mapping=torch.tensor([0, 1]))
    with pytest.raises(error, match=message):
        ck.append_paged_kv_cache_by_slot(**(given | change))
    assert not any(x.count_nonzero() for x in caches)
