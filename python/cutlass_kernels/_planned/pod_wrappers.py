"""FlashInfer's wrappers for prefill on decode: see ``pod``."""

from __future__ import annotations

from typing import Any

import torch

from .._attend.singles import single_prefill_with_kv_cache
from .._core import checks, extra_arguments
from .copying import Part
from .descriptions import describe_several
from .paged_decode import BatchDecodeWithPagedKVCacheWrapper
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper

Cache = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class PODWithPagedKVCacheWrapper(Part):
    """A prompt over keys and values of its own, and decode steps of a batch over pages.

    ``plan()`` is that of the decode steps. The prompt is what ``single_prefill_with_kv_cache`` computes.

    Args:
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's.
        kv_layout: ``"NHD"`` or ``"HND"``, of the pages.
        use_cuda_graph: keep index data in the buffers below, so that a captured run follows later plans.
        paged_kv_indptr_buffer: int32 ``[batch + 1]`` on the wrapper's device.
        paged_kv_indices_buffer: int32, room for the pages of every plan.
        paged_kv_last_page_len_buffer: int32 ``[batch]``.
        jit_args: not served: nothing is compiled at run time.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: a workspace that is not aligned; missing, misplaced or mismatched buffers.
        NotImplementedError: ``jit_args``.

    Examples:
        >>> wrapper = PODWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
        >>> ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> wrapper.plan(ints(0, 2, 3), ints(5, 1, 2), ints(4, 16), 8, 2, 64, 16)
        >>> q_p, (k_p, v_p) = torch.randn(20, 8, 64).half(), torch.randn(2, 20, 2, 64).half()
        >>> q_d, cache = torch.randn(2, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half()
        >>> out_p, out_d = wrapper.run(q_p, k_p, v_p, q_d, cache, causal_p=True)
        >>> out_p.shape, out_d.shape
        (torch.Size([20, 8, 64]), torch.Size([2, 8, 64]))
    """

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        jit_args: Any = None,
    ) -> None:
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            True,
            paged_kv_indptr_buffer,
            paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer,
            jit_args=jit_args,
        )

    def __repr__(self) -> str:
        return describe_several(self, {"decode": self._decode} if hasattr(self, "_decode") else {})

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether index data is kept in the buffers given to the constructor."""
        return self._decode.is_cuda_graph_enabled

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor | None = None
    ) -> None:
        """Replaces the scratch buffers; call plan() again before running."""
        self._decode.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(
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
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Prepares the decode steps of runs. Arguments and errors are those of
        ``BatchDecodeWithPagedKVCacheWrapper.plan()``. ``torch.compile`` cannot trace this method: plan outside of the
        compiled function."""
        self._decode.plan(
            indptr,
            indices,
            last_page_len,
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode,
            window_left,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            data_type=data_type,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        k_p: torch.Tensor,
        v_p: torch.Tensor,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        kv_layout_p: str = "NHD",
        pos_encoding_mode_p: str = "NONE",
        sm_scale_p: float | None = None,
        window_left_p: int = -1,
        rope_scale_p: float | None = None,
        rope_theta_p: float | None = None,
        return_lse_p: bool = False,
        custom_mask_d: torch.Tensor | None = None,
        packed_custom_mask_d: torch.Tensor | None = None,
        causal_d: bool = False,
        kv_layout_d: str = "NHD",
        pos_encoding_mode_d: str = "NONE",
        sm_scale_d: float | None = None,
        window_left_d: int = -1,
        rope_scale_d: float | None = None,
        rope_theta_d: float | None = None,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse_d: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
        *args: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the prompt, and the planned decode steps.

        Args:
            q_p: ``[rows, num_qo_heads, head_dim]``.
            k_p, v_p: ``[keys, num_kv_heads, head_dim]`` (NHD) or ``[num_kv_heads, keys, head_dim]`` (HND).
            q_d: ``[batch, num_qo_heads, head_dim]``.
            paged_kv_cache_d: the cache of the decode steps, as ``BatchDecodeWithPagedKVCacheWrapper.run()`` takes it.
            custom_mask_p, packed_custom_mask_p, causal_p, kv_layout_p: as in ``single_prefill_with_kv_cache()``.
            pos_encoding_mode_p, sm_scale_p, window_left_p: as in ``single_prefill_with_kv_cache()``.
            rope_scale_p, rope_theta_p: as in ``single_prefill_with_kv_cache()``.
            causal_d, kv_layout_d, pos_encoding_mode_d, sm_scale_d, window_left_d, rope_scale_d, rope_theta_d: accepted,
                not used, as in FlashInfer: those of the constructor and of plan() count.
            custom_mask_d, packed_custom_mask_d: not served.
            q_scale, k_scale, v_scale: factors that dequantize tensors of the decode steps.
            return_lse_p, return_lse_d: accepted, not used, as in FlashInfer: LSEs are not returned.
            use_fp16_qk_reduction, enable_pdl: accepted, not used.
            *args: arguments of compiled variants, refused.

        Returns:
            ``(out_p, out_d)``, the outputs of the prompt and of the decode steps.

        Raises:
            ValueError: dtypes, shapes or devices that do not fit.
            RuntimeError: nothing has been planned.
            NotImplementedError: a mask of decode steps; further positional arguments.

        Examples:
            >>> out_p, out_d = wrapper.run(q_p, k_p, v_p, q_d, cache, causal_p=True)
        """
        if args:
            raise NotImplementedError(
                f"{type(self).__name__}.run() does not serve {len(args)} further positional arguments: they are for "
                "jit_args, and nothing is compiled at run time. Leave them out."
            )
        extra_arguments.unsupported(
            f"{type(self).__name__}.run",
            "plan BatchPrefillWithPagedKVCacheWrapper with it.",
            custom_mask_d=custom_mask_d,
            packed_custom_mask_d=packed_custom_mask_d,
        )
        out_p = single_prefill_with_kv_cache(
            q_p,
            k_p,
            v_p,
            custom_mask=custom_mask_p,
            packed_custom_mask=packed_custom_mask_p,
            causal=causal_p,
            kv_layout=kv_layout_p,
            pos_encoding_mode=pos_encoding_mode_p,
            sm_scale=sm_scale_p,
            window_left=window_left_p,
            rope_scale=rope_scale_p,
            rope_theta=rope_theta_p,
        )
        out_d = self._decode.run(q_d, paged_kv_cache_d, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
        return out_p, out_d

    def end_forward(self) -> None:
        """Does nothing; kept for callers that pair it with begin_forward."""


class BatchPODWithPagedKVCacheWrapper(Part):
    """A batch of prompts and a batch of decode steps, each over a paged cache.

    Both are planned as ``BatchPrefillWithPagedKVCacheWrapper`` plans them.

    Args:
        float_workspace_buffer: scratch tensor, 16-byte aligned; its device is the wrapper's. Both batches share it.
        kv_layout: ``"NHD"`` or ``"HND"``, of both caches.

    Raises:
        KeyError: unknown ``kv_layout``.
        ValueError: a workspace that is not aligned.

    Examples:
        >>> wrapper = BatchPODWithPagedKVCacheWrapper(torch.empty(16 << 20, dtype=torch.uint8))
        >>> ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> prompts, steps = (ints(0, 20), ints(0, 2), ints(0, 3), ints(4)), (ints(0, 1), ints(0, 1), ints(5), ints(7))
        >>> wrapper.plan(*prompts, *steps, 8, 2, 64, 16)
        >>> q_p, q_d = torch.randn(20, 8, 64).half(), torch.randn(1, 8, 64).half()
        >>> cache = torch.randn(6, 2, 16, 2, 64).half()
        >>> [out.shape for out in wrapper.run(q_p, cache, q_d, cache, causal_p=True)]
        [torch.Size([20, 8, 64]), torch.Size([1, 8, 64])]
    """

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._decode = BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout)
        self._plan_of_prompts: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def __repr__(self) -> str:
        parts = {"prefill": self._prefill, "decode": self._decode} if hasattr(self, "_decode") else {}
        return describe_several(self, parts)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """False: index data is not kept in buffers."""
        return False

    def plan(
        self,
        qo_indptr_p: torch.Tensor,
        kv_indptr_p: torch.Tensor,
        kv_indices_p: torch.Tensor,
        last_page_len_p: torch.Tensor,
        qo_indptr_d: torch.Tensor,
        kv_indptr_d: torch.Tensor,
        kv_indices_d: torch.Tensor,
        last_page_len_d: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Prepares runs over both batches. Index tensors are int32, on the CPU or on the device; nothing synchronises.
        A plan that fails leaves none in force. ``torch.compile`` cannot trace this method: plan outside of the compiled
        function.

        Args:
            qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p: of the prompts, as
                ``BatchPrefillWithPagedKVCacheWrapper.plan()`` takes them.
            qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d: of the decode steps; a request may have several
                rows, which see all of its keys.
            num_qo_heads, num_kv_heads, head_dim, page_size: of both.
            pos_encoding_mode, window_left, sm_scale, rope_scale, rope_theta: of both.
            q_data_type, kv_data_type, data_type: dtypes (or names) of queries and caches; ``data_type`` stands for
                either that is None.
            non_blocking: accepted; copies to the device never wait for it.

        Raises:
            ValueError, RuntimeError, KeyError: as ``BatchPrefillWithPagedKVCacheWrapper.plan()``.
        """
        q_data_type = q_data_type or data_type or "float16"
        kv_data_type = kv_data_type or data_type
        sizes = (num_qo_heads, num_kv_heads, head_dim, page_size)
        options: dict[str, Any] = dict(
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
        vectors = (qo_indptr_p, kv_indptr_p, kv_indices_p, last_page_len_p)
        prompts: tuple[Any, ...] = (*vectors, *sizes)
        plans: tuple[Any, ...] = (self._prefill.plan, self._decode.plan)
        try:
            plans[0](*prompts, **options)
            plans[1](qo_indptr_d, kv_indptr_d, kv_indices_d, last_page_len_d, *sizes, **options)
        except BaseException:
            self._prefill._plan_info = self._decode._plan_info = None  # one may be new, the other old
            raise
        # Copies: a run with a mask plans from them again, when the caller's tensors may hold another batch.
        self._plan_of_prompts = ((*(x.clone() for x in vectors), *sizes), options)

    begin_forward = plan

    def run(
        self,
        q_p: torch.Tensor,
        paged_kv_cache_p: Cache,
        q_d: torch.Tensor,
        paged_kv_cache_d: Cache,
        custom_mask_p: torch.Tensor | None = None,
        packed_custom_mask_p: torch.Tensor | None = None,
        causal_p: bool = False,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        return_lse: bool = False,
        use_fp16_qk_reduction: bool = False,
        enable_pdl: bool | None = None,
    ) -> tuple[Any, Any]:
        """Computes both batches.

        Args:
            q_p, q_d: ``[rows, num_qo_heads, head_dim]``.
            paged_kv_cache_p, paged_kv_cache_d: caches as ``BatchPrefillWithPagedKVCacheWrapper.run()`` takes them; both
                may be the same.
            custom_mask_p, packed_custom_mask_p: masks of the prompts, as ``BatchPrefillWithPagedKVCacheWrapper.plan()``
                takes them. A run with a mask plans the prompts anew.
            causal_p: whether rows of prompts see only keys up to their own position.
            q_scale, k_scale, v_scale: factors that dequantize tensors of the decode steps.
            return_lse: return ``((out_p, out_d), (lse_p, lse_d))``.
            use_fp16_qk_reduction, enable_pdl: accepted, not used.

        Returns:
            ``(out_p, out_d)``; or with ``return_lse`` the outputs and the LSEs, base 2: ``((out_p, out_d),
            (lse_p, lse_d))``.

        Raises:
            ValueError: dtypes, shapes or devices that differ from the plan.
            RuntimeError: nothing has been planned.

        Examples:
            >>> out_p, out_d = wrapper.run(q_p, cache, q_d, cache, causal_p=True)
        """
        return_lse = checks.flag("return_lse", return_lse)
        prefill, has_mask = self._prefill, custom_mask_p is not None or packed_custom_mask_p is not None
        prefill._planned()
        args, options = self._plan_of_prompts
        if has_mask or prefill._custom_mask_buf is not None:
            plan: Any = prefill.plan
            plan(*args, custom_mask=custom_mask_p, packed_custom_mask=packed_custom_mask_p, causal=causal_p, **options)
        values = prefill._options.replaced("causal", checks.flag("causal_p", causal_p))
        of_prompts: Any = prefill._forward(values, lambda: prefill.run(q_p, paged_kv_cache_p, return_lse=return_lse))
        scales: dict[str, Any] = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        of_steps: Any = self._decode.run(q_d, paged_kv_cache_d, return_lse=return_lse, **scales)
        if not return_lse:
            return of_prompts, of_steps
        return (of_prompts[0], of_steps[0]), (of_prompts[1], of_steps[1])

    def end_forward(self) -> None:
        """Does nothing; kept for callers that pair it with begin_forward."""
