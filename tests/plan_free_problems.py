"""attention(): batches in every form that it takes, and what they must give."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field
from typing import Any

import oracle
import torch
from compare import assert_close, assert_lse_close
from guards import poison_
from problems import FP8, Batch, indptr, make_batch

import cutlass_kernels as ck

FORMS = ["dense", "strided", "ragged", "used", "table", "indices"]


@dataclass
class Mask:
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    chunk_size: int = 0
    bits: list[torch.Tensor] | None = None

    def visible(self, b: int, n: int, m: int, device: Any) -> torch.Tensor:
        custom = None if self.bits is None else self.bits[b]
        return oracle.visible(
            n,
            m,
            causal=self.causal,
            window_left=self.window[0],
            window_right=self.window[1],
            chunk_size=0 if custom is not None else self.chunk_size,
            custom_mask=custom,
            device=device,
        )

    def arguments(self, device: Any) -> dict[str, Any]:
        given: dict[str, Any] = dict(causal=self.causal, window=self.window, chunk_size=self.chunk_size)
        if self.bits is not None:
            packed = [oracle.pack_bits(x, "little") for x in self.bits]
            given["packed_custom_mask"] = torch.cat(packed).to(device)
            given["mask_indptr"] = indptr([x.numel() for x in packed], device)
        return given


@dataclass
class Options:
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    alibi: bool = False
    descales: dict[str, Any] = field(default_factory=dict)  # by name: tensors [batch, num_kv_heads], or numbers
    extra: dict[str, Any] = field(default_factory=dict)  # of the call alone

    def arguments(self, heads: int, device: Any) -> dict[str, Any]:
        given: dict[str, Any] = dict(logits_soft_cap=self.soft_cap, sinks=self.sinks, **self.descales, **self.extra)
        if self.alibi:
            given["alibi_slopes"] = torch.tensor(oracle.alibi_slopes(heads), dtype=torch.float32, device=device)
        return given


def queries(batch: Batch, dense: bool) -> tuple[torch.Tensor, dict[str, Any]]:
    """q as ``[B, n, ...]``, which takes equal lengths, or with ``cu_seqlens_q``."""
    if dense:
        return batch.q.unflatten(0, (len(batch.qo_lens), -1)), {}
    longest = max([*batch.qo_lens, 1])
    return batch.q, dict(cu_seqlens_q=batch.qo_indptr(batch.device), max_seqlen_q=longest)


def keys(
    batch: Batch, form: str, layout: str = "NHD", page_size: int = 16, side_by_side: bool = False
) -> tuple[Any, Any, dict[str, Any]]:
    """k, v, and what says whose they are. What belongs to nobody is NaN."""
    device, lens = batch.device, torch.tensor(batch.kv_lens, dtype=torch.int32, device=batch.device)
    if form == "ragged":
        k, v = (torch.cat([x, poison_(torch.empty_like(x[:1].expand(5, -1, -1)))]) for x in (batch.k, batch.v))
        given: dict[str, Any] = dict(cu_seqlens_k=batch.kv_indptr(device))
    elif form in ("dense", "strided", "used"):
        room = max(batch.kv_lens) + (0 if form == "dense" else 5)
        room += room == 0
        k, v = (_padded(batch, x, room) for x in (batch.k, batch.v))
        given = dict(seqused_k=lens)
        if form == "strided":  # one request's keys do not follow another's
            k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
        elif form == "used":
            k, v = k.flatten(0, 1), v.flatten(0, 1)
            given["cu_seqlens_k"] = indptr([room] * len(batch.kv_lens), device)
    else:
        paged = batch.paged(page_size, "NHD", form="split")
        k, v = paged.k_cache, paged.v_cache
        table = paged.table(device)
        if form == "indices":
            given = dict(zip(("kv_indptr", "kv_indices", "kv_last_page_len"), table))
        else:
            given = dict(page_table=page_table(paged, len(batch.kv_lens)).to(device), seqused_k=lens)
    if side_by_side:
        both = torch.cat([x.view(torch.uint8) for x in (k, v)], -1).view(k.dtype)
        k, v = both[..., : k.size(-1)], both[..., k.size(-1) :]
    if layout == "HND":
        k, v = (x.transpose(-3, -2).contiguous() for x in (k, v))
    return k, v, dict(given, kv_layout=layout)


def caller(target: Any, batch: Batch, form: str = "table", dense: bool = False, **given: Any) -> Any:
    """attention() with the batch's tensors and lengths, unless the call replaces them."""
    q, whose_rows = queries(batch, dense)
    k, v, whose_keys = keys(batch, form)
    usual = dict(q=q, k=k, v=v, backend=target.backend) | whose_rows | whose_keys | given
    return functools.partial(ck.attention, **usual)


def _padded(batch: Batch, x: torch.Tensor, room: int) -> torch.Tensor:
    padded = poison_(torch.empty(len(batch.kv_lens), room, *x.shape[1:], dtype=x.dtype, device=x.device))
    for b, part in enumerate(x.split(batch.kv_lens)):
        padded[b, : part.size(0)] = part
    return padded


def page_table(paged: Any, batch: int) -> torch.Tensor:
    """Entries that no key refers to are no page numbers."""
    bounds, ids = paged.indptr.tolist(), paged.indices
    width = max(bounds[b + 1] - bounds[b] for b in range(batch)) + 1
    table = torch.full((batch, width), 10**6, dtype=torch.int32)
    for b in range(batch):
        table[b, : bounds[b + 1] - bounds[b]] = ids[bounds[b] : bounds[b + 1]]
    return table


def expect(batch: Batch, mask: Mask, options: Options) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and base-2 LSE of the oracle, and the output of PyTorch in 16 bits."""
    results, bases = [], []
    group = batch.num_qo_heads // batch.num_kv_heads

    def factor(name: str, b: int) -> torch.Tensor:
        value = options.descales.get(name, 1.0)
        if not isinstance(value, torch.Tensor):
            return torch.full((batch.num_qo_heads,), float(value))
        value = value[b] if value.dim() == 2 else value
        return value.cpu().repeat_interleave(batch.num_qo_heads // value.numel())

    for b, (q, k, v) in enumerate(batch.requests()):
        compute = torch.float16 if q.dtype in FP8 else q.dtype
        common: dict[str, Any] = dict(
            mask=mask.visible(b, q.shape[0], k.shape[0], q.device),
            soft_cap=options.soft_cap,
            alibi="relative" if options.alibi else None,
            sinks=options.sinks,
            head_scale=(factor("q_descale", b) * factor("k_descale", b)).to(q.device),
            out_scale=factor("v_descale", b).to(q.device),
        )
        wide = [x.to(compute) for x in (q, k, v)]
        results.append(oracle.attention(*wide, **common))
        bases.append(oracle.attention(*wide, arithmetic=compute, **common).out.to(compute))
    assert group
    return torch.cat([r.out for r in results]), torch.cat([r.lse for r in results]), torch.cat(bases)


def places_of(total: int, shard: tuple[int, int, int]) -> torch.Tensor:
    """Positions of a request's keys that a rank holds."""
    world, rank, block = shard
    every = torch.arange(total)
    return every[every // block % world == rank]


def part_of(batch: Batch, mask: Mask, shard: tuple[int, int, int]) -> tuple[Batch, Mask]:
    """The batch with the keys of a rank alone, and what the mask over all keys shows of them."""
    places = [places_of(n, shard).to(batch.device) for n in batch.kv_lens]
    rows = torch.cat([p + sum(batch.kv_lens[:b]) for b, p in enumerate(places)])
    take = lambda x: x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]  # noqa: E731
    sizes = zip(batch.qo_lens, batch.kv_lens, strict=True)
    seen = [mask.visible(b, n, m, batch.device)[:, places[b]] for b, (n, m) in enumerate(sizes)]
    held = Batch(batch.qo_lens, [p.numel() for p in places], batch.q, take(batch.k), take(batch.v))
    return held, Mask(bits=seen)


def check(
    batch: Batch,
    target: Any,
    form: str,
    mask: Mask | None = None,
    options: Options | None = None,
    shard: tuple[int, int, int] | None = None,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A call in this form gives what it must; returns output and LSE ``[rows, heads, ...]``.

    With a ``shard`` it gives what the keys of a rank contribute: those of the mask over all keys, of which it holds
    some.
    """
    mask, options = mask or Mask(), options or Options()
    held, seen = (batch, mask) if shard is None else part_of(batch, mask, shard)
    q, whose_rows = queries(held, more.pop("dense", False))
    layout, page_size = more.pop("layout", "NHD"), more.pop("page_size", 16)
    k, v, whose_keys = keys(held, form, layout, page_size, more.pop("side_by_side", False))
    given = {
        **whose_rows,
        **whose_keys,
        **mask.arguments(batch.device),
        **options.arguments(batch.num_qo_heads, batch.device),
        **more,
    }
    if shard is not None:
        lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device=batch.device)
        given |= dict(seqused_k=lens, kv_shard=shard)
    out, lse = ck.attention(q, k, v, return_lse=True, backend=target.backend, **given)
    assert out.shape == (*q.shape[:-1], v.size(-1)) and lse.shape == q.shape[:-1]
    want, want_lse, base = expect(held, seen, options)
    out, lse = out.flatten(0, -3), lse.flatten(0, -2)
    fp8 = batch.q.dtype in FP8
    if fp8:
        assert_close(out, want, atol=0.12, rtol=0.12)
    else:
        assert_close(out, want, base.to(out.dtype))
    assert_lse_close(lse, want_lse, atol=5e-3 if fp8 else None)
    return out, lse


def random_batch(rng: random.Random, device: str, dtype: torch.dtype, **sizes: Any) -> tuple[Batch, bool]:
    """A batch, and whether its rows can be ``[B, n, ...]``."""
    count = rng.choice([1, 1, 2, 3, 5, 33])
    dense = rng.random() < 0.4
    longest = rng.choice([1, 1, 1, 3, 17, 70, 150])
    most_keys = rng.choice([1, 40, 130, 300, 900])
    n = rng.randint(1, longest)
    qo_lens = [n if dense else rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(count)]
    if sum(qo_lens) == 0:
        qo_lens[-1] = 1
    kv_lens = [rng.choice([0, 1, rng.randint(0, most_keys), most_keys]) for _ in range(count)]
    if sum(kv_lens) == 0:
        kv_lens[0] = 3
    heads = rng.choice([(1, 1), (4, 4), (4, 2), (8, 1), (6, 2), (20, 4), (14, 2)])
    batch = make_batch(qo_lens, kv_lens, *heads, device=device, dtype=dtype, seed=rng.randrange(1 << 30), **sizes)
    return batch, dense


def random_mask(rng: random.Random, batch: Batch) -> Mask:
    kind = rng.choice(["full", "causal", "causal", "window", "both", "left", "right", "chunk", "causal chunk", "bits"])
    some = rng.choice([0, 1, 7, 64, 200])
    other = rng.choice([0, 3, 33, 500])
    if kind == "bits":
        left = rng.choice([-1, -1, other])
        return Mask(window=(left, rng.choice([-1, -1, some])), bits=batch.random_masks(rng.choice([0.1, 0.6])))
    return {
        "full": Mask(),
        "causal": Mask(causal=True),
        "window": Mask(causal=True, window=(some, -1)),
        "both": Mask(window=(some, other)),
        "left": Mask(window=(some, -1)),
        "right": Mask(window=(-1, other)),
        "chunk": Mask(chunk_size=some + 1),
        "causal chunk": Mask(causal=True, chunk_size=some + 1),
    }[kind]
