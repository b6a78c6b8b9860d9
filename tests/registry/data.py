"""What the calls of the registry are made of: one request, in every form that the functions take."""

from __future__ import annotations

from typing import Any

import torch
from problems import make_batch

import cutlass_kernels as ck

HEADS, PAGE = (4, 2, 64), 16


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class Data:
    """One request of 5 rows and 20 keys in tensors, and two requests of 20 and 9 keys in pages 1 to 3 (``table``), with
    5 rows in all. Two of a target are equal, but for what wrappers plan: ``again`` has another plan.

    ``size`` multiplies all lengths, and so the size of a page."""

    def __init__(self, target: Any, heads: tuple[int, int, int] = HEADS, size: int = 1, again: bool = False) -> None:
        self.target, self.device = target, target.device
        self.generator = torch.Generator().manual_seed(0)
        self.heads, self.size = heads, size
        self.n, self.m, self.page = 5 * size, 20 * size, PAGE * size
        batch = make_batch([self.n], [self.m], *heads, device=target.device)
        self.q, self.k, self.v = self.qkv = batch.q, batch.k, batch.v
        self.kv = torch.stack([batch.k, batch.v], 1)
        self.cache = self.randn(4, 2, self.page, *heads[1:]).half()
        self.step = self.randn(2, *heads[::2]).half()  # queries of a decode step
        self.table = (ints(0, 2, 3), ints(3, 0, 1) if again else ints(1, 2, 3), self.sizes(4, 9))
        self.rows = self.sizes(0, 3, 5) if again else self.sizes(0, 2, 5)
        self.blocks = torch.tensor([[[True, False], [True, True]], [[False, True], [True, False]]] * (heads[1] // 2))
        if again:
            self.blocks = ~self.blocks
        self.table_here = tuple(x.to(self.device) for x in self.table)
        self.sinks, self.one = self.randn(heads[0]), self.rand(1)
        self.state = (self.randn(5, 4, 64), self.randn(5, 4))

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator).to(self.device)

    def sizes(self, *lengths: int) -> torch.Tensor:
        return ints(*lengths) * self.size

    def sizes_here(self, *lengths: int) -> torch.Tensor:
        return self.sizes(*lengths).to(self.device)

    def of_rows_here(self, *lengths: int) -> torch.Tensor:
        """A length for each of the n rows: these five in turn."""
        return self.sizes_here(*lengths).repeat(self.size)

    def here(self, *numbers: int) -> torch.Tensor:
        return ints(*numbers).to(self.device)

    def slots_here(self, rows: int, width: int) -> torch.Tensor:
        """Slots of the cache, and some numbers that are none, for each of so many rows."""
        slots = torch.randint(-2, 4 * self.page + 2, (rows, width), generator=self.generator)
        return slots.to(torch.int32).to(self.device)

    def tokens_here(self, size: int) -> torch.Tensor:
        """A latent cache of random tokens, of so many bytes each."""
        tokens = torch.randint(0x30, 0x40, (4, self.page, 1, size), generator=self.generator)
        return tokens.to(torch.uint8).to(self.device)

    def wrapper(self, name: str, *sizes: Any) -> Any:
        return getattr(ck, name)(*sizes, self.target.workspace())
