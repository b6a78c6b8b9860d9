"""The current CUDA device and its current stream, as numbers.

torch.cuda.current_stream() makes a Stream object, which takes longer than a launch; torch.cuda.current_device() asks
first whether CUDA has started.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

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
