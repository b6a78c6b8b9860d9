"""Makes ``_core/signatures.pyi``: what type checkers see of functions that return one tensor or two.

    python tools/make_signatures.py            writes it; a test says when it is stale

Each has three signatures, all from the function itself: without the flag a tensor, with it a pair, with a bool variable
either.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cutlass_kernels as ck
from cutlass_kernels import flash_attn, mla

TARGET = Path(__file__).resolve().parent.parent / "python" / "cutlass_kernels" / "_core" / "signatures.pyi"
FLAGS = ("return_lse", "save_softmax_stats")
HEADER = '''"""Made by tools/make_signatures.py: see signatures.py."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from torch import Tensor

from .schedules import Schedule

S = TypeVar("S", bound=Callable[..., Any])

def typed_as(signature: S) -> Callable[[Callable[..., Any]], S]: ...
def declares(implementation: Callable[..., Any]) -> Callable[[S], S]: ...
'''
EMPTY = inspect.Parameter.empty
KEYWORD, EITHER = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True)
class Typed:
    """A function, those that its ``**more`` go to, the arguments that may follow as ``*args``.

    ``pair``: it returns a pair, and has no flag. ``by_position``: three scales may follow the tensors as tensors, which
    have no keywords.
    """

    name: str  # in signatures.pyi
    functions: tuple[Callable[..., Any], ...]
    positions: tuple[str, ...] = ("return_lse",)
    pair: bool = False
    by_position: bool = False


def of_wrapper(name: str, owner: Any, *more: Callable[..., Any], scales: bool = True) -> list[Typed]:
    """The four methods of a wrapper."""
    positions = getattr(owner, "_positions_of_run", ("return_lse",))
    run, forward = (owner.run, *more), (owner.forward, owner.run, *more)
    return [
        Typed(f"{name}.run", run, positions, by_position=scales),
        Typed(f"{name}.run_return_lse", run, positions, pair=True, by_position=scales),
        Typed(f"{name}.forward", forward, positions),
        Typed(f"{name}.forward_return_lse", forward, positions, pair=True),
    ]


def every() -> list[Typed]:
    paged, sink = ck.BatchPrefillWithPagedKVCacheWrapper, ck.BatchAttentionWithAttentionSinkWrapper
    single = ck.single_prefill_with_kv_cache
    functions: list[Any] = [ck.single_decode_with_kv_cache, ck.attention, ck.trtllm_fmha_v2_prefill]
    functions += [ck.trtllm_batch_decode_with_kv_cache, ck.trtllm_batch_context_with_kv_cache]
    functions += [ck.xqa_batch_decode_with_kv_cache]
    functions += [flash_attn.flash_attn_func, flash_attn.flash_attn_qkvpacked_func]
    functions += [flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache]
    return [
        Typed(single.__name__, (single,)),
        Typed(f"{single.__name__}_return_lse", (ck.single_prefill_with_kv_cache_return_lse, single)),
        *(Typed(x.__name__, (x,)) for x in (*functions, mla.trtllm_batch_decode_with_kv_cache_mla)),
        *of_wrapper("PagedPrefill", paged),
        *of_wrapper("RaggedPrefill", ck.BatchPrefillWithRaggedKVCacheWrapper),
        *of_wrapper("PagedDecode", ck.BatchDecodeWithPagedKVCacheWrapper, paged.run, scales=False),
        Typed("SinkPrefill.run", (sink.run, paged.run)),
        Typed("SinkPrefill.run_return_lse", (sink.run, paged.run), pair=True),
        Typed("Cascade.run", (ck.MultiLevelCascadeAttentionWrapper.run,)),
        Typed("Blocks.run", (ck.BlockSparseAttentionWrapper.run,)),
        Typed("VariableBlocks.run", (ck.VariableBlockSparseAttentionWrapper.run,)),
        Typed("MlaWrapper.run", (ck.BatchMLAPagedAttentionWrapper.run,)),
    ]


def rendered(kind: Any) -> str:
    """A type as source."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is type(None):
        return "None"
    if kind is Ellipsis:
        return "..."
    if origin is not None and hasattr(origin, "__qualname__") and origin in (tuple, list):
        return f"{origin.__qualname__}[{', '.join(map(rendered, arguments))}]"
    if arguments:
        return " | ".join(map(rendered, arguments))
    if kind is Any:
        return "Any"
    return "torch.dtype" if kind is torch.dtype else str(kind.__name__)


def parameters(typed: Typed) -> tuple[list[inspect.Parameter], dict[str, Any]]:
    """All parameters of a function, in order, and their types."""
    types: dict[str, Any] = {}
    found: dict[str, inspect.Parameter] = {}
    keywords: dict[str, inspect.Parameter] = {}
    first, *others = (inspect.signature(x).parameters.values() for x in typed.functions)
    for function in reversed(typed.functions):
        types |= typing.get_type_hints(function)
    takes_more = any(x.kind is x.VAR_KEYWORD for x in first)
    for parameter in first:
        if parameter.kind is parameter.VAR_POSITIONAL:
            for name in typed.positions:
                given = inspect.signature(typed.functions[0]).parameters[name]
                found[name] = given.replace(kind=EITHER)
        elif parameter.kind is EITHER:
            found[parameter.name] = parameter
        elif parameter.kind is KEYWORD and parameter.name not in found:
            keywords[parameter.name] = parameter
    for parameter in (x for more in others for x in more if takes_more):
        is_option = parameter.kind is KEYWORD or (parameter.kind is EITHER and parameter.default is not EMPTY)
        if is_option and parameter.name not in found:
            keywords.setdefault(parameter.name, parameter.replace(kind=KEYWORD))
    return [*found.values(), *keywords.values()], types


def declared(given: list[inspect.Parameter], types: dict[str, Any], flag: str, default: str) -> Iterator[str]:
    """The parameters as source; the flag's type is ``flag``, its default ``default``."""
    before = None
    for parameter in given:
        kind = parameter.kind
        if before is inspect.Parameter.POSITIONAL_ONLY and kind is not before:
            yield "/"
        if kind is KEYWORD and before is not KEYWORD:
            yield "*"
        before, name = kind, parameter.name
        if name in FLAGS:
            value = default or ("" if kind is KEYWORD else " = ...")
            yield f"{name}: {flag}{value}"
        else:
            value = "" if parameter.default is EMPTY else f" = {source(parameter.default)}"
            yield f"{name}: {rendered(types.get(name, Any))}{value}"


def source(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def laid_out(name: str, words: list[str], result: str, indent: str) -> str:
    """A function, on one line or with a line for each parameter."""
    line = f"{indent}def {name}({', '.join(words)}) -> {result}: ..."
    if len(line) <= 120:
        return line
    rows = "".join(f"\n{indent}    {word}," for word in words)
    return f"{indent}def {name}({rows}\n{indent}) -> {result}: ..."


def overloads(typed: Typed) -> Iterator[str]:
    owner, _, name = typed.name.rpartition(".")
    indent = "    " if owner else ""
    given, types = parameters(typed)
    results = [("Literal[False]", " = False", "Tensor"), ("Literal[True]", "", "tuple[Tensor, Tensor]")]
    results.append(("bool", "", "Tensor | tuple[Tensor, Tensor]"))
    if typed.pair:
        given = [x for x in given if x.name not in FLAGS]
        results = [("", "", "tuple[Tensor, Tensor]")]
    elif not any(x.name in FLAGS for x in given):
        results = [("", "", rendered(types["return"]))]
    elif next(x.default for x in given if x.name in FLAGS) is True:
        results = [("Literal[True]", " = True", "tuple[Tensor, Tensor]")]
    forms = [given]
    if typed.by_position:
        tensors = [x.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for x in given if x.default is EMPTY]
        scales = [inspect.Parameter(f"scale_{x}", inspect.Parameter.POSITIONAL_ONLY) for x in "qkv"]
        types |= dict.fromkeys((x.name for x in scales), torch.Tensor)
        of_scales = {*typed.positions, "q_scale", "k_scale", "v_scale"} - {*FLAGS}
        others = [x.replace(kind=KEYWORD) for x in given if x.default is not EMPTY and x.name not in of_scales]
        forms.append([*tensors, *scales, *others])
    signatures = []
    for form in forms:
        for flag, default, result in results:
            signatures.append(laid_out(name, [*declared(form, types, flag, default)], result, indent))
    for one in signatures:
        if len(signatures) > 1:
            yield f"{indent}@overload"
        yield one


def made() -> str:
    lines, owner = [HEADER.rstrip()], ""
    for typed in every():
        of = typed.name.rpartition(".")[0]
        if of and of != owner:
            lines.append(f"\nclass {of}(Protocol):")
        owner = of
        lines += overloads(typed)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TARGET.write_text(made())
