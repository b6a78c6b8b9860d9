"""What vLLM asks of a backend before it makes one: which models, caches and GPUs it serves."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from .impl import CutlassKernelsImpl
from .metadata import MetadataBuilder

MOST_HEAD_DIM, MOST_HEAD_DIM_FP8 = 512, 256


class CutlassKernelsBackend(AttentionBackend):
    """Kernels read pages of any layout, where K and V lie side by side: ``[blocks, heads, tokens, 2 * head_dim]``."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # vLLM looks its enumerator up by this name

    @staticmethod
    def get_impl_cls() -> type[CutlassKernelsImpl]:
        return CutlassKernelsImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= MOST_HEAD_DIM

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (
            AttentionType.DECODER,
            AttentionType.ENCODER,
            AttentionType.ENCODER_ONLY,
            AttentionType.ENCODER_DECODER,
        )

    @classmethod
    def _is_served(cls) -> bool:
        return True

    supports_sink = supports_sliding_window = supports_non_causal = _is_served
    supports_batch_invariance = supports_per_head_quant_scales = _is_served

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        if kv_cache_dtype in ("float16", "bfloat16") and f"torch.{kv_cache_dtype}" != str(dtype):
            return "caches of 16 bits have the type of the model"
        is_fp8 = kv_cache_dtype is not None and is_quantized_kv_cache(kv_cache_dtype)
        if is_fp8 and (head_size > MOST_HEAD_DIM_FP8 or head_size % 16):
            return f"fp8 caches take head sizes up to {MOST_HEAD_DIM_FP8} that are multiples of 16"
        return None
