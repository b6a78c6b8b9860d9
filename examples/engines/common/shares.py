"""What the GPU's time goes to: kernels of a profiled window, and the share of attention."""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# Parts of kernel names, by attention. "sdpa" counts the attention kernels, not the gathers before them.
MARKS = {
    "ours": ("cutlass_kernels",),
    "sdpa": ("fmha", "flash", "attention", "softmax"),
    "varlen": ("flash",),
    "flash_attn": ("flash",),
    "flashinfer": ("flashinfer", "kernel_mha", "BatchDecodeWithPaged", "BatchPrefillWith"),
    "sgl_kernel": ("flash",),
    "flash_attention_2": ("flash",),
}
GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def profiled(call: Callable[[], int], marks: tuple[str, ...]) -> dict[str, Any]:
    """The shares of ``call()``, which returns how many steps it made."""
    found: dict[str, Any] = {}
    with window(found, marks):
        steps = call()
    return {"steps": steps, **found}


@contextmanager
def window(found: dict[str, Any], marks: tuple[str, ...]) -> Iterator[None]:
    """Puts the shares of what runs inside into ``found``."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    found.update(shares(trace, marks))


def shares(trace: dict[str, Any], marks: tuple[str, ...]) -> dict[str, Any]:
    """Times in us of a Chrome trace: kernels in all, those of attention, and how long the GPU was busy at all."""
    work = [event for event in trace["traceEvents"] if event.get("cat") in GPU_WORK]
    if not work:
        return {"kernels_us": 0.0, "attention_us": 0.0, "share": None, "busy": None, "top": []}
    by_name: dict[str, float] = defaultdict(float)
    for event in work:
        by_name[event["name"]] += event["dur"]
    total = sum(by_name.values())
    attention = sum(time for name, time in by_name.items() if any(mark in name for mark in marks))
    work.sort(key=lambda event: event["ts"])
    busy, end = 0.0, work[0]["ts"]
    for event in work:
        begin, last = max(event["ts"], end), event["ts"] + event["dur"]
        busy += max(last - begin, 0.0)
        end = max(end, last)
    top = sorted(by_name.items(), key=lambda item: -item[1])[:8]
    return {
        "kernels_us": total,
        "attention_us": attention,
        "share": attention / total,
        "busy": busy / max(end - work[0]["ts"], 1e-9),
        "top": [{"kernel": name[:160], "us": time, "share": time / total} for name, time in top],
    }
