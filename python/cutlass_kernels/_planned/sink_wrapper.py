"""The paged wrapper of FlashInfer that takes attention sinks by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .._core import checks, signatures
from .._core.extra_arguments import refuse_others, spellings
from .._core.run_options import Result
from .._core.signatures import typed_as
from .paged_prefill import RUN_KEYWORDS, BatchPrefillWithPagedKVCacheWrapper


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """``BatchPrefillWithPagedKVCacheWrapper`` whose ``run()`` takes sinks and the softmax scale behind the cache.

    ``plan()`` is that of the base class. FlashInfer compiles a kernel for the dtypes, head dimensions and window of the
    constructor. Nothing is compiled here, so ``plan()`` alone decides them.

    Args:
        float_workspace_buffer, kv_layout, use_cuda_graph, backend: see the base class.
        qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf: see the base class.
        custom_mask_buf, mask_indptr_buf: see the base class.
        pos_encoding_mode: ``"NONE"``; others are arguments of ``plan()``.
        use_fp16_qk_reduction, q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left: accepted, not used.

    Raises:
        ValueError: ``pos_encoding_mode`` is not ``"NONE"``.
        KeyError, ValueError: as the base class.

    Examples:
        >>> wrapper = BatchAttentionWithAttentionSinkWrapper(torch.empty(16 << 20, dtype=torch.uint8), "NHD")
        >>> wrapper.plan(torch.tensor([0, 3]).int(), torch.tensor([0, 2]).int(), torch.tensor([5, 1]).int(),
        ...              torch.tensor([4]).int(), 8, 2, 64, 16, causal=True)
        >>> q, cache, sinks = torch.randn(3, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half(), torch.randn(8)
        >>> wrapper.run(q, cache, sinks, 0.125).shape
        torch.Size([3, 8, 64])
    """

    _positions_of_run = ("sinks", "sm_scale")

    @spellings(qk_indptr_buf="mask_indptr_buf")
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
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        if checks.pos_encoding(pos_encoding_mode) != "NONE":
            raise ValueError(f"pos_encoding_mode={pos_encoding_mode!r} is given to the constructor: pass it to plan().")
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
            backend,
        )

    @typed_as(signatures.SinkPrefill.run)
    def run(  # type: ignore[override]
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        sinks: torch.Tensor | None = None,
        sm_scale: float | None = None,
        **options: Any,
    ) -> Result:
        """Computes the planned attention with sinks.

        Args:
            q, paged_kv_cache: see the base class.
            sinks: float32 ``[num_qo_heads]``; ``exp(sinks[h])`` joins the denominator of head h, and so the LSE, in
                natural units. None computes without sinks.
            sm_scale: softmax scale in place of the planned one, for this run and later ones; None keeps it.
            **options: other keywords of the base class's ``run()``, such as ``out``, ``k_scale`` or ``return_lse``.

        Returns:
            ``out``, or with ``return_lse`` the pair ``(out, lse)``. The LSE is base 2.

        Raises:
            ValueError, KeyError, AssertionError, NotImplementedError, RuntimeError: as the base class.
        """
        refuse_others(self, options, RUN_KEYWORDS)
        run = super().run
        if sm_scale is None or sm_scale == self._sm_scale:
            return run(q, paged_kv_cache, sinks=sinks, **options)
        values = self._options.replaced("sm_scale", checks.sm_scale(sm_scale, checks.tensor("q", q, 3).size(-1)))
        return self._forward(values, lambda: run(q, paged_kv_cache, sinks=sinks, **options))

    if TYPE_CHECKING:  # that of the base class, which takes any arguments

        @typed_as(signatures.SinkPrefill.run_return_lse)
        def run_return_lse(self, *args: Any, **kwargs: Any) -> Any: ...  # type: ignore[override]
