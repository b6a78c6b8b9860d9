"""torch's own: ``context_parallel`` around scaled_dot_product_attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from inputs import Inputs
from problem import Problem
from timing import Timed

from cutlass_kernels import distributed as cp

from .ranks import Ranks


def make(kernel: str, rotate: str, repeat: bool, ranks: Ranks, case: Problem, x: Inputs) -> Timed:
    """On this rank's shard ``x``.

    Args:
        kernel: a name of ``SDPBackend``.
        rotate: how keys travel: "allgather", "alltoall".
        repeat: key heads are repeated, outside the measured time; else ``enable_gqa``.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    batch, tokens = len(case.qo_lens), case.qo_lens[0]
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
    # Contiguous [B, H, L, D]: it would copy keys in another order in every call.
    q, k, v = (t.view(batch, -1, *t.shape[1:]).transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
    options: dict[str, Any] = {} if repeat else {"enable_gqa": True}
    if repeat:
        k, v = (t.repeat_interleave(q.size(1) // t.size(1), 1) for t in (k, v))
    mine = cp.cp_positions([tokens], ranks.rank, ranks.world, device=ranks.device)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        """It splits its buffers itself: that of positions shows that it does so as ``cp_split()`` did."""
        positions = torch.arange(tokens, device=ranks.device)
        buffers: dict[str, Any] = dict(buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions})
        set_rotate_method(rotate)
        with sdpa_kernel([getattr(SDPBackend, kernel)]), context_parallel(mesh, **buffers):
            if not torch.equal(positions, mine):
                raise RuntimeError("context_parallel splits tokens in another order than zigzag")
            yield

    return Timed(
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, **options),
        context,
        lambda out: out.transpose(1, 2).flatten(0, 1),
    )
