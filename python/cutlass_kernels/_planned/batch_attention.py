"""FlashInfer's wrapper for batches of prompts, appends and decode steps in any mixture."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .._core import checks, extra_arguments, index_vectors, run_options
from .copying import Part
from .paged_prefill import BatchPrefillWithPagedKVCacheWrapper

_WORKSPACE_BYTES = 32 << 20


class BatchAttention(Part):
    """Attention of a batch over pages: prompts, appends and decode steps in one kernel.

    A front of ``BatchPrefillWithPagedKVCacheWrapper``, which serves every mixture, too. This one owns its workspace and
    always returns the LSE.

    Args:
        kv_layout: ``"NHD"`` (pages ``[page_size, num_kv_heads, head_dim]``) or ``"HND"``.
        device: where queries and keys are.

    Raises:
        KeyError: unknown ``kv_layout``.

    Examples:
        >>> wrapper = BatchAttention(device="cpu")
        >>> ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> wrapper.plan(ints(0, 3, 4), ints(0, 2, 3), ints(5, 1, 2), ints(20, 7), 8, 2, 64, 64, 16, causal=True,
        ...              q_data_type=torch.float16, kv_data_type=torch.float16)
        >>> out, lse = wrapper.run(torch.randn(4, 8, 64).half(), torch.randn(6, 2, 16, 2, 64).half())
        >>> out.shape, lse.shape
        (torch.Size([4, 8, 64]), torch.Size([4, 8]))
    """

    def __init__(self, kv_layout: str = "NHD", device: str | torch.device = "cuda") -> None:
        self.float_workspace_buffer = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._paged = BatchPrefillWithPagedKVCacheWrapper(self.float_workspace_buffer, kv_layout)

    def __repr__(self) -> str:
        paged = repr(self._paged) if hasattr(self, "_paged") else "()"
        return type(self).__name__ + paged[paged.index("(") :]

    @property
    def int_workspace_buffer(self) -> torch.Tensor:
        """The buffer of tile lists."""
        return self._paged._int_workspace_buffer

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype = torch.bfloat16,
        kv_data_type: str | torch.dtype = torch.bfloat16,
        use_profiler: bool = False,
    ) -> None:
        """Prepares runs over a batch. Index tensors are int32, on the CPU or on the device; nothing synchronises.
        ``torch.compile`` cannot trace this method: plan outside of the compiled function.

        Args:
            qo_indptr: ``[batch + 1]``, offsets of the requests in the rows of q.
            kv_indptr: ``[batch + 1]``, offsets of the requests in ``kv_indices``.
            kv_indices: page numbers.
            kv_len_arr: ``[batch]``, keys of each request. Pages that they do not fill are not read.
            num_qo_heads, num_kv_heads: query head h reads key head ``h // (num_qo_heads / num_kv_heads)``.
            head_dim_qk, head_dim_vo: dimension of queries and keys, and of values.
            page_size: tokens a page holds.
            causal: whether a row sees only keys up to its own position.
            sm_scale: factor of ``q . k``; None is ``1 / sqrt(head_dim_qk)``.
            logits_soft_cap: cap ``c`` of ``c * tanh(s / c)``; None or <= 0 is off.
            q_data_type, kv_data_type: dtypes (or names) of q and of the cache. The output has that of q.
            use_profiler: not served.

        Raises:
            ValueError: lengths of index tensors or dtypes that do not fit; on the CPU, requests with more keys than
                their pages have room for.
            RuntimeError: heads that do not divide, decreasing offsets.
            NotImplementedError: ``use_profiler``.

        Examples:
            >>> wrapper.plan(qo_indptr, kv_indptr, kv_indices, kv_lens, 32, 8, 128, 128, 16, causal=True)
        """
        extra_arguments.unsupported(f"{type(self).__name__}.plan", "leave it out.", use_profiler=use_profiler)
        kv_lens = index_vectors.index_vector("kv_len_arr", kv_len_arr)
        offsets = index_vectors.indptr("kv_indptr", kv_indptr, kv_lens.numel(), told_by="kv_len_arr")
        size = checks.page_size(page_size)
        if offsets.device != kv_lens.device:
            device = offsets.device if offsets.is_cuda else kv_lens.device
            offsets, kv_lens = offsets.to(device, non_blocking=True), kv_lens.to(device, non_blocking=True)
        kv_indices = index_vectors.index_vector("kv_indices", kv_indices)
        pages, used = offsets.diff(), -(-kv_lens // size)
        if not pages.is_cuda:
            index_vectors.enough_entries(offsets, kv_indices)
            index_vectors.enough_room("kv_len_arr", kv_lens, pages, size)
        if pages.is_cuda or not torch.equal(pages, used):
            used = torch.minimum(used, pages).clamp_(min=0)  # where pages are missing, kernels skip the request
            offsets, kv_indices = _used_pages(offsets, kv_indices, used)
        self._paged.plan(
            qo_indptr,
            offsets,
            kv_indices,
            torch.where(kv_lens > 0, kv_lens - (used - 1) * size, 0).to(torch.int32),
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            size,
            head_dim_vo=head_dim_vo,
            causal=causal,
            sm_scale=sm_scale,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            o_data_type=q_data_type,
        )

    def run(
        self,
        q: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        logits_soft_cap: float = 0.0,
        profiler_buffer: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the planned attention.

        Args:
            q: ``[qo_indptr[-1], num_qo_heads, head_dim_qk]``.
            kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
                ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), keys first; or a tuple (k_cache, v_cache).
            out: ``[qo_indptr[-1], num_qo_heads, head_dim_vo]`` to write to.
            lse: float32 ``[qo_indptr[-1], num_qo_heads]`` to write the LSE to, base 2.
            k_scale, v_scale: factors of keys and of the output, for fp8 caches.
            logits_soft_cap: a cap in place of the planned one, for this run and later ones; 0 keeps it.
            profiler_buffer, kv_cache_sf: not served.

        Returns:
            ``(out, lse)``.

        Raises:
            ValueError: dtypes, shapes or devices that differ from the plan.
            RuntimeError: nothing has been planned.
            NotImplementedError: ``profiler_buffer`` or ``kv_cache_sf``.

        Examples:
            >>> out, lse = wrapper.run(q, (k_cache, v_cache))
        """
        extra_arguments.unsupported(
            f"{type(self).__name__}.run", "leave it out.", profiler_buffer=profiler_buffer, kv_cache_sf=kv_cache_sf
        )
        cap = checks.soft_cap(logits_soft_cap)
        values: run_options.Options = self._paged._options
        if cap > 0:
            values = values.replaced("logits_soft_cap", cap)
        given: dict[str, Any] = {"out": out, "lse": lse, "k_scale": k_scale, "v_scale": v_scale}
        run: Any = functools.partial(self._paged.run, q, kv_cache, return_lse=True, **given)
        result: Any = run() if values is self._paged._options else self._paged._forward(values, run)
        return result


def _used_pages(offsets: torch.Tensor, indices: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The page table without the pages of each request behind its first ``used``. Entries behind the last request are
    any of the table."""
    if not used.numel() or not indices.numel():
        return torch.zeros_like(offsets), indices
    ends = index_vectors.offsets(used)
    entry = torch.arange(indices.numel(), dtype=torch.int32, device=ends.device)
    request = torch.searchsorted(ends[1:], entry, right=True).clamp_(max=used.numel() - 1)
    place = (entry + (offsets[:-1] - ends[:-1])[request]).clamp_(0, indices.numel() - 1)
    return ends, indices[place.to(indices.device, non_blocking=True)]
