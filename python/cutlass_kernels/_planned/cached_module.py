"""``wrapper._cached_module``: plans of engines that write the buffers of a CUDA graph themselves.

SGLang does so before it replays the graphs of speculative decoding. It copies its index vectors, and the bits of a
mask, to the buffers of a paged wrapper. Then it calls the planner of FlashInfer's compiled module with lengths from the
CPU, and assigns the result to ``_plan_info``. Here that planner makes a plan from the buffers. Nothing synchronises.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core import extra_arguments, index_vectors, run_options
from .batch_plans import Plan
from .latent_plans import Lengths


class CachedModule:
    """The attribute: a ``Planner`` of a wrapper for CUDA graphs that has a plan, else None."""

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self
        return Planner(wrapper) if wrapper._use_cuda_graph and wrapper._plan_info is not None else None


class Planner:
    """Stands for FlashInfer's compiled module, for a paged wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        pinned_buffer: torch.Tensor | None,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        max_rows: int,
        batch_size: int,
        num_qo_heads: int,
        num_kv_heads: int,
        page_size: int,
        use_cuda_graph: bool,
        head_dim_qk: int,
        head_dim_vo: int,
        causal: bool,
        window_left: int,
        fixed_split_size: int = -1,
        disable_split_kv: bool = False,
        num_colocated_ctas: int = 0,
        uniform_q_len: int = 0,
        /,
    ) -> Plan:
        """Plans what the wrapper's buffers hold. The plan is in force, and is returned for ``_plan_info``.

        Dtypes are those of ``_cached_q_data_type``, ``_cached_kv_data_type`` and ``_cached_o_data_type``. Mask,
        scale, cap, window and encoding stay as they are: runs take them from the wrapper, so ``causal`` and
        ``window_left`` are not needed. A wrapper with mask buffers computes the mask that these hold.

        Args:
            float_workspace_buffer, int_workspace_buffer: those of the wrapper.
            pinned_buffer, kv_indptr, max_rows, uniform_q_len: not needed.
            qo_indptr: int32 ``[batch + 1]`` on the CPU, as in the buffer.
            kv_lens: int32 ``[batch]`` on the CPU, keys per request.
            batch_size: that of the wrapper's buffers.
            fixed_split_size: pages per KV split; 0 and -1 are none, as in FlashInfer's module.

        Raises:
            ValueError: another batch size or workspace; lengths on the GPU; more rows than the first plan or run had;
                another rule for KV splits than the first plan's.
            RuntimeError: heads that do not divide; workspaces that are too small.
            NotImplementedError: ``num_colocated_ctas`` is not 0.
        """
        wrapper = self._wrapper
        planned = wrapper._planned()
        extra_arguments.unsupported("_cached_module.plan", "pass 0.", num_colocated_ctas=num_colocated_ctas or None)
        for name, buffer in (("float", float_workspace_buffer), ("int", int_workspace_buffer)):
            if buffer is not getattr(wrapper, f"_{name}_workspace_buffer"):
                raise ValueError(
                    f"{name}_workspace_buffer is not the wrapper's: pass wrapper._{name}_workspace_buffer, or replace "
                    "it by reset_workspace_buffer()."
                )
        wrapper._check_batch(batch_size)
        for name, lens in (("qo_indptr", qo_indptr), ("kv_lens", kv_lens)):
            if not isinstance(lens, torch.Tensor) or lens.device.type != "cpu":
                raise ValueError(f"{name} of _cached_module.plan must be a CPU tensor: plan() takes CUDA tensors.")
        rows = index_vectors.indptr("qo_indptr", qo_indptr, wrapper._fixed_batch_size, from_zero=True).diff()
        batch = wrapper._read_batch(
            wrapper._qo_indptr_buf,
            wrapper._paged_kv_indptr_buf,
            wrapper._paged_kv_indices_buf,
            wrapper._paged_kv_last_page_len_buf,
            page_size,
        )
        batch.take_lens(kv_lens)
        shape = wrapper._paged_shape(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            head_dim_vo,
            wrapper._cached_q_data_type,
            wrapper._cached_kv_data_type,
            wrapper._cached_o_data_type or planned.shape.o_dtype,
        )
        # What engines set beside the index vectors; FlashInfer's wrappers have these attributes.
        names = ("_prefix_len_ptr", "_token_pos_in_items_ptr", "_token_pos_in_items_len", "_max_item_len_ptr")
        prefix, positions, length, longest = (getattr(wrapper, name, None) for name in names)
        items = run_options.multi_item(prefix, positions, length or 0, longest)
        split = batch.split(fixed_split_size or None, disable_split_kv, None)
        plan: Plan = wrapper._prepare(shape, planned.options, batch, split, None, None, items, rows, keep_mask=True)
        in_effect = wrapper._options
        wrapper._commit_pages(plan)
        wrapper._options = in_effect
        return plan


class LatentPlanner:
    """Stands for the module of a wrapper of latent attention: SGLang plans with it before it replays a captured decode
    step."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    def plan(
        self,
        float_workspace_buffer: Any,
        int_workspace_buffer: Any,
        pinned_buffer: Any,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        *sizes: Any,
    ) -> None:
        """Copies lengths to the wrapper's buffers; ``kv_indices`` and all options are as they were."""
        wrapper = self._wrapper
        if wrapper._contract is None:
            raise RuntimeError(f"{type(wrapper).__name__} has no plan: call plan() before _cached_module.plan().")
        qo_indptr = index_vectors.indptr("qo_indptr", qo_indptr, from_zero=True)
        batch = qo_indptr.numel() - 1
        kv_lens = index_vectors.index_vector("kv_lens", kv_lens, batch)
        kv_indptr = index_vectors.indptr("kv_indptr", kv_indptr, batch)
        if kv_lens.device.type == kv_indptr.device.type == "cpu":
            index_vectors.enough_room("kv_lens", kv_lens, kv_indptr.diff(), wrapper._page_size)
        wrapper._keep(Lengths(qo_indptr, kv_indptr, kv_lens, None))
