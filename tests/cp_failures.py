"""What ranks run in the tests of failures: calls that one of them does not make, or makes with other arguments."""

from __future__ import annotations

from typing import Any

import torch
from failing_ranks import Leaves

from cutlass_kernels import distributed

LEAVES = 1


def call(group: Any, device: torch.device, method: str, rows: int = 6) -> None:
    """``method``: a function and its comm, as ``"prefill ring"``."""
    function, comm = method.split()
    world = torch.distributed.get_world_size(group)
    x = torch.ones(rows, 2 * world, 64, device=device, dtype=torch.float16)
    if function == "prefill":
        distributed.cp_prefill(x, x, x, group, seqlens=[6 * world], comm=comm)
    elif function == "combine":
        distributed.dcp_combine(x, x[..., 0].float(), group, comm=comm)
    else:
        lens = torch.full((rows,), world, dtype=torch.int32, device=device)
        distributed.dcp_decode(x[:, None, :2], x[:, None], x[:, None], group, seqused_k=lens, comm=comm)
    if device.type == "cuda":
        torch.cuda.synchronize()


def one_leaves(group: Any, device: torch.device, method: str, before: int) -> None:
    """After so many calls of all."""
    for _ in range(before):
        call(group, device, method)
    if torch.distributed.get_rank(group) == LEAVES:
        raise Leaves
    call(group, device, method)


def one_differs(group: Any, device: torch.device, method: str, before: int) -> None:
    """After so many calls of all alike, one has other rows."""
    for _ in range(before):
        call(group, device, method)
    call(group, device, method, rows=5 if torch.distributed.get_rank(group) == LEAVES else 6)
