"""Memory of keys and values that nothing refers to may hold NaN: every form of keys, every variant of the kernels."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bitwise

import cutlass_kernels as ck

E4M3 = torch.float8_e4m3fn
PAGE, ROOM, MOST = 16, 1216, 40_070  # of a request; and a bound of lengths that is far too large
KEYS = [1215, 0, 300, 1]
HEADS, KV_HEADS = 4, 2

Given = tuple[torch.Tensor, torch.Tensor, dict[str, Any]]  # keys, values, where they are


def made(size: tuple[int, ...], dtype: torch.dtype, fill: float, device: str) -> torch.Tensor:
    return torch.full(size, fill, device=device).to(dtype)


def numbers(*values: int, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def one_request(k: list[torch.Tensor], v: list[torch.Tensor], fill: float) -> Given:
    """Offsets of keys alone, with rows of k and v behind the last key."""
    device = k[0].device.type
    tail = lambda x: torch.cat([x, made((77, *x.shape[1:]), x.dtype, fill, device)])  # noqa: E731
    return tail(k[0]), tail(v[0]), dict(cu_seqlens_k=numbers(0, len(k[0]), device=device))


def dense(k: list[torch.Tensor], v: list[torch.Tensor], fill: float) -> Given:
    def padded(xs: list[torch.Tensor]) -> torch.Tensor:
        whole = made((len(xs), ROOM, *xs[0].shape[1:]), xs[0].dtype, fill, xs[0].device.type)
        for into, x in zip(whole, xs):
            into[: len(x)] = x
        return whole

    return padded(k), padded(v), dict(seqused_k=numbers(*map(len, k), device=k[0].device.type))


def ragged(k: list[torch.Tensor], v: list[torch.Tensor], fill: float) -> Given:
    """Each request has five rows more than keys."""
    device = k[0].device.type

    def joined(xs: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([y for x in xs for y in (x, made((5, *x.shape[1:]), x.dtype, fill, device))])

    offsets = [0, *itertools.accumulate(len(x) + 5 for x in k)]
    used = numbers(*map(len, k), device=device)
    return joined(k), joined(v), dict(cu_seqlens_k=numbers(*offsets, device=device), seqused_k=used)


def paged(k: list[torch.Tensor], v: list[torch.Tensor], fill: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Caches, of which the first page is nobody's, and a table."""
    device, width = k[0].device.type, ROOM // PAGE
    table = 1 + torch.randperm(len(k) * width, generator=torch.Generator().manual_seed(0)).int().view(len(k), width)
    caches = []
    for xs in (k, v):
        cache = made((1 + table.numel(), PAGE, *xs[0].shape[1:]), xs[0].dtype, fill, device)
        for pages, x in zip(table, xs):
            for i, part in enumerate(x.split(PAGE)):
                cache[int(pages[i]), : len(part)] = part
        caches.append(cache)
    return caches[0], caches[1], table.to(device)


def table(k: list[torch.Tensor], v: list[torch.Tensor], fill: float) -> Given:
    k_cache, v_cache, pages = paged(k, v, fill)
    return k_cache, v_cache, dict(page_table=pages, seqused_k=numbers(*map(len, k), device=pages.device.type))


def indptr(k: list[torch.Tensor], v: list[torch.Tensor], fill: float) -> Given:
    k_cache, v_cache, pages = paged(k, v, fill)
    counts = [math.ceil(len(x) / PAGE) for x in k]
    indices = torch.cat([row[:count] for row, count in zip(pages, counts)])
    device = pages.device.type
    offsets = numbers(0, *itertools.accumulate(counts), device=device)
    last = numbers(*((len(x) - 1) % PAGE + 1 for x in k), device=device)
    return k_cache, v_cache, dict(kv_indptr=offsets, kv_indices=indices, kv_last_page_len=last)


FORMS: dict[str, Callable[..., Given]] = {x.__name__: x for x in (one_request, dense, ragged, table, indptr)}
F16, B16 = torch.float16, torch.bfloat16
VARIANTS = [
    *((F16, F16, dim, dim) for dim in (64, 96, 128, 192, 256, 512)),
    (B16, B16, 64, 64),
    (B16, B16, 192, 128),
    *((F16, kv, dim, dim) for kv in (E4M3, torch.float8_e5m2) for dim in (64, 128, 192, 256)),
    *((E4M3, E4M3, dim, dim) for dim in (64, 128, 256)),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=(3, -1), logits_soft_cap=50.0),
    "sides": dict(window=(255, 73), alibi=True),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("rows", [1, 9, 700])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_it_shows(target, form, variant, rows, options):
    if target.is_reference and (rows == 700 or variant[2] > 64):
        pytest.skip("the reference has one way for all")
    q_dtype, kv_dtype, dim, dim_vo = variant
    keys = KEYS[:1] if form == "one_request" else KEYS
    torch.manual_seed(0)
    make = lambda n, heads, d: torch.randn(n, heads, d, device=target.device)  # noqa: E731
    q = torch.stack([make(rows, HEADS, dim) for _ in keys]).to(q_dtype)
    k, v = ([make(n, KV_HEADS, d).to(kv_dtype) for n in keys] for d in (dim, dim_vo))
    given = dict(OPTIONS[options])
    if given.pop("alibi", False):
        given["alibi_slopes"] = torch.rand(HEADS, device=target.device)
    results = []
    for fill in (0.0, math.nan):
        k_all, v_all, where = FORMS[form](k, v, fill)
        call = dict(**where, **given, max_seqlen_k=MOST, return_lse=True, backend=target.backend)
        try:
            results.append(ck.attention(q, k_all, v_all, **call))
        except ck.BackendError as error:
            if kv_dtype.itemsize > 1:  # both serve all 16-bit types
                raise
            pytest.skip(f"no such kernel: {str(error)[:80]}")
    assert not results[0][0].isnan().any()
    for with_zeros, with_nan in zip(*results):
        assert_bitwise(with_nan, with_zeros)
