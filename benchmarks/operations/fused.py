"""`fused`: trtllm_fmha_v2_prefill in each of its layouts."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import api
import torch
from backend import ALL, FP8, Backend, Operation, Workload, module, needs_cuda, needs_module
from inputs import Inputs
from lengths import tokens
from problem import OfProblem, Problem
from timing import Timed


@dataclass(frozen=True)
class Fused(OfProblem):
    """A problem whose tensors are laid out in one of the function's ways."""

    layout: str

    @property
    def detail(self) -> str:
        return f"{self.layout}, {self.problem.detail}"


def _arguments(case: Fused, x: Inputs) -> dict[str, Any]:
    """The arguments by name, all on the device; the tensors are copies in the layout's form."""
    problem, qkv = case.problem, _tensors(case, x)
    batch = len(problem.qo_lens)
    tables = None
    if x.pages is not None:
        rows = x.pages.indices.split(x.pages.indptr.diff().tolist())
        tables = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(x.q.device)
    given = {
        "qkv": qkv,
        "input_layout": case.layout,
        "workspace_buffer": torch.zeros(128 << 20, dtype=torch.uint8, device=x.q.device),
        "seq_lens": x.kv_indptr_device.diff(),
        "max_q_len": max(problem.qo_lens),
        "max_kv_len": max(problem.kv_lens),
        "bmm1_scale": problem.head_dim_qk**-0.5,
        "bmm2_scale": 1.0,
        "batch_size": batch,
        "cum_seq_lens_q": x.qo_indptr_device,
        "cum_seq_lens_kv": x.kv_indptr_device,
        "block_tables": tables,
        "mask_mode": "causal" if problem.causal else "padding",
    }
    return given | ({"out_dtype": torch.bfloat16} if problem.fp8 else {})


def _tensors(case: Fused, x: Inputs) -> Any:
    if case.layout == "PACKED_QKV":
        return torch.stack([x.q, x.k, x.v], 1)
    if case.layout == "CONTIGUOUS_Q_KV":
        return x.q, torch.stack([x.k, x.v], 1)
    if case.layout == "SEPARATE_Q_K_V":
        return x.q, x.k, x.v
    assert x.pages is not None and isinstance(x.pages.cache, torch.Tensor)
    cache = x.pages.cache
    return x.q, cache if case.layout.endswith("NHD") else cache.transpose(2, 3).contiguous()


def _without_pages(problem: Problem) -> Problem:
    """The same problem with keys and values in two contiguous tensors."""
    return dataclasses.replace(problem, page_size=0)


# --- who attends -------------------------------------------------------------------------------------------------


def fused(library: Any, case: Fused, x: Inputs) -> Timed:
    return Timed(functools.partial(library.trtllm_fmha_v2_prefill, **_arguments(case, x)))


def _contiguous(library: Any, case: Fused, x: Inputs) -> Timed:
    """What the layouts are measured by: fa3 on three contiguous tensors, planned beforehand."""
    problem = _without_pages(case.problem)
    wrapper = api.wrapper(library, problem, x, "fa3")
    api.plan(wrapper, problem, (x.qo_indptr, x.kv_indptr), **api.options(problem))()
    return Timed(functools.partial(wrapper.run, x.q, x.k, x.v))


def ours(library: Any) -> list[Backend]:
    def column(name: str, make: Any, backend: str) -> Backend:
        refuses = functools.partial(api.refused, library, backend)
        return Backend(name, True, ALL | FP8, needs_cuda, functools.partial(make, library), refuses)

    return [column("auto", fused, "auto"), column("contiguous", _contiguous, "fa3")]


def layouts(dtype: str) -> list[Fused]:
    """16k tokens in requests of 1k, 4k and 16k, in every layout of trtllm_fmha_v2_prefill."""
    cases: list[Fused] = []
    for layout, heads, kv_heads, page_size in (
        ("PACKED_QKV", 16, 16, 0),
        ("CONTIGUOUS_Q_KV", 32, 8, 0),
        ("SEPARATE_Q_K_V", 32, 8, 0),
        ("Q_PAGED_KV_NHD", 32, 8, 32),
        ("Q_PAGED_KV_HND", 32, 8, 32),
    ):
        for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
            lens, group = (length,) * batch, f"{layout} {heads}/{kv_heads}"
            column = f"{batch} x {tokens(length)}"
            case = Problem(group, column, lens, lens, heads, kv_heads, 128, 128, dtype=dtype, page_size=page_size)
            cases.append(Fused(case, layout))
    return cases


def short(dtype: str) -> list[Fused]:
    """Few short queries over many keys, of equal and of uneven lengths: speculative decoding, chunks of a prompt."""
    cases: list[Fused] = []
    uneven = (500, 1000, 2000, 4000, 8000, 16000, 700, 300)
    for column, rows, keys in (
        ("1 x 4 over 4k", 4, (4096,)),
        ("1 x 16 over 32k", 16, (32768,)),
        ("1 x 128 over 32k", 128, (32768,)),
        ("8 x 4 over 4k", 4, (4096,) * 8),
        ("8 x 4 uneven", 4, uneven),
        ("8 x 32 over 4k", 32, (4096,) * 8),
        ("8 x 32 uneven", 32, uneven),
    ):
        for layout, page_size in (("CONTIGUOUS_Q_KV", 0), ("Q_PAGED_KV_NHD", 32)):
            lens = (rows,) * len(keys)
            problem = Problem(layout, column, lens, keys, 32, 8, 128, 128, dtype=dtype, page_size=page_size)
            cases.append(Fused(problem, layout))
    return cases


OPERATION = Operation(
    "trtllm_fmha_v2_prefill, beside fa3 on contiguous tensors",
    ("TFLOP/s", "us"),
    ours,
    [
        Backend(
            "flashinfer",
            False,
            frozenset({"causal", "gqa", "paged"}) | FP8,
            needs_module("flashinfer"),
            lambda case, x: fused(module("flashinfer.prefill"), case, x),
        )
    ],
    {
        "fused": Workload("16k tokens in every layout, hd128, causal", layouts),
        "fused-short": Workload("1 and 8 requests of 4 to 128 rows over 300 to 32k keys, hd128", short),
    },
    "fused",
    ("auto", "contiguous", "flashinfer"),
)
