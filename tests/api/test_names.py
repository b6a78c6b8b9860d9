"""Functions that hand their arguments on: what they refuse, they call by their own names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from registry.multi_gpu import group_of_one
from small_calls import Calls, ints
from targets import Target

import cutlass_kernels as ck
from cutlass_kernels import distributed, flash_attn

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")


@pytest.fixture
def calls(target: Target) -> Calls:
    return Calls(target)


def refuse(words: str, function: Any, *args: Any, **options: Any) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        function(*args, **options)
    assert words in str(caught.value), caught.value


FLASH = {
    "softmax_scale": ("big", "softmax_scale="),
    "softcap": ("high", "softcap="),
    "attention_chunk": (-2, "attention_chunk=-2"),
}


@pytest.mark.parametrize("name", FLASH)
def test_of_flash_attention(calls, name):
    """flash_attn_with_kvcache: test_flash_cache.py."""
    value, words = FLASH[name]
    refuse(words, flash_attn.flash_attn_func, *[x[None] for x in calls.qkv], **{name: value})
    offsets = [x.to(calls.q.device) for x in (ints(0, 5), ints(0, 20))]
    refuse(words, flash_attn.flash_attn_varlen_func, *calls.qkv, *offsets, 5, 20, **{name: value})
    refuse("s_aux has shape", flash_attn.flash_attn_varlen_func, *calls.qkv, *offsets, 5, 20, s_aux=torch.zeros(7))


def test_packed_queries_of_other_sizes():
    refuse("it must be [B, n, 3, H, D]", flash_attn.flash_attn_qkvpacked_func, torch.zeros(1, 9, 4, 2, 64).half())


def test_outputs_of_combined_results():
    partial, lse = torch.randn(3, 2, 5, 8, 64), torch.randn(3, 2, 5, 8)
    refuse("out has shape", flash_attn.flash_attn_combine, partial, lse, torch.zeros(2, 5, 8, 32))
    refuse("'int32x' is not a data type", flash_attn.flash_attn_combine, partial, lse, out_dtype="int32x")
    want = flash_attn.flash_attn_combine(partial, lse, out_dtype=torch.float16)[0]
    assert torch.equal(flash_attn.flash_attn_combine(partial, lse, out_dtype="float16")[0], want)


def test_flags_are_flags(calls):
    refuse("save_softmax_stats=2", calls.fused, save_softmax_stats=2)
    turns = torch.zeros(9, 64)
    given = dict(positions=torch.zeros(5, dtype=torch.int64), head_size=64, cos_sin_cache=turns)
    rows = dict(query=torch.zeros(5, 4 * 64), key=torch.zeros(5, 2 * 64))
    refuse("is_neox=2", ck.apply_rope_with_cos_sin_cache_inplace, **rows, **given, is_neox=2)
    q, state = torch.zeros(1, 1, 4, 64).half(), (torch.zeros(5, 4, 64), torch.zeros(5, 4))
    caches = [torch.zeros(1, 8, 2, 64).half() for _ in "kv"]
    with group_of_one() as group:
        refuse("return_lse=2", distributed.dcp_decode, q, *caches, group, seqused_k=ints(3), return_lse=2)
        refuse("return_lse=2", distributed.dcp_combine, *state, group, return_lse=2)
        refuse("return_lse=2", distributed.cp_prefill, *calls.qkv[:1] * 3, group, return_lse=2)
        refuse("dim=0.5", distributed.cp_split, state[0], group, dim=0.5)


def test_heads_before_rows():
    q, kv = torch.zeros(24, 5, 64).half(), torch.zeros(8, 16, 64).half()
    refuse("q is [rows, num_qo_heads, head_dim]: where heads come first", ck.attention, q, kv, kv)
