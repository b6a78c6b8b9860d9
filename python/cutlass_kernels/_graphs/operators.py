"""Attention as operators, which traced calls put into their graph: see ``tracing``.

A graph cannot hold a wrapper. The operator takes the wrapper's number and the tensors; when the graph runs, it runs
what that wrapper has planned by then, with the options in effect by then. So new plans need no new graph, but options
that a traced function assigns to attributes, other than by forward(), come too late. Eager calls never come here.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import is_grad_enabled

from .._core import autograd, checks
from .._core.run_options import Options, Result, RunArgs

_AS_PLANNED: Any = Options(False, None, -1, 0.0, None, None, None, False)  # type: ignore[arg-type]
_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)  # since torch 2.9

# Scales are numbers or tensors: a number is in `factors`, beside a None in `scales`.
_COMMON = (
    "Tensor q, Tensor k, Tensor? v, bool causal, str? pos_encoding_mode, SymInt window_left, float? logits_soft_cap, "
    "float? sm_scale, float? rope_scale, float? rope_theta, ScalarType? o_dtype, Tensor? sinks, float[] factors, "
    "Tensor?[] scales, bool return_lse"
)
_BATCH = f"SymInt wrapper, {_COMMON}, bool fp16_qk_reduction, str lse_base, str lse_layout"
_SINGLE = f"{_COMMON}, Tensor? custom_mask, Tensor? packed_custom_mask, str kv_layout, str backend"


def number_of(wrapper: Any) -> int:
    """A number that stands for ``wrapper`` as long as it lives."""
    number = next(_numbers)
    _wrappers[number] = wrapper
    return number


# --- what is traced ----------------------------------------------------------------------------------------------


def run(
    wrapper: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, o_dtype: torch.dtype | None, args: RunArgs
) -> Result:
    """``wrapper.run()`` in a graph; ``v`` is None where ``k`` holds keys and values."""
    values = wrapper._traced_options  # of forward()
    if values is None:
        values = _AS_PLANNED
    return call(
        "run",
        (
            wrapper._number,
            q,
            k,
            v,
            *_options(values),
            o_dtype,
            one(args.sinks),
            *split_scales(args.scales),
            args.return_lse,
            values.fp16_qk_reduction,
            args.lse_base,
            args.lse_layout,
        ),
        args.out,
        args.lse,
        args.return_lse,
    )


def single(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    values: Options,
    o_dtype: str | torch.dtype | None,
    sinks: Any,
    scales: tuple[Any, ...],
    masks: tuple[torch.Tensor | None, torch.Tensor | None],
    kv_layout: str,
    backend: str,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    return_lse: bool,
) -> Result:
    """``single_prefill_with_kv_cache()`` in a graph; ``scales`` are scale_q, scale_k, scale_v, k_scale and v_scale."""
    if o_dtype is not None:
        o_dtype = checks.dtype(o_dtype)
    elif out is not None:
        o_dtype = out.dtype
    return call(
        "single",
        (
            q,
            k,
            v,
            *_options(values),
            o_dtype,
            one(sinks),
            *split_scales(scales),
            return_lse,
            *masks,
            kv_layout,
            backend,
        ),
        out,
        lse,
        return_lse,
    )


def call(
    name: str, args: tuple[Any, ...], out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
) -> Result:
    """Calls an operator in the form that fits: see ``define``."""
    operators = torch.ops.cutlass_kernels
    inputs = autograd.with_grad((*args, out, lse)) if is_grad_enabled() else []
    if inputs:
        new_out, new_lse = getattr(operators, f"{name}_forward_only")(*args, out, lse, inputs)
        if out is not None:
            out.copy_(new_out)
        if lse is not None:
            lse.copy_(new_lse)
    elif out is None and lse is None:
        new_out, new_lse = getattr(operators, name)(*args)
    else:
        new_out, new_lse = getattr(operators, f"{name}_into")(*args, out, lse)
    out = new_out if out is None else out
    return (out, new_lse if lse is None else lse) if return_lse else out


def _options(values: Options) -> tuple[Any, ...]:
    return (
        values.causal,
        values.pos_encoding_mode,
        values.window_left,
        values.logits_soft_cap,
        values.sm_scale,
        values.rope_scale,
        values.rope_theta,
    )


def one(sinks: Any) -> Any:
    """The tensor of a list of one: operators take no lists."""
    return sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks


def split_scales(scales: tuple[Any, ...]) -> tuple[list[float], list[torch.Tensor | None]]:
    tensors = [x if isinstance(x, torch.Tensor) else None for x in scales]
    return [1.0 if x is None or isinstance(x, torch.Tensor) else x for x in scales], tensors


# --- what graphs run ---------------------------------------------------------------------------------------------


def planned(number: int, q: torch.Tensor) -> Any:
    """The wrapper with this number. RuntimeError where it is gone, or where a captured run would not follow it."""
    wrapper = _wrappers.get(number)
    if wrapper is None:
        raise RuntimeError("a compiled function runs an attention wrapper that no longer exists: keep it alive.")
    if _UNSAFE is None and not wrapper._use_cuda_graph and q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a compiled function captures an attention wrapper whose later plans would not reach the graph, which this "
            "torch cannot be told: make it with use_cuda_graph=True, or compile without CUDA graphs."
        )
    return wrapper


def _run(
    number: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    causal: bool,
    pos_encoding_mode: str | None,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    o_dtype: torch.dtype | None,
    sinks: torch.Tensor | None,
    factors: Sequence[float],
    scales: Sequence[torch.Tensor | None],
    return_lse: bool,
    fp16_qk_reduction: bool,
    lse_base: str,
    lse_layout: str,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    wrapper = planned(number, q)
    q_scale, k_scale, v_scale = join_scales(factors, scales)

    def run_now() -> Result:
        return wrapper.run(
            q,
            *wrapper._run_tensors(k, v),
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            lse_layout=lse_layout,
        )

    if pos_encoding_mode is None:
        result = run_now()
    else:
        values = (causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta)
        result = wrapper._forward(Options(*values, fp16_qk_reduction), run_now)
    return new_results(result, q, return_lse, out, lse)


def _single(
    attention: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    o_dtype: torch.dtype | None,
    sinks: torch.Tensor | None,
    factors: Sequence[float],
    scales: Sequence[torch.Tensor | None],
    return_lse: bool,
    custom_mask: torch.Tensor | None,
    packed_custom_mask: torch.Tensor | None,
    kv_layout: str,
    backend: str,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale_q, scale_k, scale_v, k_scale, v_scale = join_scales(factors, scales)
    result = attention(
        q,
        k,
        v,
        custom_mask=custom_mask,
        packed_custom_mask=packed_custom_mask,
        causal=causal,
        kv_layout=kv_layout,
        pos_encoding_mode=pos_encoding_mode,
        sm_scale=sm_scale,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        return_lse=return_lse,
        scale_q=scale_q,
        scale_k=scale_k,
        scale_v=scale_v,
        o_dtype=o_dtype,
        backend=backend,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        out=out,
        lse=lse,
    )
    return new_results(result, q, return_lse, out, lse)


def join_scales(factors: Sequence[float], scales: Sequence[torch.Tensor | None]) -> list[Any]:
    return [factor if tensor is None else tensor for factor, tensor in zip(factors, scales)]


def new_results(
    result: Result, q: torch.Tensor, return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, with nothing in place of what was given or is not wanted: operators may not return arguments."""
    new_out, new_lse = result if return_lse else (result, None)
    return (
        new_out if out is None else new_out.new_empty(0),
        q.new_empty(0, dtype=torch.float32) if new_lse is None or lse is not None else new_lse,
    )


# --- what graphs are told ----------------------------------------------------------------------------------------


def outputs(
    q: torch.Tensor,
    head_dim_vo: int,
    o_dtype: torch.dtype | None,
    return_lse: bool,
    transposed: bool,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors of the shapes and types that ``new_results`` returns."""
    rows, heads = q.shape[0], q.shape[1]
    wanted = return_lse and lse is None
    lse_shape = (heads, rows) if transposed else (rows, heads)
    return (
        q.new_empty((rows, heads, head_dim_vo) if out is None else (0,), dtype=o_dtype or q.dtype),
        q.new_empty(lse_shape if wanted else (0,), dtype=torch.float32),
    )


def _fake_run(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values = x.k if x.v is None else x.v
    return outputs(x.q, values.shape[-1], x.o_dtype, x.return_lse, x.lse_layout == "HN", x.out, x.lse)


def _fake_single(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs(x.q, x.v.shape[-1], x.o_dtype, x.return_lse, False, x.out, x.lse)


_library = torch.library.Library("cutlass_kernels", "DEF")


def define(name: str, arguments: str, implementation: Callable[..., Any], fake: Callable[[Any], Any]) -> None:
    """Registers an operator in three forms. ``fake`` gets the arguments as attributes, and ``out`` and ``lse``, where
    these are not arguments.

    - ``<name>`` returns new tensors.
    - ``<name>_into`` writes to ``out`` and ``lse``, two more arguments.
    - ``<name>_forward_only`` has a backward that raises, for the tensors in its last argument. It writes to copies of
      ``out`` and ``lse``, which it returns. A backward makes a call 8 us slower, so the other forms have none.
    """

    def on_copies(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *others, given_out, given_lse, _ = args
        out, lse = (None if x is None else x.clone() for x in (given_out, given_lse))
        new_out, new_lse = implementation(*others, out, lse)
        return new_out if out is None else out, new_lse if lse is None else lse

    names = [argument.split()[1] for argument in arguments.split(", ")]

    def fake_of(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own, places = dict(zip(names, args)), dict(zip_longest(("out", "lse"), args[len(names) :]))
        return fake(SimpleNamespace(**own, **{name: x for name, x in places.items() if name not in own}))

    def fake_on_copies(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *_, out, lse, _ = args
        new_out, new_lse = fake_of(*args[:-1])
        return new_out if out is None else torch.empty_like(out), new_lse if lse is None else torch.empty_like(lse)

    _register(name, arguments, implementation, fake_of)
    _register(f"{name}_into", f"{arguments}, Tensor(a!)? out, Tensor(b!)? lse", implementation, fake_of)
    _register(
        f"{name}_forward_only", f"{arguments}, Tensor? out, Tensor? lse, Tensor[] inputs", on_copies, fake_on_copies
    )
    torch.library.register_autograd(
        f"cutlass_kernels::{name}_forward_only", _backward, setup_context=_save_inputs, lib=_library
    )


def _register(name: str, arguments: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # A later plan would not reach a captured run.
    unsafe = [] if _UNSAFE is None else [_UNSAFE]
    register(name, f"({arguments}) -> (Tensor, Tensor)", implementation, fake, unsafe)


def register(
    name: str,
    signature: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
) -> None:
    """Registers an operator of any signature in one form. It has no backward."""
    # Kernels read strides, so a graph must pass tensors that lie in memory as those of the traced program.
    always = [torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag]
    _library.define(f"{name}{signature}", tags=[*always, *tags])
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cutlass_kernels::{name}", fake, lib=_library)


# --- backward ----------------------------------------------------------------------------------------------------
# torch.compile traces the backward together with the forward. So it is an operator that raises when it runs.


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *others, tensors = inputs
    ctx.save_for_backward(*tensors)
    # torch wants gradients in the form of the arguments, where only lists of nothing but tensors count as lists.
    lists = [isinstance(x, list) and all(isinstance(y, torch.Tensor) for y in x) for x in others]
    ctx.nothing = [[None] * len(x) if is_list else None for x, is_list in zip(others, lists)]


def _backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
    computed = torch.ops.cutlass_kernels.no_backward(list(ctx.saved_tensors), list(gradients))
    return (*ctx.nothing, computed)


def _no_backward(inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    raise RuntimeError(autograd.NO_BACKWARD)


def _fake_no_backward(inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty_like(x) for x in inputs]


_library.define("no_backward(Tensor[] inputs, Tensor[] gradients) -> Tensor[]", tags=[torch.Tag.pt2_compliant_tag])
_library.impl("no_backward", _no_backward, "CompositeExplicitAutograd")
torch.library.register_fake("cutlass_kernels::no_backward", _fake_no_backward, lib=_library)


def define_single(attention: Callable[..., Any]) -> None:
    """Registers the operator of ``single_prefill_with_kv_cache``, which is ``attention``."""
    define("single", _SINGLE, functools.partial(_single, attention), _fake_single)


define("run", _BATCH, _run, _fake_run)
