"""BlockSparseAttentionWrapper against dense masks."""

from __future__ import annotations

import doctest
import random
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close
from sparse_problems import Bsr, check_captured, check_run, check_what_refused_calls_leave, expect, random_bsr, tensors

import cutlass_kernels as ck

# M, N, R, C
SIZES = [
    (64, 64, 1, 1),
    (60, 96, 3, 3),
    (128, 128, 16, 16),
    (256, 512, 64, 64),
    (384, 1024, 128, 128),
    (256, 1000, 128, 128),  # the last block of keys has 104
    (200, 130, 64, 64),  # 8 rows, 2 keys
    (70, 45, 16, 3),
    (129, 256, 128, 8),
    (96, 240, 96, 48),
    (40, 1024, 128, 512),  # fewer rows than a block
]


def unplanned(target: Any) -> Any:
    return ck.BlockSparseAttentionWrapper(target.workspace(), backend=target.backend)


def planned(target: Any, bsr: Bsr, heads: tuple[int, int], dim: int, device: str | None = None, **options: Any) -> Any:
    wrapper = unplanned(target)
    lists = bsr.lists(device or target.device)
    mask = None if bsr.mask is None else bsr.mask.to(target.device)
    wrapper.plan(*lists, *bsr.sizes, *heads, dim, mask=mask, **options)
    return wrapper


def check(target: Any, bsr: Bsr, heads: tuple[int, int] = (4, 2), dim: int = 64, **plan: Any) -> None:
    dtype = plan.get("q_data_type", torch.float16)
    q, k, v = tensors(bsr.M, bsr.N, heads, dim, target.device, dtype)
    options = {name: plan[name] for name in ("sm_scale",) if name in plan}
    if "logits_soft_cap" in plan:
        options["soft_cap"] = plan["logits_soft_cap"]
    want = expect(q, k, v, bsr.dense(plan.get("causal", False)), **options)
    check_run(planned(target, bsr, heads, dim, **plan), (q, k, v), want)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_block_sizes(target, sizes, heads, masked):
    check(target, random_bsr(*sizes, masked=masked), heads)


@pytest.mark.parametrize("seed", range(40))
def test_random(target, seed):
    rng = random.Random(seed)
    R, C = (rng.choice([1, 3, 8, 16, 32, 48, 64, 100, 128, 256]) for _ in "RC")
    M, N = rng.randint(1, 600), rng.randint(1, 900)
    bsr = random_bsr(M, N, R, C, rng.choice([0.05, 0.3, 0.9]), rng.random() < 0.3, seed, rng.random() < 0.5)
    plan: dict[str, Any] = dict(causal=rng.random() < 0.3, q_data_type=rng.choice([torch.float16, torch.bfloat16]))
    if rng.random() < 0.3:
        plan["logits_soft_cap"] = 4.0
    if rng.random() < 0.3:
        plan["sm_scale"] = 0.2
    check(target, bsr, rng.choice([(1, 1), (4, 4), (6, 2), (8, 1)]), rng.choice([64, 128]), **plan)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("sizes", [(256, 512, 64, 64), (384, 1024, 128, 128)], ids=str)
def test_dims_and_dtypes(target, sizes, dim, dtype):
    check(target, random_bsr(*sizes), (4, 1), dim, q_data_type=dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("R", [16, 128])
def test_soft_caps_and_scales(target, R, masked):
    check(target, random_bsr(256, 384, R, 64, masked=masked), logits_soft_cap=3.0, sm_scale=0.3)


@pytest.mark.parametrize(("R", "C"), [(64, 64), (128, 64), (16, 48)])
def test_causal_counts_the_keys_of_a_row_block(target, R, C):
    check(target, random_bsr(256, 384, R, C), causal=True)


def test_a_causal_mask_of_blocks(target):
    """The block on the diagonal last in its row: the causal mask of the whole."""
    blocks, size = 4, 64
    indptr = torch.tensor([0, 1, 3, 6, 10], dtype=torch.int32)
    indices = torch.cat([torch.arange(i + 1) for i in range(blocks)]).int()
    bsr = Bsr(blocks * size, blocks * size, size, size, indptr, indices)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, target.device)
    want = expect(q, k, v, torch.ones(bsr.M, bsr.N).tril().bool())
    assert_close(planned(target, bsr, (4, 2), 64, causal=True).run(q, k, v), want.out, want.baseline)


@pytest.mark.parametrize("N", [512, 500])
def test_packed_masks(target, N):
    bsr = random_bsr(256, N, 64, 64, masked=True)
    q, k, v = tensors(bsr.M, N, (4, 2), 64, target.device)
    masks = [bsr.dense()[i * 64 : (i + 1) * 64][:, keys] for i, keys in enumerate(bsr.order())]
    ends = torch.tensor([0, *(x.numel() for x in masks)]).cumsum(0).int().to(target.device)
    flat = torch.cat([x.flatten() for x in masks]).to(target.device)
    packed, _ = ck.segment_packbits(flat, ends, bitorder="little")
    wrapper = unplanned(target)
    wrapper.plan(*bsr.lists(target.device), *bsr.sizes, 4, 2, 64, packed_mask=packed)
    want = expect(q, k, v, bsr.dense())
    assert_close(wrapper.run(q, k, v), want.out, want.baseline)
    assert_bitwise(wrapper.run(q, k, v), planned(target, bsr, (4, 2), 64).run(q, k, v))


@pytest.mark.parametrize("N", [512, 500])
@pytest.mark.parametrize("masked", [False, True])
def test_lists_on_the_cpu_and_longer_than_needed(target, N, masked):
    bsr = random_bsr(256, N, 64, 64, masked=masked)
    q, k, v = tensors(bsr.M, N, (4, 2), 64, target.device)
    want = planned(target, bsr, (4, 2), 64).run(q, k, v)
    assert_bitwise(planned(target, bsr, (4, 2), 64, "cpu").run(q, k, v), want)
    longer = Bsr(*bsr.sizes, bsr.indptr, torch.cat([bsr.indices, bsr.indices[:3]]))
    if masked:
        longer.mask = torch.cat([bsr.mask, bsr.mask[:3]])
    assert_bitwise(planned(target, longer, (4, 2), 64).run(q, k, v), want)
    wrapper = unplanned(target)
    mask = None if bsr.mask is None else bsr.mask.to(target.device)
    wrapper.plan(bsr.indptr.long(), bsr.indices.to(target.device).long(), *bsr.sizes, 4, 2, 64, mask=mask)
    assert_bitwise(wrapper.run(q, k, v), want)


def heads_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """In memory."""
    return [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("sizes", [(256, 512, 64, 64), (250, 1000, 128, 128), (60, 96, 3, 3)], ids=str)
@pytest.mark.parametrize("of_queries", [False, True])
def test_a_pattern_per_head(target, sizes, heads, of_queries):
    M, N, R, C = sizes
    generator = torch.Generator().manual_seed(1)
    count = heads[0] if of_queries else heads[1]
    blocks = torch.rand(count, -(-M // R), -(-N // C), generator=generator) < 0.4
    blocks[:, 1] = False
    q, k, v = tensors(M, N, heads, 64, target.device)
    masks = blocks.repeat_interleave(R, 1)[:, :M].repeat_interleave(C, 2)[:, :, :N]
    want = expect(q, k, v, masks.repeat_interleave(heads[0] // count, 0), soft_cap=5.0)
    wrapper = unplanned(target)
    wrapper.plan(None, None, *sizes, *heads, 64, block_mask=blocks.to(target.device), logits_soft_cap=5.0)
    lse = check_run(wrapper, (q, k, v), want)
    other = heads_first(q, k, v)
    found = wrapper.run(*other)
    assert found.stride() == other[0].stride()
    assert_bitwise(found, wrapper.run(q, k, v))
    assert_bitwise(wrapper.run_return_lse(q, k, v)[1], lse)
    assert "a pattern per head" in repr(wrapper)


def test_scales_of_fp8(target):
    bsr = random_bsr(256, 512, 64, 64)
    heads, dim = (4, 2), 64
    q, k, v = (x.to(torch.float8_e4m3fn) for x in tensors(bsr.M, bsr.N, heads, dim, target.device))
    scales = [torch.rand(n, device=target.device) + 0.5 for n in (4, 2, 2)]
    wide = [x.float() * s[:, None] for x, s in zip((q, k, v), scales)]
    want = expect(*wide, bsr.dense())
    blocks = torch.zeros(2, 4, 8, dtype=torch.bool)
    for i in range(4):
        blocks[:, i, bsr.indices[bsr.indptr[i] : bsr.indptr[i + 1]].long()] = True
    for plan in ({"block_mask": blocks.to(target.device)}, {}):
        lists = (None, None) if plan else bsr.lists(target.device)

        def call(backend):
            wrapper = ck.BlockSparseAttentionWrapper(target.workspace(), backend=backend)
            wrapper.plan(*lists, *bsr.sizes, *heads, dim, q_data_type=q.dtype, **plan)
            return wrapper.run(q, k, v, *scales)

        found = target.attempt(call, () if plan else ["fp8_batch"])  # patterns of heads are no batch of a wrapper
        assert found.dtype == torch.float16
        assert_close(found, want.out, atol=0.06, rtol=0.05)


def test_strides(target):
    bsr = random_bsr(256, 512, 64, 64)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, target.device)
    wrapper = planned(target, bsr, (4, 2), 64)
    want = wrapper.run(q, k, v)
    assert_bitwise(wrapper.run(*heads_first(q, k, v)), want)
    kv = torch.cat([k, v], -1)
    assert_bitwise(wrapper.run(q, *kv.split(64, -1)), want)


def test_nothing_to_see(target):
    q, k, v = tensors(128, 128, (4, 2), 64, target.device)
    bsr = Bsr(128, 128, 64, 64, torch.zeros(3, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    for wrapper in (planned(target, bsr, (4, 2), 64), ck.BlockSparseAttentionWrapper(target.workspace())):
        if wrapper.M is None:
            blocks = torch.zeros(2, 2, 2, dtype=torch.bool, device=target.device)
            wrapper.plan(None, None, *bsr.sizes, 4, 2, 64, block_mask=blocks)
        out, lse = wrapper.run(q, k, v, return_lse=True)
        assert not out.any() and torch.all(lse == -torch.inf)


def test_a_plan_that_fails_leaves_the_previous_one(target):
    bsr = random_bsr(256, 512, 64, 64)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, target.device)
    wrapper = planned(target, bsr, (4, 2), 64)
    want = wrapper.run(q, k, v)
    with pytest.raises(ValueError, match="block_mask is"):
        wrapper.plan(None, None, 128, 128, 64, 64, 4, 2, 64, block_mask=torch.ones(3, 2, 2))
    with pytest.raises(ValueError, match="head_dim"):
        wrapper.plan(*bsr.lists("cpu"), *bsr.sizes, 4, 2, -1)
    assert_bitwise(wrapper.run(q, k, v), want)
    assert_bitwise(wrapper.forward(q, k, v), want)


def test_plans_with_and_without_a_pattern_per_head(target):
    bsr = random_bsr(256, 512, 64, 64)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, target.device)
    wrapper = planned(target, bsr, (4, 2), 64)
    want = wrapper.run(q, k, v)
    wrapper.plan(None, None, *bsr.sizes, 4, 2, 64, block_mask=torch.zeros(2, 4, 8, dtype=torch.bool))
    assert not wrapper.run(q, k, v).any()
    wrapper.plan(*bsr.lists(target.device), *bsr.sizes, 4, 2, 64)
    assert_bitwise(wrapper.run(q, k, v), want)


@pytest.mark.parametrize("per_head", [False, True])
def test_what_a_call_that_raises_leaves(target, per_head):
    bsr = random_bsr(256, 512, 64, 64)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, target.device)
    wrapper = planned(target, bsr, (4, 2), 64)
    if per_head:
        wrapper.plan(None, None, *bsr.sizes, 4, 2, 64, block_mask=torch.ones(2, 4, 8, dtype=torch.bool))
    check_what_refused_calls_leave(wrapper, q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize("per_head", [False, True])
def test_plans_do_not_wait_and_runs_are_captured(per_head):
    bsr = random_bsr(256, 512, 64, 64, masked=not per_head)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, "cuda")
    wrapper = ck.BlockSparseAttentionWrapper(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
    blocks = (torch.rand(2, 4, 8, generator=torch.Generator().manual_seed(0)) < 0.5).cuda()
    lists = (None, None) if per_head else bsr.lists("cuda")
    options = {"block_mask": blocks} if per_head else {"mask": bsr.mask.cuda()}
    check_captured(wrapper, lambda: wrapper.plan(*lists, *bsr.sizes, 4, 2, 64, **options), q, k, v)


@pytest.mark.runs_nothing("converts masks")
def test_convert_bsr_mask_layout():
    bsr = random_bsr(64, 96, 16, 8, masked=True)
    flat = ck.convert_bsr_mask_layout(bsr.mask, bsr.indptr)
    masks = [bsr.dense()[i * 16 : (i + 1) * 16][:, keys].flatten() for i, keys in enumerate(bsr.order())]
    assert torch.equal(flat, torch.cat(masks))
    with pytest.raises(ValueError, match=r"mask is \(16, 8\): it must be a tensor \[nnz, R, C\]"):
        ck.sparse.convert_bsr_mask_layout(bsr.mask[0], bsr.indptr)


@pytest.mark.runs_nothing("every plan raises")
def test_wrong_plans(target):
    bsr = random_bsr(256, 512, 64, 64)
    wrapper = ck.BlockSparseAttentionWrapper(target.workspace())
    assert "not planned" in repr(wrapper)
    heads = (4, 2, 64)

    def refused(match, *args, error=ValueError, **kwargs):
        with pytest.raises(error, match=match):
            wrapper.plan(*args, *heads, **kwargs)

    lists = bsr.lists("cpu")
    refused("indptr and indices are missing", None, None, *bsr.sizes)
    refused("R=0 and C=64: blocks must have at least one row", *lists, 256, 512, 0, 64)
    refused("indptr has 5 elements, but M=320 rows in blocks of R=64 need 6", *lists, 320, 512, 64, 64)
    refused("indices holds .*, but N=128 columns in blocks of C=64 have the numbers 0 to 1", *lists, 256, 128, 64, 64)
    refused("indptr ends at", lists[0] + torch.tensor([0, 0, 0, 0, 99]).int(), lists[1], *bsr.sizes)
    refused("indptr decreases", lists[0].flip(0), lists[1], *bsr.sizes, error=RuntimeError)
    refused(r"mask is \(1, 64, 64\), torch.bool", *lists, *bsr.sizes, mask=torch.ones(1, 64, 64).bool())
    refused("mask and block_mask", *lists, *bsr.sizes, mask=torch.ones(1), block_mask=torch.ones(2, 4, 8))
    refused("block_mask is", None, None, *bsr.sizes, block_mask=torch.ones(2, 4, 9).bool())
    ones = torch.ones(2, 4, 8).bool()
    refused(r"block_mask has dtype torch\.float32: it must be bool", None, None, *bsr.sizes, block_mask=ones.float())
    refused("not served with block_mask", None, None, *bsr.sizes, block_mask=ones, pos_encoding_mode="ALIBI")
    refused("M='256' is of type str", *lists, "256", 512, 64, 64, error=TypeError)
    with pytest.raises(RuntimeError, match="BlockSparseAttentionWrapper has no plan"):
        wrapper.run(*tensors(256, 512, (4, 2), 64, target.device))
    with pytest.raises(RuntimeError, match="BlockSparseAttentionWrapper has no plan"):
        wrapper.forward(*tensors(256, 512, (4, 2), 64, target.device))
    with pytest.raises(ValueError, match="backend='vsa_sm100_blk64' is unknown"):
        ck.BlockSparseAttentionWrapper(target.workspace(), backend="vsa_sm100_blk64")


@pytest.mark.runs_nothing("every run raises")
def test_wrong_runs(target):
    bsr = random_bsr(256, 512, 64, 64)
    q, k, v = tensors(bsr.M, bsr.N, (4, 2), 64, target.device)
    wrapper = planned(target, bsr, (4, 2), 64)
    with pytest.raises(ValueError, match="k has 448 rows, but N=512 is planned"):
        wrapper.run(q, k[:448], v)
    with pytest.raises(ValueError, match=r"q has dtype torch\.bfloat16"):
        wrapper.run(q.bfloat16(), k, v)
    blocks = torch.ones(2, 4, 8, dtype=torch.bool, device=target.device)
    wrapper.plan(None, None, *bsr.sizes, 4, 2, 64, block_mask=blocks)
    with pytest.raises(ValueError, match=r"k has 2 heads, 448 tokens .* it must be \[tokens, heads, head_dim\]"):
        wrapper.run(q, k[:448], v)
    with pytest.raises(ValueError, match=r"q has dtype torch\.bfloat16, but the plan torch\.float16: pass q_data_type"):
        wrapper.run(q.bfloat16(), k, v)


@pytest.mark.parametrize("per_head", [False, True])
def test_no_keys_and_no_rows(target, per_head):
    for M, N in ((128, 0), (0, 128)):
        q, k, v = tensors(M, N, (4, 2), 64, target.device)
        wrapper = unplanned(target)
        indptr, indices = torch.zeros(M // 64 + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
        blocks = torch.zeros(2, M // 64, N // 64, dtype=torch.bool, device=target.device)
        options = dict(block_mask=blocks) if per_head else {}
        wrapper.plan(*((None, None) if per_head else (indptr, indices)), M, N, 64, 64, 4, 2, 64, **options)
        out, lse = wrapper.run(q, k, v, return_lse=True)
        assert out.shape == q.shape and lse.shape == q.shape[:2]
        assert not out.any() and torch.all(lse == -torch.inf)


@pytest.mark.parametrize("N", [512, 500])
@pytest.mark.parametrize("on", ["cpu", None])
def test_lists_that_do_not_start_at_0(target, N, on):
    bsr = random_bsr(256, N, 64, 64, masked=True)
    q, k, v = tensors(bsr.M, N, (4, 2), 64, target.device)
    more = Bsr(*bsr.sizes, bsr.indptr + 3, torch.cat([bsr.indices[-3:], bsr.indices, bsr.indices[:2]]))
    more.mask = torch.cat([~bsr.mask[-3:], bsr.mask, ~bsr.mask[:2]])
    for _ in range(2):
        want = planned(target, bsr, (4, 2), 64).run(q, k, v)
        assert_bitwise(planned(target, more, (4, 2), 64, on).run(q, k, v), want)
        bsr.mask = more.mask = None


@pytest.mark.runs_nothing("converts masks")
def test_converted_masks_of_entries_in_no_row_block_come_last():
    bsr = random_bsr(64, 96, 16, 8, masked=True)
    mask = torch.cat([~bsr.mask[:3], bsr.mask, ~bsr.mask[:2]])
    found = ck.convert_bsr_mask_layout(mask, bsr.indptr + 3)
    assert found.numel() == mask.numel()
    assert torch.equal(found[: bsr.mask.numel()], ck.convert_bsr_mask_layout(bsr.mask, bsr.indptr))
    with pytest.raises(RuntimeError, match="indptr decreases"):
        ck.convert_bsr_mask_layout(bsr.mask, bsr.indptr.flip(0))
    with pytest.raises(ValueError, match=r"indptr ends at .* but mask has 1 blocks"):
        ck.convert_bsr_mask_layout(bsr.mask[:1], bsr.indptr)


@pytest.mark.parametrize("name", ["convert_bsr_mask_layout", "BlockSparseAttentionWrapper"])
def test_examples_of_the_documentation(name):
    doctest.run_docstring_examples(getattr(ck, name), {"torch": torch, name: getattr(ck, name)}, name=name)
