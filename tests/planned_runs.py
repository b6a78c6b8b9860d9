"""Batches through wrappers and single calls, and whether they give what they must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from compare import assert_close, assert_lse_close
from gpu_calls import captured
from problems import FP8, Batch, Options, Paged, expect, graph_buffers
from targets import Target, workspace

import cutlass_kernels as ck


def wrapper_for(backend: str, device: str, paged: bool, kv_layout: str = "NHD", **graph: Any) -> Any:
    """The ragged or the paged wrapper, with a workspace of its own."""
    make = ck.BatchPrefillWithPagedKVCacheWrapper if paged else ck.BatchPrefillWithRaggedKVCacheWrapper
    return make(workspace(device), kv_layout, backend=backend, **graph)


def plan(
    wrapper: Any,
    batch: Batch,
    options: Options,
    page_size: int | None = None,
    form: str | None = None,
    where: str = "cpu",
    **more: Any,
) -> tuple[Any, ...]:
    """Plans the batch, whose index vectors are on ``where``. Returns what run() takes behind q.

    ``form`` is that of pages, stacked where keys are like values. ``more`` are arguments of plan().
    """
    given = {"head_dim_vo": batch.v.shape[2], "q_data_type": batch.q.dtype, "kv_data_type": batch.k.dtype}
    if options.custom_masks is not None:
        given["custom_mask"] = torch.cat([mask.flatten() for mask in options.custom_masks])
    given |= {**options.plan_kwargs(), **more}
    if page_size is None:
        wrapper.plan(batch.qo_indptr(where), batch.kv_indptr(where), *batch.heads, **given)
        return batch.k, batch.v
    form = form or ("stacked" if batch.k.shape == batch.v.shape else "tuple")
    pages = batch.paged(page_size, wrapper._kv_layout, form)
    wrapper.plan(batch.qo_indptr(where), *pages.table(where), *batch.heads, page_size, **given)
    return (pages.cache,)


def of_run(options: Options) -> dict[str, Any]:
    """Those of the options that run() takes."""
    scales = {name: getattr(options, name) for name in ("q_scale", "k_scale", "v_scale")}
    return {"sinks": options.sinks, **{name: scale for name, scale in scales.items() if scale != 1.0}}


def attend(
    backend: str,
    batch: Batch,
    options: Options | None = None,
    page_size: int | None = None,
    *,
    kv_layout: str = "NHD",
    run: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, by the paged wrapper where there is a size of pages, else by the ragged one."""
    options = options or Options()
    wrapper = wrapper_for(backend, batch.device, page_size is not None, kv_layout)
    tensors = plan(wrapper, batch, options, page_size, **more)
    return wrapper.run(batch.q, *tensors, return_lse=True, **of_run(options), **(run or {}))


def single(backend: str, batch: Batch, options: Options, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the only request, by the single call."""
    (mask,) = options.custom_masks or [None]
    given = {"custom_mask": mask, **options.plan_kwargs(), **of_run(options), **more}
    return ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, return_lse=True, backend=backend, **given)


def compare(
    result: Sequence[torch.Tensor],
    batch: Batch,
    options: Options | None = None,
    *,
    plain: bool = True,
    lse_atol: float | None = None,
    **out: Any,
) -> None:
    """Output and LSE are those of the oracle, the output as near as PyTorch's own. ``out`` are its tolerances."""
    want = expect(batch, options)
    assert_close(result[0], want.out, want.baseline if plain else None, **out)
    assert_lse_close(result[1], want.lse, atol=lse_atol)


def paged(target: Target, batch: Batch, options: Options, page_size: int = 16, **plan: Any) -> tuple[torch.Tensor, ...]:
    """Output and LSE of the paged wrapper; a fixed size of splits is in keys."""
    if "fixed_split_size" in plan:
        plan["fixed_split_size"] = -(-plan["fixed_split_size"] // page_size)  # in pages
    return attend(target.backend, batch, options, page_size, **plan)


def ragged(target: Target, batch: Batch, options: Options, **plan: Any) -> tuple[torch.Tensor, ...]:
    """Output and LSE of the ragged wrapper."""
    return attend(target.backend, batch, options, **plan)


def check_captured_runs(
    backend: str,
    batches: Sequence[Batch],
    options: Options,
    check: Callable[..., None],
    room: int = 64,
    planned: Callable[[Any], None] = lambda wrapper: None,
) -> None:
    """A run over pages of 8, captured with the plan of the first batch, follows those of all. ``room`` is in pages, and
    ``planned`` looks at the wrapper after each plan."""
    pages, device = [batch.paged(8) for batch in batches], batches[0].device
    wrapper = wrapper_for(backend, device, True, **graph_buffers(len(batches[0].qo_lens), room, device))
    longest = (max(tensors, key=len) for tensors in ([x.q for x in batches], [x.cache for x in pages]))
    q, cache = (torch.zeros_like(x.view(torch.uint8)).view(x.dtype) for x in longest)
    given = {"q_data_type": q.dtype, "kv_data_type": cache.dtype, **options.plan_kwargs()}
    if q.dtype in FP8:
        given["o_data_type"] = torch.bfloat16

    def load(batch: Batch, paged: Paged) -> None:
        for room, x in ((q, batch.q), (cache, paged.cache)):
            room.view(torch.uint8)[: len(x)] = x.view(torch.uint8)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, **given)
        planned(wrapper)

    load(batches[0], pages[0])
    graph, (out, lse) = captured(lambda: wrapper.run(q, cache, return_lse=True), first=lambda: wrapper.run(q, cache))
    for batch, paged in zip(batches, pages):
        load(batch, paged)
        garbage = [torch.randint(1 << 30, (1 << 18,), device=device) for _ in range(8)]  # where a temporary was freed
        graph.replay()
        check((out[: len(batch.q)], lse[: len(batch.q)]), batch, options)
        del garbage
