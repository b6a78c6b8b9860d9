"""Checks and conversions of user arguments.

Every front end passes its arguments through these functions before anything is computed. A function returns the
argument in the one form the rest of the package uses, or raises a sentence that names the argument, its value and the
remedy. Values on a CUDA device are never read back, so nothing here synchronises.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import hints, native
from .autograd import wants_grad
from .hints import shown
from .index_vectors import INT32_MAX
from .problems import FLOAT_DTYPES, FP8_DTYPES
from .tracing import is_traced, without_modes

Scale = float | torch.Tensor

LAYOUTS = ("NHD", "HND")
POS_ENCODINGS = ("NONE", "ROPE_LLAMA", "ALIBI")
_DTYPE_ALIASES = {
    "fp16": torch.float16,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "float8_e4m3": torch.float8_e4m3fn,
}


# --- names and numbers -------------------------------------------------------------------------------------------


def kv_layout(value: str) -> str:
    """``value`` if it is ``"NHD"`` or ``"HND"``; KeyError otherwise."""
    if value not in LAYOUTS:
        raise KeyError(f"kv_layout={shown(value)} is not a layout: use 'NHD' or 'HND'.")
    return value


def pos_encoding(value: str) -> str:
    """``value`` if it names a position encoding; KeyError otherwise."""
    if value not in POS_ENCODINGS:
        raise KeyError(
            f"pos_encoding_mode={shown(value)} is not a position encoding: use 'NONE', 'ROPE_LLAMA' or 'ALIBI'."
        )
    return value


def dtype(value: str | torch.dtype) -> torch.dtype:
    """The torch dtype of a name ("float16", "half", "bfloat16", "float8_e4m3fn", ...) or of a torch dtype."""
    if isinstance(value, torch.dtype):
        return value
    if not isinstance(value, str):
        raise TypeError(f"a data type must be a torch.dtype or its name, not {shown(value)}.")
    name = value.removeprefix("torch.")
    found = _DTYPE_ALIASES.get(name, getattr(torch, name, None))
    if isinstance(found, torch.dtype):
        return found
    raise ValueError(f"{value!r} is not a data type: use a torch.dtype or a name such as 'float16' or 'bfloat16'.")


def integer(name: str, value: Any) -> int:
    """``value`` as an int; TypeError for what is none, a float that is whole included."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={shown(value)} is of type {type(value).__name__}: pass an integer.") from None


def page_size(value: Any) -> int:
    """``page_size`` as an int; TypeError for what is none, ValueError below 1."""
    size = integer("page_size", value)
    if size <= 0:
        raise ValueError(f"page_size={size} must be positive: it is the number of tokens that a page holds.")
    return size


def flag(name: str, value: Any) -> bool:
    """``value`` as a bool: True, False, or a number that is 0 or 1; TypeError otherwise."""
    if value is True or value is False:
        return value
    if not isinstance(value, (str, torch.Tensor)) and value in (0, 1):  # also numpy's bools
        return bool(value)
    raise TypeError(f"{name}={shown(value)} is of type {type(value).__name__}: pass True or False.")


def heads(num_qo_heads: int, num_kv_heads: int) -> int:
    """Query heads per key/value head; RuntimeError unless it is a positive whole number."""
    if num_qo_heads <= 0 or num_kv_heads <= 0 or num_qo_heads % num_kv_heads != 0:
        raise RuntimeError(
            f"num_qo_heads={num_qo_heads} must be a positive multiple of num_kv_heads={num_kv_heads}: "
            "every key/value head serves the same number of query heads."
        )
    return num_qo_heads // num_kv_heads


def heads_of(q: torch.Tensor, k: torch.Tensor, layout: str) -> int:
    """``heads`` of q and token-major keys, which the caller passed in ``layout``."""
    try:
        return heads(q.size(-2), k.size(-2))
    except RuntimeError as error:
        raise RuntimeError(f"{error}{hints.other_heads(q, k, layout)}") from None


def window(value: int | None) -> int:
    """``window_left``: keys a row sees to its left besides its own; -1 (any negative, None) is no limit.

    At most what int32 holds, which no row's position reaches.
    """
    if value is None:
        return -1
    try:
        left = operator.index(value)
    except TypeError:
        raise TypeError(f"window_left={shown(value)} is not a whole number: use -1 for no window.") from None
    return min(left, INT32_MAX) if left >= 0 else -1


def sm_scale(value: Any, head_dim_qk: int) -> float:
    """The softmax scale as a number; None is ``1 / sqrt(head_dim_qk)``."""
    if value is None:
        return 1.0 / math.sqrt(head_dim_qk)
    return _number("sm_scale", value)


def soft_cap(value: Any) -> float:
    """``logits_soft_cap`` as a number; 0.0 (None, 0 or negative) is off."""
    return 0.0 if value is None else max(_number("logits_soft_cap", value), 0.0)


def skip_softmax(value: Any) -> float:
    """``skip_softmax_threshold_scale_factor`` as a number; 0.0 (or None) is off."""
    if value is None:
        return 0.0
    factor = _number("skip_softmax_threshold_scale_factor", value)
    if factor < 0.0:
        raise ValueError(f"skip_softmax_threshold_scale_factor={factor} is negative: 0 disables skipping.")
    return factor


def scale(value: Any, name: str = "scale") -> Scale:
    """A per-tensor scale: None is 1.0, numbers and CPU tensors become a float.

    A one-element CUDA tensor, and a traced one, is returned as an fp32 tensor, which is read on the device.
    """
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor) and (value.is_cuda or is_traced()):
        hints.real(name, value)
        one_factor(name, value)
        return value.reshape(1).to(torch.float32)
    return _number(name, value.detach() if isinstance(value, torch.Tensor) else value)  # autograd knows of scales


def one_factor(name: str, value: Any) -> None:
    """ValueError for a tensor of more elements than one."""
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: pass a number, or a tensor of one element.")


def product(*scales: Scale) -> Scale:
    """The product of scales, a float where all are floats."""
    result: Scale = 1.0
    for factor in scales:
        result = result * factor
    return result


def rope(mode: str, rope_scale: float | None, rope_theta: float | None) -> tuple[float, float] | None:
    """``(scale, theta)`` where ``mode`` is ``"ROPE_LLAMA"`` (defaults 1.0 and 1e4), else None."""
    if pos_encoding(mode) != "ROPE_LLAMA":
        return None
    factor = 1.0 if rope_scale is None else _number("rope_scale", rope_scale)
    theta = 1e4 if rope_theta is None else _number("rope_theta", rope_theta)
    if factor <= 0.0 or theta <= 0.0:
        raise ValueError(f"rope_scale={rope_scale} and rope_theta={rope_theta} must be positive.")
    return factor, theta


def rope_dim(mode: str, head_dim: int) -> None:
    """ValueError where ``mode`` turns pairs of an odd number of dimensions."""
    if mode == "ROPE_LLAMA" and head_dim % 2:
        raise ValueError(
            f"head_dim={head_dim} is odd, but pos_encoding_mode='ROPE_LLAMA' turns pairs: use an even one."
        )


def no_gradient(name: str, value: Any) -> None:
    """TypeError for a tensor that is read as a number, where autograd would lose it."""
    if wants_grad(value):
        raise TypeError(f"{name} requires a gradient, but it is read as a number, which has none: pass {name}.item().")


def _number(name: str, value: Any) -> float:
    if is_dynamo_compiling() and isinstance(value, float):
        return value  # may be a symbol: the graph checks the number when it runs
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            raise TypeError(f"{name} is a CUDA tensor, which would have to be read back: pass a number.")
        if value.numel() != 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, but it is one number: pass a float.")
        no_gradient(name, value)
        value = value.item()
    try:
        if isinstance(value, (str, bytes, bool)):  # which float() takes
            raise TypeError
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name}={shown(value)} is not a number.") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}={number} is not finite.")
    return number


# Values of these types say the same whenever they are equal, as tensors do not.
PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})


# --- data types --------------------------------------------------------------------------------------------------


def element_types(
    q_dtype: torch.dtype,
    k_dtype: torch.dtype,
    v_dtype: torch.dtype | None = None,
    o_dtype: Any = None,
    keyword: str | None = "o_dtype",
) -> torch.dtype:
    """The output dtype of an attention over these dtypes (``o_dtype``, else that of q).

    ``keyword`` is the caller's argument for ``o_dtype``, None where the called function has none.

    Keys and values have one dtype: that of q, or fp8 below a 16-bit (or wider) q. An fp8 q needs keys and values of the
    same dtype and an ``o_dtype``. ValueError otherwise.
    """
    if v_dtype is not None and k_dtype != v_dtype:
        raise ValueError(f"k has dtype {k_dtype} and v {v_dtype}: convert one, they must be the same.")
    if k_dtype == torch.uint8 and q_dtype != torch.uint8:
        raise ValueError(
            "k and v have dtype torch.uint8: packed 4-bit values with a kv_cache_sf are not supported, convert to fp8."
        )
    if q_dtype not in FP8_DTYPES and q_dtype not in FLOAT_DTYPES:
        raise ValueError(f"q has dtype {q_dtype}, which is not served: use float16, bfloat16 or float8_e4m3fn.")
    if k_dtype != q_dtype and (q_dtype in FP8_DTYPES or k_dtype not in FP8_DTYPES):
        raise ValueError(
            f"q has dtype {q_dtype} and k, v {k_dtype}: keys and values must have the dtype of q, or fp8 below a "
            "16-bit q."
        )
    if o_dtype is None:
        if q_dtype in FP8_DTYPES:
            if keyword is None:
                raise ValueError(f"q has dtype {q_dtype}, which this function does not serve: use a 16-bit type.")
            raise ValueError(f"q has dtype {q_dtype}: say the output's dtype, e.g. {keyword}=torch.bfloat16.")
        return q_dtype
    wanted = dtype(o_dtype)
    if wanted not in FP8_DTYPES and wanted not in FLOAT_DTYPES:
        raise ValueError(f"{keyword}={wanted} is not served: use float16, bfloat16, float32 or an fp8 type.")
    return wanted


# --- tensors -----------------------------------------------------------------------------------------------------


def workspace(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A user's scratch buffer: a contiguous, 16-byte aligned tensor (ValueError otherwise)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}: pass a uint8 tensor.")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: pass a tensor straight from torch.empty.")
    if tensor.data_ptr() % 16 != 0:
        raise ValueError(f"{name} must be 16-byte aligned, but its address is {tensor.data_ptr():#x}.")
    return tensor


def tensors(**given: Any) -> None:
    """TypeError unless all of these are tensors."""
    for name, x in given.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is {type(x).__name__}, not a tensor.")


def tensor(name: str, x: Any, rank: int) -> torch.Tensor:
    """``x`` if it is a tensor of this rank with a contiguous last dimension; TypeError or ValueError otherwise."""
    if not isinstance(x, torch.Tensor):  # asking tensors() each time takes 0.3 us more
        tensors(**{name: x})
    if x.dim() != rank:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: it must have {rank} dimensions{hints.form(name, rank, x)}."
        )
    return last_dim_contiguous(name, x)


def token_major(x: torch.Tensor, layout: str) -> torch.Tensor:
    """A ``[tokens, heads, dim]`` view of a tensor in ``layout``."""
    if x.dim() != 3:
        raise ValueError(f"keys and values must have 3 dimensions, not shape {tuple(x.shape)}.")
    return x if kv_layout(layout) == "NHD" else x.transpose(0, 1)


def paged_cache(
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    layout: str,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a paged cache, both as ``[pages, page_size, num_kv_heads, head_dim]`` views.

    The cache is one tensor, ``[pages, 2, page_size, heads, dim]`` (NHD) or ``[pages, 2, heads, page_size, dim]`` (HND),
    or a tuple of two tensors without the second dimension. With pages of one token, the page_size dimension may be
    missing. KeyError for another container, ValueError for other shapes, whose message calls the two by ``names``.
    """
    kv_layout(layout)
    if isinstance(paged_kv_cache, torch.Tensor):
        shape = tuple(paged_kv_cache.shape)
        if paged_kv_cache.dim() not in (4, 5) or shape[1] != 2:
            raise ValueError(
                f"paged_kv_cache has shape {shape}: one tensor must be [pages, 2, ...] with 5 dimensions "
                "(4 where pages hold one token), keys first."
            )
        k, v = paged_kv_cache.unbind(1)
    elif isinstance(paged_kv_cache, tuple):
        if len(paged_kv_cache) != 2 or not all(isinstance(x, torch.Tensor) for x in paged_kv_cache):
            raise ValueError("paged_kv_cache is a tuple, which must hold two tensors: (k_cache, v_cache).")
        k, v = paged_kv_cache
    else:
        raise KeyError(
            f"paged_kv_cache is {type(paged_kv_cache).__name__}: pass one tensor or a tuple (k_cache, v_cache)."
        )
    if k.dim() != v.dim() or k.dim() not in (3, 4) or k.shape[:-1] != v.shape[:-1]:
        form = "[pages, page_size, heads, dim]" if layout == "NHD" else "[pages, heads, page_size, dim]"
        raise ValueError(
            f"{names[0]} has shape {tuple(k.shape)} and {names[1]} {tuple(v.shape)}, {k.dim()} and {v.dim()} "
            f"dimensions: both must be {form} with equal pages, page_size and heads (without page_size where it is 1)."
        )
    if k.dim() == 3:
        k, v = k.unsqueeze(1), v.unsqueeze(1)
    elif layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return last_dim_contiguous(names[0], k), last_dim_contiguous(names[1], v)


def last_dim_contiguous(name: str, x: torch.Tensor) -> torch.Tensor:
    """``x`` if neighbours in its last dimension are neighbours in memory; ValueError otherwise."""
    if x.stride(-1) != 1 and x.size(-1) > 1 and x.numel() > 0:
        raise ValueError(
            f"{name} has stride {x.stride(-1)} in its last dimension, which must be contiguous: use .contiguous()."
        )
    return x


def same_device(device: torch.device, others: str = "the queries are", /, **tensors: torch.Tensor | None) -> None:
    """ValueError where one of ``tensors`` (None is skipped) is not on ``device``, the one of ``others``."""
    for name, x in tensors.items():
        if x is not None and x.device != device:
            raise ValueError(f"{name} is on {x.device}, but {others} on {device}: move it there.")


def output(
    out: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    zero: bool = False,
    name: str = "out",
) -> torch.Tensor:
    """The output tensor: allocated (zero-filled on request) where ``out`` is None, else checked (ValueError)."""
    if out is None:
        allocate = torch.zeros if zero else torch.empty
        return allocate(tuple(shape), dtype=dtype, device=device)
    return last_dim_contiguous(name, _place(name, out, shape, dtype, device))


def lse_output(
    lse: torch.Tensor | None, shape: Sequence[int], device: torch.device, *, zero: bool = False
) -> torch.Tensor:
    """The fp32 LSE tensor: allocated where ``lse`` is None, else checked (ValueError)."""
    if lse is None:
        return output(None, shape, torch.float32, device, zero=zero)
    return _place("lse", lse, shape, torch.float32, device)


def _place(name: str, x: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A caller's tensor that a call writes to."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is {type(x).__name__}: pass a tensor or None.")
    if x.shape != tuple(shape) or x.dtype != dtype or x.device != device:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, dtype {x.dtype} on {x.device}, but this call writes "
            f"{tuple(shape)}, {dtype} on {device}."
        )
    if 0 in x.stride() and any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape)):
        raise ValueError(f"{name} has strides {x.stride()}, so that its elements share memory: pass another.")
    return x


# --- per-head parameters -----------------------------------------------------------------------------------------


_slopes: dict[tuple[int, torch.device], torch.Tensor] = {}


def alibi_slopes(num_heads: int, device: torch.device) -> torch.Tensor:
    """ALiBi slopes, fp32 ``[num_heads]``, made once per device (do not write to it).

    With n the largest power of two <= num_heads: ``2 ** (-8 (h + 1) / n)`` for the first n heads, and
    ``2 ** (-8 (j + 1/2) / n)`` for the j-th head after them (Press et al., "Train Short, Test Long", 2022).

    A CUDA graph that is being captured can copy nothing from host memory. It computes slopes that are not there yet
    itself, at every replay, and they are not kept: see ``are_kept``.
    """
    kept = _slopes.get((num_heads, device))
    if kept is not None:
        return kept
    captured = device.type != "cpu" and torch.cuda.is_current_stream_capturing()
    with without_modes():
        # The same bits on every device: no slope of up to 2048 heads lies nearer to the middle of two fp32 numbers than
        # 70,000 steps of fp64.
        n = 2 ** int(math.log2(num_heads))
        head = torch.arange(num_heads, dtype=torch.float64, device=device if captured else "cpu")
        slopes = torch.exp2(torch.where(head < n, head + 1.0, head - n + 0.5) * (-8.0 / n)).to(torch.float32)
        if captured:
            return slopes
        made = native.kept_empty(num_heads, torch.float32, device).copy_(slopes)
        return _slopes.setdefault((num_heads, device), made)


def are_kept(slopes: torch.Tensor) -> bool:
    """Whether ``alibi_slopes`` keeps these, so that other calls may read them, too."""
    return _slopes.get((slopes.numel(), slopes.device)) is slopes


def sinks(value: Any, num_qo_heads: int, device: torch.device) -> torch.Tensor | None:
    """Attention sinks, fp32 ``[num_qo_heads]`` on ``device``; None stays None, a list of one tensor is that tensor."""
    if value is None:
        return None
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"sinks is {type(value).__name__}: pass a float32 tensor with one element per query head.")
    if tuple(value.shape) != (num_qo_heads,) or value.dtype not in FLOAT_DTYPES:
        raise ValueError(
            f"sinks has shape {tuple(value.shape)} and dtype {value.dtype}: it must be float32 [{num_qo_heads}], "
            "one per query head."
        )
    same_device(device, sinks=value)
    return value.to(torch.float32).contiguous()


def per_head(name: str, value: Any, num_heads: int, group: int, device: torch.device) -> Scale:
    """A dequantization scale given per tensor or per head.

    None, numbers and one-element tensors behave as in ``scale``; a tensor ``[num_heads]`` becomes fp32
    ``[num_heads * group]`` on ``device``, one element per query head.
    """
    if not isinstance(value, torch.Tensor):
        return scale(value, name)
    hints.real(name, value)
    if value.numel() == 1:
        return scale(value, name)
    if tuple(value.shape) != (num_heads,):
        raise ValueError(f"{name} has shape {tuple(value.shape)}: pass one number or one per head, [{num_heads}].")
    same_device(device, **{name: value})
    expanded = value.to(torch.float32)
    return expanded.contiguous() if group == 1 else expanded.repeat_interleave(group, output_size=num_heads * group)


def descale(
    scale_q: Any, scale_k: Any, scale_v: Any, num_qo_heads: int, num_kv_heads: int, device: torch.device
) -> tuple[Scale, torch.Tensor | None, Scale]:
    """Dequantization scales (floats, one-element or per-head tensors) as the parts of a problem.

    Returns the factor of ``sm_scale``, the ``head_scale`` tensor (fp32 ``[num_qo_heads]``) or None, and the factor of
    the output.
    """
    if scale_q is None and scale_k is None and scale_v is None:
        return 1.0, None, 1.0
    group = num_qo_heads // num_kv_heads
    logits = product(
        per_head("scale_q", scale_q, num_qo_heads, 1, device), per_head("scale_k", scale_k, num_kv_heads, group, device)
    )
    values = per_head("scale_v", scale_v, num_kv_heads, group, device)
    if isinstance(logits, torch.Tensor) and logits.numel() > 1:
        return 1.0, logits, values
    return logits, None, values
