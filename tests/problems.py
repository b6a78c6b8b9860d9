"""Builds batches in every layout the API knows, and asks the oracle for what they should give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import oracle
import torch
from guards import poison_

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PLANNED = ("causal", "window_left", "logits_soft_cap", "sm_scale", "pos_encoding_mode", "rope_scale", "rope_theta")


def indptr(lengths: Sequence[int], device: str = "cpu", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return torch.tensor(total, dtype=dtype, device=device)


def randn(shape: Sequence[int], dtype: torch.dtype, device: str, generator: torch.Generator) -> torch.Tensor:
    """N(0, 1), drawn on the CPU so that every device sees the same numbers."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(dtype).to(device)


def stack(*tensors: torch.Tensor) -> torch.Tensor:
    """Stacked in dimension 1, as bytes: torch 2.4 stacks no fp8 tensors on the CPU."""
    return torch.stack([x.view(torch.uint8) for x in tensors], dim=1).view(tensors[0].dtype)


@dataclass
class Options:
    """What a caller may ask for, in the API's terms; the oracle translates."""

    causal: bool = False
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None
    custom_masks: list[torch.Tensor] | None = None
    multi_items: list[oracle.MultiItem] | None = None
    sinks: torch.Tensor | None = None
    q_scale: float = 1.0
    k_scale: float = 1.0
    v_scale: float = 1.0

    def plan_kwargs(self) -> dict[str, Any]:
        """Those of the options that plan() and the single calls take by name, defaults left out."""
        names = (
            "causal",
            "window_left",
            "logits_soft_cap",
            "sm_scale",
            "pos_encoding_mode",
            "rope_scale",
            "rope_theta",
        )
        return {name: getattr(self, name) for name in names if getattr(self, name) != getattr(type(self), name)}


@dataclass
class Paged:
    """``cache`` as the API takes it, with its page table."""

    cache: Any
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    page_size: int
    kv_layout: str

    def table(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indptr.to(device), self.indices.to(device), self.last_page_len.to(device)


@dataclass
class Batch:
    qo_lens: list[int]
    kv_lens: list[int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    generator: torch.Generator = field(repr=False, default_factory=torch.Generator)

    @property
    def num_qo_heads(self) -> int:
        return self.q.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.q.shape[1], self.k.shape[1], self.q.shape[2]

    @property
    def device(self) -> str:
        return str(self.q.device)

    def qo_indptr(self, device: str = "cpu") -> torch.Tensor:
        return indptr(self.qo_lens, device)

    def kv_indptr(self, device: str = "cpu") -> torch.Tensor:
        return indptr(self.kv_lens, device)

    def requests(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        qs = self.q.split(self.qo_lens)
        return list(zip(qs, self.k.split(self.kv_lens), self.v.split(self.kv_lens)))

    def followed_by(self, other: Batch) -> Batch:
        """One batch of the requests of both."""
        pairs = ((self.q, other.q), (self.k, other.k), (self.v, other.v))
        tensors = (torch.cat([x.view(torch.uint8) for x in pair]).view(pair[0].dtype) for pair in pairs)
        return Batch([*self.qo_lens, *other.qo_lens], [*self.kv_lens, *other.kv_lens], *tensors)

    def dequantized(self, scale_q: torch.Tensor, scale_k: torch.Tensor, scale_v: torch.Tensor) -> Batch:
        """This batch in float32, with one factor per head of q, k and v."""
        scaled = (x.float() * s[:, None] for x, s in ((self.q, scale_q), (self.k, scale_k), (self.v, scale_v)))
        return Batch(self.qo_lens, self.kv_lens, *scaled)

    def random_masks(self, density: float = 0.6) -> list[torch.Tensor]:
        masks = []
        for n, m in zip(self.qo_lens, self.kv_lens):
            masks.append((torch.rand(n, m, generator=self.generator) < density).to(self.device))
        return masks

    def paged(
        self, page_size: int, kv_layout: str = "NHD", form: str = "stacked", spare: int = 3, unused: str = "nan"
    ) -> Paged:
        """The keys and values in randomly ordered pages; pages and entries that nothing refers to hold NaN."""
        counts = [-(-m // page_size) for m in self.kv_lens]
        total = sum(counts)
        ids = torch.randperm(total + spare, generator=self.generator)[:total].to(torch.int32)
        k_heads, dim_qk, dim_vo = self.k.shape[1], self.k.shape[2], self.v.shape[2]
        stacked = form == "stacked"
        if stacked:
            assert dim_qk == dim_vo
            shape = (total + spare, 2, page_size, k_heads, dim_qk)
            k_nhd, v_nhd = poison_(torch.empty(*shape, dtype=self.k.dtype, device=self.device)).unbind(1)
        else:
            pages = (total + spare, page_size, k_heads)
            k_nhd = poison_(torch.empty(*pages, dim_qk, dtype=self.k.dtype, device=self.device))
            v_nhd = poison_(torch.empty(*pages, dim_vo, dtype=self.v.dtype, device=self.device))
        if unused == "zero":
            k_nhd.zero_()
            v_nhd.zero_()
        lens = torch.tensor(self.kv_lens, dtype=torch.int64)
        first_page, first_key = (indptr(x)[:-1].repeat_interleave(lens) for x in (counts, self.kv_lens))
        at = torch.arange(sum(self.kv_lens)) - first_key
        page, entry = ids[first_page + at // page_size].long().to(self.device), (at % page_size).to(self.device)
        for pages_of, x in ((k_nhd, self.k), (v_nhd, self.v)):
            pages_of.view(torch.uint8)[page, entry] = x.view(torch.uint8)
        last = [0 if m == 0 else (m - 1) % page_size + 1 for m in self.kv_lens]
        if kv_layout == "HND":
            k_cache, v_cache = k_nhd.transpose(1, 2).contiguous(), v_nhd.transpose(1, 2).contiguous()
        else:
            k_cache, v_cache = k_nhd, v_nhd
        if stacked:
            cache: Any = stack(k_cache, v_cache)
            k_cache, v_cache = cache[:, 0], cache[:, 1]
        else:
            k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
            cache = (k_cache, v_cache)
        return Paged(
            cache,
            k_cache,
            v_cache,
            indptr(counts),
            ids,
            torch.tensor(last, dtype=torch.int32),
            page_size,
            kv_layout,
        )


def make_batch(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    *,
    head_dim_vo: int | None = None,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    dim_vo = head_dim if head_dim_vo is None else head_dim_vo
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    q = randn((sum(qo_lens), num_qo_heads, head_dim), dtype, device, generator)
    k = randn((sum(kv_lens), num_kv_heads, head_dim), kv_dtype, device, generator)
    v = randn((sum(kv_lens), num_kv_heads, dim_vo), kv_dtype, device, generator)
    return Batch(list(qo_lens), list(kv_lens), q, k, v, generator)


@dataclass
class Expected:
    out: torch.Tensor
    lse: torch.Tensor
    baseline: torch.Tensor


def expect(batch: Batch, options: Options | None = None, *, decode: bool = False) -> Expected:
    """The oracle's output and LSE for every row of the batch, and the 16-bit PyTorch baseline."""
    options = options or Options()
    outs, lses, bases = [], [], []
    for b, (q, k, v) in enumerate(batch.requests()):
        mask = oracle.visible(
            q.shape[0],
            k.shape[0],
            causal=options.causal,
            window_left=options.window_left,
            custom_mask=None if options.custom_masks is None else options.custom_masks[b],
            multi_item=None if options.multi_items is None else options.multi_items[b],
            device=q.device,
        )
        if q.dtype in FP8:
            q16, compute = q.to(torch.float16), torch.float16
        else:
            q16, compute = q, q.dtype
        k16, v16 = k.to(compute), v.to(compute)
        scale = q.shape[-1] ** -0.5 if options.sm_scale is None else options.sm_scale
        rope = None
        if options.pos_encoding_mode == "ROPE_LLAMA":
            rope = (1.0 if options.rope_scale is None else options.rope_scale, options.rope_theta or 1e4)
        alibi = None
        if options.pos_encoding_mode == "ALIBI":
            alibi = "decode" if decode else "relative"
        common: dict[str, Any] = dict(
            mask=mask,
            sm_scale=scale * options.q_scale * options.k_scale,
            soft_cap=options.logits_soft_cap,
            alibi=alibi,
            rope=rope,
            sinks=options.sinks,
            out_scale=options.v_scale,
        )
        exact = oracle.attention(q16, k16, v16, **common)
        outs.append(exact.out)
        lses.append(exact.lse)
        bases.append(oracle.attention(q16, k16, v16, arithmetic=compute, **common).out.to(compute))
    return Expected(torch.cat(outs), torch.cat(lses), torch.cat(bases))


def allowed_in_fp8(batch: Batch, options: Options | None = None) -> torch.Tensor:
    """What may be lost where probabilities are e4m3, which have 3 bits: the 16th part of each of them."""
    positive = replace(batch, v=batch.v.float().abs().to(batch.v.dtype))
    return expect(positive, replace(options or Options(), v_scale=abs((options or Options()).v_scale))).out / 16


def graph_buffers(batch_size: int, pages: int, device: str) -> dict[str, Any]:
    """What makes a paged wrapper one for CUDA graphs of ``batch_size`` requests and up to so many pages."""
    sizes = dict(qo_indptr=batch_size + 1, paged_kv_indptr=batch_size + 1, paged_kv_indices=pages)
    sizes["paged_kv_last_page_len"] = batch_size
    buffers = {f"{name}_buf": torch.zeros(size, dtype=torch.int32, device=device) for name, size in sizes.items()}
    return dict(use_cuda_graph=True, **buffers)
