"""Attention over keys that requests share in groups: prefixes of prefixes, in levels.

Each level is a batch over one paged cache: the rows that share keys stand next to each other and are one request of
that level, so that its keys are read once for all of them. The states of the levels merge by their base-2 LSEs into the
attention over the keys of all levels (Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference", 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._compute.merging import merge_state_in_place
from .._core import checks
from .._core.autograd import forward_only_as_a_whole
from .._core.extra_arguments import spellings
from .._core.run_options import Result
from .._core.signatures import Cascade, typed_as
from .copying import Part
from .descriptions import describe_several
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper

# What the first plan of a level decides for all later ones, where runs may have been captured.
_PINNED = ("_max_total_num_rows", "_graph_general", "_graph_rows", "_graph_split")

Tensors = Sequence[torch.Tensor]


class MultiLevelCascadeAttentionWrapper(Part):
    """Attention of a batch whose requests share keys, over the pages of every level.

    Level 0 is the one that most rows share, e.g. a system prompt that all of them see; the last one holds the keys that
    each request has for itself. Every row sees all keys of its request in each level but the last, where ``causal``
    applies: the last row of a request stands at its last key. All levels read the same cache.

    ``copy.deepcopy`` and ``pickle`` copy the wrapper with its buffers. A plan for a GPU is not copied, since it holds
    addresses of the buffers: call plan() of the copy before its first run.

    Args:
        num_levels: how many levels there are.
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's. All levels share it.
        kv_layout: ``"NHD"`` (pages ``[page_size, num_kv_heads, head_dim]``) or ``"HND"``.
        use_cuda_graph: keep index data in the buffers below, so that a captured run follows later plans. The number of
            requests of each level is fixed, and the number of rows may not exceed that of the first plan.
        qo_indptr_buf_arr, paged_kv_indptr_buf_arr: for each level, int32 ``[requests + 1]`` on the wrapper's device.
        paged_kv_indices_buf_arr: for each level, int32, room for the pages of every plan.
        paged_kv_last_page_len_buf_arr: for each level, int32 ``[requests]``.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: no levels; a workspace that is not aligned; missing, misplaced or mismatched buffers.

    Examples:
        >>> wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(16 << 20, dtype=torch.uint8))
        >>> ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> wrapper.plan(  # three requests of one row share pages 0 and 1, and have one of their own each
        ...     [ints(0, 3), ints(0, 1, 2, 3)], [ints(0, 2), ints(0, 1, 2, 3)], [ints(0, 1), ints(2, 3, 4)],
        ...     [ints(16), ints(5, 1, 16)], 8, 2, 64, 16)
        >>> wrapper.run(torch.randn(3, 8, 64).half(), torch.randn(5, 2, 16, 2, 64).half()).shape
        torch.Size([3, 8, 64])
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Tensors | None = None,
        paged_kv_indptr_buf_arr: Tensors | None = None,
        paged_kv_indices_buf_arr: Tensors | None = None,
        paged_kv_last_page_len_buf_arr: Tensors | None = None,
    ) -> None:
        if checks.integer("num_levels", num_levels) < 1:
            raise ValueError(f"num_levels={num_levels} must be at least 1: a single level is a paged batch.")
        buffers: dict[str, Tensors | None] = {
            "qo_indptr_buf": qo_indptr_buf_arr,
            "paged_kv_indptr_buf": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf_arr,
        }
        given: dict[str, Any] = {}
        if use_cuda_graph:
            for name, arr in buffers.items():
                if arr is None:
                    raise ValueError(f"use_cuda_graph=True needs {name}_arr, one int32 tensor for each level.")
                given[name] = _one_per_level(f"{name}_arr", arr, num_levels)
        self._use_cuda_graph = checks.flag("use_cuda_graph", use_cuda_graph)
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer, kv_layout, use_cuda_graph, **{name: arr[level] for name, arr in given.items()}
            )
            for level in range(num_levels)
        ]
        self._last_qo_indptr: torch.Tensor | None = None

    def __repr__(self) -> str:
        return describe_several(self, {f"level {i}": level for i, level in enumerate(getattr(self, "_levels", ()))})

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether index data is kept in the buffers given to the constructor."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: Tensors | None = None
    ) -> None:
        """Replaces the scratch buffers; call plan() again before running.

        Args:
            float_workspace_buffer: contiguous, 16-byte aligned; its device becomes the wrapper's.
            int_workspace_buffers: one for the index data of each level; None keeps the present ones.

        Raises:
            ValueError: not one buffer for each level; a buffer that is not aligned or not contiguous, or devices that
                differ.
        """
        own: Sequence[torch.Tensor | None] = [None] * len(self._levels)
        if int_workspace_buffers is not None:
            own = _one_per_level("int_workspace_buffers", int_workspace_buffers, len(self._levels))
        for level, buffer in zip(self._levels, own):
            level.reset_workspace_buffer(float_workspace_buffer, buffer)

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Does nothing, as in ``BatchPrefillWithPagedKVCacheWrapper``."""
        for level in self._levels:
            level.prewarm_paged_kv_stride_variant(variant)

    @spellings(allow_fp16_qk_reduction="use_fp16_qk_reduction")
    def plan(
        self,
        qo_indptr_arr: Tensors,
        paged_kv_indptr_arr: Tensors,
        paged_kv_indices_arr: Tensors,
        paged_kv_last_page_len: Tensors,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        *,
        o_data_type: str | torch.dtype | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Prepares runs over a batch. A plan that fails leaves none in force.

        ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            qo_indptr_arr: for each level, int32 ``[requests + 1]``, offsets of its requests in the rows of q; the last
                one is the number of rows, and so the same in all levels.
            paged_kv_indptr_arr: for each level, int32 ``[requests + 1]``, offsets of its requests in the page numbers.
            paged_kv_indices_arr: for each level, int32, page numbers.
            paged_kv_last_page_len: for each level, int32 ``[requests]``, entries used of every last page.
            num_qo_heads, num_kv_heads, head_dim, page_size: sizes.
            causal: whether a row sees, of the last level's keys, only those up to its own position.
            pos_encoding_mode, window_left: ``"ROPE_LLAMA"``, ``"ALIBI"`` and windows count positions within each level,
                as if it were alone: in more than one level, they are not those of the keys in a row.
            use_fp16_qk_reduction: a permission that is not used (also ``allow_fp16_qk_reduction``).
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim)``.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            rope_scale, rope_theta: of ROPE_LLAMA; None is 1 and 1e4.
            q_data_type, kv_data_type: dtypes (or names) of q and of the cache; None is that of q.
            o_data_type: dtype of the output; None is that of q.
            fixed_split_size, disable_split_kv: as in ``BatchPrefillWithPagedKVCacheWrapper.plan``, of every level.

        Raises:
            ValueError: not one tensor for each level, or levels of different numbers of rows; else as of that plan().
            KeyError, RuntimeError, AssertionError: as of that plan().

        Examples:
            >>> wrapper.plan([shared_qo_indptr, qo_indptr], [shared_kv_indptr, kv_indptr], [shared_pages, pages],
            ...              [shared_last_page_len, last_page_len], 32, 8, 128, 16, causal=True)
        """
        count, causal = len(self._levels), checks.flag("causal", causal)
        tables = [
            _one_per_level(name, arr, count)
            for name, arr in (
                ("qo_indptr_arr", qo_indptr_arr),
                ("paged_kv_indptr_arr", paged_kv_indptr_arr),
                ("paged_kv_indices_arr", paged_kv_indices_arr),
                ("paged_kv_last_page_len", paged_kv_last_page_len),
            )
        ]
        before = [{name: getattr(level, name) for name in _PINNED} for level in self._levels]
        try:
            for number, (level, *table) in enumerate(zip(self._levels, *tables)):
                level.plan(
                    *table,
                    num_qo_heads,
                    num_kv_heads,
                    head_dim,
                    page_size,
                    causal=causal and number == count - 1,
                    pos_encoding_mode=pos_encoding_mode,
                    allow_fp16_qk_reduction=use_fp16_qk_reduction,
                    sm_scale=sm_scale,
                    window_left=window_left,
                    logits_soft_cap=logits_soft_cap,
                    rope_scale=rope_scale,
                    rope_theta=rope_theta,
                    q_data_type=q_data_type,
                    kv_data_type=kv_data_type,
                    o_data_type=o_data_type,
                    fixed_split_size=fixed_split_size,
                    disable_split_kv=disable_split_kv,
                )
            self._check_rows()
        except BaseException:
            for level, values in zip(self._levels, before):  # some hold the new plan, some the old
                level._plan_info = None
                for name, value in values.items():
                    setattr(level, name, value)
            raise
        # A slice of the int workspace, which torch.compile cannot make for plans of other sizes.
        self._last_qo_indptr = self._levels[-1]._qo_indptr_buf

    begin_forward = plan

    def _check_rows(self) -> None:
        """ValueError where levels are known to have different numbers of rows."""
        rows = [level._planned().total_q for level in self._levels]
        if len({count for count in rows if count is not None}) > 1:
            raise ValueError(f"qo_indptr_arr ends at {rows} in its levels: each of them holds all rows of q.")

    @typed_as(Cascade.run)
    @forward_only_as_a_whole
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        """Computes the planned attention over the keys of all levels.

        Args:
            q: ``[rows, num_qo_heads, head_dim]``.
            paged_kv_cache: the cache of all levels, ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a tuple (k_cache, v_cache).
            q_scale, k_scale, v_scale: as in ``BatchPrefillWithPagedKVCacheWrapper.run``.
            out: ``[rows, num_qo_heads, head_dim]`` to write to. Rows beyond the last request keep what they hold.
            return_lse: return ``(out, lse)``, the LSE fp32 ``[rows, num_qo_heads]`` in base 2.

        Returns:
            ``out``, or ``(out, lse)``.

        Raises:
            ValueError: shapes, dtypes or devices that differ from the plan.
            KeyError: ``paged_kv_cache`` is neither a tensor nor a tuple.
            RuntimeError: nothing has been planned.

        Examples:
            >>> out = wrapper.run(q, (k_cache, v_cache))
        """
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return_lse = checks.flag("return_lse", return_lse)
        *shared, last = self._levels
        given = out is not None
        out, lse = last.run(q, paged_kv_cache, out=out, return_lse=True, **scales)
        # Rows of a caller's tensor that belong to no request are not written.
        inside = None
        if given and shared:
            assert self._last_qo_indptr is not None
            inside = last._planned().rows_of_requests(self._last_qo_indptr, q.size(0))
        for level in shared:
            other, other_lse = level.run(q, paged_kv_cache, return_lse=True, **scales)
            merge_state_in_place(out, lse, other, other_lse, inside)
        return (out, lse) if return_lse else out

    forward = run

    def end_forward(self) -> None:
        """Does nothing; kept for callers that pair it with begin_forward."""


def _one_per_level(name: str, arr: Tensors, num_levels: int) -> Tensors:
    """``arr`` if it has a tensor for each level; TypeError or ValueError otherwise."""
    if not isinstance(arr, (list, tuple, torch.Tensor)):
        raise TypeError(f"{name} is {type(arr).__name__}: pass a list of tensors, one for each of {num_levels} levels.")
    if len(arr) != num_levels:
        raise ValueError(f"{name} has {len(arr)} tensors, but there are {num_levels} levels: give one for each.")
    return arr
