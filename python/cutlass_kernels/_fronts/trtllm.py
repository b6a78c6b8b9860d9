"""FlashInfer's plan-free functions over a paged cache, with TensorRT-LLM's arguments: fronts of ``attention()``."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._core import checks, extra_arguments, signatures
from .._core.fronts import front
from .._core.run_options import Result
from .._core.signatures import typed_as
from . import trtllm_call
from .trtllm_call import FOUR_BITS, Arguments, Cache, refusals

_DECODE, _CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
_XQA = "xqa_batch_decode_with_kv_cache"
_FOUR_BITS = ("o_sf_scale", "o_sf_vec_size", "kv_cache_sf")
_OF_DECODE = refusals(
    _FOUR_BITS,
    "enable_block_sparse_attention cp_world cp_rank causal_seqlens_kv_global bf16q_fp8kv_transform_mode request_order "
    "request_order_plan",
)
_OF_CONTEXT = refusals(_FOUR_BITS, "use_fp16_softmax uses_spcompress")


class ContextArguments:
    """Those of prefill that decode does not have, or that differ there."""

    kv_cache: Cache
    max_q_len: int
    max_kv_len: int
    batch_size: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor | None
    causal: bool = True
    use_fp16_softmax: bool | None = None
    uses_spcompress: bool | None = None


@typed_as(signatures.trtllm_batch_decode_with_kv_cache)
@front(
    Arguments,
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out out_dtype "
    "o_sf_scale o_sf_vec_size sinks kv_layout enable_pdl backend q_len_per_req o_scale mask max_q_len cum_seq_lens_q "
    "skip_softmax_threshold_scale_factor kv_cache_sf uses_shared_paged_kv_idx lse return_lse bmm1_scale_log2 "
    "multi_ctas_kv_counter_buffer enable_block_sparse_attention cp_world cp_rank causal_seqlens_kv_global "
    "bf16q_fp8kv_transform_mode request_order request_order_plan",
    tuples={
        **trtllm_call.TUPLES,
        "refused": " ".join(_OF_DECODE),
        "rows": "q_len_per_req cum_seq_lens_q max_q_len mask",
    },
)
def trtllm_batch_decode_with_kv_cache(
    given: Any, refused: Any, rows: Any, max_seq_len: int, wanted: Any, bmm1_scale_log2: torch.Tensor | None
) -> Result:
    """Decode attention over a paged cache without a plan: ``bmm2_scale * softmax(bmm1_scale * q k^T) v``.

    The kernel reads lengths and block tables on the device, so nothing synchronises and a captured call follows new
    ones. Row i of n rows of a request stands at position ``p = i + seq_len - n`` and sees the keys
    ``p - window_left <= j <= p``. A row that sees no key has output 0 and LSE -inf.

    Args:
        query: ``[rows, num_qo_heads, head_dim]``, ``q_len_per_req`` rows for each request, or rows of
            ``cum_seq_lens_q``. float16, bfloat16 or float8_e4m3fn.
        kv_cache: ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND) or ``[pages, 2, page_size, num_kv_heads,
            head_dim]`` (NHD), keys first; ``[pages, 1, ...]`` where keys and values are the same; or a tuple
            (k_cache, v_cache) of tensors without the second dimension. The dtype of ``query``, or fp8. Any page size
            and strides with a contiguous last dimension.
        workspace_buffer: accepted, not used.
        block_tables: int32 ``[batch, M]``, the pages of each request.
        seq_lens: int32 or uint32 ``[batch]``, keys of each request, those of its query rows included.
        max_seq_len: bound of ``seq_lens``; in CUDA graphs, of those of every replay. It decides the number of KV
            splits.
        bmm1_scale: factor of ``q k^T``: the softmax scale times the scales of fp8 queries and keys. A number, or a
            float32 tensor of one element, which the kernel reads.
        bmm2_scale: factor of the output: the scale of fp8 values divided by that of an fp8 output. As ``bmm1_scale``.
        window_left: keys to the left of a row's own that it sees; -1 is no limit.
        out: the tensor to write to, shaped as ``query``. Rows behind the last request are not written.
        out_dtype: dtype of the output; default that of ``out``, or of ``query``. If it is not that of a 16-bit
            ``query``, a second kernel converts the result.
        sinks: float32 ``[num_qo_heads]``, or a list of that tensor: ``exp(sinks[h])`` joins the softmax denominator
            and the LSE of head h, in natural units. ``bmm1_scale`` does not multiply it.
        kv_layout: ``"HND"`` or ``"NHD"``.
        enable_pdl: accepted, without effect.
        backend: ``"auto"``, ``"trtllm-gen"`` or ``"xqa"``: all of them mean the kernels of this library.
        q_len_per_req: query rows of each request.
        o_scale: accepted for fp8 outputs, where ``bmm2_scale`` includes it; other outputs take 1 alone.
        mask: a mask of draft tokens, see ``xqa_batch_decode_with_kv_cache``.
        max_q_len: bound of the query lengths of ``cum_seq_lens_q``.
        cum_seq_lens_q: int32 ``[batch + 1]``, first row of each request, for query lengths that differ.
        skip_softmax_threshold_scale_factor: permission to skip keys of small weight. This function computes them all.
        lse: float32 ``[rows, num_qo_heads]`` to write the base-2 LSE to, also without ``return_lse``. The LSE is
            copied there.
        return_lse: whether to return the LSE too.
        bmm1_scale_log2: float32 tensor of one element, ``bmm1_scale * log2(e)``, in place of ``bmm1_scale``.
        multi_ctas_kv_counter_buffer: accepted, not used.
        o_sf_scale, o_sf_vec_size, kv_cache_sf: of 4-bit tensors, refused.
        uses_shared_paged_kv_idx: False (other pages for values than for keys) is refused.
        enable_block_sparse_attention, bf16q_fp8kv_transform_mode: for Blackwell GPUs, refused.
        cp_world, cp_rank, causal_seqlens_kv_global, request_order, request_order_plan: for Blackwell GPUs, refused.

    Returns:
        ``out``, shaped as ``query``; or ``(out, lse)``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or an unknown backend.
        NotImplementedError: an argument that is refused.
        RuntimeError: ``num_kv_heads`` does not divide ``num_qo_heads``.

    Examples:
        >>> query = torch.randn(2, 8, 64, dtype=torch.float16)  # 2 requests
        >>> cache = torch.randn(10, 2, 2, 16, 64, dtype=torch.float16)  # 10 pages of 16 tokens, 2 key/value heads
        >>> tables, lens = torch.arange(10, dtype=torch.int32).view(2, 5), torch.tensor([80, 7], dtype=torch.int32)
        >>> trtllm_batch_decode_with_kv_cache(query, cache, torch.empty(0), tables, lens, 80, 64**-0.5).shape
        torch.Size([2, 8, 64])
    """
    trtllm_call.refuse(_DECODE, _OF_DECODE, refused, wanted, ("auto", "trtllm-gen", "xqa"))
    unit = 1.0
    if bmm1_scale_log2 is not None:
        given, unit = (*given[:5], bmm1_scale_log2, *given[6:]), math.log(2.0)
    return trtllm_call.attend(given, rows, checks.integer("max_seq_len", max_seq_len), wanted[:2], unit=unit)


@typed_as(signatures.xqa_batch_decode_with_kv_cache)
@front(
    Arguments,
    "query kv_cache workspace_buffer block_tables seq_lens max_seq_len bmm1_scale bmm2_scale window_left out sinks "
    "kv_layout='NHD' enable_pdl q_len_per_req o_scale mask kv_cache_sf q_cu_seq_lens",
    tuples=trtllm_call.TUPLES,
    constants={"lse": None},
)
def xqa_batch_decode_with_kv_cache(
    given: Any,
    max_seq_len: int,
    q_len_per_req: int | None,
    o_scale: Any,
    mask: Any,
    kv_cache_sf: Any,
    q_cu_seq_lens: Any,
) -> torch.Tensor:
    """Decode attention over a paged cache, of draft tokens too: ``trtllm_batch_decode_with_kv_cache`` in NHD.

    Args:
        query: ``[batch * q_len_per_req, num_qo_heads, head_dim]``, or rows of ``q_cu_seq_lens``.
        q_len_per_req: query rows of each request; with ``q_cu_seq_lens``, a bound of them.
        mask: bits of the draft tokens, uint16 ``[batch, q_len_per_req, 2 * ceil(q_len_per_req / 32)]``, or with
            ``q_cu_seq_lens`` ``[rows, 2 * ceil(q_len_per_req / 32)]``: bit c of a row says whether the row sees draft
            token c of its request. A row sees all keys before the draft tokens. A window applies besides, by positions
            of keys. None is the causal mask, which costs less: for a mask, small kernels of PyTorch first write a bit
            for each row and key, ``batch * q_len_per_req * max_seq_len / 8`` bytes.
        q_cu_seq_lens: int32 or uint32 ``[batch + 1]``, first row of each request, for draft lengths that differ. A
            request may have no rows.

    The other arguments are those of ``trtllm_batch_decode_with_kv_cache``.

    Returns:
        ``out``, shaped as ``query``.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as ``trtllm_batch_decode_with_kv_cache``.

    Examples:
        >>> query = torch.randn(6, 8, 64, dtype=torch.float16)  # 2 requests of 3 draft tokens
        >>> cache = torch.randn(10, 2, 16, 2, 64, dtype=torch.float16)
        >>> tables, lens = torch.arange(10, dtype=torch.int32).view(2, 5), torch.tensor([80, 7], dtype=torch.int32)
        >>> xqa_batch_decode_with_kv_cache(
        ...     query, cache, torch.empty(0), tables, lens, 80, 64**-0.5, q_len_per_req=3
        ... ).shape
        torch.Size([6, 8, 64])
    """
    extra_arguments.unsupported(_XQA, FOUR_BITS, kv_cache_sf=kv_cache_sf)
    bound = None if q_len_per_req == 1 else q_len_per_req  # the default, 1, tells nothing of requests that have offsets
    rows = q_len_per_req, q_cu_seq_lens, bound, mask
    return trtllm_call.attend(given, rows, checks.integer("max_seq_len", max_seq_len), (None, o_scale))


@typed_as(signatures.trtllm_batch_context_with_kv_cache)
@front(
    [ContextArguments, Arguments],
    "query kv_cache workspace_buffer block_tables seq_lens max_q_len max_kv_len bmm1_scale= bmm2_scale= batch_size "
    "cum_seq_lens_q cum_seq_lens_kv window_left out out_dtype o_sf_scale o_sf_vec_size kv_layout enable_pdl sinks "
    "kv_cache_sf skip_softmax_threshold_scale_factor uses_shared_paged_kv_idx causal lse return_lse "
    "multi_ctas_kv_counter_buffer use_fp16_softmax uses_spcompress backend='trtllm-gen'",
    tuples={
        **trtllm_call.TUPLES,
        "refused": " ".join(_OF_CONTEXT),
        "lengths": "batch_size max_q_len max_kv_len",
    },
    constants={"o_scale": 1.0},
)
def trtllm_batch_context_with_kv_cache(
    given: Any, refused: Any, wanted: Any, lengths: Any, cum_seq_lens_q: Any, causal: bool
) -> Result:
    """Prefill and append attention over a paged cache without a plan, for a batch of any query lengths.

    Args:
        query: ``[rows, num_qo_heads, head_dim]``, the requests one after the other.
        max_q_len, max_kv_len: bounds of the lengths; in CUDA graphs, of those of every replay. Rows of a request
            beyond ``max_q_len`` need not be computed.
        batch_size: number of requests.
        cum_seq_lens_q: int32 ``[batch_size + 1]``, first row of each request.
        cum_seq_lens_kv: accepted, not read: ``seq_lens`` says the same.
        causal: whether a row sees only keys up to its own position, ``p = i + seq_len - q_len``. Without, a window
            limits the keys on the left alone.
        use_fp16_softmax, uses_spcompress: for Blackwell GPUs, refused.
        backend: ``"trtllm-gen"`` or ``"auto"``, which mean the kernels of this library.

    The other arguments are those of ``trtllm_batch_decode_with_kv_cache``.

    Returns:
        ``out``, shaped as ``query``; or ``(out, lse)``.

    Raises:
        ValueError, NotImplementedError, RuntimeError: as ``trtllm_batch_decode_with_kv_cache``.

    Examples:
        >>> query = torch.randn(9, 8, 64, dtype=torch.float16)  # 2 requests of 4 and 5 rows
        >>> cache = torch.randn(10, 2, 2, 16, 64, dtype=torch.float16)
        >>> tables, lens = torch.arange(10, dtype=torch.int32).view(2, 5), torch.tensor([80, 7], dtype=torch.int32)
        >>> cum_q, cum_kv = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([0, 80, 87], dtype=torch.int32)
        >>> trtllm_batch_context_with_kv_cache(
        ...     query, cache, torch.empty(0), tables, lens, 5, 80, 64**-0.5, 1.0, 2, cum_q, cum_kv
        ... ).shape
        torch.Size([9, 8, 64])
    """
    trtllm_call.refuse(_CONTEXT, _OF_CONTEXT, refused, wanted, ("auto", "trtllm-gen"))
    batch_size, max_q_len, max_kv_len = lengths
    if not isinstance(cum_seq_lens_q, torch.Tensor) or cum_seq_lens_q.numel() != batch_size + 1:
        size = cum_seq_lens_q.numel() if isinstance(cum_seq_lens_q, torch.Tensor) else type(cum_seq_lens_q).__name__
        raise ValueError(
            f"cum_seq_lens_q has {size} elements, but batch_size={batch_size}: it needs batch_size + 1, the first row "
            "of each request and the end of the last."
        )
    rows = None, cum_seq_lens_q, max_q_len, None
    return trtllm_call.attend(given, rows, checks.integer("max_kv_len", max_kv_len), wanted[:2], causal)
