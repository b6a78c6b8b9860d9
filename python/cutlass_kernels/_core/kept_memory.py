"""Device memory that outlives the call that allocates it: call counters, ALiBi slopes, indptrs of equal lengths.

torch allocates from a private pool while it warms up the CUDA graph of a compiled function, and inside
``torch.cuda.use_mem_pool()``. Nothing of this library may stay in such a pool. The tree of compiled CUDA graphs reuses
what it does not know of, or raises "All live allocations must be tracked".
"""

from __future__ import annotations

import threading
from typing import Any

import torch


def empty(size: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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
    return empty(size, dtype, device).zero_()
