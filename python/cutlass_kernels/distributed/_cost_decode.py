"""How long a decode step takes whose cache is spread over ranks: ``dcp_decode()``, in a CUDA graph."""

from __future__ import annotations

from typing import NamedTuple

from ._exchange import MOST_BYTES, MOST_RANKS
from ._hardware import EXCHANGE, SHORT_KERNEL, Cluster, message_seconds


class Step(NamedTuple):
    """A token of every request. Head dimensions of keys and values are one."""

    lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    element_size: int  # of the cache; queries and outputs have 16 bits


class StepEstimate(NamedTuple):
    """Seconds."""

    comm: str
    keys: float  # attention to the keys of a rank
    gather: float  # queries of all heads
    combine: float
    key_bytes: float

    @property
    def seconds(self) -> float:
        return self.keys + self.gather + self.combine


# Of a combine by messages: outputs and LSEs packed and stored, and the merge.
PACK_KERNELS = 5


def estimate(step: Step, cluster: Cluster, comm: str = "auto") -> StepEstimate:
    world, rows = cluster.world, len(step.lens)
    row_bytes = 2 * step.num_kv_heads * step.head_dim * step.element_size
    key_bytes = sum(-(-n // world) for n in step.lens) * row_bytes
    keys = cluster.gpu.decode_start + key_bytes / cluster.gpu.memory
    if world == 1:
        return StepEstimate("-", keys, 0.0, 0.0, key_bytes)
    # Where ranks cannot share the heads, all have all of them: nothing to gather, but states of all heads to combine.
    owned = step.num_qo_heads % world == 0
    state = rows * step.num_qo_heads * step.head_dim * 2
    to_each = state // world if owned else state
    gather, combine, comm = exchanged(to_each, cluster, owned, comm)
    return StepEstimate(comm, keys, gather, combine, key_bytes)


def exchanged(to_each: int, cluster: Cluster, owned: bool, comm: str = "auto") -> tuple[float, float, str]:
    """Seconds to gather queries and to combine, ``to_each`` bytes from each rank to each, and how."""
    world = cluster.world
    if cluster.is_node and world <= MOST_RANKS and (comm == "symmetric" or to_each <= MOST_BYTES) and comm != "a2a":
        seconds = EXCHANGE.latency + (world - 1) * to_each / EXCHANGE.bandwidth
        return (seconds if owned else 0.0), seconds, "symmetric"
    near = min(world, cluster.per_node) - 1
    seconds = message_seconds(near * to_each, (world - 1 - near) * to_each)
    gather = seconds + 2 * SHORT_KERNEL if owned else 0.0  # the copy of own heads, and all of them in order
    return gather, seconds + PACK_KERNELS * SHORT_KERNEL, "a2a"
