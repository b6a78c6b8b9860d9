"""The processes of a run: their groups, and how they agree on times and failures.

Times and failures travel over a gloo group of their own. NCCL can be stuck after a failure, gloo is not.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
TIMEOUT = datetime.timedelta(seconds=60)  # of every group
SETTLE_SECONDS = 30.0  # a first call that has not ended by then never will


class Stuck(Exception):
    """The device still waits for a transfer that no other rank makes: nothing more can run in these processes."""


@dataclass
class Ranks:
    """This process among ``world``; ``group`` carries tensors, ``control`` what the benchmark itself has to say."""

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup
    control: dist.ProcessGroup

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def worst(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.control)
        found: list[float] = tensor.tolist()
        return found

    def agree(self, fault: str | None) -> str | None:
        """The first fault of any rank, on all ranks."""
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, fault, group=self.control)
        found = [(rank, text) for rank, text in enumerate(every) if text is not None]
        if not found:
            return None
        rank, text = found[0]
        return text if len(found) == self.world else f"{text} (rank {rank} of {self.world})"

    def attempt(self, function: Callable[[], T]) -> tuple[T | None, str | None]:
        """What ``function`` returns, or the fault of any rank. Raises Stuck if its work on the device does not end."""
        value, fault = None, None
        try:
            value = function()
        except Exception as error:  # a peer may fail in any way
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        settled = self._settle()
        fault = self.agree(fault)
        if self.worst(float(not settled))[0]:
            raise Stuck(fault or f"a call has not ended in {SETTLE_SECONDS:.0f} s")
        return (value, None) if fault is None else (None, fault)

    def align(self) -> None:
        """Lets all devices start what follows together. On GPUs the host does not wait."""
        if self.on_gpu:
            dist.all_reduce(self._token, group=self.group)
        else:
            dist.barrier(self.group)

    def __post_init__(self) -> None:
        self._token = torch.zeros(1, device=self.device)

    def _settle(self) -> bool:
        if not self.on_gpu:
            return True
        try:
            event = torch.cuda.Event()
            event.record()
            until = time.perf_counter() + SETTLE_SECONDS
            while not event.query():
                if time.perf_counter() > until:
                    return False
                time.sleep(1e-3)
        except RuntimeError:  # an error of a kernel: the context is lost
            return False
        return True


def start(device: str) -> Ranks:
    """Joins the processes that torchrun has started."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: gloo need not resolve its name
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local)
        where = torch.device("cuda", local)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=where)
    else:
        torch.set_num_threads(1)
        where = torch.device("cpu")
        dist.init_process_group("gloo", timeout=TIMEOUT)
    control = dist.new_group(backend="gloo", timeout=TIMEOUT)
    group = dist.group.WORLD
    assert group is not None and isinstance(control, dist.ProcessGroup)
    return Ranks(dist.get_rank(), dist.get_world_size(), where, group, control)
