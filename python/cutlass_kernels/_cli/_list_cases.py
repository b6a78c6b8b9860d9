"""Problems that ``check`` computes twice of latent kernels that read keys by slots: rows that list tokens of a latent
cache of 16 bits or quantized, and of a second one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._attend.plan_free import attention
from .._caches import latent_formats
from .comparison import plain_attention

Pair = tuple[torch.Tensor, torch.Tensor]  # output, LSE

# Of kernels, by their type of keys.
_FORMATS = {
    "latent_v32": "v3.2",
    "latent_v32_nope": "v3.2_nope",
    "latent_v4": "v4",
    "latent_v41_by_page": "v4.1_pages",
    "latent_v41_by_token": "v4.1_tokens",
}
_PAGES, _PAGE_SIZE = 5, 64  # of a cache
_SLOTS = _PAGES * _PAGE_SIZE


@dataclass(frozen=True)
class Case:
    """Rows, heads, and how many entries a row's list has. Some entries are no slots."""

    name: str
    rows: int
    heads: int
    width: int
    extra: int = 0  # entries of a second list, of another cache of the same format
    lengths: bool = False  # whether fewer entries of both lists count, in each row another number
    narrow: bool = False  # keys of 512 columns, all of them values, in kernels of 576
    sinks: bool = False
    no_slots: bool = False  # no entry is a slot
    quick: bool = False


CASES = (
    Case("lists, 16 heads", 9, 16, 100, quick=True),
    Case("lists, 7 heads, one row", 1, 7, 2048),
    Case("lists, 64 heads", 5, 64, 1000, lengths=True, quick=True),
    Case("lists, 128 heads, sinks", 3, 128, 300, sinks=True, quick=True),
    Case("lists, many rows", 300, 24, 65, lengths=True),
    Case("lists without slots", 4, 64, 70, no_slots=True),
    Case("lists of 512 columns", 20, 16, 300, lengths=True, narrow=True, quick=True),
    Case("lists of 512 columns, 128 heads", 3, 128, 500, sinks=True, narrow=True),
    Case("two lists", 5, 16, 70, extra=130, quick=True),
    Case("two lists, 128 heads, sinks", 70, 128, 128, extra=65, lengths=True, sinks=True),
)


@dataclass
class Inputs:
    """Tensors of a case."""

    q: torch.Tensor  # [rows, heads, columns]
    caches: list[torch.Tensor]
    numbers: list[torch.Tensor]  # that their slots stand for, [slots, 1, columns]
    lists: list[torch.Tensor]  # [rows, 1, width]
    lengths: list[torch.Tensor]  # of each list; none: all entries count
    sinks: torch.Tensor | None
    kv_format: str | None

    def seen(self) -> Pair:
        """Slots of both caches that a row lists, int64 ``[rows, entries]``, and whether each counts."""
        lists = torch.cat([x[:, 0] + i * _SLOTS for i, x in enumerate(self.lists)], 1).long()
        counts = [(x[:, 0] >= 0) & (x[:, 0] < _SLOTS) for x in self.lists]
        for some, lengths in zip(counts, self.lengths):
            some &= torch.arange(some.size(1), device=some.device) < lengths[:, None]
        return lists.where(torch.cat(counts, 1), 0), torch.cat(counts, 1)


def are_for(kernel: dict[str, Any]) -> bool:
    """Whether a kernel reads latent keys by slots."""
    return is_quantized(kernel) or kernel["head_dim_qk"] == latent_formats.FORMATS["v3.2"].columns


def is_quantized(kernel: dict[str, Any]) -> bool:
    """Whether a kernel reads quantized latent caches, and these alone."""
    return kernel["kv_dtype"] in _FORMATS


def is_served(case: Case, kernel: dict[str, Any]) -> bool:
    """Two caches are quantized, in formats that models have two of. Others may have 512 columns."""
    if is_quantized(kernel):
        return not case.narrow and (case.extra == 0 or kernel["kv_dtype"] != "latent_v32")
    return case.extra == 0


def draw(case: Case, kernel: dict[str, Any], device: torch.device) -> Inputs:
    """N(0, 1) inputs for ``case`` in the types of ``kernel``; the same on every device."""
    generator = torch.Generator().manual_seed(len(case.name) + case.rows)
    columns = latent_formats.VALUES if case.narrow else kernel["head_dim_qk"]
    kv_format = _FORMATS.get(kernel["kv_dtype"])
    q = torch.randn(case.rows, case.heads, columns, generator=generator).to(getattr(torch, kernel["q_dtype"]))
    inputs = Inputs(q.to(device), [], [], [], [], None, kv_format)
    for width in (case.width, *([case.extra] if case.extra else [])):
        numbers = torch.randn(_SLOTS, 1, columns, generator=generator)
        if kv_format is None:
            cache = numbers.to(getattr(torch, kernel["kv_dtype"])).view(_PAGES, _PAGE_SIZE, 1, columns)
            numbers = cache.float().flatten(0, 1)
        else:
            kind = latent_formats.FORMATS[kv_format]
            cache = torch.zeros(_PAGES, _PAGE_SIZE, 1, kind.bytes, dtype=torch.uint8)
            latent_formats.write(numbers[:, 0], cache, torch.arange(_SLOTS), kind, power_of_two=True)
            numbers = latent_formats.decoded(latent_formats.parts(cache, kind), kind).float().flatten(0, 1)
        low, high = (-9, 0) if case.no_slots else (-9, _SLOTS + 9)
        indices = torch.randint(low, high, (case.rows, 1, width), generator=generator, dtype=torch.int32)
        inputs.caches.append(cache.to(device))
        inputs.numbers.append(numbers.to(device))
        inputs.lists.append(indices.to(device))
        if case.lengths:
            lengths = torch.randint(width + 1, (case.rows,), generator=generator, dtype=torch.int32)
            inputs.lengths.append(lengths.to(device))
    if case.sinks:
        inputs.sinks = torch.randn(case.heads, generator=generator).to(device)
    return inputs


def compute(inputs: Inputs, backend: str) -> Pair:
    """Output and LSE by ``backend``."""
    first, *others = inputs.caches
    names = [("kv_indices_per_token", "topk_length"), ("extra_indices_per_token", "extra_topk_length")]
    given: dict[str, Any] = dict(sinks=inputs.sinks, extra_k=others[0] if others else None)
    given |= {of_list: indices for (of_list, _), indices in zip(names, inputs.lists)}
    given |= {of_length: lengths for (_, of_length), lengths in zip(names, inputs.lengths)}
    if inputs.kv_format is not None:
        given["kv_format"] = inputs.kv_format
    v = first if inputs.kv_format is not None else first[..., : latent_formats.VALUES]
    out, lse = attention(inputs.q, first, v, return_lse=True, backend=backend, **given)
    return out, lse


def expected(inputs: Inputs) -> Pair:
    """The same by the reference in float32, from the numbers that both caches stand for."""
    k = torch.cat(inputs.numbers)
    slots, counts = inputs.seen()
    lists = slots.masked_fill(~counts, -1).to(torch.int32).unsqueeze(1)
    out, lse = attention(
        inputs.q.float(),
        k,
        k[..., : latent_formats.VALUES],
        kv_indices_per_token=lists,
        sinks=inputs.sinks,
        return_lse=True,
        backend="reference",
    )
    return out, lse


def plain(inputs: Inputs) -> torch.Tensor:
    """The output by plain PyTorch in the type of the queries."""
    k = torch.cat(inputs.numbers).to(inputs.q.dtype)
    outs = []
    for row, slots, counts in zip(inputs.q.split(1), *inputs.seen()):
        keys = k[slots]
        values = keys[..., : latent_formats.VALUES]
        outs.append(plain_attention(row, keys, values, ~counts[None], row.dtype, sinks=inputs.sinks))
    return torch.cat(outs)
