"""What ranks run in the tests of what they tell one another."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from cutlass_kernels import distributed
from cutlass_kernels.distributed import _agreement
from cutlass_kernels.distributed._peers import Peers

SHORT = 1.0  # seconds


def call(group: Any, device: torch.device, rows: int, **options: Any) -> None:
    x = torch.ones(rows, 2, 64, device=device, dtype=torch.float16)
    distributed.cp_prefill(x, x, x, group, **options)


def agrees_after_errors(group: Any, device: torch.device) -> bool:
    """A single rank's error takes the timeout: of the exchange alone, as the others make no call."""
    with pytest.raises(ValueError, match="On rank 0: seqlens"):
        call(group, device, 4, seqlens=[-1])
    call(group, device, 5)
    with mock.patch.object(_agreement, "timeout_of", lambda _: SHORT), contextlib.ExitStack() as stack:
        if dist.get_rank(group) == 0:
            stack.enter_context(pytest.raises(ValueError, match="On rank 0: q has 5 rows"))
            call(group, device, 5, seqlens=[12])
    dist.barrier(group)
    call(group, device, 7)
    return distributed._agreement.gather_facts(_peers(group), "test", dist.get_rank(group)) == [0, 1]


def _peers(group: Any) -> Peers:
    return Peers(group, dist.get_rank(group), tuple(dist.get_process_group_ranks(group)))


def siblings(group: Any, device: torch.device) -> bool:
    """Groups that were split from one: some versions of PyTorch give them one name, and one store."""
    pair = dist.get_rank() // 2 * 2
    groups = [dist.new_group([i, i + 1], timeout=datetime.timedelta(seconds=20)) for i in (0, 2)]
    mine = groups[pair // 2]
    shared = dist.PrefixStore("siblings", distributed_c10d._get_default_store())
    peers = Peers(mock.Mock(group_name="3"), dist.get_rank(mine), (pair, pair + 1))
    with (
        mock.patch.object(distributed_c10d, "_get_process_group_store", lambda _: shared),
        mock.patch.object(_agreement, "timeout_of", lambda _: 20.0),
    ):
        found = [_agreement.gather_facts(peers, "test", [dist.get_rank(), i]) for i in range(3)]
    return found == [[[pair, i], [pair + 1, i]] for i in range(3)]


def made_again(group: Any, device: torch.device) -> bool:
    """With other lengths, so that what was told in the group before would be found to differ."""
    for rows in (3, 4):
        again = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=20))
        if dist.get_rank() > 1:
            continue
        for more in range(2):
            call(again, device, rows + 8 * more)
        dist.barrier(again)
        dist.destroy_process_group(again)
    return True
