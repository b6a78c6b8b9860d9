"""The attention backend of a model runner: metadata of a step, graphs, and the attention of a layer."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_exec, get_parallel, get_spec

from ..._attend.plan_free import attention
from ..._compute.merging import merge_state_in_place
from .metadata import Buffers, Metadata, Shape, pack_trees, tree_bytes


class CutlassKernelsBackend(AttentionBackend):
    """Attention over SGLang's pools, of any page size.

    Args:
        model_runner: SGLang's.
        step: of a draft model that runs several steps, which one this is; its keys include the earlier steps'.

    Raises:
        NotImplementedError: a configuration that is not served. The message says which.
    """

    def __init__(self, model_runner: Any, step: int | None = None) -> None:
        super().__init__()
        self.step = step
        self.device, self.page_size = model_runner.device, model_runner.page_size
        self.max_context_len = model_runner.model_config.context_len
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.kv_index_translator = model_runner.kv_index_translator
        self.window_pool = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        self.chunk_size = getattr(model_runner, "attention_chunk_size", None) or 0
        self.is_fp8 = model_runner.kv_cache_dtype == torch.float8_e4m3fn
        self.topk = get_spec().speculative_eagle_topk or 0
        # Keys that a step may read beyond the lengths that SGLang knows on the host.
        self.drafts = max(get_spec().speculative_num_draft_tokens or 1, (get_spec().speculative_num_steps or 0) + 1)
        self.batch_invariant = bool(get_exec().deterministic.enable_deterministic_inference)
        self.forward_metadata: Metadata | None = None
        self.buffers: Buffers | None = None
        self._refuse(model_runner)

    # --- metadata ---

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Metadata of a step without a graph."""
        self.forward_metadata = self._metadata(forward_batch, self._longest(forward_batch))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Metadata of a captured step: the same, in buffers that the graph reads."""
        if forward_batch.forward_mode.is_extend_without_speculative():
            raise NotImplementedError(
                "cutlass_kernels does not capture prompts in full CUDA graphs: start the server with prefill graphs of "
                "the backend 'breakable', or without them."
            )
        if self.buffers is None:
            self.init_forward_metadata(forward_batch)
            return
        longest = 1 if in_capture else self._longest(forward_batch)
        held = self.buffers.put(self._metadata(forward_batch, longest))
        if in_capture:
            held.max_seq_len = self.req_to_token.size(1)
        self.forward_metadata = held

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Buffers for graphs of up to ``max_bs`` requests."""
        pages = -(-self.req_to_token.size(1) // self.page_size)
        self.buffers = Buffers(max_bs, pages, self.drafts, self.window_pool is not None, self.device)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def _metadata(self, batch: Any, longest: int) -> Metadata:
        shape = self._shape(batch)
        count = batch.batch_size
        if shape.rows_of is None:
            starts = self._even_starts(count, shape.rows)
        else:
            starts = torch.nn.functional.pad(torch.cumsum(shape.rows_of, 0, dtype=torch.int32), (1, 0))
        most = min(longest + self.drafts, self.req_to_token.size(1))
        tokens = self.req_to_token[batch.req_pool_indices[:count], : most : self.page_size]
        metadata = Metadata(
            starts=starts,
            lens=shape.lens.to(torch.int32),
            page_table=(tokens // self.page_size).to(torch.int32),
            max_query_len=shape.rows,
            max_seq_len=most,
        )
        if self.window_pool is not None:
            own = self.window_pool.translate_loc_from_full_to_swa(tokens)
            metadata.window_table = (own // self.page_size).to(torch.int32)
        if shape.is_tree:
            metadata.tree_bits = pack_trees(batch.spec_info.custom_mask, batch.seq_lens[:count], shape.rows)
            metadata.tree_starts = self._even_starts(count, tree_bytes(shape.rows))
        return metadata

    def _shape(self, batch: Any) -> Shape:
        mode, lens = batch.forward_mode, batch.seq_lens[: batch.batch_size]
        if mode.is_decode_or_idle():
            return Shape(1, lens if self.step is None else lens + (self.step + 1))
        if mode.is_target_verify():
            info = batch.spec_info
            if getattr(info, "ragged_verify_layout", None) is not None:
                raise NotImplementedError("cutlass_kernels verifies as many draft tokens of every request.")
            rows = info.num_tokens_per_req if info is not None and info.num_tokens_per_req > 0 else self.drafts
            is_tree = self.topk > 1 and info is not None and info.custom_mask is not None
            return Shape(rows, lens if is_tree else lens + rows, is_tree=is_tree)
        if mode.is_draft_extend_v2() and (rows := _even_rows(batch)) is not None:
            return Shape(rows, lens)
        rows_of = batch.extend_seq_lens
        known = batch.extend_seq_lens_cpu
        return Shape(int(max(known)) if known is not None else int(rows_of.max()), lens, rows_of=rows_of)

    def _even_starts(self, count: int, each: int) -> torch.Tensor:
        """``[0, each, 2 * each, ...]``, one tensor per pair of numbers where graphs read it."""
        kept = self.buffers.starts if self.buffers is not None else {}
        if (count, each) not in kept:
            kept[count, each] = torch.arange(count + 1, dtype=torch.int32, device=self.device) * each
        return kept[count, each]

    def _longest(self, batch: Any) -> int:
        """A bound of the lengths, without waiting for the GPU."""
        lens = batch.seq_lens_cpu
        return int(lens.max()) if lens is not None and lens.numel() else self.max_context_len

    # --- attention ---

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of prompts, of their chunks, of draft tokens, and of one row per request (``forward_decode``)."""
        _refuse_layer(layer, kwargs)
        metadata = self.forward_metadata
        assert metadata is not None
        if k is not None and v is not None:
            k, v = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim), v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
            if save_kv_cache:
                self._save(layer, forward_batch, k, v)
        causal = layer.attn_type == AttentionType.DECODER
        left = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        has_own_table = left >= 0 and metadata.window_table is not None
        is_tree = metadata.tree_bits is not None
        k_buffer, v_buffer = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        k_scale, v_scale = self._scales(layer)
        rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        options: dict[str, Any] = dict(
            logits_soft_cap=layer.logit_cap,
            sm_scale=layer.scaling,
            return_lse=is_tree,
            batch_invariant=self.batch_invariant,
        )
        sinks = None if sinks is None else sinks.to(torch.float32)
        result = attention(
            rows,
            paged_kv_view(k_buffer, self.page_size, layer.tp_k_head_num, layer.qk_head_dim),
            paged_kv_view(v_buffer, self.page_size, layer.tp_v_head_num, layer.v_head_dim),
            cu_seqlens_q=metadata.starts,
            seqused_k=metadata.lens,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_seq_len,
            page_table=metadata.window_table if has_own_table else metadata.page_table,
            causal=causal and not is_tree,
            window=(left, -1 if causal else left),
            chunk_size=self.chunk_size if layer.use_irope else 0,
            sinks=sinks,
            k_descale=k_scale,
            v_descale=v_scale,
            **options,
        )
        if is_tree:
            if k is None or v is None:
                k, v = (x[forward_batch.out_cache_loc].to(q.dtype) for x in (k_buffer, v_buffer))
            result = self._with_tree(result, rows, k, v, metadata, options)
        return result.view(q.size(0), -1)

    forward_decode = forward_extend

    def _with_tree(
        self,
        prefix: tuple[torch.Tensor, torch.Tensor],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: Metadata,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Merges the draft tokens among themselves, under the mask of their tree, into the attention of the prefix."""
        out, lse = prefix
        tree, tree_lse = attention(
            q,
            k,
            v,
            cu_seqlens_q=metadata.starts,
            cu_seqlens_k=metadata.starts,
            max_seqlen_q=metadata.max_query_len,
            max_seqlen_k=metadata.max_query_len,
            packed_custom_mask=metadata.tree_bits.view(-1),  # type: ignore[union-attr]
            mask_indptr=metadata.tree_starts,
            **options,
        )
        merge_state_in_place(out, lse, tree, tree_lse)
        return out

    def _save(self, layer: Any, batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes new keys and values through SGLang's pool, which converts them."""
        swa_loc = None
        if self.window_pool is not None and self.window_pool.layers_mapping[layer.layer_id][1]:
            swa_loc = self.window_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
        place = KVWriteLoc.for_batch(batch, swa_loc=swa_loc)
        if self.is_fp8 and layer.k_scale is not None:  # the pool divides in place
            k, v = k.clone(), v.clone()
        self.token_to_kv_pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)

    def _scales(self, layer: Any) -> tuple[Any, Any]:
        return (layer.k_scale, layer.v_scale) if self.is_fp8 else (None, None)

    def _refuse(self, runner: Any) -> None:
        parallel, config = get_parallel(), runner.model_config
        windows = runner.sliding_window_size is not None and runner.sliding_window_size > -1
        refused = None
        if getattr(runner, "use_mla_backend", False):
            refused = "MLA"
        elif config.is_encoder_decoder:
            refused = "cross attention"
        elif parallel.attn_dcp_size > 1 or parallel.attn_cp_size > 1:
            refused = "context parallelism"
        elif self.kv_index_translator is not None and self.kv_index_translator.is_translating:
            refused = "the unified memory pool"
        elif runner.kv_cache_dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            refused = f"caches of {runner.kv_cache_dtype}"
        elif windows and self.topk > 1:
            refused = "draft trees in models with sliding windows (--speculative-eagle-topk 1 is served)"
        if refused is not None:
            raise NotImplementedError(f"cutlass_kernels does not serve {refused}: choose another attention backend.")


def _even_rows(batch: Any) -> int | None:
    """Rows of each request of a draft extension, None where they differ. Of a replay, SGLang tells no lengths."""
    known = getattr(batch, "extend_seq_lens_cpu", None)
    if known is not None:
        return int(known[0]) if len(set(known)) == 1 else None
    each = getattr(batch.spec_info, "num_tokens_per_req", -1)
    return each if each > 0 else batch.input_ids.size(0) // max(batch.batch_size, 1)


def _refuse_layer(layer: Any, kwargs: dict[str, Any]) -> None:
    given = [name for name, value in kwargs.items() if value is not None and value is not False]
    if given or layer.xai_temperature_len > 0 or (layer.logit_cap and layer.logit_capping_method != "tanh"):
        what = ", ".join(given) or f"this layer's temperatures or soft cap ({layer.logit_capping_method})"
        raise NotImplementedError(f"cutlass_kernels does not serve {what}: choose another attention backend.")
