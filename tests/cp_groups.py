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
from cutlass_kernels.distributed import _agreement, _symmetric
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


def tells_who_is_missing(group: Any, device: torch.device) -> list[str]:
    """Rank 0 waits alone, then rank 1, then all meet."""
    told, rank = [], dist.get_rank(group)
    peers = _peers(group)
    with mock.patch.object(_agreement, "timeout_of", lambda _: SHORT):
        for waiting in (0, 1):
            if rank == waiting:
                with pytest.raises(RuntimeError) as caught:
                    _agreement.gather_facts(peers, "test", rank)
                told.append(str(caught.value))
            dist.barrier(group)
    return told + _agreement.gather_facts(peers, "test", rank)


def other_backend(group: Any, device: torch.device) -> bool:
    """It is no part of a kind: a rank may choose its own, and change it."""
    for backend in ("auto", "reference", "auto"):
        call(group, device, 9, backend=backend if dist.get_rank(group) else "auto", k_descale=1.0)
    call(group, device, 9, k_descale=1)
    return True


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


def symmetric_memory(group: Any, device: torch.device) -> list[str]:
    """What goes wrong where memory of a group cannot grow, or its ranks have made other numbers of rendezvous."""
    peers, where, faults = _peers(group), torch.device("cuda", 0), []
    memory: list[Any] = [(torch.empty(0), None)]
    fakes = dict(_node=lambda _: "here", _allocate=lambda *_: memory[-1])
    made = mock.patch.object(_symmetric, "Workspace", lambda *_: mock.Mock(size=4 * _symmetric.ALIGNMENT))
    with mock.patch.multiple(_symmetric, **fakes), made, mock.patch("torch.cuda.synchronize"):

        def workspace(size: int) -> Any:
            return _symmetric.workspace(peers, size * _symmetric.ALIGNMENT, where, "test")

        first = workspace(4)
        if peers.rank == 1:
            memory.append((None, _symmetric.NO_ROOM))
        with pytest.warns(UserWarning, match="no room for 10 MiB of symmetric memory on rank 1"):
            faults += ["memory that is not there"] * (workspace(5) is not None)
        faults += ["the memory before is lost"] * (workspace(3) is not first)
        with mock.patch.object(_symmetric, "_make", lambda *_: faults.append("a second try")):
            faults += ["memory that was refused"] * (workspace(5) is not None)
            with mock.patch.object(_symmetric, "is_capturing", lambda: True):
                faults += ["no messages in a graph"] * (workspace(6) is not None)
        memory[:] = memory[:1]
        _symmetric._refused.clear()
        faults += ["no growth"] * (workspace(5) in (None, first))
        told = pytest.warns(UserWarning, match="some of its ranks have allocated symmetric memory more often")
        with mock.patch.object(_symmetric, "_rendezvous", peers.rank), told:
            faults += ["a rendezvous that would hang"] * (workspace(6) is not None)
        faults += ["the memory before is hidden"] * (workspace(3) is None)
    del _symmetric._kept[group], _symmetric._refused[group]
    return faults
