"""Processes with a process group, which stay for all tests of a session: starting one takes seconds.

A test gives them a function of a module that they can import; it gets the group of as many ranks as the test asks for.
"""

from __future__ import annotations

import abc
import contextlib
import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MOST = 4
SECONDS = 120
TIMEOUT = datetime.timedelta(seconds=60)  # of a group


class Failed(Exception):
    """Of ranks: what each raised."""

    def __init__(self, reports: dict[int, tuple[str, str]]) -> None:
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, (_, trace) in reports.items()))
        self.messages = {rank: message for rank, (message, _) in reports.items()}


def world_of(shape: int | tuple[int, int]) -> int:
    """Ranks of a group, or of a mesh."""
    return shape if isinstance(shape, int) else shape[0] * shape[1]


class Processes(abc.ABC):
    """What a test calls."""

    device: str
    world: int

    def run(self, function: Callable[..., Any], shape: int | tuple[int, int], *args: Any) -> list[Any]:
        """Results of ``function(group, device, *args)`` by rank; ``shape``: ranks of a group, or of a mesh."""
        if world_of(shape) > self.world:
            pytest.skip(f"needs {world_of(shape)} GPUs, this machine has {self.world}")
        return self._run(function, shape, args)

    def refuses(self, told: str, function: Callable[..., Any], shape: int | tuple[int, int], *args: Any) -> None:
        """All ranks raise the same error, which says so."""
        with pytest.raises(Failed, match=told) as failed:
            self.run(function, shape, *args)
        assert sorted(failed.value.messages) == list(range(world_of(shape)))
        assert len(set(failed.value.messages.values())) == 1

    @abc.abstractmethod
    def _run(self, function: Any, shape: int | tuple[int, int], args: tuple[Any, ...]) -> list[Any]: ...

    @abc.abstractmethod
    def close(self) -> None: ...


class Ranks(Processes):
    """``world`` processes with gloo, or with NCCL, a GPU each."""

    def __init__(self, device: str, world: int, directory: Path) -> None:
        self.device, self.world = device, world
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(device, rank, world, str(directory / "store"), theirs), daemon=True
            )
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def _run(self, function: Any, shape: int | tuple[int, int], args: tuple[Any, ...]) -> list[Any]:
        pipes = self.pipes[: world_of(shape)]
        for pipe in pipes:
            pipe.send((function, shape, args))
        results, failed = [], {}
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(SECONDS):
                pytest.fail(f"rank {rank} has not answered in {SECONDS} s")
            result, error = pipe.recv()
            results.append(result)
            if error is not None:
                failed[rank] = error
        if failed:
            raise Failed(failed)
        return results

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()


class RanksBySize(Processes):
    """Processes of their own for every size of a group, each on a GPU: PyTorch's symmetric memory needs ranks that are
    in as many groups as the others (``_symmetric.py``)."""

    device = "cuda"

    def __init__(self, world: int, directory: Path) -> None:
        self.world, self.directory = world, directory
        self.started: dict[int, Ranks] = {}

    def _run(self, function: Any, shape: int | tuple[int, int], args: tuple[Any, ...]) -> list[Any]:
        world = world_of(shape)
        if world not in self.started:
            directory = self.directory / str(world)
            directory.mkdir()
            self.started[world] = Ranks(self.device, world, directory)
        return self.started[world]._run(function, shape, args)

    def close(self) -> None:
        for ranks in self.started.values():
            ranks.close()


def join(device: str, rank: int, world: int, store: str, timeout: datetime.timedelta) -> torch.device:
    """Makes this process a rank. Returns its device."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


def _serve(device: str, rank: int, world: int, store: str, pipe: Any) -> None:
    where = join(device, rank, world, store, TIMEOUT)
    groups: dict[Any, Any] = {}
    for n in range(1, world + 1):
        groups[n] = dist.new_group(list(range(n)), timeout=TIMEOUT)
    if world >= 2:
        groups[2, 1] = DeviceMesh(device, torch.arange(2).view(2, 1))
    if world == 4:
        groups[2, 2] = DeviceMesh(device, torch.arange(4).view(2, 2))
    while (task := pipe.recv()) is not None:
        function, shape, args = task
        try:
            pipe.send((function(groups[shape], where, *args), None))
        except Exception as error:
            pipe.send((None, (str(error), traceback.format_exc())))


def started(device: str, world: int) -> Iterator[Processes]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        ranks: Processes = RanksBySize(world, path) if device == "cuda" else Ranks(device, world, path)
        yield ranks
        ranks.close()
