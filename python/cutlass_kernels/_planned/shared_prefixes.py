"""Wrappers of requests that share a prefix in their batch: see ``cascade``."""

from __future__ import annotations

from typing import Any

import torch

from .._attend.singles import single_prefill_with_kv_cache_return_lse
from .._compute import selection
from .._compute.merging import merge_state
from .._core import checks, index_vectors
from .._core.autograd import forward_only_as_a_whole
from .._core.extra_arguments import spellings
from .._core.problems import Logits, Output, PagedKv, Problem, RaggedKv
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from .copying import Part
from .descriptions import describe_several
from .paged_decode import BatchDecodeWithPagedKVCacheWrapper
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@forward_only_as_a_whole
def batch_decode_with_shared_prefix_padded_kv_cache(
    q: torch.Tensor,
    k_shared: torch.Tensor,
    v_shared: torch.Tensor,
    k_unique: torch.Tensor,
    v_unique: torch.Tensor,
    kv_layout: str = "NHD",
    allow_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
) -> torch.Tensor:
    """Decode attention of a batch over a shared prefix and, per request, keys of its own in padded tensors.

    Every request attends to all ``S`` shared and all ``U`` of its own keys: there are no lengths, so nothing is masked.

    Args:
        q: ``[batch, num_qo_heads, head_dim]``, float16 or bfloat16.
        k_shared, v_shared: ``[S, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, S, head_dim]`` (HND).
        k_unique, v_unique: ``[batch, U, num_kv_heads, head_dim]`` (NHD) or ``[batch, num_kv_heads, U, head_dim]``.
        kv_layout: ``"NHD"`` or ``"HND"``.
        allow_fp16_qk_reduction: a permission that is not used.
        sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
        rope_scale, rope_theta: accepted; no rotary embedding is applied.

    Returns:
        ``[batch, num_qo_heads, head_dim]`` in the dtype of q.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: shapes, dtypes or devices that do not fit together.
        RuntimeError: ``num_qo_heads`` is not a multiple of ``num_kv_heads``.

    Examples:
        >>> q, shared = torch.randn(7, 8, 64).half(), torch.randn(2, 100, 2, 64).half()
        >>> unique = torch.randn(2, 7, 16, 2, 64).half()
        >>> batch_decode_with_shared_prefix_padded_kv_cache(q, *shared, *unique).shape
        torch.Size([7, 8, 64])
    """
    checks.kv_layout(kv_layout)
    if is_traced() or have_own_dispatch(q, k_shared, k_unique):
        return _in_graph(**dict(zip(_TYPES, (q, k_shared, v_shared, k_unique, v_unique, kv_layout, sm_scale))))
    checks.tensor("q", q, 3)
    k, v = checks.tensor("k_unique", k_unique, 4), checks.tensor("v_unique", v_unique, 4)
    if kv_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    batch, num_qo_heads, head_dim = q.shape
    if k.size(0) != batch or k.shape[:3] != v.shape[:3] or k.size(3) != head_dim:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k_unique {tuple(k_unique.shape)} and v_unique {tuple(v_unique.shape)}: "
            "batch and head_dim must agree."
        )
    checks.heads_of(q, k, kv_layout)
    o_dtype = checks.element_types(q.dtype, k.dtype, v.dtype, None, None)
    checks.same_device(q.device, k_unique=k, v_unique=v)
    shared = _attend_shared(q, k_shared, v_shared, kv_layout, sm_scale)

    out = torch.empty((batch, num_qo_heads, v.size(3)), dtype=o_dtype, device=q.device)
    lse = torch.empty((batch, num_qo_heads), dtype=torch.float32, device=q.device)
    problem = Problem(
        q,
        _padded(k, v),
        Logits(checks.sm_scale(sm_scale, head_dim)),
        Output(out, lse),
        qo_indptr=torch.arange(batch + 1, dtype=torch.int32, device=q.device),
    )
    selection.compute_once(problem)
    return merge_state(*shared, out, lse)[0]


def _padded(k: torch.Tensor, v: torch.Tensor) -> RaggedKv | PagedKv:
    """``[batch, U, heads, dim]`` as packed tensors where strides allow a view, else as pages of U tokens."""
    batch, length = k.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=k.device)
    if length == 0 or all(x.stride(0) == length * x.stride(1) for x in (k, v)):
        return RaggedKv(k.flatten(0, 1), v.flatten(0, 1), offsets * length)
    return PagedKv(k, v, offsets, offsets[:batch], torch.full_like(offsets[:batch], length))


class _SharedPrefixWrapper(Part):
    """What the two wrappers below share: a paged wrapper for the keys of each request."""

    _kv_layout: str
    _unique: BatchPrefillWithPagedKVCacheWrapper

    def __repr__(self) -> str:
        return describe_several(self, {"keys of each request": self._unique} if hasattr(self, "_unique") else {})

    @spellings(float_workspace_buffer="new_workspace_buffer")
    def reset_workspace_buffer(
        self, new_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replaces the workspace; call begin_forward() again before forward().

        Args:
            new_workspace_buffer: 16-byte aligned, on the device of the inputs.
            int_workspace_buffer: the same for index data; None keeps the present one.
        """
        self._unique.reset_workspace_buffer(new_workspace_buffer, int_workspace_buffer)

    def end_forward(self) -> None:
        """Drops what begin_forward() prepared."""
        self._unique._plan_info = None

    @forward_only_as_a_whole
    def _merged(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique: Cache,
        sm_scale: float | None,
        **options: Any,
    ) -> torch.Tensor:
        out, lse = self._unique.forward_return_lse(q, unique, sm_scale=sm_scale, **options)
        return merge_state(*_attend_shared(q, k_shared, v_shared, self._kv_layout, sm_scale), out, lse)[0]


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Decode attention of a batch over a shared prefix and paged keys of each request.

    ``copy.deepcopy`` and ``pickle`` copy the wrapper with its buffers. A plan for a GPU is not copied, since it holds
    addresses of the buffers: call begin_forward() of the copy before forward().

    Args:
        workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's. Also ``float_workspace_buffer``.
        kv_layout: ``"NHD"`` or ``"HND"``, of the shared tensors and of the pages.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: a workspace that is not aligned.

    Examples:
        >>> wrapper = BatchDecodeWithSharedPrefixPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
        >>> wrapper.begin_forward(torch.tensor([0, 1, 3]).int(), torch.tensor([2, 0, 1]).int(),
        ...                       torch.tensor([5, 16]).int(), 8, 2, 64, 16, data_type=torch.float16)
        >>> q, shared = torch.randn(2, 8, 64).half(), torch.randn(2, 100, 2, 64).half()
        >>> wrapper.forward(q, *shared, torch.randn(3, 2, 16, 2, 64).half()).shape
        torch.Size([2, 8, 64])
    """

    _unique: BatchDecodeWithPagedKVCacheWrapper

    @spellings(float_workspace_buffer="workspace_buffer")
    def __init__(self, workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._unique = BatchDecodeWithPagedKVCacheWrapper(workspace_buffer, kv_layout)

    def begin_forward(
        self,
        unique_kv_indptr: torch.Tensor,
        unique_kv_indices: torch.Tensor,
        unique_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: str | torch.dtype = "float16",
    ) -> None:
        """Prepares forward() for a batch.

        ``torch.compile`` cannot trace this method: call it outside of the compiled function.

        Args:
            unique_kv_indptr: int32 ``[batch + 1]``, offsets of the requests in ``unique_kv_indices``.
            unique_kv_indices: int32, page numbers.
            unique_kv_last_page_len: int32 ``[batch]``, entries used of every last page.
            num_qo_heads, num_kv_heads, head_dim, page_size: sizes.
            data_type: dtype (or name) of q and of the keys and values.

        Raises:
            ValueError: index tensors that do not fit together.
            RuntimeError: heads that do not divide, decreasing offsets, ``last_page_len`` out of range.

        Examples:
            >>> wrapper.begin_forward(indptr, indices, last_page_len, 32, 8, 128, 16, data_type=torch.bfloat16)
        """
        self._unique.plan(
            unique_kv_indptr,
            unique_kv_indices,
            unique_kv_last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            q_data_type=data_type,
        )

    plan = begin_forward

    @spellings(unique_kv_cache="unique_kv_data", use_fp16_qk_reduction="allow_fp16_qk_reduction")
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_data: Cache,
        allow_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attention of one query per request over the shared keys and its own.

        Args:
            q: ``[batch, num_qo_heads, head_dim]``.
            k_shared, v_shared: ``[S, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, S, head_dim]`` (HND).
            unique_kv_data: paged cache, ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a tuple (k_cache, v_cache); also accepted as
                ``unique_kv_cache``.
            allow_fp16_qk_reduction: a permission that is not used.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: accepted; no rotary embedding is applied.

        Returns:
            ``[batch, num_qo_heads, head_dim]``.

        Raises:
            ValueError: shapes, dtypes or devices that differ from begin_forward().
            RuntimeError: begin_forward() was not called.

        Examples:
            >>> out = wrapper.forward(q, k_shared, v_shared, unique_kv_data)
        """
        return self._merged(q, k_shared, v_shared, unique_kv_data, sm_scale)

    run = forward


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper(_SharedPrefixWrapper):
    """Prefill (append) attention of a batch over a shared prefix and paged keys of each request.

    Every row sees all shared keys; ``causal`` applies to the keys of its request.

    ``copy.deepcopy`` and ``pickle`` copy the wrapper with its buffers and the batch of begin_forward(). On a GPU, the
    next forward() of the copy plans it again.

    Args:
        workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's. Also ``float_workspace_buffer``.
        kv_layout: ``"NHD"`` or ``"HND"``, of the shared tensors and of the pages.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: a workspace that is not aligned.

    Examples:
        >>> wrapper = BatchPrefillWithSharedPrefixPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
        >>> wrapper.begin_forward(torch.tensor([0, 4, 6]).int(), torch.tensor([0, 1, 3]).int(),
        ...                       torch.tensor([2, 0, 1]).int(), torch.tensor([5, 16]).int(), 8, 2, 64)
        >>> q, shared = torch.randn(6, 8, 64).half(), torch.randn(2, 100, 2, 64).half()
        >>> wrapper.forward(q, *shared, torch.randn(3, 2, 16, 2, 64).half()).shape
        torch.Size([6, 8, 64])
    """

    @spellings(float_workspace_buffer="workspace_buffer")
    def __init__(self, workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._kv_layout = kv_layout
        self._unique = BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, kv_layout)
        self._begun: _Begun | None = None

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int | None = None,
    ) -> None:
        """Prepares forward() for a batch.

        ``torch.compile`` cannot trace this method, nor the first forward() after it, which plans: call both outside of
        the compiled function.

        Args:
            qo_indptr: int32 ``[batch + 1]``, offsets of the requests in the rows of q.
            paged_kv_indptr: int32 ``[batch + 1]``, offsets of the requests in ``paged_kv_indices``.
            paged_kv_indices: int32, page numbers.
            paged_kv_last_page_len: int32 ``[batch]``, entries used of every last page.
            num_qo_heads, num_kv_heads, head_dim: sizes.
            page_size: tokens a page holds; None takes it from the cache. Dtypes come from the tensors, too, so that
                checks that need either are made by forward().

        Raises:
            ValueError: index tensors that do not fit together.
            RuntimeError: heads that do not divide, decreasing offsets.

        Examples:
            >>> wrapper.begin_forward(qo_indptr, kv_indptr, kv_indices, last_page_len, 32, 8, 128)
        """
        qo = index_vectors.indptr("qo_indptr", qo_indptr)
        batch = qo.numel() - 1
        indices = (
            qo,
            index_vectors.indptr("paged_kv_indptr", paged_kv_indptr, batch),
            index_vectors.index_vector("paged_kv_indices", paged_kv_indices),
            index_vectors.index_vector("paged_kv_last_page_len", paged_kv_last_page_len, batch),
        )
        num_qo_heads = checks.integer("num_qo_heads", num_qo_heads)
        num_kv_heads = checks.integer("num_kv_heads", num_kv_heads)
        checks.heads(num_qo_heads, num_kv_heads)
        page_size = None if page_size is None else checks.page_size(page_size)
        own = tuple(x if x.is_cuda else x.clone() for x in indices)
        self._begun = _Begun(own, (num_qo_heads, num_kv_heads, head_dim), page_size)

    plan = begin_forward

    @spellings(float_workspace_buffer="new_workspace_buffer")
    def reset_workspace_buffer(
        self, new_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        super().reset_workspace_buffer(new_workspace_buffer, int_workspace_buffer)
        self._begun = None

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing, as in ``BatchPrefillWithPagedKVCacheWrapper``."""
        self._unique.prewarm_paged_kv_stride_variant(variant)

    def end_forward(self) -> None:
        """Drops what begin_forward() prepared."""
        super().end_forward()
        self._begun = None

    @spellings(unique_kv_cache="unique_kv_data", use_fp16_qk_reduction="allow_fp16_qk_reduction")
    def forward(
        self,
        q: torch.Tensor,
        k_shared: torch.Tensor,
        v_shared: torch.Tensor,
        unique_kv_data: Cache,
        causal: bool = True,
        allow_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """Attention of the batch's rows over the shared keys and those of their requests.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim]``.
            k_shared, v_shared: ``[S, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, S, head_dim]`` (HND).
            unique_kv_data: paged cache, ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a tuple (k_cache, v_cache); also accepted as
                ``unique_kv_cache``.
            causal: whether a row sees, of its request's keys, only those up to its own position (the last row stands at
                the last key). True unless said, as an append step needs it.
            allow_fp16_qk_reduction: a permission that is not used.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: accepted; no rotary embedding is applied.

        Returns:
            ``[qo_indptr[-1], num_qo_heads, head_dim]``.

        Raises:
            ValueError: shapes, dtypes or devices that differ from begin_forward().
            RuntimeError: begin_forward() was not called.

        Examples:
            >>> out = wrapper.forward(q, k_shared, v_shared, unique_kv_data, causal=True)
        """
        if self._begun is None:
            raise RuntimeError(f"{type(self).__name__} has no batch: call begin_forward() before forward().")
        checks.tensor("q", q, 3)
        k_cache, _ = checks.paged_cache(unique_kv_data, self._kv_layout)
        self._begun.plan(self._unique, k_cache.size(1), q.dtype, k_cache.dtype)
        return self._merged(q, k_shared, v_shared, unique_kv_data, sm_scale, causal=causal)

    run = forward


class _Begun(Part):
    """Arguments of begin_forward(), planned when the first forward() tells page size and dtypes."""

    def __init__(self, indices: tuple[torch.Tensor, ...], sizes: tuple[int, int, int], page_size: int | None) -> None:
        self.indices, self.sizes, self.page_size = indices, sizes, page_size
        self.planned: tuple[int, torch.dtype, torch.dtype] | None = None

    def plan(
        self, wrapper: BatchPrefillWithPagedKVCacheWrapper, page_size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> None:
        wanted = (page_size if self.page_size is None else self.page_size, q_dtype, kv_dtype)
        if self.planned != wanted or wrapper._plan_info is None:  # which a copy may lack
            gpu = wrapper.device.type != "cpu"
            if gpu and torch.cuda.is_current_stream_capturing() and any(x.is_cpu for x in self.indices):
                raise RuntimeError(
                    "the first forward() after begin_forward() plans from index tensors on the CPU, which a CUDA graph "
                    "that is being captured cannot copy: run forward() once before the capture."
                )
            qo, kv, pages, last = self.indices
            wrapper.plan(qo, kv, pages, last, *self.sizes, wanted[0], q_data_type=q_dtype, kv_data_type=kv_dtype)
            self.planned = wanted


def _attend_shared(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str, sm_scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state (output, base-2 LSE) of all rows over all shared keys."""
    out, lse = single_prefill_with_kv_cache_return_lse(q, k, v, kv_layout=kv_layout, sm_scale=sm_scale)
    return out, lse


_TENSORS = ("q", "k_shared", "v_shared", "k_unique", "v_unique")
_TYPES = {**dict.fromkeys(_TENSORS, torch.Tensor), "kv_layout": str, "sm_scale": float | None}
_in_graph = operators.operator(
    "shared_prefix",
    _TYPES,
    batch_decode_with_shared_prefix_padded_kv_cache,
    lambda x: (x.q.new_empty((*x.q.shape[:2], x.v_unique.shape[-1])), x.q.new_empty(0, dtype=torch.float32)),
)
