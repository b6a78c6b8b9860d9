"""Chooses who computes an attention problem, and can say why.

A :class:`Request` holds the facts a choice depends on. ``reasons`` lists why a backend cannot serve a request;
``select`` takes the first of fa3, fa2, reference that has none, or of fa2, fa3, reference for short queries
(:func:`are_short`). The choice is made from facts only, so the same request always gets the same
backend.

Environment: ``CUTLASS_KERNELS_BACKEND`` (fa2, fa3 or reference) overrides ``backend='auto'``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from . import _args, _native, _reference
from ._autograd import written
from ._problem import Mask, PagedKv, Problem, RaggedKv
from ._tracing import is_traced
from ._warnings import warn

BACKENDS = ("fa3", "fa2", "reference")  # as ck_backends() in instances.cmake, and the reference
CHOICES = ("auto", *BACKENDS)
FEATURES = frozenset(
    {
        "causal",
        "window",
        "chunk",
        "custom_mask",
        "multi_item",
        "soft_cap",
        "alibi",
        "rope",
        "sinks",
        "paged",
        "short_queries",
        "stats",
        "head_scale",
        "tensor_scale",
        "unaligned",
        "unsized",
        "fp8_copies",
    }
)
ENVIRONMENT = "CUTLASS_KERNELS_BACKEND"

# Every backend takes strides between 0 and this many elements, and up to so many rows. Beyond that, each is asked.
ORDINARY = 1 << 30

# fp8 keys and values below 16-bit queries. Kernels of fa2 can read them as they are, once for every 64 query rows, of
# all heads that share a key head. All other kernels compute from 16-bit copies: making and reading these moves five
# times the bytes, but then fa3 computes faster. So up to this many rows of a request, on average, fa2 reads the cache
# itself, and comes first under "auto"; beyond, and where nobody knows the number of rows when a batch is planned,
# copies are made. An explicit backend is what it says, and the rule then decides only about copies. Up to 64 rows fa2
# waits for memory, or nearly; of each 64 more it takes as long again, and copies two to three times as long as that.
SHORT_ROWS = 128

# What os.environ looks things up in. It takes 1.5 us to say that something is not there: a tenth of a whole call.
try:
    _ENVIRONMENT: Any = os.environ._data  # type: ignore[attr-defined]
    _ENVIRONMENT_KEY: Any = os.environ.encodekey(ENVIRONMENT)
except AttributeError:  # another Python's
    _ENVIRONMENT, _ENVIRONMENT_KEY = os.environ, ENVIRONMENT

_log = logging.getLogger("cutlass_kernels")
_warned: set[tuple[str, ...]] = set()


class BackendError(ValueError, RuntimeError):
    """The requested backend cannot serve the request; the message holds every reason."""


class QueryTypeError(BackendError, AssertionError):
    """A :class:`BackendError` about fp8 queries, which callers of FlashInfer expect as an AssertionError."""


class PerformanceWarning(UserWarning):
    """A request on a CUDA device is computed by PyTorch, because no kernel serves it."""


class Layout(NamedTuple):
    """Rows and strides (name; of a token, of a head, in elements) that are not ordinary, for a backend to judge.

    Numbers of rows that matter to none are given as 2 at most, so that requests of all lengths share one choice.
    """

    rows: int
    keys: int
    strides: tuple[tuple[str, int, int], ...] = ()

    @classmethod
    def of(cls, rows: int, keys: int, **tensors: torch.Tensor) -> Layout:
        """The layout of ``[tokens, heads, dim]`` tensors."""
        strides = tuple((name, x.stride(0), x.stride(1)) for name, x in tensors.items() if not is_ordinary(x))
        rows, keys = (n if n > ORDINARY else min(n, 2) for n in (rows, keys))
        return cls(rows, keys, strides)


class Request(NamedTuple):
    """The facts that decide which backends can serve a problem.

    ``compute_capability`` is ``10 * major + minor``, or None without a CUDA device. ``features`` are elements of
    :data:`FEATURES`: what the mask, the logits, the output and the tensors ask for beyond plain attention.
    ``unaligned`` means that an address or a stride is no multiple of 16 bytes (8 in fp8), ``unsized`` that multi-item
    scoring has not been turned into the bits of a mask, because its size or a place for it was missing,
    ``short_queries`` that fa2 comes first, and reads fp8 keys and values as they are (:func:`are_short`),
    ``fp8_copies`` that fp8 queries, keys, values or outputs lie where only copies of them serve (:func:`copies_fp8`).
    ``layout`` is None where every kernel takes such numbers of rows and strides.
    """

    device_type: str
    compute_capability: int | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    o_dtype: torch.dtype
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    features: frozenset[str] = frozenset()
    layout: Layout | None = None

    @classmethod
    def from_problem(cls, problem: Problem, alone: bool = False) -> Request:
        """The facts of a problem; for ``alone`` see :func:`are_short`."""
        q, kv, out = problem.q, problem.kv, problem.output.out
        k, v = (kv.k, kv.v) if isinstance(kv, RaggedKv) else (kv.k_cache, kv.v_cache)
        features, layout = _features(problem), None
        if not is_ordinary(q, k, v, out):
            if not all(is_aligned(x) for x in (q, k, v, out)):
                features.add("unaligned")
            elif isinstance(kv, RaggedKv):
                layout = Layout.of(q.size(0), k.size(0), q=q, k=k, v=v, o=out)
            else:  # every kernel takes pages of any strides
                layout = Layout.of(q.size(0), 0, q=q, o=out)
        requests = 1 if problem.qo_indptr is None else problem.qo_indptr.numel() - 1
        dims = (q.size(2), v.size(-1))
        group_size = q.size(1) // k.size(-2)
        if are_short(q.dtype, k.dtype, q.size(0), requests, group_size, dims, alone) and is_aligned(k, v, to=16):
            features.add("short_queries")
        return cls(
            q.device.type,
            compute_capability(q.device),
            q.dtype,
            k.dtype,
            out.dtype,
            q.size(1),
            k.size(-2),
            q.size(-1),
            v.size(-1),
            frozenset(features),
            layout,
        )

    def __str__(self) -> str:
        where = self.device_type
        if self.compute_capability is not None:
            where += f" sm_{self.compute_capability}"
        text = (
            f"{where}, q {_short(self.q_dtype)}, kv {_short(self.kv_dtype)}, out {_short(self.o_dtype)}, "
            f"heads {self.num_qo_heads}/{self.num_kv_heads}, head_dim {self.head_dim_qk}/{self.head_dim_vo}"
        )
        if self.layout is not None:
            text += "".join(f", strides of {name} {token}/{head}" for name, token, head in self.layout.strides)
        return f"{text}, {' '.join(sorted(self.features))}" if self.features else text


@functools.lru_cache(maxsize=4096)
def feature_set(**used: bool) -> frozenset[str]:
    """The names of those that are used."""
    return frozenset(name for name, is_used in used.items() if is_used)


def are_short(
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    rows: int | None,
    requests: int,
    group_size: int,
    head_dims: tuple[int, int],
    alone: bool = False,
) -> bool:
    """Whether a batch is for fa2 first: see :data:`SHORT_ROWS` for fp8 keys and values, is_decode.h for others.

    ``rows`` are those of all requests, None where they are unknown. Rows of an fp8 cache with other ``head_dims`` than
    multiples of 16 are rarely aligned as kernels that read it need them. ``alone`` means that results of a request must
    not depend on the others of its batch: then their rows do not count. Of fp8 caches fa2 reads all, since copies would
    cost decoding more than they gain prompts, and fa3 takes all of 16 bits.
    """
    if q_dtype not in _args.HALF_DTYPES:
        return False
    if kv_dtype == q_dtype:
        return rows is not None and _native.is_decode(rows, requests, group_size, *head_dims, alone)
    few = alone or (rows is not None and rows * group_size <= SHORT_ROWS * requests)
    return few and kv_dtype in _args.FP8_DTYPES and not (head_dims[0] | head_dims[1]) % 16


def mask_features(mask: Mask) -> set[str]:
    """The features a mask asks for."""
    features: set[str] = set()
    replaced = mask.bits is not None or mask.multi_item is not None
    if mask.causal and not replaced:
        features.add("causal")
    if mask.window_left >= 0:
        features.add("window")
    if mask.chunk_size > 0:
        features.add("chunk")
    if mask.multi_item is not None:
        features.add("multi_item")
    elif mask.bits is not None:
        features.add("custom_mask")
    return features


def _features(problem: Problem) -> set[str]:
    logits, output = problem.logits, problem.output
    features = mask_features(problem.mask)
    if problem.mask.multi_item is not None and problem.mask.bits is None and problem.q.is_cuda:
        features.add("unsized")
    if logits.soft_cap > 0.0:
        features.add("soft_cap")
    if logits.alibi is not None:
        features.add("alibi")
    if logits.rope is not None:
        features.add("rope")
    if logits.sinks is not None:
        features.add("sinks")
    if isinstance(problem.kv, PagedKv):
        features.add("paged")
    if output.stats is not None:
        features.add("stats")
    if copies_fp8(problem):
        features.add("fp8_copies")
    if logits.head_scale is not None:
        features.add("head_scale")
    for scale in (logits.sm_scale, output.scale):
        if isinstance(scale, torch.Tensor):
            features.add("tensor_scale" if scale.numel() == 1 else "head_scale")
    return features


def is_ordinary(*tensors: torch.Tensor) -> bool:
    """Whether every kernel takes tensors that lie in memory like these: aligned, with ordinary strides and rows.

    Part of every call, so it stops at what is enough to know.
    """
    for x in tensors:
        strides = 0
        for stride in x.stride()[:-1]:
            if stride == 0:
                return False
            strides |= stride
        item = x.element_size()
        if strides > ORDINARY or x.size(0) > ORDINARY or (x.data_ptr() | strides * item) % 16:
            return False
    return True


def is_aligned(*tensors: torch.Tensor, to: int | None = None) -> bool:
    """Whether addresses and all strides but the last are multiples of so many bytes: by default of 16, and of 8 in fp8,
    of which kernels can get copies."""
    for x in tensors:
        strides, item = 0, x.element_size()
        for stride in x.stride()[:-1]:
            strides |= stride
        if (x.data_ptr() | strides * item) % (to or (8 if item == 1 else 16)):
            return False
    return True


FP8_PAGE = 8  # pages of a multiple of so many tokens are read as they lie


def copies_fp8(problem: Problem) -> bool:
    """Whether the queries are fp8, and q, k, v or an fp8 output at multiples of 8 bytes only, or keys in pages that no
    fp8 kernel reads.

    Part of every call.
    """
    q, kv, out = problem.q, problem.kv, problem.output.out
    if q.element_size() > 1:
        return False
    if isinstance(kv, RaggedKv):
        tensors = (q, kv.k, kv.v)
    elif kv.k_cache.size(1) % FP8_PAGE:
        return True
    else:
        tensors = (q, kv.k_cache, kv.v_cache)
    bits = 0
    for x in tensors if out.element_size() > 1 else (*tensors, out):
        bits |= x.data_ptr()
        for stride in x.stride()[:-1]:
            bits |= stride
    return bits % 16 != 0


def compute_capability(device: torch.device) -> int | None:
    """``10 * major + minor`` of a CUDA device, None for others."""
    if device.type != "cuda":
        return None
    return _cuda_capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.lru_cache(maxsize=64)
def _cuda_capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


# --- choosing ----------------------------------------------------------------------------------------------------


def reasons(backend: str, request: Request) -> list[str]:
    """Why ``backend`` ("fa2", "fa3" or "reference") cannot serve ``request``: sentences, none if it can."""
    _check_name(backend, BACKENDS)
    if backend == "reference":
        return _reference_reasons(request)
    if request.device_type != "cuda":
        return [
            f"backend={backend!r} needs CUDA tensors, but these are on the {request.device_type} device: use "
            "backend='auto' or 'reference', or move the tensors."
        ]
    try:
        kernels = _kernels()
    except ImportError as error:
        return [
            f"backend={backend!r} is not part of this installation, which has no compiled kernels ({error}): install a "
            "wheel of cutlass_kernels built with CUDA, or build it with `pip install .` where nvcc is available; "
            "backend='reference' serves any device."
        ]
    return list(kernels.reasons(backend, request))


@functools.cache
def _kernels() -> ModuleType:
    """The module that talks to the compiled kernels; ImportError where the installation has none."""
    return importlib.import_module("._cuda", __package__)


def memory_kernels(x: torch.Tensor, *others: torch.Tensor) -> ModuleType | None:
    """The module of the kernels that only move memory, for tensors that they take; None where PyTorch is to compute.

    That is: on devices that the installation has no such kernels for, for subclasses of tensors (which stand for
    others), for traced calls, whose graphs know PyTorch's operators, and where gradients are asked for.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *others)):
        return None
    if not x.is_cuda or is_traced() or type(x) not in _PLAIN_TENSORS:
        return None
    return _memory_kernels(x.device)


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)


@functools.lru_cache(maxsize=64)
def _memory_kernels(device: torch.device) -> ModuleType | None:
    try:
        module = importlib.import_module("._memory_kernels", __package__)
    except ImportError:
        return None
    capability, (low, high) = compute_capability(device), module.COMPUTE_CAPABILITIES
    served = capability is not None and low <= capability and (not high or capability <= high)
    return module if served else None


def _reference_reasons(request: Request) -> list[str]:
    known = (*_args.FLOAT_DTYPES, *_args.FP8_DTYPES)
    return [
        f"{name}={dtype} is not served by backend='reference': use a floating-point or fp8 type."
        for name, dtype in (("q_dtype", request.q_dtype), ("kv_dtype", request.kv_dtype), ("o_dtype", request.o_dtype))
        if dtype not in known
    ]


def reads_as_is(backend: str, request: Request) -> bool:
    """Whether ``backend`` has a kernel that reads the fp8 queries, keys and values of ``request`` as they are."""
    if request.q_dtype not in _args.FP8_DTYPES or backend == "reference":
        return False
    return bool(_kernels().reads_as_is(backend, request))


def select(requested: str, request: Request) -> str:
    """The backend that serves ``request``: the requested one, or for "auto" the first of :func:`preferred`.

    Raises:
        ValueError: ``requested`` (or the environment's choice) is not a backend.
        BackendError: the named backend cannot serve the request; an explicit choice never falls back.
    """
    _check_name(requested, CHOICES)
    override = override_of(requested)
    if override:
        _check_name(override, CHOICES, f"the environment variable {ENVIRONMENT}")
        requested = override
    selected, refused = _resolve(requested, request)
    if refused and requested == "auto" and request.device_type == "cuda":
        _warn(request, refused)
    if is_logged():
        _log.info(
            "backend %s (asked for %s%s): %s", selected, requested, " by environment" if override else "", request
        )
    return selected


def override_of(requested: str) -> str | None:
    """What the environment says in place of ``"auto"``: always the same object for the same word."""
    if requested != "auto" or _ENVIRONMENT_KEY not in _ENVIRONMENT:
        return None
    return sys.intern(os.environ.get(ENVIRONMENT, ""))


def is_logged() -> bool:
    """Whether every choice of a backend leaves a line in the log."""
    return _log.isEnabledFor(logging.INFO)


@functools.lru_cache(maxsize=4096)
def _resolve(requested: str, request: Request) -> tuple[str, tuple[str, ...]]:
    """The backend, and the reasons against the kernels where "auto" ends at the reference."""
    if requested != "auto":
        against = reasons(requested, request)
        if against:
            error = QueryTypeError if request.q_dtype in _args.FP8_DTYPES else BackendError
            raise error(_sentences(requested, request, against))
        return requested, ()
    refused: list[str] = []
    for backend in preferred(request):
        against = reasons(backend, request)
        if not against:
            return backend, tuple(refused) if backend == "reference" else ()
        refused += against
    raise BackendError(_sentences("auto", request, refused))


def preferred(request: Request) -> tuple[str, ...]:
    """The backends in the order in which "auto" asks them."""
    if request.device_type == "cuda" and "short_queries" in request.features:
        with contextlib.suppress(ImportError):
            if request.kv_dtype not in _args.FP8_DTYPES or _kernels().reads_as_is("fa2", request):
                return ("fa2", *(name for name in BACKENDS if name != "fa2"))
    return BACKENDS


def _sentences(backend: str, request: Request, against: Iterable[str]) -> str:
    return f"backend={backend!r} cannot serve this request ({request}): " + " ".join(against)


def _warn(request: Request, refused: tuple[str, ...]) -> None:
    if refused in _warned:
        return
    _warned.add(refused)
    text = f"no kernel serves this request ({request}), so PyTorch computes it, slowly: " + " ".join(refused)
    warn(text, PerformanceWarning)


def _check_name(name: str, choices: tuple[str, ...], what: str = "backend") -> None:
    if name not in choices:
        raise ValueError(f"{what}={name!r} is not a backend of this library: use one of {', '.join(choices)}.")


def compute(problem: Problem, backend: str, schedule: Any = None) -> None:
    """Computes ``problem`` with a backend that :func:`select` returned; ``schedule`` is what the kernels planned."""
    if backend == "reference":
        if problem.qo_indptr is not None and problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise BackendError(
                "backend='reference' works from lengths on the host, so a batch cannot be captured in a CUDA graph: "
                "use a request that a kernel serves (explain() says why one is not), or run it outside the capture."
            )
        _reference.compute(problem)
        return
    _kernels().compute(problem, backend, schedule)
    written(problem.output.out, problem.output.lse)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
