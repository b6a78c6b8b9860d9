"""An attention problem: its sizes and options, the features that it asks for, and the work in it.

Work is counted exactly and counts only what the result needs: a key that the mask hides is no work, whatever a kernel
computes for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from lengths import tokens, visible_pairs

DENSITY = 0.6  # of random masks


@functools.lru_cache(maxsize=1)
def random_mask(qo_len: int, kv_len: int) -> torch.Tensor:
    """The same bool ``[qo_len, kv_len]`` every time, on the CPU; True, as everywhere, where a row sees a key."""
    return torch.rand(qo_len, kv_len, generator=torch.Generator().manual_seed(0)) < DENSITY


@dataclass(frozen=True)
class Problem:
    """Attention of a batch of requests: heads, lengths, masks, element type. A case by itself, and a part of others.

    With ``page_size`` the keys and values lie in pages, of one request too. ``custom_mask`` is a mask given as bits, in
    the place of ``causal`` and for one request: "causal" (the same rows and keys) or "random" (some keys of all).
    """

    group: str
    column: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    causal: bool = True
    window_left: int = -1
    soft_cap: float = 0.0
    sinks: bool = False
    dtype: str = "bfloat16"
    page_size: int = 0  # 0: no pages
    custom_mask: str = ""
    alibi: bool = False

    def __post_init__(self) -> None:
        if self.custom_mask and (self.causal or self.window_left >= 0 or not self.single):
            raise ValueError(f"{self.label}: a custom mask is of one request, and the only mask.")
        if self.custom_mask not in ("", "causal", "random"):
            raise ValueError(f"{self.label}: custom_mask={self.custom_mask!r} is none of 'causal', 'random'.")

    @property
    def problem(self) -> Problem:
        """Itself, as the problem of other cases is a part of them."""
        return self

    @property
    def label(self) -> str:
        return f"{self.group} {self.column}"

    @property
    def detail(self) -> str:
        """Sizes in words, for the listing."""
        batch = len(self.qo_lens)
        longest = f"{tokens(max(self.qo_lens))}x{tokens(max(self.kv_lens))}"
        heads = f"{self.num_qo_heads}/{self.num_kv_heads} heads"
        dims = "/".join(str(dim) for dim in dict.fromkeys((self.head_dim_qk, self.head_dim_vo)))
        pages = f", pages of {self.page_size}" if self.page_size else ""
        needs = " ".join(sorted(self.features)) or "-"
        return f"{batch} x {longest}, {heads}, head_dim {dims}, {self.dtype}{pages}, needs {needs}"

    @property
    def fp8(self) -> bool:
        """Whether q, k and v are fp8; the output then is bfloat16."""
        return self.dtype.startswith("float8")

    @property
    def single(self) -> bool:
        return len(self.qo_lens) == 1

    @property
    def dense(self) -> bool:
        """Whether all requests have the same lengths, so that the batch is a rectangular tensor."""
        return len(set(self.qo_lens)) == 1 and len(set(self.kv_lens)) == 1

    @property
    def features(self) -> frozenset[str]:
        """What a backend must honour beyond equal heads and lengths."""
        found = {
            "causal": self.causal,
            "ragged": not self.dense,
            "append": self.causal and self.qo_lens != self.kv_lens,
            "gqa": self.num_qo_heads != self.num_kv_heads,
            "window": self.window_left >= 0,
            "soft_cap": self.soft_cap > 0,
            "sinks": self.sinks,
            "head_dim_vo": self.head_dim_qk != self.head_dim_vo,
            "paged": self.page_size > 0,
            "custom_mask": bool(self.custom_mask),
            "alibi": self.alibi,
            "fp8": self.fp8,
        }
        return frozenset(name for name, present in found.items() if present)

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs of one head, over all requests."""
        lengths = zip(self.qo_lens, self.kv_lens)
        if self.custom_mask == "random":
            return sum(int(random_mask(qo, kv).sum()) for qo, kv in lengths)
        causal = self.causal or self.custom_mask == "causal"
        return sum(visible_pairs(qo, kv, causal, self.window_left) for qo, kv in lengths)

    @property
    def work(self) -> float:
        """Useful FLOPs: a multiply and an add per element of q and of v for every visible pair."""
        return 2.0 * (self.head_dim_qk + self.head_dim_vo) * self.num_qo_heads * self.pairs

    @property
    def bytes(self) -> float:
        """Of q, k, v and the output, each once: the least that a kernel moves."""
        rows, keys = sum(self.qo_lens) * self.num_qo_heads, sum(self.kv_lens) * self.num_kv_heads
        item = getattr(torch, self.dtype).itemsize
        read = (rows * self.head_dim_qk + keys * (self.head_dim_qk + self.head_dim_vo)) * item
        return float(read + rows * self.head_dim_vo * max(item, 2))


@dataclass(frozen=True)
class OfProblem:
    """A case with the name, the features and the work of its problem."""

    problem: Problem

    @property
    def group(self) -> str:
        return self.problem.group

    @property
    def column(self) -> str:
        return self.problem.column

    @property
    def label(self) -> str:
        return self.problem.label

    @property
    def features(self) -> frozenset[str]:
        return self.problem.features

    @property
    def work(self) -> float:
        return self.problem.work

    @property
    def bytes(self) -> float:
        return self.problem.bytes


def with_pages(case: Problem, sizes: tuple[int, ...]) -> list[Problem]:
    """The case without pages and with pages of every size, side by side in the table."""
    return [replace(case, column=f"page {n}" if n else "ragged", page_size=n) for n in (0, *sizes)]
