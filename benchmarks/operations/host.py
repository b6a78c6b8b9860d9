"""`host`: the host's time per call."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import api
import torch
from backend import ALL, Backend, Operation, Workload, module, needs_cuda
from inputs import Inputs
from problem import Problem
from timing import Timed

from .fused import Fused, fused
from .plan_free import attention
from .prefill import sdpa


@dataclass(frozen=True)
class Host:
    """One call of the API on a problem so small that the host's share of the time is what is left."""

    call: str  # single_prefill, fmha_v2, attention, ragged_run, ragged_plan, paged_run, paged_plan
    batch: int
    indptr: str = "cpu"  # where the index tensors given to plan() are
    group: str = "host"
    work: float = 1.0
    bytes: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.group} {self.column}"

    @property
    def column(self) -> str:
        kind = "paged " if self.paged else ""
        if self.call.endswith("_plan"):
            return f"{kind}plan() of {self.batch}, {self.indptr} {'indices' if self.paged else 'offsets'}"
        if self.call == "fmha_v2":
            return f"trtllm_fmha_v2_prefill of {self.batch}"
        if self.call == "attention":
            return f"attention() of {self.batch}"
        return f"{kind}run() of {self.batch}" if self.call.endswith("_run") else self.call

    @property
    def detail(self) -> str:
        keys = "256 keys in pages of 16" if self.paged else "16 keys"
        return f"16 rows and {keys} per request, 8/2 heads, head_dim 64, bfloat16"

    @property
    def paged(self) -> bool:
        return self.call.startswith(("paged_", "attention"))

    @property
    def features(self) -> frozenset[str]:
        return self.problem.features

    @property
    def problem(self) -> Problem:
        rows, keys = (16,) * self.batch, (256 if self.paged else 16,) * self.batch
        return Problem(self.group, self.column, rows, keys, 8, 2, 64, 64, page_size=16 if self.paged else 0)


def call(library: Any, name: str, case: Host, x: Inputs) -> Timed:
    """The calls of FlashInfer's API, which is also ours."""
    problem = case.problem
    if case.call == "fmha_v2":
        return fused(library, Fused(problem, "CONTIGUOUS_Q_KV"), x)
    if case.call == "attention":
        return attention(library, problem, x, name)
    if case.call == "single_prefill":
        return Timed(functools.partial(library.single_prefill_with_kv_cache, x.q, x.k, x.v, backend=name, causal=True))
    wrapper = api.wrapper(library, problem, x, name)
    plan = api.plan(wrapper, problem, x.indices(on_device=case.indptr != "cpu"), causal=True)
    if case.call.endswith("_plan"):
        return Timed(plan)
    plan()
    return Timed(functools.partial(wrapper.run, *x.run_arguments))


def _flashinfer(name: str, case: Host, x: Inputs) -> Timed:
    return call(module("flashinfer.prefill" if case.call == "fmha_v2" else "flashinfer"), name, case, x)


def _torch(case: Host, x: Inputs) -> Timed:
    return sdpa([torch.nn.attention.SDPBackend.FLASH_ATTENTION], case.problem, x)


def _torch_add(case: Host, x: Inputs) -> Timed:
    """The measure of a host: a small addition into a tensor that exists."""
    a = torch.ones(16, device=x.q.device)

    def add() -> None:
        torch.add(a, a, out=a)

    return Timed(add)


def _has(case: Host, device: torch.device) -> str | None:
    return "has no such call" if case.call == "attention" else None


def _only_single(case: Host, device: torch.device) -> str | None:
    return None if case.call == "single_prefill" else "has no such call"


def calls(dtype: str) -> list[Host]:
    return [
        Host("single_prefill", 1),
        Host("fmha_v2", 8),
        Host("ragged_run", 8),
        Host("ragged_plan", 8),
        Host("ragged_plan", 8, "cuda"),
        Host("ragged_plan", 128),
        Host("ragged_plan", 256),
        Host("paged_run", 8),
        Host("paged_run", 128),
        Host("attention", 8),
        Host("attention", 128),
        Host("paged_plan", 128),
        Host("paged_plan", 128, "cuda"),
    ]


OPERATION = Operation(
    "the host's time per call",
    ("us",),
    api.our_columns(call),
    [
        Backend("torch_add", False, ALL, needs_cuda, _torch_add),
        Backend("torch_fa2", False, frozenset({"causal", "gqa"}), needs_cuda, _torch, _only_single),
        *(replace(column, refuses=_has) for column in api.flashinfer_columns(_flashinfer)),
    ],
    {"calls": Workload("host time of single_prefill, attention(), run() and plan()", calls)},
    "calls",
    ("auto", "torch_add", "torch_fa2", "flashinfer_fa2", "flashinfer_fa3"),
    host_clock=True,
    yardstick="torch_add",
)
