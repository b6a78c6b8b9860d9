"""`mla_sparse`: latent attention (MLA) of a prompt whose rows each see selected tokens of a cache."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import api
import check
import torch
from backend import Backend, Operation, Workload, module, needs_module
from inputs import Inputs, make_inputs
from lengths import tokens
from problem import OfProblem, Problem
from timing import Timed

from .mla_decode import CKV, KPE, SCALE

DRAWN = 1 << 26  # random numbers at once


@dataclass(frozen=True)
class MlaSparse(OfProblem):
    """Rows of one prompt; each lists ``topk`` of all slots, drawn at random, none twice."""

    topk: int

    @property
    def detail(self) -> str:
        return f"top-k {self.topk}, {self.problem.detail}"

    @property
    def work(self) -> float:
        return self.problem.work * self.topk / self.problem.kv_lens[0]

    @property
    def bytes(self) -> float:
        """Of queries, slots, lists and the output, each once. Kernels read a slot once per row that lists it."""
        rows, slots = self.problem.qo_lens[0], self.problem.kv_lens[0]
        columns = rows * self.problem.num_qo_heads * (CKV + KPE + CKV) + slots * (CKV + KPE)
        return float(columns * getattr(torch, self.problem.dtype).itemsize + rows * self.topk * 4)

    def lists(self, device: torch.device) -> torch.Tensor:
        """int32 ``[rows, 1, topk]``, in random order."""
        generator = torch.Generator(device).manual_seed(1)
        rows, slots = self.problem.qo_lens[0], self.problem.kv_lens[0]
        step = max(1, DRAWN // slots)
        some = [
            torch.rand(min(step, rows - first), slots, generator=generator, device=device).topk(self.topk, 1).indices
            for first in range(0, rows, step)
        ]
        return torch.cat(some).int().unsqueeze(1)


@dataclass
class Selected:
    """The tensors of a problem, whose values are the first columns of its keys, and the lists of its rows."""

    inputs: Inputs
    lists: torch.Tensor


def _inputs(case: MlaSparse, device: torch.device) -> Selected:
    x, lists = make_inputs(case.problem, device), case.lists(device)
    seen = torch.zeros(x.q.size(0), x.k.size(0), dtype=torch.bool, device=device)
    seen.scatter_(1, lists[:, 0].long(), True)
    return Selected(dataclasses.replace(x, v=x.k[..., :CKV], mask=seen), lists)


# --- who attends -------------------------------------------------------------------------------------------------


def _prefill(call: Any, x: Selected) -> Timed:
    """flash_mla_sparse_fwd(), ours or FlashMLA's."""
    given = (x.inputs.q, x.inputs.k, x.lists, SCALE, CKV, x.inputs.sinks)
    return Timed(functools.partial(call, *given), output=lambda returned: returned[0])


def ours(library: Any, name: str, case: MlaSparse, x: Selected) -> Timed:
    """flash_mla_sparse_fwd(), which chooses a kernel; by name attention(), which writes as much."""
    if name == "auto":
        return _prefill(importlib.import_module(f"{library.__name__}.flash_mla").flash_mla_sparse_fwd, x)
    return Timed(_attention(library, name, x), output=lambda returned: returned[0])


def _attention(library: Any, name: str, x: Selected) -> Any:
    q, k, sinks = x.inputs.q, x.inputs.k, x.inputs.sinks
    max_logits = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    options = dict(kv_indices_per_token=x.lists, max_logits=max_logits, sinks=sinks, sm_scale=SCALE)
    options |= dict(return_lse=True, lse_base=math.e, backend=name)
    return functools.partial(library.attention, q, k, k[..., :CKV], **options)


def _refused(library: Any, name: str, case: MlaSparse, device: torch.device) -> str | None:
    """Why this library does not serve ``case``: explain() does not know of lists, so a small call is tried."""
    reason = api.refused(library, name, case, device)
    if reason is not None or name == "reference" or device.type != "cuda":
        return reason
    small = dataclasses.replace(case.problem, qo_lens=(1,), kv_lens=(64,))
    x = _inputs(MlaSparse(small, min(case.topk, 64)), device)
    for backend in ("fa3", "fa2") if name == "auto" else (name,):
        try:
            _attention(library, backend, x)()
            return None
        except Exception as error:  # an older build raises TypeError, a kernel that has no lists BackendError
            reason = " ".join(str(error).split())
    return reason


def flash_mla(case: MlaSparse, x: Selected) -> Timed:
    return _prefill(module("flash_mla").flash_mla_sparse_fwd, x)


def _only_bfloat16(case: MlaSparse, device: torch.device) -> str | None:
    return None if case.problem.dtype == "bfloat16" else "FlashMLA's prefill has bfloat16 alone"


# --- workloads ---------------------------------------------------------------------------------------------------


def mla_sparse(dtype: str) -> list[MlaSparse]:
    """The sizes of DeepSeek V3.2 that FlashMLA's tests measure, with sinks as there, and those of 64 heads."""
    cases = []
    for heads, topk in ((128, 2048), (64, 512)):
        for slots in (8192, 32768, 65536, 98304, 131072):
            sizes = ((4096,), (slots,), heads, 1, CKV + KPE, CKV)
            problem = Problem(
                f"{heads} heads, top-k {topk}", tokens(slots), *sizes, causal=False, sinks=True, dtype=dtype
            )
            cases.append(MlaSparse(problem, topk))
    return cases


_SERVED = frozenset({"gqa", "sinks", "head_dim_vo"})
OPERATION = Operation(
    "latent attention (MLA) of 4096 rows, each to selected tokens among 8k to 128k slots of 576 columns",
    ("TFLOP/s", "us"),
    api.our_columns(ours, _refused),
    [Backend("flash_mla", False, _SERVED, needs_module("flash_mla"), flash_mla, _only_bfloat16)],
    {"mla-sparse": Workload("128 heads and 2048 tokens, 64 heads and 512, over 8k to 128k slots", mla_sparse)},
    "mla-sparse",
    ("auto", "fa3", "flash_mla"),
    _inputs,
    lambda case, x: check.expect(case.problem, x.inputs),
)
