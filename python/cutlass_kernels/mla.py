"""Decode and append of multi-head latent attention (MLA) in its absorbed form: FlashInfer's, FlashMLA's and
TensorRT-LLM's calls, as fronts of ``attention()``.

In the absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1) every query head reads the same key of 576 columns:
512 of the compressed vector, and 64 rotated by the position. The values are the first 512 columns of the keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from . import _args, _spellings
from ._attention import attention
from ._options import Result
from ._trtllm_call import OTHER_GPUS

LATENT, ROPE = 512, 64

_SPARSE = "it is for sparse attention. Leave it out, and pass block_table and cache_seqlens."


class BatchMLAPagedAttentionWrapper:
    """Latent attention over a paged cache with ``plan()`` and ``run()``, as FlashInfer's wrapper of this name.

    ``plan()`` keeps lengths and page tables, ``run()`` computes. The kernel reads lengths on the GPU. In CUDA graph
    mode ``plan()`` writes them to the buffers given here, and a replayed graph follows them.

    Args:
        float_workspace_buffer: a tensor on the device of the queries. Its memory is not used.
        use_cuda_graph: whether ``run()`` is captured. All four buffers are then required.
        qo_indptr, kv_indptr, kv_indices, kv_len_arr: int32 buffers of CUDA graph mode: ``[B + 1]``, ``[B + 1]``, as
            many page numbers as there will ever be, ``[B]``.
        backend: "auto", "fa3", "fa2" or "reference"; FlashInfer's "cutlass" and "trtllm-gen" mean "auto".

    Raises:
        ValueError: CUDA graph mode without its buffers.

    Example:
        >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))
        >>> lens = torch.tensor([17, 5], dtype=torch.int32)  # two requests, pages of 8 tokens
        >>> q_indptr, kv_indptr = torch.tensor([0, 1, 2]), torch.tensor([0, 3, 4])
        >>> common = (16, 512, 64, 8, True, 192**-0.5, torch.float16, torch.float16)
        >>> wrapper.plan(q_indptr, kv_indptr, torch.arange(4), lens, *common)
        >>> q, cache = torch.randn(2, 16, 576, dtype=torch.float16), torch.randn(4, 8, 576, dtype=torch.float16)
        >>> wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:]).shape
        torch.Size([2, 16, 512])
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph and any(buffer is None for buffer in buffers):
            raise ValueError("use_cuda_graph needs the buffers qo_indptr, kv_indptr, kv_indices and kv_len_arr.")
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr, self._kv_indptr, self._kv_indices, self._kv_lens = buffers
        self._backend = "auto" if backend in ("cutlass", "trtllm-gen") else backend
        self._most_rows: int | None = None
        self._most_keys: int | None = None
        self._planned = False

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper was made for CUDA graphs."""
        return self._use_cuda_graph

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Keeps what the calls of ``run()`` have in common.

        Pass ``qo_indptr`` and ``kv_len_arr`` on the CPU: from those on the GPU the largest lengths are read back, which
        waits for the GPU.

        Args:
            qo_indptr: ``[B + 1]``, first query row of each request.
            kv_indptr: ``[B + 1]``, first entry of ``kv_indices`` of each request.
            kv_indices: page numbers.
            kv_len_arr: ``[B]``, keys of each request, those of its query rows included.
            num_heads: query heads.
            head_dim_ckv, head_dim_kpe: 512 and 64.
            page_size: tokens of a page, 1 or more.
            causal: whether row i of n rows of a request of m keys sees the keys up to ``i + m - n`` alone.
            sm_scale: factor of the logits. DeepSeek's is ``1 / sqrt(192)``, times the square of YaRN's mscale.
            q_data_type, kv_data_type: dtypes of the queries and of the cache.
            use_profiler: accepted if False.

        Raises:
            ValueError: other head dimensions, lengths that do not fit together, or in CUDA graph mode a batch that
                does not fit the buffers or the query lengths of the first plan.
        """
        if (head_dim_ckv, head_dim_kpe) != (LATENT, ROPE):
            raise ValueError(f"head_dim_ckv={head_dim_ckv} and head_dim_kpe={head_dim_kpe}: use 512 and 64.")
        if use_profiler:
            raise NotImplementedError("use_profiler=True: there is no profiler in the kernels. Leave it out.")
        batch = kv_len_arr.numel()
        if qo_indptr.numel() != batch + 1 or kv_indptr.numel() != batch + 1:
            raise ValueError(
                f"qo_indptr has {qo_indptr.numel()} and kv_indptr {kv_indptr.numel()} entries: kv_len_arr has {batch}, "
                f"so both need {batch + 1}."
            )
        rows = int(qo_indptr.diff().max()) if batch > 0 else 0
        self._page_size = _args.page_size(page_size)
        if self._use_cuda_graph:
            self._fill_buffers(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            if self._planned and rows > (self._most_rows or 0):
                raise ValueError(
                    f"A request has {rows} query rows: the graph was captured for at most {self._most_rows}. Make "
                    "another wrapper for it."
                )
            self._most_rows = self._most_rows if self._planned else rows
            self._most_keys = None  # of every replay
        else:
            to = dict(device=self.device, dtype=torch.int32, non_blocking=True)
            self._qo_indptr, self._kv_indptr = qo_indptr.to(**to), kv_indptr.to(**to)
            self._kv_indices, self._kv_lens = kv_indices.to(**to), kv_len_arr.to(**to)
            self._most_rows = rows
            self._most_keys = int(kv_len_arr.max()) if batch > 0 else 0
        self._num_heads, self._causal, self._sm_scale = num_heads, causal, sm_scale
        self._dtypes = (q_data_type, kv_data_type)
        self._planned = True

    def _fill_buffers(self, *given: torch.Tensor) -> None:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")
        buffers = (self._qo_indptr, self._kv_indptr, self._kv_indices, self._kv_lens)
        for name, buffer, values in zip(names, buffers, given):
            assert buffer is not None
            if values.numel() > buffer.numel() or (name != "kv_indices" and values.numel() != buffer.numel()):
                raise ValueError(
                    f"{name} has {values.numel()} entries, its buffer {buffer.numel()}: a captured batch has the size "
                    "of its buffers. Pad it with empty requests, or make another wrapper."
                )
        for buffer, values in zip(buffers, given):
            assert buffer is not None
            buffer[: values.numel()].copy_(values, non_blocking=True)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Result:
        """Latent attention of the planned batch.

        Args:
            q_nope: ``[rows, num_heads, 512]``, queries multiplied by the key up-projection.
            q_pe: ``[rows, num_heads, 64]``, the rotated part of the queries.
            ckv_cache: ``[pages, page_size, 512]``, compressed keys and values.
            kpe_cache: ``[pages, page_size, 64]``, the rotated part of the keys. Both caches may be views of one.
            out: ``[rows, num_heads, 512]`` to write to.
            lse: fp32 ``[rows, num_heads]``; the LSE is copied there.
            return_lse: whether to return the LSE.
            profiler_buffer: refused.
            kv_len, page_table: int32 ``[B]`` and ``[B, M]``, in place of the planned lengths and pages.
            return_lse_base_on_e: whether the LSE is natural, instead of to base 2.

        Returns:
            The output, or ``(output, lse)``. A row that sees no key has output 0 and LSE -inf.

        Raises:
            ValueError: tensors that do not fit together or the plan.
            RuntimeError: ``run()`` before ``plan()``.
        """
        if not self._planned:
            raise RuntimeError("run() before plan(): call plan() first.")
        if profiler_buffer is not None:
            raise NotImplementedError("profiler_buffer: there is no profiler in the kernels. Leave it out.")
        _check_parts(q_nope, q_pe, ckv_cache, kpe_cache)
        if q_nope.size(1) != self._num_heads or ckv_cache.size(1) != self._page_size:
            raise ValueError(
                f"q_nope has {q_nope.size(1)} heads and ckv_cache pages of {ckv_cache.size(1)}: the plan is for "
                f"{self._num_heads} heads and pages of {self._page_size}."
            )
        if (q_nope.dtype, ckv_cache.dtype) != self._dtypes:
            raise ValueError(
                f"q_nope is {q_nope.dtype} and ckv_cache {ckv_cache.dtype}: the plan is for {self._dtypes[0]} and "
                f"{self._dtypes[1]}."
            )
        if (kv_len is None) != (page_table is None):
            raise ValueError("kv_len and page_table replace the planned lengths and pages together: pass both.")
        if page_table is None:
            keys: dict[str, Any] = dict(
                kv_indptr=self._kv_indptr,
                kv_indices=self._kv_indices,
                seqused_k=self._kv_lens,
                max_seqlen_k=self._most_keys,
            )
        else:
            keys = dict(page_table=page_table, seqused_k=kv_len)
        k = ckv_cache.unsqueeze(2)
        result = attention(
            q_nope,
            k,
            k,
            q_rope=q_pe,
            k_rope=kpe_cache.unsqueeze(2),
            cu_seqlens_q=self._qo_indptr,
            max_seqlen_q=self._most_rows,
            causal=self._causal,
            sm_scale=self._sm_scale,
            out=out,
            return_lse=return_lse or lse is not None,
            lse_base=math.e if return_lse_base_on_e else 2,
            backend=self._backend,
            **keys,
        )
        if lse is not None:
            found = result[1]
            lse = _args.lse_output(lse, found.shape, q_nope.device)
            lse.copy_(found)
            result = (result[0], lse) if return_lse else result[0]
        return result


def _check_parts(q_nope: torch.Tensor, q_pe: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor) -> None:
    for name, x, columns in (
        ("q_nope", q_nope, LATENT),
        ("q_pe", q_pe, ROPE),
        ("ckv_cache", ckv, LATENT),
        ("kpe_cache", kpe, ROPE),
    ):
        _args.tensor(name, x, 3)
        if x.size(-1) != columns:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: its last dimension must be {columns}.")
    for name, x, other, y in (("q_pe", q_pe, "q_nope", q_nope), ("kpe_cache", kpe, "ckv_cache", ckv)):
        if x.shape[:-1] != y.shape[:-1] or x.dtype != y.dtype:
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}, {other} is {y.dtype} {tuple(y.shape)}: all but the last "
                "dimension must be the same."
            )


class FlashMLASchedMeta:
    """What FlashMLA's newer ``get_mla_metadata()`` returns. Empty: nothing is scheduled beforehand."""


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int = 1,
    num_heads_k: int = 1,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, torch.Tensor | None]:
    """FlashMLA's function of this name. ``flash_mla_with_kvcache()`` accepts the result and does not read it.

    Args:
        cache_seqlens: int32 ``[B]``; None is the form without arguments.
        num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk: as FlashMLA's.

    Returns:
        Without arguments a ``FlashMLASchedMeta`` and None; else the two int32 tensors of the older form, with
        FlashMLA's shapes, so that engines can keep them in buffers.

    Example:
        >>> metadata, num_splits = get_mla_metadata(torch.tensor([17, 5], dtype=torch.int32), 128, 1)
        >>> num_splits.shape
        torch.Size([3])
    """
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    device = cache_seqlens.device
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    parts = max(multiprocessors // num_heads_k // max(-(-num_q_tokens_per_head_k // 64), 1), 1)
    metadata = torch.zeros(parts, 8, dtype=torch.int32, device=device)
    return metadata, torch.zeros(cache_seqlens.numel() + 1, dtype=torch.int32, device=device)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int = LATENT,
    tile_scheduler_metadata: Any = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of a decode step, with FlashMLA's arguments.

    Args:
        q: ``[B, n, H, 576]``, n query tokens of each request.
        k_cache: ``[pages, P, 1, 576]``, pages of any size; the dtype of q, or fp8 with one scale, ``descale_k``.
        block_table: int32 ``[B, M]``, pages of each request.
        cache_seqlens: int32 ``[B]``, keys of each request, those of its query tokens included.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: accepted, not read.
        softmax_scale: default ``1 / sqrt(576)``.
        causal: whether token i of n sees the keys up to ``i + cache_seqlens - n`` alone.
        is_fp8_kvcache: FlashMLA's fp8 format with a scale for every 128 columns, refused: its kernels are sparse.
        indices, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length: sparse attention, refused.
        attn_sink: fp32 ``[H]``, adds ``exp(sink)`` to the softmax denominator, and to the LSE.
        descale_q, descale_k: fp32, one element: factors of fp8 queries and of an fp8 cache.
        out: ``[B, n, H, 512]`` to write to.

    Returns:
        The output ``[B, n, H, 512]`` and the natural LSE, fp32 ``[B, H, n]``. A token that sees no key has output 0 and
        LSE -inf (FlashMLA: inf).

    Raises:
        ValueError: tensors that do not fit together.
        NotImplementedError: an argument that is refused.

    Example:
        >>> q, cache = torch.randn(2, 1, 16, 576, dtype=torch.float16), torch.randn(4, 64, 1, 576, dtype=torch.float16)
        >>> table, lens = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([100, 7], dtype=torch.int32)
        >>> out, lse = flash_mla_with_kvcache(q, cache, table, lens, 512, *get_mla_metadata(), causal=True)
        >>> out.shape, lse.shape
        (torch.Size([2, 1, 16, 512]), torch.Size([2, 16, 1]))
    """
    _spellings.unsupported(
        "flash_mla_with_kvcache",
        _SPARSE,
        is_fp8_kvcache=is_fp8_kvcache,
        indices=indices,
        extra_k_cache=extra_k_cache,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
    )
    _args.tensor("q", q, 4)
    _args.tensor("k_cache", k_cache, 4)
    if head_dim_v != LATENT or q.size(-1) != LATENT + ROPE or k_cache.size(-1) != LATENT + ROPE:
        raise ValueError(
            f"head_dim_v={head_dim_v}, q has {q.size(-1)} columns and k_cache {k_cache.size(-1)}: use 512, 576 and 576."
        )
    result, lse = attention(
        q,
        k_cache,
        k_cache[..., :LATENT],
        page_table=block_table,
        seqused_k=cache_seqlens,
        causal=causal,
        sm_scale=softmax_scale,
        sinks=attn_sink,
        q_descale=descale_q,
        k_descale=descale_k,
        v_descale=descale_k,
        out=out,
        return_lse=True,
        lse_base=math.e,
    )
    return result, lse.transpose(1, 2)


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor | None,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: torch.Tensor | list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Latent attention of a decode step without a plan: ``bmm2_scale * softmax(bmm1_scale * q k^T) v``, causal.

    Args:
        query: ``[B, n, H, 576]``, n query tokens of each request.
        kv_cache: ``[pages, P, 576]`` or ``[pages, 1, P, 576]``; the dtype of ``query``, or fp8.
        workspace_buffer, enable_pdl: accepted, not used.
        qk_nope_head_dim: 128, of the heads before absorption. Not used.
        kv_lora_rank, qk_rope_head_dim: 512 and 64.
        block_tables: int32 ``[B, M]``, pages of each request.
        seq_lens: int32 ``[B]``, keys of each request, those of its query tokens included.
        max_seq_len: bound of ``seq_lens``, in CUDA graphs of every replay.
        sparse_mla_top_k: 0; other numbers are refused.
        out: ``[B, n, H, 512]`` to write to.
        bmm1_scale: factor of the logits: the softmax scale times the scales of fp8 queries and keys. A number, or fp32
            of one element.
        bmm2_scale: factor of the output. As ``bmm1_scale``.
        sinks: fp32 ``[H]``, or a list of that tensor.
        skip_softmax_threshold_scale_factor: permission to skip keys of small weight. All are computed.
        backend: "auto", "trtllm-gen" or "xqa": all of them mean the kernels of this library.

    Returns:
        The output ``[B, n, H, 512]``.

    Raises:
        ValueError: tensors that do not fit together, or an unknown backend.
        NotImplementedError: an argument that is refused.

    Example:
        >>> query, cache = torch.randn(2, 1, 16, 576, dtype=torch.float16), torch.randn(4, 64, 576, dtype=torch.float16)
        >>> table, lens = torch.arange(4, dtype=torch.int32).view(2, 2), torch.tensor([100, 7], dtype=torch.int32)
        >>> trtllm_batch_decode_with_kv_cache_mla(
        ...     query, cache, None, 128, 512, 64, table, lens, 128, bmm1_scale=192**-0.5
        ... ).shape
        torch.Size([2, 1, 16, 512])
    """
    name = "trtllm_batch_decode_with_kv_cache_mla"
    if backend not in ("auto", "trtllm-gen", "xqa"):
        raise ValueError(f"backend={backend!r} is not one of {name}: use 'auto', 'trtllm-gen' or 'xqa'.")
    _spellings.unsupported(name, OTHER_GPUS, sparse_mla_top_k=sparse_mla_top_k or None)
    _args.skip_softmax(skip_softmax_threshold_scale_factor)
    if (kv_lora_rank, qk_rope_head_dim) != (LATENT, ROPE):
        raise ValueError(f"kv_lora_rank={kv_lora_rank} and qk_rope_head_dim={qk_rope_head_dim}: use 512 and 64.")
    _args.tensor("query", query, 4)
    if kv_cache.dim() == 3:
        kv_cache = kv_cache.unsqueeze(1)
    _args.tensor("kv_cache", kv_cache, 4)
    k = kv_cache.transpose(1, 2)  # [pages, P, 1, 576]
    on_device = isinstance(bmm1_scale, torch.Tensor)
    result = attention(
        query,
        k,
        k[..., :LATENT],
        page_table=block_tables,
        seqused_k=seq_lens,
        max_seqlen_k=_args.integer("max_seq_len", max_seq_len),
        causal=True,
        sm_scale=1.0 if on_device else float(bmm1_scale),
        q_descale=bmm1_scale if on_device else None,
        v_descale=bmm2_scale,
        sinks=sinks[0] if isinstance(sinks, (list, tuple)) and len(sinks) == 1 else sinks,
        out=out,
    )
    assert isinstance(result, torch.Tensor)
    return result
