"""Calls under torch.export, make_fx and FakeTensorMode: graphs hold an operator, and later calls are unaffected."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch
from registry import PAGE, Call, Data, Entry, each, several, usual
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.proxy_tensor import make_fx

import cutlass_kernels as ck
from cutlass_kernels._core import checks
from cutlass_kernels._planned import paged_decode

# Each is an operator of its own in a graph.
attention = each(lambda entry: entry.attends and entry.compiles != "no")
# By label, calls in which tensors of the plan, or made of values, meet the caller's outside of our operators: torch
# refuses real ones beside fake ones.
REAL = {
    "BatchMLAPagedAttentionWrapper": {"", "returns LSE", "scales"},
    "BlockSparseAttentionWrapper": {"by head"},
    "VariableBlockSparseAttentionWrapper": {"by head"},
    "flash_attn.flash_attn_with_kvcache": {"appends"},
    "xqa_batch_decode_with_kv_cache": {"mask"},
}


def calls_on_fakes(entry: Entry, target: Any, inside: bool) -> list[Call]:
    real = {x for x in REAL.get(entry.name, ()) if x == "by head" or not inside}
    calls = [call for call in entry.calls(Data(target)) if call.label not in real]
    return calls or pytest.skip("keeps tensors of its plan beside the caller's")


@pytest.fixture(autouse=True)
def empty_caches():
    torch._dynamo.reset()
    checks._slopes.clear()
    for cached in (paged_decode._offsets, paged_decode._offsets_on):
        cached.cache_clear()
    yield
    torch._dynamo.reset()


def operators(graph: torch.fx.Graph) -> set[str]:
    """Names of this library's operators in a graph."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return {name for name in targets if name.startswith("cutlass_kernels.")}


def assert_same(got, want, merges: bool = False) -> None:
    """Bit for bit, but where states are merged (``Entry.merges``)."""
    got, want = several(got), several(want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert type(a) is torch.Tensor
        if merges:
            torch.testing.assert_close(a, b)
        else:
            assert_bitwise(a, b)


@pytest.mark.parametrize("where", ["inside", "outside"])
@each(lambda entry: entry.compiles != "no")
def test_fake_tensors(target, entry, where):
    if where == "outside" and not entry.attends and "merge" not in entry.name:
        pytest.skip("PyTorch's operators make tensors beside the caller's")
    for call in calls_on_fakes(entry, target, inside=where == "inside"):
        want = call()
        checks._slopes.clear()
        mode = FakeTensorMode()
        fakes = tuple(mode.from_tensor(x) for x in call.tensors)
        with mode if where == "inside" else contextlib.nullcontext():
            got = call(fakes)
        for fake, real in zip(got, want, strict=True):
            if isinstance(real, torch.Tensor):
                assert type(fake) is not torch.Tensor
                assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert_same(call(), want)


def test_fake_results_have_types_and_sizes_of_their_own():
    """Where they are not those of the queries: of fp8, of values with another head dimension, as planned."""
    q, k, v = torch.randn(3, 5, 2, 64).half()
    fp8, wide, offsets = q[None].to(torch.float8_e4m3fn), torch.randn(5, 2, 128).half(), torch.tensor([0, 5]).int()
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    wrapper.plan(offsets, offsets, 2, 2, 64, o_data_type=torch.float32)

    def fused(q, k, v, lens, offsets):
        given = (torch.zeros(16).byte(), lens, 5, 5, 0.1, 1.0, 1, offsets, offsets)
        return ck.trtllm_fmha_v2_prefill((q, k, v), "SEPARATE_Q_K_V", *given)

    for run, tensors in (
        (ck.attention, (fp8, fp8, fp8)),
        (fused, (q, k, wide, offsets[1:], offsets)),
        (wrapper.run, (q, k, v)),
    ):
        want, mode = run(*tensors), FakeTensorMode()
        with mode:
            found = run(*map(mode.from_tensor, tensors))
        assert (found.shape, found.dtype) == (want.shape, want.dtype)


def test_plans_with_fake_tensors_leave_nothing_behind(target):
    """The row indptr of decode batches and ALiBi slopes are cached. Fake ones would have no values."""
    batch = make_batch([1, 1], [20, 33], 4, 2, 64, device=target.device)
    paged = batch.paged(PAGE)
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(target.workspace(), backend=target.backend)
    options = dict(pos_encoding_mode="ALIBI")
    with FakeTensorMode() as mode:
        table = [mode.from_tensor(x) for x in paged.table()]
        with pytest.raises((RuntimeError, AssertionError), match=r"(?i)fake"):
            wrapper.plan(*table, *batch.heads, PAGE, **options)
    assert type(paged_decode._offsets(2, 1)) is torch.Tensor
    wrapper.plan(*paged.table(), *batch.heads, PAGE, **options)
    with FakeTensorMode():
        slopes = checks.alibi_slopes(8, torch.device("cpu"))
    assert type(slopes) is torch.Tensor and type(checks.alibi_slopes(4, batch.q.device)) is torch.Tensor
    q, k, v = batch.q[:1], batch.k[:20], batch.v[:20]
    want = ck.single_prefill_with_kv_cache(q, k, v, pos_encoding_mode="ALIBI", backend=target.backend)
    torch.testing.assert_close(wrapper.run(batch.q, paged.cache)[:1], want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@attention
def test_make_fx(target, entry, mode):
    for call in entry.calls(Data(target)) if mode == "real" else calls_on_fakes(entry, target, inside=True):
        graph = make_fx(lambda *tensors: call.run(*tensors), tracing_mode=mode)(*call.copies())
        assert operators(graph.graph)
        assert_same(graph(*call.copies()), call.run(*call.copies()), entry.merges)
        q, *others = call.tensors
        assert_same(graph(q * 2, *others), call.run(q * 2, *others), entry.merges)  # the graph holds no result


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("name", ["single_prefill", "ragged", "fused"])
def test_make_fx_of_calls_that_write_to_a_place(target, name, mode):
    call = usual(name, target)
    given = call.empty_places()

    def run(out, *tensors):
        call.run(*tensors, out=out)
        return out * 2

    graph = make_fx(run, tracing_mode=mode)(given["out"], *call.tensors)
    assert operators(graph.graph)
    out = torch.zeros_like(given["out"])
    assert_same(graph(out, *call.tensors), call()[0] * 2)
    assert_same(out, call()[0])


class Module(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call.run(*tensors)


@pytest.mark.parametrize("strict", [True, False])
@attention
def test_export(target, entry, strict):
    for call in entry.calls(Data(target)):
        program = torch.export.export(Module(call), call.copies(), strict=strict)
        assert operators(program.graph)
        assert_same(program.module()(*call.copies()), call.run(*call.copies()), entry.merges)


@pytest.mark.parametrize("name", ["single_prefill", "fused"])
def test_exported_programs_take_other_lengths(target, name):
    call = usual(name, target)
    rows = torch.export.Dim("rows", min=2, max=100)
    shapes = tuple({0: rows} if i == 0 else None for i in range(len(call.tensors)))
    program = torch.export.export(Module(call), call.tensors, dynamic_shapes=(shapes,), strict=False)
    q, *others = call.tensors
    written = len(q)  # the fused prefill writes rows of requests only
    got, want = (several(run(torch.cat([q, q]), *others)) for run in (program.module(), call.run))
    for a, b in zip(got, want):
        assert len(a) == 2 * written
        assert_bitwise(*(x[:written] if name == "fused" else x for x in (a, b)))


def test_modes_that_watch_see_the_operator(target):
    """A mode without fake tensors, e.g. one that counts operations: each mode sees the operator once."""
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    call = usual("single_prefill", target)
    with Watch(), Watch():
        got = call()
    assert seen == ["cutlass_kernels.single.default"] * 2
    assert_same(got, call())


def test_attention_of_transformers(target):
    """A traced call leaves nothing behind that later calls would read."""
    pytest.importorskip("transformers")
    from cutlass_kernels.integrations import transformers

    tensors = [torch.randn(2, heads, 3, 64, dtype=torch.float16).to(target.device) for heads in (4, 2, 2)]
    attend = lambda *tensors: transformers.attention(torch.nn.Module(), *tensors)[0]  # noqa: E731
    with FakeTensorMode() as mode:
        fake = attend(*map(mode.from_tensor, tensors))
    want = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert fake.shape == want.shape
    torch.testing.assert_close(attend(*tensors), want, atol=2e-3, rtol=2e-3)


def test_vectors_without_values_are_no_plan():
    """Their addresses are none that the compiled module could read."""
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8))
    with FakeTensorMode():
        offsets = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(DataDependentOutputException):
        wrapper.plan(offsets, offsets, 4, 2, 64)
