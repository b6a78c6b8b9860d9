"""Lengths of paged caches, positions of new tokens, and writing these into their pages.

A traced call is an operator of ``_graphs``.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch

from .._compute import kernels
from .._core import autograd, checks, hints, index_vectors, native
from .._core.tracing import have_own_dispatch, is_traced
from .._graphs import operators
from .slots_of_tokens import bits

Pair = tuple[torch.Tensor, torch.Tensor]
_NAME_OF_SIZE = {1: "float8_e4m3fn", 2: "float16", 4: "float32"}  # copies of elements need no more than their size


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of keys every request holds: ``max(pages - 1, 0) * page_size + last_page_len``.

    Args:
        kv_indptr: int32 ``[batch + 1]``; request ``b`` owns ``kv_indptr[b + 1] - kv_indptr[b]`` pages.
        kv_last_page_len: int32 ``[batch]``, filled entries of the last page (0 where a request has no page).
        page_size: tokens a page holds.

    Returns:
        int32 ``[batch]`` on the device of ``kv_indptr``.

    Raises:
        TypeError: ``page_size`` is not an integer.
        ValueError: a tensor is not a vector of integers, the two disagree about the batch size, or ``page_size`` is
            not positive.

    Examples:
        >>> get_seq_lens(torch.tensor([0, 2, 2, 3]), torch.tensor([5, 0, 16]), 16)
        tensor([21,  0, 16], dtype=torch.int32)
    """
    indptr = index_vectors.index_vector("kv_indptr", kv_indptr)
    last = index_vectors.index_vector("kv_last_page_len", kv_last_page_len, max(indptr.numel() - 1, 0)).to(
        indptr.device
    )
    return (indptr[1:] - indptr[:-1] - 1).clamp_(min=0) * checks.page_size(page_size) + last


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Says, for every new token of a ragged batch, which request it belongs to and where it stands there.

    The new tokens are the last ones of their requests: the i-th of ``n`` new tokens stands at ``seq_len - n + i``.

    Args:
        append_indptr: int32 ``[batch + 1]``, offsets of the new tokens.
        seq_lens: int32 ``[batch]``, keys of every request including the new tokens (see ``get_seq_lens``).
        nnz: number of entries to return, at least ``append_indptr[-1]``.
        batch_indices, positions: int32 ``[nnz]`` tensors to write to; allocated where None.

    Returns:
        ``(batch_indices, positions)``, int32 ``[nnz]``. Entries behind ``append_indptr[-1]`` are -1, which
        ``append_paged_kv_cache`` skips.

    Raises:
        ValueError: a tensor has another rank, dtype or length, or ``nnz`` is smaller than a CPU ``append_indptr[-1]``.
        RuntimeError: a CPU ``append_indptr`` decreases.

    Examples:
        >>> get_batch_indices_positions(torch.tensor([0, 2, 3]), torch.tensor([5, 9]), 3)
        (tensor([0, 0, 1], dtype=torch.int32), tensor([3, 4, 8], dtype=torch.int32))
    """
    if is_traced() or have_own_dispatch(append_indptr, seq_lens):
        return _traced_positions(append_indptr, seq_lens, nnz, batch_indices, positions)
    indptr = index_vectors.indptr("append_indptr", append_indptr)
    batch = indptr.numel() - 1
    device = indptr.device
    lens = index_vectors.index_vector("seq_lens", seq_lens, batch).to(device)
    nnz = checks.integer("nnz", nnz)
    if nnz < 0 or (not indptr.is_cuda and nnz < int(indptr[-1])):
        end = "0" if nnz < 0 else f"append_indptr[-1]={int(indptr[-1])}"
        raise ValueError(f"nnz={nnz} is smaller than {end}: no token may be left out.")
    batch_indices = _int32_output("batch_indices", batch_indices, nnz, device)
    positions = _int32_output("positions", positions, nnz, device)
    if kernels.move(indptr):
        _launch_positions(indptr, lens, batch_indices, positions)
        autograd.written(batch_indices, positions)
        return batch_indices, positions
    if batch == 0:
        return batch_indices.fill_(-1), positions.fill_(-1)
    token = torch.arange(nnz, dtype=torch.int32, device=device)
    owner = torch.searchsorted(indptr[1:], token, right=True)
    inside = (owner < batch) & (token >= indptr[0])
    owner.clamp_(max=batch - 1)
    batch_indices.copy_(torch.where(inside, owner, -1))
    positions.copy_(torch.where(inside, lens[owner] - indptr[owner + 1] + token, -1))
    return batch_indices, positions


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Writes new keys and values into the pages of their requests, in place.

    Token ``i`` goes to entry ``positions[i] % page_size`` of page ``positions[i] // page_size`` of request
    ``batch_indices[i]``. The pages must already be in the page table.

    Args:
        append_key: ``[nnz, num_kv_heads, head_dim_qk]``, converted to the dtype of the cache.
        append_value: ``[nnz, num_kv_heads, head_dim_vo]``.
        batch_indices, positions: int32 ``[nnz]`` (see ``get_batch_indices_positions``); tokens with a negative
            batch index or position are skipped.
        paged_kv_cache: ``[pages, 2, page_size, num_kv_heads, head_dim]`` (NHD) or
            ``[pages, 2, num_kv_heads, page_size, head_dim]`` (HND), or a tuple (k_cache, v_cache) without the 2.
        kv_indices: int32, the pages of all requests.
        kv_indptr: int32 ``[batch + 1]``, where the pages of a request begin in ``kv_indices``.
        kv_last_page_len: int32 ``[batch]``; the positions already say all, so only its length is checked.
        kv_layout: ``"NHD"`` or ``"HND"``.

    Index tensors on a CUDA device are not checked, but wherever they point, no write leaves the cache: a token of a
    request that does not exist, of a place behind the pages of its request, or of a page that the cache does not have,
    is skipped there.

    A cache carries no gradient: where keys or values require one, a warning says so.

    Raises:
        KeyError: unknown ``kv_layout``, or ``paged_kv_cache`` is neither a tensor nor a tuple.
        TypeError: keys or values are not tensors.
        ValueError: shapes that do not fit together; on the CPU, page numbers that the cache does not have, requests
            that ``kv_indptr`` does not have, and positions behind the pages of their request.

    Examples:
        >>> batch_indices, positions = get_batch_indices_positions(append_indptr, seq_lens, nnz)
        >>> append_paged_kv_cache(k, v, batch_indices, positions, cache, kv_indices, kv_indptr, kv_last_page_len)
    """
    k_cache, v_cache = checks.paged_cache(paged_kv_cache, kv_layout)
    if is_traced() or have_own_dispatch(append_key, k_cache, positions):
        append_key, append_value = autograd.without_grad(append_key, append_value)
        pair = paged_kv_cache if isinstance(paged_kv_cache, tuple) else (paged_kv_cache, None)
        _append_in_graph(
            cache=pair[0],
            values=pair[1],
            append_key=append_key,
            append_value=append_value,
            batch_indices=batch_indices,
            positions=positions,
            kv_indices=kv_indices,
            kv_indptr=kv_indptr,
            kv_last_page_len=kv_last_page_len,
            kv_layout=kv_layout,
        )
        return
    for name, new, cache in (("append_key", append_key, k_cache), ("append_value", append_value, v_cache)):
        _check_new(name, new, cache, append_key, kv_layout)
    append_key, append_value = autograd.without_grad(append_key, append_value)
    device = k_cache.device
    nnz = append_key.size(0)
    owner = index_vectors.index_vector("batch_indices", batch_indices, nnz, "token of append_key")
    position = index_vectors.index_vector("positions", positions, nnz, "token of append_key")
    indptr = index_vectors.indptr("kv_indptr", kv_indptr)
    indices = index_vectors.index_vector("kv_indices", kv_indices)
    index_vectors.index_vector("kv_last_page_len", kv_last_page_len, indptr.numel() - 1)
    if not (owner.is_cuda or position.is_cuda or indptr.is_cuda):
        _check_places(owner, position, indptr, indices, k_cache.size(1))
    if nnz == 0 or indices.numel() == 0:
        return
    owner, position = owner.to(device), position.to(device)
    served = kernels.move(k_cache)
    if served and not (indptr.is_cuda or indices.is_cuda):
        pages = indices[int(indptr[0]) : int(indptr[-1])]
        index_vectors.enough_pages("kv_indices", index_vectors.page_bound("kv_indices", pages), k_cache)
    indptr, indices = indptr.to(device), indices.to(device)
    caches = k_cache, v_cache
    if served and _launch_append((append_key, append_value), (owner, position), caches, (indices, indptr)):
        autograd.written(k_cache, v_cache)
        return

    # Skipped tokens repeat the write of the first token that is not skipped: an equal value at an equal place.
    used = (owner >= 0) & (position >= 0)
    token = torch.where(used, torch.arange(nnz, device=device), used.to(torch.int32).argmax())
    owner, position = owner[token].clamp_(min=0), position[token].clamp_(min=0)
    page_size = k_cache.size(1)
    page = indices[(indptr[owner] + position // page_size).to(torch.int64)].to(torch.int64)
    entry = (position % page_size).to(torch.int64)
    index_vectors.enough_pages("kv_indices", index_vectors.page_bound("kv_indices", page), k_cache)
    any_used = used.any()
    for new, cache in ((append_key, k_cache), (append_value, v_cache)):
        target = bits(cache)
        target[page, entry] = torch.where(any_used, bits(new.to(cache.dtype))[token], target[page, entry])


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """Writes new tokens of latent attention (MLA) into the pages of their requests, in place and in one kernel.

    Token ``i`` goes to entry ``positions[i] % page_size`` of page ``positions[i] // page_size`` of request
    ``batch_indices[i]``. For slots, and fp8 caches with a scale, see ``mla.concat_and_cache_mla``.

    Args:
        append_ckv: ``[nnz, 512]``, latent vectors, converted to the dtype of the cache.
        append_kpe: ``[nnz, 64]``, the columns of the position.
        batch_indices, positions: int32 ``[nnz]`` (see ``get_batch_indices_positions``); tokens with a negative
            batch index or position are skipped.
        ckv_cache: ``[pages, page_size, 512]``.
        kpe_cache: ``[pages, page_size, 64]``. The two may be views of one cache: ``cache[..., :512]`` and
            ``cache[..., 512:]``.
        kv_indices, kv_indptr, kv_last_page_len: see ``append_paged_kv_cache``.

    On a CUDA device, index tensors are not checked, and no write leaves the cache wherever they point.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: shapes that do not fit together; on the CPU, places that the pages do not have.

    Examples:
        >>> cache = torch.zeros(4, 16, 576, dtype=torch.bfloat16)
        >>> ckv, kpe = torch.randn(3, 512, dtype=torch.bfloat16), torch.randn(3, 64, dtype=torch.bfloat16)
        >>> indptr, indices, last = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2], [3, 1], [2]))
        >>> owner, position = get_batch_indices_positions(torch.tensor([0, 3]), torch.tensor([18]), 3)
        >>> append_paged_mla_kv_cache(
        ...     ckv, kpe, owner, position, cache[..., :512], cache[..., 512:], indices, indptr, last
        ... )
    """
    ckv, kpe, caches = _parts_of_cache(append_ckv, append_kpe, ckv_cache, kpe_cache)
    append_paged_kv_cache(ckv, kpe, batch_indices, positions, caches, kv_indices, kv_indptr, kv_last_page_len)


def _parts_of_cache(
    append_ckv: Any, append_kpe: Any, ckv_cache: Any, kpe_cache: Any
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """New tokens and their caches with a dimension of one head, or an error."""
    for name, x in (("ckv_cache", ckv_cache), ("kpe_cache", kpe_cache)):
        checks.tensor(name, x, 3)
    if ckv_cache.shape[:2] != kpe_cache.shape[:2]:
        raise ValueError(
            f"ckv_cache has shape {tuple(ckv_cache.shape)} and kpe_cache {tuple(kpe_cache.shape)}: they may differ in "
            "the last dimension alone."
        )
    for name, x, cache in (("append_ckv", append_ckv, ckv_cache), ("append_kpe", append_kpe, kpe_cache)):
        checks.tensors(**{name: x})
        if x.dim() != 2 or x.size(1) != cache.size(2) or x.size(0) != append_ckv.size(0):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, but this cache takes [tokens, {cache.size(2)}], and as many "
                "tokens of both parts."
            )
    caches = (ckv_cache.unsqueeze(2), kpe_cache.unsqueeze(2))
    return append_ckv.unsqueeze(1), append_kpe.unsqueeze(1), caches


def _check_new(name: str, new: torch.Tensor, cache: torch.Tensor, keys: torch.Tensor, kv_layout: str) -> None:
    """TypeError or ValueError where ``new`` is not what ``cache`` takes, for as many tokens as there are ``keys``."""
    checks.tensors(**{name: new})
    expected = (keys.size(0) if keys.dim() else 0, *cache.shape[2:])
    if tuple(new.shape) != expected:
        swapped = new.dim() == 3 and new.shape[1:] == (cache.size(1), cache.size(3))
        raise ValueError(
            f"{name} has shape {tuple(new.shape)}, but this cache takes {expected} with kv_layout={kv_layout!r}."
            + hints.other_layout(kv_layout, swapped)
        )
    checks.same_device(cache.device, "the cache is", **{name: new})


def _check_places(
    owner: torch.Tensor, position: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, page_size: int
) -> None:
    """ValueError where a token, of those that are not skipped, has no place in the pages of its request."""
    index_vectors.enough_entries(indptr, indices)
    batch = indptr.numel() - 1
    used = (owner >= 0) & (position >= 0)
    if bool((used & (owner >= batch)).any()):
        at = int((used & (owner >= batch)).nonzero()[0])
        raise ValueError(f"batch_indices[{at}]={int(owner[at])}, but kv_indptr has only {batch} requests.")
    pages_of = index_vectors.lens(indptr) if batch else torch.zeros(1, dtype=torch.int64)
    room = pages_of[torch.where(used, owner, 0).long()] * page_size
    if bool((used & (position >= room)).any()):
        at = int((used & (position >= room)).nonzero()[0])
        pages = int(room[at]) // page_size
        raise ValueError(
            f"positions[{at}]={int(position[at])}, but the {pages} pages of request {int(owner[at])} have room for "
            f"{int(room[at])} tokens: add its new pages to kv_indptr and kv_indices first."
        )


def _launch_positions(
    indptr: torch.Tensor, lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    """Fills the two results; ``indptr`` and ``lens`` are int32, contiguous and on their device."""
    tensors = indptr, lens, batch_indices, positions
    sizes, addresses = (indptr.numel() - 1, positions.numel()), (x.data_ptr() for x in tensors)
    kernels.launch(native._C.get_batch_indices_positions, indptr.device, *sizes, *addresses)


def _launch_append(new: Pair, places: Pair, caches: Pair, table: Pair) -> bool:
    """Writes keys and values ``[tokens, heads, dim]`` to caches ``[pages, page_size, heads, dim]``. Requests and
    positions, and the page table (numbers, offsets), are int32, contiguous and on the device of the caches. False, and
    nothing done, where the element type is none of the kernel's."""
    (key, value), (k_cache, v_cache), (indices, indptr) = new, caches, table
    if k_cache.dtype != v_cache.dtype or k_cache.element_size() not in _NAME_OF_SIZE:
        return False
    # What numbers beyond the range of fp8 become (NaN, infinity, the largest one) depends on torch's version.
    key, value = key.to(k_cache.dtype), value.to(k_cache.dtype)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    tokens, heads, head_dim_qk = key.shape
    if not (tokens and heads and head_dim_qk and value.size(-1)):
        return False
    sizes = _NAME_OF_SIZE[k_cache.element_size()], heads, head_dim_qk, value.size(-1), indptr.numel() - 1, tokens
    lists = (x.data_ptr() for x in (*places, indptr, indices))
    pages = indices.numel(), *k_cache.shape[:2]
    tokens_at = *kernels.place(key, 2), *kernels.place(value, 2)
    caches_at = *kernels.place(k_cache, 3), *kernels.place(v_cache, 3)
    kernels.launch(native._C.append_paged_kv_cache, k_cache.device, *sizes, *lists, *pages, *tokens_at, *caches_at)
    return True


def _traced_positions(
    indptr: torch.Tensor, seq_lens: torch.Tensor, nnz: int, *given: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.ops.cutlass_kernels.positions(indptr, seq_lens, nnz)
    names = ("batch_indices", "positions")
    owner, position = (
        x if out is None else _int32_output(name, out, nnz, x.device).copy_(x)
        for name, out, x in zip(names, given, new)
    )
    return owner, position


def _int32_output(name: str, tensor: torch.Tensor | None, size: int, device: torch.device) -> torch.Tensor:
    return checks.output(tensor, (size,), torch.int32, device, name=name)


def _append(cache: torch.Tensor, values: torch.Tensor | None, **others: Any) -> None:
    append_paged_kv_cache(paged_kv_cache=cache if values is None else (cache, values), **others)


_TYPES = {"cache": torch.Tensor, "values": torch.Tensor | None, **get_type_hints(append_paged_kv_cache)}
del _TYPES["paged_kv_cache"]
_append_in_graph = operators.in_place("append", _TYPES, _append, ("cache", "values"))
operators.register(
    "positions",
    "(Tensor append_indptr, Tensor seq_lens, SymInt nnz) -> (Tensor, Tensor)",
    get_batch_indices_positions,
    lambda indptr, seq_lens, nnz: tuple([indptr.new_empty((nnz,), dtype=torch.int32) for _ in range(2)]),
)
