"""Query rows with keys of their own, by lists of slots, and what calls over them must give."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import oracle
import torch
from compare import assert_close, assert_lse_close
from guards import poison_
from problems import FP8, randn

import cutlass_kernels as ck

INT32 = torch.int32
LISTS = ["any", "any", "any", "none", "one", "last", "full"]


@dataclass
class Selected:
    """Rows, a paged cache and lists. Slots that no row lists, and the gaps between pages, are NaN."""

    q: torch.Tensor  # [rows, heads, dim]
    cache: torch.Tensor  # [pages, page_size, kv_heads, dim]
    columns: int  # of the values
    indices: torch.Tensor  # [rows, kv_heads, K]
    lengths: torch.Tensor | None  # [rows]

    @property
    def device(self) -> str:
        return str(self.q.device)

    @property
    def slots(self) -> int:
        return self.cache.size(0) * self.cache.size(1)

    def arguments(self, layout: str = "NHD") -> dict[str, Any]:
        """Those of attention()."""
        k = self.cache if layout == "NHD" else self.cache.transpose(1, 2).contiguous()
        given = dict(q=self.q, k=k, v=k[..., : self.columns], kv_layout=layout)
        return given | dict(kv_indices_per_token=self.indices, topk_length=self.lengths)

    def expected(self, **options: Any) -> tuple[oracle.State, torch.Tensor]:
        """The oracle's results, and the output of PyTorch in 16 bits."""
        compute = torch.float16 if self.q.dtype in FP8 else self.q.dtype
        k = self.cache.to(compute).flatten(0, 1)
        lengths = None if self.lengths is None else self.lengths.tolist()
        given = (self.q.to(compute), k, k[..., : self.columns], self.indices, lengths)
        want = oracle.selected(*given, **options)
        return want, oracle.selected(*given, arithmetic=compute, **options).out.to(compute)

    def check(self, out: torch.Tensor, lse: torch.Tensor, max_logits: torch.Tensor, **options: Any) -> None:
        """Results of any leading dimensions, the LSE of base 2. ``options`` are the oracle's."""
        want, base = self.expected(**options)
        out = out.flatten(0, -3)
        if self.q.dtype in FP8:
            assert_close(out, want.out, atol=0.12, rtol=0.12)
        else:
            assert_close(out, want.out, base.to(out.dtype))
        fine = 5e-3 if self.q.dtype in FP8 else None
        assert_lse_close(lse.flatten(0, -2), want.lse, atol=fine)
        assert_lse_close(max_logits, want.largest, atol=fine, name="max_logits")


def make(
    rows: int,
    heads: int,
    width: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    kv_heads: int = 1,
    dims: tuple[int, int] = (576, 512),
    pages: int = 9,
    page_size: int = 16,
    gap: int = 0,
    kv_dtype: torch.dtype | None = None,
    lists: list[str] | None = None,
    lengths: list[int] | str | None = None,
    seed: int = 0,
) -> Selected:
    """``lists`` says what each row lists, in turn. ``lengths`` are numbers, "random" or None. ``gap`` tokens lie behind
    each page."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots = pages * page_size
    indices = torch.tensor(
        [
            [some_slots(rng, (lists or LISTS)[i % len(lists or LISTS)], width, slots) for _ in range(kv_heads)]
            for i in range(rows)
        ],
        dtype=INT32,
    ).view(rows, kv_heads, width)
    if lengths == "random":
        lengths = [rng.choice([0, width, rng.randint(0, width), 1]) for _ in range(rows)]
    counts = [width] * rows if lengths is None else lengths
    listed = torch.zeros(slots + 1, kv_heads, dtype=torch.bool)
    for row, count in zip(indices, counts):
        for head, mine in enumerate(row):
            numbers = mine[: int(count)].long()
            listed[numbers.where((numbers >= 0) & (numbers < slots), slots), head] = True
    whole = randn((pages, page_size + gap, kv_heads, dims[0]), torch.float32, "cpu", generator)
    whole = whole.to(kv_dtype or dtype)
    cache = poison_(torch.empty_like(whole))
    used = listed[:slots].view(pages, page_size, kv_heads)
    bits = torch.uint8 if whole.element_size() == 1 else torch.int16 if whole.element_size() == 2 else torch.int32
    cache.view(bits)[:, :page_size][used] = whole.view(bits)[:, :page_size][used]
    q = randn((rows, heads, dims[0]), torch.float32, "cpu", generator).to(dtype)
    of_rows = None if lengths is None else torch.tensor(lengths, dtype=INT32, device=device)
    return Selected(q.to(device), cache.to(device)[:, :page_size], dims[1], indices.to(device), of_rows)


def some_slots(rng: random.Random, kind: str, width: int, slots: int) -> list[int]:
    """A list: "any" slots and numbers that are none, "none", "one" slot again and again, the "last" slot among -1, or
    "full", without a number that is none."""
    nothing = [-1, -2, slots, slots + 1, -(2**31), 2**31 - 1]
    if kind == "none":
        return [rng.choice(nothing) for _ in range(width)]
    if kind == "one":
        return [rng.randrange(slots)] * width
    if kind == "last":
        return [slots - 1 if i == width // 2 else -1 for i in range(width)]
    share = 0.0 if kind == "full" else rng.choice([0.0, 0.3, 0.9])
    return [rng.choice(nothing) if rng.random() < share else rng.randrange(slots) for _ in range(width)]


def run(problem: Selected, backend: str = "auto", **given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and largest logits of attention(), written over NaN."""
    call = problem.arguments(given.pop("kv_layout", "NHD")) | given
    q = call["q"]
    dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
    out = poison_(torch.empty(*q.shape[:-1], problem.columns, dtype=dtype, device=q.device))
    max_logits = poison_(torch.empty(problem.q.shape[:2], device=q.device))
    found, lse = ck.attention(**call, out=out, max_logits=max_logits, return_lse=True, backend=backend)
    assert found is out and lse.shape == q.shape[:-1]
    return out, lse, max_logits
