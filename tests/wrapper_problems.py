"""A batch beside the wrapper that serves it: planned, run and compared with the oracle in one way for all kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import oracle
import torch
from compare import assert_close, assert_lse_close
from problems import FP8, Batch, Expected, Options, expect, make_batch

import cutlass_kernels as ck

KINDS = ["single", "ragged", "paged"]
CLASSES = {
    "ragged": ck.BatchPrefillWithRaggedKVCacheWrapper,
    "paged": ck.BatchPrefillWithPagedKVCacheWrapper,
    "decode": ck.BatchDecodeWithPagedKVCacheWrapper,
}


def flat(masks: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([m.reshape(-1) for m in masks])


def packed_per_request(masks: list[torch.Tensor]) -> torch.Tensor:
    """Little-endian bits, every request on a byte boundary."""
    return torch.cat([oracle.pack_bits(m, "little") for m in masks]).to(masks[0].device)


def batch_for(
    kind: str,
    target: Any,
    qo_lens: Sequence[int] = (33, 1, 9),
    kv_lens: Sequence[int] = (70, 40, 9),
    heads: tuple[int, ...] = (4, 2, 64),
    q_len: int = 1,
    **options: Any,
) -> Batch:
    """Of a single call the first request alone; of decode steps ``q_len`` rows each."""
    if kind == "single":
        qo_lens, kv_lens = qo_lens[:1], kv_lens[:1]
    rows = [q_len] * len(kv_lens) if kind == "decode" else qo_lens
    return make_batch(rows, kv_lens, *heads, device=target.device, **options)


def rows_of_each(batch: Batch) -> int:
    """Of a batch of decode steps."""
    return batch.qo_lens[0] if batch.qo_lens else 1


class Wrapped:
    """A wrapper of the kind, with the tensors of the batch: two small requests unless one is given.

    A "single" call has no wrapper: plan() keeps its options for run(). Masks, sinks and scales of the options are given
    to plan() and run().
    """

    def __init__(
        self,
        target: Any,
        kind: str,
        batch: Batch | None = None,
        page_size: int = 16,
        kv_layout: str = "NHD",
        form: str = "stacked",
        *,
        wrapper: Any = None,
        workspace: torch.Tensor | None = None,
        backend: str | None = None,
        **constructor: Any,
    ) -> None:
        self.target, self.kind, self.kv_layout = target, kind, kv_layout
        self.backend = backend or target.backend
        self.batch = batch_for(kind, target, (5, 9), (20, 9)) if batch is None else batch
        self.options, self.given = Options(), dict[str, Any]()
        self.wrapper = wrapper
        if kind != "single" and wrapper is None:
            workspace = target.workspace() if workspace is None else workspace
            self.wrapper = CLASSES[kind](workspace, kv_layout, backend=self.backend, **constructor)
        self.pages: Any = None
        if kind in ("paged", "decode"):
            self.pages = self.batch.paged(page_size, kv_layout, form)
            self.kv: tuple[Any, ...] = (self.pages.cache,)
        else:
            kv = (self.batch.k, self.batch.v)
            self.kv = tuple(x.transpose(0, 1).contiguous() for x in kv) if kv_layout == "HND" else kv

    def vectors(self, where: str = "cpu") -> tuple[torch.Tensor, ...]:
        """The index vectors, as plan() takes them."""
        if self.kind == "ragged":
            return self.batch.qo_indptr(where), self.batch.kv_indptr(where)
        table = self.pages.table(where)
        return table if self.kind == "decode" else (self.batch.qo_indptr(where), *table)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What plan() takes behind the vectors."""
        return self.batch.heads if self.pages is None else (*self.batch.heads, self.pages.page_size)

    def plan(self, options: Options | None = None, where: str = "cpu", method: str = "plan", **given: Any) -> Wrapped:
        self.options = options or Options()
        of_options = self.options.plan_kwargs()
        if self.options.custom_masks is not None and "packed_custom_mask" not in given:
            of_options["custom_mask"] = flat(self.options.custom_masks)
        self.given = of_options | given
        if self.kind != "single":
            types: dict[str, Any] = dict(q_data_type=self.batch.q.dtype, kv_data_type=self.batch.k.dtype)
            if self.kind == "decode":
                types["q_len_per_req"] = rows_of_each(self.batch)
            elif self.batch.v.size(2) != self.batch.q.size(2):
                types["head_dim_vo"] = self.batch.v.size(2)
            getattr(self.wrapper, method)(*self.vectors(where), *self.sizes, **types | self.given)
        return self

    def run(self, **given: Any) -> Any:
        """With the options of the plan that are those of a run."""
        scales = {name: getattr(self.options, name) for name in ("q_scale", "k_scale", "v_scale")}
        of_options: dict[str, Any] = {name: x for name, x in scales.items() if x != 1.0}
        if self.options.sinks is not None:
            of_options["sinks"] = self.options.sinks
        given = of_options | given
        if self.kind == "single":
            given = dict(kv_layout=self.kv_layout, backend=self.backend) | self.given | given
            return ck.single_prefill_with_kv_cache(self.batch.q, *self.kv, **given)
        return self.wrapper.run(self.batch.q, *self.kv, **given)

    def expect(self, options: Options | None = None) -> Expected:
        """What the oracle gives. Decode: several rows see no later ones, and a single row counts as row 0."""
        options = options or self.options
        if self.kind != "decode":
            return expect(self.batch, options)
        several = rows_of_each(self.batch) > 1
        return expect(self.batch, replace(options, causal=several), decode=not several)

    def check(self, got: Any = None, options: Options | None = None, **tolerance: Any) -> None:
        """``got``, or else a run, has the output, and the LSE if it is a pair, that the oracle gives."""
        got = self.run(return_lse=True) if got is None else got
        out, *lse = got if isinstance(got, (tuple, list)) else (got,)
        want, of_lse = self.expect(options), {}
        if self.batch.k.dtype in FP8:
            tolerance, of_lse = dict(atol=1e-2, rtol=1e-2) | tolerance, dict(atol=5e-3)
        else:
            tolerance["baseline"] = want.baseline
        assert_close(out, want.out, **dict(dtype=self.batch.q.dtype) | tolerance)
        for x in lse:
            assert_lse_close(x, want.lse, **of_lse)

    def first(self, count: int) -> Wrapped:
        """The first requests alone, in the same tensors, with a wrapper of their own."""
        rows, keys = sum(self.batch.qo_lens[:count]), sum(self.batch.kv_lens[:count])
        b, other_lens = self.batch, (self.batch.qo_lens[:count], self.batch.kv_lens[:count])
        other = Wrapped(self.target, self.kind, Batch(*other_lens, b.q[:rows], b.k[:keys], b.v[:keys]))
        if self.pages is not None:
            table = dict(indptr=self.pages.indptr[: count + 1], last_page_len=self.pages.last_page_len[:count])
            indices = self.pages.indices[: int(table["indptr"][-1])]
            other.pages, other.kv = replace(self.pages, **table, indices=indices), self.kv
        return other


def run(
    target: Any, kind: str, batch: Batch, options: Options, run_kwargs: dict[str, Any] | None = None, **plan: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE, in pages of 8 where there are any."""
    return Wrapped(target, kind, batch, 8).plan(options, **plan).run(return_lse=True, **(run_kwargs or {}))


def check(target: Any, kind: str, batch: Batch, options: Options, **plan: Any) -> None:
    run_kwargs = plan.pop("run_kwargs", {})
    wrapped = Wrapped(target, kind, batch, 8).plan(options, **plan)
    wrapped.check(wrapped.run(return_lse=True, **run_kwargs))
