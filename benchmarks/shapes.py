"""What is measured: cases, the useful work in each, and the named workloads they come in.

A case knows its label, its place in a result table (``group`` is the row, ``column`` the column), the features that a
backend must honour to run it, and the work it holds. Work is counted exactly and counts only what the result needs: a
key that the mask hides is no work, whatever a kernel computes for it.

To add a workload, write a function that returns cases and enter it in WORKLOADS. To add an operation, write a case
class like these, its workloads, and its callers in peers.py.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from fused import Fused
from lengths import tokens, visible_pairs
from prefix import SharedPrefix
from states import Merge

BEYOND_L2 = 256 << 20  # bytes
DENSITY = 0.6  # of random masks


@functools.lru_cache(maxsize=1)
def random_mask(qo_len: int, kv_len: int) -> torch.Tensor:
    """The same bool ``[qo_len, kv_len]`` every time, on the CPU; True, as everywhere, where a row sees a key."""
    return torch.rand(qo_len, kv_len, generator=torch.Generator().manual_seed(0)) < DENSITY


@dataclass(frozen=True)
class Prefill:
    """Attention of a batch of requests; one request is a single prefill, several are a ragged batch.

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


@dataclass
class Pages:
    """Keys and values in pages ``[pages, 2, page_size, heads, dim]``, or in a tuple of two; indices on the CPU."""

    cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @functools.cached_property
    def copies(self) -> list[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
        """The cache, and as many copies of it as no L2 cache holds together with it: for calls that take turns."""
        parts = self.cache if isinstance(self.cache, tuple) else (self.cache,)
        count = max(1, BEYOND_L2 // max(sum(x.nbytes for x in parts), 1))
        return [self.cache, *(_clone(self.cache) for _ in range(min(count, 64) - 1))]


@dataclass
class Inputs:
    """The tensors of a case: q ``[tokens, heads, dim]``, k and v alike; offsets on the CPU and on the device."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    sinks: torch.Tensor | None = None
    pages: Pages | None = None  # of the same k and v
    mask: torch.Tensor | None = None  # bool [rows, keys]
    qo_indptr_device: torch.Tensor = field(init=False)
    kv_indptr_device: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.qo_indptr_device = self.qo_indptr.to(self.q.device)
        self.kv_indptr_device = self.kv_indptr.to(self.q.device)

    def indices(self, on_device: bool) -> tuple[torch.Tensor, ...]:
        """The index tensors that plan() begins with."""
        pages = self.pages
        of_keys = (self.kv_indptr,) if pages is None else (pages.indptr, pages.indices, pages.last_page_len)
        return tuple(x.to(self.q.device) if on_device else x for x in (self.qo_indptr, *of_keys))

    @property
    def run_arguments(self) -> tuple[Any, ...]:
        return (self.q, self.k, self.v) if self.pages is None else (self.q, self.pages.cache)


def _clone(cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return cache.clone() if isinstance(cache, torch.Tensor) else (cache[0].clone(), cache[1].clone())


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return torch.tensor(total, dtype=torch.int32)


def make_inputs(case: Prefill, device: torch.device, seed: int = 0) -> Inputs:
    """N(0, 1) in every element: on equal values a GPU draws less power, and so runs faster."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    rows, keys = sum(case.qo_lens), sum(case.kv_lens)
    q = randn(rows, case.num_qo_heads, case.head_dim_qk)
    k = randn(keys, case.num_kv_heads, case.head_dim_qk)
    v = randn(keys, case.num_kv_heads, case.head_dim_vo)
    sinks = None
    if case.sinks:
        sinks = torch.randn(case.num_qo_heads, generator=generator, device=device, dtype=torch.float32)
    pages = make_pages(case, k, v, seed) if case.page_size else None
    mask = None
    if case.custom_mask == "random":
        mask = random_mask(case.qo_lens[0], case.kv_lens[0]).to(device)
    elif case.custom_mask == "causal":
        mask = torch.ones(rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    return Inputs(q, k, v, offsets(case.qo_lens), offsets(case.kv_lens), sinks, pages, mask)


def make_pages(case: Prefill, k: torch.Tensor, v: torch.Tensor, seed: int = 0) -> Pages:
    """``k`` and ``v`` in pages that lie in random order; what is left of last pages is 0."""
    size = case.page_size
    counts = tuple(-(-length // size) for length in case.kv_lens)
    indptr, pages = offsets(counts), sum(counts)
    indices = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).int()
    last = torch.tensor([length - size * max(count - 1, 0) for length, count in zip(case.kv_lens, counts)]).int()
    lengths = torch.tensor(case.kv_lens)
    token = torch.arange(k.size(0)) - offsets(case.kv_lens)[:-1].repeat_interleave(lengths)  # of its request
    entry = indptr[:-1].repeat_interleave(lengths) + token // size
    page, slot = indices[entry].long().to(k.device), (token % size).to(k.device)
    dtype = k.dtype
    if case.fp8:  # indexing copies bytes: it need not know the type
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    if k.shape[1:] == v.shape[1:]:
        stacked = k.new_zeros(pages, 2, size, *k.shape[1:])
        stacked[page, 0, slot], stacked[page, 1, slot] = k, v
        return Pages(stacked.view(dtype), indptr, indices, last)
    keys, values = k.new_zeros(pages, size, *k.shape[1:]), v.new_zeros(pages, size, *v.shape[1:])
    keys[page, slot], values[page, slot] = k, v
    return Pages((keys.view(dtype), values.view(dtype)), indptr, indices, last)


@dataclass(frozen=True)
class Host:
    """One call of the API on a problem so small that the host's share of the time is what is left."""

    call: str  # single_prefill, fmha_v2, ragged_run, ragged_plan, paged_run, paged_plan
    batch: int
    indptr: str = "cpu"  # where the index tensors given to plan() are
    group: str = "host"
    work: float = 1.0
    bytes: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.group} {self.column}"

    @property
    def column(self) -> str:
        kind = "paged " if self.paged else ""
        if self.call.endswith("_plan"):
            return f"{kind}plan() of {self.batch}, {self.indptr} {'indices' if self.paged else 'offsets'}"
        if self.call == "fmha_v2":
            return f"trtllm_fmha_v2_prefill of {self.batch}"
        return f"{kind}run() of {self.batch}" if self.call.endswith("_run") else self.call

    @property
    def detail(self) -> str:
        keys = "256 keys in pages of 16" if self.paged else "16 keys"
        return f"16 rows and {keys} per request, 8/2 heads, head_dim 64, bfloat16"

    @property
    def paged(self) -> bool:
        return self.call.startswith("paged_")

    @property
    def features(self) -> frozenset[str]:
        return self.problem.features

    @property
    def problem(self) -> Prefill:
        rows, keys = (16,) * self.batch, (256 if self.paged else 16,) * self.batch
        return Prefill(self.group, self.column, rows, keys, 8, 2, 64, 64, page_size=16 if self.paged else 0)


Case = Prefill | Host | Merge | Fused | SharedPrefix
Lens = tuple[int, ...]

# --- workloads ---------------------------------------------------------------------------------------------------

PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MODEL_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def paper(dtype: str, lengths: tuple[int, ...] = PAPER_LENGTHS, dims: tuple[int, ...] = (64, 128, 256)) -> list[Case]:
    """Hidden size 2048, 16k tokens in all, as in the FlashAttention papers."""
    cases: list[Case] = []
    for dim in dims:
        for causal in (False, True):
            group = f"hd{dim} {'causal' if causal else 'full'}"
            for length in lengths:
                lens = (length,) * (16384 // length)
                heads = 2048 // dim
                cases.append(
                    Prefill(group, tokens(length), lens, lens, heads, heads, dim, dim, causal=causal, dtype=dtype)
                )
    return cases


def model(group: str, dtype: str, heads: int, kv_heads: int, dim: int, vo: int = 0, **options: object) -> list[Case]:
    """Causal prefill of one prompt through one layer."""
    return [
        Prefill(group, tokens(n), (n,), (n,), heads, kv_heads, dim, vo or dim, dtype=dtype, **options)  # type: ignore[arg-type]
        for n in MODEL_LENGTHS
    ]


def varlen(dtype: str) -> list[Case]:
    """Batches of unequal prompts, lengths log-uniform in 32..8k, and a prompt beside decoding requests."""
    cases: list[Case] = []
    for count in (8, 32, 128):
        draw = random.Random(count)
        lens = tuple(round(math.exp(draw.uniform(math.log(32), math.log(8192)))) for _ in range(count))
        cases.append(Prefill("varlen 32/8 hd128", f"{count} prompts", lens, lens, 32, 8, 128, 128, dtype=dtype))
    qo, kv = (2048,) + (1,) * 64, (2048,) + (4096,) * 64
    cases.append(Prefill("varlen 32/8 hd128", "2k + 64 decodes", qo, kv, 32, 8, 128, 128, dtype=dtype))
    return cases


def chunked(dtype: str) -> list[Case]:
    """A chunk of a prompt, behind the keys of the chunks before it."""
    return [
        Prefill(f"chunk of {tokens(qo)}", f"{tokens(kv)} keys", (qo,), (kv,), 32, 8, 128, 128, dtype=dtype)
        for qo in (512, 2048, 8192)
        for kv in (8192, 16384, 65536)
    ]


def with_pages(case: Prefill, sizes: tuple[int, ...]) -> list[Case]:
    """The case without pages and with pages of every size, side by side in the table."""
    return [replace(case, column=f"page {n}" if n else "ragged", page_size=n) for n in (0, *sizes)]


def paged(dtype: str) -> list[Case]:
    """Prompts whose keys and values lie in pages, beside the same without."""
    shapes = {
        (32, 8, 128): ((1, 4096), (4, 4096), (16, 1024), (2, 8192)),
        (64, 8, 64): ((16, 1024), (4, 4096)),
        (16, 4, 256): ((4, 4096),),
    }
    cases: list[Case] = []
    for (heads, kv_heads, dim), batches in shapes.items():
        for batch, length in batches:
            lens, group = (length,) * batch, f"hd{dim} {batch}x{tokens(length)}"
            case = Prefill(group, "", lens, lens, heads, kv_heads, dim, dim, dtype=dtype)
            cases += with_pages(case, (1, 5, 16, 64, 128))
    return cases


def append(dtype: str) -> list[Case]:
    """Few rows over many keys, which memory bounds: with and without pages."""
    cases: list[Case] = []

    def add(words: str, qo: Lens, kv: Lens, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> None:
        group = f"{words}, {heads}/{kv_heads} hd{dim}"
        cases.extend(with_pages(Prefill(group, "", qo, kv, heads, kv_heads, dim, dim, dtype=dtype), (16,)))

    for heads, kv_heads in ((32, 8), (8, 1)):  # the latter: one of eight tensor-parallel ranks of 64/8
        for batch, rows, keys in ((1, 64, 8192), (8, 64, 8192), (1, 16, 32768), (1, 512, 16384)):
            add(f"{batch}x {rows} over {tokens(keys)}", (rows,) * batch, (keys,) * batch, heads, kv_heads)
    for keys in (2048, 4096):
        add(f"2k prompt + 64x 1 over {tokens(keys)}", (2048,) + (1,) * 64, (2048,) + (keys,) * 64)
    for batch, keys in ((1, 4096), (1, 32768), (64, 4096), (256, 2048)):
        add(f"{batch}x 1 over {tokens(keys)}", (1,) * batch, (keys,) * batch)
    add("64x 1 over 4k", (1,) * 64, (4096,) * 64, 64, 8, 64)
    add("64x 1 over 2k", (1,) * 64, (2048,) * 64, 32, 32, 128)
    add("63x 1 over 1k + 1 over 64k", (1,) * 64, (1024,) * 63 + (65536,))
    add("64x 1 over 4k", (1,) * 64, (4096,) * 64, 16, 4, 256)
    return cases


def mixed(dtype: str) -> list[Case]:
    """A step of an engine: chunks of prompts beside decoding requests, with and without pages."""
    cases: list[Case] = []
    for chunks, rows, before, decodes, keys, heads, kv_heads, dim in (
        (1, 512, 8192, 32, 4096, 32, 8, 128),
        (1, 2048, 16384, 64, 4096, 32, 8, 128),
        (1, 2048, 16384, 64, 4096, 8, 1, 128),  # one of eight tensor-parallel ranks of 64/8
        (1, 2048, 2048, 256, 1024, 32, 8, 128),
        (4, 512, 4096, 128, 2048, 32, 8, 128),
        (1, 2048, 2048, 64, 4096, 64, 8, 64),
        (1, 2048, 2048, 64, 4096, 16, 4, 256),
    ):
        words = f"{chunks}x {tokens(rows)} over {tokens(before)} + {decodes}x 1 over {tokens(keys)}"
        qo, kv = (rows,) * chunks + (1,) * decodes, (before,) * chunks + (keys,) * decodes
        group = f"{words}, {heads}/{kv_heads} hd{dim}"
        cases += with_pages(Prefill(group, "", qo, kv, heads, kv_heads, dim, dim, dtype=dtype), (16,))
    return cases


def masks(dtype: str) -> list[Case]:
    """One prompt of 4096 behind masks given as bits, and with ALiBi."""
    cases: list[Case] = []
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64), (16, 4, 256)):
        lens, group = (4096,), f"{heads}/{kv_heads} hd{dim}"
        causal = Prefill(group, "causal", lens, lens, heads, kv_heads, dim, dim, dtype=dtype)
        cases += [
            causal,
            replace(causal, column="causal as bits", causal=False, custom_mask="causal"),
            replace(causal, column=f"random bits {DENSITY}", causal=False, custom_mask="random"),
            replace(causal, column="causal ALiBi", alibi=True),
        ]
    return cases


def decode(dtype: str) -> list[Case]:
    """A token per request over pages of 16, with 1 to 16 query heads to a key head; and one request without pages."""
    cases: list[Case] = []

    def add(batch: int, keys: int, heads: int, kv_heads: int, dim: int = 128, page_size: int = 16) -> None:
        rows, lens = (1,) * batch, (keys,) * batch
        group = f"{heads}/{kv_heads} hd{dim}" + ("" if page_size else ", single_decode")
        column = f"{batch} x {tokens(keys)}"
        cases.append(
            Prefill(group, column, rows, lens, heads, kv_heads, dim, dim, True, dtype=dtype, page_size=page_size)
        )

    for batch, keys in (
        (1, 1024), (1, 4096), (1, 32768), (8, 1024), (16, 4096), (32, 4096), (64, 4096), (128, 2048), (64, 8192),
    ):  # fmt: skip
        add(batch, keys, 32, 8)
    for heads, kv_heads in ((8, 8), (64, 8), (128, 8), (8, 1)):
        for batch, keys in ((1, 4096), (16, 4096), (64, 4096)):
            add(batch, keys, heads, kv_heads)
    for dim, heads, kv_heads in ((64, 64, 8), (256, 16, 4)):
        for batch, keys in ((1, 4096), (64, 4096)):
            add(batch, keys, heads, kv_heads, dim)
    for keys in (4096, 32768):
        add(1, keys, 32, 8, page_size=0)
    return cases


def merge(dtype: str) -> list[Case]:
    """States of prefills, where memory bounds, and of decoding, where the launch does."""
    if dtype.startswith("float8"):
        raise ValueError(f"dtype {dtype!r} is no type of states: use float16 or bfloat16.")
    sizes = (
        (8192, 4, 32, 128), (8192, 2, 32, 128), (8192, 3, 32, 64), (4096, 8, 32, 128), (512, 64, 32, 128),
        (4096, 2, 128, 512), (128, 2, 32, 128), (128, 4, 32, 128), (16, 33, 32, 128), (1, 300, 8, 128),
    )  # fmt: skip
    return [Merge(*size, dtype=dtype) for size in sizes]


def fused(dtype: str) -> list[Case]:
    """16k tokens in requests of 1k, 4k and 16k, in every layout of trtllm_fmha_v2_prefill."""
    cases: list[Case] = []
    for layout, heads, kv_heads, page_size in (
        ("PACKED_QKV", 16, 16, 0),
        ("CONTIGUOUS_Q_KV", 32, 8, 0),
        ("SEPARATE_Q_K_V", 32, 8, 0),
        ("Q_PAGED_KV_NHD", 32, 8, 32),
        ("Q_PAGED_KV_HND", 32, 8, 32),
    ):
        for batch, length in ((16, 1024), (4, 4096), (1, 16384)):
            lens, group = (length,) * batch, f"{layout} {heads}/{kv_heads}"
            column = f"{batch} x {tokens(length)}"
            case = Prefill(group, column, lens, lens, heads, kv_heads, 128, 128, dtype=dtype, page_size=page_size)
            cases.append(Fused(case, layout))
    return cases


def fused_short(dtype: str) -> list[Case]:
    """Few short queries over many keys, of equal and of uneven lengths: speculative decoding, chunks of a prompt."""
    cases: list[Case] = []
    uneven = (500, 1000, 2000, 4000, 8000, 16000, 700, 300)
    for column, rows, keys in (
        ("1 x 4 over 4k", 4, (4096,)),
        ("1 x 16 over 32k", 16, (32768,)),
        ("1 x 128 over 32k", 128, (32768,)),
        ("8 x 4 over 4k", 4, (4096,) * 8),
        ("8 x 4 uneven", 4, uneven),
        ("8 x 32 over 4k", 32, (4096,) * 8),
        ("8 x 32 uneven", 32, uneven),
    ):
        for layout, page_size in (("CONTIGUOUS_Q_KV", 0), ("Q_PAGED_KV_NHD", 32)):
            lens = (rows,) * len(keys)
            problem = Prefill(layout, column, lens, keys, 32, 8, 128, 128, dtype=dtype, page_size=page_size)
            cases.append(Fused(problem, layout))
    return cases


def shared_prefix(dtype: str) -> list[Case]:
    """A token per request over a prefix that all share and 128 keys of their own, in pages of 16."""
    cases: list[Case] = []
    for prefix, batch in ((8192, 64), (2048, 64), (32768, 16), (8192, 256)):
        keys = (prefix + 128,) * batch
        column = f"{tokens(prefix)} shared by {batch}"
        case = Prefill("32/8 hd128", column, (1,) * batch, keys, 32, 8, 128, 128, dtype=dtype, page_size=16)
        cases.append(SharedPrefix(case, prefix))
    return cases


@dataclass(frozen=True)
class Workload:
    operation: str
    about: str
    cases: Callable[[str], list[Case]]  # of the element type
    units: tuple[str, ...] = ()  # tables to show, if not that of the operation; the first is what files hold


WORKLOADS: dict[str, Workload] = {
    "quick": Workload(
        "prefill", "four cells of `paper`, to see that all is well", lambda t: paper(t, (2048, 16384), (128,))
    ),
    "paper": Workload("prefill", "hidden size 2048, 16k tokens in all, head dims 64, 128, 256, full and causal", paper),
    "llama3-8b": Workload("prefill", "32/8 heads, hd128", lambda t: model("llama3-8b", t, 32, 8, 128)),
    "llama3-70b": Workload(
        "prefill",
        "64/8 heads, hd128, and one of eight tensor-parallel ranks",
        lambda t: model("llama3-70b", t, 64, 8, 128) + model("llama3-70b tp8", t, 8, 1, 128),
    ),
    "qwen3": Workload(
        "prefill",
        "Qwen3-30B 32/4 heads and Qwen3-235B 64/4, hd128",
        lambda t: model("qwen3-30b", t, 32, 4, 128) + model("qwen3-235b", t, 64, 4, 128),
    ),
    "gpt-oss": Workload(
        "prefill",
        "64/8 heads, hd64, sinks; layers with a window of 128 keys and without",
        lambda t: (
            model("gpt-oss window", t, 64, 8, 64, sinks=True, window_left=127)
            + model("gpt-oss full", t, 64, 8, 64, sinks=True)
        ),
    ),
    "gemma2": Workload(
        "prefill",
        "16/8 heads, hd256, soft cap 50; layers with a window of 4096 keys and without",
        lambda t: (
            model("gemma2 window", t, 16, 8, 256, soft_cap=50.0, window_left=4095)
            + model("gemma2 full", t, 16, 8, 256, soft_cap=50.0)
        ),
    ),
    "deepseek": Workload("prefill", "128 heads, hd192/128", lambda t: model("deepseek", t, 128, 128, 192, 128)),
    "varlen": Workload("prefill", "unequal prompts; a prompt beside decoding requests", varlen),
    "chunked": Workload("prefill", "chunks of 512, 2k, 8k behind up to 64k keys, 32/8 heads, hd128", chunked),
    "paged": Workload("prefill", "pages of 1 to 128 keys beside none, hd64, hd128, hd256", paged),
    "append": Workload("prefill", "1 to 512 rows over up to 64k keys, with pages and without", append, ("us", "GB/s")),
    "mixed": Workload(
        "prefill", "chunks of prompts beside decoding requests, with pages and without", mixed, ("us", "TFLOP/s")
    ),
    "masks": Workload("prefill", "one prompt of 4k: causal, custom masks, ALiBi", masks, ("us", "TFLOP/s")),
    "decode": Workload("decode", "1 to 128 requests over 1k to 32k keys, groups of 1 to 16 heads", decode),
    "merge": Workload("merge", "2 to 300 states of 1 to 8k tokens", merge),
    "fused": Workload("fused", "16k tokens in every layout, hd128, causal", fused),
    "fused-short": Workload("fused", "1 and 8 requests of 4 to 128 rows over 300 to 32k keys, hd128", fused_short),
    "shared-prefix": Workload("shared_prefix", "2k to 32k keys shared by 16 to 256 decoding requests", shared_prefix),
    "calls": Workload(
        "host",
        "host time of single_prefill, run() and plan()",
        lambda t: [
            Host("single_prefill", 1),
            Host("fmha_v2", 8),
            Host("ragged_run", 8),
            Host("ragged_plan", 8),
            Host("ragged_plan", 8, "cuda"),
            Host("ragged_plan", 128),
            Host("ragged_plan", 256),
            Host("paged_run", 8),
            Host("paged_run", 128),
            Host("paged_plan", 128),
            Host("paged_plan", 128, "cuda"),
        ],
    ),
}


def cases_of(operation: str, names: list[str], dtype: str) -> list[Case]:
    """The cases of the named workloads, of one operation.

    Raises:
        ValueError: a workload that does not exist, or belongs to another operation.
    """
    known = [name for name, workload in WORKLOADS.items() if workload.operation == operation]
    cases: list[Case] = []
    for name in names:
        if name not in known:
            raise ValueError(f"workload {name!r} is none of {operation}: use {', '.join(known)}.")
        cases += WORKLOADS[name].cases(dtype)
    return cases
