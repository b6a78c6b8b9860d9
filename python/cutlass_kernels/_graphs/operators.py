"""Attention as operators, which traced calls put into their graph: see ``tracing``.

A graph cannot hold a wrapper. The operator takes the wrapper's number and the tensors; when the graph runs, it runs
what that wrapper has planned by then, with the options in effect by then. So new plans need no new graph, but options
that a traced function assigns to attributes, other than by forward(), come too late. Eager calls never come here.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any, get_type_hints

import torch
from torch import is_grad_enabled

from .._core import autograd, checks
from .._core.call_table import Scale
from .._core.problems import FP8_DTYPES
from .._core.run_options import Options, Result, RunArgs

_AS_PLANNED: Any = Options(False, None, -1, 0.0, None, None, None, False)  # type: ignore[arg-type]
_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)  # since torch 2.9

_SCHEMAS: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[torch.Tensor]: "Tensor[]",
    list[str]: "str[]",
    torch.dtype: "ScalarType",
    torch.dtype | None: "ScalarType?",
    tuple[int, int]: "SymInt[]",
    tuple[int, int, int] | None: "SymInt[]?",
    int | None: "SymInt?",
    float | None: "float?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str | None: "str?",
    str: "str",
}


def number_of(wrapper: Any) -> int:
    """A number that stands for ``wrapper`` as long as it lives."""
    number = next(_numbers)
    _wrappers[number] = wrapper
    return number


# --- operators of functions --------------------------------------------------------------------------------------


PLACES = ("out", "lse")  # that operators write to where they are given

# Arguments that are either numbers or a tensor.
_NUMBERS: dict[Any, str] = {Scale: "float?", Sequence[int] | torch.Tensor | None: "SymInt[]?"}


class Arguments:
    """The arguments of an operator, made from the types of a function's arguments, without the ``places`` of results.
    What may be a number or a tensor, such as a scale, becomes two arguments, one of which is None."""

    def __init__(
        self,
        types: Mapping[str, Any],
        left_out: Sequence[str] = (),
        writes: Sequence[str] = (),
        places: Sequence[str] = PLACES,
    ) -> None:
        kinds = {name: kind for name, kind in types.items() if name not in (*left_out, *places, "return")}
        numbers = {name: _NUMBERS.get(kind) for name, kind in kinds.items()}
        self.has_number = {name: number is not None for name, number in numbers.items()}
        schemas = {name: "Tensor?" if self.has_number[name] else _SCHEMAS[kind] for name, kind in kinds.items()}
        for name, letter in zip(writes, "abcd"):
            schemas[name] = schemas[name].replace("Tensor", f"Tensor({letter}!)")
        words = {name: f"{numbers[name]} {name}_number, " * self.has_number[name] for name in schemas}
        self.schema = ", ".join(f"{words[name]}{schema} {name}" for name, schema in schemas.items())
        self.count = self.schema.count(",") + 1

    def given(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the operator is given for these values."""
        given: list[Any] = []
        for name, has_number in self.has_number.items():
            value = values[name]
            if has_number:
                given += [None, value] if isinstance(value, torch.Tensor) else [value, None]
            elif name == "o_dtype" and value is not None:
                given.append(checks.dtype(value))
            else:
                given.append(one(value) if name == "sinks" else value)
        return tuple(given)

    def found(self, given: Iterable[Any]) -> dict[str, Any]:
        """The values that the operator was given."""
        rest, values = iter(given), {}
        for name, has_number in self.has_number.items():
            value = next(rest)
            if has_number:
                tensor = next(rest)
                value = value if tensor is None else tensor
            values[name] = tuple(value) if isinstance(value, list) else value  # torch makes lists of tuples
        return values


def operator(
    name: str,
    types: Mapping[str, Any],
    compute: Callable[..., Any],
    fake: Callable[[Any], Any],
    left_out: Sequence[str] = (),
    flag: str = "return_lse",
    places: Sequence[str] = PLACES,
) -> Callable[..., Result]:
    """Registers ``compute`` of arguments of these ``types`` as an operator: see ``define``. It gets them by keyword,
    and ``places`` where they are given, but none of ``left_out``. ``flag`` says whether it returns a pair.

    Returns the function that stands for ``compute`` in a graph, and gets the same.
    """
    arguments = Arguments(types, left_out, places=places)

    def run(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, wanted = arguments.found(args[: arguments.count]), dict(zip(places, args[arguments.count :]))
        result = compute(**values, **{name: x for name, x in wanted.items() if x is not None})
        return new_results(result, values.get(flag, False), wanted.get("out"), wanted.get("lse"))

    def traced(out: torch.Tensor | None = None, lse: torch.Tensor | None = None, **values: Any) -> Result:
        more = [values.pop(place, None) for place in places[2:]]
        return call(name, arguments.given(values), values.get(flag, False), out, lse, *more)

    define(name, arguments.schema, run, fake, places)
    return traced


def in_place(
    name: str, types: Mapping[str, Any], compute: Callable[..., None], writes: Sequence[str]
) -> Callable[..., None]:
    """The same for a function that returns nothing, and writes to the arguments in ``writes``. Its kernels keep nothing
    between calls, so ``mode="reduce-overhead"`` may capture them."""
    arguments = Arguments(types, writes=writes)

    def run(*args: Any) -> None:
        compute(**arguments.found(args))

    def traced(**values: Any) -> None:
        getattr(torch.ops.cutlass_kernels, name)(*arguments.given(values))

    register(name, f"({arguments.schema}) -> ()", run, lambda *args: None)
    return traced


def call(
    name: str,
    args: tuple[Any, ...],
    return_lse: bool,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    *more: torch.Tensor | None,
) -> Result:
    """Calls an operator in the form that fits: see ``define``. ``more`` are its other places."""
    operators, places = torch.ops.cutlass_kernels, (out, lse, *more)
    inputs = autograd.with_grad((*args, *places)) if is_grad_enabled() else []
    if inputs:
        new_out, new_lse, *new = getattr(operators, f"{name}_forward_only")(*args, *places, inputs)
        for place, x in zip(places, (new_out, new_lse, *new)):
            if place is not None:
                place.copy_(x)
    elif all(place is None for place in places):
        new_out, new_lse = getattr(operators, name)(*args)
    else:
        new_out, new_lse = getattr(operators, f"{name}_into")(*args, *places)
    out = new_out if out is None else out
    return (out, new_lse if lse is None else lse) if return_lse else out


def one(sinks: Any) -> Any:
    """The tensor of a list of one: operators take no lists."""
    return sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks


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


def new_results(
    result: Result, return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, with nothing in place of what was given or is not wanted: operators may not return arguments."""
    new_out, new_lse = result if return_lse else (result, None)
    return (
        new_out if out is None else new_out.new_empty(0),
        new_out.new_empty(0, dtype=torch.float32) if new_lse is None or lse is not None else new_lse,
    )


# --- what graphs are told ----------------------------------------------------------------------------------------


def outputs(x: Any, q: torch.Tensor, columns: int, heads_first: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """New tensors of the shapes and types that ``new_results`` returns for the arguments ``x``."""
    *rows, heads, _ = q.shape
    dtype = x.o_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype)
    lse_shape = (heads, math.prod(rows)) if heads_first else (*rows, heads)
    return (
        q.new_empty((*rows, heads, columns), dtype=dtype) if x.out is None else x.out.new_empty(0),
        q.new_empty(lse_shape if x.return_lse and x.lse is None else (0,), dtype=torch.float32),
    )


_library = torch.library.Library("cutlass_kernels", "DEF")


def define(
    name: str,
    arguments: str,
    implementation: Callable[..., Any],
    fake: Callable[[Any], Any],
    places: Sequence[str] = PLACES,
) -> None:
    """Registers an operator in three forms. ``fake`` gets the arguments as attributes, and the ``places``, where these
    are not arguments: ``out`` and ``lse``, and what else it writes to and does not return.

    - ``<name>`` returns new tensors.
    - ``<name>_into`` writes to the places, which are more arguments.
    - ``<name>_forward_only`` has a backward that raises, for the tensors in its last argument. It writes to copies of
      the places, which it returns. A backward makes a call 8 us slower, so the other forms have none.
    """
    count = len(places)

    def instead(made: tuple[torch.Tensor, torch.Tensor], copies: list[Any]) -> tuple[torch.Tensor, ...]:
        """What is returned for each place: its copy, or where it is not given something new."""
        new = [*made, *(made[1].new_empty(0) for _ in range(count - 2))]
        return tuple(x if copy is None else copy for x, copy in zip(new, copies))

    def on_copies(*args: Any) -> tuple[torch.Tensor, ...]:
        copies = [None if x is None else x.clone() for x in args[-1 - count : -1]]
        return instead(implementation(*args[: -1 - count], *copies), copies)

    names = [argument.split()[1] for argument in arguments.split(", ")]

    def fake_of(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        own, more = dict(zip(names, args)), dict(zip_longest(places, args[len(names) :]))
        return fake(SimpleNamespace(**own, **{name: x for name, x in more.items() if name not in own}))

    def fake_on_copies(*args: Any) -> tuple[torch.Tensor, ...]:
        copies = [None if x is None else torch.empty_like(x) for x in args[-1 - count : -1]]
        return instead(fake_of(*args[:-1]), copies)

    into = ", ".join(f"Tensor({letter}!)? {place}" for letter, place in zip("abcd", places))
    given = ", ".join(f"Tensor? {place}" for place in places)
    _register(name, arguments, implementation, fake_of)
    _register(f"{name}_into", f"{arguments}, {into}", implementation, fake_of)
    _register(f"{name}_forward_only", f"{arguments}, {given}, Tensor[] inputs", on_copies, fake_on_copies, count)
    torch.library.register_autograd(
        f"cutlass_kernels::{name}_forward_only", _backward, setup_context=_save_inputs, lib=_library
    )


def _register(
    name: str, arguments: str, implementation: Callable[..., Any], fake: Callable[..., Any], results: int = 2
) -> None:
    # A later plan would not reach a captured run.
    unsafe = [] if _UNSAFE is None else [_UNSAFE]
    register(name, f"({arguments}) -> ({', '.join(['Tensor'] * results)})", implementation, fake, unsafe)


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


# --- runs of wrappers --------------------------------------------------------------------------------------------


def run(
    wrapper: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, o_dtype: torch.dtype | None, args: RunArgs
) -> Result:
    """``wrapper.run()`` in a graph; ``v`` is None where ``k`` holds keys and values."""
    options = _AS_PLANNED if wrapper._traced_options is None else wrapper._traced_options  # of forward()
    q_scale, k_scale, v_scale = args.scales
    return _run_in_graph(
        args.out,
        args.lse,
        wrapper=wrapper._number,
        q=q,
        k=k,
        v=v,
        **options._asdict(),
        o_dtype=o_dtype,
        sinks=args.sinks,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=args.return_lse,
        lse_base=args.lse_base,
        lse_layout=args.lse_layout,
    )


def _run(wrapper: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, o_dtype: Any, **values: Any) -> Result:
    owner = planned(wrapper, q)
    options = Options(**{name: values.pop(name) for name in Options._fields})
    run_now = functools.partial(owner.run, q, *owner._run_tensors(k, v), **values)
    return run_now() if options.pos_encoding_mode is None else owner._forward(options, run_now)


def _fake_run(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return outputs(x, x.q, (x.k if x.v is None else x.v).shape[-1], x.lse_layout == "HN")


class _Run:
    wrapper: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None
    o_dtype: torch.dtype | None
    sinks: torch.Tensor | None
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    return_lse: bool
    lse_base: str
    lse_layout: str


_OPTIONS = {**get_type_hints(Options), "pos_encoding_mode": str | None}  # None: those of the plan
_run_in_graph = operator("run", {**get_type_hints(_Run), **_OPTIONS}, _run, _fake_run)


class _LatentRun:
    wrapper: int
    q_nope: torch.Tensor
    q_pe: torch.Tensor | None
    ckv_cache: torch.Tensor
    kpe_cache: torch.Tensor | None
    ckv_scale: float | None
    kpe_scale: float | None
    sinks: torch.Tensor | None
    bmm1_scale: Scale
    bmm2_scale: Scale
    o_dtype: torch.dtype | None
    return_lse_base_on_e: bool
    return_lse: bool


def _run_latent(
    wrapper: int, q_nope: torch.Tensor, q_pe: Any, ckv_cache: Any, kpe_cache: Any, o_dtype: Any, **values: Any
) -> Result:
    return planned(wrapper, q_nope).run(q_nope, q_pe, ckv_cache, kpe_cache, **values)


run_latent = operator(
    "run_mla", get_type_hints(_LatentRun), _run_latent, lambda x: outputs(x, x.q_nope, x.ckv_cache.shape[-1])
)
