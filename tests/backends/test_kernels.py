"""What only compiled kernels have: tiles of several kinds, blocks that share out work, sizes between compiled ones."""

from __future__ import annotations

import dataclasses
import functools

import planned_runs
import pytest
import torch
from compare import assert_all_bitwise, assert_bitwise, assert_close, assert_repeats
from pairs import every
from planned_runs import compare, single
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck

DEVICE = "cuda:0"
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
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
CAUSAL = OPTIONS["causal"]
RAGGED = ([200, 0, 390, 1, 250], [200, 7, 900, 50, 0])

every_kind_of_tile = every(
    **{
        "heads,lens": {
            "few": ((4, 2), ([97], [133])),  # small tiles
            "many": ((70, 10), ([300], [333])),  # large tiles
            "ragged": ((70, 10), RAGGED),
            "append": ((16, 2), ([7, 0, 3, 20], [900, 33, 5, 40])),  # packed heads
            "split": ((16, 1), ([9], [5000])),  # packed heads, split keys
            "short": ((8, 8), ([2, 1, 2], [700, 64, 3])),  # decode tiles
        }
    }
)
masked_heads_and_rows = every(**{"heads,rows": [((4, 2), 97), ((70, 10), 300), ((16, 2), 5), ((4, 2), 1)]})


def batch_of(lens, heads, dims, dtype=torch.float16, device=DEVICE) -> Batch:
    return make_batch(*lens, *heads, dims[0], head_dim_vo=dims[1], dtype=dtype, device=device)


def attend(backend: str, batch: Batch, options: Options = CAUSAL, page_size: int | None = None, **more):
    """Output and LSE: with a page size by the paged wrapper, else a batch of one by the single call, others by the
    ragged wrapper."""
    if len(batch.qo_lens) == 1 and page_size is None:
        return single(backend, batch, options)
    return planned_runs.attend(backend, batch, options, page_size, form="tuple", **more)


def check(backend: str, batch: Batch, options: Options = CAUSAL, page_size: int | None = None) -> None:
    compare(attend(backend, batch, options, page_size), batch, options)


def check_repeats(backend: str, batch: Batch, times: int, options: Options = CAUSAL, page_size: int | None = None):
    """Calls that give what they must, and the same bits, whatever the calls before have left behind."""
    call = functools.partial(attend, backend, batch, options, page_size)
    compare(assert_repeats(call, times), batch, options)


def check_masks(
    backend: str, heads: tuple[int, int], rows: int, dims: tuple[int, int], hidden: int, page_size: int | None
) -> None:
    """Custom masks that hide all keys from a row, and the last ``hidden`` of a request from all: whole KV blocks."""
    batch = batch_of(([rows, 1, rows], [203, 77, 500]), heads, dims, torch.bfloat16)
    masks = batch.random_masks(0.3)
    masks[0][0] = False
    masks[-1][:, -hidden:] = False
    options = Options(custom_masks=masks, logits_soft_cap=4.0)
    sinks = torch.linspace(-2.0, 4.0, heads[0], device=DEVICE)
    check(backend, batch, dataclasses.replace(options, sinks=sinks), page_size)
    check(backend, batch, dataclasses.replace(options, window_left=90), page_size)


@pytest.mark.pairwise
@every(
    dims=[*DIMS, *BETWEEN],
    name=OPTIONS.keys(),
    lens={"single": ([97], [133]), "ragged": ([70, 0, 1, 130], [200, 3, 40, 130])},
)
def test_head_dims(target, dims, name, lens):
    batch, options = batch_of(lens, (4, 2), dims, torch.bfloat16, target.device), OPTIONS[name]
    if name in ("window", "cap"):
        options = dataclasses.replace(options, sinks=torch.tensor([-1.0, 0.5, 2.0, 4.0], device=target.device))
    check(target.backend, batch, options)


@pytest.mark.pairwise
@every(
    dims=DIMS,
    options=OPTIONS,
    lens={"two tiles": ([300], [333]), "rows without keys": ([640], [600]), "ragged": RAGGED},
)
def test_large_tiles(kernel_backend, dims, options, lens):
    # 70 heads: enough tiles that the large kind is chosen, and more than one for most blocks of a persistent kernel.
    check(kernel_backend, batch_of(lens, (70, 10), dims), options)


@pytest.mark.pairwise
@every(
    dims=DIMS,
    name=["mask", "mask, window, cap and sinks", "mask and alibi", "alibi", "alibi and cap"],
    page_size=[None, 1, 5, 16],
    lens={
        "single": ([300], [203]),
        "batch": ([300, 0, 33, 1, 200, 130], [203, 7, 131, 50, 0, 321]),
        "append": ([40, 63, 0, 17], [703, 2000, 9, 1101]),
    },
)
def test_general_tiles(kernel_backend, dims, name, page_size, lens):
    # Keys in numbers that are no multiple of 8: every row, and but for bytes every request, begins at another bit.
    batch = batch_of(lens, (8, 2), dims, torch.bfloat16)
    options = OPTIONS.get(name, CAUSAL)
    if "mask" in name:
        masks = batch.random_masks(0.3)
        masks[0][[row for row in (0, 39, 63, 64, 299) if row < len(masks[0])]] = False
        masks[-1][:, -70:] = False  # whole blocks of keys that no row sees
        if len(masks) > 1:
            masks[2][:] = False
        options = dataclasses.replace(options, custom_masks=masks)
    if name == "mask, window, cap and sinks":
        sinks = torch.linspace(-2.0, 4.0, 8, device=DEVICE)
        options = dataclasses.replace(options, window_left=90, logits_soft_cap=4.0, sinks=sinks)
    if name == "mask and alibi":
        options = dataclasses.replace(options, pos_encoding_mode="ALIBI")
    check(kernel_backend, batch, options, page_size)


@every(dims=DIMS)
def test_masks_for_many_tiles(kernel_backend, dims):
    # More than one tile for most blocks of a persistent kernel: each must find the mask of its request.
    batch = batch_of(([300, 1, 640, 5, 130], [333, 900, 601, 77, 131]), (70, 10), dims)
    check_repeats(kernel_backend, batch, 10, Options(custom_masks=batch.random_masks()))


@pytest.mark.pairwise
@every(dims=DIMS, name=["causal", "window", "cap"], page_size=[1, 3, 8, 16, 24, 64, 128])
def test_pages_of_heads_of_their_own(kernel_backend, dims, name, page_size):
    # One query head per key head: rows are not packed, however few.
    check(kernel_backend, batch_of(RAGGED, (6, 6), dims), OPTIONS[name], page_size)


@every(dims=DIMS, dtype=HALF, lens={"single": ([700], [700]), "ragged": ([300, 1, 64, 500], [300, 900, 64, 700])})
def test_fifty_runs_give_the_same_bits(kernel_backend, dims, dtype, lens):
    # Whichever block computes a tile.
    batch = batch_of(lens, (32, 4), dims, dtype)
    check_repeats(kernel_backend, batch, 50, Options(causal=True, window_left=400))


@every(dims=DIMS, name=["causal", "cap"])
def test_tiles_of_one_block(kernel_backend, dims, name):
    # The loads of a tile follow on the heels of the one before: what is overwritten too early shows here.
    qo_lens = [(37 * i) % 130 for i in range(48)]
    kv_lens = [(53 * i) % 61 + n for i, n in enumerate(qo_lens)]
    check_repeats(kernel_backend, batch_of((qo_lens, kv_lens), (16, 4), dims), 30, OPTIONS[name])


def test_calls_of_different_shapes_in_a_row(kernel_backend):
    made = [
        batch_of(([1], [900]), (8, 2), (128, 128)),
        batch_of(([900], [900]), (32, 2), (64, 64)),
        batch_of(([3], [0]), (4, 2), (256, 256)),
        batch_of(([200], [100]), (70, 2), (192, 128)),
        batch_of(([64, 64], [500, 3]), (8, 2), (128, 128)),
    ]
    first = assert_repeats(lambda: [x for batch in made for x in attend(kernel_backend, batch)], 5)
    for batch, result in zip(made, zip(first[::2], first[1::2])):
        compare(result, batch, CAUSAL)


def test_single_calls_on_several_streams_at_once(kernel_backend):
    batches = [make_batch([600], [600], 32, 8, 64, device=DEVICE, seed=seed) for seed in range(4)]
    wanted = [attend(kernel_backend, batch)[0] for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(10):
        outs = []
        for batch, stream in zip(batches, streams):
            with torch.cuda.stream(stream):
                outs.append(attend(kernel_backend, batch)[0])
        torch.cuda.synchronize()
        assert_all_bitwise(outs, wanted)


@pytest.mark.gpu
@pytest.mark.hopper
def test_results_do_not_depend_on_who_computes_a_tile():
    # Which thread block of fa3 takes a tile depends on what else the GPU does.
    batch, busy = make_batch([1000], [1000], 32, 8, 128, device=DEVICE), torch.randn(2048, 2048, device=DEVICE)
    run = lambda: ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, causal=True, backend="fa3")  # noqa: E731
    first, other = run(), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        with torch.cuda.stream(other):
            busy @ busy
        assert_bitwise(run(), first)
    want = expect(batch, CAUSAL)
    assert_close(first, want.out, want.baseline)
