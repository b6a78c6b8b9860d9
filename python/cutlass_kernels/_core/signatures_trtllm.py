"""Signatures, for type checkers, of ``trtllm`` and of the wrapper with sinks: see ``signatures``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, overload

from torch import Tensor

from .signatures import Cache, DType, Either, Number, Pair, Scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

Sinks = Tensor | list[Tensor] | None


class DecodeOptions(TypedDict, total=False):
    bmm1_scale_log2: Tensor | None
    multi_ctas_kv_counter_buffer: Tensor | None
    enable_block_sparse_attention: bool
    cp_world: int
    cp_rank: int
    causal_seqlens_kv_global: Tensor | None
    bf16q_fp8kv_transform_mode: str | None
    request_order: Tensor | None
    request_order_plan: Any


class ContextOptions(TypedDict, total=False):
    multi_ctas_kv_counter_buffer: Tensor | None
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None
    backend: str


# fmt: off


@overload
def trtllm_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: Cache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, window_left: int = -1,
    out: Tensor | None = None, out_dtype: DType = None, o_sf_scale: Number = None, o_sf_vec_size: int | None = None,
    sinks: Sinks = None, kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto",
    q_len_per_req: int | None = 1, o_scale: Number = 1.0, mask: Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None, skip_softmax_threshold_scale_factor: Number = None, kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None, return_lse: Literal[False] = False,
    **options: Unpack[DecodeOptions],
) -> Tensor: ...
@overload
def trtllm_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: Cache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, window_left: int = -1,
    out: Tensor | None = None, out_dtype: DType = None, o_sf_scale: Number = None, o_sf_vec_size: int | None = None,
    sinks: Sinks = None, kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto",
    q_len_per_req: int | None = 1, o_scale: Number = 1.0, mask: Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None, skip_softmax_threshold_scale_factor: Number = None, kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None, return_lse: Literal[True] = ...,
    **options: Unpack[DecodeOptions],
) -> Pair: ...
@overload
def trtllm_batch_decode_with_kv_cache(
    query: Tensor, kv_cache: Cache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_seq_len: int, bmm1_scale: float | Tensor = 1.0, bmm2_scale: float | Tensor = 1.0, window_left: int = -1,
    out: Tensor | None = None, out_dtype: DType = None, o_sf_scale: Number = None, o_sf_vec_size: int | None = None,
    sinks: Sinks = None, kv_layout: str = "HND", enable_pdl: bool | None = None, backend: str = "auto",
    q_len_per_req: int | None = 1, o_scale: Number = 1.0, mask: Tensor | None = None, max_q_len: int | None = None,
    cum_seq_lens_q: Tensor | None = None, skip_softmax_threshold_scale_factor: Number = None, kv_cache_sf: Any = None,
    uses_shared_paged_kv_idx: bool = True, lse: Tensor | None = None, return_lse: bool = ...,
    **options: Unpack[DecodeOptions],
) -> Either: ...
def trtllm_batch_decode_with_kv_cache(*args: Any, **kwargs: Any) -> Any: ...


@overload
def trtllm_batch_context_with_kv_cache(
    query: Tensor, kv_cache: Cache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor, batch_size: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor | None, window_left: int = -1, out: Tensor | None = None,
    out_dtype: DType = None, o_sf_scale: Number = None, o_sf_vec_size: int | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: Sinks = None, kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: Number = None, uses_shared_paged_kv_idx: bool = True, causal: bool = True,
    lse: Tensor | None = None, return_lse: Literal[False] = False, **options: Unpack[ContextOptions],
) -> Tensor: ...
@overload
def trtllm_batch_context_with_kv_cache(
    query: Tensor, kv_cache: Cache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor, batch_size: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor | None, window_left: int = -1, out: Tensor | None = None,
    out_dtype: DType = None, o_sf_scale: Number = None, o_sf_vec_size: int | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: Sinks = None, kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: Number = None, uses_shared_paged_kv_idx: bool = True, causal: bool = True,
    lse: Tensor | None = None, return_lse: Literal[True] = ..., **options: Unpack[ContextOptions],
) -> Pair: ...
@overload
def trtllm_batch_context_with_kv_cache(
    query: Tensor, kv_cache: Cache, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor, batch_size: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor | None, window_left: int = -1, out: Tensor | None = None,
    out_dtype: DType = None, o_sf_scale: Number = None, o_sf_vec_size: int | None = None, kv_layout: str = "HND",
    enable_pdl: bool | None = None, sinks: Sinks = None, kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: Number = None, uses_shared_paged_kv_idx: bool = True, causal: bool = True,
    lse: Tensor | None = None, return_lse: bool = ..., **options: Unpack[ContextOptions],
) -> Either: ...
def trtllm_batch_context_with_kv_cache(*args: Any, **kwargs: Any) -> Any: ...


class SinkOptions(TypedDict, total=False):
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    out: Tensor | None
    lse: Tensor | None
    lse_base: str
    lse_layout: str
    enable_pdl: bool | None
    window_left: int | None
    kv_cache_sf: Any
    skip_softmax_threshold_scale_factor: Number
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None


class SinkPrefill(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, sinks: Tensor | None = None, sm_scale: Number = None, *,
        return_lse: Literal[False] = False, **options: Unpack[SinkOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, sinks: Tensor | None = None, sm_scale: Number = None, *,
        return_lse: Literal[True], **options: Unpack[SinkOptions],
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, sinks: Tensor | None = None, sm_scale: Number = None, *,
        return_lse: bool, **options: Unpack[SinkOptions],
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    def run_return_lse(
        self: Any, q: Tensor, paged_kv_cache: Cache, sinks: Tensor | None = None, sm_scale: Number = None,
        **options: Unpack[SinkOptions],
    ) -> Pair: ...
