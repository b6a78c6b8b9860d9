"""Runs that compute from copies of fp8 or rotated tensors."""

from __future__ import annotations

import torch
from captures import no_waiting
from pairs import every
from planned_runs import check_captured_runs, compare, single, wrapped
from problems import Batch, Options, make_batch

DEVICE = "cuda:0"
E4M3 = torch.float8_e4m3fn
ROTATED = Options(causal=True, pos_encoding_mode="ROPE_LLAMA")


def check(result: tuple[torch.Tensor, ...], batch: Batch, options: Options = ROTATED) -> None:
    compare(result, batch, options, plain=False, atol=1e-2, rtol=1e-2, lse_atol=5e-3)


@every(
    dtype=[torch.float16, torch.bfloat16],
    dims=[(40, 40), (72, 64), (96, 96), (192, 128), (192, 192), (256, 256)],
    mode=["NONE", "ROPE_LLAMA"],
)
def test_fp8_keys_of_any_head_dim(kernel_backend, mode, dims, dtype):
    # Rows of 40 and 72 bytes are aligned to 8.
    batch = make_batch([20], [150], 4, 2, dims[0], head_dim_vo=dims[1], dtype=dtype, kv_dtype=E4M3, device=DEVICE)
    options = Options(causal=True, pos_encoding_mode=mode)
    check(single(kernel_backend, batch, options), batch, options)


def test_rotation_may_change_from_run_to_run(kernel_backend):
    # The plan knows the page table of the cache; runs that rotate have another one.
    batch = make_batch([9, 20], [50, 70], 4, 2, 64, device=DEVICE)
    call = wrapped(kernel_backend, batch, 8).plan(Options(causal=True))
    for mode in ("NONE", "ROPE_LLAMA", "NONE", "ROPE_LLAMA"):
        result = call.wrapper.forward(batch.q, *call.kv, causal=True, pos_encoding_mode=mode, return_lse=True)
        assert call.wrapper._backend == kernel_backend
        check(result, batch, Options(causal=True, pos_encoding_mode=mode))


def test_shared_pages_turn_by_the_position_in_their_request(kernel_backend):
    cache = torch.randn(3, 2, 8, 2, 64, device=DEVICE).half()
    pages = ([0, 1, 2], [2, 0], [1, 1])
    kv_lens, qo_lens = [20, 16, 11], [5, 16, 2]
    keys, values = ([cache[p, i].flatten(0, 1)[:n] for p, n in zip(pages, kv_lens)] for i in range(2))
    q = torch.randn(sum(qo_lens), 4, 64, device=DEVICE).half()
    batch = Batch(qo_lens, kv_lens, q, torch.cat(keys), torch.cat(values))
    call = wrapped(kernel_backend, batch, 8)
    call.pages.indices, call.kv = torch.tensor([page for of in pages for page in of], dtype=torch.int32), (cache,)
    options = Options(causal=True, pos_encoding_mode="ROPE_LLAMA", rope_theta=1e3)
    check(call.plan(options).run(return_lse=True), batch, options)


@every(kv_dtype=[torch.float16, E4M3], page_size=[5, 16])
def test_pages_that_the_cache_does_not_have_count_as_zeros(kernel_backend, kv_dtype, page_size):
    batch = make_batch([4], [4 * page_size], 4, 2, 64, kv_dtype=kv_dtype, device=DEVICE)
    call = wrapped(kernel_backend, batch, page_size)
    call.pages.indices[1], call.pages.indices[2] = -7, len(call.kv[0])
    for x in (batch.k, batch.v):
        x[page_size : 3 * page_size].view(torch.uint8).zero_()
    check(call.plan(ROTATED, where=DEVICE).run(return_lse=True), batch)


@every(kv_dtype=[torch.float16, E4M3])
def test_captured_runs_follow_later_plans(kernel_backend, kv_dtype):
    # The table of the copies belongs to the graph: it is not a plan's, which a later one replaces.
    steps = [([4, 4], [40, 90]), ([1, 7], [150, 7]), ([8, 0], [33, 5]), ([4, 4], [40, 90])]
    batches = [make_batch(*step, 4, 2, 64, kv_dtype=kv_dtype, device=DEVICE, seed=n) for n, step in enumerate(steps)]
    check_captured_runs(kernel_backend, batches, ROTATED, check)


def test_nothing_synchronises(kernel_backend):
    batch = make_batch([5, 9], [20, 90], 4, 2, 64, kv_dtype=E4M3, device=DEVICE)
    call = wrapped(kernel_backend, batch, 8)
    vectors = call.vectors(DEVICE)
    with no_waiting():
        call.wrapper.plan(*vectors, *call.sizes, kv_data_type=E4M3, **ROTATED.plan_kwargs())
        result = call.run(return_lse=True)
    check(result, batch)
