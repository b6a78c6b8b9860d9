"""What a caller probably meant: hints that end the messages of ``checks``, and checks that only find such mistakes.

Nothing here is reached by a call that is right, but for ``one_cache`` and ``tensor``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

# Shapes of arguments by name and number of dimensions, for messages.
_FORMS = {
    ("q", 2): "[num_qo_heads, head_dim]",
    ("q", 3): "[rows, num_qo_heads, head_dim]",
    ("k", 3): "[kv_len, num_kv_heads, head_dim], or with kv_layout='HND' [num_kv_heads, kv_len, head_dim]",
    ("k_unique", 4): "[batch, kv_len, num_kv_heads, head_dim], or with kv_layout='HND' num_kv_heads before kv_len",
    ("qkv", 4): "[tokens, 3, num_heads, head_dim]",
    ("kv", 4): "[tokens, 2, num_kv_heads, head_dim]",
    ("paged_kv", 5): "[pages, 2, page_size, num_kv_heads, head_dim], or num_kv_heads before page_size (HND)",
    ("k_cache", 4): "[pages, page_size, num_kv_heads, head_dim], or num_kv_heads before page_size (HND)",
}
_FORMS |= {(name.replace("k", "v", 1), rank): _FORMS[name, rank] for name, rank in (("k", 3), ("k_unique", 4))}
_FORMS["v_cache", 4] = _FORMS["k_cache", 4]


def shown(value: Any) -> str:
    """``value`` as messages show it: tensors and arrays by their shapes, other long values shortened."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def form(name: str, rank: int, x: torch.Tensor) -> str:
    """Which ``rank`` dimensions an argument has, and how a query of other dimensions gets them."""
    expected = _FORMS.get((name, rank))
    text = "" if expected is None else f", {expected}"
    if name != "q":
        return text
    if rank == 3 and x.dim() == 4:
        return f"{text}. Join the batch and its rows: q.flatten(0, 1)"
    if rank == 3 and x.dim() == 2:
        return (
            f"{text}. For a single row use q.unsqueeze(0), for joined heads q.unflatten(-1, (num_qo_heads, head_dim))"
        )
    if rank == 2 and x.dim() == 3:
        return f"{text}, of a single token. Use q.squeeze(0), or single_prefill_with_kv_cache for several rows"
    return text


def other_layout(layout: str, fits: bool, where: str = "") -> str:
    """The hint that the other of two layouts fits, if it does. ``where`` says who takes it."""
    if not fits:
        return ""
    other = layout.replace("NHD", "HND") if "NHD" in layout else layout.replace("HND", "NHD")
    name = "kv_layout" if layout in ("NHD", "HND") else "input_layout"
    return f" {name}={other!r} fits: pass it{where} if keys and values are stored that way."


def other_heads(q: torch.Tensor, k: torch.Tensor, layout: str) -> str:
    """The hint for heads that do not divide: token-major keys ``k``, given in ``layout``, may be in the other one."""
    heads = k.size(-3)  # if tokens and heads are exchanged
    if q.dim() > 2 and q.size(-2) % max(heads, 1):
        own, exchanged = (x > 0 and q.size(-3) % x == 0 for x in (k.size(-2), heads))
        if not (own or exchanged):
            return ""
        other = other_layout(layout, exchanged and (layout == "NHD" or not own))
        form, dims = ("batch, rows", "1, 2") if q.dim() == 4 else ("rows", "0, 1")
        return (
            f" q is [{form}, num_qo_heads, head_dim]: where heads come first, as in torch's "
            f"scaled_dot_product_attention(), use q.transpose({dims}).{other}"
        )
    if heads <= 0 or q.size(-2) % heads:
        return ""
    if layout.endswith(("NHD", "HND")):
        return other_layout(layout, True)
    return (
        f" k is [tokens, num_kv_heads, head_dim]: for keys of {heads} heads use k.transpose(0, 1), v.transpose(0, 1)."
    )


def one_cache(paged_kv_cache: Any, behind: Any) -> None:
    """TypeError where ``behind``, the argument after the paged cache, is the cache of the values."""
    if isinstance(paged_kv_cache, torch.Tensor) and isinstance(behind, torch.Tensor):
        k, v = paged_kv_cache.shape, behind.shape
        if len(k) >= 3 and k[:-1] == v[:-1]:
            raise TypeError(
                f"paged_kv_cache has shape {tuple(k)}, and behind it comes a tensor of shape {tuple(v)}: keys and "
                "values of a paged cache are one argument, the tuple (k_cache, v_cache)."
            )


def tensor(name: str, value: Any) -> None:
    """TypeError unless ``value``, which may have been None, is a tensor: for arguments that are not always read."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}={shown(value)} is of type {type(value).__name__}: pass an int32 tensor or None.")


class spelt:
    """Sentences of errors say the caller's ``names`` of arguments. (A class: a generator takes 1 us more.)"""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.names and kind in (ValueError, TypeError, RuntimeError):
            words = rf"\b({'|'.join(self.names)})\b"
            raise kind(re.sub(words, lambda found: self.names[found[0]], str(error))).with_traceback(trace) from None


def tensors(**given: Any) -> None:
    """TypeError unless all of these are tensors."""
    for name, value in given.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}={shown(value)} is of type {type(value).__name__}: pass a tensor.")


def real(name: str, x: torch.Tensor) -> None:
    """TypeError for a tensor of complex numbers or bools, which are no factors."""
    if x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {x.dtype}: pass float32.")


def compute_capability(value: Any) -> int | None:
    """``10 * major + minor``, or None; TypeError or ValueError for a version, or a pair of numbers."""
    if value is None:
        return None
    if not isinstance(value, int):
        raise TypeError(
            f"compute_capability={shown(value)} is of type {type(value).__name__}: pass 10 * major + minor as an "
            "integer, e.g. 90 for 9.0."
        )
    if value < 10:
        raise ValueError(f"compute_capability={value} is not 10 * major + minor: pass e.g. 90 for 9.0.")
    return value


def cuda_device(device: torch.device) -> None:
    """ValueError where ``device`` is a CUDA device that is not here."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(
            f"device={str(device)!r} is not here: PyTorch finds {count} CUDA devices. To ask about a GPU of another "
            "machine, pass compute_capability, e.g. 90."
        )
