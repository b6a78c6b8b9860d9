"""Decode attention of a batch over a paged key/value cache: the newest tokens of every request, one or a few.

It is the attention of ``paged_prefill`` with as many rows for each request, so that there are no offsets of rows.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from .._core import checks, extra_arguments, hints, index_vectors, native, run_options
from .._core.native import PER_THREAD_STREAM, stream_of
from .._core.problems import FP8_DTYPES
from .._core.run_options import Result
from .._core.signatures import PagedDecode, typed_as
from .._core.tracing import cache_of_real_tensors
from . import index_buffers
from .batch_plans import Plan
from .batches import Index
from .paged_prefill import RUN_KEYWORDS, BatchPrefillWithPagedKVCacheWrapper

_MOST_ROWS = 2**31 - 1


class BatchDecodeWithPagedKVCacheWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """Attention of the newest tokens of a batch of requests over keys and values in pages.

    Plan once per step (page tables), then run once per layer. Every request has ``q_len_per_req`` rows of q, usually
    one; row ``i`` stands at position ``p = kv_len - q_len_per_req + i`` and sees the keys ``j <= p``, with a window
    those from ``p - window_left`` on. A row without keys gives 0, and an LSE of -inf. The LSE is base 2. (Pages: Kwon
    et al., "PagedAttention", 2023; keys split among blocks: Dao et al., "Flash-Decoding", 2023.)

    Index tensors and the tile list belong to the stream that is current in plan(): run on that stream, or order the
    two.

    ``copy.deepcopy`` and ``pickle`` copy the wrapper with its buffers. A plan for a GPU is not copied, since it holds
    addresses of the buffers: call plan() of the copy before its first run.

    Args:
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's.
        kv_layout: ``"NHD"`` (pages ``[page_size, num_kv_heads, head_dim]``) or ``"HND"``.
        use_cuda_graph: keep index data in the buffers below, so that a captured run follows later plans. The batch size
            is fixed, and ``q_len_per_req`` may not exceed that of the first plan.
        use_tensor_cores: accepted; every kernel uses them.
        paged_kv_indptr_buffer: int32 ``[batch + 1]`` on the wrapper's device.
        paged_kv_indices_buffer: int32, room for the pages of every plan.
        paged_kv_last_page_len_buffer: int32 ``[batch]``.
        backend: ``"auto"`` (chosen anew by every plan), ``"fa2"``, ``"fa3"`` or ``"reference"``.
        jit_args: for run-time compiled variants, which do not exist here.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: unknown ``backend``; a workspace that is not aligned; missing, misplaced or mismatched buffers.
        NotImplementedError: ``jit_args``.

    Examples:
        >>> wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8), "NHD")
        >>> wrapper.plan(torch.tensor([0, 2, 3]).int(), torch.tensor([5, 1, 0]).int(), torch.tensor([4, 16]).int(),
        ...              8, 2, 64, 16)
        >>> wrapper.run(torch.randn(2, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()).shape
        torch.Size([2, 8, 64])
    """

    _index_arguments = ("last_page_len", "indptr", "indices", "last_page_len")
    _positions_of_run = ("q_scale", "k_scale", "v_scale", "return_lse")
    _cached_module = None  # fast_decode_plan() needs none
    _rows_in_buffer: int | None = None  # those that the buffer of a CUDA graph divides among its requests

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: Any = None,
    ) -> None:
        self._use_tensor_cores = bool(use_tensor_cores)
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            None,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
            backend=backend,
            jit_args=jit_args,
        )

    @property
    def resolved_backend(self) -> str:
        """The backend of the latest plan; what the constructor was given, before the first one."""
        return self._backend

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was told."""
        return self._use_tensor_cores

    def _check_buffers(self, buffers: dict[str, torch.Tensor | None]) -> None:
        """Checks what the caller gave, by its names here, and adds the buffer of what the caller need not give."""
        del buffers["qo_indptr_buf"]
        index_buffers.check_indices({f"{name}fer": buffer for name, buffer in buffers.items()}, self.device)
        offsets, last = buffers["paged_kv_indptr_buf"], buffers["paged_kv_last_page_len_buf"]
        assert offsets is not None and last is not None
        batch = offsets.numel() - 1
        if batch < 0:
            raise ValueError("paged_kv_indptr_buffer is empty: it must have batch_size + 1 elements.")
        if last.numel() != batch:
            raise ValueError(
                f"paged_kv_last_page_len_buffer has {last.numel()} elements, but paged_kv_indptr_buffer {batch + 1}: "
                f"with batch_size={batch} it must have {batch}."
            )
        self._fixed_batch_size = batch
        self._rows_in_buffer = batch
        buffers["qo_indptr_buf"] = torch.arange(batch + 1, dtype=torch.int32, device=self.device)

    def plan(  # type: ignore[override]  # FlashInfer's decode takes other arguments than its prefill
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = None,
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        """Prepares runs over a batch: page tables, sizes, and the options that runs start from.

        Index tensors are int32, on the CPU or on the device, in any mix. CPU tensors are checked and copied before this
        returns; CUDA tensors are neither copied nor read by the host, so nothing synchronises. A plan that fails leaves
        the previous one in force. ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            indptr: ``[batch + 1]``, offsets of the requests in ``indices``.
            indices: page numbers; may be longer than ``indptr[-1]``, and pages may be shared.
            last_page_len: ``[batch]``, entries used of every last page, in [1, page_size] (0 without pages).
            num_qo_heads, num_kv_heads: query head h reads key/value head ``h // (num_qo_heads / num_kv_heads)``; any
                ratio is served.
            head_dim: dimension of queries, keys and values.
            page_size: tokens a page holds.
            pos_encoding_mode: ``"NONE"``, ``"ROPE_LLAMA"`` (rows and keys rotated by their positions) or ``"ALIBI"``
                (adds ``slope_h * (j - i)`` for row i of its request), applied inside the attention.
            window_left: keys a row sees to its left besides its own; -1 is no limit.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            q_data_type: dtype (or name) of q; None is ``data_type``, or float16 where that is none, or an fp8 type.
            kv_data_type: dtype of the cache; None is ``data_type``, or that of q where that is none.
            o_data_type: dtype of the output; None is that of q. An fp8 q needs one.
            data_type: what stands for the two above where they are not given.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: of ROPE_LLAMA; None is 1 and 1e4.
            non_blocking: accepted; copies to the device never wait for it.
            block_tables: a hint that nothing here needs.
            seq_lens: keys per request ``[batch]``; a CPU tensor lets the host size things where ``indptr`` is a CUDA
                tensor.
            fixed_split_size, disable_split_kv: pages per KV split (None and -1 set none), or no KV splits. With either,
                results of a request are bitwise the same in every batch. By default keys are split to fill the device.
            q_len_per_req: rows of every request, the last of which stands at its last key.

        Raises:
            KeyError: unknown ``pos_encoding_mode``.
            TypeError: sizes that are no integers.
            ValueError: lengths of index tensors or dtypes that do not fit; ``q_len_per_req`` below 1; under CUDA graphs
                another batch size, too many pages or rows; negative page numbers on the CPU; a backend that cannot
                serve the request (``BackendError``, also a RuntimeError).
            RuntimeError: heads that do not divide, decreasing offsets, ``last_page_len`` out of range.
            AssertionError: fp8 queries with ``backend="fa2"``.

        Examples:
            >>> wrapper.plan(indptr, indices, last_page_len, 32, 8, 128, 16, q_data_type=torch.bfloat16)
        """
        q_len = _rows_per_request(q_len_per_req)
        count = index_vectors.index_vector("last_page_len", last_page_len).numel()
        rows = self._rows_on_device(count, q_len) if getattr(indptr, "is_cuda", False) else None
        batch = self._read_batch(_offsets(count, q_len), indptr, indices, last_page_len, page_size, rows)
        if seq_lens is not None:
            batch.take_lens(seq_lens)
        if data_type is not None:
            if q_data_type is None and checks.dtype(data_type) not in FP8_DTYPES:
                q_data_type = data_type
            if kv_data_type is None:
                kv_data_type = data_type
        shape = self._paged_shape(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            None,  # values have it, too
            "float16" if q_data_type is None else q_data_type,
            kv_data_type,
            o_data_type,
        )
        causal = q_len > 1  # a single row, at the last key, sees them all
        values = run_options.options(
            causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope_scale, rope_theta, False
        )
        split = batch.split(fixed_split_size, disable_split_kv, None)
        self._commit_pages(self._prepare(shape, values, batch, split, None, None, None, None))

    begin_forward = plan  # type: ignore[assignment]

    def _rows_on_device(self, batch: int, q_len: int) -> Index | None:
        """Where the rows of each request begin, on the wrapper's CUDA device; None where it has to be copied there."""
        if self.device.index is None or torch.cuda.is_current_stream_capturing():
            return None  # what a capture writes is there only once its graph has run
        stream = stream_of(self.device.index)
        thread = threading.get_ident() if stream == PER_THREAD_STREAM else 0
        return _offsets_on(batch, q_len, self.device, stream, thread)

    def _commit(self, plan: Plan, indices: dict[str, Index]) -> None:
        if self._use_cuda_graph and plan.total_q == self._rows_in_buffer:
            del indices["qo_indptr_buf"]  # it holds them already
        if not self._dry_run:
            self._rows_in_buffer = None  # nobody knows, where what follows fails
        super()._commit(plan, indices)
        if not self._dry_run:
            self._rows_in_buffer = plan.total_q

    @typed_as(PagedDecode.run)
    def run(  # type: ignore[override]
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
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        **more: Any,
    ) -> Result:
        """Computes the planned attention.

        Args:
            q: ``[batch * q_len_per_req, num_qo_heads, head_dim]``, request after request, any strides with a contiguous
                last dimension.
            paged_kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), keys first; or a tuple (k_cache, v_cache) of
                tensors without the 2, which may differ in strides. The page dimension may be missing if page_size is 1.
            *args: ``q_scale, k_scale, v_scale, return_lse`` in this order.
            q_scale, k_scale, v_scale: numbers, one-element tensors or per-head tensors; those of q and k multiply the
                logits (before the soft cap), that of v the output. None is 1.
            out: ``[batch * q_len_per_req, num_qo_heads, head_dim]`` to write to.
            lse: float32 ``[batch * q_len_per_req, num_qo_heads]`` to write the LSE to.
            return_lse: return ``(out, lse)``.
            window_left, q_len_per_req: if given, must be the planned ones.
            sinks: float32 ``[num_qo_heads]``; ``exp(sinks[h])`` joins the denominator of head h, and so the LSE.
            **more: ``lse_base``, ``lse_layout``, ``enable_pdl``, ``skip_softmax_threshold_scale_factor`` and
                ``kv_cache_sf``, as in ``BatchPrefillWithPagedKVCacheWrapper.run``.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            ValueError: dtypes, shapes, devices or ``q_len_per_req`` that differ from the plan; page numbers (planned
                from the CPU) that the cache does not have.
            KeyError: ``paged_kv_cache`` is neither a tensor nor a tuple.
            AssertionError: ``window_left`` differs from the plan.
            NotImplementedError: ``kv_cache_sf`` is set.
            RuntimeError: nothing has been planned.

        Examples:
            >>> out, lse = wrapper.run(q, (k_cache, v_cache), return_lse=True)
        """
        if more:
            extra_arguments.refuse_others(self, more, RUN_KEYWORDS)
        if q_len_per_req is not None and q_len_per_req != (planned := self._q_len(self._planned())):
            raise ValueError(f"q_len_per_req={q_len_per_req}, but {planned} is planned: pass it to plan().")
        return super().run(  # type: ignore[call-overload, misc]  # *args may be those of any overload
            q,
            paged_kv_cache,
            *args,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            sinks=sinks,
            **more,
        )

    @staticmethod
    def _q_len(plan: Plan) -> int:
        """Rows of each request; 1 where there is none."""
        return (plan.total_q or 1) // (plan.batch.size or 1)

    def _check_q(self, q: torch.Tensor, plan: Plan) -> None:
        if isinstance(q, torch.Tensor) and q.dim() == 3 and q.size(0) != plan.total_q:
            raise ValueError(
                f"q has {q.size(0)} rows, but {plan.batch.size} requests with q_len_per_req={self._q_len(plan)} are "
                f"planned, which have {plan.total_q}: plan again."
            )
        super()._check_q(q, plan)

    @typed_as(PagedDecode.forward)
    def forward(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        hints.one_cache(paged_kv_cache, pos_encoding_mode)
        values = run_options.options(
            self._options.causal,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            rope_scale,
            rope_theta,
            False,
        )
        run_args |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return self._forward(values, lambda: self.run(q, paged_kv_cache, **run_args))

    if TYPE_CHECKING:  # those of the base class, which take any arguments

        @typed_as(PagedDecode.run_return_lse)
        def run_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]

        @typed_as(PagedDecode.forward_return_lse)
        def forward_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """``BatchDecodeWithPagedKVCacheWrapper`` for CUDA graphs: capture a run once, then plan and replay.

    Args:
        workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's.
        indptr_buffer: int32 ``[batch + 1]`` on the wrapper's device; fixes the batch size.
        indices_buffer: int32, room for the pages of every plan.
        last_page_len_buffer: int32 ``[batch]``.
        kv_layout: ``"NHD"`` or ``"HND"``.
        use_tensor_cores: accepted; every kernel uses them.

    Raises:
        KeyError, ValueError: as ``BatchDecodeWithPagedKVCacheWrapper``.

    Examples:
        >>> buffers = [torch.zeros(n, dtype=torch.int32, device="cuda") for n in (9, 4096, 8)]
        >>> workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        >>> wrapper = CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, *buffers)
    """

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        buffers = (indptr_buffer, indices_buffer, last_page_len_buffer)
        super().__init__(workspace_buffer, kv_layout, True, use_tensor_cores, *buffers)


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """``BatchDecodeWithPagedKVCacheWrapper.plan``, for engines that bind this function to a wrapper in its place.

    Args:
        self: the wrapper.
        q_len_per_req: as of plan().
        global_override_indptr_cpu: ``indptr`` on the CPU, or a bound of it. Nothing here needs it: a CUDA ``indptr`` is
            read on the device.

    The other arguments, and what is raised, are those of plan(); they lack its ``o_data_type``, so their order differs.
    ``torch.compile`` cannot trace this function: plan outside of the compiled function.

    Examples:
        >>> wrapper.begin_forward = functools.partial(fast_decode_plan, wrapper)
    """
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise TypeError(f"self is {type(self).__name__}: pass the BatchDecodeWithPagedKVCacheWrapper to plan.")
    if global_override_indptr_cpu is not None:
        hints.tensor("global_override_indptr_cpu", global_override_indptr_cpu)
    BatchDecodeWithPagedKVCacheWrapper.plan(  # not self.plan, in the place of which this may have been put
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
        data_type=data_type,
        sm_scale=sm_scale,
        rope_scale=rope_scale,
        rope_theta=rope_theta,
        non_blocking=non_blocking,
        fixed_split_size=fixed_split_size,
        disable_split_kv=disable_split_kv,
        q_len_per_req=q_len_per_req,
    )


def _rows_per_request(value: Any) -> int:
    """``q_len_per_req`` as an int; TypeError for what is none, ValueError below 1."""
    rows = checks.integer("q_len_per_req", value)
    if rows < 1:
        raise ValueError(f"q_len_per_req={rows} must be at least 1: every request of a decode batch has rows.")
    return rows


@cache_of_real_tensors(maxsize=1024)
def _offsets(batch: int, q_len: int) -> torch.Tensor:
    """Where the rows of each request begin, int32 ``[batch + 1]`` on the CPU (do not write to it)."""
    if batch * q_len > _MOST_ROWS:
        raise ValueError(
            f"{batch} requests with q_len_per_req={q_len} have more than {_MOST_ROWS} rows: split the batch."
        )
    return torch.arange(batch + 1, dtype=torch.int32, device="cpu") * q_len


@cache_of_real_tensors(maxsize=256)
def _offsets_on(batch: int, q_len: int, device: torch.device, stream: int, thread: int) -> Index:
    """The same on a CUDA device, written once for all plans on ``stream``, which is its current one, or, where a stream
    is each thread's own, on that of a ``thread``."""
    host = _offsets(batch, q_len)
    made = native.kept_empty(batch + 1, torch.int32, device)
    torch.arange(0, batch * q_len + 1, q_len, dtype=torch.int32, out=made)  # a copy from the host would wait
    return Index(made, host)
