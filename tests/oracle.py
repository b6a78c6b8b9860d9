"""Naive attention, written from the behaviour contract and from nothing else.

One request at a time, full score matrices, double precision. It imports nothing of the package under test, so that an
error there cannot hide here. Memory does not matter: tests keep the lengths small.

Notation: a request has ``n`` query rows and ``m`` keys; row ``i`` sits at position ``i + m - n`` among the keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

LOG2E = 1.4426950408889634
FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class MultiItem:
    """Multi-item scoring of one request: the prefix length and, from there on, each token's place in its item."""

    prefix_len: int
    token_pos: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """``out [n, Hq, Dvo]``, base-2 ``lse [n, Hq]``, the fused-prefill statistics ``stats [n, Hq, 2]``, and the largest
    logit of each row, ``largest [n, Hq]``."""

    out: torch.Tensor
    lse: torch.Tensor
    stats: torch.Tensor
    largest: torch.Tensor


def alibi_slopes(num_heads: int) -> list[float]:
    """The slopes of the ALiBi paper, also for head counts that are no power of two."""
    n = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (h + 1) / n) for h in range(min(n, num_heads))]
    slopes += [2.0 ** (-4.0 * (2 * j + 1) / n) for j in range(num_heads - n)]
    return slopes


def rotate(x: torch.Tensor, positions: torch.Tensor, scale: float = 1.0, theta: float = 1e4) -> torch.Tensor:
    """Half-split (NeoX) rotary embedding of ``x [..., rows, D]`` at the given positions, in double precision."""
    half = x.shape[-1] // 2
    x = x.double()
    exponent = -2.0 * torch.arange(half, dtype=torch.float64, device=x.device) / x.shape[-1]
    angle = positions.double()[:, None] * (theta**exponent / scale)[None, :]
    cos, sin = angle.cos(), angle.sin()
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def visible(
    n: int,
    m: int,
    *,
    causal: bool = False,
    window_left: int = -1,
    custom_mask: torch.Tensor | None = None,
    multi_item: MultiItem | None = None,
    chunk_size: int = 0,
    window_right: int = -1,
    device: str | torch.device = "cpu",
) -> torch.Tensor:
    """Bool ``[n, m]``: which key each row sees. Multi-item > custom > causal > none; windows always apply."""
    pos = (torch.arange(n, device=device) + m - n)[:, None]
    key = torch.arange(m, device=device)[None, :]
    mask = torch.ones(n, m, dtype=torch.bool, device=device)
    if multi_item is not None:
        mask &= key <= pos
        for i in range(n):
            p = i + m - n
            if p >= multi_item.prefix_len:
                t = multi_item.token_pos[p - multi_item.prefix_len]
                mask[i] &= (key[0] < multi_item.prefix_len) | (key[0] > p - t)
    elif custom_mask is not None:
        mask &= custom_mask.to(device).bool().reshape(n, m)
    elif causal:
        mask &= key <= pos
    if window_left >= 0:
        mask &= key >= pos - window_left
    if window_right >= 0:
        mask &= key <= pos + window_right
    if chunk_size > 0:
        mask &= torch.div(key, chunk_size, rounding_mode="floor") == torch.div(pos, chunk_size, rounding_mode="floor")
    return mask


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A product of matrices as PyTorch computes it in ``dtype``: 16-bit types are summed up in fp32 and rounded once.

    On the CPU fp32 does the same, and is a hundred times as fast where the CPU has no 16-bit arithmetic.
    """
    a, b = a.to(dtype), b.to(dtype)
    if dtype in (torch.float16, torch.bfloat16) and a.device.type == "cpu":
        return (a.float() @ b.float()).to(dtype)
    return a @ b


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    alibi: str | None = None,
    rope: tuple[float, float] | None = None,
    sinks: torch.Tensor | None = None,
    sinks_in_lse: bool = True,
    out_scale: float | torch.Tensor = 1.0,
    head_scale: torch.Tensor | None = None,
    arithmetic: torch.dtype = torch.float64,
) -> State:
    """Attention of one request: ``q [n, Hq, Dqk]``, ``k [m, Hkv, Dqk]``, ``v [m, Hkv, Dvo]``.

    ``alibi`` is ``"relative"`` (key minus local row, before the cap), ``"decode"`` (key only, before the cap) or
    ``"after_cap"`` (key only, after the cap). ``rope`` is ``(scale, theta)``. ``arithmetic`` below double precision
    gives the baseline that a plain PyTorch program in that type would compute: scores, probabilities and
    products are rounded to it, the softmax itself is fp32.
    """
    n, num_heads, dim = q.shape
    m, num_kv_heads, dim_vo = v.shape
    device = q.device
    wide = arithmetic == torch.float64
    accumulate = torch.float64 if wide else torch.float32
    cap = float(soft_cap) if soft_cap is not None and soft_cap > 0 else 0.0

    def of_heads(x: torch.Tensor | float | list[float]) -> torch.Tensor:
        return torch.as_tensor(x, dtype=torch.float64, device=device).reshape(-1, 1, 1).expand(num_heads, 1, 1)

    scale = of_heads(1.0 / math.sqrt(dim) if sm_scale is None else float(sm_scale))
    if head_scale is not None:
        scale = scale * of_heads(head_scale)
    if mask is None:
        mask = torch.ones(n, m, dtype=torch.bool, device=device)
    mask = mask.to(device)
    live = mask.any(dim=1)
    row = torch.arange(n, device=device, dtype=torch.float64)[:, None]
    key = torch.arange(m, device=device, dtype=torch.float64)[None, :]

    lse = torch.full((num_heads, n), -math.inf, dtype=torch.float64, device=device)
    if sinks is not None and sinks_in_lse:
        lse = (of_heads(sinks) * LOG2E).reshape(-1, 1).expand(num_heads, n)
    if not bool(live.any()):
        out = torch.zeros(n, num_heads, dim_vo, dtype=torch.float64, device=device)
        stats = torch.tensor([-FLT_MAX, 0.0], dtype=torch.float64, device=device).expand(n, num_heads, 2)
        return State(out, lse.T.contiguous(), stats.contiguous(), torch.full_like(lse.T, -math.inf))
    # A key that no row sees may hold anything, NaN included, and 0 * NaN is NaN: it must not take part at all.
    used = mask.any(dim=0)[:, None, None]
    qs = q.transpose(0, 1)  # [Hq, n, Dqk]
    ks, vs = (torch.where(used, x.double(), 0.0).transpose(0, 1) for x in (k, v))  # [Hkv, m, Dqk], [Hkv, m, Dvo]
    if rope is not None:
        qs = rotate(qs, row[:, 0] + (m - n), *rope).to(q.dtype)
        ks = rotate(ks, key[0], *rope).to(q.dtype)
    # The rows of all query heads of a key head stand below each other.
    s = product(qs.reshape(num_kv_heads, -1, dim), ks.transpose(1, 2), arithmetic).reshape(num_heads, n, m)
    s = (s.to(accumulate) * scale.to(accumulate)).to(arithmetic).to(accumulate)
    slopes = of_heads(alibi_slopes(num_heads))
    if alibi == "relative":
        s = s + (slopes * (key - row)).to(accumulate)
    elif alibi == "decode":
        s = s + (slopes * key).to(accumulate)
    if cap:
        s = cap * torch.tanh(s / cap)
    if alibi == "after_cap":
        s = s + (slopes * key).to(accumulate)
    s = s.masked_fill_(~mask, -math.inf)
    top = torch.where(live, s.amax(dim=2), 0.0)  # [Hq, n]
    p = s.sub_(top[..., None]).exp_()
    den = p.sum(dim=2)
    with_sink = den
    if sinks is not None:
        # Fully masked rows keep probability 0 whatever the sink is; `top` is only a common factor elsewhere.
        with_sink = den + torch.exp(of_heads(sinks)[..., 0].to(accumulate) - top)
    weights = p.div_(torch.where(with_sink > 0, with_sink, 1.0)[..., None])
    out = product(weights.reshape(num_kv_heads, -1, m), vs, arithmetic).reshape(num_heads, n, dim_vo)
    out = out.double() * of_heads(out_scale)
    counted = with_sink if sinks_in_lse else den
    lse = torch.where(live, (top + counted.log()).double() * LOG2E, lse)
    unit = math.sqrt(dim) if cap else math.sqrt(dim) * scale[..., 0]
    stats = torch.stack([torch.where(live, top.double() / unit, -FLT_MAX), torch.where(live, den.double(), 0.0)], -1)
    largest = torch.where(live, top.double(), -math.inf)
    return State(*(x.transpose(0, 1).contiguous() for x in (out, lse, stats, largest)))


def selected(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    lengths: list[int] | None = None,
    *,
    sinks: torch.Tensor | None = None,
    head_scale: torch.Tensor | None = None,
    out_scale: torch.Tensor | float = 1.0,
    **options: Any,
) -> State:
    """Rows ``q [n, Hq, Dqk]`` over keys of their own, of ``k [slots, Hkv, Dqk]`` and ``v [slots, Hkv, Dvo]``.

    Row i and key head h see the slots that the first ``lengths[i]`` of ``indices [n, Hkv, K]`` name, each as often as
    it stands there. Other numbers name none. Factors are ``[n, Hq]``, ``options`` those of ``attention``.
    """
    group = q.shape[1] // k.shape[1]
    rows = []
    for i in range(q.shape[0]):
        heads = []
        for h in range(k.shape[1]):
            listed = indices[i, h].tolist()[: None if lengths is None else lengths[i]]
            seen = [slot for slot in listed if 0 <= slot < k.shape[0]]
            mine = slice(h * group, (h + 1) * group)
            given = dict(
                sinks=None if sinks is None else sinks[mine],
                head_scale=None if head_scale is None else head_scale[i, mine],
                out_scale=out_scale[i, mine] if isinstance(out_scale, torch.Tensor) else out_scale,
                **options,
            )
            heads.append(attention(q[i : i + 1, mine], k[seen, h, None], v[seen, h, None], **given))
        rows.append([torch.cat([getattr(x, name) for x in heads], 1) for name in ("out", "lse", "stats", "largest")])
    return State(*(torch.cat([row[at] for row in rows]) for at in range(4)))


def merge(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states along dimension 1: ``v [N, S, H, D]`` and base-2 ``s [N, S, H]``."""
    v, s = v.double(), s.double()
    num, count, heads, dim = v.shape
    out = torch.zeros(num, heads, dim, dtype=torch.float64, device=v.device)
    lse = torch.full((num, heads), -math.inf, dtype=torch.float64, device=v.device)
    if count == 0:
        return out, lse
    top = s.max(dim=1).values
    live = top > -math.inf
    weight = torch.where(s > -math.inf, torch.exp2(s - torch.where(live, top, 0.0)[:, None]), 0.0)
    total = weight.sum(dim=1)
    # A state of weight 0 does not count, whatever its values are.
    terms = torch.where(weight[..., None] > 0, weight[..., None] * v, 0.0)
    out = torch.where(live[..., None], terms.sum(dim=1) / torch.where(live, total, 1.0)[..., None], 0.0)
    lse = torch.where(live, top + torch.log2(torch.where(live, total, 1.0)), -math.inf)
    return out, lse


def gather_pages(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    indptr: list[int],
    indices: list[int],
    last_page_len: list[int],
    kv_layout: str,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each request, token by token, out of 4-D caches in either layout."""
    requests = []
    for b in range(len(indptr) - 1):
        pages = indices[indptr[b] : indptr[b + 1]]
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for number, page in enumerate(pages):
            k_page, v_page = k_cache[page], v_cache[page]
            if kv_layout == "HND":
                k_page, v_page = k_page.transpose(0, 1), v_page.transpose(0, 1)
            filled = last_page_len[b] if number == len(pages) - 1 else k_page.shape[0]
            keys.append(k_page[:filled])
            values.append(v_page[:filled])
        heads = k_cache.shape[2] if kv_layout == "NHD" else k_cache.shape[1]
        if keys:
            requests.append((torch.cat(keys), torch.cat(values)))
        else:
            empty_k = k_cache.new_empty(0, heads, k_cache.shape[-1])
            requests.append((empty_k, v_cache.new_empty(0, heads, v_cache.shape[-1])))
    return requests


def pack_bits(bits: torch.Tensor, bitorder: str) -> torch.Tensor:
    """``numpy.packbits`` in plain Python."""
    values = [bool(x) for x in bits.reshape(-1).cpu().tolist()]
    packed = []
    for start in range(0, len(values), 8):
        byte = 0
        for place, bit in enumerate(values[start : start + 8]):
            if bit:
                byte |= 1 << (place if bitorder == "little" else 7 - place)
        packed.append(byte)
    return torch.tensor(packed, dtype=torch.uint8)
