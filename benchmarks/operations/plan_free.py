"""`plan_free`: decode steps, appends, mixtures and prompts through attention(), beside the wrappers with a plan.

Each column takes copies of the cache in turn, so that none of it is found in L2.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import api
import torch
from backend import ALL, ONLY_OURS, Backend, Operation, Workload, needs_module, needs_nothing
from backend import module as loaded
from inputs import Inputs
from lengths import tokens
from problem import Problem
from timing import Timed

from .prefill import page_table


def _lengths(case: Problem, x: Inputs) -> dict[str, Any]:
    """What tells the lengths of requests, but for pages."""
    return {"cu_seqlens_q": x.qo_indptr_device, "max_seqlen_q": max(case.qo_lens), "causal": case.causal}


def _caches(x: Inputs) -> Any:
    """Pairs of key and value caches, in turns."""
    assert x.pages is not None
    pairs = [tuple(c.unbind(1)) if isinstance(c, torch.Tensor) else c for c in x.pages.copies]
    return itertools.cycle(pairs)


def attention(library: Any, case: Problem, x: Inputs, backend: str = "auto", batch_invariant: bool = False) -> Timed:
    """attention(), with lengths and page table on the device."""
    options = _lengths(case, x) | {"backend": backend, "batch_invariant": batch_invariant}
    if x.pages is None:
        call = functools.partial(
            library.attention, x.q, x.k, x.v, cu_seqlens_k=x.kv_indptr_device, max_seqlen_k=max(case.kv_lens), **options
        )
        return Timed(call)
    options |= {"page_table": page_table(x.pages).to(x.q.device), "seqused_k": x.kv_indptr_device.diff()}
    if set(case.qo_lens) == {1}:  # a decode step
        q = x.q.unsqueeze(1)
        del options["cu_seqlens_q"], options["max_seqlen_q"]
    else:
        q = x.q
    caches = _caches(x)
    return Timed(lambda: library.attention(q, *next(caches), **options), output=lambda out: out.flatten(0, -3))


def planned(library: Any, case: Problem, x: Inputs) -> Timed:
    """run() of a wrapper that has been planned."""
    decodes = set(case.qo_lens) == {1} and case.page_size > 0
    if decodes:
        assert x.pages is not None
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(api.workspace(x.q.device), "NHD")
        sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.page_size)
        dtype = getattr(torch, case.dtype)
        wrapper.plan(*x.indices(on_device=False)[1:], *sizes, q_data_type=dtype, kv_data_type=dtype)
    else:
        wrapper = api.wrapper(library, case, x, "auto")
        api.plan(wrapper, case, x.indices(on_device=False), **api.options(case))()
    if x.pages is None:
        return Timed(functools.partial(wrapper.run, *x.run_arguments))
    caches = _caches(x)
    return Timed(lambda: wrapper.run(x.q, next(caches)))


def flash_attn_3(case: Problem, x: Inputs, schedules_once: bool = False) -> Timed:
    """`schedules_once`: get_scheduler_metadata() is called beforehand, as vLLM does once per step for all layers."""
    library = loaded("flash_attn_interface")
    options = _lengths(case, x)
    if x.pages is None:
        lengths = {"cu_seqlens_k": x.kv_indptr_device, "max_seqlen_k": max(case.kv_lens)}
        call = functools.partial(library.flash_attn_varlen_func, x.q, x.k, x.v, **lengths, **options)
        return Timed(call, output=_first)
    options |= {"page_table": page_table(x.pages).to(x.q.device), "cache_seqlens": x.kv_indptr_device.diff()}
    q = x.q
    if set(case.qo_lens) == {1}:
        q = q.unsqueeze(1)
        del options["cu_seqlens_q"], options["max_seqlen_q"]
    if schedules_once:
        sizes = (len(case.qo_lens), max(case.qo_lens), options["page_table"].size(1) * case.page_size)
        heads = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk)
        options["scheduler_metadata"] = library.get_scheduler_metadata(
            *sizes,
            *heads,
            options["cache_seqlens"],
            cu_seqlens_q=options.get("cu_seqlens_q"),
            page_size=case.page_size,
            causal=case.causal,
        )
    caches = _caches(x)
    return Timed(
        lambda: library.flash_attn_with_kvcache(q, *next(caches), **options),
        output=lambda returned: _first(returned).flatten(0, -3),
    )


def _first(returned: Any) -> torch.Tensor:
    out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out


def _case(group: str, column: str, qo: Any, kv: Any, heads: int, kv_heads: int, dtype: str, page_size: int) -> Problem:
    return Problem(group, column, tuple(qo), tuple(kv), heads, kv_heads, 128, 128, dtype=dtype, page_size=page_size)


def decodes(dtype: str) -> list[Problem]:
    """A row per request."""
    return [
        _case(
            f"{heads}/{kv_heads} page {page}",
            f"{n} x {tokens(keys)}",
            (1,) * n,
            (keys,) * n,
            heads,
            kv_heads,
            dtype,
            page,
        )
        for heads, kv_heads in ((32, 8), (8, 1), (64, 8))
        for page in (16, 64)
        for n, keys in ((1, 1024), (1, 4096), (1, 32768), (8, 1024), (16, 4096), (64, 4096), (64, 8192))
    ]


def mixtures(dtype: str) -> list[Problem]:
    """Appends, and a prompt beside decoding requests."""
    cases: list[Problem] = []
    for heads, kv_heads in ((32, 8), (8, 1), (64, 8)):
        for n, rows, keys in ((1, 64, 8192), (8, 64, 8192), (1, 16, 32768), (1, 512, 16384), (64, 4, 4096)):
            group = f"{heads}/{kv_heads} page 16"
            cases.append(
                _case(group, f"{n} x {rows} over {tokens(keys)}", (rows,) * n, (keys,) * n, heads, kv_heads, dtype, 16)
            )
        for keys in (1024, 4096):
            lens = (2048,) + (1,) * 64, (2048,) + (keys,) * 64
            cases.append(_case(group, f"2k + 64 x 1 over {tokens(keys)}", *lens, heads, kv_heads, dtype, 16))
    return cases


def prompts(dtype: str) -> list[Problem]:
    """Long prompts, with pages and without."""
    ragged = [
        _case("32/8 prompts", f"{n} x {tokens(rows)}", (rows,) * n, (rows,) * n, 32, 8, dtype, 0)
        for n, rows in ((16, 1024), (4, 4096), (1, 16384))
    ]
    return ragged + [replace(case, group="32/8 prompts, page 16", page_size=16) for case in ragged]


def _ours(library: Any) -> list[Backend]:
    return [
        Backend(name, True, ALL | ONLY_OURS, needs_nothing, functools.partial(make, library))
        for name, make in (
            ("attention", attention),
            ("planned", planned),
            ("batch_invariant", functools.partial(attention, batch_invariant=True)),
        )
    ]


OPERATION = Operation(
    "attention() and the planned wrappers, which compute the same",
    ("us", "TFLOP/s"),
    _ours,
    [
        Backend("flash_attn_3", False, ALL, needs_module("flash_attn_interface"), flash_attn_3),
        Backend(
            "flash_attn_3_scheduled",
            False,
            ALL,
            needs_module("flash_attn_interface"),
            functools.partial(flash_attn_3, schedules_once=True),
            lambda case, device: None if case.page_size else "flash_attn_varlen_func takes no scheduler metadata",
        ),
    ],
    {
        "plan_free": Workload("decode steps over pages of 16 and 64", decodes),
        "plan_free_mixtures": Workload("appends; a prompt beside decoding requests", mixtures),
        "plan_free_prompts": Workload("long prompts, with pages and without", prompts, ("TFLOP/s", "us")),
    },
    "plan_free",
    ("attention", "planned", "flash_attn_3", "flash_attn_3_scheduled"),
)
