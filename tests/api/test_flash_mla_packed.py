"""flash_mla_with_kvcache over quantised tokens and over two caches, and vLLM's writer of such tokens."""

from __future__ import annotations

import math
from typing import Any

import oracle
import packed_caches
import pytest
import torch
from compare import assert_bitwise, assert_close
from mla_problems import DEVICES
from packed_caches import E4M3 as NUMBERS
from packed_caches import LAYOUTS
from packed_problems import Packed, make
from pairs import every
from refusals import rows

from cutlass_kernels._caches import latent_formats
from cutlass_kernels.mla import concat_and_cache_mla, flash_mla_with_kvcache, get_mla_metadata

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
SINKS = torch.tensor([0.5, -30.0, 4.0, math.inf, -math.inf, 0.0, 1e4, -2.0])


def decode(problem: Packed, batch: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
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


def check(problem: Packed, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> None:
    """FlashMLA's results: an LSE that is natural and without sinks, +inf for rows without keys."""
    want, base = problem.expected(sinks=sinks, sinks_in_lse=False)
    assert_close(out.flatten(0, 1), want.out, base)
    natural = want.lse * math.log(2.0)
    natural = natural.masked_fill(natural == -math.inf, math.inf)
    torch.testing.assert_close(lse.transpose(1, 2).flatten(0, 1).double(), natural, atol=1e-3, rtol=1e-5)


@DEVICES
@every(kinds=["v3.2", "v4", "v4.1", "v4.1_pages", "v4 v4", "v4.1 v4.1", "v4.1_pages v4.1_pages", "numbers numbers"])
@every(sinks=[False, True], n=[1, 2], dtype=[U8, torch.int8, E4M3])
def test_decode(device, kinds, sinks, n, dtype):
    problem = make(kinds.split(), 11, device, rows=3 * n, lists=["any", "none", "full"], lengths=False)
    for scope, each in zip(problem.scopes, ([40, 0, 7], [70, 0, 64])):
        scope.lengths = torch.tensor(each, dtype=INT32, device=device).repeat_interleave(n)
    for scope in problem.scopes:  # other rows now list slots that hold NaN
        if isinstance(scope.cache, packed_caches.Cache):
            packed_caches.filled(scope.cache, [True] * scope.slots, 3)
        else:
            scope.cache = scope.cache.nan_to_num()
    given: dict[str, Any] = dict(attn_sink=SINKS.to(device) if sinks else None, is_fp8_kvcache="numbers" not in kinds)
    if "pages" in kinds:
        given["kv_format"] = "v4.1_pages"
    if "numbers" not in kinds:
        given |= dict(k_cache=problem.scopes[0].view.view(dtype))
    out, lse = decode(problem, 3, **given)
    assert out.shape == (3, n, 8, 512) and lse.shape == (3, 8, n)
    check(problem, out, lse, given["attn_sink"])
    assert not out[1].any() and bool((lse[1] == math.inf).all())


@every(name=["v3.2", "v4"], causal=[False, True])
def test_dense_calls_read_them_too(name, causal):
    cache = packed_caches.filled(packed_caches.empty(name, 4, 16), [True] * 64)
    q = torch.randn(2, 2, 4, LAYOUTS[name].columns).to(BF16)
    table, lens = torch.tensor([[2, 0], [1, 3]], dtype=INT32), torch.tensor([20, 5], dtype=INT32)
    out, _ = flash_mla_with_kvcache(q, cache.view, table, lens, 512, causal=causal, softmax_scale=0.1)
    for b, (pages, count) in enumerate(zip(table.tolist(), lens.tolist())):
        keys = cache.numbers().unflatten(0, (4, 16))[pages].flatten(0, 1)[:count]
        mask = oracle.visible(2, count, causal=causal)
        want = oracle.attention(q[b].double(), keys, keys[..., :512], mask=mask, sm_scale=0.1)
        torch.testing.assert_close(out[b].double(), want.out, atol=1e-2, rtol=1e-2)


# --- writing ---


def tokens(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Groups of all sizes, zeros among them, and some whose scale is a power of two as it is."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, columns, generator=generator)
    sizes = torch.randint(-20, 12, (count, columns // 32), generator=generator)
    x = x * torch.pow(2.0, sizes.float()).repeat_interleave(32, 1)
    x[0] = 0.0
    x[1] = x[1].clamp(-50.0, 50.0)
    x[1, ::32] = 56.0  # 448 / 8
    return x.to(BF16)


def scale_of(group: torch.Tensor, power_of_two: bool) -> float:
    """In double precision, of the largest number / 448 as fp32 holds it."""
    largest = float(group.double().abs().max())
    if not power_of_two:
        return max(float(torch.tensor(largest) / 448), float(torch.finfo(torch.float32).tiny))
    wanted, power = max(largest, 1e-4) / 448, 2.0**-40
    while power < wanted:
        power *= 2
    return power


@every(name=list(LAYOUTS), power_of_two=[True, False])
def test_tokens_are_rounded_to_nearest(name, power_of_two):
    layout, kind = LAYOUTS[name], latent_formats.FORMATS[name]
    x = tokens(12, layout.columns)
    cache = packed_caches.empty(name, 3, 8, padding=576, layers=2, start=16)
    slots = torch.randperm(24)[:12]
    latent_formats.pack(x, None, cache.view, slots, kind, power_of_two)
    is_power = power_of_two or layout.scales == "ue8m0"
    for i, slot in enumerate(slots.tolist()):
        page, token = cache.page(slot // 8), slot % 8
        latent, scales, rope = packed_caches.addresses(name, 8, token)
        for g in range(layout.latent // layout.group):
            group = x[i, g * layout.group : (g + 1) * layout.group]
            scale = scale_of(group, is_power)
            bits = page[scales + g : scales + g + 1]
            if layout.scales == "fp32":
                bits = page[scales + 4 * g : scales + 4 * g + 4]
                assert float(packed_caches.number(packed_caches.words(bits, 4), 8, 23)) == scale
            else:
                assert float(packed_caches.power(bits)) == scale
            stored = page[latent + g * layout.group :][: layout.group]
            quotients = (group.float() / torch.tensor(scale, dtype=torch.float32)).double()
            assert bool(packed_caches.is_nearest(stored, quotients).all()), (i, g)
        assert_bitwise(page[rope : rope + 2 * layout.rope].view(BF16), x[i, layout.latent :])
        if name == "v4":
            assert int(page[scales + 7]) == 0
    skipped = sorted({*range(24)} - {*slots.tolist()})
    assert bool(cache.numbers()[skipped].isnan().all())


@pytest.mark.parametrize("name", LAYOUTS)
def test_nan_stays_and_infinities_spoil_their_group(name):
    layout, kind = LAYOUTS[name], latent_formats.FORMATS[name]
    x = torch.randn(3, layout.columns, generator=torch.Generator().manual_seed(1)).to(BF16)
    x[0, 5], x[1, 7], x[2, 3] = math.nan, math.inf, -math.nan
    x[2, 3:5] = math.nan
    cache = packed_caches.empty(name, 1, 4)
    latent_formats.pack(x, None, cache.view, torch.arange(3), kind)
    found = cache.numbers()[:, 0]
    known = ~x.isnan()
    known[1, : layout.group] = False
    torch.testing.assert_close(found[:3][known], x.double()[known], atol=1e-4, rtol=0.07)
    assert found[0].isnan().nonzero().flatten().tolist() == [5]
    assert found[2].isnan().nonzero().flatten().tolist() == [3, 4]
    assert found[1].isnan().nonzero().flatten().tolist() == list(range(layout.group))
    latent = cache.page(0)[packed_caches.addresses(name, 4, 0)[0] + 5]
    assert int(latent) == 0x7F and bool(NUMBERS[int(latent)].isnan())


@DEVICES
@every(dtype=[BF16, HALF], ints=[torch.int64, INT32], kind=[U8, torch.int8, E4M3], rope=[64, 0])
def test_concat_and_cache_mla(device, dtype, ints, kind, rope):
    """Bits of vLLM's kernel: scales are as they are, not powers of two."""
    x = tokens(7, 576).to(dtype).to(device)
    cache = packed_caches.empty("v3.2", 3, 8, device, padding=1024)
    slots = torch.tensor([17, -1, 3, 0, 23], dtype=ints, device=device)
    k_pe = x[:, 512 : 512 + rope] if rope == 0 else x[:, None, 512:]
    given = cache.view.squeeze(2).view(kind)
    concat_and_cache_mla(x[:, :512], k_pe, given, slots, "fp8_ds_mla", torch.ones(1, device=device))
    want = packed_caches.empty("v3.2", 3, 8, device, padding=1024)
    written = latent_formats.encoded(x[[0, 2, 3, 4]].cpu(), latent_formats.FORMATS["v3.2"], power_of_two=False)
    if not rope:
        written[:, 528:] = 255
    for slot, row in zip([17, 3, 0, 23], written):
        want.view[slot // 8, slot % 8, 0] = row.to(device)
    assert_bitwise(cache.view, want.view)


@pytest.mark.gpu
def test_the_writer_warns_and_is_captured():
    x = tokens(4, 576).cuda()
    cache, graph = torch.zeros(2, 8, 656, dtype=U8, device="cuda"), torch.cuda.CUDAGraph()
    slots = torch.tensor([3, 9, -1, 0], device="cuda")
    with pytest.warns(UserWarning, match="fp8_ds_mla"):
        concat_and_cache_mla(x[:, :512], x[:, 512:], cache, slots, "fp8_ds_mla")
    want = cache.clone()
    with torch.cuda.graph(graph):
        concat_and_cache_mla(x[:, :512], x[:, 512:], cache, slots, "fp8_ds_mla")
    cache.zero_()
    graph.replay()
    assert_bitwise(cache, want)


BYTES = torch.zeros(2, 16, 656, dtype=U8)
REFUSED = [
    *rows(ValueError, r"{name} has shape .*uint8 tensor \[pages, page_size, 656\]", kv_cache=BYTES[..., :584]),
    *rows(ValueError, r"{name} has shape .*uint8 tensor \[pages, page_size, 656\]", kv_cache=BYTES.to(BF16)),
    *rows(ValueError, "{name} has shape", kv_cache=BYTES.unsqueeze(2), slot_mapping=torch.tensor([1.0])),
    *rows(ValueError, "512 and 64 columns", kv_c=torch.zeros(2, 448).bfloat16(), k_pe=torch.zeros(2, 32).bfloat16()),
    *rows(ValueError, "one dtype", k_pe=torch.zeros(2, 64).half()),
    *rows(ValueError, "{name} holds 32", slot_mapping=torch.tensor([3, 32])),
    *rows(ValueError, "{name} has 3 entries", slot_mapping=torch.tensor([1, 2, 3])),
    *rows(TypeError, "{name} is NoneType", kv_c=None, slot_mapping=None),
    (dict(kv_c=torch.zeros(2, 512).int(), k_pe=torch.zeros(2, 64).int()), ValueError, "kv_c has dtype torch.int32"),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_the_writer_refuses_before_it_writes(change, error, words):
    cache = BYTES.clone()
    given: dict[str, Any] = dict(kv_c=torch.ones(2, 512).bfloat16(), k_pe=torch.ones(2, 64).bfloat16())
    given |= dict(kv_cache=cache, slot_mapping=torch.tensor([3, 5]))
    with pytest.raises(error, match=words):
        concat_and_cache_mla(**given | change, kv_cache_dtype="fp8_ds_mla")
    assert not cache.any()
