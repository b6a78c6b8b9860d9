"""Chooses who computes an attention problem, computes it, and says why (``explain``).

``reasons`` lists why a backend cannot serve a ``Request``; ``select`` takes the first of fa3, fa2,
reference that has none, or of fa2, fa3, reference for short queries (``request_facts.feature_of_rows``).

Environment: ``CUTLASS_KERNELS_BACKEND`` (fa2, fa3 or reference) overrides ``backend='auto'``;
``CUTLASS_KERNELS_FORCE_BACKEND`` overrides every backend, for engines that always name one.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._core import checks, hints
from .._core.autograd import written
from .._core.errors import BackendError, PerformanceWarning, QueryTypeError, warn
from .._core.problems import FLOAT_DTYPES, FP8_DTYPES, Problem
from . import kernels, reference
from .request_facts import FEATURES, ROW_FEATURES, Layout, Request, feature_of_rows, is_ordinary
from .request_facts import compute_capability as _capability_of

BACKENDS = ("fa3", "fa2", "reference")  # as ck_backends() in instances.cmake, and the reference
CHOICES = ("auto", *BACKENDS)
KERNEL_BACKENDS = BACKENDS[:-1]
SMS_OF_HOPPER, SMS_OF_AMPERE = 132, 108  # H100 and H200, A100: where the GPU is not here
VARIABLES = ("CUTLASS_KERNELS_BACKEND", "CUTLASS_KERNELS_FORCE_BACKEND")

_log = logging.getLogger("cutlass_kernels")
_warned: set[tuple[str, ...]] = set()


class Environment(NamedTuple):
    """What the environment puts in place of "auto", and of every backend."""

    auto: str | None = None
    forced: str | None = None

    def shown(self) -> dict[str, str]:
        """The variables that are set."""
        return {name: word for name, word in zip(VARIABLES, self) if word is not None}


def _read_environment() -> Environment:
    environment = Environment(*(sys.intern(os.environ[name]) if os.environ.get(name) else None for name in VARIABLES))
    if environment.auto:
        _log.info("%s=%s replaces backend='auto'.", VARIABLES[0], environment.auto)
    if environment.forced:
        _log.warning("%s=%s replaces every backend that is asked for.", VARIABLES[1], environment.forced)
    return environment


environment = _read_environment()  # once: it takes 1.5 us to ask for a variable that is not there


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
    return kernels.reasons(backend, request)


def _reference_reasons(request: Request) -> list[str]:
    known = (*FLOAT_DTYPES, *FP8_DTYPES)
    return [
        f"{name}={dtype} is not served by backend='reference': use a floating-point or fp8 type."
        for name, dtype in (("q_dtype", request.q_dtype), ("kv_dtype", request.kv_dtype), ("o_dtype", request.o_dtype))
        if dtype not in known
    ]


def select(requested: str, request: Request) -> str:
    """The backend that serves ``request``: the requested one, or for "auto" the first of ``preferred``.

    Raises:
        ValueError: ``requested`` (or the environment's choice) is not a backend.
        BackendError: the named backend cannot serve the request; an explicit choice never falls back.
    """
    if requested not in CHOICES:
        _check_name(requested, CHOICES)
    chosen = asked_for(requested)
    if chosen not in CHOICES:
        name = VARIABLES[chosen == environment.forced]
        _check_name(chosen, CHOICES, f"the environment variable {name}")
    replaced = "" if chosen == requested else f"the environment puts {chosen!r} in place of backend={requested!r}"
    try:
        selected, refused = _resolve(chosen, request)
    except BackendError as error:
        if not replaced:
            raise
        raise type(error)(f"{error} ({replaced})") from None
    if refused and chosen == "auto" and request.device_type == "cuda":
        _warn(request, refused)
    if is_logged():
        _log.info("backend %s (asked for %s): %s", selected, replaced or requested, request)
    return selected


def asked_for(requested: str) -> str:
    """The backend that the environment puts in place of ``requested``, or that itself."""
    auto, forced = environment
    if forced is not None and requested in CHOICES:
        requested = forced
    return auto if auto is not None and requested == "auto" else requested


def is_logged() -> bool:
    """Whether every choice of a backend leaves a line in the log: where this logger itself has level INFO.

    Engines set the root logger to INFO, which would mean a line per layer and step, and slower calls.
    """
    return 0 < _log.level <= logging.INFO and _log.isEnabledFor(logging.INFO)


@functools.lru_cache(maxsize=4096)
def _resolve(requested: str, request: Request) -> tuple[str, tuple[str, ...]]:
    """The backend, and the reasons against the kernels where "auto" ends at the reference."""
    if requested != "auto":
        against = reasons(requested, request)
        if against:
            error = QueryTypeError if request.q_dtype in FP8_DTYPES else BackendError
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
    first = request.device_type == "cuda" and "short_queries" in request.features
    if request.device_type == "cuda" and request.kv_dtype in FP8_DTYPES and request.q_dtype not in FP8_DTYPES:
        first = kernels.reads_as_is("fa2", request) and (first or not kernels.reads_as_is("fa3", request))
    return ("fa2", *(name for name in BACKENDS if name != "fa2")) if first else BACKENDS


def why_first(request: Request) -> str:
    """Why "auto" asks fa2 before fa3 for such a request."""
    if request.kv_dtype in FP8_DTYPES and request.q_dtype not in FP8_DTYPES:
        return "as it reads the fp8 cache without a copy, and is faster for so few rows"
    return "as it is the faster one for short queries"


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


def not_captured(request: Request) -> BackendError:
    """That a CUDA graph cannot hold what PyTorch computes here: for that, lengths are read on the host."""
    try:
        selected, refused = _resolve("auto", request)
    except BackendError as error:
        selected, refused = "reference", (str(error),)
    if selected == "reference":
        why = f"no kernel serves it. {' '.join(refused)}"
    else:
        why = f"{selected} serves such requests: use backend='auto', or what it reads without a plan (docs/limits.md)."
    return BackendError(f"a CUDA graph cannot hold what PyTorch computes, such as this request ({request}): {why}")


def compute(problem: Problem, backend: str, schedule: Any = None) -> None:
    """Computes ``problem`` with a backend that ``select`` returned; ``schedule`` is what the kernels planned."""
    if backend == "reference":
        if problem.qo_indptr is not None and problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise not_captured(Request.from_problem(problem))
        reference.compute(problem)
        return
    kernels.compute(problem, backend, schedule)
    written(problem.output.out, problem.output.lse)


def compute_once(problem: Problem, backend: str = "auto") -> None:
    """Computes a problem that was not planned."""
    request = Request.from_problem(problem)
    compute_selected(problem, request, select(backend, request))


def compute_selected(problem: Problem, request: Request, selected: str) -> None:
    """The same with the backend that was selected for its facts."""
    schedule = None
    if selected in KERNEL_BACKENDS and problem.qo_indptr is not None:
        allocate = functools.partial(kernels.room, problem.q.device)
        schedule = kernels.Schedule(selected, request, kernels.offsets_of(problem), allocate(), grow=allocate)
    compute(problem, selected, schedule)


# --- explanations ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Candidate:
    """A tile that may compute the requests, and the time that it is estimated to take."""

    name: str
    splits: int
    """KV splits of a tile."""
    has_list: bool
    """Whether a kernel writes a list of tiles first."""
    microseconds: float | None
    """On an H200, or on as many of its SMs as the device has; None of a tile beside which there is no other."""
    taken: bool

    def __str__(self) -> str:
        how = f" in {self.splits} splits" if self.splits > 1 else ""
        how += " by a list" if self.has_list else ""
        time = "" if self.microseconds is None else f": {self.microseconds:.1f} us"
        return f"{self.name}{how}{time}{', taken' if self.taken else ''}"


@dataclass(frozen=True)
class Explanation:
    """What ``backend='auto'`` selects for a request (None if nothing serves it), and the reasons against each."""

    request: Request
    selected: str | None
    reasons: dict[str, list[str]]
    candidates: tuple[Candidate, ...] = ()
    """Tiles that were compared, where the lengths of requests were given."""

    @property
    def is_before_others(self) -> bool:
        """Whether a backend that usually comes first could serve the request, too."""
        usual = [name for name in BACKENDS if not self.reasons[name]]
        return self.selected in BACKENDS and self.selected != usual[0]

    def __str__(self) -> str:
        lines = [str(self.request)]
        for backend in BACKENDS:
            against = self.reasons[backend]
            mark = "selected" if backend == self.selected else "can serve" if not against else "cannot serve"
            first = f", {why_first(self.request)}" if backend == self.selected and self.is_before_others else ""
            lines.append(f"  {backend}: {mark}{first}")
            if backend == self.selected:
                lines += [f"    - {candidate}" for candidate in self.candidates]
            lines += [f"    - {reason}" for reason in against]
        return "\n".join(lines)


def explain(
    q: torch.Tensor | None = None,
    *,
    device: str | torch.device | None = None,
    compute_capability: int | None = None,
    q_dtype: str | torch.dtype | None = None,
    kv_dtype: str | torch.dtype | None = None,
    o_dtype: str | torch.dtype | None = None,
    num_qo_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    features: Iterable[str] = (),
    batch_size: int | None = None,
    qo_len: int | None = None,
    kv_len: int | None = None,
) -> Explanation:
    """Says which backend would compute an attention, and why not the others; and in which tiles.

    ``torch.compile`` cannot trace this function: call it outside of the compiled function.

    Args:
        q: queries ``[tokens, num_qo_heads, head_dim_qk]`` to take device, dtype, sizes and strides from; keywords
            win over it.
        device: "cpu", "cuda", "cuda:1", ...; a CUDA device if there is one, unless said.
        compute_capability: ``10 * major + minor``, e.g. 90, to ask about a GPU that is not here.
        q_dtype, kv_dtype, o_dtype: dtypes or names; default float16, the dtype of q, the dtype of q (bfloat16 for fp8).
        num_qo_heads, num_kv_heads: default 32, num_qo_heads.
        head_dim_qk, head_dim_vo: default 128, head_dim_qk.
        features: of "causal", "window", "chunk", "custom_mask", "multi_item", "soft_cap", "alibi", "rope", "sinks",
            "paged", "short_queries", "fp8_few_rows", "fp8_some_rows", "stats", "head_scale", "tensor_scale",
            "unaligned", "unsized", "fp8_copies", "separate_rope", "separate_values", "token_lists", "quantized_cache",
            "extra_keys". Of "short_queries", "fp8_few_rows" and "fp8_some_rows" a batch has one at most: decode, or of
            fp8 keys below 16-bit queries up to 32, 128 and 1024 rows times heads per key head.
        batch_size, qo_len, kv_len: requests and the tokens of each: the tiles that may compute them are then compared,
            without a window and in pages of 16 tokens. Few rows imply "short_queries", "fp8_few_rows" or
            "fp8_some_rows". Default: no lengths; with a ``qo_len`` one request, and ``kv_len = qo_len``.

    Returns:
        An object with ``selected``, ``reasons`` (backend to list of sentences), ``candidates`` (tiles and their
        estimated times, if there is a ``qo_len``) and a readable ``str()``, of the kernels of this build. The
        environment's choice is not considered.

    Raises:
        ValueError, TypeError: unknown features or dtypes, sizes that contradict each other, no such device.

    Examples:
        >>> explain(device="cpu").selected
        'reference'
    """
    wanted = frozenset([features] if isinstance(features, str) else features)
    unknown = wanted - FEATURES.keys()
    if unknown:
        raise ValueError(f"features={sorted(unknown)} are not known: use some of {', '.join(sorted(FEATURES))}.")
    layout = None
    if q is not None:
        if not isinstance(q, torch.Tensor) or q.dim() < 2:
            raise TypeError(f"q is {hints.shown(q)}: pass a tensor [tokens, num_qo_heads, head_dim_qk], or keywords.")
        if q.dim() == 3 and not is_ordinary(q):
            layout = Layout.of(q.size(0), 0, q=q)
        device = q.device if device is None else device
        q_dtype = q.dtype if q_dtype is None else q_dtype
        num_qo_heads = q.size(-2) if num_qo_heads is None else num_qo_heads
        head_dim_qk = q.size(-1) if head_dim_qk is None else head_dim_qk
    compute_capability = hints.compute_capability(compute_capability)
    if device is None:
        device = "cuda" if compute_capability is not None or torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    if compute_capability is None:
        hints.cuda_device(where)
        compute_capability = _capability_of(where)
    q_type = checks.dtype("float16" if q_dtype is None else q_dtype)
    kv_type = q_type if kv_dtype is None else checks.dtype(kv_dtype)
    o_default = torch.bfloat16 if q_type in FP8_DTYPES else q_type
    qo_heads = 32 if num_qo_heads is None else checks.integer("num_qo_heads", num_qo_heads)
    kv_heads = qo_heads if num_kv_heads is None else checks.integer("num_kv_heads", num_kv_heads)
    checks.heads(qo_heads, kv_heads)
    dim = 128 if head_dim_qk is None else checks.integer("head_dim_qk", head_dim_qk)
    request = Request(
        where.type,
        compute_capability,
        q_type,
        kv_type,
        o_default if o_dtype is None else checks.dtype(o_dtype),
        qo_heads,
        kv_heads,
        dim,
        dim if head_dim_vo is None else checks.integer("head_dim_vo", head_dim_vo),
        wanted,
        layout,
    )
    lengths = _lengths(batch_size, qo_len, kv_len)
    if lengths is not None:
        requests, rows, _ = lengths
        dims = (request.head_dim_qk, request.head_dim_vo)
        of_rows = feature_of_rows(q_type, kv_type, requests * rows, requests, qo_heads // kv_heads, dims)
        request = request._replace(features=(wanted - ROW_FEATURES) | ({of_rows} - {""}))
    against = {backend: reasons(backend, request) for backend in BACKENDS}
    selected = next((b for b in preferred(request) if not against[b]), None)
    if lengths is None or selected not in KERNEL_BACKENDS:
        return Explanation(request, selected, against)
    return Explanation(request, selected, against, _candidates(selected, request, lengths, where))


def _lengths(batch_size: int | None, qo_len: int | None, kv_len: int | None) -> tuple[int, int, int] | None:
    """Requests, and the rows and keys of each."""
    if qo_len is None:
        if kv_len is None and batch_size is None:
            return None
        raise ValueError("kv_len and batch_size say nothing without qo_len: pass the query tokens of a request, too.")
    given = {"batch_size": 1 if batch_size is None else batch_size, "qo_len": qo_len}
    given["kv_len"] = qo_len if kv_len is None else kv_len
    requests, rows, keys = (checks.integer(name, value) for name, value in given.items())
    for name, number in zip(given, (requests, rows, keys), strict=True):
        if not 1 <= number < 1 << 31:
            raise ValueError(f"{name}={number} is not a number of 1 to 2**31 - 1.")
    return requests, rows, keys


def _candidates(
    backend: str, request: Request, lengths: tuple[int, int, int], device: torch.device
) -> tuple[Candidate, ...]:
    capability = request.compute_capability
    assert capability is not None
    if torch.cuda.is_available() and _capability_of(device) == capability:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        sms = SMS_OF_HOPPER if capability >= 90 else SMS_OF_AMPERE
    found = kernels.candidates(backend, request, *lengths, sms)
    return tuple(Candidate(c["name"], c["splits"], c["list"], c["us"], c["taken"]) for c in found)
