"""Caches as FlashAttention addresses them: entries by batch index, padding on the left, new keys, rotary embedding,
keys that are spread over ranks; and other arguments of its functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .._attend import latent_parts
from .._caches.slots_of_tokens import append_paged_kv_cache_by_slot
from .._core import call_table, checks, hints, index_vectors
from .._core.autograd import without_autocast
from .._core.call_table import Call
from .._core.tracing import is_traced

Window = tuple[int, int] | list[int] | torch.Tensor | None
Pair = tuple[torch.Tensor, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Finds = Callable[[], Found]
Appends = Callable[[], None]

_SM_SCALE = Call._fields.index("sm_scale")
_NOWHERE = -(1 << 40)  # place of a token behind the last request


def refuse_training(dropout_p: float, softmax_scale: Any) -> None:
    """ValueError for arguments that mean training, and for FlashAttention-2's ``dropout_p`` by position."""
    if isinstance(softmax_scale, (int, float)) and softmax_scale == 0:
        raise ValueError(
            f"softmax_scale={softmax_scale} would make all logits equal. The argument in this place is softmax_scale, "
            "as in FlashAttention-3, where FlashAttention-2 has dropout_p: leave it out, or pass both by keyword."
        )
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p} is for training, and this library computes attention forward only: 0.")


def window_of(size: Window) -> tuple[int, int]:
    """Keys to the left and to the right."""
    if type(size) is tuple and len(size) == 2 and type(size[0]) is type(size[1]) is int:
        return size
    return (-1, -1) if size is None else call_table.window(size, "window_size")


def tensors(**given: Any) -> None:
    """TypeError where one of these is neither a tensor nor None."""
    hints.tensors(**{name: x for name, x in given.items() if x is not None})


def of_shard(call: tuple[Any, ...], world: int, rank: int, total: torch.Tensor | None) -> tuple[Any, ...]:
    """The call over the keys of a rank, where those of all are ``total``."""
    if total is None:
        raise ValueError(f"cp_world_size={world} needs cp_tot_seqused_k, the keys of each request on all ranks.")
    given = Call._make(call)
    begins = given.cu_seqlens_k if given.page_table is None else None
    return given._replace(kv_shard=(world, rank, 1), seqused_k=total, cu_seqlens_k=begins)


def with_values(call: tuple[Any, ...], qv: torch.Tensor) -> tuple[Any, ...]:
    """The call with queries and keys whose products are ``q . k + qv . v``.

    In the sizes of latent attention (MLA) the keys are read where they lie. Others are copied behind one another.
    """
    q, k, v = call[:3]
    tensors(q=q, k=k, v=v, qv=qv)
    scale = call[_SM_SCALE]
    ropes: tuple[Any, Any] = (None, None)
    if scale is None:
        scale = (q.size(-1) + qv.size(-1)) ** -0.5
    if k.size(-2) == 1 and (q.size(-1), k.size(-1), qv.size(-1), v.size(-1)) == (64, 64, 512, 512):
        q, k, ropes = qv, v, (q, k)
    else:
        q, k = latent_parts.joined(q, qv), latent_parts.joined(k, v)
    return (q, k, v, *ropes, *call[5:_SM_SCALE], scale, *call[_SM_SCALE + 1 :])


def cache_of(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    places: tuple[Any, ...],
    new: tuple[Any, ...],
    rotary: tuple[Any, ...],
    cu_seqlens_q: torch.Tensor | None,
    is_local: bool,
) -> tuple[torch.Tensor, Finds, Appends | None]:
    """q (rotated), what gives the keys that it sees (keys, values, ``cu_seqlens_k``, ``seqused_k`` and page table), and
    what appends the new ones, which is for when all arguments of the call have been checked.

    ``places``: cache_seqlens, cache_batch_idx, cache_leftpad, page_table. ``new``: k, v, cu_seqlens_k_new, which are
    appended. ``rotary``: cos, sin, rotary_seqlens, interleaved.
    """
    cache_seqlens, batch_idx, leftpad, page_table = places
    k, v, cu_new = new
    tensors(page_table=page_table, k=k, v=v, rotary_cos=rotary[0], rotary_sin=rotary[1], cu_seqlens_q=cu_seqlens_q)
    hints.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    rows, new_rows = (4 if x is None else 3 for x in (cu_seqlens_q, cu_new))
    for name, x, rank in (
        ("q", q, rows),
        ("k_cache", k_cache, 4),
        ("v_cache", v_cache, 4),
        ("k", k, new_rows),
        ("v", v, new_rows),
    ):
        if x is not None and x.dim() != rank:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must have {rank} dimensions.")
    _check_rotary(rotary[0], rotary[1], q.size(-1))
    if (k is None) != (v is None):
        raise ValueError(f"{'v' if v is None else 'k'} is missing: new keys and values are appended together.")
    batch = q.size(0) if cu_seqlens_q is None else cu_seqlens_q.numel() - 1
    batch_idx = _vector("cache_batch_idx", batch_idx, batch)
    leftpad = _vector("cache_leftpad", leftpad, batch)
    if k is not None and cu_new is not None:
        cu_new = index_vectors.indptr("cu_seqlens_k_new", cu_new, batch, from_zero=True, told_by="q")
    if page_table is not None:
        if page_table.dim() != 2 or page_table.dtype not in index_vectors.INTEGERS:
            raise ValueError(
                f"page_table has shape {tuple(page_table.shape)} and dtype {page_table.dtype}: it must be an int32 "
                f"tensor [{batch}, pages of a request]."
            )
        page_table = index_vectors.saturated(page_table)
    size = k_cache.size(1) if page_table is None else k_cache.size(1) * page_table.size(1)  # tokens of a request
    lens = _lens(cache_seqlens, batch, size, k_cache.device)
    entry = None
    if batch_idx is not None:
        holder = k_cache if page_table is None else page_table
        entry = _entries(batch_idx, holder.size(0))
        if page_table is not None:
            page_table = torch.where(entry.unsqueeze(1) < 0, -1, page_table[entry.clamp(min=0).long()])
            entry = None
    append: Appends | None = None
    if k is not None:
        at = _vector("rotary_seqlens", rotary[2], batch)
        rotated_at = lens if at is None else at
        owner, place = _owners(k, cu_new, batch)
        if rotary[0] is not None:
            _check_positions(rotated_at[owner] + place, rotary[0].size(0))
            k = _rotate(k.flatten(0, -3), rotated_at[owner] + place, rotary).view(k.shape)
            q = _rotated_queries(q, rotated_at, rotary, cu_seqlens_q, is_local)
        slots = _slots(k_cache, owner, lens[owner] + place, entry, page_table)
        append = functools.partial(
            append_paged_kv_cache_by_slot, k.flatten(0, -3), v.flatten(0, -3), k_cache, v_cache, slots
        )
        count = k.size(1) if cu_new is None else cu_new[1:] - cu_new[:-1]
        lens = lens + count
    lens = lens.to(torch.int32)
    if leftpad is not None:
        finds = functools.partial(_behind_padding, k_cache, v_cache, leftpad, lens, size, entry, page_table)
        return q, finds, append
    if page_table is not None:
        found: Found = (k_cache, v_cache, None, lens, page_table)
    elif entry is None:
        found = (k_cache[:batch], v_cache[:batch], None, lens, None)
    else:
        found = (k_cache, v_cache, None, lens, entry.to(torch.int32).unsqueeze(1))  # pages of `size` tokens
    return q, lambda: found, append


def _behind_padding(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    leftpad: torch.Tensor,
    lens: torch.Tensor,
    size: int,
    entry: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> Found:
    """The keys of each request without its first ``leftpad``: none where these are more than it has, or it has more
    than ``size``, for which there is no room. On the CPU that raises ValueError."""
    inside = (leftpad >= 0) & (leftpad <= lens) & (lens <= size)
    if entry is not None:
        inside &= entry >= 0
    if not (lens.is_cuda or is_traced() or bool(inside.all())):
        at = int((~inside).nonzero()[0])
        raise ValueError(
            f"request {at} has {int(lens[at])} keys behind cache_leftpad={int(leftpad[at])}, in a cache with room for "
            f"{size} tokens per request: 0 <= cache_leftpad <= cache_seqlens (and new keys) <= {size}."
        )
    lens = torch.where(inside, lens - leftpad.to(torch.int32), 0)
    leftpad = torch.where(inside, leftpad, 0)
    if page_table is not None:
        return _in_pages(k_cache, v_cache, page_table, leftpad, lens)
    batch = lens.numel()
    entry = torch.arange(batch, device=lens.device) if entry is None else entry.clamp(min=0).long()
    begins = torch.zeros(batch + 1, dtype=torch.int32, device=lens.device)
    begins[:batch] = entry * size + leftpad
    keys, values = (x.contiguous().flatten(0, 1) for x in (k_cache, v_cache))
    return keys, values, begins, lens, None


def _lens(value: Any, batch: int, size: int, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return index_vectors.index_vector("cache_seqlens", value, batch).to(device)
    number = size if value is None else checks.integer("cache_seqlens", value)
    return torch.full((batch,), number, dtype=torch.int32, device=device)


def _entries(batch_idx: torch.Tensor, count: int) -> torch.Tensor:
    """``cache_batch_idx``, with -1 in the place of entries that there are not. On the CPU, these raise ValueError."""
    inside = (batch_idx >= 0) & (batch_idx < count)
    if not (batch_idx.is_cuda or is_traced() or bool(inside.all())):
        at = int((~inside).nonzero()[0])
        raise ValueError(f"cache_batch_idx[{at}]={int(batch_idx[at])}, but there are only {count} entries, from 0 on.")
    return torch.where(inside, batch_idx, -1)


def _check_rotary(cos: torch.Tensor | None, sin: torch.Tensor | None, head_dim: int) -> None:
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError(f"rotary_{'cos' if cos is None else 'sin'} is missing: pass both.")
    if cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.size(1) > head_dim:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)} and rotary_sin {tuple(sin.shape)}: both must be "
            f"[positions, rotary_dim / 2], with rotary_dim up to the head dimension {head_dim}."
        )


def _vector(name: str, x: Any, length: int) -> torch.Tensor | None:
    return None if x is None else index_vectors.index_vector(name, x, length)


def _owners(x: torch.Tensor, cu_seqlens: torch.Tensor | None, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The request of every token, and its place there. Behind the last request, a place that no cache has."""
    if cu_seqlens is None:
        rows = torch.arange(batch * x.size(1), device=x.device)
        return rows // x.size(1), rows % x.size(1)
    rows = torch.arange(x.size(0), device=x.device)
    owner = torch.searchsorted(cu_seqlens[1:].long(), rows, right=True)
    inside = owner < batch
    owner = owner.clamp(max=batch - 1)
    return owner, torch.where(inside, rows - cu_seqlens.long()[owner], _NOWHERE)


def _check_positions(positions: torch.Tensor, most: int) -> None:
    """ValueError where positions of new tokens, on the CPU, have no row in the rotary tables. (A CUDA device takes the
    nearest one.)"""
    if positions.is_cuda or is_traced():
        return
    wrong = positions[(positions >= most) | ((positions < 0) & (positions > _NOWHERE // 2))]
    if wrong.numel():
        raise ValueError(
            f"a token has position {int(wrong[0])}, but rotary_cos and rotary_sin have {most} rows: add the missing."
        )


@without_autocast
def _rotate(x: torch.Tensor, positions: torch.Tensor, rotary: tuple[Any, ...]) -> torch.Tensor:
    """``x [tokens, heads, dim]`` with its first ``rotary_dim`` columns rotated."""
    cos, sin, _, interleaved = rotary
    positions = positions.long().clamp(0, cos.size(0) - 1)
    c, s = (t[positions].float().unsqueeze(1) for t in (cos, sin))  # [tokens, 1, rotary_dim / 2]
    dim = 2 * cos.size(-1)
    head, rest = x[..., :dim].float(), x[..., dim:]
    a, b = (head[..., ::2], head[..., 1::2]) if interleaved else head.chunk(2, -1)
    first, second = a * c - b * s, b * c + a * s
    turned = torch.stack([first, second], -1).flatten(-2) if interleaved else torch.cat([first, second], -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _rotated_queries(
    q: torch.Tensor, begins: torch.Tensor, rotary: tuple[Any, ...], cu_seqlens_q: torch.Tensor | None, is_local: bool
) -> torch.Tensor:
    owner, place = _owners(q, cu_seqlens_q, begins.numel())
    positions = begins[owner] + place if is_local else begins[owner]
    _check_positions(positions, rotary[0].size(0))
    return _rotate(q.flatten(0, -3), positions, rotary).view(q.shape)


def _slots(
    k_cache: torch.Tensor,
    owner: torch.Tensor,
    position: torch.Tensor,
    entry: torch.Tensor | None,
    page_table: torch.Tensor | None,
) -> torch.Tensor:
    """Where in the cache new keys and values go. Those behind its end raise ValueError on the CPU, and are dropped on a
    CUDA device."""
    page_size = k_cache.size(1)
    room = page_size * (1 if page_table is None else page_table.size(1))
    inside = (position >= 0) & (position < room)
    if not (position.is_cuda or is_traced()):
        wrong = position[~inside & (position > _NOWHERE // 2)]
        if wrong.numel():
            raise ValueError(
                f"a new key has position {int(wrong[0])} in a cache with room for {room} tokens per request: "
                "cache_seqlens and the new keys must fit into it."
            )
    position = torch.where(inside, position, 0)
    if page_table is not None:
        page = page_table[owner, position // page_size].long()
    else:
        page = owner if entry is None else entry.long()[owner]
    return torch.where(inside, page * page_size + position % page_size, -1)


def _in_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, leftpad: torch.Tensor, lens: torch.Tensor
) -> Found:
    """``lens`` keys behind the first ``leftpad`` of each request, in pages of one token."""
    size = k_cache.size(1)
    token = torch.arange(table.size(1) * size, device=table.device) + leftpad.long().unsqueeze(1)
    page = table.gather(1, (token // size).clamp(max=table.size(1) - 1)).long()
    tokens = (page * size + token % size).to(torch.int32)
    caches = [x.flatten(0, 1).unsqueeze(1) for x in (k_cache, v_cache)]
    return caches[0], caches[1], None, lens, tokens
