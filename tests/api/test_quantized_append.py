"""Writers of quantized latent caches: append_quantized_mla_kv_cache, and vLLM's concat_and_cache_mla."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import quantized_caches
import torch
from compare import assert_bitwise
from mla_problems import DEVICES
from pairs import every
from quantized_caches import E4M3 as NUMBERS
from quantized_caches import LAYOUTS, UNNAMED
from refusals import rows

import cutlass_kernels as ck
from cutlass_kernels.mla import append_quantized_mla_kv_cache, concat_and_cache_mla

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")


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


def check_token(name: str, page: torch.Tensor, page_size: int, token: int, x: torch.Tensor, power_of_two: bool) -> None:
    """That bytes of a page hold the row ``x``: its scales, and the nearest numbers."""
    layout = LAYOUTS[name]
    latent, scales, rope = quantized_caches.addresses(name, page_size, token)
    for g in range(layout.latent // layout.group):
        group = x[g * layout.group : (g + 1) * layout.group]
        scale = scale_of(group, power_of_two)
        bits = page[scales + g : scales + g + 1]
        if layout.scales == "fp32":
            bits = page[scales + 4 * g : scales + 4 * g + 4]
            assert float(quantized_caches.number(quantized_caches.words(bits, 4), 8, 23)) == scale
        else:
            assert float(quantized_caches.power(bits)) == scale
        stored = page[latent + g * layout.group :][: layout.group]
        quotients = (group.float() / torch.tensor(scale, dtype=torch.float32)).double()
        assert bool(quantized_caches.is_nearest(stored, quotients).all()), g
    assert_bitwise(page[rope : rope + 2 * layout.rope].view(BF16), x[layout.latent :].to(BF16))
    if name == "v4":
        assert int(page[scales + 7]) == 0


@DEVICES
@every(name=list(LAYOUTS), power_of_two=[None, True, False], form=["parts", "whole", "int8", "e4m3"])
def test_tokens_are_rounded_to_nearest(device, name, power_of_two, form):
    layout = LAYOUTS[name]
    if layout.scales == "ue8m0" and power_of_two is False:
        pytest.skip("scales are powers of two")
    x = tokens(12, layout.columns)
    cache = quantized_caches.empty(name, 3, 8, device, padding=576, layers=2, start=16)
    slots = torch.randperm(24)[:12]
    view = cache.view.view({"int8": torch.int8, "e4m3": E4M3}.get(form, U8))
    parts = x.split(
        [448, 64] if layout.columns == 512 and (layout.rope or form == "parts") else [512, layout.columns - 512], 1
    )
    ckv, kpe = (x, None) if form == "whole" else parts
    ckv, kpe = ckv.to(device), None if kpe is None or not kpe.size(1) else kpe.to(device)
    append_quantized_mla_kv_cache(ckv, kpe, view, slots.to(device), name, power_of_two_scales=power_of_two)
    for i, slot in enumerate(slots.tolist()):
        check_token(name, cache.page(slot // 8), 8, slot % 8, x[i], power_of_two or layout.scales == "ue8m0")
    skipped = sorted({*range(24)} - {*slots.tolist()})
    assert bool(cache.numbers()[skipped].isnan().all())


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_reads_what_is_written(name):
    layout = LAYOUTS[name]
    x = torch.randn(32, layout.columns, generator=torch.Generator().manual_seed(2)).to(BF16)
    cache = torch.zeros(4, 8, 1, layout.size, dtype=U8)
    kv_format = None if name in UNNAMED else name
    append_quantized_mla_kv_cache(x, None, cache, torch.arange(32), kv_format)
    q = torch.randn(3, 4, layout.columns, generator=torch.Generator().manual_seed(3)).to(BF16)
    lists = torch.arange(32, dtype=INT32).expand(3, 1, 32)
    found = ck.attention(q, cache, cache, kv_indices_per_token=lists, kv_format=kv_format)
    want = ck.attention(q, x[:, None], x[:, None, :512], kv_indices_per_token=lists)
    torch.testing.assert_close(found, want, atol=0.1, rtol=0.1)


@DEVICES
@pytest.mark.parametrize("name", LAYOUTS)
def test_nan_stays_and_infinities_spoil_their_group(name, device):
    layout = LAYOUTS[name]
    x = torch.randn(3, layout.columns, generator=torch.Generator().manual_seed(1)).to(BF16)
    x[0, 5], x[1, 7], x[2, 3] = math.nan, math.inf, -math.nan
    x[2, 3:5] = math.nan
    cache = quantized_caches.empty(name, 1, 4, device)
    append_quantized_mla_kv_cache(x.to(device), None, cache.view, torch.arange(3, device=device), name, True)
    found = cache.numbers()[:, 0].cpu()
    known = ~x.isnan()
    known[1, : layout.group] = False
    torch.testing.assert_close(found[:3][known], x.double()[known], atol=1e-4, rtol=0.07)
    assert found[0].isnan().nonzero().flatten().tolist() == [5]
    assert found[2].isnan().nonzero().flatten().tolist() == [3, 4]
    assert found[1].isnan().nonzero().flatten().tolist() == list(range(layout.group))
    latent = cache.page(0)[quantized_caches.addresses(name, 4, 0)[0] + 5]
    assert int(latent) == 0x7F and bool(NUMBERS[int(latent)].isnan())


@DEVICES
@every(dtype=[BF16, HALF], ints=[torch.int64, INT32], kind=[U8, torch.int8, E4M3], rope=[64, 0])
def test_concat_and_cache_mla(device, dtype, ints, kind, rope):
    """As vLLM's kernel: scales are not powers of two. Tokens without RoPE have zeros there."""
    x = tokens(7, 576).to(dtype)
    cache = quantized_caches.empty("v3.2", 3, 8, device, padding=1024)
    slots = torch.tensor([17, -1, 3, 0, 23], dtype=ints, device=device)
    k_pe = x[:, 512 : 512 + rope] if rope == 0 else x[:, None, 512:]
    given = cache.view.squeeze(2).view(kind)
    concat_and_cache_mla(
        x[:, :512].to(device), k_pe.to(device), given, slots, "fp8_ds_mla", torch.ones(1, device=device)
    )
    if not rope:
        x[:, 512:] = 0.0
    for slot, i in zip([17, 3, 0, 23], [0, 2, 3, 4]):
        check_token("v3.2", cache.page(slot // 8), 8, slot % 8, x[i], False)
    skipped = sorted({*range(24)} - {17, 3, 0, 23})
    assert bool(cache.numbers()[skipped].isnan().all())


@pytest.mark.gpu
@every(name=list(LAYOUTS), dtype=[BF16, HALF], power_of_two=[None, True], page_size=[2, 64, 100], apart=[False, True])
def test_the_kernel_writes_the_bytes_of_pytorch(name, dtype, power_of_two, page_size, apart):
    layout = LAYOUTS[name]
    x = tokens(700, layout.columns, seed=page_size).to(dtype)
    caches = [torch.full((800 // page_size + 1, page_size, 1, layout.size), 7, dtype=U8, device="cuda")]
    caches.append(caches[0].cpu())
    slots = torch.randperm(800, generator=torch.Generator().manual_seed(1))[:690] - 2
    for cache in caches:
        given = x.to(cache.device)
        ckv, kpe = (given, None) if not apart else given.split([layout.columns - 64, 64], 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            append_quantized_mla_kv_cache(ckv, kpe, cache, slots.to(cache.device), name, power_of_two)
    assert_bitwise(caches[0].cpu(), caches[1])


@pytest.mark.gpu
def test_what_the_kernel_cannot_read_is_written_all_the_same():
    x, caches = tokens(5, 608)[:, :577].cuda(), torch.zeros(2, 2, 8, 1, 656, dtype=U8, device="cuda")
    with pytest.warns(ck.PerformanceWarning, match="written with PyTorch"):
        append_quantized_mla_kv_cache(x[:, 1:], None, caches[0], torch.arange(5, device="cuda"))
    append_quantized_mla_kv_cache(x[:, 1:].contiguous(), None, caches[1], torch.arange(5, device="cuda"))
    assert_bitwise(caches[0], caches[1])


@pytest.mark.gpu
def test_the_writer_is_captured():
    x = tokens(4, 576).cuda()
    cache, graph = torch.zeros(2, 8, 656, dtype=U8, device="cuda"), torch.cuda.CUDAGraph()
    slots = torch.tensor([3, 9, -1, 0], device="cuda")
    concat_and_cache_mla(x[:, :512], x[:, 512:], cache, slots, "fp8_ds_mla")
    want = cache.clone()
    with torch.cuda.graph(graph):
        concat_and_cache_mla(x[:, :512], x[:, 512:], cache, slots, "fp8_ds_mla")
    cache.zero_()
    graph.replay()
    assert_bitwise(cache, want)


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_writers(name):
    x = tokens(4, LAYOUTS[name].columns)
    slots = torch.tensor([3, 9, -1, 0])
    caches = torch.zeros(2, 2, 8, 1, LAYOUTS[name].size, dtype=U8)
    append_quantized_mla_kv_cache(x, None, caches[0], slots, name)
    torch.compile(append_quantized_mla_kv_cache, backend="aot_eager", fullgraph=True)(x, None, caches[1], slots, name)
    assert_bitwise(caches[1], caches[0])


def test_tokens_with_gradients_warn():
    x, cache = tokens(2, 576).requires_grad_(), torch.zeros(2, 8, 1, 656, dtype=U8)
    for ckv, kpe in ((x, None), (x[:, :512].detach(), x[:, 512:])):
        with pytest.warns(UserWarning, match=r"append_quantized_mla_kv_cache\(\) got keys"):
            append_quantized_mla_kv_cache(ckv, kpe, cache, torch.tensor([3, 5]))
    assert not cache.requires_grad


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=BF16)


BYTES = torch.zeros(2, 16, 656, dtype=U8)
REFUSED = [
    *rows(ValueError, r"{name} has shape .*uint8 tensor \[pages, page_size, 656\]", kv_cache=BYTES[..., :584]),
    *rows(ValueError, r"{name} has shape .*uint8 tensor \[pages, page_size, 656\]", kv_cache=BYTES.to(BF16)),
    *rows(ValueError, "{name} has strides .* share memory", kv_cache=BYTES[:1].expand(2, 16, 656)),
    *rows(ValueError, "{name} has shape", kv_cache=BYTES.unsqueeze(2), slot_mapping=torch.tensor([1.0])),
    *rows(ValueError, "576 columns, 512 and 64", kv_c=bf16(2, 448), k_pe=bf16(2, 32)),
    (dict(kv_c=bf16(2, 448)), ValueError, "kv_c has 448 columns and k_pe 64, .* 576 columns, 512 and 64"),
    (dict(kv_c=bf16(2, 544), k_pe=bf16(2, 32)), ValueError, "kv_c has 544 columns and k_pe 32"),
    *rows(ValueError, "{name} has dtype torch.float16: .* one dtype", k_pe=bf16(2, 64).half()),
    (
        dict(kv_c=bf16(2, 512).float(), k_pe=bf16(2, 64).float()),
        ValueError,
        "kv_c has dtype torch.float32: .* bfloat16",
    ),
    (dict(kv_c=bf16(2, 512).to(E4M3), k_pe=bf16(2, 64).to(E4M3)), ValueError, "kv_c has dtype torch.float8_e4m3fn"),
    *rows(ValueError, "{name} holds 32", slot_mapping=torch.tensor([3, 32])),
    *rows(ValueError, "{name} has 3 entries", slot_mapping=torch.tensor([1, 2, 3])),
    *rows(TypeError, "{name} is NoneType", kv_c=None, slot_mapping=None),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_the_writer_of_vllm_refuses_before_it_writes(change, error, words):
    cache = BYTES.clone()
    given: dict[str, Any] = dict(kv_c=bf16(2, 512), k_pe=bf16(2, 64), kv_cache=cache, slot_mapping=torch.tensor([3, 5]))
    with pytest.raises(error, match=words):
        concat_and_cache_mla(**given | change, kv_cache_dtype="fp8_ds_mla")
    assert not cache.any()


def of_bytes(size: int, dtype: torch.dtype = U8) -> torch.Tensor:
    return torch.zeros(2, 16, 1, size, dtype=dtype)


OURS = [
    *rows(ValueError, "{name} has 528 bytes per token .* pass kv_format", kv_cache=of_bytes(528)),
    *rows(
        ValueError, "{name} has shape .* 656, 584 or 528 bytes per token. .* concat_and", kv_cache=of_bytes(576, BF16)
    ),
    *rows(ValueError, "{name} has shape .* 656, 584 or 528", kv_cache=of_bytes(656, E4M3)),
    *rows(ValueError, "{name} has shape .* 4 dimensions", kv_cache=of_bytes(656)[:, :, 0]),
    *rows(ValueError, "{name} has shape .* one head", kv_cache=torch.zeros(2, 16, 2, 656, dtype=U8)),
    *rows(ValueError, "{name}='v4.1' is unknown", kv_format="v4.1"),
    *rows(ValueError, "kv_cache has shape .* {name}='v4' has 584 bytes", kv_format="v4"),
    *rows(TypeError, "{name}='yes'", power_of_two_scales="yes"),
    (
        dict(kv_cache=of_bytes(584), ckv=bf16(2, 448), power_of_two_scales=False),
        ValueError,
        "power_of_two_scales=False, but kv_format='v4' stores powers of two",
    ),
    (dict(kv_cache=of_bytes(1168)[..., :584], ckv=bf16(2, 448)), ValueError, "kv_cache has strides .* adjacent bytes"),
    (dict(kv_cache=of_bytes(1312)[..., ::2]), ValueError, "kv_cache has stride 2 in its last dimension"),
    (
        dict(kv_cache=of_bytes(528), kv_format="v4.1_pages", kpe=None, ckv=bf16(2, 448)),
        ValueError,
        "448 .* 512 columns.",
    ),
    *rows(ValueError, "{name} is on meta", kpe=bf16(2, 64).to("meta")),
    *rows(ValueError, "{name} has 1 dimensions|{name} has shape", ckv=bf16(512)),
    *rows(TypeError, "{name} is NoneType", ckv=None),
    *rows(ValueError, "{name} has 3 entries", slot_mapping=torch.tensor([1, 2, 3])),
]


@pytest.mark.parametrize(("change", "error", "words"), OURS)
def test_refusals(change, error, words):
    cache = of_bytes(656)
    given: dict[str, Any] = dict(ckv=bf16(2, 512), kpe=bf16(2, 64), kv_cache=cache, slot_mapping=torch.tensor([3, 5]))
    with pytest.raises(error, match=words):
        append_quantized_mla_kv_cache(**given | change)
    assert not cache.any()
