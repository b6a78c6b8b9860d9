"""Copies of queries, keys and values for kernels that read 16 bits and rotate nothing, and outputs of e4m3 from theirs.

A rotary embedding, fp8 keys and values below 16-bit queries, and attention that is fp8 throughout reach the kernels as
a plain 16-bit problem: one pass over memory (``prepare.h``) writes rotated or converted copies into temporaries first.
This module does not handle fp8 tensors that a kernel reads as they are (``kernels.reads_as_is``). Of latent attention
only queries are copied: its values are columns of the keys, in the same memory.

The copy of a paged cache has a page per entry of the page table, as a page that requests share stands at another
position in each. The same pass writes the page tables that belong to it: so nothing of this has to be planned, and what
a captured run reads lives as long as its graph, whatever is planned later.

Of such a problem an e4m3 output is written in float16 first. Another kernel then rounds the rows that were written:
those beyond the last request stay as they are, in replays of a captured run too, whatever lengths these have.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .._core.problems import FP8_DTYPES, HALF_DTYPES, Offsets, Output, PagedKv, Problem, RaggedKv
from .request_facts import DTYPE_NAMES, MOST_SEPARATE_COLUMNS, Request

# What copies make a kernel serve, in the words of the support matrix.
SERVED = ("rope", "fp8", "e4m3_output")
_E4M3 = torch.float8_e4m3fn


def prepared_request(request: Request) -> Request | None:
    """The facts of the problem that ``prepare`` makes of one with these facts; None where no copy is needed."""
    rope = "rope" in request.features
    fp8_q, fp8_kv = request.q_dtype in FP8_DTYPES, request.kv_dtype in FP8_DTYPES
    if not (rope or fp8_q or fp8_kv):
        return None
    dtype, rounded = _copy_dtype(request.q_dtype, request.o_dtype), _is_rounded(request.q_dtype, request.o_dtype)
    fp8_kv = fp8_kv and not _keeps_keys(request.head_dim_qk)
    layout = request.layout
    if layout is not None:  # copies lie in memory as every kernel takes them
        copied = {"q": rope or fp8_q, "k": rope or fp8_kv, "v": fp8_kv, "o": rounded}
        layout = layout._replace(strides=tuple(x for x in layout.strides if not copied.get(x[0])))
    return request._replace(
        q_dtype=dtype,
        kv_dtype=dtype if fp8_kv else request.kv_dtype,
        o_dtype=dtype if rounded else request.o_dtype,
        features=request.features - {"rope", "fp8_copies"},
        layout=layout,
    )


def _keeps_keys(head_dim_qk: int) -> bool:
    """Whether only queries are copied: a copy of the keys would not have values as its columns."""
    return head_dim_qk > MOST_SEPARATE_COLUMNS


def _copy_dtype(q_dtype: torch.dtype, o_dtype: torch.dtype) -> torch.dtype:
    """What copies have: the dtype of q, or where that is fp8 the output's. Both 16-bit types hold every fp8 number.

    Other outputs, but those that are rounded, are not for this module to refuse: kernels say what they write.
    """
    if q_dtype not in FP8_DTYPES:
        return q_dtype
    return o_dtype if o_dtype in HALF_DTYPES else torch.float16


def _is_rounded(q_dtype: torch.dtype, o_dtype: torch.dtype) -> bool:
    """Whether a kernel writes float16 in place of the output, from which ``round_output`` makes it."""
    return q_dtype == _E4M3 and o_dtype == _E4M3


def _wide_output(output: Output, unwritten_byte: int) -> Output:
    """A float16 output in place of an e4m3 one, marked as not written."""
    wide = torch.empty(output.out.shape, dtype=torch.float16, device=output.out.device)
    wide.view(torch.uint8).fill_(unwritten_byte)
    return dataclasses.replace(output, out=wide)


def round_output(wide: torch.Tensor, out: torch.Tensor, module: Any, stream: int) -> None:
    """Rounds to e4m3 what the kernel has written: beyond 448 it becomes 448 (float16 has made 65520 and more infinite),
    NaN stays NaN. ``module`` is ``_C``.
    """
    module.round_output(*out.shape, *_place(wide), *_place(out), stream)


def is_needed(problem: Problem) -> bool:
    """Whether a kernel that reads 16 bits needs copies. Part of every call."""
    kv = problem.kv
    k = kv.k if isinstance(kv, RaggedKv) else kv.k_cache
    return problem.logits.rope is not None or k.element_size() == 1


def prepare(problem: Problem, offsets: Offsets | None, module: Any, stream: int) -> Problem:
    """Makes the copies that ``problem`` needs, on the current stream, and returns the problem that a kernel computes.

    ``offsets`` are those that the runs of a batch read, None for a single request; ``module`` is ``_C``. In what is
    returned, a paged cache has page tables for keys and for values: with a page number of -1 where the cache has no
    such page. Its output is another where ``round_output`` is to follow the kernel.
    """
    q, kv, rope = problem.q, problem.kv, problem.logits.rope
    device, dtype = q.device, _copy_dtype(q.dtype, problem.output.out.dtype)
    rows, num_qo_heads, head_dim_qk = q.shape
    output = problem.output
    if _is_rounded(q.dtype, output.out.dtype):
        output = _wide_output(output, module.unwritten_byte)
    if _keeps_keys(head_dim_qk):
        return dataclasses.replace(problem, q=q.to(dtype), output=output)
    q_copy = k_copy = v_copy = tables = None
    if rope is not None or q.element_size() == 1:
        q_copy = torch.empty((rows, num_qo_heads, head_dim_qk), dtype=dtype, device=device)

    pages = None if offsets is None else offsets.pages
    tokens: tuple[int, ...]
    if isinstance(kv, RaggedKv):
        k, v = kv.k, kv.v
        num_pages = page_size = entries = 0
        tokens = (k.size(0),)
    else:
        assert pages is not None
        k, v = kv.k_cache, kv.v_cache
        num_pages, page_size, entries = min(k.size(0), v.size(0)), pages.page_size, pages.indices.numel()
        tokens = (max(entries, 1), page_size)  # an address, even where there is nothing to read
        tables = torch.empty((2, entries), dtype=torch.int32, device=device)
    num_kv_heads, head_dim_vo = k.size(-2), v.size(-1)
    k_copy = torch.empty((*tokens, num_kv_heads, head_dim_qk), dtype=dtype, device=device)
    if v.element_size() == 1:
        v_copy = torch.empty((*tokens, num_kv_heads, head_dim_vo), dtype=dtype, device=device)

    dtypes, sizes = (q.dtype, k.dtype, dtype), (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo)
    indptrs = (None, None) if offsets is None else (offsets.qo_indptr, offsets.kv_indptr)
    lists = (None,) * 3 if pages is None else (pages.indices, pages.v_indices, pages.last_page_len)
    module.prepare(
        *(DTYPE_NAMES[x] for x in dtypes),
        *sizes,
        1 if offsets is None else offsets.qo_indptr.numel() - 1,
        *map(_address, indptrs),
        rows,
        0 if pages is not None else tokens[0],
        *_place(q),
        *_place(k),
        0 if pages is None else k.stride(0),
        *_place(v),
        0 if pages is None else v.stride(0),
        *map(_address, lists),
        page_size,
        entries,
        num_pages,
        problem.mask.window_left,
        *(rope or (0.0, 0.0)),
        *map(_address, (q_copy, k_copy, v_copy, tables)),
        stream,
    )
    q, v = q if q_copy is None else q_copy, v if v_copy is None else v_copy
    if isinstance(kv, RaggedKv):
        prepared: RaggedKv | PagedKv = RaggedKv(k_copy, v, kv.indptr)
    else:
        assert tables is not None
        prepared = PagedKv(k_copy, v, kv.indptr, tables[0], kv.last_page_len, tables[1])
    logits = problem.logits if rope is None else dataclasses.replace(problem.logits, rope=None)
    return dataclasses.replace(problem, q=q, kv=prepared, logits=logits, output=output)


def _place(x: torch.Tensor) -> tuple[int, int, int]:
    """Address, and strides of tokens and heads."""
    return x.data_ptr(), x.stride(-3), x.stride(-2)


def _address(x: Any) -> int:
    return 0 if x is None else x.data_ptr()
