"""Fused prefill attention with the arguments of TensorRT-LLM's FMHAv2: five input layouts, one fused scale per product.

The layouts become the token-major or paged views that every other function of the package uses; nothing is copied.
"""

from __future__ import annotations

from ._fronts.fmha_v2_prefill import LAYOUTS, MASK_MODES, fmha_v2_stats_to_lse, trtllm_fmha_v2_prefill

__all__ = ["LAYOUTS", "MASK_MODES", "fmha_v2_stats_to_lse", "trtllm_fmha_v2_prefill"]
