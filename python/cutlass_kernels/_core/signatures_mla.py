"""Signatures, for type checkers, of ``mla``: see ``signatures``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload

from torch import Tensor

from .signatures import Either, Number, Pair
from .signatures_trtllm import Sinks

if TYPE_CHECKING:
    from typing_extensions import Unpack


class MlaRunOptions(TypedDict, total=False):
    profiler_buffer: Tensor | None
    kv_len: Tensor | None
    page_table: Tensor | None
    return_lse_base_on_e: bool
    o_scale: Number
    query: Any
    kv_cache: Any
    ckv_scale: Number
    ckv_scale_arr: Tensor | None
    kpe_scale: Number
    sinks: Tensor | None
    skip_softmax_threshold_scale_factor: Number
    bmm1_scale: float | Tensor | None
    bmm2_scale: float | Tensor | None


class MlaDecodeOptions(TypedDict, total=False):
    cute_dsl_impl: str
    kv_scale_format: str
    cum_seq_lens_q: Tensor | None
    max_q_len: int | None
    multi_ctas_kv_counter_buffer: Tensor | None
    sparse_mla_top_k_lens: Tensor | None
    enable_dcp: bool
    cp_world: int
    cp_rank: int
    causal_seqlens_kv_global: Tensor | None
    use_fp16_softmax: bool | None
    return_lse_base: str | None


# fmt: off


class MlaWrapper(Protocol):
    @overload
    def run(
        self: Any, q_nope: Tensor | None = None, q_pe: Tensor | None = None, ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: Literal[False] = False, **options: Unpack[MlaRunOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q_nope: Tensor | None = None, q_pe: Tensor | None = None, ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: Literal[True] = ..., **options: Unpack[MlaRunOptions],
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q_nope: Tensor | None = None, q_pe: Tensor | None = None, ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: bool = ..., **options: Unpack[MlaRunOptions],
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...


@overload
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
    qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor | None, max_seq_len: int, sparse_mla_top_k: int = 0,
    out: Tensor | None = None, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, sinks: Sinks = None,
    skip_softmax_threshold_scale_factor: Number = None, enable_pdl: bool | None = None, backend: str = "auto",
    is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None,
    return_lse: Literal[False] = False, **options: Unpack[MlaDecodeOptions],
) -> Tensor: ...
@overload
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
    qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor | None, max_seq_len: int, sparse_mla_top_k: int = 0,
    out: Tensor | None = None, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, sinks: Sinks = None,
    skip_softmax_threshold_scale_factor: Number = None, enable_pdl: bool | None = None, backend: str = "auto",
    is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None,
    return_lse: Literal[True] = ..., **options: Unpack[MlaDecodeOptions],
) -> Pair: ...
@overload
def trtllm_batch_decode_with_kv_cache_mla(
    query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
    qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor | None, max_seq_len: int, sparse_mla_top_k: int = 0,
    out: Tensor | None = None, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, sinks: Sinks = None,
    skip_softmax_threshold_scale_factor: Number = None, enable_pdl: bool | None = None, backend: str = "auto",
    is_var_seq: bool = True, uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None,
    return_lse: bool = ..., **options: Unpack[MlaDecodeOptions],
) -> Either: ...
def trtllm_batch_decode_with_kv_cache_mla(*args: Any, **kwargs: Any) -> Any: ...
