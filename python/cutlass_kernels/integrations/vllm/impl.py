"""The attention of a layer: new keys and values into the cache, then one call of ``attention()``."""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as envs
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from ..._attend.plan_free import attention
from ..._caches.slots_of_tokens import append_paged_kv_cache_by_slot
from . import context_parallel
from .metadata import Metadata


class CutlassKernelsImpl(AttentionImpl[Metadata]):
    """Attention of one layer.

    Raises:
        NotImplementedError: options that no call of this library computes. The message says which.
    """

    supports_dcp = True
    can_return_lse_for_decode = True
    lse_base_on_e = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.attn_type, self.kv_cache_dtype = attn_type, kv_cache_dtype
        self.sliding_window = sliding_window
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.has_cache = attn_type not in (AttentionType.ENCODER_ONLY, AttentionType.ENCODER)
        self.is_fp8 = is_quantized_kv_cache(kv_cache_dtype)
        self.sinks, self.model_sinks = sinks, sinks
        self.combine = context_parallel.combine_function()
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options: dict[str, Any] = dict(
            sm_scale=self.scale,
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=slopes,
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
        self._refuse(slopes is not None, sliding_window is not None, logits_soft_cap)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks are weights of the model in its own type; kernels read fp32. Weights may be loaded again: the address
        stays, which CUDA graphs know.
        """
        if self.model_sinks is None or self.sinks is None:
            return
        if self.sinks is self.model_sinks:
            self.sinks = self.model_sinks.detach().to(torch.float32, copy=True)
        else:
            self.sinks.copy_(self.model_sinks)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Writes keys and values ``[tokens, heads, head_dim]`` to their slots. Rows behind the slots are padding."""
        if not self.has_cache:
            return
        k_cache, v_cache = self.caches(kv_cache)
        append_paged_kv_cache_by_slot(key, value, k_cache, v_cache, slot_mapping, *self.scales(layer), kv_layout="HND")

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step.

        Args:
            layer: has the scales of an fp8 cache.
            query: ``[tokens, num_heads, head_dim]``, of which the first ``num_actual_tokens`` count.
            key, value: ``[tokens, num_kv_heads, head_dim]``, already in the cache where there is one.
            kv_cache: ``[blocks, num_kv_heads, block_size, 2 * head_dim]`` of any strides.
            attn_metadata: None in vLLM's profiling run.
            output: where the result goes, ``[tokens, num_heads, head_dim]``.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("cutlass_kernels writes outputs of 16 bits: switch fuse_attn_quant off.")
        if attn_metadata is None:
            return output.fill_(0)
        count = attn_metadata.num_actual_tokens
        q, out = query[:count], output[:count]
        if not self.has_cache:
            # Encoders: every row sees the whole sequence, which is in key and value.
            given = dict(window=self.window(causal=False), sinks=self.sinks, out=out, **self.options)
            attention(q, key[:count], value[:count], **attn_metadata.new_tokens(), **given)
        elif self.dcp_world_size > 1:
            context_parallel.forward(self, layer, q, key[:count], value[:count], kv_cache, attn_metadata, out)
        else:
            k_cache, v_cache = self.caches(kv_cache)
            k_scale, v_scale = self.scales(layer)
            attention(
                q,
                k_cache,
                v_cache,
                cu_seqlens_q=attn_metadata.query_start_loc,
                seqused_k=attn_metadata.seq_lens,
                max_seqlen_q=attn_metadata.max_query_len,
                max_seqlen_k=attn_metadata.max_seq_len,
                page_table=attn_metadata.block_table,
                kv_layout="HND",
                causal=attn_metadata.causal,
                window=self.window(attn_metadata.causal),
                sinks=self.sinks,
                k_descale=k_scale,
                v_descale=v_scale,
                out=out,
                **self.options,
            )
        return output

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, ``[blocks, heads, tokens, head_dim]``, in their type: vLLM keeps fp8 as bytes."""
        if self.is_fp8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        return kv_cache[..., : self.head_size], kv_cache[..., self.head_size :]

    def scales(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Scales of K and V, on the device: one, or one per head."""
        return (layer._k_scale, layer._v_scale) if self.is_fp8 else (None, None)

    def window(self, causal: bool) -> tuple[int, int]:
        """vLLM's windows count the row's own key, and without a causal mask reach as far to the right."""
        if self.sliding_window is None:
            return (-1, -1)
        return (self.sliding_window - 1, -1 if causal else self.sliding_window - 1)

    def _refuse(self, has_alibi: bool, has_window: bool, soft_cap: float | None) -> None:
        refused = None
        if has_alibi and (soft_cap or self.attn_type != AttentionType.DECODER):
            refused = "ALiBi with a soft cap, or in encoders"
        elif self.is_fp8 and not self.has_cache:
            refused = "fp8 caches of encoders, which have no cache"
        elif self.dcp_world_size > 1 and (has_alibi or has_window):
            refused = "decode context parallelism of layers with ALiBi or a sliding window"
        if refused is not None:
            raise NotImplementedError(f"cutlass_kernels does not serve {refused}: choose another attention backend.")
