"""The one description of attention: ``Call``, a table of the arguments of ``attention()``.

A field is a row: name, type, default, and what it means. Everything else follows from the rows:

- the signature and the documentation of ``attention()`` (``function()``, ``documented()``), and the way by which other
  functions call it (``packer()``);
- the operator that stands for a call in a graph (``_graphs.operators``);
- the order in which the compiled module reads a call (the build makes an enumeration of the rows, call_arguments.h).

A new argument is a row here, a check in ``checked_calls.checked()`` and a reading in bindings/call.cpp.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, get_args, get_type_hints

import torch

from . import checks, hints
from .schedules import Schedule

Scale = float | torch.Tensor | None


class Call(NamedTuple):
    """The arguments of a call, in the order of the compiled module. "..." is explained with the row below."""

    q: Annotated[torch.Tensor, "float16, bfloat16, or float8_e4m3fn with k and v of the same type."]
    k: Annotated[torch.Tensor, ...]
    v: Annotated[
        torch.Tensor,
        "the dtype of q, or fp8. ``Hkv`` divides ``Hq``; query head h reads key head ``h // (Hq // Hkv)``. v may have "
        "another head dimension.",
    ]
    q_rope: Annotated[
        torch.Tensor | None,
        "the last columns of the queries, shaped as q but for the last dimension, where q has only the first.",
    ] = None
    k_rope: Annotated[
        torch.Tensor | None,
        "the same of the keys. v is then k itself, in the same memory. Either may be given alone, and both may be "
        "views of the rows that q and k are views of.",
    ] = None
    cu_seqlens_q: Annotated[torch.Tensor | None, ...] = None
    cu_seqlens_k: Annotated[torch.Tensor | None, "indptrs of requests, in rows and keys."] = None
    seqused_q: Annotated[torch.Tensor | None, ...] = None
    seqused_k: Annotated[
        torch.Tensor | None,
        "int32 ``[B]``, how many rows and keys of each request are used. Other rows of the output are not written.",
    ] = None
    kv_shard: Annotated[
        tuple[int, int, int] | None,
        "``(world, rank, block)``, where the keys of requests are spread over ranks: block i of ``block`` keys is rank "
        "``i % world``'s, and k and v hold this rank's, in order. ``seqused_k``, which it needs, then counts the keys "
        "on all ranks together, as do masks. The result is partial, over the keys of this rank: combine those of all "
        "ranks with ``distributed.dcp_combine()``. Not with a custom mask or ALiBi.",
    ] = None
    max_seqlen_q: Annotated[int | None, ...] = None
    max_seqlen_k: Annotated[
        int | None,
        "bounds of the lengths. They decide tiles and splits; rows of a request beyond ``max_seqlen_q`` need not be "
        "computed. Of captured calls, bounds of every replay. Default: what the shapes allow. With ``kv_shard``, "
        "``max_seqlen_k`` bounds the keys here.",
    ] = None
    page_table: Annotated[torch.Tensor | None, ...] = None
    kv_indptr: Annotated[torch.Tensor | None, ...] = None
    kv_indices: Annotated[torch.Tensor | None, ...] = None
    kv_last_page_len: Annotated[torch.Tensor | None, ...] = None
    kv_layout: Annotated[str, "see the table."] = "NHD"
    kv_indices_per_token: Annotated[
        torch.Tensor | None,
        "int32 ``[rows, Hkv, K]``, the keys that each query row sees, in place of all those of its request: slots of "
        "the cache, ``page * page_size + offset``, or rows of ``[tokens, Hkv, D]``. In any order; one that is listed "
        "twice counts twice; out-of-range indices, such as -1, are ignored. For latent attention.",
    ] = None
    topk_length: Annotated[
        torch.Tensor | None,
        "int32 ``[rows]``, or ``[B]`` for q of ``[B, n, Hq, D]``: only the leftmost so many of a row's indices count.",
    ] = None
    extra_k: Annotated[
        torch.Tensor | None,
        "a second cache of selected keys, with the columns and heads of k: one softmax over both (DeepSeek V4 has a "
        "window in k, and here what an indexer selects). Pages of any size, of the dtype of k or quantized. v is k in "
        "the same memory, and the values of these keys are their first columns, too. ``k_descale`` and ``v_descale`` "
        "are factors of both caches.",
    ] = None
    extra_indices_per_token: Annotated[torch.Tensor | None, ...] = None
    extra_topk_length: Annotated[
        torch.Tensor | None, "as ``kv_indices_per_token`` and ``topk_length``, for ``extra_k``."
    ] = None
    kv_format: Annotated[
        str | None,
        "format of a quantized latent cache, uint8 ``[pages, page_size, 1, bytes]``: ``'v3.2'`` has 656 bytes per "
        "token, ``'v4'`` 584, ``'v3.2_nope'``, ``'v4.1_pages'`` and ``'v4.1_tokens'`` 528. Default: from the number of "
        "bytes; required for 528. Pass v=k. Applies to ``extra_k`` as well if that has the same size. A token stands "
        "for bfloat16 numbers, whatever the dtype of q: e4m3 times its scale in fp32, rounded to nearest.",
    ] = None
    max_logits: Annotated[
        torch.Tensor | None,
        "fp32 ``[rows, Hq]``, where to write the largest logit of each row, in natural units and without its sink; "
        "-inf where a row sees no key. Outputs and LSEs with and without it differ by rounding. For latent attention "
        "by ``kv_indices_per_token``.",
    ] = None
    causal: Annotated[bool, ...] = False
    window: Annotated[tuple[int, int], ...] = (-1, -1)
    chunk_size: Annotated[int, "the mask; ``window`` is ``(left, right)``, -1 is no limit."] = 0
    packed_custom_mask: Annotated[
        torch.Tensor | None,
        "uint8, a bit per row and key, packed little-endian: request b's ``[n, m]`` bits begin at byte "
        "``mask_indptr[b]``.",
    ] = None
    mask_indptr: Annotated[torch.Tensor | None, "int32 ``[B + 1]``; not needed for one request."] = None
    logits_soft_cap: Annotated[float | None, "c > 0 replaces a logit s by ``c tanh(s / c)``; None or <= 0 is off."] = (
        None
    )
    sm_scale: Annotated[
        float | None,
        "default ``1 / sqrt(D)``, with all columns of the queries. (DeepSeek's models need another, for 192 columns "
        "before the absorption.)",
    ] = None
    sinks: Annotated[
        torch.Tensor | None, "fp32 ``[Hq]``; adds ``exp(sink)`` to the softmax denominator (and to the LSE)."
    ] = None
    alibi_slopes: Annotated[
        torch.Tensor | None, "fp32 ``[Hq]``; adds ``slope * (j - i)`` to a logit, before the cap."
    ] = None
    q_descale: Annotated[Scale, ...] = None
    k_descale: Annotated[Scale, ...] = None
    v_descale: Annotated[
        Scale,
        "dequantization factors of fp8 tensors: numbers, or fp32 tensors of one element, ``[Hkv]`` or ``[B, Hkv]`` (of "
        "q also ``[Hq]`` and ``[B, Hq]``), which may be expanded.",
    ] = None
    o_dtype: Annotated[
        torch.dtype | None, "dtype of the output; default that of ``out``, of q, or of fp8 q bfloat16."
    ] = None
    out: Annotated[torch.Tensor | None, "where to write the output. Rows behind the last request are not written."] = (
        None
    )
    return_lse: Annotated[bool, "whether to return the LSE too."] = False
    lse_base: Annotated[float, "2, or ``math.e`` for the natural logarithm."] = 2
    lse_heads_first: Annotated[bool, "whether the LSE is ``[Hq, rows]``."] = False
    flash_mla_lse: Annotated[bool, "whether the LSE excludes the sinks, and is +inf where a row sees no key."] = False
    num_splits: Annotated[
        int,
        "KV splits of short queries. 0 chooses from shapes and device facts, 1 splits none, n asks for n on average.",
    ] = 0
    batch_invariant: Annotated[
        bool,
        "the bits of a request's result then depend on nothing but the request, the head counts, the options and the "
        "device. The length of a request decides its kernel and its KV splits, so that a batch of short and long "
        "queries takes up to three kernels. ``num_splits=1`` still means no splits; other numbers are not used. "
        "Decodes and prompts take 0.9 to 1.5 times as long, a prompt beside decodes up to 1.9 times, and a few rows "
        "over long keys 1.1 to 3.2 times, most with few key heads.",
    ] = False
    schedule: Annotated[
        Schedule | None,
        "shared by calls of the same sizes and lengths, such as those of a model's layers; see ``Schedule``.",
    ] = None
    backend: Annotated[
        str, '"auto", "fa3", "fa2" or "reference". "auto" takes the fastest that serves all arguments.'
    ] = "auto"


_ROWS = {name: get_args(row) for name, row in get_type_hints(Call, include_extras=True).items()}
TYPES: dict[str, Any] = {name: row[0] for name, row in _ROWS.items()}
INTERNAL = ("lse_heads_first", "flash_mla_lse")  # not of attention()


def window(value: Any, name: str = "window") -> tuple[int, int]:
    """``(left, right)`` of a window; ValueError for anything else than a pair, TypeError for one not of integers."""
    pair = value.tolist() if isinstance(value, torch.Tensor) else value
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ValueError(f"{name}={hints.shown(value)} is not a pair: pass (left, right), -1 for no limit.")
    left, right = (max(checks.integer(name, x), -1) for x in pair)
    return left, right


def is_natural(lse_base: Any) -> bool:
    """Whether an LSE is to be natural; ValueError for another base."""
    if lse_base not in (2, math.e):
        raise ValueError(f"lse_base={lse_base} is not served: use 2, or math.e for the natural logarithm.")
    return bool(lse_base != 2)


# --- functions ---------------------------------------------------------------------------------------------------


def function(
    name: str, run: Callable[[tuple[Any, ...]], Any], leave_out: tuple[str, ...] = (), result: Any = torch.Tensor
) -> Callable[..., Any]:
    """A function with these arguments, all but q, k and v by keyword, which hands ``run`` the tuple of a call.

    For Python none is keyword-only: a call looks up defaults of those one by one, 0.2 us in all.
    """
    fields = [field for field in Call._fields if field not in leave_out]
    required = [field for field in fields if field not in Call._field_defaults]
    optional = [field for field in fields if field in Call._field_defaults]
    given = [f"_{field}" if field in leave_out else field for field in Call._fields]
    sentence = f"{name}() takes {len(required)} positional arguments: pass the others by keyword."
    lines = [f"if by_position is not ...: raise TypeError({sentence!r})", f"return _run(({', '.join(given)}))"]
    parameters = [*required, "by_position=...", *(f"{field}=_{field}" for field in optional)]
    new = made(name, parameters, lines, Call._field_defaults | {"run": run})
    new.__annotations__ = {field: TYPES[field] for field in fields} | {"return": result}
    signature = inspect.signature(new)
    shown = [x for x in signature.parameters.values() if x.name != "by_position"]
    shown = [x.replace(kind=inspect.Parameter.KEYWORD_ONLY) if x.name in optional else x for x in shown]
    new.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return new


def packer(fields: str, **constants: Any) -> Callable[..., tuple[Any, ...]]:
    """A function that makes the tuple of a call of these arguments, given by position, and constants: for functions
    that call ``attention()`` under other names. (By keyword, it takes 0.9 us longer.)"""
    names, values = fields.split(), Call._field_defaults | constants
    assert {*names, *constants} <= {*Call._fields}, f"{fields} {constants}"
    given = [field if field in names else f"_{field}" for field in Call._fields]
    return made("pack", names, [f"return ({', '.join(given)})"], values)


def made(
    name: str, parameters: list[str], lines: list[str], values: dict[str, Any], scope: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """A function, written out as source like the methods of dataclasses: a wrapper that binds ``**options`` takes 3 us
    longer. Its source reads ``values`` with an underscore before their names, and names of a module from ``scope``."""
    namespace = {**(scope or {}), **{f"_{field}": value for field, value in values.items()}}
    namespace.pop("__name__", None)  # torch.compile would look for the values in that module
    source = "\n    ".join([f"def {name}({', '.join(parameters)}):", *lines])
    exec(compile(source, __file__, "exec"), namespace)
    new: Callable[..., Any] = namespace[name]
    return new


def documented(text: str, leave_out: tuple[str, ...] = INTERNAL) -> str:
    """``text`` with what the rows say in place of ``{arguments}``."""
    lines, names = [], []
    for name, (_, says) in _ROWS.items():
        if name not in leave_out:
            names.append(name)
            if says is not ...:
                lines.append(textwrap.fill(f"{', '.join(names)}: {says}", 108, subsequent_indent=" " * 4))
                names = []
    return inspect.cleandoc(text).rstrip().replace("{arguments}", textwrap.indent("\n".join(lines), " " * 4).lstrip())
