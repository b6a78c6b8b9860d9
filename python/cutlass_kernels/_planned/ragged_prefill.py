"""Prefill and append attention of a batch whose keys and values are packed one request after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import is_grad_enabled

from .._core import checks, extra_arguments, index_vectors, run_options
from .._core.autograd import forward_only, needs_grad, written
from .._core.errors import PerformanceWarning, warn
from .._core.extra_arguments import spellings
from .._core.problems import FP8_DTYPES, HALF_DTYPES, Pages, RaggedKv, Vector
from .._core.run_options import Result
from .._core.signatures import RaggedPrefill, typed_as
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from . import base_wrapper, batches
from .batch_plans import Plan
from .batches import Batch
from .index_buffers import IndexBuffer


class BatchPrefillWithRaggedKVCacheWrapper(base_wrapper.BatchPrefillWrapper):
    """Attention of a batch of requests over keys and values in packed tensors.

    Plan once per batch (lengths), then run once per layer. Row ``i`` of a request stands at position
    ``p = i + kv_len - qo_len``; a causal row sees the keys ``j <= p``, a window keeps ``j >= p - window_left``.
    A row without keys gives 0, and an LSE of -inf. The LSE is base 2: ``log2(sum_j exp(logit_j))``. (Softmax statistics
    and their merging: Milakov and Gimelshein, 2018.)

    Index tensors and the tile list belong to the stream that is current in plan(): run on that stream, or order the
    two. Runs of a plan follow one another, called or replayed from CUDA graphs, since a running kernel counts its tiles
    in the wrapper's memory: for runs that may overlap, on several streams, use a wrapper each.

    ``copy.deepcopy`` and ``pickle`` copy the wrapper with its buffers. A plan for a GPU is not copied, since it holds
    addresses of the buffers: call plan() of the copy before its first run.

    Args:
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's.
        kv_layout: ``"NHD"`` (keys ``[nnz_kv, num_kv_heads, head_dim]``) or ``"HND"``.
        use_cuda_graph: keep index data in the buffers below, so that a captured run follows later plans. The batch size
            is fixed, and the number of rows may not exceed that of the first plan.
        qo_indptr_buf, kv_indptr_buf: int32 ``[batch + 1]`` on the wrapper's device.
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
        >>> wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8), "NHD")
        >>> wrapper.plan(torch.tensor([0, 3, 5]).int(), torch.tensor([0, 8, 10]).int(), 8, 2, 64, causal=True)
        >>> q, k, v = torch.randn(5, 8, 64).half(), torch.randn(10, 2, 64).half(), torch.randn(10, 2, 64).half()
        >>> wrapper.run(q, k, v).shape
        torch.Size([5, 8, 64])
    """

    _kv_indptr_buf = IndexBuffer()

    @spellings(mask_indptr_buf="qk_indptr_buf")
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        qk_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        *,
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        buffers = {"qo_indptr_buf": qo_indptr_buf, "kv_indptr_buf": kv_indptr_buf}
        jit = {"jit_args": jit_args, "jit_kwargs": jit_kwargs, "variant_owns_mask": variant_owns_mask}
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, buffers, custom_mask_buf, qk_indptr_buf, backend, jit
        )

    def _check_buffers(self, buffers: dict[str, torch.Tensor | None]) -> None:
        super()._check_buffers(buffers)
        qo, kv = buffers["qo_indptr_buf"], buffers["kv_indptr_buf"]
        if qo is not None and kv is not None and qo.numel() != kv.numel():
            raise ValueError(
                f"kv_indptr_buf has {kv.numel()} elements and qo_indptr_buf {qo.numel()}: both need batch_size + 1."
            )

    @spellings(head_dim_vo_at=5, head_dim_qk="head_dim", use_fp16_qk_reduction="allow_fp16_qk_reduction")
    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        *,
        head_dim_vo: int | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Prepares runs over a batch: lengths, mask, sizes, and the options that runs start from.

        Index tensors are int32, on the CPU or on the device, in any mix. CPU tensors are checked and copied before this
        returns; CUDA tensors are neither copied nor read by the host, so nothing synchronises. A plan that fails leaves
        the previous one in force. ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            qo_indptr: ``[batch + 1]``, offsets of the requests in the rows of q.
            kv_indptr: ``[batch + 1]``, offsets of the requests in the rows of k and v.
            num_qo_heads, num_kv_heads: query head h reads key/value head ``h // (num_qo_heads / num_kv_heads)``.
            head_dim: dimension of queries and keys; also accepted as ``head_dim_qk``.
            custom_mask: bool, the row-major ``[qo_len, kv_len]`` masks of all requests, flattened and concatenated;
                True where a row sees a key. Replaces ``causal``.
            packed_custom_mask: the same in bits, uint8, as ``segment_packbits(..., bitorder="little")`` packs it; wins
                over ``custom_mask``.
            causal: whether a row sees only keys up to its own position.
            pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` or ``"ALIBI"``, applied inside the attention.
            allow_fp16_qk_reduction: a permission that is not used (also ``use_fp16_qk_reduction``).
            window_left: keys a row sees to its left besides its own; -1 is no limit.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: of ROPE_LLAMA; None is 1 and 1e4.
            q_data_type, kv_data_type: dtypes (or names) of q and of k and v; None is that of q.
            head_dim_vo: dimension of the values; None is ``head_dim``. An integer in the place of ``custom_mask`` is
                taken as ``head_dim_vo``.
            o_data_type: dtype of the output; None is that of q. Where that is an fp8 type, the output is bfloat16.
            non_blocking: accepted; copies to the device never wait for it.
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr: multi-item scoring, all
                four together: uint32 ``[batch]`` or of no dimensions, uint16 ``[batch * token_pos_in_items_len]``, a
                number, uint16 ``[batch]``. Requests whose positions lie behind the end are causal. Replaces ``causal``
                and custom masks. Lengths on the GPU are read back, which waits for it: pass offsets, or ``seq_lens``
                and ``seq_lens_q``, on the CPU. CUDA graphs need mask buffers, else PyTorch computes it.
            fixed_split_size, disable_split_kv: keys per KV split (None and -1 set none), or no KV splits. With either,
                results of a request are bitwise the same in every batch. By default the keys of short queries are split
                to fill the device.
            seq_lens, seq_lens_q: keys and rows per request ``[batch]``; CPU tensors let the host check and size things
                where the offsets are CUDA tensors.
            max_sequence_kv: keys of the longest request; needed beside ``fixed_split_size`` where the offsets are CUDA
                tensors, as keys are not split without.
            max_token_per_sequence, uniform_q_len: hints that nothing here needs.
            v_indptr, o_indptr: offsets of values and outputs of their own are not served.

        Raises:
            KeyError: unknown ``pos_encoding_mode``.
            ValueError: lengths of index tensors, dtypes or masks that do not fit; under CUDA graphs another batch size,
                too many rows, or a mask without buffers; a backend that cannot serve the request (``BackendError``,
                also a RuntimeError).
            RuntimeError: heads that do not divide, decreasing offsets, workspaces too small for the plan.
            NotImplementedError: ``v_indptr`` or ``o_indptr`` is set.

        Examples:
            >>> wrapper.plan(qo_indptr, kv_indptr, 32, 8, 128, causal=True, q_data_type=torch.bfloat16)
        """
        if v_indptr is not None or o_indptr is not None:
            extra_arguments.unsupported(
                "plan()", "keys, values and outputs share offsets.", v_indptr=v_indptr, o_indptr=o_indptr
            )
        batch = self._read_batch(qo_indptr, kv_indptr)
        if seq_lens is not None:
            batch.take_lens(seq_lens)
        q_dtype = checks.dtype(q_data_type)
        if o_data_type is None or checks.dtype(o_data_type) in FP8_DTYPES:
            o_data_type = torch.bfloat16 if q_dtype in FP8_DTYPES else o_data_type
        shape = run_options.shape(num_qo_heads, num_kv_heads, head_dim, head_dim_vo, q_dtype, kv_data_type, o_data_type)
        if q_dtype in FP8_DTYPES and self._asked_backend == "fa2":
            # Both 16-bit types hold every fp8 number; that of the output spares a conversion of the result.
            cast = shape.o_dtype if shape.o_dtype in HALF_DTYPES else torch.float16
            shape = shape._replace(cast=cast)
            warn(
                f"backend='fa2' has no fp8 tensor cores: every run converts q, k and v ({q_dtype}) to {cast}.",
                PerformanceWarning,
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
        self._commit(plan, {"qo_indptr_buf": batch.qo, "kv_indptr_buf": batch.kv})

    begin_forward = plan

    def _read_batch(self, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> Batch:
        """The index tensors, checked and on the wrapper's device."""
        like = self._float_workspace_buffer
        batch = batches.read_offsets(qo_indptr, kv_indptr, like) or batches.take_offsets(qo_indptr, kv_indptr, like)
        if batch is not None:
            self._check_batch(batch.size)
            return batch
        qo = index_vectors.indptr("qo_indptr", qo_indptr, from_zero=True)
        count = qo.numel() - 1
        self._check_batch(count)
        kv = index_vectors.indptr("kv_indptr", kv_indptr, count)
        converted = batches.read_offsets(qo, kv, like)
        if converted is not None:
            return converted
        longest = None
        if not kv.is_cuda:
            longest = int(index_vectors.lens(kv).max()) if count else 0
        return Batch(count, self._index(qo), self._index(kv), longest)

    def _vectors(self, plan: Plan, stored: Mapping[str, Vector]) -> tuple[Vector, Vector, Pages | None]:
        return stored["qo_indptr_buf"], stored["kv_indptr_buf"], None

    @typed_as(RaggedPrefill.run)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        o_scale: float | torch.Tensor | None = None,
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
    ) -> Result:
        """Computes the planned attention.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim]``, any strides with a contiguous last dimension (k and v too).
            k: ``[kv_indptr[-1], num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, kv_indptr[-1], head_dim]`` (HND).
            v: the same with ``head_dim_vo``.
            *args: ``return_lse``, or three tensors ``scale_q`` ``[num_qo_heads]``, ``scale_k`` and ``scale_v``
                ``[num_kv_heads]`` (fp32) that dequantize fp8 inputs.
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
            ValueError: dtypes, shapes or devices that differ from the plan; unknown ``lse_base`` or ``lse_layout``.
            AssertionError: ``window_left`` differs from the plan.
            NotImplementedError: ``o_scale`` or ``kv_cache_sf`` is set.
            RuntimeError: nothing has been planned.

        Examples:
            >>> out, lse = wrapper.run(q, k, v, return_lse=True)
        """
        plan = self._plan_info or self._planned()
        traced, grad = is_traced(), False
        used_sinks = self._sinks if sinks is None else sinks
        if not traced and is_grad_enabled():
            grad = needs_grad(q, k, v, out, lse, used_sinks, q_scale, k_scale, v_scale, *args)
        if (
            not (traced or grad)
            and not args
            and lse_base == "log2"
            and lse_layout == "NH"
            and window_left is None
            and kv_cache_sf is None
            and o_scale is None
            and skip_softmax_threshold_scale_factor is None
        ):
            direct = plan.direct or plan.direct_run(self._most_rows)
            if direct is not None:
                scales = (q_scale, k_scale, v_scale)
                result = direct(q, k, v, *scales, out, lse, used_sinks, return_lse, self._options)
                if result is not None:
                    if out is not None or lse is not None:
                        written(out, lse)
                    return result
        extra_arguments.unsupported(
            "BatchPrefillWithRaggedKVCacheWrapper.run", "leave it out.", kv_cache_sf=kv_cache_sf, o_scale=o_scale
        )
        given = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        scales, return_lse = extra_arguments.run_scales(args, ("return_lse",), given, return_lse)
        self._check_window(window_left)
        skip = checks.skip_softmax(skip_softmax_threshold_scale_factor)
        run_args = run_options.RunArgs(scales, out, lse, return_lse, lse_base, lse_layout, used_sinks, skip)
        if traced or have_own_dispatch(q, k, v):
            return operators.run(self, q, k, v, self._cached_o_data_type, run_args)
        self._check_q(q, plan)
        k = checks.token_major(checks.tensor("k", k, 3), self._kv_layout)
        v = checks.token_major(checks.tensor("v", v, 3), self._kv_layout)
        plan.check_kv(k, v)
        needed = plan.batch.kv.last
        if k.size(0) != v.size(0) or (needed is not None and k.size(0) < needed):
            raise ValueError(
                f"k has {k.size(0)} rows and v {v.size(0)}: both must have the rows of kv_indptr[-1]"
                + (f"={needed}." if needed is not None else ".")
            )
        inputs = (q, k, v)
        if plan.shape.cast is not None:
            q, k, v = (x.to(plan.shape.cast) for x in inputs)
        result = self._run(plan, q, RaggedKv(k, v, self._kv_indptr_buf), run_args)
        return forward_only(result, (out, lse), inputs, scales, used_sinks) if grad else result

    @typed_as(RaggedPrefill.forward)
    @spellings(use_fp16_qk_reduction="allow_fp16_qk_reduction")
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        allow_fp16_qk_reduction: bool = False,
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
        return self._forward(values, lambda: self.run(q, k, v, **run_args))

    if TYPE_CHECKING:  # those of the base class, which take any arguments

        @typed_as(RaggedPrefill.run_return_lse)
        def run_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...

        @typed_as(RaggedPrefill.forward_return_lse)
        def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...
