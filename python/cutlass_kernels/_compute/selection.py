"""Chooses who computes an attention problem, can say why, and computes it.

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
from typing import Any, NamedTuple

import torch

from .._core.autograd import written
from .._core.errors import BackendError, PerformanceWarning, QueryTypeError, warn
from .._core.problems import FLOAT_DTYPES, FP8_DTYPES, Problem
from . import kernels, reference
from .request_facts import Request

BACKENDS = ("fa3", "fa2", "reference")  # as ck_backends() in instances.cmake, and the reference
CHOICES = ("auto", *BACKENDS)
KERNEL_BACKENDS = BACKENDS[:-1]
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
