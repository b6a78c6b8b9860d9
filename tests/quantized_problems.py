"""Query rows over quantized latent caches, and over two caches, by lists of slots, and what calls over them give."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import oracle
import quantized_caches
import torch
from compare import assert_close, assert_lse_close
from guards import poison_
from problems import randn
from quantized_caches import LAYOUTS, UNNAMED, Cache
from selected_problems import some_slots

import cutlass_kernels as ck

INT32 = torch.int32


@dataclass
class Scope:
    """A quantized cache, or one of 16-bit numbers ``[pages, page_size, 1, columns]``, and what rows list of it."""

    cache: Cache | torch.Tensor
    indices: torch.Tensor  # [rows, 1, K]
    lengths: torch.Tensor | None  # [rows]

    @property
    def view(self) -> torch.Tensor:
        return self.cache.view if isinstance(self.cache, Cache) else self.cache

    @property
    def slots(self) -> int:
        return self.view.size(0) * self.view.size(1)

    def numbers(self) -> torch.Tensor:
        """``[slots, 1, columns]`` in double precision."""
        return self.cache.numbers() if isinstance(self.cache, Cache) else self.cache.flatten(0, 1).double()

    def seen(self) -> torch.Tensor:
        """The indices, -1 where one is no slot or does not count."""
        x = self.indices
        none = (x < 0) | (x >= self.slots)
        if self.lengths is not None:
            none |= torch.arange(x.size(2), device=x.device) >= self.lengths[:, None, None]
        return x.masked_fill(none, -1)


@dataclass
class Quantized:
    """Rows with keys in one cache or two. Slots that no row lists are NaN."""

    q: torch.Tensor  # [rows, heads, dim]
    scopes: list[Scope]
    kv_format: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the oracle

    @property
    def device(self) -> str:
        return str(self.q.device)

    def arguments(self) -> dict[str, Any]:
        """Those of attention()."""
        first, *others = self.scopes
        k = first.view
        v = k if isinstance(first.cache, Cache) else k[..., :512]
        given = dict(q=self.q, k=k, v=v, kv_indices_per_token=first.indices, topk_length=first.lengths)
        for extra in others:
            given |= dict(extra_k=extra.view, extra_indices_per_token=extra.indices, extra_topk_length=extra.lengths)
        return given | dict(
            kv_format=self.kv_format, sm_scale=self.options.get("sm_scale"), sinks=self.options.get("sinks")
        )

    def expected(self, **options: Any) -> tuple[oracle.State, torch.Tensor]:
        """The oracle's results, and the output of PyTorch in 16 bits."""
        dim, begin, keys, lists = self.q.size(2), 0, [], []
        for scope in self.scopes:
            keys.append(scope.numbers()[..., :dim])
            seen = scope.seen()
            lists.append(torch.where(seen >= 0, seen + begin, -1))
            begin += scope.slots
        k, indices = torch.cat(keys), torch.cat(lists, 2)
        options = self.options | options
        want = oracle.selected(self.q.double(), k, k[..., :512], indices, **options)
        compute = self.q.dtype
        narrow = k.to(compute)
        base = oracle.selected(self.q, narrow, narrow[..., :512], indices, arithmetic=compute, **options)
        return want, base.out.to(compute)

    def check(self, out: torch.Tensor, lse: torch.Tensor, max_logits: torch.Tensor, **options: Any) -> None:
        """Results of any leading dimensions, the LSE of base 2."""
        want, base = self.expected(**options)
        assert_close(out.flatten(0, -3), want.out, base.to(out.dtype))
        assert_lse_close(lse.flatten(0, -2), want.lse)
        assert_lse_close(max_logits, want.largest, name="max_logits")


def run(problem: Quantized, backend: str = "auto", **given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, LSE and largest logits of attention(), written over NaN."""
    call = problem.arguments() | given
    q = call["q"]
    out = poison_(torch.empty(*q.shape[:-1], 512, dtype=q.dtype, device=q.device))
    max_logits = poison_(torch.empty(problem.q.shape[:2], device=q.device))
    found, lse = ck.attention(**call, out=out, max_logits=max_logits, return_lse=True, backend=backend)
    assert found is out and lse.shape == q.shape[:-1]
    return out, lse, max_logits


def scope_of(
    kind: str,
    rng: random.Random,
    rows: int,
    width: int,
    device: str,
    *,
    dim: int,
    dtype: torch.dtype = torch.bfloat16,
    lists: list[str] | None = None,
    lengths: bool = True,
    **sizes: int,
) -> Scope:
    """A scope with a cache of this format, or of ``"numbers"``: random tokens where a row lists them."""
    name = "v4" if kind == "numbers" else kind
    cache = quantized_caches.some(name, rng, device, **sizes)
    slots = cache.slots
    kinds = lists or ["any", "any", "none", "one", "last", "full"]
    indices = torch.tensor(
        [some_slots(rng, rng.choice(kinds), width, slots) for _ in range(rows)], dtype=INT32, device=device
    ).view(rows, 1, width)
    counts = None
    if lengths:
        counts = torch.tensor([rng.choice([0, width, rng.randint(0, width)]) for _ in range(rows)], dtype=INT32)
        counts = counts.to(device)
    used = [False] * slots
    found = Scope(cache, indices, counts)
    for slot in found.seen().flatten().tolist():
        if slot >= 0:
            used[slot] = True
    if kind != "numbers":
        quantized_caches.filled(cache, used, rng.randrange(1000))
        return found
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    shape = (cache.pages, cache.page_size, 1, dim)
    numbers = randn(shape, torch.float32, "cpu", generator).to(dtype)
    hidden = ~torch.tensor(used).view(shape[:2])
    found.cache = numbers.masked_fill(hidden[..., None, None], torch.nan).to(device)
    return found


def make(
    kinds: list[str],
    seed: int = 0,
    device: str = "cpu",
    *,
    rows: int = 5,
    heads: int = 8,
    widths: tuple[int, ...] = (40, 70),
    dtype: torch.dtype = torch.bfloat16,
    dim: int | None = None,
    **others: Any,
) -> Quantized:
    """Rows over caches of these kinds, the first of which is ``k``. ``others`` are those of ``scope_of``."""
    rng = random.Random(seed)
    dim = dim or next((LAYOUTS[x].columns for x in kinds if x != "numbers"), 576)
    generator = torch.Generator().manual_seed(seed)
    q = randn((rows, heads, dim), torch.float32, "cpu", generator).to(device, dtype)
    given = dict(dim=dim, dtype=dtype) | others
    scopes = [scope_of(kind, rng, rows, width, device, **given) for kind, width in zip(kinds, widths)]
    named = [x for x in kinds if x != "numbers" and x not in UNNAMED]
    return Quantized(q, scopes, named[0] if named else None)
