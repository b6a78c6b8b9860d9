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
DIMS = [(64, 64), (128, 128), (192, 128), (256, 256)]
BETWEEN = [(16, 64), (72, 72), (80, 112), (128, 64), (64, 128), (160, 128), (192, 192), (200, 40)]
OPTIONS = {
    "full": Options(),
    "causal": Options(causal=True),
    "window": Options(causal=True, window_left=50),
    "cap": Options(causal=True, logits_soft_cap=5.0),
    "negative scale": Options(sm_scale=-0.1),
}


def attend(backend: str, batch: Batch, options: Options, sinks: torch.Tensor | None = None):
    """Output and LSE: a batch of one by the single call, others by the wrapper."""
    kwargs, sinks_of_run = options.plan_kwargs(), {} if sinks is None else {"sinks": sinks}
    if len(batch.qo_lens) == 1:
        call = ck.single_prefill_with_kv_cache
        return call(batch.q, batch.k, batch.v, return_lse=True, backend=backend, **kwargs, **sinks_of_run)
    workspace = torch.zeros(1 << 20, dtype=torch.uint8, device=batch.device)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend=backend)
    dims = {"head_dim_vo": batch.v.shape[2], "q_data_type": batch.q.dtype}
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **dims, **kwargs)
    return wrapper.run(batch.q, batch.k, batch.v, return_lse=True, **sinks_of_run)


def check(backend: str, batch: Batch, options: Options, sinks: torch.Tensor | None = None) -> None:
    out, lse = attend(backend, batch, options, sinks)
    want = expect(batch, dataclasses.replace(options, sinks=sinks))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("dims", [*DIMS, *BETWEEN], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lens", [([97], [133]), ([70, 0, 1, 130], [200, 3, 40, 130])], ids=["single", "ragged"])
def test_head_dims(target, dims, name, lens):
    batch = make_batch(*lens, 4, 2, dims[0], head_dim_vo=dims[1], dtype=torch.bfloat16, device=target.device)
    sinks = torch.tensor([-1.0, 0.5, 2.0, 4.0], device=target.device) if name in ("window", "cap") else None
    check(target.backend, batch, OPTIONS[name], sinks)


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
        from cutlass_kernels import _cuda

        batch = make_batch([700], [700], 32, 8, 64, device="cuda:0")
        attend("fa3", batch, Options(causal=True))
        counters = _cuda._counters(batch.q.device, _cuda._stream(batch.q.device))
        assert counters.tolist() == [0, 0]
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
            torch.zeros(1 << 20, dtype=torch.uint8, device="cuda:0"), backend="fa3"
        )
        wrapper._int_workspace_buffer.fill_(255)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        for _ in range(3):
            wrapper.run(batch.q, batch.k, batch.v)
            assert not wrapper._int_workspace_buffer[:8].any()

    def test_results_do_not_depend_on_who_computes_a_tile(self):
        from cutlass_kernels import _C, _cuda

        batch = make_batch([1000], [1000], 32, 8, 128, device="cuda:0")
        plan = _C.Plan("fa3", "float16", "float16", "float16", 32, 8, 128, 128, 1, 0, 0, 0)
        counters = torch.zeros(2, dtype=torch.int32, device="cuda:0")
        outs = []
        for next_tile in (0, counters.data_ptr()):  # dealt out beforehand, and taken in turn
            out = torch.full_like(batch.q, torch.nan)
            q, k, v, o = ((x.data_ptr(), x.stride(0), x.stride(1)) for x in (batch.q, batch.k, batch.v, out))
            flat = [*q, *k, 0, *v, 0, *o]
            scale, stream = 128**-0.5, _cuda._stream(out.device)
            plan.run(*flat, 0, 0, 0, 1000, 1000, 0, True, -1, 0, scale, 0.0, 0, 1.0, next_tile, stream)
            outs.append(out)
        assert_bitwise(outs[1], outs[0])
        want = expect(batch, Options(causal=True))
        assert_close(outs[0], want.out, want.baseline)
        assert counters.tolist() == [0, 0]
