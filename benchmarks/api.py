"""The calls of FlashInfer's API, which is also ours: ``library`` is either, or another build of this library."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from backend import ALL, ONLY_OURS, Backend, needs_module, needs_nothing
from inputs import Inputs
from problem import Problem
from timing import Timed

WORKSPACE_BYTES = 128 << 20


def workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)


def options(case: Problem) -> dict[str, Any]:
    """Options that plan() and single_prefill have."""
    return {"causal": case.causal, "window_left": case.window_left, "logits_soft_cap": case.soft_cap or None}


def wrapper(library: Any, case: Problem, x: Inputs, name: str) -> Any:
    """The wrapper for batches of prefill, with the backend of this name."""
    kind = "BatchPrefillWithPagedKVCacheWrapper" if case.page_size else "BatchPrefillWithRaggedKVCacheWrapper"
    return getattr(library, kind)(workspace(x.q.device), "NHD", backend=name)


def plan(wrapper: Any, case: Problem, indices: tuple[torch.Tensor, ...], **options: Any) -> Callable[[], None]:
    """A call of its plan()."""
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, *([case.page_size] if case.page_size else []))
    options |= {"head_dim_vo": case.head_dim_vo, "q_data_type": getattr(torch, case.dtype)}
    if case.fp8:
        options["o_data_type"] = torch.bfloat16
    return functools.partial(wrapper.plan, *indices, *sizes, **options)


# --- the columns of a library ------------------------------------------------------------------------------------


def refused(library: Any, name: str, case: Any, device: torch.device, kv_dtype: str | None = None) -> str | None:
    """Why this library does not serve the problem of ``case`` with the backend of this name.

    ``kv_dtype`` is the element type of keys and values, if not that of the problem.
    """
    problem: Problem = case.problem
    explanation = library.explain(
        device=device,
        q_dtype=problem.dtype,
        kv_dtype=kv_dtype,
        num_qo_heads=problem.num_qo_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_vo=problem.head_dim_vo,
        features=problem.features & {"causal", "window", "soft_cap", "sinks", "paged", "custom_mask", "alibi"},
    )
    if name != "auto":
        return " ".join(explanation.reasons[name]) or None
    if device.type == "cuda" and explanation.selected == "reference":
        return "no kernel serves this case, so auto would time the PyTorch reference"
    return None


def our_columns(
    make: Callable[[Any, str, Any, Any], Timed],
    refuses: Callable[[Any, str, Any, torch.device], str | None] = refused,
) -> Callable[[Any], list[Backend]]:
    """Of a build of this library, a column per ``backend=``; ``make(library, name, case, inputs)`` is what to time."""

    def columns(library: Any) -> list[Backend]:
        return [
            Backend(
                name,
                True,
                ALL | ONLY_OURS,
                needs_nothing,
                functools.partial(make, library, name),
                functools.partial(refuses, library, name),
            )
            for name in ("fa2", "fa3", "auto", "reference")
        ]

    return columns


def flashinfer_columns(make: Callable[[str, Any, Any], Timed]) -> list[Backend]:
    honours = ALL - {"sinks"}  # those are another wrapper's there, compiled at run time
    missing = needs_module("flashinfer")
    return [
        Backend(f"flashinfer_{name}", False, honours, missing, functools.partial(make, name)) for name in ("fa2", "fa3")
    ]
