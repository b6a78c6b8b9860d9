"""The parts of a batch plan, and of the calls that make and run one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from . import _args, _dispatch, _hints
from ._batch import MOST_KEYS, Batch
from ._problem import MultiItem, Offsets, PagedKv, Pages, Problem, Split

INT_WORKSPACE_BYTES = 8 << 20
KERNEL_BACKENDS = _dispatch.BACKENDS[:-1]

# What run() and its relatives return: out, or (out, lse) where the LSE is asked for. Any lets a type checker take the
# one or the other without a cast.
Result = torch.Tensor | Any
P = ParamSpec("P")
R = TypeVar("R")


def spellings(head_dim_vo_at: int | None = None, **aliases: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Lets a method accept keywords by a second name, and ``head_dim_vo`` by position. Type checkers see its own
    signature, which has the documented names alone.

    ``aliases`` maps the other name to the parameter's. ``head_dim_vo_at`` is the position (without self) where some
    callers pass an integer ``head_dim_vo`` before all that follows.
    """

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> R:
            at = head_dim_vo_at
            if at is not None and len(args) > at and args[at] is not None and _is_integer(args[at]):
                if "head_dim_vo" in kwargs:
                    raise TypeError("head_dim_vo is given twice, by position and by keyword.")
                kwargs["head_dim_vo"] = operator.index(args[at])
                args = (*args[:at], *args[at + 1 :])
            for other, name in aliases.items():
                if other in kwargs:
                    if name in kwargs:
                        raise TypeError(f"{name} and {other} are two names of one argument: give one of them.")
                    kwargs[name] = kwargs.pop(other)
            return method(self, *args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _is_integer(value: Any) -> bool:
    """Whether ``value`` is an integer of Python or numpy; a tensor is a mask, and would have to be read back."""
    if isinstance(value, (bool, torch.Tensor)):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


# --- parts of a plan ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may change without planning again."""

    causal: bool
    pos_encoding_mode: str
    window_left: int
    logits_soft_cap: float
    sm_scale: float | None
    rope_scale: float | None
    rope_theta: float | None
    fp16_qk_reduction: bool

    def replaced(self, field: str, value: Any) -> Options:
        """These with another value; themselves where it is the same one."""
        present = getattr(self, field)
        if type(value) is type(present) and type(value) in _args.PLAIN and value == present:
            return self
        values = [value if name == field else getattr(self, name) for name in Options.__slots__]
        return Options(*values)


class Shape(NamedTuple):
    """Sizes and dtypes of a plan."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    cast: torch.dtype | None = None  # dtype that q, k and v are converted to before the computation


@dataclass(slots=True)
class Plan:
    """Everything plan() found out."""

    shape: Shape
    batch: Batch
    total_q: int | None
    options: Options
    bits: torch.Tensor | None
    bits_indptr: torch.Tensor | None
    multi_item: MultiItem | None
    mask_is_causal: bool  # the mask is not the user's, but stands for options.causal in the buffers of a CUDA graph
    request: _dispatch.Request
    backend: str
    split: Split
    schedule: Any = None
    # By backend, is_general() and reads_as_is(), for runs whose arguments ask for another than the plan foresaw.
    other_schedules: dict[tuple[str, bool, bool], Any] = field(default_factory=dict)
    direct: Any = None  # makes direct runs (_native), once there has been one

    def without_memory(self) -> Plan:
        """The same plan without what lies in device memory."""
        return replace(self, schedule=None, other_schedules={}, direct=None)

    @property
    def is_general(self) -> bool:
        """Whether its runs are expected to be so: those of fp8 tensors usually bring their scales as tensors."""
        shape, fp8 = self.shape, _args.FP8_DTYPES
        alibi = self.options.pos_encoding_mode == "ALIBI"
        return self.bits is not None or alibi or shape.q_dtype in fp8 or shape.kv_dtype in fp8


@dataclass(slots=True)
class RunArgs:
    """Arguments that the run() of every wrapper has."""

    scales: tuple[Any, Any, Any]
    out: torch.Tensor | None
    lse: torch.Tensor | None
    return_lse: bool
    lse_base: str = "log2"
    lse_layout: str = "NH"
    sinks: Any = None
    skip_softmax_factor: float = 0.0


def options(
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    fp16_qk_reduction: bool,
) -> Options:
    """Checked options, one object for equal numbers. KeyError for an unknown ``pos_encoding_mode``."""
    given = (
        causal,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        sm_scale,
        rope_scale,
        rope_theta,
        fp16_qk_reduction,
    )
    # Tensors may change, and while torch.compile traces, numbers may be symbols.
    known = not is_dynamo_compiling() and _args.are_plain(*given)
    return _known_options(*given) if known else _new_options(*given)


def _new_options(
    causal: bool,
    pos_encoding_mode: str,
    window_left: int,
    logits_soft_cap: float | None,
    sm_scale: float | None,
    rope_scale: float | None,
    rope_theta: float | None,
    fp16_qk_reduction: bool,
) -> Options:
    _args.rope(pos_encoding_mode, rope_scale, rope_theta)
    if sm_scale is not None:
        sm_scale = _args.sm_scale(sm_scale, 1)
    cap = _args.soft_cap(logits_soft_cap)
    return Options(
        _args.flag("causal", causal),
        pos_encoding_mode,
        _args.window(window_left),
        cap,
        sm_scale,
        rope_scale,
        rope_theta,
        bool(fp16_qk_reduction),
    )


_known_options = functools.lru_cache(maxsize=256, typed=True)(_new_options)


def multi_item(prefix_len: Any, token_pos: Any, token_pos_len: int, max_item_len: Any) -> MultiItem | None:
    """The arguments of multi-item scoring, None where ``prefix_len_ptr`` is; ValueError where they are incomplete."""
    if prefix_len is None and token_pos is None and not token_pos_len and max_item_len is None:
        return None
    given = {
        "prefix_len_ptr": prefix_len,
        "token_pos_in_items_ptr": token_pos,
        "token_pos_in_items_len": token_pos_len or None,
        "max_item_len_ptr": max_item_len,
    }
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ValueError(f"multi-item scoring needs {', '.join(given)} together; {', '.join(missing)} is missing.")
    for name in ("prefix_len_ptr", "token_pos_in_items_ptr"):
        _hints.optional_tensor(name, given[name])
    return MultiItem(prefix_len, token_pos, _args.integer("token_pos_in_items_len", token_pos_len), max_item_len)


def unsupported(owner: str, remedy: str, **arguments: Any) -> None:
    """NotImplementedError where one of ``arguments`` is set."""
    for name, value in arguments.items():
        if value is not None and value is not False and value != {}:
            shown = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise NotImplementedError(f"{owner} does not serve {name}={shown}: {remedy}")


def run_scales(
    args: tuple[Any, ...], named: tuple[str, ...], given: dict[str, Any], return_lse: bool
) -> tuple[tuple[Any, Any, Any], bool]:
    """Sorts the positional arguments behind the tensors of run(): ``((q_scale, k_scale, v_scale), return_lse)``.

    Three tensors are the dequantization scales of q, k and v; anything else follows ``named``.
    """
    if len(args) == 3 and all(isinstance(x, torch.Tensor) for x in args):
        named = ("q_scale", "k_scale", "v_scale")
    elif len(args) > len(named):
        raise TypeError(
            f"run() takes at most {', '.join(named)} behind the tensors, or three tensors (scale_q, scale_k, scale_v); "
            f"{len(args)} positional arguments were given."
        )
    for name, value in zip(named, args):
        if name == "return_lse":
            return_lse = value
        elif given.get(name) is not None:
            raise TypeError(f"{name} is given twice, by position and by keyword.")
        else:
            given[name] = value
    if not isinstance(return_lse, bool):  # a scale in the wrong place, which bool() might read from the device
        raise TypeError(f"return_lse is {type(return_lse).__name__}, not a bool: pass True or False.")
    return (given.get("q_scale"), given.get("k_scale"), given.get("v_scale")), return_lse


def make_schedule(
    backend: str,
    request: _dispatch.Request,
    offsets: Offsets,
    workspace: torch.Tensor,
    copies: Sequence[tuple[int, int, int]] = (),
) -> Any:
    """The tile list of a batch, written into ``workspace``; None for a backend that needs none.

    Runs with the result read the index tensors of ``offsets`` themselves. ``copies`` (to and from an address, and how
    many elements) are what these are to hold: they are made once nothing can fail any more.
    """
    if backend not in KERNEL_BACKENDS:
        return None
    return _dispatch._kernels().Schedule(backend, request, offsets, workspace, copies)


def reads_as_is(backend: str, request: _dispatch.Request) -> bool:
    """Whether runs on a kernel backend read fp8 keys and values themselves, not copies."""
    return bool(_dispatch._kernels().reads_as_is(backend, request))


def workspace_size(backend: str, request: _dispatch.Request, offsets: Offsets) -> tuple[int, int]:
    """Bytes of the float and of the int workspace that a tile list, and runs with it, need."""
    sizes: tuple[int, int] = _dispatch._kernels().workspace_size(backend, request, offsets)
    return sizes


def split(batch: Batch, fixed_split_size: int | None, disable_split_kv: bool, max_sequence_kv: int | None) -> Split:
    """The rule by which the keys of a batch are split. A size of 0 or -1 is none.

    ValueError where nothing tells how many KV splits of a fixed size there may be.
    """
    fixed = min(max(_args.integer("fixed_split_size", fixed_split_size or 0), 0) * (batch.page_size or 1), MOST_KEYS)
    told = 0 if max_sequence_kv is None else min(_args.integer("max_sequence_kv", max_sequence_kv), MOST_KEYS)
    most = min(told or batch.longest or 0, MOST_KEYS)
    if fixed and batch.page_size is None and not told and batch.longest is None:
        raise ValueError(
            f"fixed_split_size={fixed_split_size} needs the lengths on the CPU (kv_indptr or seq_lens), or "
            "max_sequence_kv."
        )
    return Split(fixed, bool(disable_split_kv), most, told)


def request_of(
    device: torch.device,
    shape: Shape,
    values: Options,
    masked: bool,
    multi_item: bool,
    page_size: int | None,
    short: bool,
    layout: _dispatch.Layout | None,
) -> _dispatch.Request:
    """The facts that decide the backend of a plan."""
    features = _dispatch.feature_set(
        custom_mask=masked and not multi_item,
        multi_item=multi_item,
        unsized=multi_item and not masked and device.type == "cuda",
        causal=values.causal and not masked and not multi_item,
        window=values.window_left >= 0,
        soft_cap=values.logits_soft_cap > 0.0,
        alibi=values.pos_encoding_mode == "ALIBI",
        rope=values.pos_encoding_mode == "ROPE_LLAMA",
        paged=page_size is not None,
        fp8_copies=shape.q_dtype in _args.FP8_DTYPES and (page_size or 0) % _dispatch.FP8_PAGE > 0,
        short_queries=short,
    )
    return _dispatch.Request(
        device.type,
        _dispatch.compute_capability(device),
        shape.cast or shape.q_dtype,
        shape.cast or shape.kv_dtype,
        shape.o_dtype,
        shape.num_qo_heads,
        shape.num_kv_heads,
        shape.head_dim_qk,
        shape.head_dim_vo,
        features,
        layout,
    )


def int_workspace(device: torch.device) -> torch.Tensor:
    """Room for a tile list on ``device``."""
    return torch.empty(INT_WORKSPACE_BYTES if device.type == "cuda" else 16, dtype=torch.uint8, device=device)


def is_general(problem: Problem) -> bool:
    """Whether a problem needs a tile list made for general ones (:class:`Offsets`), which then serves others too."""
    logits = problem.logits
    return (
        problem.mask.bits is not None
        or logits.alibi is not None
        or logits.head_scale is not None
        or isinstance(logits.sm_scale, torch.Tensor)
        or isinstance(problem.output.scale, torch.Tensor)
        or problem.output.stats is not None
    )


def offsets_of(problem: Problem) -> Offsets:
    """The offsets of a problem that was not planned, on the device of its queries."""
    device, kv, rows = problem.q.device, problem.kv, problem.q.size(0)
    assert problem.qo_indptr is not None and kv.indptr is not None

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=True)

    pages = None
    if isinstance(kv, PagedKv):
        v_indices = None if kv.v_indices is None else move(kv.v_indices)
        pages = Pages(move(kv.indices), move(kv.last_page_len), kv.k_cache.size(1), v_indices)
    total_kv = 0 if isinstance(kv, PagedKv) else kv.k.size(0)
    general = is_general(problem)
    split = Split(disabled=problem.output.stats is not None)  # statistics of KV splits are not combined
    return Offsets(move(problem.qo_indptr), move(kv.indptr), rows, total_kv, pages, 0, problem.mask, general, split)


def compute_once(problem: Problem, backend: str = "auto") -> None:
    """Computes a problem that was not planned."""
    request = _dispatch.Request.from_problem(problem)
    compute_selected(problem, request, _dispatch.select(backend, request))


def compute_selected(problem: Problem, request: _dispatch.Request, selected: str) -> None:
    """The same with the backend that was selected for its facts."""
    schedule = None
    if selected in KERNEL_BACKENDS and problem.qo_indptr is not None:
        schedule = make_schedule(selected, request, offsets_of(problem), int_workspace(problem.q.device))
    _dispatch.compute(problem, selected, schedule)


def offsets(lens: torch.Tensor) -> torch.Tensor:
    """Where requests of these lengths start, int32 ``[batch + 1]``."""
    result = torch.zeros(lens.numel() + 1, dtype=torch.int64, device=lens.device)
    torch.cumsum(lens, 0, out=result[1:])
    return result.to(torch.int32)
