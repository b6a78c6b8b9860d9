"""Batches of latent attention (MLA) in a paged cache, and what calls over them must give."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import poison_
from plan_free_problems import Mask, Options, expect, page_table
from problems import Batch, make_batch

from cutlass_kernels import mla

PLACES = pytest.mark.parametrize(
    "place",
    [
        pytest.param(("cpu", "reference"), id="cpu-reference"),
        pytest.param(("cuda:0", "fa3"), id="cuda-fa3", marks=[pytest.mark.gpu, pytest.mark.hopper]),
        pytest.param(("cuda:0", "fa2"), id="cuda-fa2", marks=pytest.mark.gpu),
    ],
)
SCALE = 192**-0.5  # DeepSeek's, of 192 columns before the absorption


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


@dataclass
class Problem:
    """Queries and keys of a batch, in pages of one cache. What belongs to nobody is NaN."""

    batch: Batch
    page_size: int
    cache: torch.Tensor  # [pages, page_size, 576]
    indptr: torch.Tensor
    indices: torch.Tensor
    table: torch.Tensor
    lens: torch.Tensor

    @property
    def q(self) -> torch.Tensor:
        return self.batch.q

    @property
    def halves(self) -> list[torch.Tensor]:
        """q_nope, q_pe, ckv and kpe: views."""
        return [x for whole in (self.q, self.cache) for x in whole.split([512, 64], -1)]

    def expected(self, causal: bool, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output and base-2 LSE at DeepSeek's scale, and the output of PyTorch in 16 bits."""
        factor = SCALE * 576**0.5  # the oracle's own scale is 1 / sqrt(576)
        descales = {"q_descale": factor * options.pop("descale", 1.0), "v_descale": options.pop("v_descale", 1.0)}
        return expect(self.batch, Mask(causal=causal), Options(descales=descales, **options))

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None, causal: bool = True, **options: Any) -> None:
        """Rows of outputs, and base-2 LSEs, are those of the oracle."""
        want, want_lse, base = self.expected(causal, **options)
        assert_close(out, want, base)
        if lse is not None:
            assert_lse_close(lse, want_lse)

    def plan(self, causal: bool = True, device: Any = None, **changes: Any) -> dict[str, Any]:
        """Arguments of the wrapper's plan()."""
        dtype = self.batch.q.dtype
        given: dict[str, Any] = dict(
            qo_indptr=self.batch.qo_indptr(device or self.cache.device),
            kv_indptr=self.indptr,
            kv_indices=self.indices,
            kv_len_arr=self.lens,
        )
        given = {name: x.to(device) if device is not None else x for name, x in given.items()}
        sizes = dict(num_heads=self.batch.num_qo_heads, head_dim_ckv=512, head_dim_kpe=64, page_size=self.page_size)
        rest = dict(causal=causal, sm_scale=SCALE, q_data_type=dtype, kv_data_type=self.cache.dtype)
        return {**given, **sizes, **rest, **changes}

    def split_plan(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Index vectors and other arguments of a plan."""
        plan = self.plan()
        return {name: plan.pop(name) for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")}, plan

    def dense(self) -> dict[str, torch.Tensor]:
        """The lengths as block tables, whose unused entries are -1."""
        pages = -(-self.lens // self.page_size)
        table = torch.where(torch.arange(self.table.size(1)) < pages[:, None], self.table, -1).to(torch.int32)
        return dict(cum_seq_lens_q=self.batch.qo_indptr("cpu"), block_tables=table, seq_lens=self.lens)


def make(
    qo_lens: list[int],
    kv_lens: list[int],
    heads: int = 16,
    page_size: int = 64,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Problem:
    batch = make_batch(qo_lens, kv_lens, heads, 1, 576, dtype=dtype, device=device)
    batch = dataclasses.replace(batch, v=batch.k[..., :512])
    paged = batch.paged(page_size, "NHD", form="split")
    indptr, indices, _ = paged.table(device)
    table = page_table(paged, len(kv_lens)).to(device)
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return Problem(batch, page_size, paged.k_cache.squeeze(2), indptr, indices, table, lens)


def wrapper_for(device: Any = "cpu", backend: str = "auto", **options: Any) -> mla.BatchMLAPagedAttentionWrapper:
    room = torch.empty(1024, dtype=torch.uint8, device=device)
    return mla.BatchMLAPagedAttentionWrapper(room, backend=backend, **options)


def planned(problem: Problem, backend: str = "auto", **plan: Any) -> mla.BatchMLAPagedAttentionWrapper:
    wrapper = wrapper_for(problem.cache.device, backend)
    wrapper.plan(**problem.plan(**plan))
    return wrapper


def buffers(batch: int, pages: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Of a wrapper for CUDA graphs."""
    sizes = dict(qo_indptr=batch + 1, kv_indptr=batch + 1, kv_indices=pages, kv_len_arr=batch)
    return {name: torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}


def trtllm(
    problem: Problem, query: torch.Tensor | None = None, cache: torch.Tensor | None = None, **options: Any
) -> Any:
    """The plan-free function over the pages of a problem, whose requests have one length."""
    query = problem.q.unflatten(0, (len(problem.lens), -1)) if query is None else query
    given = (torch.empty(0), 128, 512, 64, problem.table, problem.lens, 320)
    cache, options = problem.cache if cache is None else cache, dict(bmm1_scale=SCALE) | options
    return mla.trtllm_batch_decode_with_kv_cache_mla(query, cache, *given, **options)


def flash(problem: Problem, *given: Any, q: torch.Tensor | None = None, **options: Any) -> Any:
    """FlashMLA's function over the pages of a problem, whose requests have one length."""
    q = problem.q.unflatten(0, (len(problem.lens), -1)) if q is None else q
    return mla.flash_mla_with_kvcache(
        q, problem.cache.unsqueeze(2), problem.table, problem.lens, 512, *given, **options
    )


def apart(x: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own; of fp8 too."""
    return x.view(torch.uint8).contiguous().view(x.dtype) if x.element_size() == 1 else x.contiguous()


def nan_like(shape: Any, like: torch.Tensor) -> torch.Tensor:
    return poison_(torch.empty(*shape, dtype=like.dtype, device=like.device))
