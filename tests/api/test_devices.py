"""The current device need not be that of the tensors: all runs where the tensors lie, and the current one stays."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise
from problems import Options, graph_buffers, make_batch
from registry import PAGE, Data, each
from targets import Target
from wrapper_problems import Wrapped, batch_for

import cutlass_kernels as ck

OTHER = "cuda:1"
CAUSAL = Options(causal=True)


@pytest.fixture(
    params=[
        pytest.param(Target(OTHER, "fa2"), id="cuda1-fa2", marks=pytest.mark.gpu),
        pytest.param(Target(OTHER, "fa3"), id="cuda1-fa3", marks=[pytest.mark.gpu, pytest.mark.hopper]),
    ]
)
def target(request: pytest.FixtureRequest) -> Target:
    """Tensors on the second GPU, while the first is the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, but there is {torch.cuda.device_count()}")
    torch.cuda.set_device(0)
    return request.param


@each(lambda entry: not entry.name.startswith("distributed."))  # a rank's GPU is its current device
def test_every_function(target, entry):
    got = [[call() for _ in range(3)] for call in entry.calls(Data(target))]  # the later ones may go a shorter way
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        want = [call() for call in entry.calls(Data(target))]
    for several, results in zip(got, want, strict=True):
        for found in several:
            for a, b in zip(found, results, strict=True):
                if isinstance(b, torch.Tensor):
                    assert a.device == b.device
                    assert_bitwise(a, b)
    assert torch.cuda.current_device() == 0


@each(lambda entry: entry.attends and not entry.name.startswith("distributed."))
def test_places_on_the_other_device(target, entry):
    calls = [call for call in entry.calls(Data(target)) if call.places]
    if not calls:
        pytest.skip("this function writes to no tensor of the caller")
    for call in calls:
        want, places = call(), call.empty_places()
        call(**places)
        assert torch.cuda.current_device() == 0
        assert_bitwise(places["out"], want[0])


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("where", ["cpu", OTHER])
def test_plans_of_index_tensors_on_either_device(target, where, graph):
    buffers = graph_buffers(3, 100, OTHER) if graph else {}
    w = Wrapped(target, "paged", batch_for("paged", target, (5, 3, 1), (20, 33, 900)), **buffers)
    for _ in range(3):
        out = w.plan(CAUSAL, where).run()
        assert out.device == torch.device(OTHER) and torch.cuda.current_device() == 0
        w.check(out)


def test_the_current_stream_of_the_tensors_device(target):
    """Not the current one of the current device: a kernel there would not wait for the copy, and see zeros."""
    w = Wrapped(target, "single", batch_for("single", target, (64,), (512,))).plan(CAUSAL)
    q, stream = torch.zeros_like(w.batch.q), torch.cuda.Stream(OTHER)
    torch.cuda.synchronize(OTHER)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        w.batch.q = q.copy_(w.batch.q)
        with torch.cuda.device(0):
            out = w.run()
            assert torch.cuda.current_device() == 0
    stream.synchronize()
    w.check(out)


def test_calls_on_both_devices_in_turn(target):
    """What is kept between calls belongs to one device: counters, slopes, plans."""
    options = Options(causal=True, pos_encoding_mode="ALIBI")
    batches = [make_batch([9], [3000], 4, 2, 64, device=f"cuda:{n}", seed=n) for n in range(2)]
    for w in [Wrapped(target, "single", batch).plan(options) for batch in batches] * 3:
        out = w.run()
        assert out.device == w.batch.q.device and torch.cuda.current_device() == 0
        w.check(out)


@pytest.mark.runs_nothing("appends to a cache")
def test_appending(target):
    def append(device: str) -> tuple[torch.Tensor, ...]:
        paged = make_batch([5, 3], [20, 33], 4, 2, 64, device=device).paged(PAGE, unused="zero")
        new = make_batch([8], [8], 2, 2, 64, device=device)
        offsets, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 5, 8], [20, 33]))
        places = ck.get_batch_indices_positions(offsets, lens, 8)
        indptr, indices, last = paged.table(device)
        ck.append_paged_kv_cache(new.k, new.v, *places, paged.cache, indices, indptr, last)
        slots = torch.arange(7, -1, -1, device=device)
        k_cache, v_cache = (torch.zeros(1, 8, 2, 64, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        ck.append_paged_kv_cache_by_slot(new.k, new.v, k_cache, v_cache, slots, 0.5)
        return (*places, paged.cache, k_cache, v_cache)

    got = append(OTHER)
    assert torch.cuda.current_device() == 0
    for a, b in zip(got, append("cpu"), strict=True):
        assert a.device == torch.device(OTHER)
        assert_bitwise(a.cpu(), b)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_tensors_on_two_gpus_are_refused(target):
    q, k, v = (torch.zeros(5, 2, 64, dtype=torch.float16, device=OTHER) for _ in range(3))
    with pytest.raises((ValueError, RuntimeError), match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        ck.single_prefill_with_kv_cache(q, k.to("cuda:0"), v, backend=target.backend)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    indptr = torch.tensor([0, 5], dtype=torch.int32)
    wrapper.plan(indptr, indptr, 2, 2, 64)
    with pytest.raises((ValueError, RuntimeError), match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        wrapper.run(*(x.to("cuda:0") for x in (q, k, v)))
