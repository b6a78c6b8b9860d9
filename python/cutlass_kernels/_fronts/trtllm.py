"""FlashInfer's plan-free functions over a paged cache, with TensorRT-LLM's arguments: fronts of ``attention()``."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._caches import latent_formats
from .._core import checks, extra_arguments, signatures
from .._core.fronts import front
from .._core.problems import FP8_DTYPES
from .._core.run_options import Result
from .._core.signatures import typed_as
from . import trtllm_call
from .trtllm_call import FOUR_BITS, OTHER_GPUS, Arguments, Cache, refusals

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
    bound = None if q_len_per_req == 1 else q_len_per_req  # beside offsets, the default of 1 is no bound
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


# --- latent attention --------------------------------------------------------------------------------------------

_LATENT = "trtllm_batch_decode_with_kv_cache_mla"
_BACKENDS = ("auto", "trtllm-gen", "xqa", "cute-dsl")
_SHARDS = "call attention(kv_shard=(world, rank, 1)), with the keys on all ranks as seqused_k."
_OF_LATENT = {
    **dict.fromkeys(("enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global"), _SHARDS),
    "use_fp16_softmax": OTHER_GPUS,
}


class LatentArguments:
    """Those that ``trtllm_batch_decode_with_kv_cache`` does not have, or that differ there."""

    kv_cache: torch.Tensor
    qk_nope_head_dim: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    seq_lens: torch.Tensor | None
    sparse_mla_top_k: int = 0
    sparse_mla_top_k_lens: torch.Tensor | None = None
    is_var_seq: bool = True
    cute_dsl_impl: str = "auto"
    kv_scale_format: str = "auto"
    enable_dcp: bool = False
    use_fp16_softmax: bool | None = None
    return_lse_base: str | None = None


@typed_as(signatures.trtllm_batch_decode_with_kv_cache_mla)
@front(
    [LatentArguments, Arguments],
    "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim block_tables seq_lens "
    "max_seq_len sparse_mla_top_k out bmm1_scale bmm2_scale sinks skip_softmax_threshold_scale_factor enable_pdl "
    "backend is_var_seq uses_shared_paged_kv_idx lse return_lse cute_dsl_impl kv_scale_format cum_seq_lens_q max_q_len "
    "multi_ctas_kv_counter_buffer sparse_mla_top_k_lens enable_dcp cp_world cp_rank causal_seqlens_kv_global "
    "use_fp16_softmax return_lse_base",
    tuples={**trtllm_call.TUPLES, "refused": " ".join(_OF_LATENT), "dims": "kv_lora_rank qk_rope_head_dim"},
    constants={"kv_layout": "NHD", "window_left": -1, "out_dtype": None, "o_scale": None},
)
def trtllm_batch_decode_with_kv_cache_mla(
    given: tuple[Any, ...],
    refused: tuple[Any, ...],
    dims: tuple[int, int],
    max_seq_len: int,
    wanted: tuple[Any, ...],
    cum_seq_lens_q: torch.Tensor | None,
    max_q_len: int | None,
    return_lse_base: str | None,
    sparse_mla_top_k: int,
    sparse_mla_top_k_lens: torch.Tensor | None,
    kv_scale_format: str,
) -> Result:
    """Latent attention (MLA) of decode steps over a paged cache without a plan, under a causal mask.

    The kernel reads lengths and block tables on the device, so nothing synchronises and a captured call follows new
    ones. Row i of n rows of a request stands at position ``i + seq_len - n``.

    Args:
        query: ``[batch, rows, num_heads, kv_lora_rank + qk_rope_head_dim]``, or with ``cum_seq_lens_q`` ``[rows,
            num_heads, ...]``. float16, bfloat16 or float8_e4m3fn.
        kv_cache: ``[pages, page_size, kv_lora_rank + qk_rope_head_dim]``, or with a dimension of one head behind the
            first. The dtype of ``query``, or fp8. Values are its first ``kv_lora_rank`` columns. Or a quantized latent
            cache, uint8 ``[pages, page_size, bytes]``: 656 bytes (DeepSeek V3.2), or 528 without RoPE, see
            ``kv_scale_format``. On Hopper a kernel reads it by lists for bfloat16 queries, else PyTorch.
        workspace_buffer: accepted, not used.
        qk_nope_head_dim: not used: ``bmm1_scale`` is the whole scale.
        kv_lora_rank, qk_rope_head_dim: 512 and 64, with ``sparse_mla_top_k`` also 512 and 0; PyTorch computes others,
            slowly.
        block_tables: int32 ``[batch, M]``, the pages of each request. With ``sparse_mla_top_k`` the keys of each row,
            ``[batch, rows, sparse_mla_top_k]`` or ``[rows of all requests, sparse_mla_top_k]``: slots ``page *
            page_size + offset``; out-of-range indices, such as -1, are ignored.
        seq_lens: int32 ``[batch]``, keys of each request, those of its query rows included. With ``sparse_mla_top_k``,
            so many of a row's indices count at most: per request, or per row, ``[batch, rows]`` or ``[rows of all
            requests]``. May be None then.
        max_seq_len: bound of ``seq_lens``; in CUDA graphs, of those of every replay.
        sparse_mla_top_k: width of the lists of keys in ``block_tables``. 0: these are pages, and rows see all keys up
            to their own position.
        sparse_mla_top_k_lens: int32, one per row: only the leftmost so many indices count, in place of ``seq_lens``.
        out: ``query.shape[:-1] + [kv_lora_rank]``, where to write the output: of any floating-point type, 16 bits being
            what kernels write.
        bmm1_scale: factor of ``q k^T``: the softmax scale times the scales of fp8 queries and keys. A number, or a
            float32 tensor of one element, which the kernel reads.
        bmm2_scale: factor of the output. As ``bmm1_scale``.
        sinks: float32 ``[num_heads]``, or a list of that tensor: ``exp(sinks[h])`` joins the softmax denominator and
            the LSE of head h.
        skip_softmax_threshold_scale_factor: permission to skip keys of small weight. This function computes them all.
        lse: float32 ``[batch * rows, num_heads]`` or ``[batch, rows, num_heads]``, where to write the LSE,
            also without ``return_lse``. Base 2, unless ``return_lse_base`` says otherwise.
        return_lse: whether to return the LSE too.
        cum_seq_lens_q: int32 ``[batch + 1]``, first row of each request, for query lengths that differ.
        max_q_len: bound of these lengths.
        backend: ``"auto"``, ``"trtllm-gen"``, ``"xqa"`` or ``"cute-dsl"``: all of them mean the kernels of this
            library.
        enable_pdl, is_var_seq, cute_dsl_impl, multi_ctas_kv_counter_buffer: accepted, without effect.
        kv_scale_format: required for 528 bytes per token, ``"pow2_fp32"`` or ``"arbitrary_fp32"`` for 4 scales of
            float32. Else without effect.
        uses_shared_paged_kv_idx: False is refused.
        enable_dcp, cp_world, cp_rank, causal_seqlens_kv_global: refused; ``attention(kv_shard=)`` serves keys that are
            spread over ranks.
        use_fp16_softmax: for Blackwell GPUs, refused.
        return_lse_base: ``"base2"`` (None is the same), or ``"basee"`` for the natural logarithm, of ``lse`` too.

    Returns:
        ``out``, in the dtype of ``query`` (bfloat16 for fp8); or ``(out, lse)``, where a new ``lse`` is ``[batch *
        rows, num_heads]``.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, or an unknown backend.
        NotImplementedError: an argument that is refused.

    Examples:
        >>> query = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
        >>> cache = torch.randn(10, 64, 576, dtype=torch.bfloat16)  # 10 pages of 64 tokens
        >>> tables, lens = torch.arange(10, dtype=torch.int32).view(2, 5), torch.tensor([300, 7], dtype=torch.int32)
        >>> trtllm_batch_decode_with_kv_cache_mla(
        ...     query, cache, torch.empty(0), 128, 512, 64, tables, lens, 320, bmm1_scale=192**-0.5
        ... ).shape
        torch.Size([2, 1, 16, 512])
    """
    trtllm_call.refuse(_LATENT, _OF_LATENT, refused, wanted, _BACKENDS)
    query, kv_cache, *_, out, lse, return_lse = given
    if return_lse_base not in (None, "base2", "basee"):
        raise ValueError(f"return_lse_base={return_lse_base!r} is unknown: use 'base2' or 'basee'.")
    rank, rope = (checks.integer(*x) for x in zip(("kv_lora_rank", "qk_rope_head_dim"), dims))
    checks.tensor("query", query, 4 if cum_seq_lens_q is None else 3)
    keys = _pages(kv_cache)
    kv_format = _format_of(keys, rank, rope, kv_scale_format) if keys.dtype is torch.uint8 else None
    for name, x in (("query", query), ("kv_cache", kv_cache if kv_format is None else query)):
        if x.size(-1) != rank + rope or rank < 1:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but kv_lora_rank={dims[0]} and qk_rope_head_dim={dims[1]} make "
                f"{rank + rope} columns: pass 512 and 64 for DeepSeek's models."
            )
    lists = None
    if type(sparse_mla_top_k) is not int or sparse_mla_top_k or sparse_mla_top_k_lens is not None:
        lists = trtllm_call.row_lists(given, sparse_mla_top_k, sparse_mla_top_k_lens, cum_seq_lens_q)
    shape = (*query.shape[:-1], rank)
    o_dtype = torch.bfloat16
    if out is not None or query.dtype not in FP8_DTYPES:
        o_dtype = trtllm_call.wanted_dtype(query, out, None, None)
    if out is not None:
        checks.output(out, shape, o_dtype, query.device)
    each, place, lse_place = None, out, lse  # places are None where no view joins requests and rows
    if cum_seq_lens_q is None:
        each = query.size(1)
        if not each:
            raise ValueError(f"query has shape {tuple(query.shape)}: each request must have at least one row.")
        if isinstance(lse, torch.Tensor) and lse.dim() == 3:
            lse_place = _flat(checks.lse_output(lse, query.shape[:-1], query.device))
        query = query.flatten(0, 1)
        place = None if out is None else _flat(out)
    return_lse = checks.flag("return_lse", return_lse)
    wants_lse = return_lse or lse is not None
    lens = given[4] if lists is not None else _lens(given[4])
    values = keys[..., :rank] if kv_format is None else keys
    given = (query, (keys, values), *given[2:4], lens, *given[5:9], place, lse_place, wants_lse)
    rows, most_keys = (each, cum_seq_lens_q, max_q_len, None), checks.integer("max_seq_len", max_seq_len)
    natural = return_lse_base == "basee"
    result = trtllm_call.attend(
        given, rows, most_keys, (o_dtype, None), natural=natural, lists=lists, kv_format=kv_format
    )
    found, found_lse = result if isinstance(result, tuple) else (result, None)
    if out is not None and place is None:
        out.copy_(found.view(shape))
    if lse is not None and lse_place is None and found_lse is not None:
        lse.copy_(found_lse.view(lse.shape))
    found = found.view(shape) if out is None else out
    return (found, found_lse if lse is None else lse) if return_lse else found


def _flat(x: torch.Tensor) -> torch.Tensor | None:
    """``x`` with its first two dimensions joined, or None where strides allow no such view."""
    batch, rows = x.shape[:2]
    return x.flatten(0, 1) if batch <= 1 or rows <= 1 or x.stride(0) == rows * x.stride(1) else None


def _pages(kv_cache: Any) -> torch.Tensor:
    """``[pages, page_size, 1, columns]``."""
    if not isinstance(kv_cache, torch.Tensor):
        raise TypeError(f"kv_cache is {type(kv_cache).__name__}, not a tensor.")
    if kv_cache.dim() == 3:
        return kv_cache.unsqueeze(2)
    if kv_cache.dim() != 4 or kv_cache.size(1) != 1:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)}: it must be [pages, page_size, columns] or [pages, 1, "
            "page_size, columns]."
        )
    return kv_cache.transpose(1, 2)


def _format_of(keys: torch.Tensor, rank: int, rope: int, kv_scale_format: Any) -> str:
    """``kv_format`` of a cache of uint8."""
    names = {(656, 64): "v3.2", (656, 0): "v3.2"}
    if kv_scale_format in ("pow2_fp32", "arbitrary_fp32"):
        names[528, 0] = "v3.2_nope"
    found = names.get((keys.size(-1), rope))
    if found is None or rank != latent_formats.VALUES:
        raise ValueError(
            f"kv_cache is uint8 with {keys.size(-1)} bytes per token, kv_lora_rank={rank}, qk_rope_head_dim={rope} and "
            f"kv_scale_format={kv_scale_format!r}: with kv_lora_rank=512 pass 656 bytes, or without RoPE 528 and "
            "kv_scale_format='arbitrary_fp32'. For other formats call attention(kv_format=)."
        )
    return found


def _lens(seq_lens: Any) -> torch.Tensor:
    if not isinstance(seq_lens, torch.Tensor):
        raise TypeError(f"seq_lens is {type(seq_lens).__name__}, not a tensor: pass int32 [batch].")
    return seq_lens
