"""FlashInfer's wrapper of latent attention over a paged cache: a plan keeps lengths, a run is one ``attention()``."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._attend.plan_free import attention
from .._compute import selection
from .._core import autograd, checks, errors, extra_arguments, index_vectors, schedules, signatures, tracing
from .._core.run_options import Result
from .._fronts import trtllm_call
from .._graphs import operators
from . import index_buffers, latent_plans
from .cached_module import LatentPlanner
from .copying import DryRun
from .descriptions import describe_latent
from .latent_plans import MLAPlanMetadata

_NAME = "BatchMLAPagedAttentionWrapper"
_BUFFERS = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr")


class BatchMLAPagedAttentionWrapper(DryRun):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) in its absorbed form, over a paged cache.

    For decode steps, draft tokens and short appends. All heads share the keys: a latent vector ``ckv`` of 512 columns,
    which is the value too, and ``kpe`` of 64 columns that carry the position.

    ``plan()`` keeps lengths and page tables, and nothing synchronises; its first run schedules them for all runs.

    Args:
        float_workspace_buffer: a tensor on the device of queries and cache. Its memory is not used.
        use_cuda_graph: whether runs are captured in CUDA graphs. ``plan()`` then copies to the four buffers, which
            captured runs read, and the batch size is that of ``qo_indptr``.
        qo_indptr, kv_indptr: int32 buffers ``[batch + 1]``.
        kv_indices: int32 buffer, as long as the most pages of a plan.
        kv_len_arr: int32 buffer ``[batch]``.
        backend: ``"auto"``, ``"fa3"``, ``"fa2"`` or ``"reference"``. ``"auto"`` takes the fastest that serves all
            arguments.

    Raises:
        TypeError: the workspace is not a tensor.
        ValueError: an unknown backend; ``use_cuda_graph`` with a buffer that is missing, or of another dtype or device.

    Examples:
        >>> wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8))
        >>> qo_indptr, kv_indptr = torch.arange(3, dtype=torch.int32), torch.tensor([0, 2, 3], dtype=torch.int32)
        >>> pages, lens = torch.tensor([4, 0, 7], dtype=torch.int32), torch.tensor([20, 5], dtype=torch.int32)
        >>> wrapper.plan(qo_indptr, kv_indptr, pages, lens, 16, 512, 64, 16, True, 192**-0.5,
        ...              torch.bfloat16, torch.bfloat16)
        >>> q_nope, q_pe = (torch.randn(2, 16, dim, dtype=torch.bfloat16) for dim in (512, 64))
        >>> ckv, kpe = torch.randn(8, 16, 576, dtype=torch.bfloat16).split([512, 64], -1)  # 8 pages of 16 tokens
        >>> wrapper.run(q_nope, q_pe, ckv, kpe).shape
        torch.Size([2, 16, 512])
    """

    _pin_memory_int_workspace_buffer: torch.Tensor | None = None  # FlashInfer's plans need one; engines pass it on

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
        if backend not in selection.CHOICES:
            other = "; cutlass is for Blackwell GPUs" if backend == "cutlass" else ""
            raise ValueError(f"backend={backend!r} is unknown: use one of {', '.join(selection.CHOICES)}{other}.")
        self._float_workspace_buffer = checks.workspace("float_workspace_buffer", float_workspace_buffer)
        self.device = self._float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._backend = backend
        self._number = operators.number_of(self)
        self._use_cuda_graph = checks.flag("use_cuda_graph", use_cuda_graph)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr, kv_indptr
        self._kv_indices_buf, self._kv_len_arr_buf = kv_indices, kv_len_arr
        self._most_rows: int | None = None  # of a request; None: unknown
        self._bounded = False  # whether it bounds later plans, since graphs may have been captured
        self._most_keys: int | None = None
        self._total_rows: int | None = None  # of all requests
        self._page_bound = 0  # pages that a cache must have; 0: unknown
        self._heads, self._dims = 0, (0, 0)
        self._contract: latent_plans.Contract | None = None  # None: no plan yet
        self._causal = False
        self._page_size = 0
        self._sm_scale = 1.0
        self._schedule = schedules.Schedule(_strict=False)  # of the runs of a plan
        if self._use_cuda_graph:
            given = dict(zip(_BUFFERS, (qo_indptr, kv_indptr, kv_indices, kv_len_arr)))
            index_buffers.check_indices(given, self.device)
            batch = given["kv_len_arr"].numel()  # type: ignore[union-attr]
            for name in ("qo_indptr", "kv_indptr"):
                size = given[name].numel()  # type: ignore[union-attr]
                if size != batch + 1:
                    raise ValueError(f"{name} has {size} elements and kv_len_arr {batch}: it needs one more.")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_schedule": schedules.Schedule(_strict=False)})  # a copy plans by itself
        self._number = operators.number_of(self)  # compiled functions know a wrapper by it: a copy is another

    def __repr__(self) -> str:
        return describe_latent(self)

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Takes another device from ``float_workspace_buffer``; call plan() again before running.

        Args:
            float_workspace_buffer: contiguous, 16-byte aligned; its device becomes the wrapper's.
            int_workspace_buffer: accepted, not used.

        Raises:
            ValueError: a buffer that is not aligned or not contiguous; under CUDA graphs, one on another device than
                the index buffers.
        """
        buffer = checks.workspace("float_workspace_buffer", float_workspace_buffer)
        if self._use_cuda_graph and buffer.device != self.device:
            raise ValueError(
                f"float_workspace_buffer is on {buffer.device}, but the index buffers of this wrapper for CUDA graphs "
                f"are on {self.device}: pass one there, or make another wrapper."
            )
        if int_workspace_buffer is not None:
            self._int_workspace_buffer = checks.workspace("int_workspace_buffer", int_workspace_buffer)
        self._float_workspace_buffer, self.device = buffer, buffer.device
        self._contract = None

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        """Keeps the lengths, page tables and options of the runs that follow.

        Lengths and page tables come as indptrs, as block tables, or as ``metadata``. They may be on the CPU, from which
        they are copied, or on the device. Maxima of lengths on the CPU let kernels choose tiles and KV splits; without,
        they assume the most that the tensors allow. Under CUDA graphs the first plan's longest query bounds those of
        later plans. ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            qo_indptr: int32 ``[batch + 1]``, first query row of each request; ``arange`` for decode steps.
            kv_indptr: int32 ``[batch + 1]``, where the pages of each request begin in ``kv_indices``.
            kv_indices: int32, the pages of all requests.
            kv_len_arr: int32 ``[batch]``, keys of each request, those of its query rows included.
            num_heads: query heads.
            head_dim_ckv, head_dim_kpe: 512 and 64; PyTorch computes others, slowly. With ``head_dim_kpe`` 0 there
                is no kpe.
            page_size: tokens of a page, of the caches of all runs.
            causal: whether row i of n rows sees the keys up to ``i + kv_len - n`` alone, instead of all.
            sm_scale: factor of the logits: ``1 / sqrt(192)`` times the model's own factor in DeepSeek's models.
            q_data_type: float16, bfloat16 or float8_e4m3fn.
            kv_data_type: that of the queries, or float8_e4m3fn.
            use_profiler: refused.
            metadata: an ``MLAPlanMetadata``, in place of lengths and page tables.
            cum_seq_lens_q: int32 ``[batch + 1]``, as ``qo_indptr``, with block tables.
            block_tables: int32 ``[batch, M]``, the pages of each request. Under CUDA graphs, the buffer of
                ``kv_indices`` must have room for all ``batch * M`` entries.
            seq_lens: int32 ``[batch]``, as ``kv_len_arr``, with block tables.
            max_q_len: bound of the query lengths. Pass it where these are on the GPU.
            query_layout, kv_cache_layout: ``"packed"`` or ``"split"``: accepted, runs take both forms.
            lse_mode: ``"base2"`` or ``"basee"``: runs that ask for an LSE of the other base raise. ``"none"``: runs
                decide.
            output_dtype: dtype of the output. Default: that of ``out`` or of the queries, bfloat16 for fp8.
            output_scale: ``"per-tensor"`` is refused.
            scale_mode: ``"kv-per-tensor"``, ``"bmm-scalar"`` or ``"bmm-tensor"``: runs without such scales raise.
            skip_softmax: refused.
            enable_pdl: accepted, without effect.
            use_sinks: True: runs without ``sinks`` raise.

        Raises:
            TypeError: an argument that is missing, or of another type.
            ValueError: tensors or numbers that do not fit together; under CUDA graphs, more than the buffers hold.
            RuntimeError: offsets on the CPU that decrease.
            NotImplementedError: an argument that is refused.
            BackendError: under CUDA graphs, columns or a cache dtype that no kernel serves.
        """
        extra_arguments.unsupported(_NAME, "use Nsight Systems.", use_profiler=use_profiler)
        needed: dict[str, Any] = dict(num_heads=num_heads, head_dim_ckv=head_dim_ckv, head_dim_kpe=head_dim_kpe)
        needed |= dict(page_size=page_size, sm_scale=sm_scale, q_data_type=q_data_type, kv_data_type=kv_data_type)
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise TypeError(f"plan() needs {', '.join(missing)}.")
        size = checks.page_size(page_size)
        given = (qo_indptr, kv_indptr, kv_indices, kv_len_arr, cum_seq_lens_q, block_tables, seq_lens, max_q_len)
        lengths = latent_plans.lengths(metadata, MLAPlanMetadata(*given), size)
        heads, dims = checks.integer("num_heads", num_heads), []
        for name, dim in (("head_dim_ckv", head_dim_ckv), ("head_dim_kpe", head_dim_kpe)):
            dims.append(checks.integer(name, dim))
            if dims[-1] < (name == "head_dim_ckv"):
                raise ValueError(f"{name}={dim}: it must be 512 for ckv and 64 for kpe, or positive at least.")
        if heads < 1:
            raise ValueError(f"num_heads={num_heads} must be positive.")
        causal, scale = checks.flag("causal", causal), checks.sm_scale(sm_scale, sum(dims))
        contract = latent_plans.contract(
            f"{_NAME}.plan()",
            q_data_type,
            kv_data_type,
            output_dtype,
            {"query_layout": query_layout, "kv_cache_layout": kv_cache_layout},
            lse_mode,
            output_scale,
            scale_mode,
            skip_softmax,
            use_sinks,
        )
        why = latent_plans.why_not_captured((dims[0], dims[1]), contract.kv_dtype)
        if why is not None and self._use_cuda_graph and self.device.type == "cuda":
            raise errors.BackendError(f"PyTorch computes this, which CUDA graphs cannot hold: {why}")
        if self._dry_run:
            return
        self._keep(lengths)
        self._heads, self._dims, self._page_size = heads, (dims[0], dims[1]), size
        self._causal, self._sm_scale, self._contract = causal, scale, contract

    @property
    def _cached_module(self) -> LatentPlanner:
        """For engines that call the planner of FlashInfer's compiled module."""
        return LatentPlanner(self)

    def _check_buffers(self, batch: int, pages: int) -> None:
        fixed, room = self._kv_len_arr_buf.numel(), self._kv_indices_buf.numel()  # type: ignore[union-attr]
        if batch != fixed:
            raise ValueError(
                f"this wrapper was made for CUDA graphs with batch_size={fixed}, but the plan has {batch}: pad the "
                "batch with empty requests, or make another wrapper."
            )
        if pages > room:
            raise ValueError(f"kv_indices has {pages} pages, but its buffer room for {room}: make the buffer longer.")

    def _keep(self, x: latent_plans.Lengths) -> None:
        """Copies index vectors to where runs read them."""
        self._schedule.renew()
        if self._use_cuda_graph:
            self._copy_to_buffers(x)
        else:
            self._most_rows, self._most_keys = x.most_rows, x.most_keys
            self._qo_indptr_buf, self._kv_indptr_buf = self._moved(x.qo_indptr), self._moved(x.kv_indptr)
            self._kv_len_arr_buf = self._moved(x.kv_len_arr)
            if x.kv_indices is not None:
                self._kv_indices_buf = self._moved(x.kv_indices)
        self._total_rows, self._page_bound = x.total_rows, x.page_bound

    def _copy_to_buffers(self, x: latent_plans.Lengths) -> None:
        self._check_buffers(x.batch, 0 if x.kv_indices is None else x.kv_indices.numel())
        rows = x.most_rows
        if not self._bounded:
            self._most_rows = rows
        elif self._most_rows is not None and rows is not None and rows > self._most_rows:
            raise ValueError(
                f"qo_indptr has a request of {rows} rows, but the first plan of this wrapper had at most "
                f"{self._most_rows}, for which graphs have been captured: make another wrapper."
            )
        elif rows is None and self._most_rows is not None:
            raise ValueError(
                "qo_indptr was on the CPU in the first plan of this wrapper for CUDA graphs, and now is on "
                f"{x.qo_indptr.device}: its longest query is not known. Pass it on the CPU again."
            )
        pairs = [(self._qo_indptr_buf, x.qo_indptr), (self._kv_indptr_buf, x.kv_indptr)]
        pairs.append((self._kv_len_arr_buf, x.kv_len_arr))
        if x.kv_indices is not None:
            pairs.append((self._kv_indices_buf, x.kv_indices))
        for buffer, vector in pairs:
            assert buffer is not None
            if buffer.data_ptr() != vector.data_ptr():  # engines write to the buffers themselves
                buffer[: vector.numel()].copy_(self._pinned(vector), non_blocking=True)
        self._bounded = True

    def _pinned(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or self.device.type == "cpu":
            return x
        return torch.empty_like(x, pin_memory=True).copy_(x)

    def _moved(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` on the device. A tensor of the CPU is copied, so the caller may change it at once."""
        if x.device.type == "cpu" and self.device.type == "cpu":
            return x.clone()
        return self._pinned(x).to(self.device, non_blocking=True)

    @signatures.typed_as(signatures.MlaWrapper.run)
    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,
        kv_cache: Any = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | torch.Tensor | None = None,
        bmm2_scale: float | torch.Tensor | None = None,
    ) -> Result:
        """Computes the planned attention. A row that sees no key has output 0 and LSE -inf.

        Args:
            q_nope: ``[rows, num_heads, 512]``, absorbed queries.
            q_pe: ``[rows, num_heads, 64]``, rotated queries.
            ckv_cache: ``[pages, page_size, 512]``, any strides with a contiguous last dimension.
            kpe_cache: ``[pages, page_size, 64]``. The two may be views of one cache: ``cache[..., :512]`` and
                ``cache[..., 512:]``.
            out: ``[rows, num_heads, 512]``, where to write the output. Rows behind the last request are not written.
            lse: float32 ``[rows, num_heads]``, where to write the LSE, also without ``return_lse``. The same holds.
            return_lse: whether to return the LSE too.
            return_lse_base_on_e: whether it is the natural logarithm; the default is base 2.
            query: ``[rows, num_heads, 576]``, or ``(q_nope, q_pe)``, in place of the two.
            kv_cache: ``[pages, page_size, 576]``, or ``(ckv_cache, kpe_cache)``, in place of the two.
            ckv_scale, kpe_scale: dequantization factors of an fp8 cache, positive numbers. Where they differ, ``q_pe``
                or ``q_nope`` is first multiplied by their quotient, and rounded: best is one factor.
            sinks: float32 ``[num_heads]``: ``exp(sinks[h])`` joins the softmax denominator and the LSE of head h.
            bmm1_scale: factor of ``q k^T``, in place of the planned ``sm_scale``: the softmax scale times the scales of
                fp8 queries and keys. A number, or a float32 tensor of one element, which the kernel reads.
            bmm2_scale: factor of the output. As ``bmm1_scale``.
            skip_softmax_threshold_scale_factor: refused, but for 0.
            profiler_buffer, kv_len, page_table, o_scale, ckv_scale_arr: refused.

        Returns:
            The output ``[rows, num_heads, 512]``, in the dtype of ``plan(output_dtype=)``, of ``out`` or of the queries
            (bfloat16 for fp8); or the pair of it and the LSE, float32 ``[rows, num_heads]``.

        Raises:
            RuntimeError: there is no plan.
            TypeError, ValueError: tensors that do not fit together, or other ones than planned.
            NotImplementedError: an argument that is refused.
        """
        contract, name = self._contract, f"{_NAME}.run()"
        if contract is None:
            raise RuntimeError(f"{_NAME} has no plan: call plan() before run().")
        return_lse = checks.flag("return_lse", return_lse)
        base_e = checks.flag("return_lse_base_on_e", return_lse_base_on_e)
        extra_arguments.unsupported(name, "use Nsight Systems.", profiler_buffer=profiler_buffer)
        remedy = "plan() takes lengths and page tables; for others call cutlass_kernels.attention()."
        extra_arguments.unsupported(name, remedy, kv_len=kv_len, page_table=page_table)
        remedy = "the cache has one factor for ckv and one for kpe, and outputs have 16 bits. Leave it out."
        extra_arguments.unsupported(name, remedy, o_scale=o_scale, ckv_scale_arr=ckv_scale_arr)
        skip = checks.skip_softmax(skip_softmax_threshold_scale_factor) or None
        remedy = "all keys are computed. Leave it out."
        extra_arguments.unsupported(name, remedy, skip_softmax_threshold_scale_factor=skip)
        q_nope, q_pe = self._parts("query", query, {"q_nope": q_nope, "q_pe": q_pe})
        ckv_cache, kpe_cache = self._parts("kv_cache", kv_cache, {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache})
        if tracing.is_traced() and isinstance(q_nope, torch.Tensor) and isinstance(ckv_cache, torch.Tensor):
            return operators.run_latent(
                out,
                lse,
                wrapper=self._number,
                q_nope=q_nope,
                q_pe=q_pe,
                ckv_cache=ckv_cache,
                kpe_cache=kpe_cache,
                ckv_scale=ckv_scale,
                kpe_scale=kpe_scale,
                sinks=sinks,
                bmm1_scale=bmm1_scale,
                bmm2_scale=bmm2_scale,
                o_dtype=contract.output_dtype,
                return_lse_base_on_e=base_e,
                return_lse=return_lse,
            )
        self._check_tensors(q_nope, q_pe, ckv_cache, kpe_cache)
        place = None if lse is None else checks.lse_output(lse, q_nope.shape[:2], q_nope.device)
        wants_lse = return_lse or lse is not None
        for what, value in (("bmm1_scale", bmm1_scale), ("bmm2_scale", bmm2_scale)):
            checks.one_factor(what, value)
        kv, bmm = (ckv_scale, kpe_scale), (bmm1_scale, bmm2_scale)
        contract.check_run(out, wants_lse, base_e, kv, bmm, sinks is not None)
        k_descale, values, q_nope, q_pe = contract.scaled(ckv_scale, kpe_scale, q_nope, q_pe)
        sm_scale, q_descale, v_descale = self._sm_scale, None, values if bmm2_scale is None else bmm2_scale
        if isinstance(bmm1_scale, torch.Tensor):
            sm_scale, q_descale = 1.0, bmm1_scale
        elif bmm1_scale is not None:
            sm_scale = bmm1_scale
        keys, has_rope = ckv_cache.unsqueeze(2), self._dims[1] > 0
        result = attention(
            q_nope,
            keys,
            keys,
            q_rope=q_pe if has_rope else None,
            k_rope=kpe_cache.unsqueeze(2) if has_rope else None,
            cu_seqlens_q=self._qo_indptr_buf,
            seqused_k=self._kv_len_arr_buf,
            kv_indptr=self._kv_indptr_buf,
            kv_indices=self._kv_indices_buf,
            max_seqlen_q=self._most_rows,
            max_seqlen_k=self._most_keys,
            causal=self._causal,
            sm_scale=sm_scale,
            sinks=sinks,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            o_dtype=contract.output_dtype,
            out=out,
            return_lse=wants_lse,
            lse_base=math.e if base_e else 2,
            schedule=self._schedule,
            backend=self._backend,
        )
        if not isinstance(result, tuple):
            return result
        found, found_lse = result
        if place is not None:
            no_other_rows = self._total_rows == q_nope.size(0) and not self._use_cuda_graph
            found_lse = trtllm_call.write(found_lse, place, None if no_other_rows else self._qo_indptr_buf)
            autograd.written(place)
        return (found, found_lse) if return_lse else found

    def _parts(self, name: str, whole: Any, halves: dict[str, Any]) -> tuple[Any, Any]:
        """The two tensors of queries or cache, however they were given."""
        if whole is None:
            first, second = halves.values()
            return first, second
        for other in (other for other, x in halves.items() if x is not None):
            raise TypeError(f"{name} and {other} are given: pass one of them.")
        return latent_plans.parts(name, whole, self._dims)

    def _check_tensors(self, q_nope: Any, q_pe: Any, ckv_cache: Any, kpe_cache: Any) -> None:
        assert self._contract is not None
        cache, dtypes = ("pages", self._page_size), (self._contract.q_dtype, self._contract.kv_dtype)
        expected = (
            ("q_nope", q_nope, ("rows", self._heads), self._dims[0], dtypes[0]),
            ("q_pe", q_pe, ("rows", self._heads), self._dims[1], dtypes[0]),
            ("ckv_cache", ckv_cache, cache, self._dims[0], dtypes[1]),
            ("kpe_cache", kpe_cache, cache, self._dims[1], dtypes[1]),
        )
        for name, x, (first, second), dim, dtype in expected:
            if name in ("q_pe", "kpe_cache") and not dim:
                if x is not None and (not isinstance(x, torch.Tensor) or x.size(-1)):
                    raise ValueError(f"{name} is given, but head_dim_kpe=0 is planned: plan 64, or leave it out.")
                continue
            if not isinstance(x, torch.Tensor):
                raise TypeError(f"{name} is {type(x).__name__}, not a tensor.")
            shape = x.shape
            if len(shape) != 3 or shape[1] != second or shape[2] != dim:
                raise ValueError(f"{name} has shape {tuple(shape)}, but [{first}, {second}, {dim}] is planned.")
            if x.dtype != dtype:
                raise ValueError(f"{name} has dtype {x.dtype}, but {dtype} is planned: pass its dtype to plan().")
        if self._total_rows is not None and q_nope.size(0) < self._total_rows:
            raise ValueError(
                f"q_nope has {q_nope.size(0)} rows, but qo_indptr of the plan ends at {self._total_rows}: pass all "
                "rows, or plan again."
            )
        index_vectors.enough_pages("kv_indices", self._page_bound, ckv_cache)
