"""torch.compile(fullgraph=True) around the calls: one graph, the plan of the moment, and what eager calls return."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from pairs import every
from problems import Batch, make_batch
from wrapper_problems import Wrapped

import cutlass_kernels as ck


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **kwargs):
    return torch.compile(function, fullgraph=True, backend=backend, **kwargs)


def assert_same(got, want) -> None:
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()
        torch.testing.assert_close(a, b, rtol=0, atol=0)


class Layer:
    """A wrapper, planned again by every :meth:`plan`, and what its runs take besides q."""

    def __init__(self, target, kind: str) -> None:
        kind, _, form = kind.partition(" ")
        self.make = functools.partial(Wrapped, target, kind, form=form or "stacked")
        self.target, self.wrapper = target, self.make().wrapper

    def plan(self, qo_lens, kv_lens, **options) -> Batch:
        batch = make_batch(qo_lens, kv_lens, 4, 2, 64, device=self.target.device)
        self.kv = self.make(batch, wrapper=self.wrapper).plan(**options).kv
        return batch


@pytest.fixture(params=["paged", "paged tuple", "ragged"])
def layer(target, request) -> Layer:
    return Layer(target, request.param)


def test_later_plans_reach_the_graph(layer):
    run = compiled(lambda q, kv: layer.wrapper.run(q * 2, *kv) + 1)
    for lens in (([5, 3], [20, 33]), ([5, 3], [33, 20]), ([1, 9, 4], [40, 9, 4]), ([2], [3])):
        for options in (dict(causal=True), dict(causal=False, sm_scale=0.3), dict(causal=True, logits_soft_cap=2.0)):
            batch = layer.plan(*lens, **options)
            assert_same(run(batch.q, layer.kv), layer.wrapper.run(batch.q * 2, *layer.kv) + 1)


def test_new_lengths_need_no_new_graph(layer):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = compiled(lambda q, kv: layer.wrapper.run(q, *kv, return_lse=True), count, dynamic=True)
    for rows in (5, 6, 11, 12):
        batch = layer.plan([rows, 3], [40, 33], causal=True)
        torch._dynamo.mark_dynamic(batch.q, 0)
        assert_same(run(batch.q, layer.kv), layer.wrapper.run(batch.q, *layer.kv, return_lse=True))
    assert len(graphs) == 1
    assert all(
        "cutlass_kernels.run" in str(node.target)
        for node in graphs[0].graph.nodes
        if node.op == "call_function" and "cutlass" in str(node.target)
    )


def test_one_function_serves_all_wrappers(target):
    layers = [Layer(target, "ragged") for _ in range(3)]
    run = compiled(lambda wrapper, q, kv: wrapper.run(q, *kv))
    for i, layer in enumerate(layers):
        batch = layer.plan([5 + i, 3], [20, 33], causal=True)
        assert_same(run(layer.wrapper, batch.q, layer.kv), layer.wrapper.run(batch.q, *layer.kv))


@pytest.mark.pairwise
@every(lse_layout=["NH", "HN"], given=[(), ("out",), ("lse",), ("out", "lse")], return_lse=[False, True])
def test_places(target, given, return_lse, lse_layout):
    layer = Layer(target, "ragged")
    batch = layer.plan([5, 3], [20, 33], causal=True)
    rows, heads, _ = batch.q.shape

    def places() -> dict[str, torch.Tensor]:
        lse = batch.q.new_zeros((heads, rows) if lse_layout == "HN" else (rows, heads), dtype=torch.float32)
        every = dict(out=torch.zeros_like(batch.q), lse=lse)
        return {name: every[name] for name in given}

    def call(q, kv, places):
        result = layer.wrapper.run(q, *kv, return_lse=return_lse, lse_layout=lse_layout, **places)
        return result, {name: x.clone() for name, x in places.items()}  # what the graph sees of them

    ours, theirs = places(), places()
    got, seen = compiled(call)(batch.q, layer.kv, ours)
    want, _ = call(batch.q, layer.kv, theirs)
    assert_same(got, want)
    for name in given:
        assert_same(ours[name], theirs[name])
        assert_same(seen[name], theirs[name])
        assert theirs[name].any()


def test_scales_and_sinks(layer):
    batch = layer.plan([5, 3], [20, 33], causal=True)
    sinks = torch.randn(4, device=batch.q.device)
    tensor = torch.tensor([0.5, 2.0], device=batch.q.device)
    call = lambda q, kv, **kwargs: layer.wrapper.run(q, *kv, return_lse=True, **kwargs)  # noqa: E731
    run = compiled(call)
    cases = [dict(k_scale=k, v_scale=v) for k, v in ((0.5, 2.0), (0.25, 3.0), (1, 1.5))]
    cases += [dict(sinks=sinks), dict(sinks=[sinks * 2]), dict(q_scale=2.0, k_scale=tensor, v_scale=tensor)]
    for kwargs in cases:
        assert_same(run(batch.q, layer.kv, **kwargs), call(batch.q, layer.kv, **kwargs))
    layer.wrapper._sinks = sinks
    assert_same(run(batch.q, layer.kv), call(batch.q, layer.kv, sinks=sinks))


def test_positional_scales(target):
    layer = Layer(target, "paged")
    batch = layer.plan([5, 3], [20, 33])
    call = lambda q, kv: layer.wrapper.run(q, *kv, 0.5, 2.0, True)  # noqa: E731
    assert_same(compiled(call)(batch.q, layer.kv), call(batch.q, layer.kv))


def test_forward_sets_its_options_for_its_own_run(layer):
    batch = layer.plan([5, 3], [20, 33], causal=True)

    def call(q, kv, cap):
        first = layer.wrapper.forward(q, *kv, causal=True, logits_soft_cap=cap)
        return first, layer.wrapper.forward(q, *kv, causal=False)

    for cap in (1.0, 3.0):
        got = compiled(call)(batch.q, layer.kv, cap)
        assert layer.wrapper._causal is False and layer.wrapper._logits_soft_cap == 0.0
        assert_same(got, call(batch.q, layer.kv, cap))
        assert not torch.equal(got[0], got[1])


def test_faults_of_a_run(layer):
    batch = layer.plan([5, 3], [20, 33], causal=True)
    run = compiled(lambda q, kv: layer.wrapper.run(q, *kv))
    run(batch.q, layer.kv)
    with pytest.raises(ValueError, match="q has dtype"):
        run(batch.q.float(), layer.kv)
    with pytest.raises(ValueError, match="q has 7 rows"):
        run(batch.q[1:], layer.kv)
    layer.wrapper.reset_workspace_buffer(layer.target.workspace())
    with pytest.raises(Exception, match="has no plan"):
        run(batch.q, layer.kv)


@pytest.mark.runs_nothing("plans only")
def test_a_wrapper_that_is_gone(target):
    from cutlass_kernels._graphs import operators

    number = operators.number_of(Layer(target, "ragged").wrapper)
    assert number not in operators._wrappers


@every(
    options=[
        dict(causal=True),
        dict(causal=True, return_lse=True, window_left=3),
        dict(logits_soft_cap=2.0, sm_scale=0.2, k_scale=0.5, v_scale=2.0),
        dict(causal=True, pos_encoding_mode="ALIBI", return_lse=True),
        dict(pos_encoding_mode="ROPE_LLAMA", rope_theta=5e3),
        dict(kv_layout="HND"),
        dict(o_dtype="float16"),
    ]
)
def test_single(target, options):
    run = compiled(ck.single_prefill_with_kv_cache)
    options = options | dict(backend=target.backend)
    for rows in (9, 10, 13):
        batch = make_batch([rows], [20], 4, 2, 64, device=target.device)
        k, v = (x.transpose(0, 1) if "kv_layout" in options else x for x in (batch.k, batch.v))
        torch._dynamo.mark_dynamic(batch.q, 0)
        assert_same(run(batch.q, k, v, **options), ck.single_prefill_with_kv_cache(batch.q, k, v, **options))


def test_single_with_other_numbers(target):
    batch = make_batch([9], [20], 4, 2, 64, device=target.device)
    call = lambda **options: ck.single_prefill_with_kv_cache(  # noqa: E731
        batch.q, batch.k, batch.v, backend=target.backend, **options
    )
    run = compiled(call)
    for window, cap, scale in ((3, 2.0, 0.1), (4, 3.0, 0.2), (5, 4.0, 0.3)):
        options = dict(window_left=window, logits_soft_cap=cap, sm_scale=scale)
        assert_same(run(**options), call(**options))


def test_single_with_positional_scales(target):
    batch = make_batch([9], [30], 4, 2, 64, device=target.device)
    scales = [torch.rand(n, device=target.device) + 0.5 for n in (4, 2, 2)]

    def call(q, scale_q, scale_k, scale_v):
        return ck.single_prefill_with_kv_cache_return_lse(q, batch.k, batch.v, scale_q, scale_k, scale_v, causal=True)

    assert_same(compiled(call)(batch.q, *scales), call(batch.q, *scales))
    documented = lambda q: ck.single_prefill_with_kv_cache(q, batch.k, batch.v, None, None, True, "NHD", backend="auto")  # noqa: E731
    assert_same(compiled(documented)(batch.q), documented(batch.q))


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor(target):
    layer = Layer(target, "paged")
    batch = layer.plan([5, 3], [20, 33], causal=True)
    packed = torch.cat([batch.q, batch.q], -1)  # q is a slice of it, and has to arrive as one
    out = torch.zeros_like(batch.q)

    def call(packed, cache, out):
        q = packed[..., 64:] * 2
        layer.wrapper.run(q, cache, out=out)
        return layer.wrapper.run(q, cache) + out

    assert_same(compiled(call, "inductor")(packed, *layer.kv, out), call(packed, *layer.kv, torch.zeros_like(out)))
