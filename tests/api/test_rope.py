"""Rotary embeddings by a table of cosines and sines, and rotated keys written to slots of a cache."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from captures import capture
from compare import assert_bitwise
from guards import Guarded
from problems import randn
from refusals import rows

import cutlass_kernels as ck

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALF = [torch.float16, torch.bfloat16]


def make_table(positions: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    angles = torch.arange(positions).double()[:, None] / 10000 ** (torch.arange(rotary_dim // 2) / (rotary_dim // 2))
    return torch.cat([angles.cos(), angles.sin()], -1).to(dtype)


def expect(x: torch.Tensor, positions: list[int], table: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """``[tokens, heads, dim]`` in double precision: complex products, a token at a time."""
    result = x.double().clone()
    dim = table.size(1)
    for token, position in enumerate(positions):
        if not 0 <= position < table.size(0):
            continue
        cos, sin = table[position].double().chunk(2)
        a, b = (slice(0, dim // 2), slice(dim // 2, dim)) if is_neox else (slice(0, dim, 2), slice(1, dim, 2))
        turned = torch.complex(result[token, :, a], result[token, :, b]) * torch.complex(cos, sin)
        result[token, :, a], result[token, :, b] = turned.real, turned.imag
    return result


def assert_rotated(got: torch.Tensor, want: torch.Tensor) -> None:
    """Rounded once: products in fp32 are off by less than a hundredth of a 16-bit rounding."""
    error = (got.double().cpu() - want).abs()
    eps = torch.finfo(got.dtype).eps
    assert bool((error <= 0.51 * eps * want.abs() + 1e-5).all()), error.max()


def placed(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=device).copy_(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    "head_dim,rotary_dim", [(64, 64), (128, 128), (128, 64), (256, 256), (80, 80), (96, 32), (20, 12), (64, 2)]
)
@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_rotates_in_place(device, is_neox, head_dim, rotary_dim, dtype):
    rng = random.Random(head_dim + rotary_dim)
    generator = torch.Generator().manual_seed(rotary_dim)
    tokens, q_heads, k_heads = rng.choice([1, 5, 70]), rng.choice([1, 7, 32]), rng.choice([1, 4])
    positions = [rng.randrange(50) for _ in range(tokens)]
    table = make_table(50, rotary_dim, rng.choice([torch.float32, dtype]))
    fused = randn((tokens, (q_heads + 2 * k_heads) * head_dim), dtype, "cpu", generator)
    query, key, value = fused.split([q_heads * head_dim, k_heads * head_dim, k_heads * head_dim], 1)
    want = [expect(x.unflatten(1, (-1, head_dim)), positions, table, is_neox) for x in (query, key)]
    moved = placed(fused, device)
    q, k, v = moved.split([q_heads * head_dim, k_heads * head_dim, k_heads * head_dim], 1)
    index = torch.tensor(positions, dtype=rng.choice([torch.int64, torch.int32]), device=device)
    new = ck.apply_rope_with_cos_sin_cache(index, q, k, head_dim, table.to(device), is_neox)
    assert_bitwise(moved.cpu(), fused)
    ck.apply_rope_with_cos_sin_cache_inplace(index, q, k, head_dim, table.to(device), is_neox)
    for got, copied, wanted in zip((q, k), new, want):
        assert_rotated(got.unflatten(1, (-1, head_dim)), wanted)
        assert_bitwise(copied, got.contiguous())
    assert_bitwise(v.cpu(), value)


@pytest.mark.gpu
def test_positions_that_the_table_does_not_have():
    """Such tokens keep what they hold, and no cache gets them."""
    tokens, dim = 6, 64
    q, k, v = (torch.randn(tokens, heads, dim, device="cuda", dtype=torch.float16) for heads in (4, 2, 2))
    table = Guarded((10, dim), torch.float32, "cuda", value=make_table(10, dim)).tensor  # between NaN
    positions = torch.tensor([3, -1, 9, 10, 2**31 - 1, 0], device="cuda")
    want = expect(q.cpu(), positions.tolist(), table.cpu(), True)
    cache = torch.full((2, 1, 16, 2, dim), 7.0, device="cuda", dtype=torch.float16)
    slots = torch.arange(tokens, device="cuda")
    ck.rope_append_paged_kv_cache_by_slot(q, k, v, positions, table, cache[0], cache[1], slots)
    assert_rotated(q, want)
    written = (cache != 7.0).any(-1).any(-1)[:, 0].cpu()  # [2, 16]
    assert written.tolist() == [[i in (0, 2, 5) for i in range(16)]] * 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("dims", [(64, 64, 64), (128, 64, 128), (128, 128, 64), (80, 80, 80), (20, 12, 18)], ids=str)
def test_the_same_bits_as_two_calls(device, is_neox, cache_dtype, dtype, dims):
    head_dim, rotary_dim, dim_vo = dims
    rng = random.Random(sum(dims))
    generator = torch.Generator().manual_seed(sum(dims))
    layout, tokens, heads, page_size = rng.choice(["NHD", "HND"]), rng.choice([1, 40]), rng.choice([1, 2, 8]), 16
    q = randn((tokens, 4 * heads, head_dim), dtype, device, generator)
    k, v = (randn((tokens, heads, dim), dtype, device, generator) for dim in (head_dim, dim_vo))
    room = 4 * page_size
    slots = torch.randperm(room, generator=generator)[:tokens].to(device)
    slots[tokens // 2] = -1
    positions = torch.randint(0, 30, (tokens,), generator=generator).to(device)
    table = make_table(30, rotary_dim).to(device)
    shape = (4, page_size, heads) if layout == "NHD" else (4, heads, page_size)
    caches = [torch.zeros(*shape, dim, device=device).to(cache_dtype or dtype) for dim in (head_dim, dim_vo)]
    others = [x.clone() for x in caches]
    scales: list[Any] = [0.5, torch.rand(heads, generator=generator).to(device) + 0.5]
    q2, k2, k_before = q.clone(), k.clone(), k.clone()
    ck.apply_rope_with_cos_sin_cache_inplace(positions, q2, k2, head_dim, table, is_neox)
    ck.append_paged_kv_cache_by_slot(k2, v, *others, slots, *scales, kv_layout=layout)
    ck.rope_append_paged_kv_cache_by_slot(
        q, k, v, positions, table, *caches, slots, *scales, kv_layout=layout, is_neox=is_neox
    )
    assert_bitwise(q, q2)
    assert_bitwise(k, k_before)
    for got, want in zip(caches, others):
        assert_bitwise(got, want)
    ck.rope_append_paged_kv_cache_by_slot(
        q, k, v, positions, table, *caches, slots, *scales, kv_layout=layout, is_neox=is_neox, update_key=True
    )
    assert_bitwise(k, k2)


@pytest.mark.gpu
def test_follows_its_inputs_in_a_graph():
    q, k, v = (torch.randn(8, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    cache = torch.zeros(2, 4, 16, 2, 128, device="cuda", dtype=torch.bfloat16)
    table, positions, slots = make_table(100, 128).cuda(), torch.zeros(8, device="cuda").long(), torch.arange(8).cuda()
    call = (q, k, v, positions, table, cache[0], cache[1], slots)
    graph, _ = capture(lambda: ck.rope_append_paged_kv_cache_by_slot(*call))
    positions.copy_(torch.arange(8) + 50)
    slots.copy_(torch.arange(8) + 30)
    before, wanted = q.clone(), torch.zeros_like(cache)
    ck.rope_append_paged_kv_cache_by_slot(before, k, v, positions, table, wanted[0], wanted[1], slots)
    cache.zero_()
    graph.replay()
    assert_bitwise(q, before)
    assert_bitwise(cache, wanted)


REFUSED = [
    *rows(ValueError, "no heads of {name}={value}", head_size=60),
    *rows(ValueError, "int64 or int32", positions=torch.zeros(3)),
    *rows(ValueError, "each token has one position", positions=torch.zeros(2, dtype=torch.int64)),
    *rows(ValueError, "positions lie between 0 and 8", positions=torch.tensor([0, 1, 8])),
    *rows(ValueError, "positions lie between -1 and 7", positions=torch.tensor([0, -1, 7])),
    *rows(ValueError, "rotary_dim=66", cos_sin_cache=torch.zeros(8, 66)),
    *rows(ValueError, "rotary_dim=7", cos_sin_cache=torch.zeros(8, 7)),
    *rows(ValueError, r"must be \[positions, rotary_dim\]", cos_sin_cache=torch.zeros(8)),
    *rows(ValueError, "dtypes", key=torch.zeros(3, 128, dtype=torch.float16)),
    *rows(ValueError, "{name} has shape", query=torch.zeros(3)),
    *rows((ValueError, TypeError), "{name}={value}", is_neox=2),
]


@pytest.mark.parametrize("change,error,message", REFUSED)
def test_refuses(change, error, message):
    given = dict(positions=torch.tensor([0, 1, 7]), query=torch.zeros(3, 256), key=torch.zeros(3, 128))
    given |= dict(head_size=64, cos_sin_cache=make_table(8, 64))
    with pytest.raises(error, match=message):
        ck.apply_rope_with_cos_sin_cache_inplace(**(given | change))


def test_a_slot_for_each_token():
    q, k, v = (torch.zeros(3, heads, 64) for heads in (4, 2, 2))
    cache, table = torch.zeros(2, 2, 16, 2, 64), make_table(8, 64)
    with pytest.raises(ValueError, match="one of each per token"):
        ck.rope_append_paged_kv_cache_by_slot(
            q, k, v, torch.tensor([0, 1, 2]), table, cache[0], cache[1], torch.tensor([4, 5])
        )
