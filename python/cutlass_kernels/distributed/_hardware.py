"""GPUs and links of the cost model: every number that it has, and where it comes from.

The log is benchmarks/results/log. Figures of H100 are of two H100 80GB HBM3 of one host with 18 links of NVLink.
"""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """bf16, head dimension 128."""

    flops: float  # per second, of long sequences
    memory: float  # bytes per second
    decode_start: float  # seconds of a decode step besides reading keys: launch, combining splits
    size: float  # bytes


GPUS = {
    # flops: causal, 32/8 heads, 64k and 128k tokens in 51.3 and 205 ms (log, 2026-11-26, second). memory and
    # decode_start: the line through 1 x 128k in 183.5 us and 64 x 8k in 704.7 us (log, 2026-11-27).
    "h100": Gpu(689e12, 3.08e12, 9.4e-6, 80e9),
    # flops: 128k tokens in about 200 ms; 16k, which heat it less, reach 787 (log, 2026-11-23, evening).
    # memory and decode_start: 64 x 4k in 244.6 us and 64 x 8k in 479.9 us (docs/performance.md).
    "h200": Gpu(706e12, 4.56e12, 9.3e-6, 141e9),
}


class Tile(NamedTuple):
    """What fa3 reaches of ``Gpu.flops``, and what a row of queries costs besides the keys that it sees, in keys."""

    speed: float
    start: int  # start and end of its tile
    masked: int  # keys of its tile that a mask hides, on each side that has a limit


# By head dimension, fitted to TFLOP/s of 512 to 16k tokens on an H200 (docs/performance.md, 2026-11-29), where 128
# without tile starts is 787. Off by up to 4 %, at head dimension 64 by up to 9 %: a test repeats it.
TILES = {64: Tile(0.84, 240, 50), 128: Tile(1.0, 171, 112), 256: Tile(1.07, 250, 60)}
# e4m3 over bf16, causal, 16k tokens, H200 (log, 2026-11-21: fp8, masks, pages). Head dimension 64: as 128.
FP8_SPEED = {64: 1.30, 128: 1.30, 256: 1.47}
# A call besides its tiles. Five calls of 128 and 256 rows over 1k to 8k keys leave 5.4 to 10.2 us (log, 2026-11-25,
# fourth); with 7 they are expected to take 0.85 to 1.09 of what they took. Calls of 64 rows: 0.71 and 0.77.
CALL_START = 7e-6
# A short kernel in a CUDA graph: from `a2a` of 64 rows x 32 heads x 128 in 26.4 us (log, 2026-11-27).
SHORT_KERNEL = 1e-6


class Link(NamedTuple):
    bandwidth: float  # bytes per second and GPU, each way
    latency: float


# Copies by copy engines between symmetric memory: 350 GB/s on H100, 372 on H200; 256 KB in 6.9 us.
COPY = Link(350e9, 6.2e-6)
# Two crossings of NVLink at 2 us (log, 2026-11-26, third).
BARRIER = 4e-6
# One kernel that writes to the others, polls and merges: the line through 4 KiB in 3.4 and 4.1 us (gather, combine) and
# 4 MiB in 43.1 and 42.3 us (log, 2026-11-27).
EXCHANGE = Link(108e9, 3.7e-6)
# NCCL send and receive: 302 GB/s (2 H200). Latency: `a2a` of that entry, less its transfer and five short kernels.
# All-to-all of 2 MB took 40 us on 2 H200, which would make it 33 us: the model expects 27 there.
MESSAGE = Link(302e9, 20e-6)
# Between nodes: 400 Gb/s for each GPU, the usual network of H100 nodes. Latency on top of MESSAGE: what NCCL's own
# tuning table has for a step over a network (src/graph/tuning.cc: ring, Simple, 14.0 us). Not measured here.
NETWORK = Link(50e9, 14e-6)

# Beyond that, of large messages: kernels that pack and unpack, and streams that wait for one another. An exchange of
# heads, a step of the ring. Fitted to 1 x 8k in a graph over two and four H200 (log, 2026-11-27, second).
HEADS_START = 70e-6
RING_START = 55e-6

# Host time, of the same entry: a call; a further group of heads that is copied.
HOST_CALL = 0.16e-3
HOST_GROUP_COPIES = 0.15e-3
# In messages (log, 2026-11-26, second).
HOST_GROUP_MESSAGES = 0.3e-3
# Of each message and of a step of the ring: `ulysses` and `ring`, 1 x 8k over four GPUs outside of a graph.
HOST_MESSAGE = 28e-6
HOST_RING_STEP = 0.185e-3


class Cluster(NamedTuple):
    """``world`` GPUs in nodes of ``per_node``."""

    gpu: Gpu
    world: int
    per_node: int

    @property
    def is_node(self) -> bool:
        return self.world <= self.per_node


def rate_of(gpu: Gpu, head_dim: int, element_size: int) -> tuple[float, Tile]:
    """FLOPs per second without tile starts, and the tile; of the nearest head dimension that was measured."""
    nearest = min(TILES, key=lambda d: abs(d - head_dim))
    tile = TILES[nearest]
    return gpu.flops * tile.speed * (FP8_SPEED[nearest] if element_size == 1 else 1.0), tile


def message_seconds(local: float, remote: float) -> float:
    """Bytes from GPUs of this node and from others, at once."""
    return max(local / MESSAGE.bandwidth, remote / NETWORK.bandwidth) + _latency(remote)


def _latency(remote: float) -> float:
    return MESSAGE.latency + (NETWORK.latency if remote else 0.0)
