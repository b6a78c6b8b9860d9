"""Calls of trtllm_fmha_v2_prefill: a case of it, and its arguments."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from cases import OfProblem

if TYPE_CHECKING:
    from shapes import Inputs, Prefill


@dataclass(frozen=True)
class Fused(OfProblem):
    """A problem whose tensors are laid out in one of the function's ways."""

    layout: str

    @property
    def detail(self) -> str:
        return f"{self.layout}, {self.problem.detail}"


def arguments(case: Fused, x: Inputs) -> dict[str, Any]:
    """The arguments by name, all on the device; the tensors are copies in the layout's form."""
    problem, qkv = case.problem, _tensors(case, x)
    batch = len(problem.qo_lens)
    tables = None
    if x.pages is not None:
        rows = x.pages.indices.split(x.pages.indptr.diff().tolist())
        tables = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True).to(x.q.device)
    given = {
        "qkv": qkv,
        "input_layout": case.layout,
        "workspace_buffer": torch.zeros(128 << 20, dtype=torch.uint8, device=x.q.device),
        "seq_lens": x.kv_indptr_device.diff(),
        "max_q_len": max(problem.qo_lens),
        "max_kv_len": max(problem.kv_lens),
        "bmm1_scale": problem.head_dim_qk**-0.5,
        "bmm2_scale": 1.0,
        "batch_size": batch,
        "cum_seq_lens_q": x.qo_indptr_device,
        "cum_seq_lens_kv": x.kv_indptr_device,
        "block_tables": tables,
        "mask_mode": "causal" if problem.causal else "padding",
    }
    return given | ({"out_dtype": torch.bfloat16} if problem.fp8 else {})


def _tensors(case: Fused, x: Inputs) -> Any:
    if case.layout == "PACKED_QKV":
        return torch.stack([x.q, x.k, x.v], 1)
    if case.layout == "CONTIGUOUS_Q_KV":
        return x.q, torch.stack([x.k, x.v], 1)
    if case.layout == "SEPARATE_Q_K_V":
        return x.q, x.k, x.v
    assert x.pages is not None and isinstance(x.pages.cache, torch.Tensor)
    cache = x.pages.cache
    return x.q, cache if case.layout.endswith("NHD") else cache.transpose(2, 3).contiguous()


def without_pages(problem: Prefill) -> Prefill:
    """The same problem with keys and values in two contiguous tensors."""
    return dataclasses.replace(problem, page_size=0)
