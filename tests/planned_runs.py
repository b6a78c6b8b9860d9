"""Batches through the wrappers and single calls of a backend, and whether they give what they must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from captures import capture
from compare import assert_close, assert_lse_close
from problems import FP8, Batch, Options, expect, graph_buffers
from targets import Target
from wrapper_problems import Wrapped


def wrapped(
    backend: str,
    batch: Batch,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    form: str | None = None,
    **more: Any,
) -> Wrapped:
    """The ragged wrapper, or with a size of pages the paged one."""
    form = form or ("stacked" if batch.k.shape == batch.v.shape else "tuple")
    kind = "ragged" if page_size is None else "paged"
    return Wrapped(Target(batch.device, backend), kind, batch, page_size or 16, kv_layout, form, **more)


def attend(
    backend: str,
    batch: Batch,
    options: Options | None = None,
    page_size: int | None = None,
    *,
    kv_layout: str = "NHD",
    form: str | None = None,
    run: dict[str, Any] | None = None,
    **plan: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, by the paged wrapper where there is a size of pages, else by the ragged one."""
    return wrapped(backend, batch, page_size, kv_layout, form).plan(options, **plan).run(return_lse=True, **(run or {}))


def single(
    backend: str, batch: Batch, options: Options | None = None, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE of the only request, by the single call."""
    return Wrapped(Target(batch.device, backend), "single", batch).plan(options, **given).run(return_lse=True)


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
    planned: Callable[[Wrapped], None] = lambda of: None,
) -> None:
    """A run over pages of 8, captured with the plan of the first batch, follows those of all. ``room`` is in pages, and
    ``planned`` looks at the wrapper after each plan."""
    device = batches[0].device
    first = wrapped(backend, batches[0], 8, **graph_buffers(len(batches[0].qo_lens), room, device))
    made = [first, *(wrapped(backend, batch, 8, wrapper=first.wrapper) for batch in batches[1:])]
    longest = (max(tensors, key=len) for tensors in ([x.batch.q for x in made], [x.pages.cache for x in made]))
    q, cache = (torch.zeros_like(x.view(torch.uint8)).view(x.dtype) for x in longest)

    def load(of: Wrapped) -> None:
        for whole, x in ((q, of.batch.q), (cache, of.pages.cache)):
            whole.view(torch.uint8)[: len(x)] = x.view(torch.uint8)
        of.plan(options, **({"o_data_type": torch.bfloat16} if q.dtype in FP8 else {}))
        planned(of)

    load(first)
    first.wrapper.run(q, cache)
    graph, (out, lse) = capture(lambda: first.wrapper.run(q, cache, return_lse=True), warm_up=0)
    for of in made:
        load(of)
        garbage = [torch.randint(1 << 30, (1 << 18,), device=device) for _ in range(8)]  # where a temporary was freed
        graph.replay()
        check((out[: len(of.batch.q)], lse[: len(of.batch.q)]), of.batch, options)
        del garbage
