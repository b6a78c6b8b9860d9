"""The batch of a step, as forward() reads it. Lengths and tables stay on the GPU, and nothing is planned."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dcp_world_size_and_rank
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens


@dataclass
class Metadata(AttentionMetadata):
    """Sequences of a step. The maxima are bounds: of a captured step, those of every replay."""

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    block_table: torch.Tensor  # int32 [B, blocks of a sequence]
    slot_mapping: torch.Tensor  # int64 [tokens]
    causal: bool
    # Of decode context parallelism: keys before this step that lie on this rank, int32 [B], and a bound of them.
    context_lens: torch.Tensor | None = None
    max_context_len: int = 0

    def new_tokens(self) -> dict[str, Any]:
        """As ``attention()`` takes them: rows over the keys of this step alone."""
        starts, most = self.query_start_loc, self.max_query_len
        return dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most)


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Copies what vLLM knows. A captured graph reads vLLM's own buffers, so that replays follow every batch."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.dcp_world_size, self.dcp_rank = get_dcp_world_size_and_rank(kv_cache_spec.dcp_sharded)
        self.interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        # Whether there is a context decides in Python which kernels a step takes, so graphs of drafts cannot follow it.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        if self.dcp_world_size > 1:
            captured = vllm_config.compilation_config.max_cudagraph_capture_size or 0
            most = max(vllm_config.scheduler_config.max_num_seqs, captured)
            self.context_lens = torch.zeros(most, dtype=torch.int32, device=device)  # one address for all replays

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        """``common_prefix_len`` has no effect: vLLM passes 0 since it dropped cascade attention."""
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "cutlass_kernels serves steps that are causal or not as a whole, not by request: choose another "
                "attention backend for this model."
            )
        metadata = Metadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),  # numpy's, of chunked local attention
            max_seq_len=int(common.max_seq_len),
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor[: common.num_reqs],
            slot_mapping=common.slot_mapping,
            causal=common.causal,
        )
        if self.dcp_world_size > 1:
            self._add_context(metadata, common)
        return metadata

    def update_block_table(self, metadata: Metadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> Metadata:
        """The same step for layers of another table."""
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table, slot_mapping
        return updated

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Nothing to do: attention reads lengths and tables where vLLM updates them."""

    def _add_context(self, metadata: Metadata, common: CommonAttentionMetadata) -> None:
        """Keys before this step on this rank. Every rank finds the same bound: where it is 0, none communicates."""
        count, starts = common.num_reqs, common.query_start_loc
        before = common.seq_lens - (starts[1:] - starts[:-1])
        local = get_dcp_local_seq_lens(before, self.dcp_world_size, self.dcp_rank, self.interleave)
        self.context_lens[:count] = local
        self.context_lens[count:] = 0
        metadata.context_lens = self.context_lens[:count]
        upper = common.seq_lens_cpu_upper_bound
        if upper is not None:
            starts_cpu = common.query_start_loc_cpu[: count + 1]
            if int((upper[:count] - (starts_cpu[1:] - starts_cpu[:-1])).max()) <= 0:
                return
        each = self.dcp_world_size * self.interleave
        metadata.max_context_len = -(-common.max_seq_len // each) * self.interleave
