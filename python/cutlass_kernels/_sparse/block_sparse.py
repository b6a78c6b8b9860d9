"""Block-sparse attention: each block of query rows sees some blocks of keys, by FlashInfer's wrapper."""

from __future__ import annotations

from typing import Any

import torch

from .._core import checks, index_vectors, run_options, signatures
from .._core.problems import FP8_DTYPES
from .._core.run_options import Result
from .._core.signatures import typed_as
from .._core.tracing import is_traced
from .._planned.copying import Part
from .._planned.descriptions import describe_several
from .._planned.paged_prefill import BatchPrefillWithPagedKVCacheWrapper
from .patterns import PatternOfHeads, mask_by_request, of_shorter_last_block, page_of, row_offsets, uniform_blocks


def convert_bsr_mask_layout(mask: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Masks of blocks, in the order of a block-sparse row matrix, as the masks of the rows of blocks.

    Args:
        mask: ``[nnz, R, C]``, a mask for each block.
        indptr: integers ``[MB + 1]``, where each row of blocks begins among the blocks.

    Returns:
        ``[nnz * R * C]``: of each row of blocks the row-major ``[R, columns]`` mask over its blocks side by side. Masks
        of blocks in no row come last.

    Raises:
        ValueError: ``mask`` has not three dimensions, or ``indptr`` not one; ``indptr`` ends behind the last block.
        RuntimeError: ``indptr`` on the CPU decreases.

    Examples:
        >>> blocks = torch.tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]])  # two blocks of 2 x 2 side by side
        >>> convert_bsr_mask_layout(blocks, torch.tensor([0, 2]))
        tensor([1, 2, 5, 6, 3, 4, 7, 8])
    """
    if not isinstance(mask, torch.Tensor) or mask.dim() != 3:
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"mask is {shape}: it must be a tensor [nnz, R, C], a mask for each block.")
    indptr = index_vectors.index_vector("indptr", indptr)
    if not is_traced():
        indptr = index_vectors.indptr("indptr", indptr)
        if not indptr.is_cuda and int(indptr[-1]) > mask.size(0):
            raise ValueError(f"indptr ends at {int(indptr[-1])}, but mask has {mask.size(0)} blocks.")
    return mask_by_request(mask, indptr)


class BlockSparseAttentionWrapper(Part):
    """Attention whose mask is a block-sparse row (BSR) matrix: row block i of R query rows sees the blocks of C keys
    that ``indices[indptr[i]:indptr[i + 1]]`` lists, all of their keys or those of a mask.

    A row block is a request of a paged batch, a block of keys a page. Blocks may have any size. Kernels are fastest
    with R of 128, or of 64 if heads share keys, and C a multiple of 8, best of 64. A row block without blocks gives 0,
    and an LSE of -inf. The LSE is base 2. (SciPy's ``bsr_matrix`` describes the format.)

    Runs can be captured in CUDA graphs: do not plan again while the graph is in use, as plan() writes what it reads.

    Args:
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's. 16 MiB suffice.
        backend: ``"auto"``, ``"fa2"``, ``"fa3"`` or ``"reference"``.

    Raises:
        ValueError: unknown ``backend``, as FlashInfer's for Blackwell are; a workspace that is not aligned.

    Examples:
        >>> wrapper = BlockSparseAttentionWrapper(torch.empty(16 << 20, dtype=torch.uint8))
        >>> indptr, indices = torch.tensor([0, 1, 3]).int(), torch.tensor([0, 0, 1]).int()
        >>> wrapper.plan(indptr, indices, 128, 128, 64, 64, 8, 2, 64)  # [[1, 0], [1, 1]] in blocks of 64 x 64
        >>> q, k, v = torch.randn(128, 8, 64).half(), *torch.randn(2, 128, 2, 64).half()
        >>> wrapper.run(q, k, v).shape
        torch.Size([128, 8, 64])
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        self._paged = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, "NHD", backend=backend)
        self._heads: PatternOfHeads | None = None
        self._page = 0
        self.M: int | None = None
        self.N: int | None = None
        self.R: int | None = None
        self.C: int | None = None

    def __repr__(self) -> str:
        if getattr(self, "_heads", None) is not None:
            return f"{type(self).__name__}(M={self.M}, N={self.N}, R={self.R}, C={self.C}, a pattern per head)"
        return describe_several(self, {"pages": self._paged} if hasattr(self, "_paged") else {})

    @property
    def device(self) -> torch.device:
        """The device of the workspace, queries and keys."""
        return self._paged.device

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replaces the scratch buffers; call plan() again before running.

        Args:
            float_workspace_buffer: contiguous, 16-byte aligned; its device becomes the wrapper's.
            int_workspace_buffer: the same for index data; None keeps the present one.
        """
        self._paged.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)
        self._heads = None

    def plan(
        self,
        indptr: torch.Tensor | None,
        indices: torch.Tensor | None,
        M: int,
        N: int,
        R: int,
        C: int,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: torch.Tensor | None = None,
        packed_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        block_mask: torch.Tensor | None = None,
    ) -> None:
        """Prepares runs over a pattern: which blocks of keys each block of rows sees.

        Index tensors are integers, on the CPU or on the device. CPU tensors are checked; CUDA tensors are not read by
        the host, and nothing synchronises, but for ``mask`` where C does not divide N. A plan that fails leaves the
        previous one in force. ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            indptr: ``[MB + 1]``, where each row block begins in ``indices``; MB is ``ceil(M / R)``.
            indices: ``[nnz]``, numbers of column blocks, below ``ceil(N / C)``, in any order.
            M, N: rows of q, and of k and v. Where R or C does not divide them, the last block is shorter.
            R, C: rows and columns of a block.
            num_qo_heads, num_kv_heads: query head h reads key head ``h // (num_qo_heads / num_kv_heads)``.
            head_dim: dimension of queries, keys and values.
            mask: bool ``[nnz, R, C]``, True where a row of the block sees a key. Replaces ``causal``.
            packed_mask: the same in bits, uint8: the layout of ``convert_bsr_mask_layout()``, each row block packed by
                ``segment_packbits(..., bitorder="little")``. Wins over ``mask``.
            causal: whether row i of a row block with n keys sees its first ``n - R + i + 1`` keys, in the order of
                ``indices``. If R equals C, and the block on the diagonal stands last in each row, this is the
                causal mask of the whole.
            pos_encoding_mode: ``"NONE"``; ``"ROPE_LLAMA"`` and ``"ALIBI"`` count the keys of a row block, in the order
                of ``indices``, from 0 on.
            use_fp16_qk_reduction: a permission that is not used.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: of ROPE_LLAMA; None is 1 and 1e4.
            q_data_type, kv_data_type: dtypes (or names) of q and of k and v; None is that of q.
            o_data_type: dtype of the output; None is that of q, or float16 of an fp8 q.
            non_blocking: accepted; copies to the device never wait for it.
            block_mask: bool ``[num_kv_heads or num_qo_heads, MB, NB]``, a pattern per head in place of ``indptr`` and
                ``indices``, which are then ignored; without masks inside blocks and position encodings. Such runs copy
                q and the output, unless heads come before tokens in their memory, and k and v that are not contiguous.
                The wrapper for blocks of many sizes needs no copies.

        Raises:
            ValueError: sizes, dtypes, offsets or masks that do not fit; block numbers on the CPU that are out of range;
                a backend that cannot serve the request (``BackendError``, also a RuntimeError).
            RuntimeError: heads that do not divide, decreasing offsets.
            KeyError: unknown ``pos_encoding_mode``.

        Examples:
            >>> wrapper.plan(indptr, indices, 16384, 16384, 128, 128, 32, 8, 128, q_data_type=torch.bfloat16)
        """
        sizes = tuple(checks.integer(name, x) for name, x in (("M", M), ("N", N), ("R", R), ("C", C)))
        M, N, R, C = sizes
        if min(M, N) < 0 or min(R, C) < 1:
            raise ValueError(f"M={M}, N={N}, R={R} and C={C}: blocks must have at least one row and one column.")
        if o_data_type is None:
            q_dtype = checks.dtype(q_data_type)
            o_data_type = torch.float16 if q_dtype in FP8_DTYPES else q_dtype
        heads = None
        if block_mask is not None:
            given = {"mask": mask, "packed_mask": packed_mask}
            for name in (name for name, x in given.items() if x is not None):
                raise ValueError(f"{name} and block_mask are given: a pattern per head has no masks inside its blocks.")
            dtypes = q_data_type, kv_data_type, o_data_type
            shape = run_options.shape(num_qo_heads, num_kv_heads, head_dim, None, *dtypes)
            numbers = logits_soft_cap, sm_scale, rope_scale, rope_theta, use_fp16_qk_reduction
            options = run_options.options(causal, pos_encoding_mode, -1, *numbers)
            heads = self._plan_heads(block_mask, sizes, shape, options)
        elif indptr is None or indices is None:
            raise ValueError("indptr and indices are missing: pass both, or a block_mask.")
        else:
            indptr, indices, page, masks = _lists(indptr, indices, sizes, mask, packed_mask)
            rows = row_offsets(M, R)
            last = torch.full((rows.numel() - 1,), page, dtype=torch.int32, device=indptr.device)
            self._paged.plan(
                rows,
                indptr,
                indices,
                last,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page,
                custom_mask=masks,
                packed_custom_mask=packed_mask,
                causal=causal,
                pos_encoding_mode=pos_encoding_mode,
                allow_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
                o_data_type=o_data_type,
            )
            self._page = page
        self._heads = heads
        self.M, self.N, self.R, self.C = sizes

    begin_forward = plan

    def _plan_heads(
        self, block_mask: torch.Tensor, sizes: tuple[int, ...], shape: run_options.Shape, options: run_options.Options
    ) -> PatternOfHeads:
        rows, keys, block_rows, block_columns = sizes
        blocks = (-(-rows // block_rows), -(-keys // block_columns))
        what = tuple(block_mask.shape) if isinstance(block_mask, torch.Tensor) else type(block_mask).__name__
        if what not in ((shape.num_kv_heads, *blocks), (shape.num_qo_heads, *blocks)):
            raise ValueError(
                f"block_mask is {what}: it must be a bool tensor [{shape.num_kv_heads}, {blocks[0]}, {blocks[1]}], or "
                f"one of the {shape.num_qo_heads} query heads."
            )
        if block_mask.dtype != torch.bool:
            raise ValueError(f"block_mask has dtype {block_mask.dtype}: it must be bool.")
        check_encoding(options.pos_encoding_mode, "block_mask")
        return PatternOfHeads(
            block_mask.to(device=self.device, non_blocking=True),
            uniform_blocks(block_mask.size(0), rows, keys, block_rows, block_columns),
            shape,
            options,
            False,
            self._paged._asked_backend,
            self.device,
        )

    @typed_as(signatures.Blocks.run)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: float | torch.Tensor | None = None,
        scale_k: float | torch.Tensor | None = None,
        scale_v: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Computes the planned attention.

        Args:
            q: ``[M, num_qo_heads, head_dim]``, any strides with a contiguous last dimension.
            k, v: ``[N, num_kv_heads, head_dim]``, the same.
            scale_q, scale_k, scale_v: factors that dequantize fp8 tensors: numbers, or float32 tensors of one element
                or of one per head.
            out: ``[M, num_qo_heads, head_dim]`` to write to.
            lse: float32 ``[M, num_qo_heads]`` to write the LSE to.
            return_lse: return ``(out, lse)``.
            enable_pdl: accepted; a launch attribute without effect on results.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            ValueError: dtypes, shapes or devices that differ from the plan.
            RuntimeError: nothing has been planned.

        Examples:
            >>> out, lse = wrapper.run(q, k, v, return_lse=True)
        """
        return_lse = checks.flag("return_lse", return_lse)
        if self._heads is not None:
            scales_of_heads = (scale_q, scale_k, scale_v)
            return self._heads.run(self._heads.options, q, k, v, scales_of_heads, out, lse, return_lse)
        self._check_planned()
        for name, x in (("k", k), ("v", v)):
            checks.tensor(name, x, 3)
            if x.size(0) != self.N:
                raise ValueError(f"{name} has {x.size(0)} rows, but N={self.N} is planned: plan again.")
        if self.N:
            k, v = (x.unflatten(0, (-1, self._page)) for x in (k, v))
        else:  # a page that no list names
            k, v = (x.new_zeros((1, self._page, *x.shape[1:])) for x in (k, v))
        scales: dict[str, Any] = {"q_scale": scale_q, "k_scale": scale_k, "v_scale": scale_v}
        return self._paged.run(q, (k, v), out=out, lse=lse, return_lse=return_lse, **scales)

    def _check_planned(self) -> None:
        if self._heads is None and self._paged._plan_info is None:
            raise RuntimeError(f"{type(self).__name__} has no plan: call plan() before run().")

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``run`` with ``return_lse=True``."""
        run: Any = self.run
        return run(*args, return_lse=True, **kwargs)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale_q: float | torch.Tensor | None = None,
        scale_k: float | torch.Tensor | None = None,
        scale_v: float | torch.Tensor | None = None,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Result:
        """Runs with these options, which replace those of the plan for this run and later ones.

        The older form of ``run``: an option left out takes its default here, not its planned value.
        """
        planned = self._heads.options if self._heads is not None else self._paged._options
        numbers = logits_soft_cap, sm_scale, rope_scale, rope_theta, use_fp16_qk_reduction
        values = run_options.options(planned.causal, pos_encoding_mode, -1, *numbers)
        if self._heads is not None:
            check_encoding(pos_encoding_mode, "block_mask")
            result = self._heads.run(values, q, k, v, (scale_q, scale_k, scale_v))
            self._heads.options = values
            return result
        self._check_planned()
        return self._paged._forward(values, lambda: self.run(q, k, v, scale_q, scale_k, scale_v))

    def end_forward(self) -> None:
        """Does nothing; kept for callers that pair it with begin_forward."""


def check_encoding(mode: str, pattern: str) -> None:
    """KeyError for an unknown ``pos_encoding_mode``, ValueError for one that patterns per head do not have."""
    if checks.pos_encoding(mode) != "NONE":
        raise ValueError(
            f"pos_encoding_mode={mode!r} is not served with {pattern}: rotate queries and keys beforehand, for example "
            "by apply_rope_with_cos_sin_cache()."
        )


def _lists(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    sizes: tuple[int, ...],
    mask: torch.Tensor | None,
    packed_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
    """Offsets, numbers and size of pages, and the mask as plans of paged batches take it."""
    rows, keys, block_rows, block_columns = sizes
    row_blocks, blocks = -(-rows // block_rows), -(-keys // block_columns)
    indices = index_vectors.index_vector("indices", indices)
    indptr = index_vectors.index_vector("indptr", indptr)
    if indptr.numel() != row_blocks + 1:
        raise ValueError(
            f"indptr has {indptr.numel()} elements, but M={rows} rows in blocks of R={block_rows} need "
            f"{row_blocks + 1}: the start of each row block and the end of the last."
        )
    indptr = index_vectors.indptr("indptr", indptr)
    if not indptr.is_cuda and int(indptr[-1]) > indices.numel():
        raise ValueError(f"indptr ends at {int(indptr[-1])}, but indices has {indices.numel()} elements.")
    if not indices.is_cuda and indices.numel():
        least, most = (int(x) for x in torch.aminmax(indices))
        if least < 0 or most >= blocks:
            wrong = least if least < 0 else most
            raise ValueError(
                f"indices holds {wrong}, but N={keys} columns in blocks of C={block_columns} have the numbers 0 to "
                f"{blocks - 1}."
            )
    if indptr.device != indices.device:
        device = indptr.device if indptr.is_cuda else indices.device
        indptr, indices = indptr.to(device, non_blocking=True), indices.to(device, non_blocking=True)
    last, page, masks = keys % block_columns, page_of(keys, block_columns), None
    if mask is not None and packed_mask is None:
        what = (tuple(mask.shape), mask.dtype) if isinstance(mask, torch.Tensor) else (type(mask).__name__,)
        if what[0] != (indices.numel(), block_rows, block_columns) or mask.is_floating_point():
            raise ValueError(
                f"mask is {', '.join(map(str, what))}: it must be a bool tensor [{indices.numel()}, {block_rows}, "
                f"{block_columns}], a mask for each of the blocks."
            )
        widths = torch.where(indices == blocks - 1, last, block_columns).to(mask.device) if last else None
        masks = mask_by_request(mask, indptr, widths)
    if last:
        indptr, indices = of_shorter_last_block(indptr, indices, blocks, block_columns // page, last // page)
    return indptr, indices, page, masks
