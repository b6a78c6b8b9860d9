"""VariableBlockSparseAttentionWrapper against dense masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from guards import poison_
from sparse_problems import check_captured, check_run, check_what_refused_calls_leave, expect, tensors

import cutlass_kernels as ck
from cutlass_kernels._core import index_vectors


def partition(total: int, blocks: int, heads: int, unit: int, generator: torch.Generator) -> torch.Tensor:
    """int32 ``[heads, blocks]``: sizes of blocks, multiples of ``unit``, that add up to ``total``; some may be 0."""
    rows = []
    for _ in range(heads):
        cuts = torch.randint(0, total // unit + 1, (blocks - 1,), generator=generator).sort().values
        ends = torch.cat([torch.tensor([0]), cuts, torch.tensor([total // unit])])
        rows.append(ends.diff() * unit)
    return torch.stack(rows).int()


class Problem:
    """Random blocks per head; the second block of rows of each head sees nothing."""

    def __init__(
        self,
        device: str,
        rows: tuple[int, int, int],  # rows, blocks, and what divides these
        keys: tuple[int, int, int],
        heads: tuple[int, int] = (4, 2),
        dim: int = 64,
        dtype: torch.dtype = torch.float16,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.dim, self.device, self.dtype = heads, dim, device, dtype
        self.rows = partition(rows[0], rows[1], heads[1], rows[2], generator)
        self.columns = partition(keys[0], keys[1], heads[1], keys[2], generator)
        self.map = torch.rand(heads[1], rows[1], keys[1], generator=generator) < 0.4
        self.map[:, 1:2] = False
        self.tensors = tensors(rows[0], keys[0], heads, dim, device, dtype, seed)
        self.hnd = tuple(x.transpose(0, 1).contiguous() for x in self.tensors)

    def masks(self, causal: bool = False) -> torch.Tensor:
        """Bool ``[num_qo_heads, rows, keys]``."""
        masks = []
        for blocks, rows, columns in zip(self.map, self.rows, self.columns):
            seen = blocks.repeat_interleave(rows.long(), 0).repeat_interleave(columns.long(), 1)
            begin = 0
            for n in rows.tolist() if causal else []:
                for i in range(n):
                    keys = seen[begin + i].nonzero()[:, 0]
                    seen[begin + i, keys[max(len(keys) - n + i + 1, 0) :]] = False
                begin += n
            masks.append(seen)
        return torch.stack(masks).repeat_interleave(self.heads[0] // self.heads[1], 0)

    def arguments(self, device: str | None = None) -> tuple[Any, ...]:
        device = self.device if device is None else device
        return self.map.to(device), self.rows.to(device), self.columns.to(device), *self.heads, self.dim

    def wrapper(self, target: Any, device: str | None = None, **options: Any) -> Any:
        wrapper = ck.VariableBlockSparseAttentionWrapper(target.workspace(), backend=target.backend)
        wrapper.plan(*self.arguments(device), q_data_type=self.dtype, **options)
        return wrapper

    def check(self, target: Any, causal: bool = False, **options: Any) -> None:
        given = {"soft_cap" if name == "logits_soft_cap" else name: x for name, x in options.items()}
        want = expect(*self.tensors, self.masks(causal), **given)
        check_run(self.wrapper(target, causal=causal, **options), self.hnd, want, heads_first=True)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (1, 1)])
@pytest.mark.parametrize("unit", [1, 3, 16, 64])
def test_sizes(target, unit, heads):
    Problem(target.device, (192, 5, 1), (576, 7, unit), heads).check(target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_dims_and_dtypes(target, dim, dtype):
    Problem(target.device, (384, 3, 64), (512, 4, 64), (4, 2), dim, dtype).check(target)


@pytest.mark.parametrize("unit", [1, 64])
def test_options(target, unit):
    Problem(target.device, (128, 4, 1), (256, 4, unit)).check(target, logits_soft_cap=4.0, sm_scale=0.3)
    Problem(target.device, (128, 4, 1), (256, 4, unit), seed=1).check(target, causal=True)


@pytest.mark.parametrize("rows", [1, 300])
def test_few_and_many_rows(target, rows):
    Problem(target.device, (rows, 2, 1), (1024, 5, 8), (8, 2), 128).check(target)


def test_strides_and_places(target):
    problem = Problem(target.device, (128, 4, 1), (256, 4, 16))
    wrapper = problem.wrapper(target)
    want = wrapper.run(*problem.hnd)
    assert_bitwise(wrapper.run(*(x.transpose(0, 1) for x in problem.tensors)), want)  # tokens before heads: copied
    out = poison_(torch.empty(128, 4, 64, dtype=want.dtype, device=want.device)).transpose(0, 1)
    assert wrapper.run(*problem.hnd, out=out) is out
    assert_bitwise(out, want)
    assert_bitwise(wrapper.forward(*problem.hnd), want)
    assert_bitwise(wrapper.run_return_lse(*problem.hnd)[0], want)
    assert "128 rows, 256 keys" in repr(wrapper)


def test_what_a_call_that_raises_leaves(target):
    problem = Problem(target.device, (128, 4, 1), (256, 4, 16))
    wrapper = problem.wrapper(target)
    check_what_refused_calls_leave(wrapper, *problem.hnd)


@pytest.mark.parametrize("kind", ["variable", "per head"])
def test_results_have_no_backward(target, kind):
    problem = Problem(target.device, (128, 4, 32), (256, 4, 64))
    if kind == "variable":
        wrapper, (q, k, v) = problem.wrapper(target), problem.hnd
    else:
        wrapper, (q, k, v) = ck.BlockSparseAttentionWrapper(target.workspace(), target.backend), problem.tensors
        pattern = problem.map.to(target.device)
        wrapper.plan(None, None, 128, 256, 32, 64, *problem.heads, problem.dim, block_mask=pattern)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    q = q.detach().requires_grad_()
    results = wrapper.run(q, k, v, return_lse=True)
    place = torch.empty_like(out)
    assert wrapper.run(q, k, v, out=place) is place
    for x, want in zip((*results, place), (out, lse, out)):
        assert_bitwise(x.detach(), want)
        with pytest.raises(RuntimeError, match="has no backward"):
            x.sum().backward()


@pytest.mark.parametrize("device", ["cpu", None, "mixed"])
def test_where_the_pattern_is(target, device):
    problem = Problem(target.device, (128, 4, 1), (256, 4, 16))
    want = problem.wrapper(target).run(*problem.hnd)
    if device == "mixed":
        wrapper = problem.wrapper(target)
        pattern, rows, columns = problem.map.to(target.device), problem.rows, problem.columns.long()
        wrapper.plan(pattern, rows, columns.to(target.device), *problem.heads, problem.dim)
        assert_bitwise(wrapper.run(*problem.hnd), want)
        wrapper.plan(pattern, rows, columns, *problem.heads, problem.dim)
    else:
        wrapper = problem.wrapper(target, device)
    assert_bitwise(wrapper.run(*problem.hnd), want)


@pytest.mark.gpu
def test_sizes_on_the_cpu_do_not_wait_and_runs_are_captured():
    problem = Problem("cuda", (128, 4, 1), (256, 4, 16))
    wrapper = ck.VariableBlockSparseAttentionWrapper(torch.empty(16, dtype=torch.uint8, device="cuda"))
    pattern = problem.map.cuda()
    plan = lambda: wrapper.plan(pattern, problem.rows, problem.columns, *problem.heads, problem.dim)  # noqa: E731
    check_captured(wrapper, plan, *problem.hnd)


@pytest.mark.runs_nothing("every call raises")
def test_wrong_calls(target):
    problem = Problem(target.device, (128, 4, 1), (256, 4, 16))
    wrapper = ck.VariableBlockSparseAttentionWrapper(target.workspace())
    assert "not planned" in repr(wrapper)
    q, k, v = problem.hnd
    pattern, rows, columns = problem.map, problem.rows, problem.columns

    def plan(pattern=pattern, rows=rows, columns=columns, **options: Any) -> Callable[[], None]:
        return lambda: wrapper.plan(pattern, rows, columns, 4, 2, 64, **options)

    no_plan = (RuntimeError, "VariableBlockSparseAttentionWrapper has no plan")
    no_blocks = r"block_mask_map has shape .* at least one block of rows and one of keys"
    uneven = columns + torch.tensor([[0], [1]])
    for *error, words, call in (
        (*no_plan, lambda: wrapper.run(q, k, v)),
        (r"block_mask_map is \(4, 4\) torch\.bool: it must be a tensor", plan(pattern[0])),
        (r"block_row_sz is list: it must be a tensor .* of integers", plan(rows=rows.tolist())),
        (r"they must be \[num_kv_heads, MB, NB\]", plan(rows=rows[:, 1:])),
        (no_blocks, plan(pattern[:, :0], rows[:, :0])),
        (no_blocks, plan(pattern[:, :, :0], columns=columns[:, :0])),
        (*no_plan, lambda: wrapper.forward(q, k, v)),
        ("block_row_sz holds -1: sizes of blocks must not be negative", plan(rows=torch.full_like(rows, -1))),
        ("block_col_sz makes 256 keys of head 0, but 260 of head 1", plan(columns=uneven)),
        ("'ROPE_LLAMA' is not served with patterns per head", plan(pos_encoding_mode="ROPE_LLAMA")),
        (KeyError, "nonsense", plan(pos_encoding_mode="nonsense")),
        ("backend='trt' is unknown", lambda: type(wrapper)(target.workspace(), backend="trt")),
    ):
        with pytest.raises(error[0] if error else ValueError, match=words):
            call()
    plan()()
    for words, call in (
        (r"k has 2 heads, 200 tokens .* must be \[heads, tokens, head_dim\]", lambda: wrapper.run(q, k[:, :200], v)),
        (r"v has dtype torch\.bfloat16, but the plan .* pass kv_data_type", lambda: wrapper.run(q, k, v.bfloat16())),
        ("out has shape", lambda: wrapper.run(q, k, v, out=q[:, 1:])),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_the_limit_of_lists_counts_the_heads_that_have_one(monkeypatch):
    monkeypatch.setattr(index_vectors, "INT32_MAX", 1000)

    def plan(num_kv_heads: int) -> None:
        wrapper = ck.VariableBlockSparseAttentionWrapper(torch.empty(1024, dtype=torch.uint8))
        rows, columns = (torch.full((num_kv_heads, 16), n, dtype=torch.int32) for n in (1, 16))
        wrapper.plan(torch.ones(num_kv_heads, 16, 16, dtype=torch.bool), rows, columns, 8, num_kv_heads, 64)

    plan(1)  # 256 entries, which 8 query heads share
    with pytest.raises(ValueError, match="more pages than int32 counts"):
        plan(4)
