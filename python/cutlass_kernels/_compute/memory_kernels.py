"""The compiled kernels that only move memory: merging of states, writing to caches. From tensors to launches.

``serve`` tells whether they compute a call at all. Arguments have been checked; tensors become addresses and
strides here. Nothing is allocated but results, and copies of tensors that lie in memory as no kernel reads them;
nothing synchronises, and all of it can be captured into a CUDA graph.
"""

from __future__ import annotations

import functools

import torch

from .._core import native
from .._core.native import current_device as _current_device
from .._core.native import stream_of as _stream_of
from .._core.tracing import is_traced
from .request_facts import compute_capability

NAME_OF_STATE = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ROW_BYTES = 4096  # of a state, at most
_NAME_OF_SIZE = {1: "float8_e4m3fn", 2: "float16", 4: "float32"}  # copies of elements need no more than their size
_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def serve(x: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether kernels take these tensors; else PyTorch is to compute.

    That is: on devices that the installation has no such kernels for, for subclasses of tensors (which stand for
    others), for traced calls, whose graphs know PyTorch's operators, and where gradients are asked for.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *others)):
        return False
    if not x.is_cuda or is_traced() or type(x) not in _PLAIN_TENSORS:
        return False
    return _serve_device(x.device)


@functools.lru_cache(maxsize=64)
def _serve_device(device: torch.device) -> bool:
    capability = compute_capability(device)
    if native._C is None or capability is None:
        return False
    oldest, newest = native._C.compute_capabilities  # newest 0: all newer ones
    return bool(oldest <= capability and (not newest or capability <= newest))


# --- merging -----------------------------------------------------------------------------------------------------


def merges(v: torch.Tensor) -> bool:
    """Whether there is a kernel for states of this type and head dimension."""
    head_dim = v.size(-1)
    return v.dtype in NAME_OF_STATE and head_dim % 8 == 0 and 0 < head_dim * v.element_size() <= _ROW_BYTES


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``v`` [tokens, states, heads, dim] and fp32 ``s`` [tokens, states, heads] merged over the states."""
    device = v.device
    if device.index != _current_device():
        with torch.cuda.device(device):
            return merge_states(v, s)
    tokens, states, heads, head_dim = v.shape
    out = torch.empty((tokens, heads, head_dim), dtype=v.dtype, device=device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=device)
    if tokens and heads:
        v_token, v_state, v_head, last = v.stride()
        if last != 1 or (v.data_ptr() | (v_token | v_state | v_head) * v.element_size()) % 16:
            v = v.clone(memory_format=torch.contiguous_format)
            v_token, v_state, v_head, _ = v.stride()
        s_token, s_state, s_head = s.stride()
        native._C.merge_states(
            NAME_OF_STATE[v.dtype],
            tokens,
            states,
            heads,
            head_dim,
            v.data_ptr(),
            v_token,
            v_state,
            v_head,
            s.data_ptr(),
            s_token,
            s_state,
            s_head,
            out.data_ptr(),
            lse.data_ptr(),
            _stream_of(device.index),
        )
    return out, lse


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states of one type, with fp32 LSEs, merged."""
    out = torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device)
    lse = torch.empty(s_a.shape, dtype=torch.float32, device=v_a.device)
    _merge_two(v_a, s_a, v_b, s_b, out, lse, None)
    return out, lse


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    """Merges into ``v`` and ``s``, both states of one type, LSEs fp32. False, and nothing done, where tensors lie in
    memory as no kernel writes them, or overlap."""
    if _readable(v) is not v or not (_is_dense(v) and _is_dense(s)):
        return False
    if not (_are_apart(v, v_other) and _are_apart(s, s_other)):
        return False
    if mask is not None and (mask.dtype not in _MASKS or mask.device != v.device):
        return False
    _merge_two(v, s, v_other, s_other, v, s, mask)
    return True


def _merge_two(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    device = v_a.device
    if device.index != _current_device():
        with torch.cuda.device(device):
            _merge_two(v_a, s_a, v_b, s_b, out, lse, mask)
        return
    tokens, heads, head_dim = v_a.shape
    if not (tokens and heads):
        return
    v_a, v_b = _readable(v_a), _readable(v_b)
    mask = None if mask is None else mask.contiguous()
    (a_token, a_head, _), (b_token, b_head, _), (out_token, out_head, _) = v_a.stride(), v_b.stride(), out.stride()
    (s_a_token, s_a_head), (s_b_token, s_b_head), (lse_token, lse_head) = s_a.stride(), s_b.stride(), lse.stride()
    native._C.merge_state(
        NAME_OF_STATE[v_a.dtype],
        tokens,
        heads,
        head_dim,
        v_a.data_ptr(),
        a_token,
        a_head,
        s_a.data_ptr(),
        s_a_token,
        s_a_head,
        v_b.data_ptr(),
        b_token,
        b_head,
        s_b.data_ptr(),
        s_b_token,
        s_b_head,
        out.data_ptr(),
        out_token,
        out_head,
        lse.data_ptr(),
        lse_token,
        lse_head,
        0 if mask is None else mask.data_ptr(),
        1 if mask is None else mask.element_size(),
        _stream_of(device.index),
    )


def _readable(v: torch.Tensor) -> torch.Tensor:
    """``v`` [tokens, heads, dim], or a copy where kernels cannot read it where it lies: 16 bytes at a time."""
    token, head, last = v.stride()
    if last != 1 or (v.data_ptr() | (token | head) * v.element_size()) % 16:
        return v.clone(memory_format=torch.contiguous_format)
    return v


def _is_dense(x: torch.Tensor) -> bool:
    """Whether no two elements are one in memory, as far as strides of 0 tell."""
    return x.is_contiguous() or all(stride or size == 1 for stride, size in zip(x.stride(), x.shape))


def _are_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of a shape share no memory, or lie in the same place."""
    begin, other = a.data_ptr(), b.data_ptr()
    if begin == other:
        return a.stride() == b.stride()
    lower, distance = (a, other - begin) if begin < other else (b, begin - other)
    return _extent(lower) <= distance


def _extent(x: torch.Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    if x.is_contiguous():
        return x.nbytes
    return (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))) * x.element_size()


# --- caches ------------------------------------------------------------------------------------------------------


def get_batch_indices_positions(
    indptr: torch.Tensor, lens: torch.Tensor, batch_indices: torch.Tensor, positions: torch.Tensor
) -> None:
    """Fills the two results; ``indptr`` and ``lens`` are int32, contiguous and on their device."""
    device = indptr.device
    if device.index != _current_device():
        with torch.cuda.device(device):
            get_batch_indices_positions(indptr, lens, batch_indices, positions)
        return
    native._C.get_batch_indices_positions(
        indptr.numel() - 1,
        positions.numel(),
        indptr.data_ptr(),
        lens.data_ptr(),
        batch_indices.data_ptr(),
        positions.data_ptr(),
        _stream_of(device.index),
    )


def append(
    key: torch.Tensor,
    value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indices: torch.Tensor,
    indptr: torch.Tensor,
) -> bool:
    """Writes ``[tokens, heads, dim]`` to caches ``[pages, page_size, heads, dim]``; index tensors are int32, contiguous
    and on the device of the caches. False, and nothing done, where the element type is none of the kernel's."""
    device = k_cache.device
    if device.index != _current_device():
        with torch.cuda.device(device):
            return append(key, value, batch_indices, positions, k_cache, v_cache, indices, indptr)
    if k_cache.dtype != v_cache.dtype or k_cache.element_size() not in _NAME_OF_SIZE:
        return False
    # What numbers beyond the range of fp8 become (NaN, infinity, the largest one) depends on torch's version.
    key, value = key.to(k_cache.dtype), value.to(k_cache.dtype)
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    tokens, heads, head_dim_qk = key.shape
    if not (tokens and heads and head_dim_qk and value.size(-1)):
        return False
    native._C.append_paged_kv_cache(
        _NAME_OF_SIZE[k_cache.element_size()],
        heads,
        head_dim_qk,
        value.size(-1),
        indptr.numel() - 1,
        tokens,
        batch_indices.data_ptr(),
        positions.data_ptr(),
        indptr.data_ptr(),
        indices.data_ptr(),
        indices.numel(),
        k_cache.size(0),
        k_cache.size(1),
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        k_cache.data_ptr(),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.data_ptr(),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        _stream_of(device.index),
    )
    return True
