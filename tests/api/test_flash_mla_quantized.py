"""flash_mla_with_kvcache over quantized latent caches and over two caches."""

from __future__ import annotations

import math
from typing import Any

import oracle
import pytest
import quantized_caches
import torch
from compare import assert_close
from mla_problems import DEVICES
from pairs import every
from quantized_caches import LAYOUTS, UNNAMED
from quantized_problems import Quantized, make

from cutlass_kernels.mla import flash_mla_with_kvcache, get_mla_metadata

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
BF16 = torch.bfloat16
pytestmark = pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
SINKS = torch.tensor([0.5, -30.0, 4.0, math.inf, -math.inf, 0.0, 1e4, -2.0])


def decode(problem: Quantized, batch: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_mla_with_kvcache(indices=) of so many requests, as DeepSeek V4 calls it."""
    first, *others = problem.scopes

    def lists(x: torch.Tensor) -> torch.Tensor:
        return x[:, 0].unflatten(0, (batch, -1))

    def lengths(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.unflatten(0, (batch, -1))[:, 0]

    call: dict[str, Any] = dict(q=problem.q.unflatten(0, (batch, -1)), k_cache=first.view, block_table=None)
    call |= dict(cache_seqlens=None, head_dim_v=512, tile_scheduler_metadata=get_mla_metadata()[0], is_fp8_kvcache=True)
    call |= dict(indices=lists(first.indices), topk_length=lengths(first.lengths))
    for extra in others:
        call |= dict(extra_k_cache=extra.view, extra_indices_in_kvcache=lists(extra.indices))
        call["extra_topk_length"] = lengths(extra.lengths)
    return flash_mla_with_kvcache(**call | given)


def check(problem: Quantized, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """FlashMLA's results: an LSE that is natural and without sinks, +inf for rows without keys."""
    want, base = problem.expected(sinks=sinks, sinks_in_lse=False)
    assert_close(out.flatten(0, 1), want.out, base)
    natural = want.lse * math.log(2.0)
    natural = natural.masked_fill(natural == -math.inf, math.inf)
    torch.testing.assert_close(lse.transpose(1, 2).flatten(0, 1).double(), natural, atol=1e-3, rtol=1e-5)


KINDS = [*LAYOUTS, "v4 v4", "v4.1_pages v4.1_pages", "v4.1_tokens v4.1_tokens", "numbers numbers"]
KINDS += ["v4 v4.1_pages", "v3.2_nope v4", "numbers v4", "v3.2 numbers"]


def named(kinds: str) -> str | None:
    """kv_format of these kinds of caches."""
    return next((x for x in kinds.split() if x in LAYOUTS and x not in UNNAMED), None)


@DEVICES
@every(kinds=KINDS, sinks=[False, True], n=[1, 2], dtype=[U8, torch.int8, E4M3])
def test_decode(device, kinds, sinks, n, dtype):
    problem = make(kinds.split(), 11, device, rows=3 * n, lists=["any", "none", "full"], lengths=False)
    for scope, each in zip(problem.scopes, ([40, 0, 7], [70, 0, 64])):
        scope.lengths = torch.tensor(each, dtype=INT32, device=device).repeat_interleave(n)
    for scope in problem.scopes:  # other rows now list slots that hold NaN
        if isinstance(scope.cache, quantized_caches.Cache):
            quantized_caches.filled(scope.cache, [True] * scope.slots, 3)
        else:
            scope.cache = scope.cache.nan_to_num()
    given: dict[str, Any] = dict(
        attn_sink=SINKS.to(device) if sinks else None, is_fp8_kvcache=kinds != "numbers numbers"
    )
    given["kv_format"] = named(kinds)
    for name, scope in zip(("k_cache", "extra_k_cache"), problem.scopes):
        if isinstance(scope.cache, quantized_caches.Cache):
            given[name] = scope.view.view(dtype)
    out, lse = decode(problem, 3, **given)
    assert out.shape == (3, n, 8, 512) and lse.shape == (3, 8, n)
    check(problem, out, lse, given["attn_sink"])
    assert not out[1].any() and bool((lse[1] == math.inf).all())


@pytest.mark.gpu
@pytest.mark.hopper
@pytest.mark.filterwarnings("error::cutlass_kernels.PerformanceWarning")
@every(kinds=[*LAYOUTS, *(f"{name} {name}" for name in LAYOUTS)], heads=[8, 64, 128])
def test_fa3_reads_one_format(kinds, heads):
    """PyTorch would warn."""
    problem = make(kinds.split(), 12, "cuda:0", rows=6, heads=heads, lengths=False, padding=16, start=16)
    check(problem, *decode(problem, 3, kv_format=named(kinds)), None)


@pytest.mark.parametrize(
    ("name", "kind"), [("V32", "v3.2"), ("V32_NO_ROPE", "v3.2_nope"), ("V4", "v4"), ("V41", "v4.1_pages")]
)
def test_names_of_a_fork_stand_for_formats(name, kind):
    problem = make([kind], 2, page_size=7)
    want = decode(problem, 5, kv_format=kind)
    assert bool(want[0].isfinite().all())
    first = problem.scopes[0]
    lists = first.indices, None, None, None, first.lengths, None  # kv_format is the last argument by position
    q = problem.q.unsqueeze(1)
    found = flash_mla_with_kvcache(q, first.view, None, None, 512, None, None, None, False, True, *lists, name)
    for x, y in zip(found, want):
        torch.testing.assert_close(x, y, atol=0.0, rtol=0.0)


@every(kinds=["v3.2", "v4 v4", "v3.2 numbers"])
def test_quantized_caches_have_no_other_scale(kinds):
    """Engines pass descale_k whatever the cache is."""
    problem = make(kinds.split(), 5)
    want = decode(problem, 5)
    for x, y in zip(decode(problem, 5, descale_k=torch.full((1,), 0.1), descale_q=0.1), want):
        torch.testing.assert_close(x, y, atol=0.0, rtol=0.0)


def test_e4m3_caches_in_bytes_share_a_scale():
    problem = make(["numbers", "numbers"], 6, dim=512, lists=["full"])
    caches = [x.cache.nan_to_num().to(E4M3) for x in problem.scopes]
    for scope, cache in zip(problem.scopes, caches):
        scope.cache = cache.to(BF16) * 0.5
    found = decode(problem, 5, k_cache=caches[0].view(U8), extra_k_cache=caches[1].view(torch.int8), descale_k=0.5)
    check(problem, *found, None)


@every(name=["v3.2", "v4"], causal=[False, True])
def test_dense_calls_read_them_too(name, causal):
    cache = quantized_caches.filled(quantized_caches.empty(name, 4, 16), [True] * 64)
    q = torch.randn(2, 2, 4, LAYOUTS[name].columns).to(BF16)
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=INT32), torch.tensor([20, 5], dtype=INT32)
    out, _ = flash_mla_with_kvcache(q, cache.view, table, lens, 512, causal=causal, softmax_scale=0.1)
    for b, (pages, count) in enumerate(zip(table.tolist(), lens.tolist())):
        keys = cache.numbers().unflatten(0, (4, 16))[pages].flatten(0, 1)[:count]
        mask = oracle.visible(2, count, causal=causal)
        want = oracle.attention(q[b].double(), keys, keys[..., :512], mask=mask, sm_scale=0.1)
        torch.testing.assert_close(out[b].double(), want.out, atol=1e-2, rtol=1e-2)
