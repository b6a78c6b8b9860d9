"""The compiled kernels: what they serve, and the way from a ``Problem`` to a launch.

An installation without the compiled module serves nothing here. Nothing below synchronises or copies more than a few
scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from .._core import native
from .._core.native import current_device as _current_device
from .._core.native import stream_of as _stream_of
from .._core.problems import FP8_DTYPES, Copies, Offsets, PagedKv, Pages, Problem, Split
from .._core.tracing import is_traced
from . import half_precision
from .request_facts import DTYPE_NAMES, FEATURES, MOST_SEPARATE_COLUMNS, ROW_FEATURES, Request, compute_capability

_INT_WORKSPACE_BYTES = 8 << 20  # enough for the tile list of every plan, unless its KV splits are of a small fixed size
_MOST_BYTES = (1 << 63) - 1
_NO_COPIES = Copies()
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)

# Why no kernel has these features. half_precision removes those of _AWAY from a problem before a kernel sees it.
_WHY = {
    "separate_values": "head_dim_qk above 512 with values that are not the first columns of the keys, in their memory,",
    "separate_rope": "k_rope in rows of its own, for these tensors and this mask,",
    "token_lists": "kv_indices_per_token, for these tensors and options,",
    "quantized_cache": "a quantized latent cache (kv_format), for these tensors and options,",
    "extra_keys": "extra_k, a second cache,",
    "unaligned": "addresses or strides that are no multiple of 16 bytes (8 in fp8)",
    "unsized": "multi-item scoring (prefix_len_ptr) under CUDA graphs without mask buffers, or captured without "
    "lengths on the CPU (offsets, or seq_lens and seq_lens_q),",
}
_AWAY = {"rope", "fp8_copies"}
_SERVED = FEATURES.keys() - _WHY.keys() - _AWAY  # passed on, if the registry says that a kernel has it


@functools.cache
def kernels() -> list[dict[str, Any]]:
    """The compiled kernels, in the order of instances.cmake."""
    return [] if native._C is None else list(native._C.list_kernels())


def reasons(backend: str, request: Request) -> list[str]:
    """Why no compiled kernel of ``backend`` serves ``request``; empty if one does."""
    if native._C is None:
        return [
            f"backend={backend!r} is not part of this installation, which has no compiled kernels "
            f"({native.WHY_MISSING}): install a wheel of cutlass_kernels built with CUDA, or build it with "
            "`pip install .` where nvcc is available; backend='reference' serves any device."
        ]
    if reads_as_is(backend, request):
        return []
    built = {kernel["backend"] for kernel in kernels()}
    if backend not in built:
        return [
            f"backend={backend!r} has no kernels in this build (it has {', '.join(sorted(built)) or 'none'}): "
            "use backend='auto'."
        ]
    found, prepared = [], half_precision.prepared_request(request)
    if request.has("rope") and request.head_dim_qk > MOST_SEPARATE_COLUMNS:
        found.append(
            f"pos_encoding_mode with head_dim_qk={request.head_dim_qk} has no {backend} kernel: rotate q and k before."
        )
    if prepared is not None:
        if prepared.o_dtype in FP8_DTYPES:
            found.append(
                f"o_dtype={request.o_dtype} is not written by {backend} for q_dtype={request.q_dtype}: use float16 or "
                "bfloat16, or backend='reference'."
            )
            prepared = prepared._replace(o_dtype=prepared.q_dtype)
        request = prepared
    found += [
        f"{_WHY.get(feature, feature)} has no {backend} kernel in this version: backend='reference' computes it."
        for feature in sorted(request.features - _SERVED)
    ]
    others = [dtype for dtype in dict.fromkeys(request.types) if dtype not in DTYPE_NAMES]
    found += [
        f"dtype {dtype} has no {backend} kernel: use float16 or bfloat16, or backend='reference'." for dtype in others
    ]
    return found if others else found + _registry_reasons(backend, request)


def _registry_reasons(backend: str, request: Request) -> list[str]:
    """What the registry has against a request as it is, without copies."""
    has, names = request.has, (DTYPE_NAMES[dtype] for dtype in request.types)
    asked = [has("soft_cap"), has("sinks"), has("paged"), has("custom_mask", "multi_item"), has("alibi")]
    asked += [has("head_scale", "tensor_scale"), has("stats")]
    where = request.compute_capability or 0, *(request.layout or ())
    return list(native._C.not_supported_reasons(backend, *names, *request.sizes, *asked, *where))


def candidates(
    backend: str, request: Request, requests: int, rows: int, keys: int, multiprocessors: int
) -> list[dict[str, Any]]:
    """Tiles that may compute so many requests of so many rows and keys each, with their estimated times."""
    assert native._C is not None
    if not reads_as_is(backend, request):
        request = half_precision.prepared_request(request) or request
    has, names = request.has, (DTYPE_NAMES[dtype] for dtype in request.types[:2])
    totals = requests, requests * rows, requests * keys
    try:
        found: list[dict[str, Any]] = native._C.candidates(
            backend,
            *names,
            *request.sizes,
            *totals,
            has("causal"),
            16 if has("paged") else 0,
            request.compute_capability,
            multiprocessors,
            has("custom_mask", "multi_item", "alibi", "stats", "head_scale", "tensor_scale"),
            False,
            has("soft_cap"),
            has("stats"),
        )
    except RuntimeError as error:
        raise ValueError(f"{requests} requests of {rows} rows and {keys} keys are no call: {error}") from None
    return found


def reads_as_is(backend: str, request: Request) -> bool:
    """Whether a kernel of ``backend`` is to read the fp8 tensors of ``request`` themselves, not copies."""
    return request.kv_dtype in FP8_DTYPES and native._C is not None and _reads_fp8(backend, request)


@functools.lru_cache(maxsize=4096)
def _reads_fp8(backend: str, request: Request) -> bool:
    if not request.features <= _SERVED or request.o_dtype not in DTYPE_NAMES:
        return False
    if request.q_dtype in FP8_DTYPES:
        fits = request.q_dtype == request.kv_dtype
    else:
        few_enough = {"short_queries", "fp8_few_rows"} if backend == "fa2" else ROW_FEATURES
        no_copies = request.head_dim_qk > MOST_SEPARATE_COLUMNS
        fits = request.o_dtype == request.q_dtype and (no_copies or not few_enough.isdisjoint(request.features))
    return fits and not _registry_reasons(backend, request)


class Schedule:
    """The tile list of a planned batch, and the counters with which the blocks of a running kernel share out its tiles.

    Runs must follow one another, as on one stream they do.

    Where the host does not know the number of rows (offsets on the device), the list is made by the first run, which
    knows it from q; a captured run makes its own. The constructor then refuses what has no room for a single row.

    ``copies`` to the vectors of ``offsets`` are made first: all of them, or none where the constructor raises. The last
    ``tail`` bytes of the workspace are those of vectors. ``grow`` gives a larger workspace, None where it is the
    caller's, who has to.
    """

    def __init__(
        self,
        backend: str,
        request: Request,
        offsets: Offsets,
        workspace: torch.Tensor,
        copies: Copies = _NO_COPIES,
        tail: int = 0,
        grow: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        self.backend = backend
        self.request = request
        self.offsets = offsets  # kept alive: the device reads them after this returns
        self.workspace = workspace
        self.general = offsets.general
        self.as_is = reads_as_is(backend, request)  # fp8 tensors
        self.partials = offsets.partials
        self._tail, self._grow = tail, grow
        self._plan: Any = None
        if offsets.total_q:
            self._plan = self._make(offsets.total_q, copies)
            self._grow = None  # a wrapper's method: no longer held
            return
        # Of a fixed size, the splits of a row are known, and more rows need more. Else long queries may need none.
        if offsets.total_q is None and offsets.split.fixed_size:
            list_bytes, partial_bytes = _sizes_of(backend, request, offsets, 1)
            self._grows_to(list_bytes)
            self._check_room(list_bytes, partial_bytes, "at least ")
        if any(copies):
            _copy(copies, workspace.device)

    def share(self) -> None:
        """Wrappers share it from now on: a workspace that grows is then the schedule's alone."""
        if self._grow is not None:
            self._grow = functools.partial(grown_workspace, self.workspace.device)

    @property
    def made(self) -> Any:
        """The compiled plan, None while the number of rows is not known."""
        return self._plan

    def plan(self, rows: int) -> Any:
        """The compiled plan for q of ``rows`` rows."""
        if self.offsets.total_q is None and torch.cuda.is_current_stream_capturing():
            return self._make(rows)  # not kept: the list exists only once the graph has run
        if self._plan is None:
            self._plan, self._grow = self._make(rows), None
        return self._plan

    def _make(self, total_q: int, copies: Copies = _NO_COPIES) -> Any:
        device = self.workspace.device
        if device.index != _current_device():
            with torch.cuda.device(device):
                return self._make(total_q, copies)
        plan, list_bytes, partial_bytes = self._list(total_q, copies)
        if self._grows_to(list_bytes):
            plan, list_bytes, partial_bytes = self._list(total_q, copies)
        self._check_room(list_bytes, partial_bytes)
        if self.partials is None:
            self.partials = (self._grow or functools.partial(room, device))(partial_bytes)
        return plan

    def _list(self, total_q: int, copies: Copies) -> tuple[Any, int, int]:
        """Makes the tile list where there is room."""
        return _plan_of(
            self.backend,
            self.request,
            self.offsets,
            total_q,
            self.workspace.data_ptr(),
            max(self.workspace.nbytes - self._tail, 0),
            _MOST_BYTES if self.partials is None else self.partials.nbytes,
            copies,
            _stream(self.workspace.device),
        )

    def _grows_to(self, list_bytes: int) -> bool:
        """Whether the workspace was too small for such a list and has grown. Vectors stay at the end of the old one."""
        size = list_bytes + self._tail
        if self._grow is None or size <= self.workspace.nbytes:
            return False
        self.workspace, self._tail = self._grow(size), 0
        return True

    def _check_room(self, list_bytes: int, partial_bytes: int, bound: str = "") -> None:
        """RuntimeError where the workspaces have no room for these."""
        if list_bytes + self._tail > self.workspace.nbytes:
            raise RuntimeError(
                f"int_workspace_buffer has {self.workspace.nbytes} bytes, but the tile list of this batch needs "
                f"{bound}{list_bytes + self._tail}: pass a larger one to reset_workspace_buffer()."
            )
        if self.partials is not None and partial_bytes > self.partials.nbytes:
            fixed = "a larger fixed_split_size or " if self.offsets.split.fixed_size else ""
            raise RuntimeError(
                f"float_workspace_buffer has {self.partials.nbytes} bytes, but the results of split keys need "
                f"{bound}{partial_bytes}: pass a larger one to reset_workspace_buffer(), or plan with "
                f"{fixed}disable_split_kv=True."
            )


def _plan_of(
    backend: str,
    request: Request,
    offsets: Offsets,
    total_q: int,
    workspace: int = 0,
    workspace_bytes: int = 0,
    partial_room: int = 0,
    copies: Copies = _NO_COPIES,
    stream: int = 0,
) -> tuple[Any, int, int]:
    """A compiled plan, and the bytes that its tile list and the results of split keys take. The list is made where
    there is room for both, after ``copies``."""
    if not reads_as_is(backend, request):
        request = half_precision.prepared_request(request) or request
    planned: tuple[Any, int, int] = native._C.plan_batch(
        backend, request, offsets, total_q, workspace, workspace_bytes, partial_room, *copies, stream
    )
    return planned


def _copy(copies: Copies, device: torch.device) -> None:
    launch(native._C.copy_vectors, device, *copies)


def workspace_size(backend: str, request: Request, offsets: Offsets) -> tuple[int, int]:
    """Bytes that the results of split keys and the tile list take; 0 where the number of rows is not known."""
    if not offsets.total_q:
        return 0, 0
    list_bytes, partial_bytes = _sizes_of(backend, request, offsets, offsets.total_q)
    return partial_bytes, list_bytes


def _sizes_of(backend: str, request: Request, offsets: Offsets, rows: int) -> tuple[int, int]:
    """Bytes that the tile list and the results of split keys take, of so many rows."""
    with torch.cuda.device(offsets.qo_indptr.device):
        _, list_bytes, partial_bytes = _plan_of(backend, request, offsets, rows)
    return list_bytes, partial_bytes


def int_workspace(device: torch.device) -> torch.Tensor:
    """Room for a tile list on ``device``."""
    return room(device, _INT_WORKSPACE_BYTES if device.type == "cuda" else 16)


def room(device: torch.device, size: int = _INT_WORKSPACE_BYTES, *, kept: bool = False) -> torch.Tensor:
    """``size`` bytes on ``device``; ``kept`` if they outlive the call."""
    return (native.kept_empty if kept else torch.empty)(size, dtype=torch.uint8, device=device)


def grown_workspace(device: torch.device, size: int) -> torch.Tensor:
    """An int workspace of ``size`` bytes at least, for plans of a wrapper: some more, as sizes often grow slowly."""
    return room(device, -(-size // _INT_WORKSPACE_BYTES) * _INT_WORKSPACE_BYTES, kept=True)


# --- kernels that only move memory: merging of states, writing to caches ---


def move(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether kernels that only move memory take these tensors; else PyTorch is to compute.

    That is: on devices that the installation has no such kernels for, for subclasses of tensors (which stand for
    others), for traced calls, whose graphs know PyTorch's operators, and where gradients are asked for.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *others)):
        return False
    if not x.is_cuda or is_traced() or type(x) not in _PLAIN_TENSORS:
        return False
    return _move_on(x.device)


@functools.lru_cache(maxsize=64)
def _move_on(device: torch.device) -> bool:
    capability = compute_capability(device)
    if native._C is None or capability is None:
        return False
    oldest, newest = native._C.compute_capabilities  # newest 0: all newer ones
    return bool(oldest <= capability and (not newest or capability <= newest))


def place(x: torch.Tensor, strides: int) -> tuple[int, ...]:
    """Where a tensor lies: its address and its first so many strides."""
    return x.data_ptr(), *x.stride()[:strides]


def launch(function: Callable[..., Any], device: torch.device, *arguments: Any) -> None:
    """Calls a function of the compiled module, whose last argument is the current stream of ``device``."""
    if device.index != _current_device():
        with torch.cuda.device(device):
            function(*arguments, _stream_of(device.index))
    else:
        function(*arguments, _stream_of(device.index))


def is_general(problem: Problem) -> bool:
    """Whether a problem needs a tile list made for general ones (``Offsets``), which then serves others too."""
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


def _stream(device: torch.device) -> int:
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


def _on_device(scale: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A scale as kernels read it."""
    return scale.to(device=device, dtype=torch.float32).contiguous()


def with_device_scales(problem: Problem) -> Problem:
    """The problem with its scales as kernels read them: each a number, or one tensor on the device."""
    logits, output, device = problem.logits, problem.output, problem.q.device
    if logits.head_scale is not None:
        scale, number = logits.head_scale, logits.sm_scale
        if isinstance(number, torch.Tensor):
            scale, number = scale * number, 1.0
        logits = dataclasses.replace(logits, sm_scale=number, head_scale=_on_device(scale, device))
    elif isinstance(logits.sm_scale, torch.Tensor):
        logits = dataclasses.replace(logits, sm_scale=_on_device(logits.sm_scale, device).reshape(-1))
    if isinstance(output.scale, torch.Tensor):
        output = dataclasses.replace(output, scale=_on_device(output.scale, device).reshape(-1))
    if logits is problem.logits and output is problem.output:
        return problem
    return dataclasses.replace(problem, logits=logits, output=output)


def compute(problem: Problem, backend: str, schedule: Schedule | None = None) -> None:
    """Enqueues the kernel that computes ``problem`` on the current stream of its device.

    A schedule must be for this backend, ``general`` where the problem is (``is_general``), ``as_is`` where fp8
    keys and values are to be read so, and of keys that are not split where statistics are wanted.
    """
    q, wanted, rows = problem.q, problem.output.out, problem.q.size(0)
    if rows == 0:
        return
    device = q.device
    if device.index != _current_device():
        with torch.cuda.device(device):
            compute(problem, backend, schedule)
        return
    prepared = half_precision.is_needed(problem)
    keys = problem.kv.k_cache if isinstance(problem.kv, PagedKv) else problem.kv.k
    if prepared and keys.dtype in FP8_DTYPES:
        as_is = reads_as_is(backend, Request.from_problem(problem)) if schedule is None else schedule.as_is
        prepared = not as_is
    if prepared:
        problem = half_precision.prepare(
            problem, None if schedule is None else schedule.offsets, native._C, _stream(device)
        )
    problem = with_device_scales(problem)
    if problem.qo_indptr is None:
        native._C.attend(problem, backend)
    else:
        assert schedule is not None
        native._C.attend(problem, backend, schedule.plan(rows), schedule.partials)
    if problem.output.out is not wanted:
        half_precision.round_output(problem.output.out, wanted, native._C, _stream(device))
