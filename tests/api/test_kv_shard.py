"""attention(kv_shard=...): requests whose keys are spread over ranks, block by block, under every mask of intervals."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from plan_free_problems import FORMS, Mask, Options, caller, check, expect, keys, part_of, random_batch, random_mask
from problems import make_batch

import cutlass_kernels as ck
from cutlass_kernels import distributed, flash_attn


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", [Mask(causal=True), Mask(), Mask(causal=True, window=(20, -1)), Mask(window=(9, 30))])
@pytest.mark.parametrize("shard", [(2, 0, 1), (2, 1, 1), (3, 1, 16), (4, 3, 7)], ids=str)
def test_every_form_of_keys(target, shard, mask, form):
    kv_lens = [96, 96, 96] if form == "dense" else [150, 33, 0]
    if form == "dense" and shard[2] != 1:
        kv_lens = [shard[0] * shard[2] * 4] * 3
    whole = make_batch([20, 3, 70], kv_lens, 8, 2, 128, device=target.device)
    check(whole, target, form, mask, shard=shard)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", [(8, 1), (4, 4), (32, 8)])
def test_new_tokens_of_decodes(target, heads, rows):
    """The states of all ranks make up attention over all keys."""
    lens = [700, rows, 1, 0, 33, 4100]
    whole = make_batch([rows] * len(lens), lens, *heads, 128, device=target.device)
    states = [check(whole, target, "table", Mask(causal=True), shard=(3, rank, 16), dense=True) for rank in range(3)]
    out, lse = ck.merge_states(*(torch.stack(x, 1) for x in zip(*states, strict=True)))
    want, want_lse, base = expect(whole, Mask(causal=True), Options())
    assert_close(out, want, base)
    assert_lse_close(lse, want_lse)


@pytest.mark.parametrize("seed", range(60))
def test_random_calls(target, seed):
    rng = random.Random(seed)
    dtype = rng.choice([torch.float16, torch.bfloat16])
    dim = rng.choice([64, 64, 128, 256, 80])
    whole, dense = random_batch(rng, target.device, dtype, head_dim=dim)
    mask = random_mask(rng, whole)
    while mask.bits is not None:
        mask = random_mask(rng, whole)
    options = Options(soft_cap=rng.choice([None, None, 20.0]), extra=dict(num_splits=rng.choice([0, 0, 1, 3])))
    if rng.random() < 0.2:
        options.sinks = torch.randn(whole.num_qo_heads, device=target.device)
    world = rng.choice([2, 3, 8, 40])
    shard = world, rng.randrange(world), rng.choice([1, 1, 2, 16, 64, 1000])
    given = dict(layout=rng.choice(["NHD", "HND"]), page_size=rng.choice([1, 5, 16, 64]), dense=dense)
    given["batch_invariant"] = rng.random() < 0.2
    check(whole, target, rng.choice(["used", "strided", "table", "indices"]), mask, options, shard, **given)


@pytest.mark.parametrize("rows", [1, 30])
def test_8_bit_caches(target, rows):
    whole = make_batch([rows] * 3, [90, 7, 200], 8, 2, 128, kv_dtype=torch.float8_e4m3fn, device=target.device)
    options = Options(descales=dict(k_descale=0.5, v_descale=2.0))
    call = lambda backend: check(  # noqa: E731
        whole, type(target)(target.device, backend), "table", Mask(causal=True), options, (2, 1, 16), dense=True
    )
    target.attempt(call, () if rows == 1 else ("general masks of 8-bit keys",))


def test_a_world_of_one_is_no_shard(target):
    whole = make_batch([20, 3], [50, 33], device=target.device)
    call = caller(target, whole, causal=True)
    assert_bitwise(call(kv_shard=(1, 0, 5)), call())


@pytest.mark.runs_nothing("the CPU refuses them")
def test_lengths_that_make_no_sense(target):
    """The CPU, which knows them, says so. On a GPU they compute nothing."""
    whole = make_batch([3, 3], [50, 33], device=target.device)
    lens = torch.tensor([-5, 40], dtype=torch.int32, device=target.device)
    run = caller(target, whole, seqused_k=lens, kv_shard=(2, 0, 8))
    if target.device == "cpu":
        with pytest.raises(ValueError, match="request 0 has -5 keys"):
            run()
        return
    assert run()[3:].isfinite().all()


@pytest.mark.parametrize(
    "given, told",
    [
        (dict(kv_shard=(2, 2, 1)), r"kv_shard=\(2, 2, 1\): rank must lie between"),
        (dict(kv_shard=(2, 0, 0)), r"kv_shard=\(2, 0, 0\): rank must lie between"),
        (dict(kv_shard=(1 << 20, 0, 1 << 10)), "world \\* block between 1 and 2\\^30 - 1"),
        (dict(kv_shard=[2, 0, 1]), "must be \\(world, rank, block\\), three numbers"),
        (dict(kv_shard=(2, 0, 1), seqused_k=None), "without seqused_k"),
        (dict(kv_shard=(2, 0, 1), alibi_slopes=torch.ones(4)), "cannot be used with a custom mask or ALiBi"),
    ],
)
def test_faults(given, told):
    x = torch.zeros(1, 5, 4, 64, dtype=torch.float16)
    lens = torch.tensor([5], dtype=torch.int32)
    with pytest.raises(ValueError, match=told):
        ck.attention(x, x, x, **dict(seqused_k=lens) | given)


@pytest.mark.parametrize("causal", [False, True])
def test_arguments_of_flash_attention(target, causal):
    """``cp_world_size`` and its companions, as vLLM passes them."""
    whole = make_batch([5, 2], [61, 40], 4, 2, 64, device=target.device)
    part, seen = part_of(whole, Mask(causal=causal), (2, 1, 1))
    k, v, whose = keys(part, "table")
    total = torch.tensor(whole.kv_lens, dtype=torch.int32, device=target.device)
    indptr = whole.qo_indptr(target.device)
    options: Any = dict(block_table=whose["page_table"], seqused_k=whose["seqused_k"], causal=causal)
    shard: Any = dict(cp_world_size=2, cp_rank=1, cp_tot_seqused_k=total)
    out = flash_attn.flash_attn_varlen_func(part.q, k, v, indptr, None, 5, 31, **options, **shard)
    want, _, base = expect(part, seen, Options())
    assert_close(out, want, base)


def test_counts_are_those_of_dcp_local_lengths():
    from cutlass_kernels._masks.mask_packing import keys_held

    totals = torch.arange(200)
    for shard in ((2, 0, 1), (3, 2, 16), (5, 1, 7)):
        local = distributed.dcp_local_lengths(totals, shard[1], shard[0], block_size=shard[2])
        assert local.tolist() == [keys_held(shard, n) for n in range(200)]
