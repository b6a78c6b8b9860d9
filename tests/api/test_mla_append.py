"""Writing new tokens to caches of latent attention: by positions, and by slots with a conversion to fp8."""

from __future__ import annotations

import pytest
import torch
from captures import capture
from compare import assert_bitwise
from refusals import rows

import cutlass_kernels as ck
from cutlass_kernels.mla import append_paged_mla_kv_cache, concat_and_cache_mla

INT32 = torch.int32
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPE = "{name} has shape"


def tokens(count: int, device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 512).to(device, dtype), torch.randn(count, 64).to(device, dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.element_size() == 1 else x


def stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if dtype not in (E4M3, E5M2):
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)


@DEVICES
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("one_cache", [True, False], ids=["views of one cache", "two caches"])
def test_tokens_go_to_the_pages_of_their_requests(device, page_size, one_cache):
    lens, new = [70, 5, 9], [3, 0, 9]
    pages = [-(-n // page_size) for n in lens]
    ids = torch.randperm(sum(pages) + 2)[: sum(pages)].to(INT32)
    indptr = torch.tensor([0, *torch.tensor(pages).cumsum(0).tolist()], dtype=INT32)
    last = torch.tensor([(n - 1) % page_size + 1 for n in lens], dtype=INT32)
    cache = torch.zeros(sum(pages) + 2, page_size, 576, dtype=torch.bfloat16, device=device)
    ckv_cache, kpe_cache = cache.split([512, 64], -1)
    if not one_cache:
        ckv_cache, kpe_cache = ckv_cache.contiguous(), kpe_cache.contiguous()
    ckv, kpe = tokens(sum(new), device)
    where = torch.tensor([0, 3, 3, 12], dtype=INT32)
    owner, position = ck.get_batch_indices_positions(where, torch.tensor(lens, dtype=INT32), 12)
    table = [x.to(device) for x in (ids, indptr, last)]
    given = (owner.to(device), position.to(device), ckv_cache, kpe_cache, *table)
    append_paged_mla_kv_cache(ckv, kpe, *given)
    expected = [torch.zeros_like(x) for x in (ckv_cache, kpe_cache)]
    for i, (b, p) in enumerate(zip(owner.tolist(), position.tolist())):
        page = int(ids[int(indptr[b]) + p // page_size])
        for target, x in zip(expected, (ckv, kpe)):
            target[page, p % page_size] = x[i]
    assert_bitwise(ckv_cache, expected[0])
    assert_bitwise(kpe_cache, expected[1])


@DEVICES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bytes"])
@pytest.mark.parametrize("ints", [torch.int64, INT32], ids=["int64", "int32"])
def test_tokens_go_to_slots(device, dtype, kind, ints):
    cache_dtype = {"auto": dtype, "fp8_e5m2": E5M2}.get(kind, E4M3)
    cache = torch.zeros(5, 16, 576, device=device).to(cache_dtype)
    given = cache.view(torch.uint8) if kind == "bytes" else cache
    kv_c, k_pe = tokens(8, device, dtype)
    kv_c[1] *= 1e4 if dtype == torch.bfloat16 else 100.0  # beyond the largest fp8 number
    slots = torch.tensor([33, -1, 0, 79, -7, 16], dtype=ints, device=device)  # fewer than tokens: a padded batch
    scale = 0.5 if kind != "bytes" else torch.tensor([0.37], device=device)
    concat_and_cache_mla(kv_c, k_pe.unsqueeze(1), given, slots, "fp8" if kind == "bytes" else kind, scale)
    expected = torch.zeros(80, 576).to(device, cache_dtype)
    number = float(scale)
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            row = torch.cat([bits(stored(x[i], cache_dtype, number)) for x in (kv_c, k_pe)])
            bits(expected)[slot] = row
    assert_bitwise(bits(cache).flatten(0, 1), bits(expected))


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["slots", "positions"])
def test_places_that_the_cache_does_not_have_are_not_written(where):
    device = "cuda:0"
    around = torch.zeros(9, 16, 576, dtype=torch.bfloat16, device=device)
    cache = around[3:6]
    kv_c, k_pe = tokens(5, device)
    if where == "slots":
        concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([48, 1 << 40, -1, -(1 << 40), 96], device=device))
    else:
        owner = torch.tensor([0, 1, 7, 0, -1], dtype=INT32, device=device)
        position = torch.tensor([99, 0, 0, -1, 0], dtype=INT32, device=device)
        table = [torch.tensor(x, dtype=INT32, device=device) for x in ([1, 50], [0, 1, 2], [16, 16])]
        append_paged_mla_kv_cache(kv_c, k_pe, owner, position, cache[..., :512], cache[..., 512:], *table)
    torch.cuda.synchronize()
    assert not bool(around.any())


@pytest.mark.gpu
def test_a_captured_append_follows_slots():
    cache = torch.zeros(4, 16, 576, dtype=torch.bfloat16, device="cuda:0")
    kv_c, k_pe = tokens(3, "cuda:0")
    slots = torch.full((3,), -1, device="cuda:0")
    graph, _ = capture(lambda: concat_and_cache_mla(kv_c, k_pe, cache, slots))
    slots.copy_(torch.tensor([5, -1, 63]))
    graph.replay()
    whole = torch.cat([kv_c, k_pe], -1)
    assert_bitwise(cache.flatten(0, 1)[[5, 63]], whole[[0, 2]])
    assert int(cache.flatten(0, 1).any(-1).sum()) == 2


def test_no_tokens_and_no_slots():
    cache = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
    concat_and_cache_mla(*tokens(0, "cpu"), cache, torch.zeros(0, dtype=torch.int64))
    concat_and_cache_mla(*tokens(3, "cpu"), cache, torch.zeros(0, dtype=torch.int64))
    assert not bool(cache.any())


def test_a_scale_of_a_16_bit_cache_has_no_effect():
    kv_c, k_pe = tokens(2, "cpu")
    caches = [torch.zeros(2, 16, 576, dtype=torch.bfloat16) for _ in range(2)]
    for cache, scale in zip(caches, (None, torch.tensor([2.0]))):
        concat_and_cache_mla(kv_c, k_pe, cache, torch.tensor([3, 17]), "auto", scale)
    assert_bitwise(*caches)


OF_SLOTS = [
    *rows(TypeError, "{name} is NoneType", kv_c=None),
    *rows(ValueError, "k_pe 32, but kv_cache", k_pe=torch.zeros(2, 32).bfloat16()),
    *rows(ValueError, SHAPE, k_pe=torch.zeros(2, 2, 64).bfloat16(), slot_mapping=torch.tensor([1.0])),
    *rows(ValueError, SHAPE, kv_cache=torch.zeros(2, 16, 1, 576).bfloat16()),
    *rows(ValueError, "dtype", kv_cache=torch.zeros(2, 16, 576)),
    *rows(ValueError, "{name} holds 32", slot_mapping=torch.tensor([3, 32])),
    *rows(ValueError, "{name} has 3 entries", slot_mapping=torch.tensor([1, 2, 3])),
    *rows(ValueError, r"kv_cache has shape .*uint8 tensor \[pages, page_size, 656\]", kv_cache_dtype="fp8_ds_mla"),
    *rows(ValueError, "{name}={value} is unknown", kv_cache_dtype="int8"),
    *rows(ValueError, "kv_cache has dtype torch.bfloat16", kv_cache_dtype="fp8"),
    (dict(kv_cache=torch.zeros(2, 16, 576).to(E4M3), scale=0.0), ValueError, "scale"),
]
OF_POSITIONS = [
    *rows(ValueError, SHAPE, append_ckv=torch.zeros(2, 1, 512), append_kpe=torch.zeros(3, 64)),
    *rows(ValueError, SHAPE, ckv_cache=torch.zeros(2, 8, 512), kpe_cache=torch.zeros(2, 16, 1, 64)),
    *rows(TypeError, "{name} is int", append_kpe=1),
    *rows(ValueError, "have room for 16 tokens", positions=torch.tensor([0, 16])),
    *rows(ValueError, "only 1 requests", batch_indices=torch.tensor([0, 1])),
    *rows(ValueError, "{name}", kv_indices=torch.tensor([2])),
]


@pytest.mark.parametrize(("change", "error", "words"), OF_SLOTS)
def test_wrong_arguments_of_slots(change, error, words):
    kv_c, k_pe = tokens(2, "cpu")
    cache = torch.zeros(2, 16, 576, dtype=torch.bfloat16)
    given = dict(kv_c=kv_c, k_pe=k_pe, kv_cache=cache, slot_mapping=torch.tensor([3, 17]))
    with pytest.raises(error, match=words):
        concat_and_cache_mla(**{**given, **change})


@pytest.mark.parametrize(("change", "error", "words"), OF_POSITIONS)
def test_wrong_arguments_of_positions(change, error, words):
    given = dict(append_ckv=torch.zeros(2, 512), append_kpe=torch.zeros(2, 64), batch_indices=torch.tensor([0, 0]))
    given |= dict(positions=torch.tensor([0, 1]), ckv_cache=torch.zeros(2, 16, 512), kpe_cache=torch.zeros(2, 16, 64))
    given |= dict(kv_indices=torch.tensor([1]), kv_indptr=torch.tensor([0, 1]), kv_last_page_len=torch.tensor([2]))
    append_paged_mla_kv_cache(**given)
    with pytest.raises(error, match=words):
        append_paged_mla_kv_cache(**{**given, **change})
