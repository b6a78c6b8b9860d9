"""Rotated tokens in latent caches: append_quantized_mla_kv_cache(positions=), concat_and_cache_mla_rope_fused()."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import quantized_caches
import torch
from captures import capture
from compare import assert_bitwise
from mla_problems import DEVICES
from pairs import every
from quantized_caches import LAYOUTS
from refusals import rows

import cutlass_kernels as ck
from cutlass_kernels.mla import append_quantized_mla_kv_cache, concat_and_cache_mla, concat_and_cache_mla_rope_fused

U8, E4M3, BF16, HALF = torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")
ROPE, POSITIONS = 64, 50
ROTATED = [name for name in LAYOUTS if name != "v3.2_nope"]


def table_of(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    angles = torch.arange(float(POSITIONS))[:, None] / 10000 ** (torch.arange(ROPE // 2) / (ROPE // 2))
    return torch.cat([angles.cos(), angles.sin()], -1).to(device, dtype)


class Tokens:
    """New tokens, columns of queries, positions and slots. Rows behind the last slot mean nothing."""

    def __init__(self, count: int, columns: int, dtype: torch.dtype, device: str, heads: int = 3, slots: int = 24):
        generator = torch.Generator().manual_seed(count)
        self.x = torch.randn(count, columns, generator=generator).to(device, dtype)
        self.q = torch.randn(count, heads, 192, generator=generator).to(device, dtype)[..., 128:]
        self.positions = torch.randint(POSITIONS, (count,), generator=generator).to(device)
        self.slots = torch.randperm(slots, generator=generator)[: count - 2].to(device)
        self.slots[1:2] = -1

    def parts(self, apart: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        return (self.x[:, :-ROPE], self.x[:, -ROPE:]) if apart else (self.x, None)

    def rotate(self, table: torch.Tensor, is_neox: bool) -> None:
        """All rows with a slot, in place, by the function for that."""
        count = len(self.slots)
        key = self.x[:count, None, -ROPE:]
        ck.apply_rope_with_cos_sin_cache_inplace(self.positions[:count], self.q[:count], key, ROPE, table, is_neox)


@DEVICES
@every(name=ROTATED, is_neox=[True, False], fp32_table=[True, False], update_key=[True, False], dtype=[BF16, HALF])
def test_the_same_bits_as_rotating_first(device, name, is_neox, fp32_table, update_key, dtype):
    for count, heads in ((12, 3), (9, 0), (24, 17)):
        made = [Tokens(count, LAYOUTS[name].columns, dtype, device, heads) for _ in range(2)]
        caches = [quantized_caches.empty(name, 3, 8, device, padding=576) for _ in range(2)]
        table, apart = table_of(torch.float32 if fp32_table else dtype, device), name == "v3.2" or heads > 0
        before = made[0].x.clone()
        fused, steps = made
        rope = (fused.positions, table, is_neox, fused.q if heads else None, update_key)
        append_quantized_mla_kv_cache(*fused.parts(apart), caches[0].view, fused.slots, name, None, *rope)
        steps.rotate(table, is_neox)
        append_quantized_mla_kv_cache(*steps.parts(apart), caches[1].view, steps.slots, name)
        assert_bitwise(caches[0].view, caches[1].view)
        assert_bitwise(fused.q, steps.q)
        assert_bitwise(fused.x, steps.x if update_key else before)


def turned(x: torch.Tensor, positions: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """``[tokens, ..., 64]`` rotated as complex numbers, in double precision."""
    angles = positions.double()[:, None] / 10000.0 ** (torch.arange(32, dtype=torch.float64) / 32)
    turns = torch.polar(torch.ones_like(angles), angles).reshape(len(x), *[1] * (x.dim() - 2), 32)
    pairs = x.double().unflatten(-1, (2, 32)).transpose(-1, -2) if is_neox else x.double().unflatten(-1, (32, 2))
    result = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns)
    return (result.transpose(-1, -2) if is_neox else result).flatten(-2)


@DEVICES
@every(name=ROTATED, is_neox=[True, False])
def test_numbers(device, name, is_neox):
    new = Tokens(12, LAYOUTS[name].columns, BF16, device)
    cache, table = quantized_caches.empty(name, 3, 8, device), table_of(torch.float32, device)
    x, q, count = new.x.cpu(), new.q.cpu().clone(), len(new.slots)
    rope = (new.positions.int(), table, is_neox, new.q)
    append_quantized_mla_kv_cache(new.x, None, cache.view, new.slots, name, None, *rope)
    positions = new.positions.cpu()
    want = torch.cat([x[:, :-ROPE].double(), turned(x[:, -ROPE:], positions, is_neox)], -1)
    found = cache.numbers()[:, 0].cpu()
    for i, slot in enumerate(new.slots.tolist()):
        if slot >= 0:
            torch.testing.assert_close(found[slot], want[i], atol=5e-3, rtol=0.07)
    q[:count] = turned(q[:count], positions[:count], is_neox)
    torch.testing.assert_close(new.q.cpu(), q, atol=1e-2, rtol=1e-2)


@DEVICES
@every(kind=["auto", "fp8_e4m3", "fp8_ds_mla"], is_neox=[True, False], dtype=[BF16, HALF])
def test_vllms_function(device, kind, is_neox, dtype):
    made = [Tokens(12, 576, dtype, device) for _ in range(2)]
    size, of_cache = {"auto": (576, dtype), "fp8_e4m3": (576, U8), "fp8_ds_mla": (656, U8)}[kind]
    caches = [torch.zeros(3, 8, size, device=device, dtype=of_cache) for _ in range(2)]
    table, scale = table_of(dtype, device), torch.tensor([0.5], device=device)
    fused, steps = made
    tokens = fused.x[:, None, 512:], fused.x[:, :512], table, is_neox, fused.slots
    concat_and_cache_mla_rope_fused(fused.positions, fused.q, *tokens, caches[0], kind, scale)
    steps.rotate(table, is_neox)
    concat_and_cache_mla(steps.x[:, :512], steps.x[:, 512:], caches[1], steps.slots, kind, scale)
    assert caches[0].any()
    assert_bitwise(caches[0], caches[1])
    assert_bitwise(fused.q, steps.q)
    assert_bitwise(fused.x, steps.x)


@DEVICES
def test_no_tokens_and_no_pages(device):
    table = table_of(BF16, device)
    new = Tokens(6, 512, BF16, device)
    none = new.slots[:0]
    cache = torch.zeros(2, 8, 1, 584, dtype=U8, device=device)
    append_quantized_mla_kv_cache(new.x, None, cache, none, "v4", None, new.positions, table, True, new.q, True)
    assert not cache.any()
    slots, before = torch.full((6,), -1, device=device), new.q.clone()
    append_quantized_mla_kv_cache(new.x, None, cache[:0], slots, "v4", None, new.positions, table, True, new.q)
    steps = Tokens(6, 512, BF16, device)
    steps.slots = slots
    steps.rotate(table, True)
    assert_bitwise(new.q, steps.q)
    assert not torch.equal(new.q, before)


@pytest.mark.gpu
@every(name=ROTATED, tokens=[1, 5, 300, 4100, 9001, 16390], heads=[0, 1, 7, 128])
def test_many_tokens_and_heads(name, tokens, heads):
    heads = min(heads, (1 << 18) // tokens)  # 100 MB of queries
    made = [Tokens(tokens + 2, LAYOUTS[name].columns, BF16, "cuda", heads, 20000) for _ in range(2)]
    caches = torch.zeros(2, 20000 // 8, 8, 1, LAYOUTS[name].size, dtype=U8, device="cuda")
    fused, steps = made
    table = table_of(torch.float32, "cuda")
    rope = (fused.positions, table, False, fused.q if heads else None, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        append_quantized_mla_kv_cache(fused.x, None, caches[0], fused.slots, name, None, *rope)
    steps.rotate(table, False)
    append_quantized_mla_kv_cache(steps.x, None, caches[1], steps.slots, name)
    assert_bitwise(caches[0], caches[1])
    assert_bitwise(fused.q, steps.q)
    assert_bitwise(fused.x, steps.x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROTATED)
def test_positions_that_the_table_does_not_have(name):
    new, table = Tokens(12, LAYOUTS[name].columns, BF16, "cuda"), table_of(BF16, "cuda")
    new.positions[[0, 3]] = torch.tensor([-1, POSITIONS], device="cuda")
    cache = torch.full((3, 8, 1, LAYOUTS[name].size), 7, dtype=U8, device="cuda")
    x, q = new.x.clone(), new.q.clone()
    append_quantized_mla_kv_cache(
        new.x, None, cache, new.slots, name, None, new.positions, table, True, new.q, update_key=True
    )
    for kept, before in ((new.x, x), (new.q, q)):
        assert_bitwise(kept[[0, 3]], before[[0, 3]])
        assert not torch.equal(kept[2], before[2])
    if LAYOUTS[name].by_page:
        return
    for i in (0, 3):
        assert bool((cache.flatten(0, 1)[new.slots[i]] == 7).all())
    assert not bool((cache.flatten(0, 1)[new.slots[2]] == 7).all())


@pytest.mark.gpu
def test_it_is_captured():
    new, table = Tokens(12, 576, BF16, "cuda"), table_of(torch.float32, "cuda")
    cache = torch.zeros(3, 8, 1, 656, dtype=U8, device="cuda")
    rope = (new.positions, table, False, None)
    append_quantized_mla_kv_cache(new.x, None, cache, new.slots, "v3.2", None, *rope)
    want = cache.clone()
    graph, _ = capture(lambda: append_quantized_mla_kv_cache(new.x, None, cache, new.slots, "v3.2", None, *rope))
    cache.zero_()
    graph.replay()
    assert_bitwise(cache, want)


@pytest.mark.gpu
def test_what_the_kernel_cannot_read_is_written_all_the_same():
    made, table = [Tokens(12, 576, BF16, "cuda") for _ in range(2)], table_of(torch.float32, "cuda")
    caches = torch.zeros(2, 3, 8, 1, 656, dtype=U8, device="cuda")
    q = torch.zeros(12, 3, 65, dtype=BF16, device="cuda")[..., 1:].copy_(made[0].q)
    rope = (made[0].positions, table, False)
    with pytest.warns(ck.PerformanceWarning, match="written with PyTorch"):
        append_quantized_mla_kv_cache(made[0].x, None, caches[0], made[0].slots, "v3.2", None, *rope, q)
    append_quantized_mla_kv_cache(made[1].x, None, caches[1], made[1].slots, "v3.2", None, *rope, made[1].q)
    rotated = caches.flatten(1, 2)[:, made[0].slots.clamp_min(0), 0, 528:].view(BF16)
    torch.testing.assert_close(rotated[0], rotated[1], atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(q, made[1].q, atol=1e-2, rtol=1e-2)


@every(name=["v3.2", "v4.1_pages"], with_q=[True, False], update_key=[True, False])
def test_compiled(name, with_q, update_key):
    made, table = [Tokens(12, LAYOUTS[name].columns, BF16, "cpu") for _ in range(2)], table_of(BF16)
    caches = torch.zeros(2, 3, 8, 1, LAYOUTS[name].size, dtype=U8)
    torch._dynamo.reset()  # a function is compiled a limited number of times
    compiled = torch.compile(append_quantized_mla_kv_cache, backend="aot_eager", fullgraph=True)
    for run, new, cache in zip((append_quantized_mla_kv_cache, compiled), made, caches):
        q = new.q if with_q else None
        run(*new.parts(True), cache, new.slots, name, None, new.positions, table, False, q, update_key)
    assert_bitwise(caches[1], caches[0])
    assert_bitwise(made[1].q, made[0].q)
    assert_bitwise(made[1].x, made[0].x)


def test_queries_with_gradients_warn():
    new, cache = Tokens(4, 576, BF16, "cpu"), torch.zeros(3, 8, 1, 656, dtype=U8)
    q = new.q.requires_grad_() * 1
    with pytest.warns(UserWarning, match=r"append_quantized_mla_kv_cache\(\) got keys"):
        append_quantized_mla_kv_cache(
            new.x, None, cache, new.slots, "v3.2", None, new.positions, table_of(BF16), True, q
        )
    assert not torch.equal(q[0], new.q[0])


def ones(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


LATENT = dict(ckv=ones(2, 512), kpe=None)
REFUSED = [
    (dict(positions=None), ValueError, "q_pe is given, but positions is None"),
    (dict(positions=None, q_pe=None), ValueError, "cos_sin_cache is given, but positions is None"),
    (
        dict(positions=None, q_pe=None, cos_sin_cache=None, update_key=True),
        ValueError,
        "update_key is given, but positions is None",
    ),
    *rows(TypeError, "{name} is NoneType", cos_sin_cache=None),
    *rows(
        ValueError, "{name} lie between 1 and 50, but cos_sin_cache has rows 0 to 49", positions=torch.tensor([1, 50])
    ),
    *rows(ValueError, "{name} has shape .* one for each of the 2 slots", positions=torch.tensor([1])),
    *rows(ValueError, "{name} has shape .* int64 or int32", positions=torch.ones(2)),
    *rows(ValueError, "{name} has shape .* 1 dimensions|{name} has 2", positions=torch.ones(2, 1, dtype=torch.int32)),
    *rows(ValueError, r"{name} has shape .* \[positions, 64\]", cos_sin_cache=ones(50, 32)),
    *rows(ValueError, "{name} has shape .* float32 or torch.bfloat16", cos_sin_cache=ones(50, 64, dtype=HALF)),
    *rows(ValueError, r"{name} has shape .* \[tokens, heads, 64\]", q_pe=ones(2, 3, 32)),
    *rows(ValueError, "{name} has shape .* a token for each of the 2 slots", q_pe=ones(1, 3, 64)),
    *rows(ValueError, "{name} has shape .* of torch.bfloat16", q_pe=ones(2, 3, 64, dtype=HALF)),
    *rows(ValueError, "{name} is on meta", q_pe=ones(2, 3, 64).to("meta"), cos_sin_cache=ones(50, 64).to("meta")),
    *rows(TypeError, "{name}='yes'", is_neox="yes", update_key="yes"),
    (LATENT, ValueError, "ckv has 512 columns, all of them latent, so there is nothing to rotate"),
    (
        LATENT | dict(kv_format="v3.2_nope", kv_cache=torch.zeros(2, 16, 1, 528, dtype=U8)),
        ValueError,
        "nothing to rotate with kv_format='v3.2_nope'",
    ),
    (
        dict(
            ckv=ones(2, 480),
            kpe=ones(2, 32),
            kv_format="v4.1_pages",
            kv_cache=torch.zeros(2, 16, 1, 528, dtype=U8),
        ),
        ValueError,
        "kpe has 32 columns: the 64 that are rotated",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_refusals_come_before_writes(change, error, words):
    cache, q = torch.zeros(2, 16, 1, 656, dtype=U8), ones(2, 3, 64)
    given: dict[str, Any] = dict(ckv=ones(2, 512), kpe=ones(2, 64), kv_cache=cache, slot_mapping=torch.tensor([3, 5]))
    given |= dict(positions=torch.tensor([1, 2]), cos_sin_cache=table_of(BF16), q_pe=q)
    with pytest.raises(error, match=words):
        append_quantized_mla_kv_cache(**given | change)
    assert not cache.any() and bool((q == 1).all())


OF_VLLM = [
    *rows(ValueError, "{name}='fp4' is unknown", kv_cache_dtype="fp4"),
    *rows(TypeError, "{name} is NoneType", positions=None, q_pe=None, slot_mapping=None, k_pe=None, kv_cache=None),
    *rows(ValueError, r"kv_cache has shape .* \[pages, page_size, 656\]", kv_cache=torch.zeros(2, 16, 576, dtype=U8)),
    *rows(ValueError, "{name} has shape .* one for each of the 2 slots", positions=torch.tensor([1])),
    *rows(TypeError, "{name}='yes'", is_neox="yes"),
    (dict(kv_cache_dtype="auto"), ValueError, "kv_c has 512 columns and k_pe 64, but kv_cache"),
]


@pytest.mark.parametrize(("change", "error", "words"), OF_VLLM)
def test_vllms_function_refuses(change, error, words):
    cache = torch.zeros(2, 16, 656, dtype=U8)
    given: dict[str, Any] = dict(positions=torch.tensor([1, 2]), q_pe=ones(2, 3, 64), k_pe=ones(2, 64))
    given |= dict(kv_c=ones(2, 512), cos_sin_cache=table_of(BF16), is_neox=False, slot_mapping=torch.tensor([3, 5]))
    with pytest.raises(error, match=words):
        concat_and_cache_mla_rope_fused(**given | dict(kv_cache=cache, kv_cache_dtype="fp8_ds_mla") | change)
    assert not cache.any()
