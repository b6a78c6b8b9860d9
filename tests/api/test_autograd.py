"""Attention is forward only: a result that depends on a tensor with requires_grad has a backward that raises."""

from __future__ import annotations

import math
import shutil
import warnings

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch
from registry import Call, Data, each, several, usual

import cutlass_kernels as ck
from cutlass_kernels import flash_attn

SENTENCE = "forward only, so it has no backward: train with torch.nn.functional.scaled_dot_product_attention"


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


refused = each(lambda entry: entry.gradients == "refused")


def assert_raises_in_backward(*results: torch.Tensor) -> None:
    for x in results:
        assert x.requires_grad
        with pytest.raises(RuntimeError, match=SENTENCE):
            x.float().sum().backward(retain_graph=True)


@refused
def test_every_result_raises_in_backward(target, entry):
    for call in entry.calls(Data(target)):
        want = several(call.run(*call.copies()))
        assert not any(x.requires_grad for x in want)
        for tensors in call.with_grad():
            got = several(call.run(*tensors))
            depending = [x for x in got if x.requires_grad or not call.apart]
            assert depending
            assert_raises_in_backward(*depending)
            for a, b in zip(got, want, strict=True):
                assert_bitwise(a.detach(), b)
            with torch.no_grad():
                assert not any(x.requires_grad for x in several(call.run(*tensors)))
        assert not any(x.requires_grad for x in several(call.run(*call.copies())))


@refused
def test_every_place_raises_in_backward(target, entry):
    calls = [call for call in entry.calls(Data(target)) if call.places]
    if not calls:
        pytest.skip("this function writes to no tensor of the caller")
    for call in calls:
        check_places(call)


def check_places(call: Call) -> None:
    want, tensors = call.empty_places(), call.with_grad()[0]
    call(**want)
    for x, y in want.items():
        place = torch.zeros_like(y)
        call.run(*tensors, **{x: place})
        assert_raises_in_backward(place)
        assert_bitwise(place.detach(), y)
    places = {x: torch.zeros_like(y) for x, y in want.items()}
    got = several(call.run(*tensors, **places))
    assert_raises_in_backward(*got, *places.values())
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(got, places.values()))


@each(lambda entry: entry.gradients == "computed")
def test_gradients_that_pytorch_computes(target, entry):
    for call in entry.calls(Data(target)):
        for tensors in call.with_grad():
            (x,) = (x for x in tensors if x.requires_grad)
            leaf = x.grad_fn.next_functions[0][0].variable
            sum(y.double().sum() for y in call.run(*tensors) if y.requires_grad).backward()
            assert leaf.grad.isfinite().all() and leaf.grad.any()


@each(lambda entry: entry.gradients == "warned")
def test_a_cache_carries_no_gradients(target, entry):
    for call in entry.calls(Data(target)):
        want = call.copies()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call.run(*want)
        for tensors in call.with_grad():
            with pytest.warns(UserWarning, match="cache carries no gradients"):
                call.run(*tensors)
            assert sum(x.requires_grad for x in tensors) == 1  # the caller's
            for a, b in zip(tensors, want):
                assert_bitwise(a.detach(), b)
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("error")
                call.run(*tensors)


def test_a_residual_does_not_hide_it(target):
    """Without an edge to the inputs, x + attention(x) would have the gradient of x alone."""
    call = usual("single_prefill", target)
    x = call.tensors[0].clone().requires_grad_()
    y = x + call.run(x * 1, *call.tensors[1:])[0]
    with pytest.raises(RuntimeError, match=SENTENCE):
        torch.autograd.grad(y.float().sum(), x)


def test_other_tensors_of_a_call(target):
    batch = make_batch([5], [20], 4, 2, 64, device=target.device)
    learned = lambda count: torch.ones(count, device=target.device).requires_grad_()  # noqa: E731
    single_call = lambda **kwargs: ck.single_prefill_with_kv_cache(  # noqa: E731
        batch.q, batch.k, batch.v, backend=target.backend, **kwargs
    )
    for kwargs in (dict(sinks=learned(4)), dict(scale_q=learned(4)), dict(scale_v=learned(2))):
        assert_raises_in_backward(single_call(**kwargs))
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads)
    tensors = (batch.q, batch.k, batch.v)
    assert_raises_in_backward(wrapper.run(*tensors, sinks=learned(4)), wrapper.run(*tensors, v_scale=learned(2)))
    assert_raises_in_backward(wrapper.run(*tensors, learned(4), learned(2), learned(2)))
    wrapper._sinks = learned(4)
    assert_raises_in_backward(wrapper.run(*tensors))


def test_places_that_require_gradients(target):
    call = usual("single_prefill", target)
    leaf = call.empty_places()["out"].requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        call(out=leaf)
    out = leaf * 1
    assert_raises_in_backward(call(out=out)[0], out)


def test_forward_goes_on(target):
    """What a script without torch.no_grad() does with results."""
    call = usual("ragged", target)
    tensors = call.with_grad()[0]
    for _ in range(3):
        out, lse = call.run(*tensors)
        out *= 2
        lse += 1
        rows = out[1:3]
        rows.zero_()
        assert not out[1].any() and out[0].any()
    buffer = torch.zeros(2, *out.shape, dtype=out.dtype, device=out.device)
    call.run(*tensors, out=buffer[1])
    assert_raises_in_backward(buffer)
    assert_bitwise(buffer.detach()[1], call()[0])


def test_states_of_attention_merge(target):
    call = usual("single_prefill", target)
    state = call.run(*call.with_grad()[0])
    out, lse = ck.merge_state(*state, *call())
    assert_raises_in_backward(out, lse)
    out, lse = call()
    ck.merge_state_in_place(out, lse, *state)
    assert_raises_in_backward(out, lse)


def _options(x: Data) -> list[Call]:
    """Tensors of ``attention()`` beside queries, keys and values, and LSEs of all shapes."""
    named = dict(alibi_slopes=x.sinks, q_descale=x.sinks[None], k_descale=x.sinks[:2], v_descale=x.one, sinks=x.sinks)
    names, dense = tuple(named), tuple(y[None] for y in x.qkv)
    tensors = (*dense, *named.values())
    given = lambda t: dict(zip(names, t[3:]))  # noqa: E731
    scales = lambda t: dict(zip(names[:4], t[3:7]))  # noqa: E731
    return [
        Call(lambda *t: ck.attention(*t[:3], **given(t), return_lse=True), tensors),
        Call(lambda *t: ck.attention(*(y[0] for y in t[:3]), **given(t), return_lse=True), tensors),
        Call(lambda *t: flash_attn.flash_attn_func(*t[:3], **scales(t), return_attn_probs=True), tensors[:-1]),
    ]


def _places(x: Data) -> list[Call]:
    """LSEs that are written to the caller's tensors."""
    unread, latent = x.target.workspace(16), (x.randn(1, 5, 4, 576).half(), x.randn(4, 16, 576).half())
    places = (x.here(1, 2)[None], x.here(20))

    def decode(q, cache, lse):
        options = dict(q_len_per_req=5, kv_layout="NHD", lse=lse)
        return ck.trtllm_batch_decode_with_kv_cache(q, cache, unread, *places, 20, 0.2, **options), lse

    def latent_decode(q, cache, lse):
        function = ck.mla.trtllm_batch_decode_with_kv_cache_mla
        return function(q, cache, unread, 128, 512, 64, *places, 20, bmm1_scale=0.1, lse=lse), lse

    zeros = torch.zeros(5, 4, device=x.device)
    return [
        Call(decode, (x.q, x.cache, zeros), inputs=(0, 1)),
        Call(latent_decode, (*latent, zeros), inputs=(0, 1)),
        Call(latent_decode, (*latent, zeros[None]), inputs=(0, 1)),
    ]


@pytest.mark.parametrize("make", [_options, _places], ids=["options", "places"])
def test_every_tensor_counts(target, make):
    for call in make(Data(target)):
        for tensors in call.with_grad():
            results = [x for x in several(call.run(*tensors)) if x.requires_grad]
            assert results, "a tensor is lost"
            assert_raises_in_backward(*results)


def test_numbers_have_no_gradients(target):
    q, k, v = Data(target).qkv
    temperature = torch.tensor(0.2, requires_grad=True)
    call = lambda: ck.single_prefill_with_kv_cache(q, k, v, sm_scale=temperature, backend=target.backend)  # noqa: E731
    with pytest.raises(TypeError, match=r"sm_scale requires a gradient, but it is read as a number"):
        call()
    with torch.no_grad():
        call()


@pytest.mark.runs_nothing("converts statistics")
def test_statistics_have_gradients(target):
    stats, scale = torch.rand(5, 4, 2, device=target.device), torch.tensor(0.1, requires_grad=True)
    ck.fmha_v2_stats_to_lse(stats, 64, scale).sum().backward()
    want = (stats[..., 0] * 8).sum() / math.log(2)
    torch.testing.assert_close(scale.grad, want.cpu())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_merging_has_gradients(device):
    generator = torch.Generator().manual_seed(0)
    v, s = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((3, 2, 2, 8), (3, 2, 2)))
    v, s = (x.to(device).requires_grad_() for x in (v, s))
    eps, tolerance = 1e-3, 1e-3  # LSEs are float32
    check = dict(eps=eps, atol=tolerance, rtol=tolerance, nondet_tol=1e-6)
    assert torch.autograd.gradcheck(lambda v, s: ck.merge_states(v, s)[0], (v, s), **check)
    assert torch.autograd.gradcheck(lambda v, s: ck.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1])[0], (v, s), **check)


def test_calls_that_were_made_without_gradients_before(target):
    """Repeated calls take a shorter way, which must not pass by gradients."""
    for name in ("single_prefill", "single_decode", "ragged", "paged", "decode", "fused"):
        call = usual(name, target)
        for _ in range(4):
            call()
        for _ in range(2):
            assert_raises_in_backward(*several(call.run(*call.with_grad()[0])))
            assert not call()[0].requires_grad
        leaf = (call.tensors[0].clone().requires_grad_(), *call.tensors[1:])
        assert_raises_in_backward(*several(call.run(*leaf)))


@each(lambda entry: entry.gradients == "refused" and entry.compiles != "no")
def test_compiled_calls_raise_in_backward(target, entry):
    for call in entry.calls(Data(target)):
        torch._dynamo.reset()
        compiled = torch.compile(call.run, fullgraph=True, backend="aot_eager")
        tensors = call.with_grad()[0]
        got = several(compiled(*tensors))
        assert_raises_in_backward(*(x for x in got if x.requires_grad or not call.apart))
        same = torch.testing.assert_close if entry.merges else assert_bitwise
        for a, b in zip(got, several(call.run(*call.copies())), strict=True):
            same(a.detach(), b)
        with torch.no_grad():
            assert not any(x.requires_grad for x in several(compiled(*tensors)))


@pytest.mark.parametrize("name", ["single_prefill", "ragged", "fused"])
def test_compiled_calls_that_write_to_places(target, name):
    call = usual(name, target)
    want, places = call.empty_places(), call.empty_places()
    call(**want)
    compiled = torch.compile(lambda tensors, places: call.run(*tensors, **places), fullgraph=True, backend="aot_eager")
    got = several(compiled(call.with_grad()[0], places))
    assert_raises_in_backward(*places.values(), *got)
    for x, place in places.items():
        assert_bitwise(place.detach(), want[x])


def test_rows_of_no_request_stay_in_compiled_calls(target):
    """The operator with a backward writes to a copy, which starts with what ``out`` holds."""
    call = usual("fused", target)
    out = torch.full((7, *call.tensors[0].shape[1:]), 7.0, dtype=torch.float16, device=target.device)
    q = torch.cat([call.tensors[0], call.tensors[0][:2]]).requires_grad_()
    torch.compile(call.run, fullgraph=True, backend="aot_eager")(q * 1, *call.tensors[1:], out=out)
    assert_bitwise(out.detach()[:5], call()[0])
    assert bool((out.detach()[5:] == 7.0).all())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles C++")
def test_inductor_raises_in_backward(target):
    call = usual("paged", target)
    compiled = torch.compile(lambda q, cache: call.run(q * 2, cache)[0] + 1, fullgraph=True)
    q = call.tensors[0].clone().requires_grad_()
    assert_raises_in_backward(compiled(q, *call.tensors[1:]))


def test_graphs_traced_without_gradients_raise_too(target):
    """The operators without a backward, run by hand or by a graph of make_fx."""
    call = usual("single_prefill", target)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda *x: call.run(*x))(*call.tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about operators without a backward
        assert_raises_in_backward(*graph(*call.with_grad()[0]))
