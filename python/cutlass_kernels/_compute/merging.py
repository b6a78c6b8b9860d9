"""Merging of attention states.

A state is what attention over some of the keys leaves: the output v and the base-2 LSE s. States over disjoint keys
merge into the state over all of them (Juravsky et al., "Hydragen", 2024; Ye et al., "Cascade Inference", 2024):

    v = sum_i 2^(s_i - m) v_i / sum_i 2^(s_i - m),   s = m + log2 sum_i 2^(s_i - m),   m = max_i s_i

A state with s = -inf has seen no key: it contributes nothing, whatever its v holds, and merging only such states gives
v = 0, s = -inf. Arithmetic is fp32 (fp64 for fp64 values).

On CUDA devices a kernel does it in one pass over memory: for float16, bfloat16 and float32 with a head_dim that is a
multiple of 8 (at most 2048, of float32 1024). PyTorch does the rest, all of it on other devices and in what
``torch.compile`` compiles.
"""

from __future__ import annotations

import math

import torch

from .._core import checks, native
from .._core.autograd import without_autocast, written
from . import kernels

NAME_OF_STATE = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
_ROW_BYTES = 4096  # of a state that kernels merge, at most
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two attention states.

    Args:
        v_a, v_b: outputs ``[tokens, heads, head_dim]``, float16, bfloat16 or float32.
        s_a, s_b: their LSEs in base 2, ``[tokens, heads]``; float32, others are converted.

    Returns:
        ``(v, s)``: the merged output (shape and dtype of ``v_a``) and its LSE, float32 ``[tokens, heads]``, base 2.

    Raises:
        RuntimeError: the shapes do not fit together, or a tensor is not floating-point.

    Examples:
        >>> v, s = torch.ones(1, 1, 2), torch.zeros(1, 1)
        >>> merge_state(v, s, 3 * v, s)
        (tensor([[[2., 2.]]]), tensor([[1.]]))
    """
    _check_two(v_a, s_a, v_b, s_b, ("v_a", "s_a", "v_b", "s_b"))
    states = v_a, _as(s_a, torch.float32), _as(v_b, v_a.dtype), _as(s_b, torch.float32)
    if not (kernels.move(*states) and _has_kernel(v_a)):
        return _merge_two(*states)
    out = torch.empty(v_a.shape, dtype=v_a.dtype, device=v_a.device)
    lse = torch.empty(s_a.shape, dtype=torch.float32, device=v_a.device)
    _launch(*states, out, lse)
    return out, lse


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merges a second state into ``(v, s)``, as ``merge_state`` does.

    Args:
        v, s: the state to update: ``[tokens, heads, head_dim]`` and base-2 LSE ``[tokens, heads]``.
        v_other, s_other: the state to merge into it, of the same shapes.
        mask: optional bool or integer ``[tokens]``; tokens whose element is 0 keep their state.

    Raises:
        RuntimeError: the shapes do not fit together, or a tensor is not floating-point.

    Examples:
        >>> v, s = torch.ones(1, 1, 2), torch.zeros(1, 1)
        >>> merge_state_in_place(v, s, 3 * v, s)
        >>> v
        tensor([[[2., 2.]]])
    """
    _check_two(v, s, v_other, s_other, ("v", "s", "v_other", "s_other"))
    if mask is not None and not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask is {type(mask).__name__}, not a tensor: pass a bool per token, or None.")
    if mask is not None and (mask.dim() != 1 or mask.size(0) != v.size(0)):
        raise RuntimeError(f"mask has shape {tuple(mask.shape)}: it must be [{v.size(0)}], one element per token.")
    served = kernels.move(v, s, v_other, s_other) and s.dtype == torch.float32 and _has_kernel(v)
    if served and _launch_in_place(v, s, _as(v_other, v.dtype), _as(s_other, torch.float32), mask):
        written(v, s)
        return
    merged_v, merged_s = merge_state(v, s, v_other, s_other)
    if mask is not None:
        chosen = mask != 0
        merged_v = torch.where(chosen[:, None, None], merged_v, v)
        merged_s = torch.where(chosen[:, None], merged_s.to(s.dtype), s)
    v.copy_(merged_v)
    s.copy_(merged_s)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges any number of attention states.

    Args:
        v: outputs ``[tokens, states, heads, head_dim]``, float16, bfloat16 or float32.
        s: their LSEs in base 2, ``[tokens, states, heads]``; float32, others are converted.

    Returns:
        ``(v, s)``: the merged output ``[tokens, heads, head_dim]`` in the dtype of ``v`` and its LSE, float32
        ``[tokens, heads]``, base 2. Zero states give 0 and -inf.

    Raises:
        RuntimeError: the shapes do not fit together.

    Examples:
        >>> v, s = merge_states(torch.randn(7, 4, 8, 64), torch.randn(7, 4, 8))
        >>> v.shape, s.shape
        (torch.Size([7, 8, 64]), torch.Size([7, 8]))
    """
    _check(v, s, 4, "v", "s")
    s = _as(s, torch.float32)
    if not (kernels.move(v, s) and _has_kernel(v)):
        return _merge(v, s)
    tokens, _, heads, head_dim = v.shape
    out = torch.empty((tokens, heads, head_dim), dtype=v.dtype, device=v.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=v.device)
    if out.numel():
        v = _readable(v)
        sizes, places = (NAME_OF_STATE[v.dtype], *v.shape), (*kernels.place(v, 3), *kernels.place(s, 3))
        results = out.data_ptr(), lse.data_ptr()
        kernels.launch(native._C.merge_states, v.device, *sizes, *places, *results)
    return out, lse


@without_autocast
def _merge_two(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _merge(torch.stack([v_a, v_b], 1), torch.stack([s_a, s_b], 1))


@without_autocast
def _merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``v`` [tokens, states, heads, dim] and fp32 ``s`` [tokens, states, heads] merged over the states."""
    if s.size(1) == 0:
        return v.new_zeros(v.shape[:1] + v.shape[2:]), s.new_full(s.shape[:1] + s.shape[2:], -math.inf)
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    largest = s.amax(1, keepdim=True)
    weight = torch.exp2(s - largest.masked_fill(largest == -math.inf, 0.0))
    total = weight.sum(1)
    share = (weight / total.unsqueeze(1)).unsqueeze(-1).to(wide)
    parts = v.to(wide) * share
    parts = parts.masked_fill((weight == 0).unsqueeze(-1), 0.0)  # also where the total is 0
    return parts.sum(1).to(v.dtype), largest.squeeze(1) + torch.log2(total)


# --- on kernels --------------------------------------------------------------------------------------------------


def _has_kernel(v: torch.Tensor) -> bool:
    """Whether there is a kernel for states of this type and head dimension."""
    head_dim = v.size(-1)
    return v.dtype in NAME_OF_STATE and head_dim % 8 == 0 and 0 < head_dim * v.element_size() <= _ROW_BYTES


def _launch_in_place(
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
    _launch(v, s, v_other, s_other, v, s, mask=mask)
    return True


def _launch(*states: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Merges two states into a third: ``states`` are v and s of each."""
    v_a, s_a, v_b, s_b, out, lse = states
    if not v_a.numel():
        return
    mask = None if mask is None else mask.contiguous()
    of_mask = (0, 1) if mask is None else (mask.data_ptr(), mask.element_size())
    sizes, tensors = (NAME_OF_STATE[v_a.dtype], *v_a.shape), (_readable(v_a), s_a, _readable(v_b), s_b, out, lse)
    places = (number for x in tensors for number in kernels.place(x, 2))
    kernels.launch(native._C.merge_state, v_a.device, *sizes, *places, *of_mask)


def _readable(v: torch.Tensor) -> torch.Tensor:
    """``v``, or a copy where kernels cannot read it where it lies: 16 bytes at a time, along its last dimension."""
    *strides, last = v.stride()
    steps = 0
    for stride in strides:
        steps |= stride
    if last != 1 or (v.data_ptr() | steps * v.element_size()) % 16:
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


# --- checks ------------------------------------------------------------------------------------------------------


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)  # to() takes a microsecond to see that


def _check_two(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, names: tuple[str, str, str, str]
) -> None:
    _check(v_a, s_a, 3, *names[:2])
    _check(v_b, s_b, 3, *names[2:])
    if v_a.shape != v_b.shape:
        raise RuntimeError(
            f"{names[0]} has shape {tuple(v_a.shape)} and {names[2]} {tuple(v_b.shape)}: they must be equal."
        )
    if v_a.device != v_b.device:
        raise RuntimeError(f"{names[0]} is on {v_a.device} and {names[2]} on {v_b.device}: move one.")


def _check(v: torch.Tensor, s: torch.Tensor, rank: int, v_name: str, s_name: str) -> None:
    if not (isinstance(v, torch.Tensor) and isinstance(s, torch.Tensor)):
        checks.tensors(**{v_name: v, s_name: s})
    if v.dim() != rank or v.shape[:-1] != s.shape:
        layout = "[tokens, heads, head_dim]" if rank == 3 else "[tokens, states, heads, head_dim]"
        raise RuntimeError(
            f"{v_name} has shape {tuple(v.shape)} and {s_name} {tuple(s.shape)}: {v_name} must be {layout}, "
            f"{s_name} the same without head_dim."
        )
    if not (v.is_floating_point() and s.is_floating_point()):
        raise RuntimeError(f"{v_name} has dtype {v.dtype} and {s_name} {s.dtype}: both must be floating-point.")
    if v.device != s.device:
        raise RuntimeError(f"{v_name} is on {v.device} and {s_name} on {s.device}: move one.")
