"""attention(schedule=): one schedule for the layers of a step."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from captures import capture
from compare import assert_bitwise

import cutlass_kernels as ck
from cutlass_kernels.mla import flash_mla_with_kvcache, get_mla_metadata

LENS = [70, 4000, 1, 900, 2500, 64, 0, 1300] * 2
hopper = [pytest.mark.gpu, pytest.mark.hopper]


def latent(layers: int, lens: list[int] = LENS, device: str = "cuda") -> tuple[Any, dict[str, Any]]:
    """Queries and caches of some layers, and what they share."""
    g = torch.Generator(device).manual_seed(0)
    pages = -(-max(lens) // 64)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device=device, dtype=torch.bfloat16)

    tensors = [(randn(len(lens), 1, 64, 576), randn(len(lens) * pages, 64, 1, 576)) for _ in range(layers)]
    table = torch.randperm(len(lens) * pages, generator=g, device=device).int().view(len(lens), pages)
    return tensors, dict(page_table=table, seqused_k=torch.tensor(lens, dtype=torch.int32, device=device))


def attend(q: torch.Tensor, cache: torch.Tensor, **options: Any) -> Any:
    return ck.attention(q, cache, cache[..., :512], causal=True, return_lse=True, **options)


def kernels(function: Any) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if "write_list_kernel" in event.name]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_results_are_the_same(device):
    lens = [30, 7, 0] if device == "cpu" else LENS
    layers, shared = latent(3, lens, device)
    schedule = ck.Schedule()
    for q, cache in layers:
        for got, want in zip(attend(q, cache, **shared, schedule=schedule), attend(q, cache, **shared)):
            assert_bitwise(got, want)


@pytest.mark.parametrize("mode", [pytest.param("latent", marks=hopper), pytest.param("invariant", marks=hopper)])
def test_it_is_written_once(mode):
    layers, shared = latent(3)
    if mode == "invariant":
        shared["batch_invariant"] = True
    attend(*layers[0], **shared)  # modules are loaded
    apart = kernels(lambda: [attend(*layer, **shared) for layer in layers])
    schedule = ck.Schedule()
    together = kernels(lambda: [attend(*layer, **shared, schedule=schedule) for layer in layers])
    assert len(apart) == 3 * len(together) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True], ids=["captured at once", "made before"])
def test_a_graph_follows_new_lengths(warm):
    layers, shared = latent(2)
    lens = shared["seqused_k"]
    schedule = ck.Schedule()
    if warm:
        attend(*layers[0], **shared, schedule=schedule)
    call = lambda: [attend(*layer, **shared, schedule=schedule) for layer in layers]  # noqa: E731
    graph, results = capture(call, warm_up=0)
    for seed in range(3):
        torch.manual_seed(seed)
        lens.copy_(torch.randint(0, max(LENS), (len(LENS),)))
        graph.replay()
        for layer, result in zip(layers, results):
            for got, want in zip(result, attend(*layer, **shared)):
                assert_bitwise(got, want)


@pytest.mark.gpu
@pytest.mark.hopper
def test_other_sizes_are_refused():
    (layer,), shared = latent(1)
    schedule = ck.Schedule()
    attend(*layer, **shared, schedule=schedule)
    q, cache = layer
    few = dict(shared, page_table=shared["page_table"][:4], seqused_k=shared["seqused_k"][:4])
    with pytest.raises(ValueError, match=r"schedule was made by a call of other sizes.* Pass a new Schedule\(\)"):
        attend(q[:4], cache, **few, schedule=schedule)
    attend(q, cache, **shared, schedule=schedule)


@pytest.mark.gpu
@pytest.mark.hopper
def test_a_renewed_one_is_made_anew():
    (layer,), shared = latent(1)
    schedule = ck.Schedule()
    for count in (4, 4, 16):
        some = dict(page_table=shared["page_table"][:count], seqused_k=shared["seqused_k"][:count].flip(0))
        schedule.renew()
        got = attend(layer[0][:count], layer[1], **some, schedule=schedule)
        assert_bitwise(got[0], attend(layer[0][:count], layer[1], **some)[0])


@pytest.mark.gpu
@pytest.mark.hopper
def test_runs_of_a_plan_share_one():
    layers, shared = latent(3)
    batch, pages = shared["page_table"].shape
    wrapper = ck.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    rows, starts = torch.arange(batch + 1, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32) * pages
    indices, lens = shared["page_table"].flatten().cpu(), shared["seqused_k"].cpu()

    def run(q: torch.Tensor, cache: torch.Tensor) -> Any:
        (q_nope, q_pe), (ckv, kpe) = q[:, 0].split((512, 64), -1), cache[:, :, 0].split((512, 64), -1)
        return wrapper.run(q_nope, q_pe, ckv, kpe)

    for _ in range(2):
        wrapper.plan(rows, starts, indices, lens, 64, 512, 64, 64, True, 0.1, torch.bfloat16, torch.bfloat16)
        assert len(kernels(lambda: [run(*layer) for layer in layers])) == 1
        for layer in layers:
            want = attend(*layer, page_table=shared["page_table"], seqused_k=lens.cuda(), sm_scale=0.1)[0]
            assert_bitwise(run(*layer), want[:, 0])
        lens = lens.flip(0)


@pytest.mark.gpu
@pytest.mark.hopper
def test_a_copy_of_a_wrapper_has_its_own():
    (layer,), shared = latent(1)
    batch, pages = shared["page_table"].shape
    wrapper = ck.mla.BatchMLAPagedAttentionWrapper(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
    rows, starts = torch.arange(batch + 1, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32) * pages
    indices, sizes = shared["page_table"].flatten().cpu(), (64, 512, 64, 64, True, 0.1, torch.bfloat16, torch.bfloat16)
    (q_nope, q_pe), (ckv, kpe) = layer[0][:, 0].split((512, 64), -1), layer[1][:, :, 0].split((512, 64), -1)
    lens = {"first": shared["seqused_k"].cpu(), "second": shared["seqused_k"].flip(0).cpu()}
    want = {
        name: attend(*layer, page_table=shared["page_table"], seqused_k=some.cuda(), sm_scale=0.1)[0][:, 0]
        for name, some in lens.items()
    }
    wrapper.plan(rows, starts, indices, lens["first"], *sizes)
    assert_bitwise(wrapper.run(q_nope, q_pe, ckv, kpe), want["first"])
    other = copy.copy(wrapper)
    other.plan(rows, starts, indices, lens["second"], *sizes)
    for _ in range(2):
        assert_bitwise(other.run(q_nope, q_pe, ckv, kpe), want["second"])
        assert_bitwise(wrapper.run(q_nope, q_pe, ckv, kpe), want["first"])


@pytest.mark.gpu
@pytest.mark.hopper
def test_flash_mla_shares_it_by_its_metadata():
    layers, shared = latent(3)
    (metadata, _), table, lens = get_mla_metadata(), shared["page_table"], shared["seqused_k"]

    def call(layer: Any) -> Any:
        return flash_mla_with_kvcache(*layer, table, lens, 512, metadata, causal=True)

    assert not metadata.have_initialized
    assert len(kernels(lambda: [call(layer) for layer in layers])) == 1
    assert metadata.have_initialized
    for layer in layers:
        assert_bitwise(call(layer)[0], attend(*layer, **shared)[0])


def test_a_copy_is_empty():
    layers, shared = latent(1, [3, 5], "cpu")
    for copied in (copy.copy(ck.Schedule()), copy.deepcopy(ck.Schedule()), pickle.loads(pickle.dumps(ck.Schedule()))):
        assert isinstance(attend(*layers[0], **shared, schedule=copied), tuple)


def test_what_is_none_is_refused():
    layers, shared = latent(1, [3, 5], "cpu")
    with pytest.raises(TypeError, match=r"schedule has type dict: pass a cutlass_kernels.Schedule\(\), or None."):
        attend(*layers[0], **shared, schedule={})
