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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from . import kept_memory

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
        "zeros": kept_memory.zeros,
        "device": torch.device,
        "stream_of": stream_of,
        "uint8": torch.uint8,
        "int32": torch.int32,
        "float16": torch.float16,
        "bfloat16": torch.bfloat16,
        "float32": torch.float32,
        "float8_e4m3fn": torch.float8_e4m3fn,
        "float8_e5m2": torch.float8_e5m2,
    }
    _C.use_torch(api if type(api).__name__ == "PyCapsule" else None, functions)


def not_direct(*args: Any) -> None:
    """A direct call that leaves everything to Python."""


single_prefill: Callable[..., Any] = not_direct
single_decode: Callable[..., Any] = not_direct
fused_prefill: Callable[..., Any] = not_direct
attention: Callable[..., Any] = not_direct
append_by_slot: Callable[..., Any] = not_direct
rope: Callable[..., Any] = not_direct
rope_append_by_slot: Callable[..., Any] = not_direct
direct_run: Callable[[Any], Callable[..., Any]] = lambda description: not_direct  # noqa: E731
is_decode: Callable[..., bool] = lambda *sizes: False  # noqa: E731
if _C is not None:
    _describe_torch()
    direct_run, is_decode = _C.direct_run, _C.is_decode
    single_prefill, single_decode, fused_prefill = _C.single_prefill, _C.single_decode, _C.fused_prefill
    attention = _C.attention
    append_by_slot, rope, rope_append_by_slot = _C.append_by_slot, _C.rope, _C.rope_append_by_slot


@dataclass(slots=True)
class DirectRuns:
    """What the compiled module must know of a planned batch to run it.

    ``rows`` is how many rows q has, or -1 where it has at most ``most_rows``. ``least_kv`` is how many rows k and v, or
    how many pages a cache, must have. With ``zero``, new outputs have rows that no kernel writes. Where ``captured``,
    runs that a CUDA graph captures are left to Python. ``scratch`` is an address.
    """

    schedule: Any  # owner of the plan and of its memory
    plan: Any
    device: int
    hnd: bool
    rows: int
    most_rows: int
    least_kv: int
    zero: bool
    captured: bool
    pos_encoding_mode: str
    mask_is_causal: bool
    causal: bool
    alibi: torch.Tensor | None
    bits: torch.Tensor | None
    bits_indptr: torch.Tensor | None
    scratch: int
    scratch_bytes: int
