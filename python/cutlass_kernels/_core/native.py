"""The compiled module ``_C`` (None where the installation has none), and what it is told of torch.

Direct calls: the compiled module reads the arguments of a public function itself, checks them, allocates the results
and launches, in one crossing. It makes a call only if every argument is exactly what a kernel takes; else it returns
None, and nothing has happened. Python then checks each argument, with a sentence for what is wrong, converts what can
be converted, or computes with PyTorch. So a call has the same results and errors whatever was called before.

An installation without the compiled module has direct calls that always return None.

The current CUDA device and its current stream are numbers here: torch.cuda.current_stream() makes a Stream object,
which takes longer than a launch, and torch.cuda.current_device() asks first whether CUDA has started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from .problems import name_of

_C: Any
try:
    from .. import _C  # type: ignore[attr-defined,no-redef]

    WHY_MISSING = ""
except ImportError as error:
    _C = None
    WHY_MISSING = str(error)

PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, a stream for every thread

current_device: Callable[[], int]
stream_of: Callable[[int], int]  # handle of a device's current stream

if hasattr(torch._C, "_cuda_getDevice"):
    current_device = torch._C._cuda_getDevice
else:
    current_device = torch.cuda.current_device

if hasattr(torch._C, "_cuda_getCurrentRawStream"):
    stream_of = torch._C._cuda_getCurrentRawStream
else:

    def stream_of(index: int) -> int:
        return int(torch.cuda.current_stream(index).cuda_stream)


# --- device memory that outlives the call that allocates it: call counters, ALiBi slopes, indptrs of equal lengths ---

# torch allocates from a private pool while it warms up the CUDA graph of a compiled function, and inside
# ``torch.cuda.use_mem_pool()``. Nothing of this library may stay in such a pool. The tree of compiled CUDA graphs
# reuses what it does not know of, or raises "All live allocations must be tracked".


def kept_empty(size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.empty`` outside of private pools. The caller writes it on the current stream. Takes 0.1 ms on a GPU.

    A pool serves one thread (one stream, in old releases of torch). So another thread allocates, on the default stream.
    """
    if device.type != "cuda":
        return torch.empty(size, dtype=dtype, device=device)
    made: list[torch.Tensor | BaseException] = []

    def allocate() -> None:
        try:
            with torch.cuda.stream(torch.cuda.default_stream(device)):
                made.append(torch.empty(size, dtype=dtype, device=device))
        except BaseException as error:  # the caller raises it
            made.append(error)

    thread = threading.Thread(target=allocate, name="cutlass_kernels allocates")
    thread.start()
    thread.join()
    (result,) = made
    if isinstance(result, BaseException):
        raise result
    # The memory may be that of a freed tensor, which kernels on the default stream still use.
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))
    return result


def zeros(size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``torch.zeros`` for the compiled module. Of int32, it asks for nothing but call counters, which it keeps."""
    if dtype != torch.int32:
        return torch.zeros(size, dtype=dtype, device=device)
    return kept_empty(size, dtype, device).zero_()


# --- what the module is told of torch ----------------------------------------------------------------------------

_DLPACK_CODES = {  # code and bits of DLDataType
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float32: (2, 32),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
}
_DLPACK_DEVICES = {"cpu": 1, "cuda": 2}


def _facts(x: torch.Tensor) -> tuple[Any, ...] | None:
    """What the compiled module reads of a tensor where torch has no exchange API, before 2.10; None for what no kernel
    reads. Takes 2 us."""
    code, device = _DLPACK_CODES.get(x.dtype), _DLPACK_DEVICES.get(x.device.type)
    if code is None or device is None or x.layout is not torch.strided:
        return None
    return x.data_ptr(), device, x.device.index or 0, *code, tuple(x.shape), x.stride()


def _describe_torch() -> None:
    api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    functions = {
        "Tensor": torch.Tensor,
        "Parameter": torch.nn.Parameter,
        "facts": _facts,
        "empty_like": torch.empty_like,
        "empty": torch.empty,
        "zeros": zeros,
        "device": torch.device,
        "stream_of": stream_of,
    } | {name_of(dtype): dtype for dtype in _DLPACK_CODES}
    _C.use_torch(api if type(api).__name__ == "PyCapsule" else None, functions)


def not_direct(*args: Any) -> None:
    """A direct call that leaves everything to Python."""


def _of_module(name: str, otherwise: Callable[..., Any] = not_direct) -> Callable[..., Any]:
    return otherwise if _C is None else getattr(_C, name)


single_prefill, single_decode = _of_module("single_prefill"), _of_module("single_decode")
fused_prefill, attention = _of_module("fused_prefill"), _of_module("attention")
append_by_slot, rope = _of_module("append_by_slot"), _of_module("rope")
append_quantized = _of_module("append_quantized")
rope_append_by_slot = _of_module("rope_append_by_slot")
direct_run = _of_module("direct_run", lambda *description: not_direct)
is_decode = _of_module("is_decode", lambda *sizes: False)
if _C is not None:
    _describe_torch()
