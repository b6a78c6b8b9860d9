"""Layouts, masks and lengths that the tests of trtllm_fmha_v2_prefill on devices share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_close
from problems import Batch, make_batch
from test_fmha_v2 import LAYOUTS, PAGE, Mode, block_table, call, expect

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
