"""Signatures, for type checkers, of functions that return one tensor or two.

Each function has three: ``return_lse=False`` returns a tensor, ``True`` a pair, and a bool variable either. They are
kept apart from the functions, since three long lists above each would hide the code. Nothing reads them at run time:
``help()`` and ``inspect.signature`` show the functions' own signatures. A test compares the two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, overload

import torch
from torch import Tensor

from .schedules import Schedule

if TYPE_CHECKING:
    from typing_extensions import Unpack

Pair = tuple[Tensor, Tensor]
Either = Tensor | Pair
Cache = Tensor | Pair
DType = str | torch.dtype | None
Number = float | None
Scale = float | Tensor | None
S = TypeVar("S", bound=Callable[..., Any])


def typed_as(signature: S) -> Callable[[Callable[..., Any]], S]:
    """Lets type checkers see ``signature`` in place of a function's own. The function is returned as it is."""

    def decorate(function: Any) -> Any:
        return function

    return decorate


def declares(implementation: Callable[..., Any]) -> Callable[[S], S]:
    """Puts ``implementation`` in the place of a function, under its name, signature and documentation.

    For an implementation that takes more than the documented signature. Pages made from the sources, ``help()`` and
    ``inspect.signature`` show the function. ``inspect.unwrap`` does not lead to it, as it has no body.
    """

    def decorate(function: Any) -> Any:
        declared: Any = functools.update_wrapper(implementation, function)
        declared.__signature__ = inspect.signature(function)
        del declared.__wrapped__
        return declared

    return decorate


# --- keywords that several signatures share ----------------------------------------------------------------------


class AttentionOptions(TypedDict, total=False):
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    kv_shard: tuple[int, int, int] | None
    q_rope: Tensor | None
    k_rope: Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    page_table: Tensor | None
    kv_indptr: Tensor | None
    kv_indices: Tensor | None
    kv_last_page_len: Tensor | None
    kv_layout: str
    causal: bool
    window: tuple[int, int]
    chunk_size: int
    packed_custom_mask: Tensor | None
    mask_indptr: Tensor | None
    logits_soft_cap: Number
    sm_scale: Number
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    q_descale: Scale
    k_descale: Scale
    v_descale: Scale
    o_dtype: torch.dtype | None
    out: Tensor | None
    lse_base: float
    num_splits: int
    batch_invariant: bool
    schedule: Schedule | None
    backend: str


class SingleOptions(TypedDict, total=False):
    scale_q: Scale
    scale_k: Scale
    scale_v: Scale
    o_dtype: DType
    backend: str
    kv_cache_sf: Any
    sinks: Tensor | None
    out: Tensor | None
    lse: Tensor | None


class SinglePrefillOptions(SingleOptions, total=False):
    use_fp16_qk_reduction: bool
    k_scale: Number
    v_scale: Number


class RunOptions(TypedDict, total=False):
    out: Tensor | None
    lse: Tensor | None
    lse_base: str
    lse_layout: str
    enable_pdl: bool | None
    sinks: Tensor | None
    kv_cache_sf: Any
    skip_softmax_threshold_scale_factor: Number


class PagedOptions(RunOptions, total=False):
    use_fp16_softmax: bool | None
    uses_spcompress: bool | None


class PagedForwardOptions(PagedOptions, total=False):
    q_scale: Scale


class PagedRunOptions(PagedForwardOptions, total=False):
    window_left: int | None


class DecodeForwardOptions(PagedOptions, total=False):
    q_len_per_req: int | None


class DecodeRunOptions(DecodeForwardOptions, total=False):
    window_left: int | None


class RaggedForwardOptions(RunOptions, total=False):
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    o_scale: Scale


class RaggedRunOptions(RaggedForwardOptions, total=False):
    window_left: int | None


class CascadeOptions(TypedDict, total=False):
    q_scale: Scale
    k_scale: Scale
    v_scale: Scale
    out: Tensor | None


# --- functions ---------------------------------------------------------------------------------------------------
# Lines are filled, so that the three signatures of a function fit on one screen. A call without the flag matches the
# first one. The other two give it a default (``...``) only where a parameter before it has one.
# fmt: off


@overload
def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    allow_fp16_qk_reduction: bool = False, sm_scale: Number = None, window_left: int = -1,
    logits_soft_cap: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
    return_lse: Literal[False] = False, **options: Unpack[SinglePrefillOptions],
) -> Tensor: ...
@overload
def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    allow_fp16_qk_reduction: bool = False, sm_scale: Number = None, window_left: int = -1,
    logits_soft_cap: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
    return_lse: Literal[True], **options: Unpack[SinglePrefillOptions],
) -> Pair: ...
@overload
def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    allow_fp16_qk_reduction: bool = False, sm_scale: Number = None, window_left: int = -1,
    logits_soft_cap: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
    return_lse: bool, **options: Unpack[SinglePrefillOptions],
) -> Either: ...
def single_prefill_with_kv_cache(*args: Any, **kwargs: Any) -> Any: ...


def single_prefill_with_kv_cache_return_lse(
    q: Tensor, k: Tensor, v: Tensor, custom_mask: Tensor | None = None, packed_custom_mask: Tensor | None = None,
    causal: bool = False, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    allow_fp16_qk_reduction: bool = False, sm_scale: Number = None, window_left: int = -1,
    logits_soft_cap: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
    return_lse: Literal[True] = True, **options: Unpack[SinglePrefillOptions],
) -> Pair:
    raise NotImplementedError


@overload
def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: Number = None, k_scale: Number = None, v_scale: Number = None,
    window_left: int = -1, logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None,
    rope_theta: Number = None, return_lse: Literal[False] = False, **options: Unpack[SingleOptions],
) -> Tensor: ...
@overload
def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: Number = None, k_scale: Number = None, v_scale: Number = None,
    window_left: int = -1, logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None,
    rope_theta: Number = None, return_lse: Literal[True] = ..., **options: Unpack[SingleOptions],
) -> Pair: ...
@overload
def single_decode_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False, q_scale: Number = None, k_scale: Number = None, v_scale: Number = None,
    window_left: int = -1, logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None,
    rope_theta: Number = None, return_lse: bool = ..., **options: Unpack[SingleOptions],
) -> Either: ...
def single_decode_with_kv_cache(*args: Any, **kwargs: Any) -> Any: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True] = ..., **options: Unpack[AttentionOptions]
) -> Pair: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = ..., **options: Unpack[AttentionOptions]
) -> Either: ...
def attention(*args: Any, **kwargs: Any) -> Any: ...


@overload
def trtllm_fmha_v2_prefill(
    qkv: Tensor | tuple[Any, ...] | list[Any], input_layout: str, workspace_buffer: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor, batch_size: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor, block_tables: Tensor | None = None, out: Tensor | None = None,
    out_dtype: DType = None, sinks: Tensor | list[Tensor] | None = None, pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: Number = None, mask_mode: str = "causal", window_left: int = -1,
    chunked_attention_size: int = 0, save_softmax_stats: Literal[False] = False,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Tensor: ...
@overload
def trtllm_fmha_v2_prefill(
    qkv: Tensor | tuple[Any, ...] | list[Any], input_layout: str, workspace_buffer: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor, batch_size: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor, block_tables: Tensor | None = None, out: Tensor | None = None,
    out_dtype: DType = None, sinks: Tensor | list[Tensor] | None = None, pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: Number = None, mask_mode: str = "causal", window_left: int = -1,
    chunked_attention_size: int = 0, save_softmax_stats: Literal[True] = ...,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Pair: ...
@overload
def trtllm_fmha_v2_prefill(
    qkv: Tensor | tuple[Any, ...] | list[Any], input_layout: str, workspace_buffer: Tensor, seq_lens: Tensor,
    max_q_len: int, max_kv_len: int, bmm1_scale: float | Tensor, bmm2_scale: float | Tensor, batch_size: int,
    cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor, block_tables: Tensor | None = None, out: Tensor | None = None,
    out_dtype: DType = None, sinks: Tensor | list[Tensor] | None = None, pos_encoding_mode: str | None = None,
    logits_soft_cap_scale: Number = None, mask_mode: str = "causal", window_left: int = -1,
    chunked_attention_size: int = 0, save_softmax_stats: bool = ...,
    skip_softmax_threshold_scale_factor: float = 0,
) -> Either: ...
def trtllm_fmha_v2_prefill(*args: Any, **kwargs: Any) -> Any: ...


# --- methods -----------------------------------------------------------------------------------------------------


class PagedPrefill(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, k_scale: Scale = None, v_scale: Scale = None,
        return_lse: Literal[False] = False, **options: Unpack[PagedRunOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, k_scale: Scale = None, v_scale: Scale = None,
        return_lse: Literal[True] = ..., **options: Unpack[PagedRunOptions],
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, k_scale: Scale = None, v_scale: Scale = None,
        return_lse: bool = ..., **options: Unpack[PagedRunOptions],
    ) -> Either: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /, *,
        return_lse: Literal[False] = False, **options: Unpack[PagedRunOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /, *,
        return_lse: Literal[True], **options: Unpack[PagedRunOptions],
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /, *,
        return_lse: bool, **options: Unpack[PagedRunOptions],
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def run_return_lse(
        self: Any, q: Tensor, paged_kv_cache: Cache, k_scale: Scale = None, v_scale: Scale = None,
        **options: Unpack[PagedRunOptions],
    ) -> Pair: ...
    @overload
    def run_return_lse(
        self: Any, q: Tensor, paged_kv_cache: Cache, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /,
        **options: Unpack[PagedRunOptions],
    ) -> Pair: ...
    def run_return_lse(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def forward(
        self: Any, q: Tensor, paged_kv_cache: Cache, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, k_scale: Number = None, v_scale: Number = None, window_left: int = -1,
        logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        *, return_lse: Literal[False] = False, **options: Unpack[PagedForwardOptions],
    ) -> Tensor: ...
    @overload
    def forward(
        self: Any, q: Tensor, paged_kv_cache: Cache, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, k_scale: Number = None, v_scale: Number = None, window_left: int = -1,
        logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        *, return_lse: Literal[True], **options: Unpack[PagedForwardOptions],
    ) -> Pair: ...
    @overload
    def forward(
        self: Any, q: Tensor, paged_kv_cache: Cache, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, k_scale: Number = None, v_scale: Number = None, window_left: int = -1,
        logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        *, return_lse: bool, **options: Unpack[PagedForwardOptions],
    ) -> Either: ...
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    def forward_return_lse(
        self: Any, q: Tensor, paged_kv_cache: Cache, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, k_scale: Number = None, v_scale: Number = None, window_left: int = -1,
        logits_soft_cap: Number = None, sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        **options: Unpack[PagedForwardOptions],
    ) -> Pair: ...


class RaggedPrefill(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: Literal[False] = False,
        **options: Unpack[RaggedRunOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: Literal[True], **options: Unpack[RaggedRunOptions]
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, **options: Unpack[RaggedRunOptions]
    ) -> Either: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /, *,
        return_lse: Literal[False] = False, **options: Unpack[RaggedRunOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /, *,
        return_lse: Literal[True], **options: Unpack[RaggedRunOptions],
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /, *,
        return_lse: bool, **options: Unpack[RaggedRunOptions],
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def run_return_lse(
        self: Any, q: Tensor, k: Tensor, v: Tensor, **options: Unpack[RaggedRunOptions]
    ) -> Pair: ...
    @overload
    def run_return_lse(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Tensor, scale_k: Tensor, scale_v: Tensor, /,
        **options: Unpack[RaggedRunOptions],
    ) -> Pair: ...
    def run_return_lse(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    @overload
    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
        return_lse: Literal[False] = False, **options: Unpack[RaggedForwardOptions],
    ) -> Tensor: ...
    @overload
    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
        return_lse: Literal[True], **options: Unpack[RaggedForwardOptions],
    ) -> Pair: ...
    @overload
    def forward(
        self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
        return_lse: bool, **options: Unpack[RaggedForwardOptions],
    ) -> Either: ...
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    def forward_return_lse(
        self: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        **options: Unpack[RaggedForwardOptions],
    ) -> Pair: ...


class PagedDecode(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, return_lse: Literal[False] = False, **options: Unpack[DecodeRunOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, return_lse: Literal[True] = ..., **options: Unpack[DecodeRunOptions],
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, return_lse: bool = ..., **options: Unpack[DecodeRunOptions],
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    def run_return_lse(
        self: Any, q: Tensor, paged_kv_cache: Cache, q_scale: Scale = None, k_scale: Scale = None,
        v_scale: Scale = None, **options: Unpack[DecodeRunOptions],
    ) -> Pair: ...

    @overload
    def forward(
        self: Any, q: Tensor, paged_kv_cache: Cache, pos_encoding_mode: str = "NONE", q_scale: Number = None,
        k_scale: Number = None, v_scale: Number = None, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
        return_lse: Literal[False] = False, **options: Unpack[DecodeForwardOptions],
    ) -> Tensor: ...
    @overload
    def forward(
        self: Any, q: Tensor, paged_kv_cache: Cache, pos_encoding_mode: str = "NONE", q_scale: Number = None,
        k_scale: Number = None, v_scale: Number = None, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
        return_lse: Literal[True], **options: Unpack[DecodeForwardOptions],
    ) -> Pair: ...
    @overload
    def forward(
        self: Any, q: Tensor, paged_kv_cache: Cache, pos_encoding_mode: str = "NONE", q_scale: Number = None,
        k_scale: Number = None, v_scale: Number = None, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None, *,
        return_lse: bool, **options: Unpack[DecodeForwardOptions],
    ) -> Either: ...
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any: ...

    def forward_return_lse(
        self: Any, q: Tensor, paged_kv_cache: Cache, pos_encoding_mode: str = "NONE", q_scale: Number = None,
        k_scale: Number = None, v_scale: Number = None, window_left: int = -1, logits_soft_cap: Number = None,
        sm_scale: Number = None, rope_scale: Number = None, rope_theta: Number = None,
        **options: Unpack[DecodeForwardOptions],
    ) -> Pair: ...


class Cascade(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, *, return_lse: Literal[False] = False,
        **options: Unpack[CascadeOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, *, return_lse: Literal[True], **options: Unpack[CascadeOptions]
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, paged_kv_cache: Cache, *, return_lse: bool, **options: Unpack[CascadeOptions]
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...
