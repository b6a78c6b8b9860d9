"""Planned batches on the stand-in for a GPU of recorded_calls.py."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from recorded_calls import E4M3, HALF, Gpu, rows_of

from cutlass_kernels._core.problems import Mask, Offsets, Pages, Split

PAGES = 12


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Two requests of 5 and 3 rows. All tensors are held here, and all that a plan and its runs are described with."""

    def __init__(self, gpu: Gpu, page_size: int = 0, dtype: torch.dtype = HALF, max_kv_len: int = 20) -> None:
        self.gpu = gpu
        self.qo_indptr = ints(0, 5, 8)
        self.kv_indptr = ints(0, 2, 4) if page_size else ints(0, 20, 30)
        self.pages: Pages | None = None
        if page_size:
            self.pages = Pages(ints(3, 1, 0, 7), ints(4, 2), page_size)
        self.request = SimpleNamespace(
            q_dtype=dtype,
            kv_dtype=dtype,
            o_dtype=HALF if dtype == E4M3 else dtype,
            num_qo_heads=4,
            num_kv_heads=2,
            head_dim_qk=64,
            head_dim_vo=128,
        )
        self.offsets = Offsets(self.qo_indptr, self.kv_indptr, None, 30, self.pages, mask=Mask(causal=True))
        self.offsets.split = Split(max_kv_len=max_kv_len)
        self.workspace, self.scratch = torch.zeros(1 << 16), torch.zeros(1 << 18)
        self.options = SimpleNamespace(
            causal=True, pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=0.0, sm_scale=None
        )

    def plan(self, backend: str = "auto") -> Any:
        memory = self.workspace.data_ptr(), self.workspace.nbytes, self.scratch.nbytes
        made, _, self.scratch_bytes = self.gpu.module.plan_batch(
            backend, self.request, self.offsets, 8, *memory, [], [], 0
        )
        return made

    def run(self, backend: str = "auto", **changes: Any) -> Callable[..., Any]:
        """The function that makes direct runs, with changes of what it is told."""
        description = dict(
            schedule=self.workspace,
            plan=self.plan(backend),
            device=0,
            hnd=False,
            rows=8,
            most_rows=1 << 30,
            least_kv=8 if self.pages else 30,
            zero=False,
            captured=False,
            pos_encoding_mode="NONE",
            mask_is_causal=False,
            causal=True,
            alibi=None,
            bits=None,
            bits_indptr=None,
            scratch=self.scratch.data_ptr(),
            scratch_bytes=self.scratch.nbytes,
        )
        assert not changes.keys() - description.keys()
        return self.gpu.module.direct_run(*(description | changes).values())

    def arguments(self, **changes: Any) -> dict[str, Any]:
        """Those of a run, in their order."""
        dtype, page = self.request.kv_dtype, (PAGES, self.pages.page_size) if self.pages else (30,)
        k, v = rows_of(*page, 2, 64, dtype=dtype, every=3), rows_of(*page, 2, 128, dtype=dtype, every=2)
        arguments = dict(
            q=rows_of(8, 4, 64, dtype=dtype, every=2, wide=64),
            k=(k, v) if self.pages else k,
            v=None if self.pages else v,
            q_scale=None,
            k_scale=None,
            v_scale=None,
            out=None,
            lse=None,
            sinks=None,
            return_lse=False,
            options=self.options,
        )
        assert not changes.keys() - arguments.keys()
        return arguments | changes

    def accepts(self, told: dict[str, Any] | None = None, **changes: Any) -> bool:
        return self.gpu.accepts(self.run(**told or {}), *self.arguments(**changes).values())
