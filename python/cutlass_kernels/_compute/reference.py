"""The attention contract in PyTorch, for any device.

Works request by request and block by block with the online softmax of Milakov and Gimelshein ("Online normalizer
calculation for softmax", 2018), so that memory does not grow with qo_len x kv_len. Arithmetic is fp32 (fp64 where the
inputs are). A block of query rows has its group of heads folded into the rows, so keys and values are never expanded:

    scores  [num_kv_heads, group, rows, keys]   logits, in a unit that makes large ones exact where it can
    totals  [num_kv_heads, group, rows]         running maximum and denominator
    acc     [num_kv_heads, group * rows, head_dim_vo]

Lengths are read on the host: on a CUDA device this synchronises.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from .._core.autograd import without_autocast
from .._core.problems import FP8_DTYPES, HALF_DTYPES, Mask, PagedKv, Problem, RaggedKv

LOG2E = 1.4426950408889634
_ROWS = 128  # query rows of a block, at most
_CPU_TILE = 1 << 20  # elements of a tile of scores, or of keys: 4 MB in fp32, which CPU caches like
_GPU_TILE = 1 << 24  # 64 MB: few, large launches
_MASK_BITS = 1 << 25  # elements of a custom or multi-item mask in memory at a time


@dataclass(slots=True)
class _Request:
    """One request of a batch: its rows, its keys and what its mask needs."""

    index: int
    row0: int  # of its queries in q and out
    qo_len: int
    kv_len: int
    kv0: int  # first token (ragged) or first entry of the page table (paged)

    @property
    def offset(self) -> int:
        """Absolute position of the first query row: the last row stands at the last key."""
        return self.kv_len - self.qo_len


@without_autocast
@torch.no_grad()
def compute(problem: Problem) -> None:
    """Computes ``problem`` into its output tensors."""
    state = _State(problem)
    for request in _requests(problem):
        rows = state.block_rows(request)
        for first in range(0, request.qo_len, rows):
            state.block(request, first, min(first + rows, request.qo_len))


def _requests(problem: Problem) -> list[_Request]:
    kv = problem.kv
    qo = [0, problem.q.size(0)] if problem.qo_indptr is None else problem.qo_indptr.tolist()
    starts = [0, kv.k.size(0)] if kv.indptr is None else kv.indptr.tolist()
    lens = [end - begin for begin, end in pairwise(starts)]
    if isinstance(kv, PagedKv):
        page_size, last = kv.k_cache.size(1), kv.last_page_len.tolist()
        lens = [(pages - 1) * page_size + filled if pages > 0 else 0 for pages, filled in zip(lens, last)]
    return [_Request(b, qo[b], qo[b + 1] - qo[b], lens[b], starts[b]) for b in range(len(qo) - 1)]


class _State:
    """What all blocks of a problem share."""

    def __init__(self, problem: Problem) -> None:
        q, logits = problem.q, problem.logits
        self.problem = problem
        self.device = q.device
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.num_qo_heads = q.size(1)
        self.keys = _KeyReader(problem.kv, self.device, self.dtype)
        self.group = self.num_qo_heads // self.keys.num_heads
        self.tile = _CPU_TILE if self.device.type == "cpu" else _GPU_TILE
        self.rope = None if logits.rope is None else _Rope(*logits.rope, q, self.device)
        self.mask_args = _MaskArgs(problem.mask, self.device)
        # Per-head parameters as [num_kv_heads, group, 1, 1], to broadcast over rows and keys.
        self.sm_scale = self._scalar(logits.sm_scale)
        if logits.head_scale is not None:
            self.sm_scale = self._per_head(logits.head_scale) * self.sm_scale
        self.alibi = None if logits.alibi is None else self._per_head(logits.alibi)
        # Logits are factor * q . k + ... in a unit > 0. As they are where something is added to them or caps them; else
        # q . k itself: a product of 1e5 would be rounded to a multiple of 0.008, and weights by 0.4 %.
        self.factor: float | torch.Tensor = self.sm_scale
        self.unit: float | torch.Tensor = 1.0
        if self.alibi is None and logits.soft_cap <= 0.0:
            self.factor, self.unit = _sign_and_size(self.sm_scale)
        self.row_unit = self.unit.squeeze(-1) if isinstance(self.unit, torch.Tensor) else self.unit  # of totals
        self.sinks = None if logits.sinks is None else self._per_head(logits.sinks).squeeze(-1).double()
        self.out_scale = self._scalar(problem.output.scale)
        if isinstance(self.out_scale, torch.Tensor) and self.out_scale.numel() > 1:
            self.out_scale = self.out_scale.view(-1, 1)  # [num_qo_heads, 1]

    def _scalar(self, value: float | torch.Tensor) -> float | torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(device=self.device, dtype=self.dtype).reshape(-1)
        return value

    def _per_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(device=self.device, dtype=self.dtype).view(self.keys.num_heads, self.group, 1, 1)

    def block_rows(self, request: _Request) -> int:
        rows = min(_ROWS, max(request.qo_len, 1), max(1, self.tile // (self.num_qo_heads * 64)))
        if not self.mask_args.plain:
            rows = max(1, min(rows, _MASK_BITS // max(request.kv_len, 1)))
        return rows

    def block(self, request: _Request, first: int, last: int) -> None:
        """Computes the rows [first, last) of a request."""
        problem, heads, group, rows = self.problem, self.keys.num_heads, self.group, last - first
        q = problem.q[request.row0 + first : request.row0 + last].to(self.dtype)
        if self.rope is not None:
            q = self.rope(q, request.offset + first)
        q = q.unflatten(1, (heads, group)).permute(1, 2, 0, 3).reshape(heads, group * rows, -1)

        mask = _BlockMask(self.mask_args, request, first, last)
        maximum = torch.full((heads, group, rows), -math.inf, dtype=self.dtype, device=self.device)
        total = torch.zeros_like(maximum)
        acc = torch.zeros((heads, group * rows, self.keys.head_dim_vo), dtype=self.dtype, device=self.device)
        step = max(64, self.tile // max(self.num_qo_heads * rows, heads * problem.q.size(2)))
        for begin in range(mask.begin, mask.end, step):
            end = min(begin + step, mask.end)
            visible = mask.tile(begin, end)
            k, v = self.keys.read(request, begin, end)
            if self.rope is not None:
                k = self.rope(k, begin)
            scores = torch.matmul(q, k.permute(1, 2, 0)).view(heads, group, rows, end - begin)
            self._transform(scores, first, begin)
            if visible is not None:
                scores.masked_fill_(~visible, -math.inf)
            hidden = self.keys.hidden(request, begin, end)
            if hidden is not None:
                scores.masked_fill_(hidden, -math.inf)
            new_maximum = torch.maximum(maximum, scores.amax(-1))
            shift = new_maximum.masked_fill(new_maximum == -math.inf, 0.0)  # -inf - -inf would be NaN
            _multiply(scores.sub_(shift.unsqueeze(-1)), self.unit).exp_()
            decay = torch.exp((maximum - shift) * self.row_unit)
            total.mul_(decay).add_(scores.sum(-1))
            acc.mul_(decay.view(heads, group * rows, 1))
            acc.add_(_weighted_values(scores, v, visible))
            maximum = new_maximum
        self._store(request.row0 + first, maximum, total, acc)

    def _transform(self, scores: torch.Tensor, first_row: int, first_key: int) -> None:
        """Turns q . k into logits in their unit, in place."""
        logits = self.problem.logits
        _multiply(scores, self.factor)
        bias = None if self.alibi is None else self.alibi * self._distance(scores, first_row, first_key)
        if bias is not None and not logits.alibi_after_cap:
            scores.add_(bias)
        if logits.soft_cap > 0.0:
            scores.div_(logits.soft_cap).tanh_().mul_(logits.soft_cap)
        if bias is not None and logits.alibi_after_cap:
            scores.add_(bias)

    def _distance(self, scores: torch.Tensor, first_row: int, first_key: int) -> torch.Tensor:
        """What ALiBi slopes multiply: ``key - row`` [rows, keys], or ``key`` [keys]."""
        rows, keys = scores.shape[-2:]
        key = torch.arange(first_key, first_key + keys, device=self.device, dtype=self.dtype)
        if not self.problem.logits.alibi_relative:
            return key
        return key - torch.arange(first_row, first_row + rows, device=self.device, dtype=self.dtype)[:, None]

    def _store(self, row0: int, maximum: torch.Tensor, total: torch.Tensor, acc: torch.Tensor) -> None:
        """Normalises a block and writes output, LSE and statistics. ``maximum``, ``total``: [heads, group, rows]."""
        output = self.problem.output
        rows = maximum.size(-1)
        maximum, total = maximum.double() * self.row_unit, total.double()
        if output.stats is not None:
            self._store_stats(output.stats[row0 : row0 + rows], maximum, total)
        if output.max_logits is not None:
            output.max_logits[row0 : row0 + rows].copy_(maximum.permute(2, 0, 1).flatten(1, 2))
        acc = acc.view(*maximum.shape, -1)
        seen, of_keys = total != 0, (maximum, total)
        if self.sinks is not None:
            with_sink = torch.maximum(maximum, self.sinks)
            shift = with_sink.masked_fill(with_sink == -math.inf, 0.0)
            decay = torch.exp(maximum - shift)
            total = total * decay + torch.exp(self.sinks - shift).nan_to_num(1.0)  # a sink of inf takes all: inf - inf
            acc = acc * decay.unsqueeze(-1).to(self.dtype)
            maximum = with_sink
        result = torch.where(seen.unsqueeze(-1), acc / total.unsqueeze(-1).to(self.dtype), 0.0)
        result = result.permute(2, 0, 1, 3).flatten(1, 2) * self.out_scale  # [rows, num_qo_heads, head_dim_vo]
        if output.out.dtype in FP8_DTYPES:
            limit = torch.finfo(output.out.dtype).max
            result = result.clamp(-limit, limit)
        output.out[row0 : row0 + rows].copy_(result)
        if output.lse is not None:
            maximum, total = (maximum, total) if output.sinks_in_lse else of_keys
            lse = torch.log2(total).add_(maximum * LOG2E)
            lse = lse.masked_fill(total == 0, -math.inf)
            output.lse[row0 : row0 + rows].copy_(lse.permute(2, 0, 1).flatten(1, 2))

    def _store_stats(self, stats: torch.Tensor, maximum: torch.Tensor, total: torch.Tensor) -> None:
        """Row maximum before the scale (after the cap, if any) over sqrt(head_dim_qk), and sum of exponents."""
        raw = maximum.unsqueeze(-1)
        if self.problem.logits.soft_cap <= 0.0:
            raw = raw / self.sm_scale
        raw = raw / math.sqrt(self.problem.q.size(-1))
        total = total.unsqueeze(-1)
        both = torch.cat([raw.masked_fill(total == 0, torch.finfo(torch.float32).min), total], -1)
        stats.copy_(both.permute(2, 0, 1, 3).flatten(1, 2))


def _multiply(x: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    """``x * factor`` in place; a factor that is known to be 1 costs nothing."""
    return x if isinstance(factor, float) and factor == 1.0 else x.mul_(factor)


def _sign_and_size(scale: float | torch.Tensor) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """``scale`` as a sign and a positive number. 0 has the sign 0 and the size 1: 0 times a masked logit is NaN."""
    if isinstance(scale, torch.Tensor):
        return torch.sign(scale), torch.where(scale == 0.0, 1.0, scale.abs())
    return (math.copysign(1.0, scale), abs(scale)) if scale != 0.0 else (0.0, 1.0)


def _weighted_values(weights: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """``weights @ v`` without what invisible values hold: their weight is 0, but 0 * NaN is NaN.

    ``weights`` [heads, group, rows, keys], ``v`` [keys, heads, dim], ``visible`` [rows, keys] or None (all);
    returns [heads, group * rows, dim].
    """
    heads, group, rows, _ = weights.shape
    flat = weights.flatten(1, 2)
    values = v.transpose(0, 1)
    result = torch.matmul(flat, values)
    if visible is None or bool(torch.isfinite(result.sum())):
        return result
    bad = ~torch.isfinite(values)
    clean = torch.matmul(flat, values.masked_fill(bad, 0.0))
    reached = torch.matmul(visible.to(weights.dtype), bad.to(weights.dtype)) > 0  # [heads, rows, dim]
    reached = reached.unsqueeze(1).expand(heads, group, rows, -1).flatten(1, 2)
    return torch.where(reached, result, clean)


# --- keys and values ---------------------------------------------------------------------------------------------


class _KeyReader:
    """Reads keys and values of a request as ``[tokens, num_kv_heads, dim]`` in the arithmetic dtype."""

    def __init__(self, kv: RaggedKv | PagedKv, device: torch.device, dtype: torch.dtype) -> None:
        self.kv, self.dtype = kv, dtype
        if isinstance(kv, PagedKv):
            self.num_heads, self.head_dim_vo = kv.k_cache.size(2), kv.v_cache.size(3)
            self.k_pages = kv.indices.to(device=device, dtype=torch.int64)
            self.v_pages = self.k_pages
            if kv.v_indices is not None:
                self.v_pages = kv.v_indices.to(device=device, dtype=torch.int64)
        else:
            self.num_heads, self.head_dim_vo = kv.k.size(1), kv.v.size(2)

    def read(self, request: _Request, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.kv
        if isinstance(kv, RaggedKv):
            tokens = slice(request.kv0 + begin, request.kv0 + end)
            return kv.k[tokens].to(self.dtype), kv.v[tokens].to(self.dtype)
        page_size = kv.k_cache.size(1)
        first, last = begin // page_size, (end - 1) // page_size + 1
        pages = slice(request.kv0 + first, request.kv0 + last)
        tokens = slice(begin - first * page_size, end - first * page_size)
        k = gather(kv.k_cache, self.k_pages[pages]).flatten(0, 1)[tokens]
        v = gather(kv.v_cache, self.v_pages[pages]).flatten(0, 1)[tokens]
        return k.to(self.dtype), v.to(self.dtype)

    def hidden(self, request: _Request, begin: int, end: int) -> torch.Tensor | None:
        """Which keys no row sees, ``[num_kv_heads, 1, 1, keys]``; None where there are none."""
        if not isinstance(self.kv, RaggedKv) or self.kv.hidden is None:
            return None
        return self.kv.hidden[request.kv0 + begin : request.kv0 + end].t()[:, None, None]


def gather(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The pages with these numbers; zeros for those that are none of the cache's."""
    if not cache.size(0):
        return cache.new_zeros((pages.numel(), *cache.shape[1:]))
    outside = ((pages < 0) | (pages >= cache.size(0))).view(-1, *[1] * (cache.dim() - 1))
    elements = cache.view(torch.uint8) if cache.dtype in FP8_DTYPES else cache  # copying needs no arithmetic
    found = elements[pages.clamp(0, cache.size(0) - 1)].masked_fill_(outside, 0)
    return found.view(cache.dtype)


class _Rope:
    """Rotary embedding in halves: elements d and d + dim/2 turn by ``position * theta^(-2d/dim) / scale``.

    (Su et al., "RoFormer", 2021, in the pairing of GPT-NeoX and Llama.) Angles are fp64. Results are rounded to the
    dtype of the queries where that has 16 bits, as tensor cores would need it.
    """

    def __init__(self, scale: float, theta: float, q: torch.Tensor, device: torch.device) -> None:
        self.dim, self.device = q.size(-1), device
        self.rounded = q.dtype if q.dtype in HALF_DTYPES else None
        d = torch.arange(0, self.dim, 2, dtype=torch.float64, device=device)
        self.frequency = theta ** (-d / self.dim) / scale

    def __call__(self, x: torch.Tensor, first_position: int) -> torch.Tensor:
        positions = torch.arange(first_position, first_position + x.size(0), dtype=torch.float64, device=self.device)
        angle = (positions[:, None] * self.frequency)[:, None, :]  # [tokens, 1, dim / 2]
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        low, high = x.chunk(2, -1)
        y = torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
        return y if self.rounded is None else y.to(self.rounded).to(x.dtype)


# --- masks -------------------------------------------------------------------------------------------------------


class _MaskArgs:
    """A mask with its small tensors read to the host, once per problem."""

    def __init__(self, mask: Mask, device: torch.device) -> None:
        self.device, self.window_left, self.chunk_size = device, mask.window_left, mask.chunk_size
        self.multi_item = items = mask.multi_item
        self.bits = mask.bits if items is None else None
        is_causal = items is not None or (mask.causal and self.bits is None)
        self.window_right = 0 if is_causal else mask.window_right
        if items is not None:
            self.prefix_len = items.prefix_len.to(torch.int64).tolist()
            self.token_pos = items.token_pos.to(device=device, dtype=torch.int64).reshape(-1)
        if self.bits is not None:
            self.bits_indptr = [0] if mask.bits_indptr is None else mask.bits_indptr.tolist()

    @property
    def plain(self) -> bool:
        """Whether visibility is an interval of keys."""
        return self.bits is None and self.multi_item is None

    def lower_bound(self, position: int) -> int:
        """The first key that a row at ``position`` may see."""
        bound = 0
        if self.window_left >= 0:
            bound = max(bound, position - self.window_left)
        if self.chunk_size > 0:
            bound = max(bound, position // self.chunk_size * self.chunk_size)
        return bound

    def upper_bound(self, position: int, kv_len: int) -> int:
        """The key behind the last that a row at ``position`` may see. Both bounds grow with the position."""
        bound = kv_len
        if self.window_right >= 0:
            bound = min(bound, position + self.window_right + 1)
        if self.chunk_size > 0:
            bound = min(bound, (position // self.chunk_size + 1) * self.chunk_size)
        return max(0, bound)


class _BlockMask:
    """The mask of the rows [first, last) of a request. No row sees a key outside [begin, end)."""

    def __init__(self, args: _MaskArgs, request: _Request, first: int, last: int) -> None:
        self.args = args
        self.first_position, self.last_position = first + request.offset, last - 1 + request.offset
        self.kv_len = request.kv_len
        self.begin = args.lower_bound(self.first_position)
        self.end = args.upper_bound(self.last_position, request.kv_len)
        self.custom: torch.Tensor | None = None
        if self.begin >= self.end:
            return
        if args.bits is not None:
            self.custom = _unpack_rows(args.bits, args.bits_indptr[request.index], request.kv_len, first, last)
            self.custom = self.custom.to(args.device)
        elif args.multi_item is not None:
            self.custom = self._multi_item(request.index)

    def tile(self, begin: int, end: int) -> torch.Tensor | None:
        """Visibility ``[rows, end - begin]`` of the keys [begin, end), or None where every row sees all of them."""
        args = self.args
        below = begin < args.lower_bound(self.last_position)
        above = end > args.upper_bound(self.first_position, self.kv_len)
        visible = None if self.custom is None else self.custom[:, begin:end]
        if not below and not above:
            return visible
        keys = torch.arange(begin, end, device=args.device)
        position = torch.arange(self.first_position, self.last_position + 1, device=args.device)[:, None]
        if above and args.window_right >= 0:
            visible = _both(visible, keys <= position + args.window_right)
        if below and args.window_left >= 0:
            visible = _both(visible, keys >= position - args.window_left)
        if args.chunk_size > 0:
            first = torch.div(position, args.chunk_size, rounding_mode="floor") * args.chunk_size
            visible = _both(visible, (keys >= first) & (keys < first + args.chunk_size))
        return visible

    def _multi_item(self, index: int) -> torch.Tensor:
        """Prefix rows are causal; a row of an item sees the prefix and its own item up to itself."""
        args = self.args
        assert args.multi_item is not None
        prefix, length = args.prefix_len[index], args.multi_item.token_pos_len
        position = torch.arange(self.first_position, self.last_position + 1, device=args.device)
        entry = position - prefix
        if self.last_position - prefix >= length:
            raise ValueError(
                f"token_pos_in_items has {length} entries for request {index}, but its last row is number "
                f"{self.last_position - prefix} behind a prefix of {prefix}: pad token_pos_in_items."
            )
        token_pos = args.token_pos[index * length : (index + 1) * length]
        back = torch.arange(1, length + 1, device=args.device)  # causal, where the tensor has ended
        back[: token_pos.numel()] = token_pos
        back = back[entry.clamp(min=0)] if length > 0 else torch.zeros_like(position)
        keys = torch.arange(self.kv_len, device=args.device)
        return (entry < 0)[:, None] | (keys < prefix) | (keys > (position - back)[:, None])


def _both(a: torch.Tensor | None, b: torch.Tensor) -> torch.Tensor:
    return b if a is None else a & b


def _unpack_rows(bits: torch.Tensor, start: int, kv_len: int, first: int, last: int) -> torch.Tensor:
    """The rows [first, last) of the ``[qo_len, kv_len]`` mask packed from byte ``start`` on."""
    begin, end = first * kv_len, last * kv_len
    data = bits[start + begin // 8 : start + (end + 7) // 8]
    if data.numel() < (end + 7) // 8 - begin // 8:
        raise ValueError(
            f"the packed mask has {bits.numel()} bytes, but a request reads up to byte {start + end // 8}."
        )
    lanes = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = torch.bitwise_right_shift(data[:, None], lanes).bitwise_and_(1).view(torch.bool).view(-1)
    return flat[begin % 8 : begin % 8 + end - begin].view(last - first, kv_len)
