"""`decode`: a token per request through the wrapper for decode, one request through single_decode_with_kv_cache."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import api
import torch
from backend import Backend, Operation, Workload, module, needs_module
from inputs import Inputs
from lengths import tokens
from problem import Problem
from timing import Timed


def _decode(library: Any, case: Problem, x: Inputs, options: dict[str, Any]) -> Timed:
    """The wrapper, on copies of the cache in turn. ``options`` are those of its constructor."""
    assert x.pages is not None
    pages = x.pages
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(api.workspace(x.q.device), "NHD", **options)
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.page_size)
    dtype = getattr(torch, case.dtype)
    wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, *sizes, q_data_type=dtype, kv_data_type=dtype)
    caches = itertools.cycle(pages.copies)
    return Timed(lambda: wrapper.run(x.q, next(caches)))


def _single(library: Any, x: Inputs, **options: Any) -> Timed:
    call = functools.partial(library.single_decode_with_kv_cache, x.q[0], x.k, x.v, **options)
    return Timed(call, output=lambda out: out.unsqueeze(0))


def ours(library: Any, name: str, case: Problem, x: Inputs) -> Timed:
    if x.pages is None:
        return _single(library, x, backend=name)
    return _decode(library, case, x, {"backend": name})


def flashinfer(tensor_cores: bool, case: Problem, x: Inputs) -> Timed:
    """FlashInfer has two kernels for decode: of its own, and that of prefill."""
    library = module("flashinfer")
    if x.pages is None:
        return _single(library, x, use_tensor_cores=tensor_cores)
    return _decode(library, case, x, {"use_tensor_cores": tensor_cores})


def decode(dtype: str) -> list[Problem]:
    """A token per request over pages of 16, with 1 to 16 query heads to a key head; and one request without pages."""
    cases: list[Problem] = []

    def add(batch: int, keys: int, heads: int, kv_heads: int, dim: int = 128, page_size: int = 16) -> None:
        rows, lens = (1,) * batch, (keys,) * batch
        group = f"{heads}/{kv_heads} hd{dim}" + ("" if page_size else ", single_decode")
        column = f"{batch} x {tokens(keys)}"
        cases.append(
            Problem(group, column, rows, lens, heads, kv_heads, dim, dim, True, dtype=dtype, page_size=page_size)
        )

    for batch, keys in (
        (1, 1024), (1, 4096), (1, 32768), (8, 1024), (16, 4096), (32, 4096), (64, 4096), (128, 2048), (64, 8192),
    ):  # fmt: skip
        add(batch, keys, 32, 8)
    for heads, kv_heads in ((8, 8), (64, 8), (128, 8), (8, 1)):
        for batch, keys in ((1, 4096), (16, 4096), (64, 4096)):
            add(batch, keys, heads, kv_heads)
    for dim, heads, kv_heads in ((64, 64, 8), (256, 16, 4)):
        for batch, keys in ((1, 4096), (64, 4096)):
            add(batch, keys, heads, kv_heads, dim)
    for keys in (4096, 32768):
        add(1, keys, 32, 8, page_size=0)
    return cases


OPERATION = Operation(
    "a token per request through the wrapper for decode, one request through single_decode_with_kv_cache",
    ("us", "TB/s"),
    api.our_columns(ours),
    [
        Backend(
            name,
            False,
            frozenset({"causal", "ragged", "append", "gqa", "paged"}),
            needs_module("flashinfer"),
            functools.partial(flashinfer, tensor_cores),
        )
        for name, tensor_cores in (("flashinfer", False), ("flashinfer_tc", True))
    ],
    {"decode": Workload("1 to 128 requests over 1k to 32k keys, groups of 1 to 16 heads", decode)},
    "decode",
    ("auto", "flashinfer", "flashinfer_tc"),
)
