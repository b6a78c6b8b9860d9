"""What FlashAttention's functions refuse; flash_attn_with_kvcache() before it writes new keys to the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cutlass_kernels.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

HEADS, DIM, ROOM, PAGE = 2, 64, 16, 4


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def given(paged: bool = False, requests: int = 2, new: int = 2) -> dict[str, Any]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, requests, new, HEADS, DIM).half()
    pages = requests * ROOM // PAGE
    size = (pages, PAGE) if paged else (requests, ROOM)
    k_cache, v_cache = torch.randn(2, *size, HEADS, DIM).half()
    more = {"page_table": torch.randperm(pages).int().view(requests, -1)} if paged else {}
    return dict(q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v, cache_seqlens=ints(*[5] * requests), **more)


def refused(words: str, kinds: Any = (ValueError, TypeError, RuntimeError), *, paged: bool = False, **options: Any):
    call = given(paged) | options
    before = call["k_cache"].clone(), call["v_cache"].clone()
    with pytest.raises(kinds, match=words):
        flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before[0]) and torch.equal(call["v_cache"], before[1])


LARGE = torch.tensor([2**32, 1])
DOES_NOT_FIT = "holds 4294967296, which does not fit into int32"
LATE: list[tuple[dict[str, Any], str]] = [
    (dict(out=torch.zeros(1)), "out has shape"),
    (dict(return_softmax_lse=2), "return_softmax_lse=2"),
    (dict(causal="yes"), "causal="),
    (dict(softcap="high"), "softcap="),
    (dict(softmax_scale="big"), "softmax_scale="),
    (dict(s_aux=torch.zeros(7)), "s_aux has shape"),
    (dict(q_descale=torch.zeros(5)), "q_descale has shape"),
    (dict(num_splits=-2), "num_splits=-2"),
    (dict(attention_chunk=-2), "attention_chunk=-2 must not be negative"),
    (dict(alibi_slopes=torch.zeros(9)), "alibi_slopes is"),
    (dict(cache_leftpad=ints(9, 0)), "request 0 has 7 keys behind cache_leftpad=9"),
    (dict(k=None, v=None, cache_leftpad=ints(1, 0), cache_seqlens=ints(17, 5)), "in a cache with room for 16"),
    (dict(v=None), "v is missing"),
    (dict(rotary_sin=torch.zeros(9, 16).half()), "rotary_cos is missing: pass both"),
    (
        dict.fromkeys(("rotary_cos", "rotary_sin"), torch.zeros(3, 16).half()),
        "position 5, but rotary_cos and rotary_sin have 3 rows",
    ),
    (
        dict(cu_seqlens_k_new=ints(0, 3, 2), k=torch.zeros(2, HEADS, DIM).half(), v=torch.zeros(2, HEADS, DIM).half()),
        "cu_seqlens_k_new decreases from 3 to 2",
    ),
    (dict(cache_batch_idx=ints(0, 2)), r"cache_batch_idx\[1\]=2, but there are only 2 entries"),
    *[({x: LARGE}, f"{x} {DOES_NOT_FIT}") for x in ("cache_seqlens", "cache_batch_idx", "cache_leftpad")],
    (dict(cache_seqlens=ints(15, 5)), "a new key has position 16 in a cache with room"),
    (dict(cache_seqlens=ints(-3, 5)), "a new key has position -3 in a cache with room"),
]


@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("change,words", LATE)
def test_what_is_refused_leaves_the_cache(change, words, paged):
    refused(words, paged=paged, **change)


OF_ALL = [
    row for row in LATE if row[0].keys() <= {"causal", "softcap", "softmax_scale", "num_splits", "attention_chunk"}
]


@pytest.mark.parametrize("change,words", [*OF_ALL, (dict(s_aux=torch.zeros(7)), "s_aux has shape")])
def test_all_functions_call_arguments_by_their_names(change, words):
    x, offsets = torch.zeros(2, 5, HEADS, DIM).half(), ints(0, 5, 10)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        flash_attn_varlen_func(*[x.flatten(0, 1)] * 3, offsets, offsets, 5, 5, **change)
    if "s_aux" not in change:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
            flash_attn_func(x, x, x, **change)


@pytest.mark.parametrize("leftpad", [None, ints(1, 0)], ids=["no padding", "padding"])
@pytest.mark.parametrize("table", [torch.ones(2, 4).bool(), torch.ones(2, 4, dtype=torch.complex64)], ids=str)
def test_page_tables_are_of_integers(table, leftpad):
    refused("page_table has shape .* it must be an int32 tensor", paged=True, page_table=table, cache_leftpad=leftpad)


@pytest.mark.parametrize("leftpad", [None, ints(1, 0)], ids=["no padding", "padding"])
def test_page_numbers_do_not_wrap(leftpad):
    call = given(paged=True) | dict(cache_leftpad=leftpad, k=None, v=None)
    call["page_table"] = call["page_table"].long() + 2**32
    with pytest.raises(ValueError, match="page number"):
        flash_attn_with_kvcache(**call)


def test_copies_of_the_cache_hold_the_new_keys():
    """Behind padding, the keys of a cache that is not contiguous are copied: after the new ones have been appended."""
    call = given() | dict(cache_leftpad=ints(2, 1), causal=True)
    want = flash_attn_with_kvcache(**call)
    again = given() | dict(cache_leftpad=ints(2, 1), causal=True)
    for name in ("k_cache", "v_cache"):
        again[name] = again[name].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(flash_attn_with_kvcache(**again), want)


def test_new_keys_that_require_gradients():
    call = given()
    call["k"].requires_grad_()
    out = flash_attn_with_kvcache(**call)
    with pytest.raises(RuntimeError, match="has no backward"):
        out.sum().backward()
    assert not call["k_cache"].requires_grad


def test_positions_of_rotated_queries():
    """A window counts rows, as a causal mask does; ``rotary_seqlens`` stands for ``cache_seqlens``."""
    angles = torch.rand(16, 16) * 6.3
    turns = dict(rotary_cos=angles.cos().half(), rotary_sin=angles.sin().half())
    want = flash_attn_with_kvcache(**given(), **turns, causal=True)
    assert torch.equal(flash_attn_with_kvcache(**given(), **turns, window_size=(99, 0)), want)
    later = {name: x[3:] for name, x in turns.items()}
    moved = flash_attn_with_kvcache(**given(), **turns, causal=True, rotary_seqlens=ints(8, 8))
    assert torch.equal(flash_attn_with_kvcache(**given(), **later, causal=True), moved) and not torch.equal(moved, want)


def test_values_of_queries_count_for_new_keys():
    """With ``qv``, keys and values are copied side by side: after the new ones have been appended."""
    call = given()
    call["qv"] = torch.randn(*call["q"].shape[:-1], DIM).half()
    out = flash_attn_with_kvcache(**call, causal=True)
    whole = {name: x for name, x in call.items() if name not in "kv"} | dict(cache_seqlens=ints(7, 7))
    assert torch.equal(flash_attn_with_kvcache(**whole, causal=True), out)
