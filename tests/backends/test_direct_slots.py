"""Direct calls that write to slots of a cache, and rotate: what their kernels are given, and what is left to Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_calls import BF16, CPU, CUDA, E4M3, HALF, Gpu, rows_of, view

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


CALLS = {"append_by_slot": append_arguments, "rope": rope_arguments, "rope_append_by_slot": fused_arguments}
APPENDING = ["append_by_slot", "rope_append_by_slot"]
ROTATING = ["rope", "rope_append_by_slot"]


def accepts(gpu: Gpu, name: str, **changes: Any) -> bool:
    return launches(gpu, name, CALLS[name](**changes))


def launches(gpu: Gpu, name: str, arguments: dict[str, Any]) -> bool:
    """Whether a direct call launches. If not, it returns None."""
    result = getattr(gpu.module, name)(*arguments.values())
    launched = gpu.written() is not None
    assert result is (True if launched else None)
    return launched


def call(gpu: Gpu, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    assert getattr(gpu.module, name)(*arguments.values()) is True
    found = gpu.written()
    assert found is not None and found["stream"] == STREAM
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
    given = append_arguments(dtype, slot_mapping=torch.zeros(5, dtype=ints))
    found = call(gpu, "append_by_slot", given)
    expect_appended(found, given)
    name = str(dtype).split(".")[1]
    assert found["append"] == (name, name, 2, 64, 48, 5)
    assert found["new_k"] == view(given["key"])
    assert found["scales"] == ((1.0, 0, 0), (1.0, 0, 0))


@pytest.mark.parametrize("dtype", [HALF, BF16])
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotating_as_it_is_launched(gpu: Gpu, dtype: torch.dtype, is_neox: bool) -> None:
    given = rope_arguments(dtype, is_neox=is_neox)
    found = call(gpu, "rope", given)
    table = given["cos_sin_cache"]
    assert found["rope"] == (str(dtype).split(".")[1], 4, 2, 64, 32, not is_neox, 5)
    assert found["positions"] == (given["positions"].data_ptr(), True)
    assert found["cos_sin"] == (table.data_ptr(), "float32", 40, 9)
    assert found["q"] == found["q_out"] == view(given["query"])
    assert found["k"] == found["k_out"] == view(given["key"])
    assert found["slots"][0] == 0


@pytest.mark.parametrize("update_key", [True, False])
def test_both_as_they_are_launched(gpu: Gpu, update_key: bool) -> None:
    given = fused_arguments(BF16, update_key=update_key)
    found = call(gpu, "rope_append_by_slot", given)
    expect_appended(found, given)
    assert found["rope"] == ("bfloat16", 4, 2, 64, 32, False, 5)
    assert found["k"] == view(given["key"])
    assert found["k_out"] == (view(given["key"]) if update_key else (0, 0, 0))


def test_heads_side_by_side(gpu: Gpu) -> None:
    """[tokens, heads * head_size]: slices of a projection."""
    packed = torch.zeros(5, 8 * 64, dtype=HALF)
    query, key = packed[:, : 4 * 64], packed[:, 4 * 64 : 6 * 64]
    found = call(gpu, "rope", rope_arguments(query=query, key=key))
    assert found["rope"][1:4] == (4, 2, 64)
    assert found["q"] == (query.data_ptr(), 512, 64) and found["k_out"] == (key.data_ptr(), 512, 64)
    assert not accepts(gpu, "rope", query=query, key=key, head_size=60)
    assert not accepts(gpu, "rope", query=query, key=key, head_size=0)


@pytest.mark.parametrize("name", APPENDING)
def test_caches_of_heads_before_tokens(gpu: Gpu, name: str) -> None:
    k_cache, v_cache = (rows_of(7, 2, 16, dim) for dim in (64, 48))
    found = call(gpu, name, CALLS[name](key_cache=k_cache, value_cache=v_cache, kv_layout="HND"))
    assert found["slots"][2:] == (16, 7)
    assert found["k_cache"] == (k_cache.data_ptr(), k_cache.stride(2), k_cache.stride(1))
    assert not accepts(gpu, name, key_cache=k_cache, value_cache=v_cache)


@pytest.mark.parametrize("name", APPENDING)
def test_scales(gpu: Gpu, name: str) -> None:
    caches = {f"{x}_cache": torch.zeros(7, 16, 2, dim).to(E4M3) for x, dim in (("key", 64), ("value", 48))}
    factors = torch.ones(3, 4)
    found = call(gpu, name, CALLS[name](**caches, k_scale=0.5, v_scale=factors[0, ::2]))
    assert found["append"][1] == "float8_e4m3fn"
    assert found["scales"] == ((0.5, 0, 0), (1.0, factors.data_ptr(), 2))
    found = call(gpu, name, CALLS[name](**caches, k_scale=factors[0, :1], v_scale=factors[0, 0]))
    assert found["scales"] == ((1.0, factors.data_ptr(), 0),) * 2
    for scale in (0.0, 1e-50, 1e50, float("nan"), "1", True, factors[0, :3], factors[:1, :2], factors[0, :2].half()):
        assert not accepts(gpu, name, **caches, k_scale=scale)
        assert not accepts(gpu, name, **caches, v_scale=scale)


def test_slots_for_the_first_tokens(gpu: Gpu) -> None:
    three = torch.zeros(3, dtype=torch.int64)
    assert call(gpu, "append_by_slot", append_arguments(slot_mapping=three))["append"][-1] == 3
    assert not accepts(gpu, "rope_append_by_slot", slot_mapping=three)
    for many in (0, 6):
        assert not accepts(gpu, "append_by_slot", slot_mapping=torch.zeros(many, dtype=torch.int64))


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


@pytest.mark.parametrize("name", CALLS)
def test_public_functions_make_direct_calls(gpu: Gpu, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, name, getattr(gpu.module, name))
    given = CALLS[name]() | ({"update_key": True, "k_scale": 0.5} if name == "rope_append_by_slot" else {})
    tensors = {k: x for k, x in given.items() if isinstance(x, torch.Tensor)}
    before = {k: x._version for k, x in tensors.items()}
    PUBLIC[name](**given)
    got = gpu.written()
    assert getattr(gpu.module, name)(*given.values()) and got == gpu.written()
    assert {k for k, x in tensors.items() if x._version > before[k]} == WRITTEN[name]


# --- what is left to Python ---


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_are_no_tensors(gpu: Gpu, name: str) -> None:
    class Parameter(torch.nn.Parameter):
        """A subclass, which may stand for another tensor."""

    for argument, value in CALLS[name]().items():
        if isinstance(value, torch.Tensor):
            assert not accepts(gpu, name, **{argument: None})
            assert not accepts(gpu, name, **{argument: 1.0})
            assert not accepts(gpu, name, **{argument: Parameter(value, requires_grad=False)})
        elif isinstance(value, bool):
            assert not accepts(gpu, name, **{argument: 1})
    for layout in ("nhd", None, "NHD ") if name in APPENDING else ():
        assert not accepts(gpu, name, kv_layout=layout)


@pytest.mark.parametrize("name", CALLS)
def test_tensors_of_other_devices(gpu: Gpu, name: str) -> None:
    for argument, value in CALLS[name]().items():
        if isinstance(value, torch.Tensor):
            for device in ((CPU, 0), (CUDA, 1)):
                assert not accepts(gpu, name, **{argument: gpu.tell(value.clone(), device=device)})


# Dimensions of one argument that may become longer.
FREE = {
    "append_by_slot": [("key", 0), ("value", 0)],
    "rope": [("query", 1), ("key", 1), ("cos_sin_cache", 0)],
    "rope_append_by_slot": [("query", 1), ("cos_sin_cache", 0)],
}


@pytest.mark.parametrize("name", CALLS)
def test_shapes_and_dtypes_that_do_not_fit(gpu: Gpu, name: str) -> None:
    for argument, value in CALLS[name]().items():
        if not isinstance(value, torch.Tensor):
            continue
        changes: list[dict[str, Any]] = [dict(dtype=x) for x in (torch.float64, torch.int16, torch.uint8, E4M3)]
        changes += [
            dict(shape=(*value.shape, 1), strides=(*value.stride(), 1)),
            dict(shape=value.shape[:-1], strides=value.stride()[:-1]),
            dict(strides=(*value.stride()[:-1], 2)),
        ]
        for d in range(value.dim()):
            longer = tuple(x + 64 * (i == d) for i, x in enumerate(value.shape))
            fits = accepts(gpu, name, **{argument: gpu.tell(value.clone(), shape=longer)})
            assert fits == ((argument, d) in FREE[name]), (argument, d)
        for change in changes:
            assert not accepts(gpu, name, **{argument: gpu.tell(value.clone(), **change)}), (argument, change)
    if name == "append_by_slot":
        for argument in ("key", "value"):
            assert not accepts(gpu, name, **{argument: append_arguments()[argument][:4]})


@pytest.mark.parametrize("name", CALLS)
def test_strides_and_addresses_are_any(gpu: Gpu, name: str) -> None:
    for argument in ("query", "key", "value", "key_cache", "value_cache"):
        given = CALLS[name]()
        if argument not in given:
            continue
        x = given[argument]
        odd = gpu.tell(x.clone(), data=x.data_ptr() + 2, strides=(*(s + 1 for s in x.stride()[:-1]), 1))
        assert launches(gpu, name, given | {argument: odd}), argument


@pytest.mark.parametrize("name", ROTATING)
def test_the_dtype_of_the_table(gpu: Gpu, name: str) -> None:
    table = torch.zeros(9, 32, dtype=HALF)
    assert call(gpu, name, CALLS[name](cos_sin_cache=table))["cos_sin"][1] == "float16"


@pytest.mark.parametrize("name", CALLS)
def test_what_a_kernel_or_this_build_refuses(gpu: Gpu, name: str) -> None:
    if name in ROTATING:
        assert not accepts(gpu, name, cos_sin_cache=torch.zeros(9, 31))
    # Facts of a device with such a number are not remembered.
    device = CUDA, 64
    given = {k: gpu.tell(x, device=device) if isinstance(x, torch.Tensor) else x for k, x in CALLS[name]().items()}
    assert launches(gpu, name, given)
    gpu.module.set_compute_capability(75)
    try:
        assert not launches(gpu, name, given)
    finally:
        gpu.module.set_compute_capability(90)
    with pytest.raises(TypeError, match="Wrong number"):
        getattr(gpu.module, name)(1, 2)
