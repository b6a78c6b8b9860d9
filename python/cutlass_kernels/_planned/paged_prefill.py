"""Prefill and append attention of a batch over a paged key/value cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled

from .._core import checks, extra_arguments, hints, index_vectors, run_options
from .._core.autograd import forward_only, needs_grad, written
from .._core.extra_arguments import spellings
from .._core.problems import FP8_DTYPES, PagedKv, Pages, Vector
from .._core.run_options import Result
from .._core.signatures import PagedPrefill, typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import base_wrapper, batches
from .batch_plans import Plan
from .batches import Batch, Index
from .cached_module import CachedModule
from .index_buffers import IndexBuffer


class BatchPrefillWithPagedKVCacheWrapper(base_wrapper.BatchPrefillWrapper):
    """Attention of a batch of requests over keys and values in pages.

    Plan once per batch (lengths and page tables), then run once per layer. Row ``i`` of a request stands at position
    ``p = i + kv_len - qo_len``; a causal row sees the keys ``j <= p``, a window keeps ``j >= p - window_left``.
    A row without keys gives 0, and an LSE of -inf. The LSE is base 2: ``log2(sum_j exp(logit_j))``. (Softmax statistics
    and their merging: Milakov and Gimelshein, 2018; pages: Kwon et al., "PagedAttention", 2023.)

    Index tensors and the tile list belong to the stream that is current in plan(): run on that stream, or order the
    two.

    ``copy.deepcopy`` and ``pickle`` copy the wrapper with its buffers. A plan for a GPU is not copied, since it holds
    addresses of the buffers: call plan() of the copy before its first run.

    Args:
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's.
        kv_layout: ``"NHD"`` (pages ``[page_size, num_kv_heads, head_dim]``) or ``"HND"``.
        use_cuda_graph: keep index data in the buffers below, so that a captured run follows later plans. The batch size
            is fixed, and the number of rows may not exceed that of the first plan.
        qo_indptr_buf, paged_kv_indptr_buf: int32 ``[batch + 1]`` on the wrapper's device.
        paged_kv_indices_buf: int32, room for the pages of every plan.
        paged_kv_last_page_len_buf: int32 ``[batch]``.
        custom_mask_buf: uint8, room for the packed mask of every plan. Where given, every run reads a mask; a plan
            without one writes the mask that stands for it. Runs see what plans write to it, nothing else.
        qk_indptr_buf: int32 ``[batch + 1]``, with ``custom_mask_buf``. Also accepted as ``mask_indptr_buf``.
        backend: ``"auto"`` (chosen anew by every plan), ``"fa2"``, ``"fa3"`` or ``"reference"``.
        jit_args, jit_kwargs, variant_owns_mask: for run-time compiled variants, which do not exist here.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: unknown ``backend``; a workspace that is not aligned; missing, misplaced or mismatched buffers.
        NotImplementedError: ``jit_args`` or its relatives.

    Examples:
        >>> wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8), "NHD")
        >>> wrapper.plan(torch.tensor([0, 3]).int(), torch.tensor([0, 2]).int(), torch.tensor([5, 1]).int(),
        ...              torch.tensor([4]).int(), 8, 2, 64, 16, causal=True)
        >>> wrapper.run(torch.randn(3, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()).shape
        torch.Size([3, 8, 64])
    """

    _paged_kv_indptr_buf = IndexBuffer()
    _paged_kv_indices_buf = IndexBuffer()
    _paged_kv_last_page_len_buf = IndexBuffer()
    _cached_module = CachedModule()
    # Arguments of plan() for messages: what tells the batch size, and the three of the page table.
    _index_arguments = ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
    _positions_of_run: tuple[str, ...] = ("k_scale", "v_scale", "return_lse")  # of arguments behind the cache

    @spellings(mask_indptr_buf="qk_indptr_buf")
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        qk_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        *,
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        jit = {"jit_args": jit_args, "jit_kwargs": jit_kwargs, "variant_owns_mask": variant_owns_mask}
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, custom_mask_buf, qk_indptr_buf, backend, jit
        )

    def _check_buffers(self, buffers: dict[str, torch.Tensor | None]) -> None:
        super()._check_buffers(buffers)
        batch = self._fixed_batch_size
        for name, size in (("paged_kv_indptr_buf", batch + 1), ("paged_kv_last_page_len_buf", batch)):
            buffer = buffers[name]
            if buffer is not None and buffer.numel() != size:
                raise ValueError(
                    f"{name} has {buffer.numel()} elements, but qo_indptr_buf {batch + 1}: with batch_size={batch} it "
                    f"must have {size}."
                )

    @spellings(head_dim_vo_at=8, head_dim_qk="head_dim", use_fp16_qk_reduction="allow_fp16_qk_reduction")
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        non_blocking: bool = False,
        *,
        head_dim_vo: int | None = None,
        o_data_type: str | torch.dtype | None = None,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Prepares runs over a batch: lengths, page tables, mask, sizes, and the options that runs start from.

        Index tensors are int32, on the CPU or on the device, in any mix. CPU tensors are checked and copied before this
        returns; CUDA tensors are neither copied nor read by the host, so nothing synchronises. A plan that fails leaves
        the previous one in force. ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            qo_indptr: ``[batch + 1]``, offsets of the requests in the rows of q.
            paged_kv_indptr: ``[batch + 1]``, offsets of the requests in ``paged_kv_indices``.
            paged_kv_indices: page numbers; may be longer than ``paged_kv_indptr[-1]``, and pages may be shared.
            paged_kv_last_page_len: ``[batch]``, entries used of every last page, in [1, page_size] (0 without pages).
            num_qo_heads, num_kv_heads: query head h reads key/value head ``h // (num_qo_heads / num_kv_heads)``.
            head_dim: dimension of queries and keys; also accepted as ``head_dim_qk``.
            page_size: tokens a page holds.
            custom_mask: bool, the row-major ``[qo_len, kv_len]`` masks of all requests, flattened and concatenated;
                True where a row sees a key. Replaces ``causal``.
            packed_custom_mask: the same in bits, uint8, as ``segment_packbits(..., bitorder="little")`` packs it; wins
                over ``custom_mask``.
            causal: whether a row sees only keys up to its own position.
            pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` or ``"ALIBI"``, applied inside the attention.
            allow_fp16_qk_reduction: a permission that is not used (also ``use_fp16_qk_reduction``).
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            window_left: keys a row sees to its left besides its own; -1 is no limit.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            rope_scale, rope_theta: of ROPE_LLAMA; None is 1 and 1e4.
            q_data_type, kv_data_type: dtypes (or names) of q and of the cache; None is that of q.
            non_blocking: accepted; copies to the device never wait for it.
            head_dim_vo: dimension of the values; None is ``head_dim``. An integer in the place of ``custom_mask`` is
                taken as ``head_dim_vo``.
            o_data_type: dtype of the output; None is that of q. An fp8 q needs one.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: multi-item scoring, all
                four together: uint32 ``[batch]`` or of no dimensions, uint16 ``[batch * token_pos_in_items_len]``, a
                number, uint16 ``[batch]``. Requests whose positions lie behind the end are causal. Replaces ``causal``
                and custom masks. Lengths on the GPU are read back, which waits for it: pass offsets, or ``seq_lens``
                and ``seq_lens_q``, on the CPU. CUDA graphs need mask buffers, else PyTorch computes it.
            seq_lens, seq_lens_q: keys and rows per request ``[batch]``; CPU tensors let the host check and size things
                where the offsets are CUDA tensors.
            fixed_split_size, disable_split_kv: pages per KV split (None and -1 set none), or no KV splits. With either,
                results of a request are bitwise the same in every batch. By default the keys of short queries are split
                to fill the device.
            max_sequence_kv: keys of the longest request. Where the offsets are CUDA tensors it keeps what
                ``fixed_split_size`` needs of the workspace small.
            block_tables, max_token_per_sequence, uniform_q_len: hints that nothing here needs.

        Raises:
            KeyError: unknown ``pos_encoding_mode``.
            ValueError: lengths of index tensors, dtypes or masks that do not fit; under CUDA graphs another batch size,
                too many pages or rows, or a mask without buffers; negative page numbers on the CPU; a backend that
                cannot serve the request (``BackendError``, also a RuntimeError).
            RuntimeError: heads that do not divide, decreasing offsets, ``last_page_len`` out of range, workspaces too
                small for the plan.
            AssertionError: fp8 queries with ``backend="fa2"``.

        Examples:
            >>> wrapper.plan(qo_indptr, kv_indptr, kv_indices, last_page_len, 32, 8, 128, 16, causal=True,
            ...              q_data_type=torch.bfloat16)
        """
        batch = self._read_batch(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        if seq_lens is not None:
            batch.take_lens(seq_lens)
        shape = self._paged_shape(
            num_qo_heads, num_kv_heads, head_dim, head_dim_vo, q_data_type, kv_data_type, o_data_type
        )
        values = run_options.options(
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
            allow_fp16_qk_reduction,
        )
        items = run_options.multi_item(prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr)
        split = batch.split(fixed_split_size, disable_split_kv, max_sequence_kv)
        plan = self._prepare(shape, values, batch, split, custom_mask, packed_custom_mask, items, seq_lens_q)
        self._commit_pages(plan)

    begin_forward = plan

    def _paged_shape(self, *sizes_and_dtypes: Any) -> run_options.Shape:
        """As ``run_options.shape``; AssertionError for fp8 queries on fa2."""
        shape = run_options.shape(*sizes_and_dtypes)
        if shape.q_dtype in FP8_DTYPES and self._asked_backend == "fa2":
            raise AssertionError(f"backend='fa2' has no fp8 tensor cores, but q_data_type={shape.q_dtype}: use 'auto'.")
        return shape

    def _commit_pages(self, plan: Plan) -> None:
        batch = plan.batch
        assert batch.indices is not None and batch.last_page_len is not None
        indices = {
            "qo_indptr_buf": batch.qo,
            "paged_kv_indptr_buf": batch.kv,
            "paged_kv_indices_buf": batch.indices,
            "paged_kv_last_page_len_buf": batch.last_page_len,
        }
        self._commit(plan, indices)

    def _read_batch(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        rows: Index | None = None,
    ) -> Batch:
        """The index tensors, checked and on the wrapper's device, where ``rows`` is ``qo_indptr`` if it is known."""
        graph, like = self._use_cuda_graph, self._float_workspace_buffer
        batch = batches.read_pages(qo_indptr, kv_indptr, last_page_len, indices, page_size, graph, like)
        if batch is None:
            if rows is None and batches.sizes_on(like, qo_indptr) is not None:
                rows = Index(qo_indptr, None)
            batch = batches.take_pages(rows, kv_indptr, last_page_len, indices, page_size, like)
        if batch is not None:
            self._check_batch(batch.size)
            if graph:
                self._check_room_for_pages(indices)
            return batch
        qo = index_vectors.indptr("qo_indptr", qo_indptr, from_zero=True)
        count = qo.numel() - 1
        self._check_batch(count)
        page_size = checks.page_size(page_size)
        teller, *names = self._index_arguments
        kv = index_vectors.indptr(names[0], kv_indptr, count, told_by=teller)
        pages = index_vectors.index_vector(names[1], indices)
        last = index_vectors.index_vector(names[2], last_page_len, count)
        first_page, end_page = (0, 0) if kv.is_cuda else (int(kv[0]), int(kv[-1]))
        if end_page > pages.numel():
            raise ValueError(f"{names[0]} ends at {end_page}, but {names[1]} has {pages.numel()} pages.")
        if not kv.is_cuda and not graph:  # copies of a cache have a page per entry
            pages = pages[:end_page]
        if graph:
            self._check_room_for_pages(pages)
        bound = index_vectors.page_bound("paged_kv_indices", pages[first_page:end_page])
        longest = None
        if not kv.is_cuda and not last.is_cuda:
            lens = index_vectors.paged_kv_lens(kv, last, page_size)
            longest = int(lens.max()) if count else 0
        converted = batches.read_pages(qo, kv, last, pages, page_size, graph, like)
        if converted is not None:
            return converted
        vectors = (self._index(qo) if rows is None else rows, self._index(kv))
        return Batch(count, *vectors, longest, page_size, self._index(last), self._index(pages), bound)

    def _check_room_for_pages(self, pages: torch.Tensor) -> None:
        if pages.numel() > self._paged_kv_indices_buf.numel():
            raise ValueError(
                f"paged_kv_indices has {pages.numel()} elements, but paged_kv_indices_buf room for "
                f"{self._paged_kv_indices_buf.numel()}: make the buffer larger."
            )

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing: kernels read K and V of different strides, and nothing is compiled at run time.

        Args:
            variant: "independent".

        Raises:
            ValueError: another ``variant``.
        """
        if variant != "independent":
            raise ValueError(f"variant={variant!r} is unknown: use 'independent', the only one.")

    def _vectors(self, plan: Plan, stored: Mapping[str, Vector]) -> tuple[Vector, Vector, Pages | None]:
        assert plan.batch.page_size is not None
        pages = Pages(stored["paged_kv_indices_buf"], stored["paged_kv_last_page_len_buf"], plan.batch.page_size)
        return stored["qo_indptr_buf"], stored["paged_kv_indptr_buf"], pages

    @typed_as(PagedPrefill.run)
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Computes the planned attention.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim]``, any strides with a contiguous last dimension.
            paged_kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), keys first; or a tuple (k_cache, v_cache) of
                tensors without the 2, which may differ in strides. The page dimension may be missing if page_size is 1.
            *args: ``k_scale, v_scale, return_lse`` in this order, or three tensors ``scale_q`` ``[num_qo_heads]``,
                ``scale_k`` and ``scale_v`` ``[num_kv_heads]`` (fp32) that dequantize fp8 inputs.
            q_scale, k_scale, v_scale: numbers, one-element tensors or per-head tensors; those of q and k multiply the
                logits (before the soft cap), that of v the output. None is 1.
            out: ``[qo_indptr[-1], num_qo_heads, head_dim_vo]`` to write to.
            lse: float32 tensor to write the LSE to, shaped as ``lse_layout`` says.
            return_lse: return ``(out, lse)``.
            lse_base: ``"log2"`` or ``"ln"``.
            lse_layout: ``"NH"`` (``[qo_indptr[-1], num_qo_heads]``) or ``"HN"`` (transposed).
            enable_pdl: accepted; a launch attribute without effect on results.
            window_left: if given, must be the planned one.
            sinks: float32 ``[num_qo_heads]``; ``exp(sinks[h])`` joins the denominator of head h, and so the LSE.
            skip_softmax_threshold_scale_factor: permission to skip key tiles of negligible weight, see
                ``trtllm_fmha_v2_prefill``.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            ValueError: dtypes, shapes or devices that differ from the plan; page numbers (planned from the CPU) that
                the cache does not have; unknown ``lse_base`` or ``lse_layout``.
            KeyError: ``paged_kv_cache`` is neither a tensor nor a tuple.
            AssertionError: ``window_left`` differs from the plan.
            NotImplementedError: ``kv_cache_sf``, ``use_fp16_softmax`` or ``uses_spcompress`` is set.
            RuntimeError: nothing has been planned.

        Examples:
            >>> out, lse = wrapper.run(q, (k_cache, v_cache), return_lse=True)
        """
        plan = self._plan_info or self._planned()
        traced, grad = is_traced(), False
        used_sinks = self._sinks if sinks is None else sinks
        if not traced and is_grad_enabled():
            grad = needs_grad(q, paged_kv_cache, None, out, lse, used_sinks, q_scale, k_scale, v_scale, *args)
        if (
            not (traced or grad)
            and not args
            and lse_base == "log2"
            and lse_layout == "NH"
            and window_left is None
            and kv_cache_sf is None
            and skip_softmax_threshold_scale_factor is None
            and use_fp16_softmax is None
            and uses_spcompress is None
        ):
            direct = plan.direct or plan.direct_run(self._most_rows)
            if direct is not None:
                scales = (q_scale, k_scale, v_scale)
                result = direct(q, paged_kv_cache, None, *scales, out, lse, used_sinks, return_lse, self._options)
                if result is not None:
                    if out is not None or lse is not None:
                        written(out, lse)
                    return result
        if args:
            hints.one_cache(paged_kv_cache, args[0])
        extra_arguments.unsupported(
            f"{type(self).__name__}.run",
            "leave it out.",
            kv_cache_sf=kv_cache_sf,
            use_fp16_softmax=use_fp16_softmax,
            uses_spcompress=uses_spcompress,
        )
        given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        scales, return_lse = extra_arguments.run_scales(args, self._positions_of_run, given, return_lse)
        self._check_window(window_left)
        skip = checks.skip_softmax(skip_softmax_threshold_scale_factor)
        run_args = run_options.RunArgs(scales, out, lse, return_lse, lse_base, lse_layout, used_sinks, skip)
        pair = paged_kv_cache if isinstance(paged_kv_cache, tuple) else (paged_kv_cache, None)
        if traced or have_own_dispatch(q, *pair):
            k, v = pair
            return operators.run(self, q, k, v, self._cached_o_data_type, run_args)
        self._check_q(q, plan)
        k_cache, v_cache = checks.paged_cache(paged_kv_cache, self._kv_layout)
        if k_cache.size(1) != plan.batch.page_size:
            raise ValueError(
                f"the pages of paged_kv_cache hold {k_cache.size(1)} tokens in kv_layout={self._kv_layout!r}, but "
                f"page_size={plan.batch.page_size} is planned."
                + hints.other_layout(self._kv_layout, k_cache.size(2) == plan.batch.page_size, " to the constructor")
            )
        plan.check_kv(k_cache, v_cache)
        index_vectors.enough_pages("paged_kv_indices", plan.batch.page_bound, k_cache)
        kv = PagedKv(
            k_cache, v_cache, self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf
        )
        result = self._run(plan, q, kv, run_args)
        return forward_only(result, (out, lse), q, pair, scales, used_sinks) if grad else result

    def _run_tensors(self, k: torch.Tensor, v: torch.Tensor | None) -> tuple[Any, ...]:
        return (k,) if v is None else ((k, v),)

    @typed_as(PagedPrefill.forward)
    @spellings(use_fp16_qk_reduction="allow_fp16_qk_reduction")
    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        **run_args: Any,
    ) -> Result:
        """Runs with these options, which replace those of the plan for this run and later ones.

        The older form of ``run``: an option left out takes its default here, not its planned value. Other keywords
        go to ``run``. Returns and raises as ``run``, and KeyError for an unknown ``pos_encoding_mode``.
        """
        hints.one_cache(paged_kv_cache, causal)
        values = run_options.options(
            causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
            allow_fp16_qk_reduction,
        )
        return self._forward(values, lambda: self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, **run_args))

    if TYPE_CHECKING:  # those of the base class, which take any arguments

        @typed_as(PagedPrefill.run_return_lse)
        def run_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...

        @typed_as(PagedPrefill.forward_return_lse)
        def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...


RUN_KEYWORDS = frozenset(inspect.signature(BatchPrefillWithPagedKVCacheWrapper.run).parameters)
