"""Runs every tile of every kernel once or more, for compute-sanitizer.

    compute-sanitizer --tool memcheck  --kernel-name kns=attention_kernel python tests/sanitize.py
    compute-sanitizer --tool racecheck --kernel-name kns=attention_kernel python tests/sanitize.py --rounds 3
    compute-sanitizer --tool memcheck  --kernel-name kns=write_list_kernel  python tests/sanitize.py
    compute-sanitizer --tool memcheck  python tests/sanitize.py --backends
    compute-sanitizer --tool racecheck --kernel-name kns=attention_kernel python tests/sanitize.py --parts fused decode

The filter takes the kernels of both backends; without a backend, the kernels that only move memory are left. A hazard
may show in one round of several. Shapes are small, but have tiles enough to be given the large ones (config.h of either
backend) and to give blocks of fa3 several, rows and warps without keys, and tiles that end inside a sequence. The part
"calls" is every public call of the registry, once.
"""

from __future__ import annotations

import argparse
from itertools import accumulate
from typing import Any

import quantized_problems
import torch
from plan_free_problems import keys, queries
from problems import Options, make_batch
from quantized_caches import LAYOUTS
from quantized_problems import make as make_quantized
from registry import ENTRIES, Data
from targets import Target
from wrapper_problems import Wrapped

import cutlass_kernels as ck
from cutlass_kernels import _C
from cutlass_kernels._compute import selection

DEVICE = "cuda:0"
Lengths = list[tuple[int, int]]  # (queries, keys) per request


def attend(
    backend: str,
    head_dim: int,
    heads: tuple[int, int],
    lengths: Lengths,
    dtype: torch.dtype = torch.bfloat16,
    *,
    sinks: bool = False,
    mask: bool = False,
    alibi: bool = False,
    scales: bool = False,
    page_size: int | None = None,
    kv_dtype: torch.dtype | None = None,
    soft_cap: float | None = None,
    **options: Any,
) -> None:
    """One call; fails where a result is not finite. Head dimension 192 has values of 128.

    ``mask`` is a random custom mask in packed form, at an address that is no multiple of 4, and ``scales`` are tensors.
    With a page size, keys and values are in pages in random order.
    """
    qo_lens, kv_lens = zip(*lengths)
    sizes = {"head_dim_vo": 128 if head_dim == 192 else head_dim, "dtype": dtype, "kv_dtype": kv_dtype}
    batch = make_batch(qo_lens, kv_lens, *heads, head_dim, device=DEVICE, **sizes)
    sink = torch.randn(heads[0], device=DEVICE) if sinks else None
    encoding = "ALIBI" if alibi else "NONE"
    asked = Options(sinks=sink, logits_soft_cap=soft_cap, pos_encoding_mode=encoding, **options)
    kind = "paged" if page_size is not None else "single" if len(lengths) == 1 else "ragged"
    given: dict[str, Any] = {
        "o_dtype" if kind == "single" else "o_data_type": torch.bfloat16 if dtype.itemsize == 1 else dtype
    }
    if mask:
        size = sum((rows * keys + 7) // 8 for rows, keys in lengths)
        given["packed_custom_mask"] = torch.randint(256, (size + 1,), device=DEVICE).to(torch.uint8)[1:]
    call = Wrapped(Target(DEVICE, backend), kind, batch, page_size or 16, form="tuple").plan(asked, **given)
    names = [f"scale_{x}" if kind == "single" else f"{x}_scale" for x in "qkv"] if scales else []
    per_head = [torch.rand(count, device=DEVICE) for count in (heads[0], heads[1], heads[1])]
    out, _ = call.run(return_lse=True, **dict(zip(names, per_head)))
    assert out.isfinite().all()


def every_tile(backend: str, head_dim: int) -> None:
    """Calls that between them use every tile a GPU has of a head dimension: where it has the shared memory for fa2's
    large one of 256, it never uses the small one, which is for other GPUs."""
    batch = [(1, 300), (0, 5), (40, 0), (130, 70), (65, 200)]
    attend(backend, head_dim, (4, 2), [(70, 130)], causal=True)
    attend(backend, head_dim, (4, 1), [(33, 257)], window_left=20, sinks=True)
    attend(backend, head_dim, (2, 1), batch, causal=True, soft_cap=30.0, sinks=True)
    attend(backend, head_dim, (70, 70), [(300, 333)])
    attend(backend, head_dim, (70, 7), [(300, 333)], torch.float16, causal=True)
    attend(backend, head_dim, (70, 14), [(640, 640)], causal=True, window_left=50)
    attend(backend, head_dim, (70, 70), [(300, 150)], soft_cap=20.0)
    attend(backend, head_dim, (4, 2), [(70, 131)], mask=True, scales=True)
    attend(backend, head_dim, (4, 1), [(130, 77)], mask=True, window_left=20, soft_cap=20.0)
    attend(backend, head_dim, (4, 2), [(1, 3), *batch], mask=True, alibi=True, sinks=True)
    attend(backend, head_dim, (70, 10), [(300, 203), (200, 333)], mask=True)
    attend(backend, head_dim, (70, 10), [(300, 333)], causal=True, alibi=True, scales=True)
    for page_size in (1, 5, 8, 16, 64):
        attend(backend, head_dim, (4, 2), batch, causal=True, page_size=page_size)
        attend(backend, head_dim, (6, 2), batch, mask=True, window_left=40, page_size=page_size)
    attend(backend, head_dim, (70, 10), [(300, 333), (5, 700)], page_size=16)
    attend(backend, head_dim, (70, 10), [(300, 333), (5, 70)], causal=True, soft_cap=9.0, page_size=5)
    # Heads of their own, whose rows are not packed; rows of many heads, and keys that are split.
    for page_size in (None, 1, 8):
        attend(backend, head_dim, (4, 4), batch, causal=True, page_size=page_size)
        attend(backend, head_dim, (3, 3), batch, mask=True, page_size=page_size)
        attend(backend, head_dim, (10, 2), [(3, 1500), (1, 2000), (0, 30), (40, 900)], causal=True, page_size=page_size)
        attend(backend, head_dim, (8, 1), [(9, 1100), (1, 2000)], mask=True, sinks=True, page_size=page_size)
    attend(backend, head_dim, (8, 1), [(33, 3000)], causal=True)
    if head_dim == 64:
        attend(backend, 64, (64, 64), [(128, 128)] * 34, causal=True)  # many short tiles


def decode(
    backend: str,
    head_dim: int,
    page_size: int | None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """Tiles for decode, merged by their last block (up to four rows) and by a kernel of its own."""
    more: dict[str, Any] = {"page_size": page_size, "dtype": dtype, "kv_dtype": kv_dtype}
    attend(backend, head_dim, (8, 2), [(1, 1500), (1, 700), (1, 0), (0, 40), (1, 33)], sinks=True, **more)
    attend(backend, head_dim, (5, 5), [(1, 1500), (2, 700), (1, 1)], causal=True, soft_cap=9.0, **more)
    attend(backend, head_dim, (8, 1), [(1, 2500), (2, 90), (3, 130)], causal=True, **more)
    attend(backend, head_dim, (4, 1), [(1, 1500), (1, 200)], mask=True, alibi=True, **more)


def every_latent(backend: str, head_dim: int) -> None:
    """Latent attention, once for all head dimensions: tiles of few and of many rows, blocks of both warpgroups, pages
    by TMA and gathered, columns in tensors of their own, splits that are combined, shares of requests of their own."""
    if head_dim != 64:
        return
    for heads, lengths in (
        (8, [(1, 300), (0, 5), (2, 0), (1, 64), (1, 1)]),  # fa2: 16 rows
        (16, [(2, 1500), (1, 33), (3, 129)]),
        (128, [(1, 300), (0, 5), (3, 200), (40, 130)]),
        (128, [(1, n) for n in (1500, 0, 70, 5000, 1, 640, 300)]),  # fa3: equal shares of the keys
        (64, [(2, n) for n in (2500, 2, 700, 64)]),
    ):
        for dtype in (torch.bfloat16, torch.float16):
            for page_size in (None, 1, 5, 8, 64):
                latent(backend, heads, lengths, page_size, dtype)
            latent(backend, heads, lengths, 16, dtype, apart=True, logits_soft_cap=9.0)
            latent(backend, heads, lengths, 64, dtype, batch_invariant=True, window=(40, 3))
            if backend == "fa2":  # which alone reads caches of 8 bits
                for page_size in (None, 5, 64):
                    latent(backend, heads, lengths, page_size, dtype, keys_dtype=torch.float8_e4m3fn)
            for columns in (576, 512):
                selected(backend, heads, columns, dtype)
                if backend == "fa2":
                    selected(backend, heads, columns, dtype, torch.float8_e4m3fn)


def selected(backend: str, heads: int, columns: int, dtype: torch.dtype, keys_dtype: torch.dtype | None = None) -> None:
    """Keys by slots, of which the last ends where the cache does, and slots that do not exist."""
    q = torch.randn(7, heads, columns, device="cuda").to(dtype)
    k = torch.randn(300, 1, columns, device="cuda").to(keys_dtype or dtype)
    for width in (5, 1200):
        indices = torch.randint(-9, 309, (7, 1, width), dtype=torch.int32, device="cuda")
        indices[..., 3] = 299
        out = ck.attention(q, k, k[..., :512], kv_indices_per_token=indices, backend=backend)
        assert out.isfinite().all()


def every_quantized(backend: str, head_dim: int) -> None:
    """Quantized latent caches, once for all head dimensions: one and two of them, rows that are split and that are not,
    lists of which the device alone knows the lengths, one or two CTAs for a row's heads."""
    if head_dim != 64 or backend != "fa3":
        return
    for kind in LAYOUTS:
        for heads in (8, 24, 64, 128):
            for rows, widths in ((1, (1200, 300)), (9, (300, 70)), (150, (70, 65))):
                for kinds in [[kind]] if kind == "v3.2" else [[kind], [kind, kind]]:  # two of 656 bytes: PyTorch
                    for lengths in (False, True):
                        sizes = dict(rows=rows, heads=heads, widths=widths, lengths=lengths)
                        out, _, _ = quantized_problems.run(make_quantized(kinds, rows, DEVICE, **sizes))
                        assert out.isfinite().all()


def latent(
    backend: str,
    heads: int,
    lengths: Lengths,
    page_size: int | None,
    dtype: torch.dtype,
    apart: bool = False,
    keys_dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """One call of attention(); fails where a result is not finite."""
    batch = make_batch(*zip(*lengths), heads, 1, 576, dtype=dtype, kv_dtype=keys_dtype, device=DEVICE)
    batch.v = batch.k[..., :512]
    q, whose_rows = queries(batch, False)
    k, _, whose_keys = keys(batch, "ragged" if page_size is None else "table", "NHD", page_size or 1, False)
    v = k[..., :512]
    if apart:
        (q, options["q_rope"]), (k, options["k_rope"]) = (
            (x[..., :512].contiguous(), x[..., 512:].contiguous()) for x in (q, k)
        )
        v = k
    given = {**whose_rows, **whose_keys, "causal": "window" not in options, **options}
    out, _ = ck.attention(q, k, v, backend=backend, return_lse=True, **given)
    assert out.isfinite().all()


def every_block_sparse(backend: str, head_dim: int) -> None:
    """Blocks of all sizes, those at the end with fewer rows or keys, with masks in them, and a pattern per head."""
    if head_dim not in (64, 128):
        return
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    for M, N, R, C in ((256, 512, 128, 64), (200, 130, 64, 64), (70, 45, 16, 3), (129, 256, 128, 8)):
        q = torch.randn(M, 4, head_dim, device="cuda").half()
        k, v = torch.randn(2, N, 2, head_dim, device="cuda").half()
        blocks = torch.rand(2, -(-M // R), -(-N // C), device="cuda") < 0.5
        wrapper = ck.BlockSparseAttentionWrapper(workspace, backend=backend)
        wrapper.plan(None, None, M, N, R, C, 4, 2, head_dim, block_mask=blocks)
        wrapper.run(q, k, v)
        indptr = torch.nn.functional.pad(blocks[0].sum(1).cumsum(0), (1, 0)).int()
        indices = blocks[0].nonzero()[:, 1].int()
        for mask in (None, torch.rand(indices.numel(), R, C, device="cuda") < 0.5):
            wrapper.plan(indptr, indices, M, N, R, C, 4, 2, head_dim, mask=mask)
            wrapper.run(q, k, v)


def every_fused(backend: str, head_dim: int) -> None:
    """Batches without a tile list: tiles of one head, packed heads and decode, split keys, statistics, tiles that may
    be skipped, block tables, outputs of 8 bits."""
    selection.environment = selection.Environment(auto=backend)  # this function has no argument for it
    for heads, lengths in (
        ((4, 2), [(1, 300), (0, 5), (40, 0), (130, 170), (65, 200)]),
        ((70, 70), [(300, 333), (5, 700)]),
        ((8, 2), [(1, 1500), (1, 700), (1, 0), (1, 33)]),
        ((8, 2), [(20, 1100), (0, 400), (33, 700)]),
    ):
        for mask_mode in ("causal", "padding"):
            fused(heads, lengths, head_dim, torch.bfloat16, mask_mode, save_softmax_stats=True)
            fused(heads, lengths, head_dim, torch.bfloat16, mask_mode, skip_softmax_threshold_scale_factor=900.0)
            for page_size in (1, 16) if head_dim != 192 else ():
                fused(heads, lengths, head_dim, torch.float16, mask_mode, page_size)
        if head_dim in (64, 128, 256):
            fused(heads, lengths, head_dim, torch.float8_e4m3fn, "causal")
            fused(heads, lengths, head_dim, torch.float8_e4m3fn, "padding", 16, out_dtype=torch.bfloat16)
    selection.environment = selection.Environment()


def fused(
    heads: tuple[int, int],
    lengths: Lengths,
    head_dim: int,
    dtype: torch.dtype,
    mask_mode: str,
    page_size: int | None = None,
    **options: Any,
) -> None:
    """One call of trtllm_fmha_v2_prefill; fails where a result is not finite."""
    head_dim_vo = 128 if head_dim == 192 and page_size is None else head_dim
    qo, kv = ([0, *accumulate(column)] for column in zip(*lengths))
    q = torch.randn(qo[-1], heads[0], head_dim, device="cuda").to(dtype)
    if page_size is None:
        k = torch.randn(kv[-1], heads[1], head_dim, device="cuda").to(dtype)
        v = torch.randn(kv[-1], heads[1], head_dim_vo, device="cuda").to(dtype)
        qkv, layout = (q, k, v), "SEPARATE_Q_K_V"
    else:
        most = max(-(-keys // page_size) for _, keys in lengths)
        table = torch.randperm(len(lengths) * most, dtype=torch.int32, device="cuda").view(len(lengths), most)
        pool = torch.randn(table.numel(), 2, page_size, heads[1], head_dim, device="cuda").to(dtype)
        qkv, layout = (q, pool), "Q_PAGED_KV_NHD"
        options["block_tables"] = table
    offsets = torch.tensor([qo, kv], dtype=torch.int32, device="cuda")
    bounds = (max(rows for rows, _ in lengths), max(keys for _, keys in lengths))
    scales = (0.1, torch.ones(1, device="cuda"))
    given = (torch.empty(0), offsets[1], *bounds, *scales, len(lengths), offsets[0], offsets[1])
    returned = ck.trtllm_fmha_v2_prefill(qkv, layout, *given, mask_mode=mask_mode, **options)
    for result in returned if isinstance(returned, tuple) else (returned,):
        assert result.float().isfinite().all()


def every_tile_of_fp8(backend: str, head_dim: int) -> None:
    """The same of the kernels that read fp8: keys and values under short queries, or all three tensors (fa3)."""
    if head_dim == 192:
        return
    e4m3 = torch.float8_e4m3fn
    batch = [(1, 300), (0, 5), (40, 0), (130, 70), (65, 200)]
    few = [(1, 300), (0, 5), (3, 0), (9, 170), (16, 200)]
    for page_size in (None, 5, 8, 16):
        if backend == "fa3":
            attend(backend, head_dim, (4, 4), batch, e4m3, causal=True, page_size=page_size)
            attend(backend, head_dim, (70, 10), [(300, 333), (5, 700)], e4m3, soft_cap=9.0, page_size=page_size)
            attend(backend, head_dim, (4, 2), [(3, 1500), *few], e4m3, sinks=True, page_size=page_size)
        for dtype in (torch.bfloat16, torch.float16):
            for kv_dtype in (e4m3, torch.float8_e5m2):
                more: dict[str, Any] = {"page_size": page_size, "kv_dtype": kv_dtype}
                attend(backend, head_dim, (4, 4), few, dtype, causal=True, **more)
                attend(backend, head_dim, (8, 1), [(3, 1500), (1, 2000)], dtype, causal=True, **more)
                attend(backend, head_dim, (8, 2), few, dtype, mask=True, window_left=40, **more)
                if backend == "fa2":
                    decode(backend, head_dim, page_size, dtype, kv_dtype)


def every_merge() -> None:
    """Calls of every kernel that merges states; 128 elements and more of fp32 take a row several warps."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for head_dim in (8, 72, 128, 512, 1024):
            for count in (0, 1, 2, 4, 5, 13):
                v = torch.randn(37, count, 3, head_dim, device="cuda").to(dtype)
                s = torch.randn(37, count, 3, device="cuda")
                out, _ = ck.merge_states(v, s)
                assert out.isfinite().all()
                if count == 2:
                    for mask_dtype in (torch.bool, torch.int16, torch.int32, torch.int64):
                        mask = torch.randint(2, (37,), device="cuda").to(mask_dtype)
                        own, own_s = v[:, 0].contiguous(), s[:, 0].contiguous()
                        ck.merge_state_in_place(own, own_s, v[:, 1], s[:, 1], mask)
                        assert own.isfinite().all()


def every_append() -> None:
    """Appends in units of every size, also to places that do not exist."""
    lengths = [(4, 20), (0, 3), (70, 80), (1, 33)]
    append, total = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in zip(*lengths))
    offsets = torch.nn.functional.pad(append.cumsum(0, dtype=torch.int32), (1, 0))
    for page_size in (1, 5, 16):
        counts = -(-total // page_size)
        starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        pages = int(starts[-1])
        indices = torch.randperm(pages, device="cuda").to(torch.int32)
        last = (total - 1) % page_size + 1
        owner, position = ck.get_batch_indices_positions(offsets, total, int(offsets[-1]) + 2)
        for heads, head_dim, dtype in (
            (2, 64, torch.bfloat16),
            (40, 192, torch.float16),
            (3, 20, torch.float16),
            (3, 5, torch.float8_e4m3fn),
        ):
            k, v = torch.randn(2, owner.numel(), heads, head_dim, device="cuda").to(torch.bfloat16)
            cache = torch.zeros(pages, 2, page_size, heads, head_dim, device="cuda").to(dtype)
            ck.append_paged_kv_cache(k, v, owner, position, cache, indices, starts, last)
            ck.append_paged_kv_cache(k, v, owner + 3, position * 7, cache, indices, starts, last)
            wrong = indices * 2 - 3
            ck.append_paged_kv_cache(k, v, owner, position, cache, wrong, starts, last)
        every_append_by_slot(pages, page_size, owner.numel())
        every_rope(pages, page_size, owner.numel())


def every_rope(pages: int, page_size: int, tokens: int) -> None:
    """Positions and slots on both sides of the table and of the cache, too."""
    slots = torch.arange(-3, tokens - 3, device="cuda") * (pages * page_size + 9) // tokens
    positions = torch.arange(tokens, device="cuda") % 23 - 2
    for heads, head_dim, rotary_dim in ((2, 64, 64), (8, 128, 64), (3, 20, 12)):
        table = torch.randn(20, rotary_dim, device="cuda")
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            q, k, v = torch.randn(3, tokens, heads, head_dim, device="cuda").to(torch.bfloat16)
            cache = torch.zeros(pages, 2, page_size, heads, head_dim, device="cuda").to(dtype)
            for is_neox in (True, False):
                ck.apply_rope_with_cos_sin_cache_inplace(positions, q, k, head_dim, table.to(q.dtype), is_neox)
                call = (q, k, v, positions, table, cache[:, 0], cache[:, 1], slots, 0.5)
                ck.rope_append_paged_kv_cache_by_slot(*call, is_neox=is_neox)


def every_append_by_slot(pages: int, page_size: int, tokens: int) -> None:
    """Slots on both sides of the cache, too, in units of 8 elements and of 1."""
    slots = torch.arange(-3, tokens - 3, device="cuda") * (pages * page_size + 9) // tokens
    for heads, head_dim in ((2, 64), (40, 192), (3, 20), (3, 5)):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            k, v = torch.randn(2, tokens + 2, heads, head_dim, device="cuda").to(torch.bfloat16)
            cache = torch.zeros(pages, 2, page_size, heads, head_dim, device="cuda").to(dtype)
            scale = torch.rand(heads, device="cuda") + 0.5
            ck.append_paged_kv_cache_by_slot(k, v, cache[:, 0], cache[:, 1], slots, 0.5, scale)
            ck.append_paged_kv_cache_by_slot(k, v, cache[:, 0], cache[:, 1], slots.int())
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):  # latent caches, whose two parts differ in width
        cache = torch.zeros(pages, page_size, 576, device="cuda").to(dtype)
        latent, rope = torch.randn(tokens + 2, 576, device="cuda").to(torch.bfloat16).split([512, 64], -1)
        scale = {"kv_cache_dtype": "fp8", "scale": 0.5} if dtype.itemsize == 1 else {}
        ck.mla.concat_and_cache_mla(latent, rope, cache, slots, **scale)


def every_decode(backend: str, head_dim: int) -> None:
    """The same without pages, with pages of one key, and of several."""
    for page_size in (None, 1, 8):
        decode(backend, head_dim, page_size)


def every_counter(backend: str, head_dim: int) -> None:
    """Calls whose counters hold what is no count."""
    counters = _C.counters(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)
    for value in (-1, 1, 100, 2**31 - 1, -(2**31)):
        for heads, lengths in (((70, 70), [(300, 333)]), ((8, 2), [(1, 1500)]), ((8, 1), [(33, 3000)])):
            counters.fill_(value)
            attend(backend, head_dim, heads, lengths, causal=True)
    counters.zero_()


def every_public_call(backend: str, device: str = "cuda:0") -> None:
    """The calls of the registry, once each; those of no device and of several ranks aside."""
    previous, selection.environment = selection.environment, selection.Environment(backend, None)
    try:
        data = Data(Target(device, backend))
        for entry in ENTRIES.values():
            for call in [] if entry.name.startswith("distributed.") else entry.calls(data):
                call()
    finally:
        selection.environment = previous


PARTS = {
    "tiles": every_tile,
    "decode": every_decode,
    "fp8": every_tile_of_fp8,
    "latent": every_latent,
    "quantized": every_quantized,
    "sparse": every_block_sparse,
    "fused": every_fused,
    "counters": every_counter,
}
CALLS = "calls"  # of the registry, whatever the head dimension


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--backends", nargs="*", default=[b for b in ("fa2", "fa3") if not ck.explain().reasons[b]])
    parser.add_argument(
        "--parts", nargs="*", choices=[*PARTS, CALLS], default=[*PARTS, CALLS], help="of what a backend has"
    )
    parser.add_argument("--head-dims", type=int, nargs="*", default=[64, 80, 128, 160, 192, 256, 512])
    args = parser.parse_args()
    torch.manual_seed(0)
    for _ in range(args.rounds):
        for backend in args.backends:
            for head_dim in args.head_dims:
                for part in args.parts:
                    if part != CALLS:
                        PARTS[part](backend, head_dim)
            if CALLS in args.parts:
                every_public_call(backend)
        every_merge()
        every_append()
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()
