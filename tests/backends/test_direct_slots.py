"""Direct calls that write to slots of a cache, and rotate: what their kernels are given, and what is left to Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from direct_calls import Direct, Parameter, faults
from recorded_calls import BF16, CUDA, E4M3, HALF, Gpu, rows_of, view

import cutlass_kernels as ck
from cutlass_kernels._core import native

STREAM = 64


def slot_arguments(dtype: torch.dtype = HALF, **changes: Any) -> dict[str, Any]:
    """Where 5 tokens of 2 heads go: rows lie apart, and pages too."""
    arguments = dict(
        value=rows_of(5, 2, 48, dtype=dtype, every=3),
        key_cache=rows_of(7, 16, 2, 64, dtype=dtype, wide=8),
        value_cache=rows_of(7, 16, 2, 48, dtype=dtype),
        slot_mapping=torch.zeros(5, dtype=torch.int64),
        k_scale=None,
        v_scale=None,
        kv_layout="NHD",
    )
    assert not changes.keys() - arguments.keys()
    return arguments | changes


def append_arguments(dtype: torch.dtype = HALF, **changes: Any) -> dict[str, Any]:
    key = changes.pop("key", rows_of(5, 2, 64, dtype=dtype, every=2))
    return dict(key=key) | slot_arguments(dtype, **changes)


def rope_arguments(dtype: torch.dtype = HALF, **changes: Any) -> dict[str, Any]:
    arguments = dict(
        positions=torch.zeros(5, dtype=torch.int64),
        query=rows_of(5, 4, 64, dtype=dtype, every=2),
        key=rows_of(5, 2, 64, dtype=dtype, wide=8),
        head_size=64,
        cos_sin_cache=torch.zeros(9, 40)[:, :32],
        is_neox=True,
    )
    assert not changes.keys() - arguments.keys()
    return arguments | changes


def fused_arguments(dtype: torch.dtype = HALF, **changes: Any) -> dict[str, Any]:
    rope = rope_arguments(dtype)
    names = "query", "key", "positions", "cos_sin_cache", "is_neox"
    arguments = {name: rope[name] for name in names} | dict(update_key=False) | slot_arguments(dtype)
    assert not changes.keys() - arguments.keys()
    return arguments | changes


MAKERS = {"append_by_slot": append_arguments, "rope": rope_arguments, "rope_append_by_slot": fused_arguments}
APPENDING = ["append_by_slot", "rope_append_by_slot"]
ROTATING = ["rope", "rope_append_by_slot"]


def direct(gpu: Gpu, name: str, *dtype: torch.dtype, **changes: Any) -> Direct:
    return Direct(gpu, getattr(gpu.module, name), MAKERS[name](*dtype, **changes))


def launched(call: Direct) -> dict[str, Any]:
    assert call() is True
    (found,) = call.gpu.module.take_writes()
    assert found["stream"] == STREAM
    return found


def expect_appended(found: dict[str, Any], given: dict[str, Any]) -> None:
    k_cache, v_cache = given["key_cache"], given["value_cache"]
    for name, want in (
        ("slots", (given["slot_mapping"].data_ptr(), given["slot_mapping"].dtype == torch.int64, 16, 7)),
        ("v", view(given["value"])),
        ("k_cache", (k_cache.data_ptr(), *k_cache.stride()[1:3])),
        ("v_cache", (v_cache.data_ptr(), *v_cache.stride()[1:3])),
        ("strides_page", (k_cache.stride(0), v_cache.stride(0))),
    ):
        assert found[name] == want, name


# --- what is launched ---


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("ints", [torch.int32, torch.int64])
def test_appending_as_it_is_launched(gpu: Gpu, dtype: torch.dtype, ints: torch.dtype) -> None:
    call = direct(gpu, "append_by_slot", dtype, slot_mapping=torch.zeros(5, dtype=ints))
    found, given = launched(call), call.given
    expect_appended(found, given)
    name = str(dtype).split(".")[1]
    assert found["append"] == (name, name, 2, 64, 48, 5)
    assert found["new_k"] == view(given["key"])
    assert found["scales"] == ((1.0, 0, 0), (1.0, 0, 0))


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotating_as_it_is_launched(gpu: Gpu, dtype: torch.dtype, is_neox: bool) -> None:
    call = direct(gpu, "rope", dtype, is_neox=is_neox)
    found, given = launched(call), call.given
    table = given["cos_sin_cache"]
    assert found["rope"] == (str(dtype).split(".")[1], 4, 2, 64, 32, not is_neox, 5)
    assert found["positions"] == (given["positions"].data_ptr(), True)
    assert found["cos_sin"] == (table.data_ptr(), "float32", 40, 9)
    assert found["q"] == found["q_out"] == view(given["query"])
    assert found["k"] == found["k_out"] == view(given["key"])
    assert found["slots"][0] == 0


@pytest.mark.parametrize("update_key", [True, False])
def test_both_as_they_are_launched(gpu: Gpu, update_key: bool) -> None:
    call = direct(gpu, "rope_append_by_slot", BF16, update_key=update_key)
    found, given = launched(call), call.given
    expect_appended(found, given)
    assert found["rope"] == ("bfloat16", 4, 2, 64, 32, False, 5)
    assert found["k"] == view(given["key"])
    assert found["k_out"] == (view(given["key"]) if update_key else (0, 0, 0))


def test_heads_side_by_side(gpu: Gpu) -> None:
    """[tokens, heads * head_size]: slices of a projection."""
    packed = torch.zeros(5, 8 * 64, dtype=HALF)
    query, key = packed[:, : 4 * 64], packed[:, 4 * 64 : 6 * 64]
    call = direct(gpu, "rope", query=query, key=key)
    found = launched(call)
    assert found["rope"][1:4] == (4, 2, 64)
    assert found["q"] == (query.data_ptr(), 512, 64) and found["k_out"] == (key.data_ptr(), 512, 64)
    for size in (60, 0):
        assert not call.accepts(head_size=size)


@pytest.mark.parametrize("name", APPENDING)
def test_caches_of_heads_before_tokens(gpu: Gpu, name: str) -> None:
    k_cache, v_cache = (rows_of(7, 2, 16, dim) for dim in (64, 48))
    call = direct(gpu, name, key_cache=k_cache, value_cache=v_cache, kv_layout="HND")
    found = launched(call)
    assert found["slots"][2:] == (16, 7)
    assert found["k_cache"] == (k_cache.data_ptr(), k_cache.stride(2), k_cache.stride(1))
    for layout in ("NHD", "nhd", None, "HND "):
        assert not call.accepts(kv_layout=layout)


@pytest.mark.parametrize("name", APPENDING)
def test_scales(gpu: Gpu, name: str) -> None:
    caches = {f"{x}_cache": torch.zeros(7, 16, 2, dim).to(E4M3) for x, dim in (("key", 64), ("value", 48))}
    factors = torch.ones(3, 4)
    found = launched(direct(gpu, name, **caches, k_scale=0.5, v_scale=factors[0, ::2]))
    assert found["append"][1] == "float8_e4m3fn"
    assert found["scales"] == ((0.5, 0, 0), (1.0, factors.data_ptr(), 2))
    found = launched(direct(gpu, name, **caches, k_scale=factors[0, :1], v_scale=factors[0, 0]))
    assert found["scales"] == ((1.0, factors.data_ptr(), 0),) * 2
    for scale in (0.0, 1e-50, 1e50, float("nan"), "1", True, factors[0, :3], factors[:1, :2], factors[0, :2].half()):
        for which in ("k_scale", "v_scale"):
            assert not direct(gpu, name).accepts(**caches, **{which: scale})


def test_slots_for_the_first_tokens(gpu: Gpu) -> None:
    three = torch.zeros(3, dtype=torch.int64)
    call = direct(gpu, "append_by_slot", slot_mapping=three)
    assert launched(call)["append"][-1] == 3
    for many in (0, 6):
        assert not call.accepts(slot_mapping=torch.zeros(many, dtype=torch.int64))


PUBLIC = {
    "append_by_slot": ck.append_paged_kv_cache_by_slot,
    "rope": ck.apply_rope_with_cos_sin_cache_inplace,
    "rope_append_by_slot": ck.rope_append_paged_kv_cache_by_slot,
}
WRITTEN = {
    "append_by_slot": {"key_cache", "value_cache"},
    "rope": {"query", "key"},
    "rope_append_by_slot": {"query", "key", "key_cache", "value_cache"},
}


@pytest.mark.parametrize("name", MAKERS)
def test_public_functions_make_direct_calls(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, name, getattr(gpu.module, name))
    call = direct(gpu, name, **{"update_key": True, "k_scale": 0.5} if name == "rope_append_by_slot" else {})
    given = call.given
    tensors = {k: x for k, x in given.items() if isinstance(x, torch.Tensor)}
    before = {k: x._version for k, x in tensors.items()}
    PUBLIC[name](**given)
    assert gpu.module.take_writes() == [launched(call)]
    assert {k for k, x in tensors.items() if x._version > before[k]} == WRITTEN[name]


# --- what is left to Python ---

TABLE = {"torch.float16", "longer 0", "shorter 0", "none 0", "longer 1", "none 1"}
HEADS = {"longer 1", "shorter 1", "none 1"}
ACCEPTED = {  # beside any strides and addresses
    "append_by_slot": {"key": {"longer 0"}, "value": {"longer 0"}, "slot_mapping": {"torch.int32", "shorter 0"}},
    "rope": {"query": HEADS, "key": HEADS, "cos_sin_cache": TABLE, "positions": {"torch.int32"}},
    "rope_append_by_slot": {
        "query": HEADS,
        "cos_sin_cache": TABLE,
        "positions": {"torch.int32"},
        "slot_mapping": {"torch.int32"},
    },
}


@pytest.mark.parametrize("name", MAKERS)
def test_arguments_that_are_left_to_python(gpu: Gpu, name: str) -> None:
    call = direct(gpu, name)
    for argument, x, replaced in call.tensors():
        accepted = ACCEPTED[name].get(argument, set()) | {"address"}
        for fault, facts in faults(x):
            gpu.tell(x, **facts)
            is_stride = "strides" in facts and "shape" not in facts and not fault.endswith(str(x.dim() - 1))
            assert call.accepts() == (is_stride or fault in accepted), (argument, fault)
            gpu.tell(x)
        for other in (None, 1.0, Parameter(x, requires_grad=False)):
            assert not call.accepts(**replaced(other)), argument
    for argument, value in call.given.items():
        assert not isinstance(value, bool) or not call.accepts(**{argument: 1})
    if name == "append_by_slot":
        for argument in ("key", "value"):  # fewer than there are slots
            assert not call.accepts(**{argument: call.given[argument][:4]})


@pytest.mark.parametrize("name", ROTATING)
def test_the_dtype_of_the_table(gpu: Gpu, name: str) -> None:
    call = direct(gpu, name, cos_sin_cache=torch.zeros(9, 32, dtype=HALF))
    assert launched(call)["cos_sin"][1] == "float16"
    assert not call.accepts(cos_sin_cache=torch.zeros(9, 31))


@pytest.mark.parametrize("name", MAKERS)
def test_what_this_build_refuses(gpu: Gpu, name: str) -> None:
    call = direct(gpu, name)
    for _, x, _ in call.tensors():
        gpu.tell(x, device=(CUDA, 64))  # facts of a device with such a number are not remembered
    assert call.accepts()
    gpu.module.set_compute_capability(75)
    try:
        assert not call.accepts()
    finally:
        gpu.module.set_compute_capability(90)
    with pytest.raises(TypeError, match="Wrong number"):
        call.function(1, 2)
