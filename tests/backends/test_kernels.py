"""What only compiled kernels have: tiles of several kinds, blocks that share out work, sizes between compiled ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

# Head dimensions of queries and values: compiled for a backend, or between those that are.
DIMS = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
BETWEEN = [(16, 64), (72, 72), (80, 80), (80, 112), (96, 64), (64, 96), (128, 64), (64, 128), (160, 128), (160, 160)]
BETWEEN += [(128, 192), (200, 40)]
OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window_left=50),
    "cap": Options(causal=True, logits_soft_cap=5.0),
    "negative scale": Options(sm_scale=-0.1),
    "alibi": Options(causal=True, pos_encoding_mode="ALIBI"),
    "alibi and cap": Options(window_left=60, pos_encoding_mode="ALIBI", logits_soft_cap=5.0),
}


every_kind_of_tile = pytest.mark.parametrize(
    "heads,lens",
    [
        ((4, 2), ([97], [133])),  # small tiles
        ((70, 10), ([300], [333])),  # large tiles
        ((70, 10), ([200, 0, 390, 1, 250], [200, 7, 900, 50, 0])),
        ((16, 2), ([7, 0, 3, 20], [900, 33, 5, 40])),  # packed heads
        ((16, 1), ([9], [5000])),  # packed heads, split keys
        ((8, 8), ([2, 1, 2], [700, 64, 3])),  # decode tiles
    ],
    ids=["few", "many", "ragged", "append", "split", "short"],
)
masked_heads_and_rows = pytest.mark.parametrize(
    "heads,rows", [((4, 2), 97), ((70, 10), 300), ((16, 2), 5), ((4, 2), 1)]
)


def attend(
    backend: str, batch: Batch, options: Options, sinks: torch.Tensor | None = None, page_size: int | None = None
):
    """Output and LSE: with a page size by the paged wrapper, else a batch of one by the single call, others by the
    ragged wrapper."""
    kwargs, sinks_of_run = options.plan_kwargs(), {} if sinks is None else {"sinks": sinks}
    if options.custom_masks is not None:
        kwargs["custom_mask"] = torch.cat([mask.reshape(-1) for mask in options.custom_masks])
    if len(batch.qo_lens) == 1 and page_size is None:
        call = ck.single_prefill_with_kv_cache
        return call(batch.q, batch.k, batch.v, return_lse=True, backend=backend, **kwargs, **sinks_of_run)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=batch.device)
    dims = {"head_dim_vo": batch.v.shape[2], "q_data_type": batch.q.dtype}
    if page_size is not None:
        paged = batch.paged(page_size, form="tuple")
        of_pages = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, backend=backend)
        of_pages.plan(batch.qo_indptr(), *paged.table(), *batch.heads, page_size, **dims, **kwargs)
        return of_pages.run(batch.q, paged.cache, return_lse=True, **sinks_of_run)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **dims, **kwargs)
    return wrapper.run(batch.q, batch.k, batch.v, return_lse=True, **sinks_of_run)


def check(
    backend: str, batch: Batch, options: Options, sinks: torch.Tensor | None = None, page_size: int | None = None
) -> None:
    out, lse = attend(backend, batch, options, sinks, page_size)
    want = expect(batch, dataclasses.replace(options, sinks=sinks))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


def check_masks(
    backend: str, heads: tuple[int, int], rows: int, dims: tuple[int, int], hidden: int, page_size: int | None
) -> None:
    """Custom masks that hide all keys from a row, and the last ``hidden`` of a request from all: whole KV blocks."""
    lens = [rows, 1, rows], [203, 77, 500]
    batch = make_batch(*lens, *heads, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, device="cuda:0")
    masks = batch.random_masks(0.3)
    masks[0][0] = False
    masks[-1][:, -hidden:] = False
    options = Options(custom_masks=masks, logits_soft_cap=4.0)
    check(backend, batch, options, torch.linspace(-2.0, 4.0, heads[0], device="cuda:0"), page_size)
    check(backend, batch, dataclasses.replace(options, window_left=90), page_size=page_size)


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", [*DIMS, *BETWEEN], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lens", [([97], [133]), ([70, 0, 1, 130], [200, 3, 40, 130])], ids=["single", "ragged"])
def test_head_dims(target, dims, name, lens):
    batch = make_batch(*lens, 4, 2, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, device=target.device)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], device=target.device) if name in ("window", "cap") else None
    check(target.backend, batch, OPTIONS[name], sinks)


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    "lens",
    [([300], [333]), ([640], [600]), ([200, 0, 390, 1, 250], [200, 7, 900, 50, 0])],
    ids=["two tiles", "rows without keys", "ragged"],
)
def test_large_tiles(kernel_backend, dims, name, lens):
    # 70 heads: enough tiles that the large kind is chosen, and more than one for most blocks of a persistent kernel.
    batch = make_batch(*lens, 70, 10, dims[0], head_dim_vo=dims[1], device="cuda:0")
    check(kernel_backend, batch, OPTIONS[name])


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["mask", "mask, window, cap and sinks", "mask and alibi", "alibi", "alibi and cap"])
@pytest.mark.parametrize("page_size", [None, 1, 5, 16])
@pytest.mark.parametrize(
    "lens",
    [([300], [203]), ([300, 0, 33, 1, 200, 130], [203, 7, 131, 50, 0, 321]), ([40, 63, 0, 17], [703, 2000, 9, 1101])],
    ids=["single", "batch", "append"],
)
def test_general_tiles(kernel_backend, dims, name, page_size, lens):
    # Keys in numbers that are no multiple of 8: every row, and but for bytes every request, begins at another bit.
    batch = make_batch(*lens, 8, 2, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, device="cuda:0")
    options, sinks = OPTIONS.get(name, Options(causal=True)), None
    if "mask" in name:
        masks = batch.random_masks(0.3)
        masks[0][[row for row in (0, 39, 63, 64, 299) if row < len(masks[0])]] = False
        masks[-1][:, -70:] = False  # whole blocks of keys that no row sees
        if len(masks) > 1:
            masks[2][:] = False
        options = dataclasses.replace(options, custom_masks=masks)
    if name == "mask, window, cap and sinks":
        options = dataclasses.replace(options, window_left=90, logits_soft_cap=4.0)
        sinks = torch.linspace(-2.0, 4.0, 8, device="cuda:0")
    if name == "mask and alibi":
        options = dataclasses.replace(options, pos_encoding_mode="ALIBI")
    check(kernel_backend, batch, options, sinks, page_size)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_masks_for_many_tiles(kernel_backend, dims):
    # More than one tile for most blocks of a persistent kernel: each must find the mask of its request.
    lens = ([300, 1, 640, 5, 130], [333, 900, 601, 77, 131])
    batch = make_batch(*lens, 70, 10, dims[0], head_dim_vo=dims[1], device="cuda:0")
    options = Options(custom_masks=batch.random_masks())
    check(kernel_backend, batch, options)
    out, lse = attend(kernel_backend, batch, options)
    for _ in range(10):
        again, lse_again = attend(kernel_backend, batch, options)
        assert_bitwise(again, out)
        assert_bitwise(lse_again, lse, "lse")


@pytest.mark.pairwise
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "cap"])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24, 64, 128])
def test_pages_of_heads_of_their_own(kernel_backend, dims, name, page_size):
    # One query head per key head: rows are not packed, however few.
    lens = [200, 0, 390, 1, 250], [200, 7, 900, 50, 0]
    batch = make_batch(*lens, 6, 6, dims[0], head_dim_vo=dims[1], device="cuda:0")
    check(kernel_backend, batch, OPTIONS[name], page_size=page_size)


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("lens", [([700], [700]), ([300, 1, 64, 500], [300, 900, 64, 700])], ids=["single", "ragged"])
def test_fifty_runs_give_the_same_bits(kernel_backend, dims, dtype, lens):
    # Whichever block computes a tile, and whatever the calls before have left behind.
    batch = make_batch(*lens, 32, 4, dims[0], head_dim_vo=dims[1], dtype=dtype, device="cuda:0")
    options = Options(causal=True, window_left=400)
    out, lse = attend(kernel_backend, batch, options)
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline)
    for _ in range(50):
        again, lse_again = attend(kernel_backend, batch, options)
        assert_bitwise(again, out)
        assert_bitwise(lse_again, lse, "lse")


@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("name", ["causal", "cap"])
def test_tiles_of_one_block(kernel_backend, dims, name):
    # The loads of a tile follow on the heels of the one before: what is overwritten too early shows here.
    qo_lens = [(37 * i) % 130 for i in range(48)]
    kv_lens = [(53 * i) % 61 + n for i, n in enumerate(qo_lens)]
    batch = make_batch(qo_lens, kv_lens, 16, 4, dims[0], head_dim_vo=dims[1], device="cuda:0")
    out, lse = attend(kernel_backend, batch, OPTIONS[name])
    want = expect(batch, OPTIONS[name])
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)
    for _ in range(30):
        again, lse_again = attend(kernel_backend, batch, OPTIONS[name])
        assert_bitwise(again, out)
        assert_bitwise(lse_again, lse, "lse")


def test_calls_of_different_shapes_in_a_row(kernel_backend):
    shapes: Sequence[tuple[list[int], list[int], int, tuple[int, int]]] = [
        ([1], [900], 8, (128, 128)),
        ([900], [900], 32, (64, 64)),
        ([3], [0], 4, (256, 256)),
        ([200], [100], 70, (192, 128)),
        ([64, 64], [500, 3], 8, (128, 128)),
    ]
    made = [
        make_batch(qo, kv, heads, 2, dims[0], head_dim_vo=dims[1], device="cuda:0") for qo, kv, heads, dims in shapes
    ]
    first = [attend(kernel_backend, batch, Options(causal=True)) for batch in made]
    for batch, (out, lse) in zip(made, first):
        want = expect(batch, Options(causal=True))
        assert_close(out, want.out, want.baseline)
        assert_lse_close(lse, want.lse)
    for _ in range(5):
        for batch, (out, _) in zip(made, first):
            assert_bitwise(attend(kernel_backend, batch, Options(causal=True))[0], out)


def test_single_calls_on_several_streams_at_once(kernel_backend):
    batches = [make_batch([600], [600], 32, 8, 64, device="cuda:0", seed=seed) for seed in range(4)]
    wanted = [attend(kernel_backend, batch, Options(causal=True))[0] for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(10):
        outs = []
        for batch, stream in zip(batches, streams):
            with torch.cuda.stream(stream):
                outs.append(attend(kernel_backend, batch, Options(causal=True))[0])
        torch.cuda.synchronize()
        for out, want in zip(outs, wanted):
            assert_bitwise(out, want)


@pytest.mark.gpu
@pytest.mark.hopper
class TestTileCounters:
    """fa3 counts its tiles in device memory, and leaves the counters as it found them."""

    def test_zero_after_every_call(self):
        from cutlass_kernels import _C

        batch = make_batch([700], [700], 32, 8, 64, device="cuda:0")
        attend("fa3", batch, Options(causal=True))
        counters = _C.counters(0, torch.cuda.current_stream().cuda_stream)
        assert not counters.any()
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
            torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0"), backend="fa3"
        )
        wrapper._int_workspace_buffer.fill_(255)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        for _ in range(3):
            wrapper.run(batch.q, batch.k, batch.v)
            assert not wrapper._int_workspace_buffer[:8].any()

    def test_results_do_not_depend_on_who_computes_a_tile(self):
        # Which thread block takes a tile depends on what else the GPU does.
        batch, busy = make_batch([1000], [1000], 32, 8, 128, device="cuda:0"), torch.randn(2048, 2048, device="cuda:0")
        run = lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend="fa3")  # noqa: E731
        first, other = run(), torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        for _ in range(5):
            with torch.cuda.stream(other):
                busy @ busy
            assert_bitwise(run(), first)
        want = expect(batch, Options(causal=True))
        assert_close(first, want.out, want.baseline)
