"""FlashAttention's functions: see ``flash_attn``."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from .._attend.checked_calls import LN2
from .._attend.plan_free import attend, check
from .._compute.merging import merge_states
from .._core import call_table, checks, hints, signatures
from .._core.autograd import forward_only, wants_grad
from .._core.fronts import front
from .._core.signatures import typed_as
from .._core.tracing import is_traced
from .flash_cache import Pair, Window, cache_of, of_shard, refuse_training, tensors, window_of, with_values

Scale = float | torch.Tensor | None
Tensor = torch.Tensor | None
Packed = tuple[Any, ...]  # of the fields of call_table.Call


_NAMES = {"sm_scale": "softmax_scale", "logits_soft_cap": "softcap", "chunk_size": "attention_chunk", "sinks": "s_aux"}
_LSE = {"lse_base": math.e, "lse_heads_first": True}


class Arguments:
    """FlashAttention's arguments, and keywords of vLLM's fork, of SGLang and of FlashAttention-2."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qkv: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    softmax_scale: float | None = None
    causal: bool = False
    qv: torch.Tensor | None = None
    q_v: torch.Tensor | None = None
    q_descale: Scale = None
    k_descale: Scale = None
    v_descale: Scale = None
    window_size: Window = (-1, -1)
    attention_chunk: int = 0
    softcap: float = 0.0
    num_splits: int = 1
    num_heads_q: int | None = None
    pack_gqa: bool | None = None
    deterministic: bool = False
    sm_margin: int = 0
    return_attn_probs: bool = False
    return_softmax_lse: bool = False
    block_table: torch.Tensor | None = None
    out: torch.Tensor | None = None
    s_aux: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    scheduler_metadata: torch.Tensor | None = None
    fa_version: int | None = None
    ver: int | None = None
    cp_world_size: int = 1
    cp_rank: int = 0
    cp_tot_seqused_k: torch.Tensor | None = None


class CacheArguments:
    """Those of ``flash_attn_with_kvcache`` alone, or that differ there."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    rotary_cos: torch.Tensor | None = None
    rotary_sin: torch.Tensor | None = None
    rotary_seqlens: torch.Tensor | None = None
    rotary_interleaved: bool = True
    cache_seqlens: int | torch.Tensor | None = None
    cache_batch_idx: torch.Tensor | None = None
    cache_leftpad: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    num_splits: int = 0
    gqa_parallel: bool | None = None
    max_seqlen_k_hint: int | None = None
    descale_q: Scale = None
    descale_k: Scale = None
    descale_v: Scale = None


def _wants_lse(return_attn_probs: bool, return_softmax_lse: bool) -> bool:
    return checks.flag("return_attn_probs", return_attn_probs) | checks.flag("return_softmax_lse", return_softmax_lse)


def _begins_of_keys(cu_seqlens_k: Tensor, block_table: Tensor, seqused_k: Tensor) -> Tensor:
    return cu_seqlens_k if block_table is None or seqused_k is None else None


_FIELDS: dict[str, Any] = {
    **_NAMES,
    "window": (window_of, "window_size"),
    "page_table": "page_table/block_table",
    "sinks": "s_aux/sinks",
    "return_lse": (functools.partial(checks.flag, "return_attn_probs"), "return_attn_probs"),
}
_OF_VARLEN = {
    **_FIELDS,
    "cu_seqlens_k": (_begins_of_keys, "cu_seqlens_k", "block_table", "seqused_k"),
    "return_lse": (_wants_lse, "return_attn_probs", "return_softmax_lse"),
}
_OF_CACHE = {
    **_FIELDS,
    "k": "k_cache",
    "v": "v_cache",
    "seqused_k": "cache_seqlens",
    "q_descale": "q_descale/descale_q",
    "k_descale": "k_descale/descale_k",
    "v_descale": "v_descale/descale_v",
    "return_lse": (functools.partial(checks.flag, "return_softmax_lse"), "return_softmax_lse"),
}


@typed_as(signatures.flash_attn_func)
@front(
    Arguments,
    "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits "
    "pack_gqa deterministic sm_margin return_attn_probs * dropout_p alibi_slopes out",
    _FIELDS,
    constants=_LSE,
)
def flash_attn_func(
    call: Packed, q: torch.Tensor, qv: Tensor, softmax_scale: float | None, dropout_p: float
) -> torch.Tensor | Pair:
    """Attention of a batch of equal lengths.

    Args:
        q: ``[B, n, Hq, D]``; float16, bfloat16 or float8_e4m3fn.
        k, v: ``[B, S, Hkv, D]``; v may have another head dimension.
        softmax_scale: default ``1 / sqrt(D)``, with ``qv`` ``1 / sqrt(D + Dv)``.
        causal: aligned to the last key: row i sees keys up to ``i + S - n``.
        qv: ``[B, n, Hq, Dv]``, adds ``qv . v`` to the logits. With one key head of 64 columns and values of 512 this
            is latent attention (MLA). Else q and qv are joined, as k and v, and PyTorch computes ``D + Dv > 512``.
        q_descale, k_descale, v_descale: fp32 ``[B, Hkv]``, dequantization factors.
        window_size: ``(left, right)``, -1 is no limit.
        attention_chunk: rows see the keys of their chunk of so many; 0 is none.
        softcap: c > 0 replaces a logit s by ``c tanh(s / c)``.
        num_splits: KV splits of short queries. 1 is none; 0 lets the library choose, best for few rows over many keys.
        return_attn_probs: whether to return the LSE too.
        dropout_p: must be 0.
        alibi_slopes: fp32 ``[Hq]``, adds ``slope * (j - i)``.
        out: where to write the output.

    Returns:
        The output ``[B, n, Hq, Dv]``, or the pair of it and the natural LSE, fp32 ``[B, Hq, n]``. Of fp8 inputs the
        output is bfloat16.

    Raises:
        ValueError, RuntimeError: as ``cutlass_kernels.attention``; arguments that mean training.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 16, 8, 64, dtype=torch.float16)
        >>> flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    refuse_training(dropout_p, softmax_scale)
    if qv is not None:
        call = with_values(call, qv)
    return _of_batch(attend(call, _NAMES), q)


@typed_as(signatures.flash_attn_qkvpacked_func)
@front(
    Arguments,
    "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk softcap deterministic "
    "num_heads_q sm_margin return_attn_probs * dropout_p alibi_slopes",
    {"q": "qkv", "k": "qkv", "v": "qkv", **_FIELDS},
    constants=_LSE | {"num_splits": 1},
)
def flash_attn_qkvpacked_func(
    call: Packed, qkv: torch.Tensor, num_heads_q: int | None, softmax_scale: float | None, dropout_p: float
) -> torch.Tensor | Pair:
    """``flash_attn_func`` of ``qkv`` ``[B, n, 3, H, D]``, or with ``num_heads_q`` ``[B, n, Hq + 2 Hkv, D]``.

    Nothing is copied: kernels read q, k and v where they are.

    Examples:
        >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 8, 64, dtype=torch.float16)).shape
        torch.Size([2, 16, 8, 64])
    """
    if num_heads_q is None:
        checks.tensor("qkv", qkv, 5)
        if qkv.size(2) != 3:
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}: it must be [B, n, 3, H, D]: q, k and v.")
        q, k, v = qkv.unbind(2)
    else:
        checks.tensor("qkv", qkv, 4)
        num_heads_q = checks.integer("num_heads_q", num_heads_q)
        num_heads_k = (qkv.size(2) - num_heads_q) // 2
        if num_heads_q < 1 or num_heads_k < 1 or num_heads_q + 2 * num_heads_k != qkv.size(2):
            raise ValueError(
                f"num_heads_q={num_heads_q} leaves {qkv.size(2) - num_heads_q} of the {qkv.size(2)} heads of qkv "
                f"{tuple(qkv.shape)}: they must be as many for keys as for values, qkv [B, n, Hq + 2 Hkv, D]."
            )
        q, k, v = qkv.split([num_heads_q, num_heads_k, num_heads_k], 2)
    refuse_training(dropout_p, softmax_scale)
    return _of_batch(attend((q, k, v, *call[3:]), _NAMES), q)


@typed_as(signatures.flash_attn_varlen_func)
@front(
    Arguments,
    "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale causal qv q_descale "
    "k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin "
    "return_attn_probs * block_table return_softmax_lse out s_aux alibi_slopes dropout_p scheduler_metadata fa_version "
    "q_v cp_world_size cp_rank cp_tot_seqused_k sinks ver",
    _OF_VARLEN,
    {"shard": "cp_world_size cp_rank cp_tot_seqused_k"},
    constants=_LSE,
)
def flash_attn_varlen_func(
    call: Packed, seqused_q: Tensor, qv: Tensor, q_v: Tensor, softmax_scale: float | None, dropout_p: float, shard: Any
) -> torch.Tensor | Pair:
    """Attention of a batch of any lengths, over ragged keys or a paged cache.

    Args:
        q: ``[rows, Hq, D]``, the requests one after the other.
        k, v: ``[tokens, Hkv, D]``; with ``block_table`` caches ``[pages, P, Hkv, D]`` of any page size.
        cu_seqlens_q, cu_seqlens_k: int32 ``[B + 1]``, offsets of the requests. With a ``block_table``, ``seqused_k`` or
            ``cu_seqlens_k`` tells the lengths.
        max_seqlen_q, max_seqlen_k: bounds of the lengths.
        seqused_q, seqused_k: int32 ``[B]``, how many rows and keys of each request are used.
        block_table: int32 ``[B, M]``, the pages of each request.
        return_softmax_lse, return_attn_probs: whether to return the LSE too.
        s_aux, sinks: ``[Hq]``, attention sinks: adds ``exp(s)`` to the denominator.
        ver: FlashAttention's version, as SGLang passes it: no effect.
        cp_world_size, cp_rank: where keys are spread over ranks, one by one: key g of a request is rank
            ``g % cp_world_size``'s. The result is that over the keys of this rank.
        cp_tot_seqused_k: int32 ``[B]``, the keys of each request on all ranks together, of which masks speak.
            ``seqused_k`` follows from it.

    The other arguments, and what is raised, are those of ``flash_attn_func``.

    Returns:
        The output ``[rows, Hq, Dv]``, or the pair of it and the natural LSE, fp32 ``[Hq, rows]``.

    Examples:
        >>> q, k, v = torch.randn(3, 10, 8, 64, dtype=torch.float16)
        >>> offsets = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, offsets, offsets, 6, 6, causal=True).shape
        torch.Size([10, 8, 64])
    """
    refuse_training(dropout_p, softmax_scale)
    if isinstance(seqused_q, float):
        raise TypeError(
            f"seqused_q={seqused_q} is float, not a tensor. The argument in this place is seqused_q, as in "
            "FlashAttention-3, where FlashAttention-2 has dropout_p: leave it out, or pass it by keyword."
        )
    if shard[0] != 1:
        call = of_shard(call, *shard)
    qv = q_v if qv is None else qv
    if qv is not None:
        call = with_values(call, qv)
    return attend(call, _NAMES)


@typed_as(signatures.flash_attn_with_kvcache)
@front(
    [CacheArguments, Arguments],
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
    "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal "
    "window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse * block_table s_aux alibi_slopes out gqa_parallel max_seqlen_k_hint descale_q descale_k "
    "descale_v sinks ver",
    _OF_CACHE,
    {
        "places": "cache_seqlens cache_batch_idx cache_leftpad",
        "new": "k v cu_seqlens_k_new",
        "rotary": "rotary_cos rotary_sin rotary_seqlens rotary_interleaved",
    },
    constants=_LSE,
)
def flash_attn_with_kvcache(
    call: Packed, q: torch.Tensor, qv: Tensor, places: Any, new: Any, rotary: Any
) -> torch.Tensor | Pair:
    """Attention over a cache, to which new keys and values can be appended first.

    Without ``k`` this is one kernel, and a second one where keys are split. Appending and rotating take kernels of
    their own before it.

    Args:
        q: ``[B, n, Hq, D]``, or with ``cu_seqlens_q`` (and ``max_seqlen_q``) ``[rows, Hq, D]``.
        k_cache, v_cache: ``[B_cache, S, Hkv, D]``, or with ``page_table`` (or ``block_table``) ``[pages, P, Hkv, D]``.
        k, v: new keys and values ``[B, n_new, Hkv, D]``, or with ``cu_seqlens_k_new`` ``[tokens, Hkv, D]``: written to
            the cache from position ``cache_seqlens`` on, and then seen by q.
        qv: see ``flash_attn_func``.
        rotary_cos, rotary_sin: ``[positions, rotary_dim / 2]``: k is rotated at its positions, q at ``cache_seqlens +
            i`` under a causal mask or a window, else at ``cache_seqlens``. ``rotary_interleaved`` pairs neighbours,
            else halves. ``rotary_seqlens`` replaces ``cache_seqlens`` there.
        cache_seqlens: int32 ``[B]`` or a number: keys of each request in the cache, without the new ones.
        cache_batch_idx: int32 ``[B]``: which entry of the cache (or row of the page table) is a request's.
        cache_leftpad: int32 ``[B]``: the first keys of the cache that are not the request's.
        page_table: int32 ``[B, M]``.
        return_softmax_lse: whether to return the LSE too.
        descale_q, descale_k, descale_v, gqa_parallel, max_seqlen_k_hint: older names; the last two have no effect.
        sinks, ver: SGLang's names: ``s_aux``, and the version, which has no effect.

    The other arguments, and what is raised, are those of ``flash_attn_func``. Here ``num_splits`` is 0 unless said, as
    in FlashAttention-3.

    Returns:
        The output, shaped as q; or the pair of it and the natural LSE, fp32 ``[B, Hq, n]`` (or ``[Hq, rows]``).

    Examples:
        >>> q = torch.randn(2, 1, 8, 64, dtype=torch.float16)
        >>> k_cache, v_cache = torch.randn(2, 2, 128, 2, 64, dtype=torch.float16)
        >>> lens = torch.tensor([100, 7], dtype=torch.int32)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lens, causal=True).shape
        torch.Size([2, 1, 8, 64])
    """
    cache_seqlens, batch_idx, leftpad = places
    plain = new[0] is None and batch_idx is None and leftpad is None and rotary[0] is None
    if not (plain and isinstance(cache_seqlens, torch.Tensor)):
        return _attend_to_cache(call_table.Call._make(call), qv, places, new, rotary)
    if qv is not None:
        call = with_values(call, qv)
    return _of_batch(attend(call, _NAMES), q)


def _attend_to_cache(call: call_table.Call, qv: Tensor, places: Any, new: Any, rotary: Any) -> torch.Tensor | Pair:
    """A call that appends to the cache, or reads it otherwise than ``attention()`` does."""
    trained = None
    if new[0] is not None and wants_grad(*new[:2]) and not is_traced():
        # The cache carries no gradients, so the result has to.
        trained = new[:2]
        new = [None if x is None else x.detach() for x in trained] + [new[2]]
    is_local = checks.flag("causal", call.causal) or max(call.window) >= 0
    places = (*places, call.page_table)
    q, finds, append = cache_of(call.q, call.k, call.v, places, new, rotary, call.cu_seqlens_q, is_local)

    def found() -> Packed:
        k, v, begins, lens, page_table = finds()
        ready = call._replace(q=q, k=k, v=v, cu_seqlens_k=begins, seqused_k=lens, page_table=page_table)
        return ready if qv is None else with_values(ready, qv)

    ready = found()
    if append is not None:
        check(ready, _NAMES)
        append()
        if places[2] is not None or qv is not None:  # the keys may be copies, made before
            ready = found()
    result = _of_batch(attend(ready, _NAMES), q)
    return result if trained is None else forward_only(result, (call.out,), *trained)


def _of_batch(result: Any, q: torch.Tensor) -> Any:
    """An LSE ``[Hq, B * n]`` as ``[B, Hq, n]``."""
    if q.dim() != 4 or not isinstance(result, tuple):
        return result
    out, lse = result
    return out, lse.view(lse.size(0), q.size(0), q.size(1)).transpose(0, 1)


# --- functions that compute no attention -------------------------------------------------------------------------


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Pair:
    """Merges partial results over disjoint keys.

    Args:
        out_partial: ``[splits, B, n, H, D]`` or ``[splits, rows, H, D]``, float32.
        lse_partial: their natural LSEs, fp32, the same shape without D.
        out: where to write the output.
        out_dtype: dtype of the output; default that of ``out``, or float32.

    Returns:
        The output ``[B, n, H, D]`` (or ``[rows, H, D]``) and its natural LSE, fp32, the same shape without D. Where all
        partial LSEs are -inf they are 0 and -inf.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.

    Examples:
        >>> out, lse = flash_attn_combine(torch.randn(3, 2, 5, 8, 64), torch.randn(3, 2, 5, 8))
        >>> out.shape, lse.shape
        (torch.Size([2, 5, 8, 64]), torch.Size([2, 5, 8]))
    """
    hints.tensors(out_partial=out_partial, lse_partial=lse_partial)
    tensors(out=out)
    if out_partial.dim() not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}: they must "
            "be [splits, B, n, H, D] and the same without D."
        )
    if out_dtype is not None:
        out_dtype = checks.dtype(out_dtype)
    if out is not None:
        out = checks.output(out, out_partial.shape[1:], out_dtype or out.dtype, out_partial.device)
    states = out_partial.movedim(0, -3).flatten(0, -4)  # [tokens, splits, H, D]
    merged, lse = merge_states(states, (lse_partial.movedim(0, -2).flatten(0, -3) / LN2).contiguous())
    merged, lse = merged.view(out_partial.shape[1:]), lse.view(lse_partial.shape[1:]) * LN2
    if out is not None:
        out.copy_(merged)
        return out, lse
    return merged if out_dtype is None else merged.to(out_dtype), lse


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """What FlashAttention-3 computes beforehand for ``scheduler_metadata``: kernels here find their work themselves, so
    this is an int32 tensor ``[1]`` that nobody reads. The arguments are FlashAttention-3's, in its order; only the
    device of ``cache_seqlens`` counts.

    Examples:
        >>> get_scheduler_metadata(2, 1, 128, 8, 2, 64, torch.tensor([100, 7], dtype=torch.int32))
        tensor([0], dtype=torch.int32)
    """
    hints.tensors(cache_seqlens=cache_seqlens)
    return torch.zeros(1, dtype=torch.int32, device=cache_seqlens.device)
