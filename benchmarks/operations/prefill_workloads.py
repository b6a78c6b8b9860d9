"""What `prefill` is measured on: the grid of the papers, layers of models, batches, pages, masks."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from backend import Workload
from lengths import tokens
from problem import DENSITY, Problem, with_pages

Lens = tuple[int, ...]
PAPER_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
MODEL_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)


def paper(
    dtype: str, lengths: tuple[int, ...] = PAPER_LENGTHS, dims: tuple[int, ...] = (64, 128, 256)
) -> list[Problem]:
    """Hidden size 2048, 16k tokens in all, as in the FlashAttention papers."""
    cases: list[Problem] = []
    for dim in dims:
        for causal in (False, True):
            group = f"hd{dim} {'causal' if causal else 'full'}"
            for length in lengths:
                lens = (length,) * (16384 // length)
                heads = 2048 // dim
                cases.append(
                    Problem(group, tokens(length), lens, lens, heads, heads, dim, dim, causal=causal, dtype=dtype)
                )
    return cases


def model(group: str, dtype: str, heads: int, kv_heads: int, dim: int, vo: int = 0, **options: Any) -> list[Problem]:
    """Causal prefill of one prompt through one layer."""
    return [
        Problem(group, tokens(n), (n,), (n,), heads, kv_heads, dim, vo or dim, dtype=dtype, **options)
        for n in MODEL_LENGTHS
    ]


def mla_prefill(dtype: str) -> list[Problem]:
    """Prompts through a layer of DeepSeek after the up-projection: one prompt, and 16k tokens in all."""
    cases: list[Problem] = []
    for words, total in (("one prompt", 0), ("16k tokens", 16384)):
        for n in (2048, 4096, 8192):
            lens = (n,) * max(total // n, 1)
            cases.append(
                Problem(f"128 heads hd192/128, {words}", tokens(n), lens, lens, 128, 128, 192, 128, dtype=dtype)
            )
    return cases


def varlen(dtype: str) -> list[Problem]:
    """Batches of unequal prompts, lengths log-uniform in 32..8k, and a prompt beside decoding requests."""
    cases: list[Problem] = []
    for count in (8, 32, 128):
        draw = random.Random(count)
        lens = tuple(round(math.exp(draw.uniform(math.log(32), math.log(8192)))) for _ in range(count))
        cases.append(Problem("varlen 32/8 hd128", f"{count} prompts", lens, lens, 32, 8, 128, 128, dtype=dtype))
    qo, kv = (2048,) + (1,) * 64, (2048,) + (4096,) * 64
    cases.append(Problem("varlen 32/8 hd128", "2k + 64 decodes", qo, kv, 32, 8, 128, 128, dtype=dtype))
    return cases


def chunked(dtype: str) -> list[Problem]:
    """A chunk of a prompt, behind the keys of the chunks before it."""
    return [
        Problem(f"chunk of {tokens(qo)}", f"{tokens(kv)} keys", (qo,), (kv,), 32, 8, 128, 128, dtype=dtype)
        for qo in (512, 2048, 8192)
        for kv in (8192, 16384, 65536)
    ]


def paged(dtype: str) -> list[Problem]:
    """Prompts whose keys and values lie in pages, beside the same without."""
    shapes = {
        (32, 8, 128): ((1, 4096), (4, 4096), (16, 1024), (2, 8192)),
        (64, 8, 64): ((16, 1024), (4, 4096)),
        (16, 4, 256): ((4, 4096),),
    }
    cases: list[Problem] = []
    for (heads, kv_heads, dim), batches in shapes.items():
        for batch, length in batches:
            lens, group = (length,) * batch, f"hd{dim} {batch}x{tokens(length)}"
            case = Problem(group, "", lens, lens, heads, kv_heads, dim, dim, dtype=dtype)
            cases += with_pages(case, (1, 5, 16, 64, 128))
    return cases


def append(dtype: str) -> list[Problem]:
    """Few rows over many keys, which memory bounds: with and without pages."""
    cases: list[Problem] = []

    def add(words: str, qo: Lens, kv: Lens, heads: int = 32, kv_heads: int = 8, dim: int = 128) -> None:
        group = f"{words}, {heads}/{kv_heads} hd{dim}"
        cases.extend(with_pages(Problem(group, "", qo, kv, heads, kv_heads, dim, dim, dtype=dtype), (16,)))

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


def mixed(dtype: str) -> list[Problem]:
    """A step of an engine: chunks of prompts beside decoding requests, with and without pages."""
    cases: list[Problem] = []
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
        cases += with_pages(Problem(group, "", qo, kv, heads, kv_heads, dim, dim, dtype=dtype), (16,))
    return cases


def masks(dtype: str) -> list[Problem]:
    """One prompt of 4096 behind masks given as bits, and with ALiBi."""
    cases: list[Problem] = []
    for heads, kv_heads, dim in ((32, 8, 128), (64, 8, 64), (16, 4, 256)):
        lens, group = (4096,), f"{heads}/{kv_heads} hd{dim}"
        causal = Problem(group, "causal", lens, lens, heads, kv_heads, dim, dim, dtype=dtype)
        cases += [
            causal,
            replace(causal, column="causal as bits", causal=False, custom_mask="causal"),
            replace(causal, column=f"random bits {DENSITY}", causal=False, custom_mask="random"),
            replace(causal, column="causal ALiBi", alibi=True),
        ]
    return cases


WORKLOADS = {
    "quick": Workload("four cells of `paper`, to see that all is well", lambda t: paper(t, (2048, 16384), (128,))),
    "paper": Workload("hidden size 2048, 16k tokens in all, head dims 64, 128, 256, full and causal", paper),
    "llama3-8b": Workload("32/8 heads, hd128", lambda t: model("llama3-8b", t, 32, 8, 128)),
    "llama3-70b": Workload(
        "64/8 heads, hd128, and one of eight tensor-parallel ranks",
        lambda t: model("llama3-70b", t, 64, 8, 128) + model("llama3-70b tp8", t, 8, 1, 128),
    ),
    "qwen3": Workload(
        "Qwen3-30B 32/4 heads and Qwen3-235B 64/4, hd128",
        lambda t: model("qwen3-30b", t, 32, 4, 128) + model("qwen3-235b", t, 64, 4, 128),
    ),
    "gpt-oss": Workload(
        "64/8 heads, hd64, sinks; layers with a window of 128 keys and without",
        lambda t: (
            model("gpt-oss window", t, 64, 8, 64, sinks=True, window_left=127)
            + model("gpt-oss full", t, 64, 8, 64, sinks=True)
        ),
    ),
    "gemma2": Workload(
        "16/8 heads, hd256, soft cap 50; layers with a window of 4096 keys and without",
        lambda t: (
            model("gemma2 window", t, 16, 8, 256, soft_cap=50.0, window_left=4095)
            + model("gemma2 full", t, 16, 8, 256, soft_cap=50.0)
        ),
    ),
    "deepseek": Workload("128 heads, hd192/128", lambda t: model("deepseek", t, 128, 128, 192, 128)),
    "mla-prefill": Workload(
        "128 heads, hd192/128: one prompt of 2k to 8k, and 16k tokens in such prompts", mla_prefill
    ),
    "varlen": Workload("unequal prompts; a prompt beside decoding requests", varlen),
    "chunked": Workload("chunks of 512, 2k, 8k behind up to 64k keys, 32/8 heads, hd128", chunked),
    "paged": Workload("pages of 1 to 128 keys beside none, hd64, hd128, hd256", paged),
    "append": Workload("1 to 512 rows over up to 64k keys, with pages and without", append, ("us", "GB/s")),
    "mixed": Workload("chunks of prompts beside decoding requests, with pages and without", mixed, ("us", "TFLOP/s")),
    "masks": Workload("one prompt of 4k: causal, custom masks, ALiBi", masks, ("us", "TFLOP/s")),
}
