"""trtllm_fmha_v2_prefill: calls in every layout, what they must give, and the masks and lengths that tests share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close
from problems import Batch, make_batch, stack

import cutlass_kernels as ck

LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"]
PAGE = 32


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
        sinks=mode.sinks,
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
            window_left=mode.window_left,
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


def check(batch: Batch, layout: str, mode: Mode, **extra) -> None:
    out = call(batch, layout, mode, **extra)
    want, _, base = expect(batch, mode)
    assert_close(out, want, base.to(out.dtype), atol=2e-3 if mode.bmm2 != 1.0 else None, dtype=batch.q.dtype)


def batch_for(layout: str, target, dtype=torch.float16, head_dim=64, heads=(4, 2)) -> Batch:
    kv_lens = [70, 33, 9]
    if layout == "PACKED_QKV":
        return make_batch(kv_lens, kv_lens, heads[0], heads[0], head_dim, dtype=dtype, device=target.device)
    return make_batch([20, 33, 1], kv_lens, *heads, head_dim, dtype=dtype, device=target.device)


E4M3 = torch.float8_e4m3fn
PAGED = ["Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"]
RAGGED = [layout for layout in LAYOUTS if layout not in PAGED]
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
    "uneven": ([140, 1, 0, 17, 64, 1, 5, 1], [20, 130, 9, 0, 3, 1, 64, 7]),
    "even": ([70, 64, 65], [10, 0, 129]),
    "empty": ([0, 20, 0, 33, 0], [0, 50, 12, 0, 0]),
    "decode": ([1, 1, 1, 1], [600, 3, 0, 77]),
}


def batch_of(target, layout: str, lengths: str = "uneven", dtype=torch.float16, head_dim=64) -> Batch:
    qo_lens, past = LENGTHS[lengths]
    packed = layout == "PACKED_QKV"
    kv_lens = qo_lens if packed else [n + m for n, m in zip(qo_lens, past)]
    return make_batch(qo_lens, kv_lens, 4, 4 if packed else 2, head_dim, dtype=dtype, device=target.device)


def in_caches(batch: Batch, layout: str) -> tuple[Any, torch.Tensor]:
    """``(qkv, block_tables)`` with keys and values in caches of their own, one behind the other."""
    paged = batch.paged(PAGE, layout[-3:], "tuple")
    count = len(paged.k_cache)
    whole, pages = torch.cat([paged.k_cache, paged.v_cache]), block_table(paged)
    tables = torch.stack([pages, pages + count], dim=1)
    return (batch.q, (whole[:count], whole[count:])), tables.to(batch.device)


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
