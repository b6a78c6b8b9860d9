"""Block-sparse attention with blocks of many sizes and a pattern per head, by FlashInfer's wrapper."""

from __future__ import annotations

from typing import Any

import torch

from .._compute import selection
from .._core import checks, index_vectors, run_options, signatures
from .._core.run_options import Result
from .._core.signatures import typed_as
from .._planned.copying import Part
from .block_sparse import check_encoding
from .patterns import PatternOfHeads, blocks_of_sizes


class VariableBlockSparseAttentionWrapper(Part):
    """Attention under a pattern of blocks that differ in size, with a pattern per key/value head.

    Block i of the rows of head h has ``block_row_sz[h, i]`` rows, block j of its keys ``block_col_sz[h, j]`` keys;
    ``block_mask_map[h, i, j]`` says whether the rows of the one see the keys of the other. Query heads that share a key
    head share its pattern. A block of rows without keys gives 0, and an LSE of -inf. The LSE is base 2.

    Tensors have heads before tokens. Nothing is copied where their strides are those of contiguous tensors. Keys are
    read in pages of the largest power of two that divides all sizes of column blocks: multiples of 8 are faster, and of
    64 fastest. Runs can be captured in CUDA graphs: do not plan again while the graph is in use.

    Args:
        float_workspace_buffer: a tensor, 16-byte aligned; its device is the wrapper's. Its memory is not used.
        backend: ``"auto"``, ``"fa2"``, ``"fa3"`` or ``"reference"``.

    Raises:
        ValueError: unknown ``backend``; a workspace that is not aligned.

    Examples:
        >>> wrapper = VariableBlockSparseAttentionWrapper(torch.empty(16, dtype=torch.uint8))
        >>> pattern = torch.tensor([[[False, False, True], [True, False, True], [False, True, True]]])
        >>> wrapper.plan(pattern, torch.tensor([[1, 2, 3]]), torch.tensor([[3, 1, 2]]), 1, 1, 64)
        >>> wrapper.run(*torch.randn(3, 1, 6, 64).half()).shape
        torch.Size([1, 6, 64])
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, backend: str = "auto") -> None:
        if backend not in selection.CHOICES:
            raise ValueError(f"backend={backend!r} is unknown: use one of {', '.join(selection.CHOICES)}.")
        self._requested_backend = backend
        self.reset_workspace_buffer(float_workspace_buffer)

    def __repr__(self) -> str:
        heads = getattr(self, "_heads", None)
        facts = ["not planned"]
        if heads is not None:
            facts = [f"{heads.num_rows} rows", f"{heads.num_keys} keys", f"num_qo_heads={heads.shape.num_qo_heads}"]
            facts += [f"num_kv_heads={heads.shape.num_kv_heads}", f"head_dim={heads.shape.head_dim_qk}"]
            facts.append(f"page={heads.page}")
        return f"{type(self).__name__}({', '.join(facts)})"

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Takes another device from ``float_workspace_buffer``; call plan() again before running.

        Args:
            float_workspace_buffer: contiguous, 16-byte aligned; its device becomes the wrapper's.
            int_workspace_buffer: accepted, not used.
        """
        self._float_workspace_buffer = checks.workspace("float_workspace_buffer", float_workspace_buffer)
        self.device, self._int_workspace_buffer = self._float_workspace_buffer.device, int_workspace_buffer
        self._heads: PatternOfHeads | None = None

    def plan(
        self,
        block_mask_map: torch.Tensor,
        block_row_sz: torch.Tensor,
        block_col_sz: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """Prepares runs over a pattern. The lists of pages are made on the device.

        Sizes on the CPU are read there, and nothing waits. Sizes on the GPU are read back in one small copy, which
        waits for the GPU. A plan that fails leaves the previous one in force.
        ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            block_mask_map: bool ``[num_kv_heads, MB, NB]``, True where a block of rows sees a block of keys.
            block_row_sz: integers ``[num_kv_heads, MB]``, rows of each block; every head has as many in all.
            block_col_sz: integers ``[num_kv_heads, NB]``, keys of each block; the same.
            num_qo_heads, num_kv_heads: query head h reads key head ``h // (num_qo_heads / num_kv_heads)``.
            head_dim: dimension of queries, keys and values.
            causal: whether row i of a block of n rows that sees m keys sees the first ``m - n + i + 1`` of them.
            pos_encoding_mode: ``"NONE"``.
            use_fp16_qk_reduction: a permission that is not used.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            rope_scale, rope_theta: accepted, not used.
            non_blocking: accepted; copies to the device never wait for it.
            q_data_type, kv_data_type: dtypes (or names) of q and of k and v; None is that of q. The output has that of
                q.

        Raises:
            ValueError: shapes that do not fit; negative sizes; heads with other numbers of rows or keys than the first;
                a ``pos_encoding_mode`` besides ``"NONE"``.
            RuntimeError: heads that do not divide.
            KeyError: unknown ``pos_encoding_mode``.

        Examples:
            >>> wrapper.plan(pattern, block_row_sz, block_col_sz, 32, 8, 128, q_data_type=torch.bfloat16)
        """
        shape = run_options.shape(num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, None)
        numbers = logits_soft_cap, sm_scale, rope_scale, rope_theta, use_fp16_qk_reduction
        options = run_options.options(causal, pos_encoding_mode, -1, *numbers)
        check_encoding(pos_encoding_mode, "patterns per head")
        allowed = {2: index_vectors.INTEGERS, 3: (torch.bool, *index_vectors.INTEGERS)}
        sizes = (("block_row_sz", block_row_sz, 2), ("block_col_sz", block_col_sz, 2))
        for name, x, rank in (("block_mask_map", block_mask_map, 3), *sizes):
            if not isinstance(x, torch.Tensor) or x.dim() != rank or x.dtype not in allowed[rank]:
                what = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
                form = "[num_kv_heads, MB, NB] of bools" if rank == 3 else "[num_kv_heads, blocks] of integers"
                raise ValueError(f"{name} is {what}: it must be a tensor {form}.")
        expected = (shape.num_kv_heads, block_row_sz.size(1), block_col_sz.size(1))
        heads = block_row_sz.size(0), block_col_sz.size(0)
        if tuple(block_mask_map.shape) != expected or set(heads) != {shape.num_kv_heads}:
            raise ValueError(
                f"block_mask_map has shape {tuple(block_mask_map.shape)}, block_row_sz {tuple(block_row_sz.shape)} and "
                f"block_col_sz {tuple(block_col_sz.shape)} for num_kv_heads={shape.num_kv_heads}: they must be "
                "[num_kv_heads, MB, NB], [num_kv_heads, MB] and [num_kv_heads, NB]."
            )
        if 0 in expected:
            raise ValueError(
                f"block_mask_map has shape {expected}: there must be at least one block of rows and one of keys."
            )
        blocks = blocks_of_sizes(block_mask_map != 0, block_row_sz, block_col_sz)
        selected = block_mask_map.to(device=self.device, dtype=torch.bool, non_blocking=True)
        backend = selection.asked_for(self._requested_backend)
        self._heads = PatternOfHeads(selected, blocks, shape, options, True, backend, self.device)

    begin_forward = plan

    @typed_as(signatures.VariableBlocks.run)
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Result:
        """Computes the planned attention.

        Args:
            q: ``[num_qo_heads, rows, head_dim]``.
            k, v: ``[num_kv_heads, keys, head_dim]``.
            out: ``[num_qo_heads, rows, head_dim]`` to write to.
            lse: float32 ``[num_qo_heads, rows]`` to write the LSE to.
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
        heads, return_lse = self._planned(), checks.flag("return_lse", return_lse)
        return heads.run(heads.options, q, k, v, out=out, lse=lse, return_lse=return_lse)

    def _planned(self) -> PatternOfHeads:
        if self._heads is None:
            raise RuntimeError(f"{type(self).__name__} has no plan: call plan() before run().")
        return self._heads

    def run_return_lse(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """``run`` with ``return_lse=True``."""
        run: Any = self.run
        return run(*args, return_lse=True, **kwargs)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
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
        check_encoding(pos_encoding_mode, "patterns per head")
        heads = self._planned()
        numbers = logits_soft_cap, sm_scale, rope_scale, rope_theta, use_fp16_qk_reduction
        options = run_options.options(heads.options.causal, pos_encoding_mode, -1, *numbers)
        result = heads.run(options, q, k, v)
        heads.options = options
        return result

    def end_forward(self) -> None:
        """Does nothing; kept for callers that pair it with begin_forward."""
