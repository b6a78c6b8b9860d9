"""Processes of a group in which one rank fails: started for one test, as nothing of such a group can be used again."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import join

START = 120  # seconds


class Outcome(NamedTuple):
    how: str  # "returned", "raised", "ended" or "hung"
    what: str  # the error, or the exit code
    seconds: float  # since the first rank ended or told that it leaves


class Leaves(BaseException):
    """Of a rank that makes no more calls: its process ends, or stays and does nothing."""


def outcomes(
    device: str, world: int, timeout: float, grace: float, stays: bool, function: Callable[..., Any], *args: Any
) -> dict[int, Outcome]:
    """Of the ranks that do not leave. ``function(group, device, *args)`` raises ``Leaves`` on one of them.

    Args:
        timeout: of the group, in seconds.
        grace: seconds after which a rank is said to hang, counted from the end of the timeout.
        stays: whether the process of the rank that leaves goes on.
    """
    context = _context(device)
    with tempfile.TemporaryDirectory() as directory:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (device, rank, world, str(Path(directory) / "store"), timeout, stays, theirs, function, args)
            processes.append(context.Process(target=_main, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        try:
            return _watch(pipes, processes, timeout + grace)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _context(device: str) -> Any:
    """On the CPU, ranks are forks of a process that has imported torch: one starts in 0.1 s, a new one in 3 s."""
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cutlass_kernels.distributed", "torch._dynamo"])
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")  # CUDA does not survive a fork
        forkserver.ensure_running()
    return context


def _watch(pipes: list[Connection], processes: list[Any], seconds: float) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}
    waiting = dict(enumerate(pipes))
    begin, end = None, time.monotonic() + START
    while waiting:
        ready = wait(list(waiting.values()), max(end - time.monotonic(), 0))
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready or not ready]:
            pipe = waiting.pop(rank)
            how, what = "hung", ""
            if ready:
                try:
                    how, what = pipe.recv()
                except EOFError:
                    processes[rank].join()
                    how, what = "ended", f"exit code {processes[rank].exitcode}"
            now = time.monotonic()
            if begin is None:
                begin, end = now, now + seconds
            if how != "left":
                found[rank] = Outcome(how, what, now - begin)
    return found


def _main(
    device: str,
    rank: int,
    world: int,
    store: str,
    timeout: float,
    stays: bool,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # PyTorch's watchdog waits for dumps before it ends the process; by default, for longer than a test should take.
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
    where = join(device, rank, world, store, datetime.timedelta(seconds=timeout))
    # A rank that leaves while others still connect would fail their init_process_group(), not a call.
    connected = dist.distributed_c10d._get_default_store()
    connected.set(f"connected {rank}", "")
    connected.wait([f"connected {other}" for other in range(world)], datetime.timedelta(seconds=60))
    try:
        function(dist.group.WORLD, where, *args)
        if device == "cuda":
            torch.cuda.synchronize()
        pipe.send(("returned", ""))
    except Leaves:
        pipe.send(("left", ""))
        if stays:
            time.sleep(3600)  # until it is killed
    except Exception as error:
        pipe.send(("raised", f"{type(error).__name__}: {error}"))
    os._exit(0)  # at once: what ends a group in order would wait for the other ranks
