"""Patterns of blocks: which pages of the keys each block of rows reads, and attention with a pattern per head.

A block of rows of a key head, with all query heads that share it, is a request; or of a query head, where these have
patterns of their own. Queries, keys and the output are views of the caller's tensors: row m of key head h is row
``h * group * rows + m`` of a tensor with ``group`` heads, and page p of a head a view of the keys, whichever of heads
and tokens comes first in memory. Tiles are computed in the order of requests: those of one head, which share keys, run
together and find them in L2.

Lists of pages are made by vectorised torch on the device of the pattern, which reads nothing back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .._attend.plan_free import attention
from .._core import checks, index_vectors
from .._core.autograd import forward_only, wants_grad
from .._core.index_vectors import side_by_side, starts
from .._core.run_options import Options, Result, Shape
from .._core.tracing import is_traced
from .._planned.copying import Part

# So many fill every GPU: keys are not split. Each thread block of a batch that may be split looks at all its requests.
_ENOUGH_REQUESTS = 512
_AT_ONCE = 1 << 24  # places of a list that are computed together: 16 bytes each for as long


@dataclass(frozen=True)
class Blocks:
    """Sizes of blocks. ``rows`` and ``columns`` are int64 ``[num_kv_heads, blocks]``; ``page`` divides all columns."""

    rows: torch.Tensor
    columns: torch.Tensor
    num_rows: int
    num_keys: int
    longest: int  # rows of a block, at most
    page: int
    selected: int | None = None  # columns that blocks of rows see, in all, where the host knows


class PatternOfHeads(Part):
    """A planned pattern, and its runs over queries ``[num_qo_heads, rows, head_dim]`` and keys
    ``[num_kv_heads, keys, head_dim]`` of any strides.

    ``heads_first``: whether keys lie so in memory. Tensors that lie otherwise are copied.
    """

    def __init__(
        self,
        selected: torch.Tensor,
        blocks: Blocks,
        shape: Shape,
        options: Options,
        heads_first: bool,
        backend: str,
        device: torch.device,
    ) -> None:
        self.shape, self.options, self.backend, self.device = shape, options, backend, device
        self.num_rows, self.num_keys = blocks.num_rows, blocks.num_keys
        self.longest, self.page = blocks.longest, blocks.page
        heads, row_blocks, _ = selected.shape
        self.heads, self.row_blocks, self.heads_first = heads, row_blocks, heads_first
        self.group = shape.num_qo_heads // heads
        pages = blocks.num_keys // blocks.page
        room = heads * row_blocks * pages if blocks.selected is None else blocks.selected // blocks.page
        if (
            max(shape.num_qo_heads * blocks.num_rows, room, shape.num_kv_heads * blocks.num_keys)
            > index_vectors.INT32_MAX
        ):
            raise ValueError(
                f"{shape.num_qo_heads} heads with {row_blocks} blocks of rows and {pages} pages of {blocks.page} keys "
                "make lists of more pages than int32 counts: use larger blocks, or fewer heads per call."
            )
        self.kv_indptr, self.kv_indices = _lists_of_heads(
            selected,
            (blocks.columns // blocks.page).to(device, non_blocking=True),
            pages,
            shape.num_kv_heads,
            (pages, 1) if heads_first else (1, blocks.page * shape.num_kv_heads),
            room,
        )
        # Where each block of rows begins; seqused_q tells its rows, as other heads lie between those of two requests.
        rows = blocks.rows.to(device, non_blocking=True)
        begins = rows.cumsum(1) - rows
        begins += torch.arange(heads, device=device)[:, None] * (self.group * blocks.num_rows)
        self.qo_indptr = torch.full((rows.numel() + 1,), self.total_rows, dtype=torch.int32, device=device)
        self.qo_indptr[:-1] = begins.flatten()
        self.rows = rows.flatten().to(torch.int32)
        self.last_page_len = torch.full((rows.numel(),), blocks.page, dtype=torch.int32, device=device)

    @property
    def total_rows(self) -> int:
        """Rows of the view of queries: up to the last one of the last request."""
        return ((self.heads - 1) * self.group + 1) * self.num_rows

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """ValueError where a tensor ``[heads, tokens, head_dim]`` is not as planned."""
        shape = self.shape
        sizes = (
            ("q", q, shape.q_dtype, shape.num_qo_heads, self.num_rows),
            ("k", k, shape.kv_dtype, shape.num_kv_heads, self.num_keys),
            ("v", v, shape.kv_dtype, shape.num_kv_heads, self.num_keys),
        )
        for name, x, dtype, heads, tokens in sizes:
            if x.dtype != dtype:
                kind = "q_data_type" if name == "q" else "kv_data_type"
                raise ValueError(f"{name} has dtype {x.dtype}, but the plan {dtype}: pass {kind}={x.dtype} to plan().")
            if tuple(x.shape) != (heads, tokens, shape.head_dim_qk):
                raise ValueError(
                    f"{name} has {x.size(0)} heads, {x.size(1)} tokens and head_dim {x.size(2)}, but the plan has "
                    f"{heads}, {tokens} and {shape.head_dim_qk}: it must be "
                    f"{'[heads, tokens, head_dim]' if self.heads_first else '[tokens, heads, head_dim]'}."
                )
        checks.same_device(self.device, "the workspace of this wrapper is", q=q, k=k, v=v)

    def run(
        self,
        options: Options,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scales: tuple[Any, Any, Any] = (None, None, None),
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Result:
        """What a wrapper's ``run()`` returns, of tensors with heads and tokens in the order that was planned.

        Runs without autograd: ``out`` is written to through a view. The results have a backward that raises.
        """
        inputs = (q, k, v, *scales, out, lse)
        given = [checks.tensor(name, x, 3) for name, x in (("q", q), ("k", k), ("v", v))]
        self._check(*(x if self.heads_first else x.transpose(0, 1) for x in given))
        if out is None and not self.heads_first:
            # Like q in memory, so that where q need not be copied, the output need not either.
            out = torch.empty_like(q, dtype=self.shape.o_dtype)
        out = checks.output(out, q.shape, self.shape.o_dtype, q.device)
        wants_lse = return_lse or lse is not None
        if wants_lse:
            lse = checks.lse_output(lse, q.shape[:2], q.device)
        if is_traced() or not wants_grad(*inputs):
            self._compute(options, q, k, v, scales, out, lse)
            return (out, lse) if return_lse else out
        with torch.no_grad():
            self._compute(options, q, k, v, scales, out, lse)
        return forward_only((out, lse) if return_lse else out, (out, lse), *inputs)

    def _compute(
        self,
        options: Options,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scales: tuple[Any, Any, Any],
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Writes the output, and the LSE where it is not None."""
        shape = self.shape
        if self.num_rows == 0:
            return
        if not self.heads_first:
            q, k, v, out = (x.transpose(0, 1) for x in (q, k, v, out))
        # torch.compile would have to prove that what is written to a view of overlapping rows reaches its base.
        place = None if is_traced() else self._rows(out)
        rows_of_q = self._rows(q)
        if rows_of_q is None:
            rows_of_q = self._rows(q.contiguous())
            assert rows_of_q is not None
        scale_q, scale_k, scale_v = scales
        result: Any = attention(
            rows_of_q,
            self._pages(k),
            self._pages(v),
            cu_seqlens_q=self.qo_indptr,
            seqused_q=self.rows,
            max_seqlen_q=max(self.longest, 1),
            max_seqlen_k=self.num_keys,
            kv_indptr=self.kv_indptr,
            kv_indices=self.kv_indices,
            kv_last_page_len=self.last_page_len,
            causal=options.causal,
            logits_soft_cap=options.logits_soft_cap,
            sm_scale=checks.sm_scale(options.sm_scale, shape.head_dim_qk),
            q_descale=self._scale("scale_q", scale_q, shape.num_qo_heads),
            k_descale=self._scale("scale_k", scale_k, shape.num_kv_heads),
            v_descale=self._scale("scale_v", scale_v, shape.num_kv_heads),
            o_dtype=shape.o_dtype,
            out=place,
            return_lse=lse is not None,
            num_splits=1 if self.rows.numel() >= _ENOUGH_REQUESTS else 0,
            backend=self.backend,
        )
        if place is None:
            out.copy_(self._heads_of(result if lse is None else result[0]))
        if lse is not None:
            found = self._heads_of(result[1].unsqueeze(-1)).squeeze(-1)
            lse.copy_(found if self.heads_first else found.t())

    def _rows(self, x: torch.Tensor) -> torch.Tensor | None:
        """``[num_qo_heads, rows, dim]`` as ``[total_rows, group, dim]``; None where strides do not allow that."""
        token = x.stride(1) if self.num_rows > 1 else x.stride(0)
        if x.size(0) > 1 and x.stride(0) != self.num_rows * token:
            return None
        return x.as_strided((self.total_rows, self.group, x.size(2)), (token, self.num_rows * token, x.stride(2)))

    def _heads_of(self, rows: torch.Tensor) -> torch.Tensor:
        """``[total_rows, group, dim]``, contiguous, as ``[num_qo_heads, rows, dim]``."""
        dim = rows.size(2)
        shape = (self.heads, self.group, self.num_rows, dim)
        strides = (self.group * self.num_rows * self.group * dim, dim, self.group * dim, 1)
        return rows.as_strided(shape, strides).flatten(0, 1)

    def _pages(self, x: torch.Tensor) -> torch.Tensor:
        """``[heads, keys, dim]`` as pages ``[pages, page, 1, dim]``, numbered as in the lists."""
        heads, keys, dim = x.shape
        if keys == 0:
            return x.new_zeros((1, self.page, 1, dim))
        if self.heads_first:
            return x.flatten(0, 1).unflatten(0, (-1, self.page)).unsqueeze(2)
        if heads > 1 and x.stride(1) != heads * x.stride(0):
            x = x.transpose(0, 1).contiguous().transpose(0, 1)
        token = x.stride(1)
        step = x.stride(0) if heads > 1 else token
        count = (keys - self.page) * heads + heads
        return x.as_strided((count, self.page, 1, dim), (step, token, token, x.stride(2)))

    def _scale(self, name: str, value: Any, heads: int) -> Any:
        """A scale per tensor, or one per request and head from one per head."""
        if not isinstance(value, torch.Tensor) or value.numel() == 1:
            return value
        each = checks.per_head(name, value, heads, max(self.heads // heads, 1), self.device)
        assert isinstance(each, torch.Tensor)
        return each.view(self.heads, -1).repeat_interleave(self.row_blocks, 0, output_size=self.rows.numel())


def uniform_blocks(heads: int, rows: int, keys: int, block_rows: int, block_columns: int) -> Blocks:
    """Blocks of equal sizes; the last ones may be shorter."""
    row_sizes = row_offsets(rows, block_rows).diff().to(torch.int64)
    column_sizes = row_offsets(keys, block_columns).diff().to(torch.int64)
    sizes = (row_sizes.expand(heads, -1), column_sizes.expand(heads, -1))
    return Blocks(*sizes, rows, keys, min(block_rows, rows), page_of(keys, block_columns))


def blocks_of_sizes(selected: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> Blocks:
    """Blocks of sizes ``[heads, blocks]``. Sizes on the GPU are read back in one copy, which waits for it.

    ValueError for negative sizes, or heads of other numbers of rows or keys than the first.
    """
    rows, columns = rows.to(torch.int64), columns.to(torch.int64)
    if rows.device != columns.device:
        rows, columns = rows.to(selected.device), columns.to(selected.device)
    lowest_bits = torch.where(columns > 0, columns & -columns, 1 << 30)
    facts = [rows.sum(1), columns.sum(1), lowest_bits.amin(1), rows.amax(1), rows.amin(1), columns.amin(1)]
    if selected.device == columns.device:
        facts.append((selected * columns[:, None]).sum((1, 2)))
    sums = torch.stack(facts).tolist()
    num_rows, num_keys, pages, longest, least_row, least_column = sums[:6]
    for name, least in (("block_row_sz", least_row), ("block_col_sz", least_column)):
        if min(least) < 0:
            raise ValueError(f"{name} holds {min(least)}: sizes of blocks must not be negative.")
    for name, what, total in (("block_row_sz", "rows", num_rows), ("block_col_sz", "keys", num_keys)):
        if min(total) != max(total):
            at = next(i for i, x in enumerate(total) if x != total[0])
            raise ValueError(
                f"{name} makes {total[0]} {what} of head 0, but {total[at]} of head {at}: all heads must have as many."
            )
    known = sum(sums[6]) if len(sums) > 6 else None
    page = math.gcd(min(pages), num_keys[0]) if num_keys[0] else 1
    return Blocks(rows, columns, num_rows[0], num_keys[0], max(longest), page, known)


# --- lists of pages ----------------------------------------------------------------------------------------------


def page_of(keys: int, block: int) -> int:
    """Tokens of a page: those of a block; if the last block is shorter, the largest power of two that divides both."""
    common = math.gcd(block, keys % block)
    return common & -common if keys % block else block


def row_offsets(rows: int, block: int) -> torch.Tensor:
    """Where blocks of ``block`` rows begin, int32 ``[blocks + 1]`` on the CPU; the last block may be shorter."""
    return (torch.arange(-(-rows // block) + 1, dtype=torch.int32, device="cpu") * block).clamp_(max=rows)


def of_shorter_last_block(
    indptr: torch.Tensor, indices: torch.Tensor, blocks: int, pages: int, pages_of_last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A list of blocks of ``pages`` pages, of which block ``blocks - 1`` has fewer, as a list of pages.

    Returns the new offsets and page numbers, int32. The list has room for whole blocks: what lies behind its end
    is 0.
    """
    count = torch.where(indices == blocks - 1, pages_of_last, pages)
    page = torch.arange(pages, dtype=torch.int32, device=indices.device)
    numbers = indices[:, None].to(torch.int32) * pages + page
    return starts(count)[indptr.to(torch.int64)].to(torch.int32), side_by_side(numbers, count)


def mask_by_request(mask: torch.Tensor, indptr: torch.Tensor, widths: torch.Tensor | None = None) -> torch.Tensor:
    """Masks of blocks ``[nnz, R, C]`` as masks of requests: row-major ``[R, keys]`` each, flattened and concatenated.
    Those of entries in front of ``indptr[0]`` and from ``indptr[-1]`` on come last.

    ``widths`` ``[nnz]`` are the columns of each block that count; None: all. With widths, the size of the result
    depends on data, so that a mask on the GPU waits for it.
    """
    count, rows, columns = mask.shape
    begins = torch.cat([indptr.to(device=mask.device, dtype=torch.int64), indptr.new_full((1,), count).to(mask.device)])
    first = begins[0].clone()
    begins[:-1] -= first
    entry = (torch.arange(count, device=mask.device) - first) % max(count, 1)
    request = torch.searchsorted(begins, entry, right=True) - 1  # of a slice, Inductor does not compile it
    begin, end = begins[:-1][request], begins[1:][request]
    row = torch.arange(rows, device=mask.device)
    place = (begin * rows + entry - begin)[:, None] + row * (end - begin)[:, None]
    result = torch.empty_like(mask, memory_format=torch.contiguous_format).view(count * rows, columns)
    result[place.flatten()] = mask.reshape(count * rows, columns)
    if widths is None:
        return result.flatten()
    kept = torch.empty_like(place.flatten())
    kept[place.flatten()] = widths.to(torch.int64).repeat_interleave(rows, output_size=count * rows)
    return result[torch.arange(columns, device=mask.device) < kept[:, None]]


def _lists_of_heads(
    selected: torch.Tensor,
    pages_of_blocks: torch.Tensor,
    pages: int,
    num_kv_heads: int,
    steps: tuple[int, int],
    room: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists of a pattern per head, whose requests are (head, block of rows).

    Args:
        selected: bool ``[heads, row blocks, column blocks]``. Heads are the key heads, or more of which several in turn
            share a key head.
        pages_of_blocks: int64 ``[heads, column blocks]``, how many pages a block of columns has.
        pages: pages of a head, the sum of every row of ``pages_of_blocks``.
        num_kv_heads: key heads.
        steps: page p of key head h is numbered ``h * steps[0] + p * steps[1]``.
        room: entries of the list, no fewer than there are.

    Returns:
        Offsets ``[heads * row blocks + 1]`` and page numbers ``[room]``, int32; 0 behind the last request.
    """
    heads, row_blocks, _ = selected.shape
    device, share = selected.device, heads // num_kv_heads
    counts = (selected * pages_of_blocks[:, None]).sum(-1)
    offsets = starts(counts.flatten())
    result = torch.zeros(room + 1, dtype=torch.int32, device=device)
    page = torch.arange(pages, device=device)
    block = torch.searchsorted(pages_of_blocks.cumsum(1), page.expand(heads, pages).contiguous(), right=True)
    step = max(_AT_ONCE // max(row_blocks * pages, 1), 1)
    for begin in range(0, heads if room else 0, step):
        end = min(begin + step, heads)
        shape = (end - begin, row_blocks, pages)
        chosen = selected[begin:end].gather(2, block[begin:end, None].expand(shape)).flatten()
        place = chosen.cumsum(0) + (offsets[begin * row_blocks] - 1)
        key_head = torch.arange(begin, end, device=device) // share
        numbers = (key_head * steps[0])[:, None, None] + page * steps[1]
        result.scatter_(0, torch.where(chosen, place, room), numbers.to(torch.int32).expand(shape).flatten())
    return offsets.to(torch.int32), result[:-1]
