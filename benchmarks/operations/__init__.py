"""What can be measured: a file per operation, with its cases, its workloads, and those who take part.

To add a workload, write a function that returns cases for an element type, and enter it in the table of its operation.
To add a peer, enter a ``Backend`` among the peers of an operation. To add an operation, write a file like these: a case
(a ``Problem``, or a class with the members of ``Case``), a function per column that makes the call to time, workloads,
and an ``OPERATION``, to be entered below.

Layers, each importing from those before it: lengths, timing, other_build; problem, report; inputs; check; backend; api,
measure; operations; bench.
"""

from __future__ import annotations

from collections.abc import Sequence

from backend import Case, Operation, Workload

from . import (
    append_by_slot,
    block_sparse,
    decode,
    fused,
    host,
    latent_append,
    merge,
    mla_decode,
    mla_sparse,
    plan_free,
    prefill,
    rope,
    shared_prefix,
)

OPERATIONS: dict[str, Operation] = {
    "prefill": prefill.OPERATION,
    "decode": decode.OPERATION,
    "mla_decode": mla_decode.OPERATION,
    "mla_sparse": mla_sparse.OPERATION,
    "merge": merge.OPERATION,
    "append_by_slot": append_by_slot.OPERATION,
    "latent_append": latent_append.OPERATION,
    "rope": rope.OPERATION,
    "fused": fused.OPERATION,
    "shared_prefix": shared_prefix.OPERATION,
    "block_sparse": block_sparse.OPERATION,
    "host": host.OPERATION,
    "plan_free": plan_free.OPERATION,
}
WORKLOADS: dict[str, Workload] = {
    name: workload for operation in OPERATIONS.values() for name, workload in operation.workloads.items()
}


def cases_of(operation: str, names: Sequence[str], dtype: str) -> list[Case]:
    """The cases of the named workloads, of one operation.

    Raises:
        ValueError: a workload that does not exist, or belongs to another operation.
    """
    known = OPERATIONS[operation].workloads
    cases: list[Case] = []
    for name in names:
        if name not in known:
            raise ValueError(f"workload {name!r} is none of {operation}: use {', '.join(known)}.")
        cases += known[name].cases(dtype)
    return cases
