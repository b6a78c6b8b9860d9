"""trtllm_fmha_v2_prefill: calls in every layout, what they must give, and the masks and lengths that tests share."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from captures import capture
from compare import assert_bitwise, assert_close
from problems import Batch, make_batch, stack

import cutlass_kernels as ck

E4M3 = torch.float8_e4m3fn
LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"]
PAGED, RAGGED = LAYOUTS[3:], LAYOUTS[:3]
NOT_PACKED = LAYOUTS[1:]  # in which requests may have more keys than rows
PAGE = 32
SINKS = torch.tensor([-2.0, 0.5, 1.5, 6.0])


@dataclass
class Mode:
    mask_mode: str = "causal"
    window_left: int = -1
    chunked_attention_size: int = 0
    cap: float | None = None
    alibi: bool = False
    sinks: torch.Tensor | None = None
    bmm1: float = 0.0
    bmm2: float = 1.0

    def __str__(self) -> str:
        """What differs from the defaults: the name of a case."""
        values = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return " ".join(
            name if isinstance(x, torch.Tensor) else f"{name}={x}"
            for name, x in values.items()
            if isinstance(x, torch.Tensor) or x != getattr(Mode, name)
        )


MODES = {
    "causal": Mode(),
    "padding": Mode(mask_mode="padding"),
    "window": Mode(mask_mode="sliding_window", window_left=21),
    "chunks": Mode(mask_mode="chunked", chunked_attention_size=32),
    "cap": Mode(cap=2.0, bmm1=0.4),
    "alibi": Mode(alibi=True, cap=1.5, bmm1=0.5),
    "scales": Mode(bmm1=0.2, bmm2=0.5),
}
# Query lengths and lengths of the keys before them. Uneven, so that a kernel's tiles come in the order of rows; even;
# and with empty requests at either end.
LENGTHS = {
    "usual": ([20, 33, 1], [50, 0, 8]),
    "uneven": ([140, 1, 0, 17, 64, 1, 5, 1], [20, 130, 9, 0, 3, 1, 64, 7]),
    "even": ([70, 64, 65], [10, 0, 129]),
    "empty": ([0, 20, 0, 33, 0], [0, 50, 12, 0, 0]),
    "decode": ([1, 1, 1, 1], [600, 3, 0, 77]),
}
# Short queries over many keys. Four heads share a key head: up to 4 rows of a request are a tile of decoding, up to 16
# or 32 one of packed heads.
SHORT = {
    "one row": ([1], [4000]),
    "one request": ([7], [3001]),
    "five rows": ([1, 1, 1, 1, 1], [6000, 3, 0, 1200, 77]),
    "few rows": ([3, 1, 4], [2500, 900, 0]),
    "two tiles": ([20, 33, 1, 48], [2000, 10, 4100, 0]),
    "long": ([200, 130], [22900, 1000]),
    "empty requests": ([0, 2, 0], [0, 2000, 700]),
    "equal": ([4, 4, 4], [2044, 2044, 2044]),
    "ones": ([1, 1, 1], [2499, 19, 2499]),
}


def batch_for(
    target, layout: str, qo_lens: list[int], past: list[int], heads: tuple[int, int], *sizes, **more
) -> Batch:
    """Requests with ``past`` keys before their own; packed ones have none, and as many key heads as query heads."""
    packed = layout == "PACKED_QKV"
    kv_lens = qo_lens if packed else [n + m for n, m in zip(qo_lens, past)]
    heads = (heads[0], heads[0] if packed else heads[1])
    return make_batch(qo_lens, kv_lens, *heads, *sizes, device=target.device, **more)


def batch_of(target, layout: str, lengths: str = "usual", dtype=torch.float16, head_dim=64) -> Batch:
    qo_lens, past = (LENGTHS | SHORT)[lengths]
    if layout == "PACKED_QKV" and lengths == "usual":
        qo_lens = [n + m for n, m in zip(qo_lens, past)]
    return batch_for(target, layout, qo_lens, past, (8 if lengths in SHORT else 4, 2), head_dim, dtype=dtype)


def pack(batch: Batch, layout: str) -> tuple[Any, torch.Tensor | None]:
    """``(qkv, block_tables)``; entries of the table that no request reaches are no page numbers."""
    if layout == "PACKED_QKV":
        return stack(batch.q, batch.k, batch.v), None
    if layout == "CONTIGUOUS_Q_KV":
        return (batch.q, stack(batch.k, batch.v)), None
    if layout == "SEPARATE_Q_K_V":
        return (batch.q, batch.k, batch.v), None
    paged = batch.paged(PAGE, layout[-3:])
    return (batch.q, paged.cache), block_table(paged).to(batch.device)


def block_table(paged) -> torch.Tensor:
    bounds, ids = paged.indptr.tolist(), paged.indices.tolist()
    width = max(b - a for a, b in itertools.pairwise(bounds)) + 2
    table = torch.full((len(bounds) - 1, width), 10**6, dtype=torch.int32)
    for b in range(len(bounds) - 1):
        mine = ids[bounds[b] : bounds[b + 1]]
        table[b, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
    return table


def workspace(device: str) -> torch.Tensor:
    """Filling 64 MiB takes longer on the CPU than most calls, and the reference needs none."""
    return torch.zeros(16 if device == "cpu" else 64 << 20, dtype=torch.uint8, device=device)


def call(batch: Batch, layout: str, mode: Mode, *, qkv=None, tables=None, **extra):
    if qkv is None:
        qkv, tables = pack(batch, layout)
    device = batch.device

    def given(name: str, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        return extra[name] if name in extra else make()  # nothing is made on the device for nobody

    arguments: dict[str, Any] = dict(
        qkv=qkv,
        input_layout=layout,
        workspace_buffer=given("workspace_buffer", lambda: workspace(device)),
        seq_lens=given("seq_lens", lambda: torch.tensor(batch.kv_lens, dtype=torch.int32, device=device)),
        max_q_len=max(batch.qo_lens),
        max_kv_len=max(batch.kv_lens),
        bmm1_scale=mode.bmm1,
        bmm2_scale=mode.bmm2,
        batch_size=len(batch.qo_lens),
        cum_seq_lens_q=given("cum_seq_lens_q", lambda: batch.qo_indptr(device)),
        cum_seq_lens_kv=given("cum_seq_lens_kv", lambda: batch.kv_indptr(device)),
        block_tables=tables,
        mask_mode=mode.mask_mode,
        window_left=mode.window_left,
        chunked_attention_size=mode.chunked_attention_size,
        logits_soft_cap_scale=mode.cap,
        pos_encoding_mode="alibi" if mode.alibi else None,
        sinks=None if mode.sinks is None else mode.sinks.to(device),
    )
    return ck.trtllm_fmha_v2_prefill(**(arguments | extra))


def expect(batch: Batch, mode: Mode) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(out, stats, baseline)``."""
    results, bases = [], []
    for q, k, v in batch.requests():
        padding = mode.mask_mode.lower() == "padding"
        mask = oracle.visible(
            q.shape[0],
            k.shape[0],
            causal=not padding,
            window_left=-1 if mode.mask_mode == "causal" and mode.window_left == 0 else mode.window_left,
            chunk_size=mode.chunked_attention_size,
            device=q.device,
        )
        common: dict[str, Any] = dict(
            mask=mask,
            sm_scale=mode.bmm1 or None,
            soft_cap=mode.cap,
            alibi="after_cap" if mode.alibi else None,
            sinks=mode.sinks,
            sinks_in_lse=False,
            out_scale=mode.bmm2,
        )
        results.append(oracle.attention(q, k, v, **common))
        compute = q.dtype if q.dtype in (torch.float16, torch.bfloat16) else torch.float16
        bases.append(oracle.attention(q, k, v, arithmetic=compute, **common).out)
    return torch.cat([r.out for r in results]), torch.cat([r.stats for r in results]), torch.cat(bases)


def rounded_in_e4m3(batch: Batch, mode: Mode) -> torch.Tensor:
    """What may be lost of an output where probabilities are e4m3: a 16th of what absolute values would sum up to."""
    positive = dataclasses.replace(batch, v=batch.v.float().abs().to(batch.v.dtype))
    return expect(positive, dataclasses.replace(mode, bmm2=abs(mode.bmm2)))[0].nan_to_num(0.0) / 16


def check(batch: Batch, layout: str, mode: Mode | None = None, *, atol: float | None = None, **extra) -> torch.Tensor:
    mode = mode or Mode()
    out = call(batch, layout, mode, **extra)
    assert extra.get("out") is None or out.data_ptr() == extra["out"].data_ptr()
    want, _, base = expect(batch, mode)
    if batch.q.dtype == E4M3:
        rtol = 2e-2 + (1 / 16 if out.dtype == E4M3 else 0.0)
        assert_close(out.float(), want, atol=2e-2, rtol=rtol, allowed=rounded_in_e4m3(batch, mode))
    else:
        atol = atol or (2e-3 if mode.bmm2 != 1.0 else None)
        assert_close(out, want, base.to(out.dtype), atol=atol, dtype=batch.q.dtype)
    return out


def check_stats(batch: Batch, layout: str, mode: Mode, **extra: Any) -> None:
    """Output and statistics; a maximum of a part of a row, or one that was good enough for the output, is none."""
    out, stats = call(batch, layout, mode, save_softmax_stats=True, **extra)
    want, want_stats, base = expect(batch, mode)
    assert_close(out, want, base.to(out.dtype), atol=2e-3 if mode.bmm2 != 1.0 else None)
    assert stats.shape == want_stats.shape and stats.dtype == torch.float32 and stats.is_contiguous()
    maximum, total = stats.unbind(-1)
    want_maximum, want_total = want_stats.unbind(-1)
    none = want_total == 0
    assert torch.equal(maximum[none], torch.full_like(maximum[none], torch.finfo(torch.float32).min))
    assert torch.count_nonzero(total[none]) == 0
    some = ~none
    torch.testing.assert_close(maximum[some].double(), want_maximum[some], atol=2e-4, rtol=2e-5)
    torch.testing.assert_close(total[some].double(), want_total[some], atol=0.0, rtol=4e-3)


def steps(x: torch.Tensor) -> torch.Tensor:
    """How far e4m3 numbers as large as ``x`` are apart."""
    exponent = torch.frexp(x.nan_to_num(0.0).abs().clamp(2.0**-6, 448.0)).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent - 3)


class InE4M3:
    """The oracle's output rounded to e4m3. Results may be a step away; and as far as probabilities are rounded, by what
    that may make of the sum of absolute values: those of e4m3 by a sixteenth, beside what tensor cores lose of logits.
    """

    def __init__(self, batch: Batch, mode: Mode, target) -> None:
        self.exact = expect(batch, mode)[0]
        self.rounded = self.exact.clamp(-448.0, 448.0).float().to(E4M3).double()
        self.lost = torch.zeros_like(self.exact)
        if not target.is_reference:
            fp8, sums = target.backend == "fa3", 16 * rounded_in_e4m3(batch, mode)
            self.lost = sums * 0.08 + 4e-3 * abs(mode.bmm2) if fp8 else sums * 2.0**-10

    def check(self, out: torch.Tensor) -> None:
        assert out.dtype == E4M3
        got = out.double()
        largest = torch.maximum(self.rounded.nan_to_num(0.0).abs(), got.nan_to_num(0.0).abs())
        assert_close(got, self.rounded, atol=0.0, rtol=0.0, allowed=steps(largest) + self.lost)


def check_e4m3(batch: Batch, layout: str, mode: Mode, target, **extra) -> torch.Tensor:
    out = call(batch, layout, mode, out_dtype=E4M3, **extra)
    InE4M3(batch, mode, target).check(out)
    return out


def tensors_of(target, mode: Mode) -> dict[str, torch.Tensor]:
    """The scales of a mode as tensors."""
    return {f"{x}_scale": torch.tensor([getattr(mode, x)], device=target.device) for x in ("bmm1", "bmm2")}


def in_caches(
    batch: Batch, layout: str, page: int = PAGE, between: int = 0, own_order: bool = False
) -> tuple[Any, torch.Tensor]:
    """``(qkv, block_tables)`` with keys and values in caches of their own, one behind the other, and ``between`` them
    blocks that are neither's. The table counts from the first block of keys; values may lie in another order."""
    paged = batch.paged(page, layout[-3:], "tuple")
    keys, values, pages = paged.k_cache, paged.v_cache, block_table(paged)
    count, of_values = len(keys), pages
    if own_order:
        order = torch.randperm(count)
        values = torch.empty_like(values)
        values[order.to(batch.device)] = paged.v_cache
        of_values = torch.where(pages < count, order.int()[pages.clamp(max=count - 1).long()], pages)
    nothing = [torch.full_like(keys[:1], torch.nan)] * between
    whole, first = torch.cat([keys, *nothing, values]), count + between
    tables = torch.stack([pages, of_values + first], dim=1)
    return (batch.q, (whole[:count], whole[first:])), tables.to(batch.device)


def on_device(batch: Batch, tables: torch.Tensor | None, qkv: Any) -> dict[str, Any]:
    """Arguments with which a call makes nothing of its own on the device."""
    return dict(
        qkv=qkv,
        tables=tables,
        out=torch.empty_like(batch.q),
        workspace_buffer=torch.zeros(16, dtype=torch.uint8, device=batch.device),
        seq_lens=torch.zeros(len(batch.qo_lens), dtype=torch.int32, device=batch.device),
        cum_seq_lens_q=batch.qo_indptr(batch.device),
        cum_seq_lens_kv=batch.kv_indptr(batch.device),
    )


def kernels_of(run: Callable[[], Any]) -> list[str]:
    """Names of what runs on the device, in order; but for what the first call alone does."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in names if "Sync" not in name]


def on_gpu(target) -> None:
    if target.is_reference:
        pytest.skip("what only the device knows is never wrong on the CPU: it is checked")


class Captured:
    """A captured call, whose replays read what its buffers hold: any batch of up to this size."""

    def __init__(
        self, target, layout: str, mode: Mode, requests: int, rows: int, keys: int, heads=(4, 2), dtype=torch.float16
    ) -> None:
        self.target, self.layout, self.mode, self.requests, self.rows = target, layout, mode, requests, rows
        self.dtype, self.most = dtype, rows if layout == "PACKED_QKV" else keys
        dim, heads = 128 if dtype == E4M3 else 64, (heads[0], heads[0] if layout == "PACKED_QKV" else heads[1])
        self.q, self.out = self.zeros(rows, heads[0], dim), self.zeros(rows, heads[0], dim)
        self.cum_q, self.cum_kv = torch.zeros(2, requests + 1, dtype=torch.int32, device=target.device)
        self.tables = None
        if layout in PAGED:
            self.tables = torch.zeros(requests, keys // PAGE, dtype=torch.int32, device=target.device)
            page = (PAGE, heads[1]) if layout.endswith("NHD") else (heads[1], PAGE)
            self.kv = self.zeros(requests * keys // PAGE + 3, 2, *page, dim)
        elif layout == "PACKED_QKV":
            self.kv = self.zeros(rows, 3, heads[0], dim)
        elif layout == "CONTIGUOUS_Q_KV":
            self.kv = self.zeros(requests * keys, 2, heads[1], dim)
        else:
            self.kv = self.zeros(2, requests * keys, heads[1], dim)
        self.qkv = {"PACKED_QKV": self.kv, "SEPARATE_Q_K_V": (self.q, *self.kv[:2])}.get(layout, (self.q, self.kv))
        self.every_byte = torch.arange(self.out.numel() * dtype.itemsize, device=target.device).to(torch.uint8)
        self.every_byte = self.every_byte.view(rows, heads[0], -1)

    def zeros(self, *shape: int) -> torch.Tensor:
        size = (*shape[:-1], shape[-1] * self.dtype.itemsize)
        return torch.zeros(size, dtype=torch.uint8, device=self.target.device).view(self.dtype)

    def load(self, batch: Batch) -> None:
        qkv, tables = pack(batch, self.layout)
        self.cum_q.copy_(batch.qo_indptr())
        self.cum_kv.copy_(batch.kv_indptr())
        self.q[: len(batch.q)] = batch.q
        if self.layout == "SEPARATE_Q_K_V":
            self.kv[0, : len(batch.k)], self.kv[1, : len(batch.v)] = batch.k, batch.v
        else:
            packed = qkv if self.layout == "PACKED_QKV" else qkv[1]
            self.kv[: len(packed)] = packed
        if tables is not None:
            self.tables.fill_(2**31 - 1)
            self.tables[:, : tables.size(1)] = tables[:, : self.tables.size(1)]
        self.out.view(torch.uint8).copy_(self.every_byte)

    def run(self, out: torch.Tensor | None = None) -> None:
        ck.trtllm_fmha_v2_prefill(
            self.qkv,
            self.layout,
            torch.zeros(0, dtype=torch.uint8),
            self.cum_kv,
            self.rows,
            self.most,
            self.mode.bmm1,
            self.mode.bmm2,
            self.requests,
            self.cum_q,
            self.cum_kv,
            self.tables,
            out=self.out if out is None else out,
            pos_encoding_mode="alibi" if self.mode.alibi else None,
            logits_soft_cap_scale=self.mode.cap,
            mask_mode=self.mode.mask_mode,
            window_left=self.mode.window_left,
        )

    def check(self, batch: Batch) -> None:
        """Rows of the batch hold what they must, all others what they did."""
        rows = sum(batch.qo_lens)
        assert torch.equal(self.out[rows:].view(torch.uint8), self.every_byte[rows:])
        if rows and self.dtype == E4M3:
            InE4M3(batch, self.mode, self.target).check(self.out[:rows])
            eager = torch.empty_like(self.out)
            self.run(eager)
            assert_bitwise(self.out[:rows], eager[:rows])
        elif rows:
            want, _, base = expect(batch, self.mode)
            assert_close(self.out[:rows], want, base)

    def follow(self, batches: list[Batch]) -> None:
        """Replays of a graph that is captured with the first batch give what calls of each batch do."""
        self.load(batches[0])
        graph, _ = capture(self.run)
        for batch in (*batches, *reversed(batches)):
            self.load(batch)
            graph.replay()
            torch.cuda.synchronize()
            self.check(batch)
