"""What calls of process groups must give: those of a whole problem, by the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cp_calls
import torch
from compare import assert_close, assert_lse_close
from plan_free_problems import Mask, Options, expect
from problems import FP8


def check_prefill(
    processes: Any, shape: int | tuple[int, int], problem: dict[str, Any], options: dict[str, Any], pages: int = 0
) -> None:
    found = processes.run(cp_calls.prefill, shape, problem, options, pages)
    _compare(found, problem, {"lse_base": math.e} | options)
    assert sorted(torch.cat([rows for *_, rows in found]).tolist()) == list(range(sum(problem["q_lens"])))


def check_decode(
    processes: Any,
    world: int,
    problem: dict[str, Any],
    options: dict[str, Any],
    form: str = "pages",
    function: Callable[..., Any] = cp_calls.decode,
) -> None:
    states = processes.run(function, world, problem, options, form)
    found = [(out.flatten(0, -3), lse.flatten(0, -2)) for out, lse in states]
    if options.get("gather_heads", True) and options.get("scatter_heads", True):
        found = [tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))]
    given = {"lse_base": 2} | options | {"causal": True}
    _compare([(out, lse, slice(None)) for out, lse in found], problem, given)


def _compare(found: list[Any], problem: dict[str, Any], options: dict[str, Any]) -> None:
    """``found``: outputs and LSEs, with their rows in the whole problem."""
    want, want_lse, base = _expected(problem, options)
    for out, lse, rows in found:
        if problem["dtype"] in FP8:  # as the tests of attention() on one device
            assert_close(out, want[rows], atol=0.12, rtol=0.12, dtype=torch.bfloat16)
        else:
            assert_close(out, want[rows], base[rows], dtype=problem["dtype"])
        lse_error = 5e-3 if problem.get("kv_dtype") in FP8 else None
        assert_lse_close(lse * math.log2(options["lse_base"]), want_lse[rows], atol=lse_error)


def _expected(problem: dict[str, Any], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch = cp_calls.batch_of(problem)
    mask = Mask(options.get("causal", False), options.get("window", (-1, -1)), options.get("chunk_size", 0))
    factors = {name: options[name] for name in ("q_descale", "k_descale", "v_descale") if name in options}
    factors = {name: x[0] if len(x) == 1 else x for name, x in factors.items()}  # a row for all requests
    if "sm_scale" in options:
        factors["q_descale"] = options["sm_scale"] * batch.q.size(2) ** 0.5
    return expect(batch, mask, Options(options.get("logits_soft_cap"), options.get("sinks"), descales=factors))
