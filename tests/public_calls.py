"""Every public function that computes attention or merges states, as a function of tensors only.

Wrappers are planned before. Tests use these calls for what all functions have in common: tracing, gradients, writing to
``out`` and ``lse``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from problems import make_batch

import cutlass_kernels as ck

HEADS, HEAD_DIM, PAGE = (4, 2), 64, 16
QO_LENS, KV_LENS = [5, 3], [20, 33]


@dataclass
class PublicCall:
    """``run(*tensors)`` returns a tensor or a tuple. ``places()`` creates tensors for ``out=`` and ``lse=``."""

    run: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    places: Callable[[], dict[str, torch.Tensor]] = dict
    attends: bool = True  # False: merges states

    def __call__(self, **places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return several(self.run(*self.tensors, **places))


def several(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def public_call(name: str, target: Any) -> PublicCall:
    return _CALLS[name](target)


def _empty(target: Any, rows: int, *, lse: bool = True, heads_first: bool = False) -> dict[str, torch.Tensor]:
    out = torch.zeros(rows, HEADS[0], HEAD_DIM, dtype=torch.float16, device=target.device)
    shape = (HEADS[0], rows) if heads_first else (rows, HEADS[0])
    return {"out": out} | ({"lse": torch.zeros(shape, device=target.device)} if lse else {})


def _single_prefill(target: Any) -> PublicCall:
    batch = make_batch([5], [20], *HEADS, HEAD_DIM, device=target.device)

    def run(q, k, v, **places):
        options = dict(causal=True, pos_encoding_mode="ALIBI", backend=target.backend)
        return ck.single_prefill_with_kv_cache_return_lse(q, k, v, **options, **places)

    return PublicCall(run, (batch.q, batch.k, batch.v), lambda: _empty(target, 5))


def _single_decode(target: Any) -> PublicCall:
    batch = make_batch([1], [40], *HEADS, HEAD_DIM, device=target.device)

    def run(q, k, v, **places):
        options = dict(pos_encoding_mode="ALIBI", q_scale=0.5, k_scale=2.0, return_lse=True, backend=target.backend)
        return ck.single_decode_with_kv_cache(q, k, v, **options, **places)

    return PublicCall(run, (batch.q[0], batch.k, batch.v), lambda: {x: y[0] for x, y in _empty(target, 1).items()})


def _ragged(target: Any, forward: bool = False) -> PublicCall:
    batch = make_batch(QO_LENS, KV_LENS, *HEADS, HEAD_DIM, device=target.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True, pos_encoding_mode="ALIBI")

    def run(q, k, v, **places):
        if forward:
            return wrapper.forward(q, k, v, logits_soft_cap=2.0, return_lse=True, lse_layout="HN", **places)
        return wrapper.run(q, k, v, return_lse=True, **places)

    return PublicCall(run, (batch.q, batch.k, batch.v), lambda: _empty(target, sum(QO_LENS), heads_first=forward))


def _paged(target: Any, form: str = "stacked") -> PublicCall:
    batch = make_batch(QO_LENS, KV_LENS, *HEADS, HEAD_DIM, device=target.device)
    paged = batch.paged(PAGE, form=form, unused="zero")
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, PAGE, causal=True)

    def run(q, *cache, **places):
        return wrapper.run(q, cache[0] if len(cache) == 1 else cache, return_lse=True, **places)

    caches = paged.cache if form == "tuple" else (paged.cache,)
    return PublicCall(run, (batch.q, *caches), lambda: _empty(target, sum(QO_LENS)))


def _decode(target: Any) -> PublicCall:
    batch = make_batch([1, 1], KV_LENS, *HEADS, HEAD_DIM, device=target.device)
    paged = batch.paged(PAGE, unused="zero")
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(*paged.table(), *batch.heads, PAGE, pos_encoding_mode="ALIBI")

    def run(q, cache, **places):
        return wrapper.run(q, cache, return_lse=True, **places)

    return PublicCall(run, (batch.q, paged.cache), lambda: _empty(target, 2))


def _cascade(target: Any) -> PublicCall:
    batch = make_batch([1, 1], KV_LENS, *HEADS, HEAD_DIM, device=target.device)
    paged = batch.paged(PAGE, unused="zero")
    ints = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)  # noqa: E731
    wrapper = ck.MultiLevelCascadeAttentionWrapper(2, target.workspace())
    levels = zip((ints(0, 2), ints(0, 1), ints(0), ints(PAGE)), (ints(0, 1, 2), *paged.table()))
    wrapper.plan(*map(list, levels), *batch.heads, PAGE)

    def run(q, cache, **places):
        return wrapper.run(q, cache, return_lse=True, **places)

    return PublicCall(run, (batch.q, paged.cache), lambda: _empty(target, 2, lse=False))


def _shared_prefix(target: Any, prefill: bool = False) -> PublicCall:
    batch = make_batch(QO_LENS if prefill else [1, 1], KV_LENS, *HEADS, HEAD_DIM, device=target.device)
    paged = batch.paged(PAGE, unused="zero")
    if prefill:
        wrapper: Any = ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(target.workspace())
        wrapper.begin_forward(batch.qo_indptr(), *paged.table(), *batch.heads, PAGE)
    else:
        wrapper = ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(target.workspace())
        wrapper.begin_forward(*paged.table(), *batch.heads, PAGE)
    tensors = (batch.q, batch.k, batch.v, paged.cache)
    wrapper.forward(*tensors)  # which plans, where the page size and the dtypes are those of the tensors
    return PublicCall(wrapper.forward, tensors)


def _padded(target: Any) -> PublicCall:
    batch = make_batch([1, 1], [20, 20], *HEADS, HEAD_DIM, device=target.device)
    own = (x.unflatten(0, (2, 20)) for x in (batch.k, batch.v))
    tensors = (batch.q, batch.k, batch.v, *own)
    return PublicCall(ck.batch_decode_with_shared_prefix_padded_kv_cache, tensors)


def _fused(target: Any, paged: bool = False) -> PublicCall:
    batch = make_batch(QO_LENS, KV_LENS, *HEADS, HEAD_DIM, device=target.device)
    offsets = (batch.qo_indptr(target.device), batch.kv_indptr(target.device))
    unread = torch.zeros(16, dtype=torch.uint8, device=target.device)
    pages = batch.paged(PAGE, "HND", unused="zero")
    table = torch.zeros(2, 3, dtype=torch.int32)
    for row, begin, end in zip(table, pages.indptr[:-1].tolist(), pages.indptr[1:].tolist()):
        row[: end - begin] = pages.indices[begin:end]

    def run(q, kv, cum_q, cum_kv, *tables, **places):
        layout = "Q_PAGED_KV_HND" if paged else "CONTIGUOUS_Q_KV"
        sizes = (max(QO_LENS), max(KV_LENS), HEAD_DIM**-0.5, 1.0, 2)
        options = dict(save_softmax_stats=not paged, pos_encoding_mode="alibi")
        lengths = cum_kv[1:] - cum_kv[:-1]
        return ck.trtllm_fmha_v2_prefill(
            (q, kv), layout, unread, lengths, *sizes, cum_q, cum_kv, *tables, **options, **places
        )

    own = (pages.cache, *offsets, table.to(target.device))
    tensors = (batch.q, *own) if paged else (batch.q, torch.stack([batch.k, batch.v], 1), *offsets)
    return PublicCall(run, tensors, lambda: _empty(target, sum(QO_LENS), lse=False))


def _states(target: Any, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*shape, HEADS[0])
    generator = torch.Generator().manual_seed(len(shape))
    v, s = torch.randn(*shape, HEAD_DIM, generator=generator), torch.randn(shape, generator=generator)
    return v.to(target.device), s.to(target.device)


def _merge_state(target: Any) -> PublicCall:
    return PublicCall(ck.merge_state, (*_states(target, 7), *_states(target, 7)), attends=False)


def _merge_states(target: Any) -> PublicCall:
    return PublicCall(ck.merge_states, _states(target, 7, 3), attends=False)


def _merge_in_place(target: Any) -> PublicCall:
    def run(v, s, *other):
        v, s = v.clone(), s.clone()
        ck.merge_state_in_place(v, s, *other)
        return v, s

    return PublicCall(run, (*_states(target, 7), *_states(target, 7)), attends=False)


def _blocks(target: Any) -> PublicCall:
    batch = make_batch([5], [20], *HEADS, HEAD_DIM, device=target.device)
    wrapper = ck.BlockSparseAttentionWrapper(target.workspace(), backend=target.backend)
    lists = (torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]))
    wrapper.plan(*lists, 5, 20, 3, 10, *batch.heads)

    def run(q, k, v, **places):
        return wrapper.run(q, k, v, return_lse=True, **places)

    return PublicCall(run, (batch.q, batch.k, batch.v), lambda: _empty(target, 5))


_CALLS: dict[str, Callable[[Any], PublicCall]] = {
    "single_prefill": _single_prefill,
    "single_decode": _single_decode,
    "ragged": _ragged,
    "ragged forward": lambda target: _ragged(target, forward=True),
    "paged": _paged,
    "paged tuple": lambda target: _paged(target, "tuple"),
    "decode": _decode,
    "cascade": _cascade,
    "shared prefix decode": _shared_prefix,
    "shared prefix prefill": lambda target: _shared_prefix(target, prefill=True),
    "shared prefix padded": _padded,
    "blocks": _blocks,
    "fused": _fused,
    "fused paged": lambda target: _fused(target, paged=True),
    "merge_state": _merge_state,
    "merge_states": _merge_states,
    "merge_state_in_place": _merge_in_place,
}
NAMES = list(_CALLS)
ATTENTION = [name for name in NAMES if not name.startswith("merge")]
