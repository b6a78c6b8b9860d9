"""Decode context parallelism: the keys of a sequence lie on several ranks, which all compute all query heads.

each rank:  all heads of q  x  its keys before this step  ->  partial results, LSEs of base 2
combine:    every rank gets its own heads over the keys of all ranks
merge:      with the keys of this step, which every rank has for its own heads
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed.parallel_state import get_dcp_group
from vllm.v1.attention.ops.dcp import cp_lse_ag_out_rs, dcp_a2a_lse_reduce

from ..._attend.plan_free import attention
from ..._compute.merging import merge_state_in_place
from .metadata import Metadata


def forward(
    impl: Any,
    layer: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: Metadata,
    out: torch.Tensor,
) -> None:
    """What a ``CutlassKernelsImpl`` writes to ``out``, ``[tokens, heads of this rank, head_dim]``.

    Sinks count once, with the keys of this step.
    """
    has_context = metadata.max_context_len > 0
    given = dict(causal=metadata.causal, sinks=impl.sinks, out=out, return_lse=has_context, **impl.options)
    result = attention(q, k, v, **metadata.new_tokens(), **given)
    if not has_context:
        return
    lse = result[1]
    k_cache, v_cache = impl.caches(kv_cache)
    k_scale, v_scale = impl.scales(layer)
    group = get_dcp_group()
    partial, partial_lse = attention(
        group.all_gather(q.contiguous(), dim=1),
        k_cache,
        v_cache,
        cu_seqlens_q=metadata.query_start_loc,
        seqused_k=metadata.context_lens,
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_context_len,
        page_table=metadata.block_table,
        kv_layout="HND",
        k_descale=k_scale,
        v_descale=v_scale,
        return_lse=True,
        **impl.options,
    )
    combined, combined_lse = impl.combine(partial, partial_lse, group, return_lse=True, is_lse_base_on_e=False)
    merge_state_in_place(out, lse, combined, combined_lse.contiguous())


def combine_function() -> Any:
    """vLLM's function that combines partial results, as ``--dcp-comm-backend`` says."""
    config = get_current_vllm_config_or_none()
    all_to_all = config is not None and config.parallel_config.dcp_comm_backend == "a2a"
    return dcp_a2a_lse_reduce if all_to_all else cp_lse_ag_out_rs
