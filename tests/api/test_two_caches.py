"""attention(extra_k=): one softmax over selected keys of two caches, against the oracle."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import quantized_caches
import torch
from compare import assert_bitwise
from mla_problems import DEVICES
from pairs import every
from quantized_problems import Quantized, make, run
from refusals import Row, rows

import cutlass_kernels as ck
from cutlass_kernels._attend import selected_keys
from cutlass_kernels._compute import selection

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16
pytestmark = pytest.mark.filterwarnings("ignore::cutlass_kernels.PerformanceWarning")

PAIRS = [
    ["v4", "v4"],
    ["v3.2", "v3.2"],
    ["v3.2_nope", "v3.2_nope"],
    ["v4.1_tokens", "v4.1_tokens"],
    ["v4.1_pages", "v4.1_pages"],
    ["v4", "v4.1_pages"],
    ["v4.1_tokens", "v4"],
    ["numbers", "numbers"],
    ["numbers", "v4"],
    ["v3.2", "numbers"],
]
NAMES = [" ".join(x) for x in PAIRS]


@DEVICES
@every(kinds=NAMES, seed=range(6))
def test_random_lists(device, kinds, seed):
    rng = random.Random(seed)
    heads = rng.choice([1, 3, 8, 64])
    widths = rng.choice([1, 31, 128]), rng.choice([1, 17, 150])
    sizes = dict(rows=rng.choice([1, 2, 7]), heads=heads, dtype=rng.choice([BF16, HALF]), lengths=rng.random() < 0.7)
    problem = make(kinds.split(), seed, device, widths=widths, **sizes)
    problem.options["sm_scale"] = rng.choice([None, 512**-0.5, 0.5])
    if rng.random() < 0.6:
        sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(device) * 3
        problem.options["sinks"] = sinks
    problem.check(*run(problem))


def alone(problem: Quantized, which: int, **others: Any) -> tuple[torch.Tensor, ...]:
    """The results over one of the caches."""
    scope = Quantized(problem.q, [problem.scopes[which]], problem.kv_format, problem.options)
    return run(scope, **others)


@every(kinds=["v4 v4", "numbers numbers"], none=["no indices", "-1", "lengths", "no pages"])
def test_a_cache_of_which_nothing_is_listed(kinds, none):
    for empty in (1, 0):
        problem = make(kinds.split(), 4, lists=["full"], lengths=False)
        scope = problem.scopes[empty]
        if none == "no indices":
            scope.indices = scope.indices[..., :0]
        elif none == "-1":
            scope.indices.fill_(-1)
        elif none == "lengths":
            scope.lengths = torch.zeros(5, dtype=INT32)
        elif isinstance(scope.cache, torch.Tensor):
            scope.cache = scope.cache[:0]
        else:
            scope.cache.view = scope.cache.view[:0]
        found = run(problem)
        problem.check(*found)
        for x, y in zip(found, alone(problem, 1 - empty)):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-2)


def test_rows_without_keys_in_either():
    problem = make(["v4", "v4"], 4, lists=["none"])
    out, lse, max_logits = run(problem)
    assert not out.any() and bool((lse == -math.inf).all()) and bool((max_logits == -math.inf).all())
    sinks = torch.linspace(-2.0, 2.0, 8)
    out, lse, _ = run(problem, sinks=sinks)
    assert not out.any()
    torch.testing.assert_close(lse * math.log(2.0), sinks.expand_as(lse))


def test_a_cache_may_be_both():
    """Its keys then count twice."""
    problem = make(["v4"], 2, widths=(50,))
    call = problem.arguments()
    names = {"k": "extra_k", "kv_indices_per_token": "extra_indices_per_token", "topk_length": "extra_topk_length"}
    both = run(problem, **{extra: call[name] for name, extra in names.items()})
    out, lse, max_logits = run(problem)
    torch.testing.assert_close(both[0], out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(both[1], lse + 1, atol=1e-4, rtol=1e-5)
    assert_bitwise(both[2], max_logits)


@every(form=["HND", "tokens", "requests", "parts", "int8", "strided lists"])
def test_forms_give_the_same(form):
    kind = "v3.2" if form == "tokens" else "v4"
    problem = make([kind, kind], 3, rows=6, page_size=1 if form == "tokens" else 6, lists=["full"])
    want, call = run(problem), problem.arguments()
    caches = ("k", "v", "extra_k")
    if form == "HND":
        call |= {name: call[name].transpose(1, 2) for name in caches} | dict(kv_layout="HND")
    elif form == "tokens":
        call |= {name: call[name].squeeze(1) for name in caches}
    elif form == "requests":
        call["q"] = problem.q.unflatten(0, (3, 2))
        each = torch.tensor([5, 70, 0], dtype=INT32)
        call |= dict(topk_length=each.clamp(max=40), extra_topk_length=each)
        want = run(
            problem, topk_length=call["topk_length"].repeat_interleave(2), extra_topk_length=each.repeat_interleave(2)
        )
    elif form == "parts":
        q, rope = problem.q.split([448, 64], -1)
        call |= dict(q=q.contiguous(), q_rope=rope.contiguous())
    elif form == "int8":
        call |= {name: call[name].view(torch.int8) for name in caches}
    else:
        wide = torch.full((6, 1, 140), -7, dtype=INT32)
        call["extra_indices_per_token"] = wide[..., ::2].copy_(call["extra_indices_per_token"])
    found = run(problem, **call)
    for x, y in zip(found, want):
        assert_bitwise(x.reshape(y.shape), y)


@every(kinds=["v4 v4", "numbers v4"], tensors=[False, True])
def test_factors_are_those_of_both(kinds, tensors):
    problem = make(kinds.split(), 7, lists=["full"])
    k_descale, v_descale = (torch.linspace(0.25, 2.0, 5).view(5, 1) if tensors else x for x in (0.5, 2.0))
    factors = [x.expand(5, 8) if tensors else torch.full((5, 8), x) for x in (k_descale, v_descale)]
    found = run(problem, k_descale=k_descale, v_descale=v_descale)
    problem.check(*found, head_scale=factors[0], out_scale=factors[1])


def test_caches_of_e4m3_share_their_scale():
    problem = make(["numbers", "numbers"], 6, dim=512, lists=["full"])
    call, caches = problem.arguments(), [x.cache.nan_to_num().to(E4M3) for x in problem.scopes]
    half = torch.full((5, 8), 0.5)
    for scope, cache in zip(problem.scopes, caches):
        scope.cache = cache.to(BF16)
    call |= dict(k=caches[0], v=caches[0], extra_k=caches[1], k_descale=0.5, v_descale=0.5)
    problem.check(*run(problem, **call), head_scale=half, out_scale=half)


@every(layout=["NHD", "HND"])
def test_each_key_head_has_lists_of_its_own(layout):
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(pages, 4, 2, 96, generator=generator).to(BF16) for pages in (3, 5)]
    lists = [torch.randint(-1, 4 * x.size(0), (5, 2, 9), generator=generator).to(INT32) for x in caches]
    q = torch.randn(5, 6, 96, generator=generator).to(BF16)
    lens = torch.tensor([9, 0, 4, 1, 7], dtype=INT32)

    def call(heads: slice, keys: slice) -> torch.Tensor:
        k, extra = (x[:, :, keys].transpose(1, 2) if layout == "HND" else x[:, :, keys] for x in caches)
        options = dict(kv_layout=layout, topk_length=lens, extra_k=extra, extra_topk_length=lens.flip(0))
        first, second = (x[:, keys] for x in lists)
        options |= dict(kv_indices_per_token=first, extra_indices_per_token=second)
        return ck.attention(q[:, heads], k, k[..., :64], **options)

    found = call(slice(0, 6), slice(0, 2))
    want = torch.cat([call(slice(0, 3), slice(0, 1)), call(slice(3, 6), slice(1, 2))], 1)
    torch.testing.assert_close(found, want, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize(
    ("kinds", "features"),
    [
        ("numbers", {"token_lists"}),
        ("v4", {"quantized_cache"}),
        ("numbers numbers", {"extra_keys"}),
        ("v4 numbers", {"quantized_cache", "extra_keys"}),
    ],
)
def test_what_keeps_kernels_from_a_call(monkeypatch, kinds, features):
    asked, select = [], selection.select
    monkeypatch.setattr(selection, "select", lambda backend, request: asked.append(request) or select(backend, request))
    run(make(kinds.split(), 1))
    known = {"token_lists", "quantized_cache", "extra_keys"}
    assert [x.features & known for x in asked] == [features]


@every(kinds=["v4 v4", "v3.2 v3.2", "numbers numbers"])
def test_rows_are_gathered_some_at_a_time(monkeypatch, kinds):
    problem = make(kinds.split(), 8, rows=9)
    want, dim, calls = run(problem), problem.q.size(2), []
    monkeypatch.setattr(selected_keys, "_BYTES", 2 * 110 * dim * 2)
    compute = selected_keys.reference.compute
    monkeypatch.setattr(selected_keys.reference, "compute", lambda x: calls.append(x.kv.k) or compute(x))
    for x, y in zip(run(problem), want):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)
    assert [x.shape[:2] for x in calls] == [(110, 2)] * 4 + [(110, 1)]
    assert {x.dtype for x in calls} == {BF16}


# --- refusals ---

Q, BYTES = torch.zeros(4, 8, 512, dtype=BF16), torch.zeros(3, 16, 1, 584, dtype=U8)
LIST = torch.zeros(4, 1, 5, dtype=INT32)
NUMBERS = torch.zeros(3, 16, 1, 512, dtype=BF16)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT32)


IS_LIST = r"{name} has shape .*: it must be an int32 tensor \[4, 1, K\]"
REFUSED: list[Row] = [
    *rows(ValueError, "extra_indices_per_token is given without extra_k", extra_k=None),
    *rows(ValueError, "extra_k is given without extra_indices_per_token", extra_indices_per_token=None),
    *rows(ValueError, IS_LIST, extra_indices_per_token=LIST[:3]),
    *rows(ValueError, IS_LIST, extra_indices_per_token=LIST.long()),
    *rows(ValueError, r"{name} has shape .*int32 tensor \[4\]", extra_topk_length=ints(1, 2)),
    *rows(ValueError, r"{name}\[3\]=6 must lie between 0 and 5", extra_topk_length=ints(1, 1, 1, 6)),
    *rows(ValueError, "{name} is on meta", extra_k=BYTES.to("meta"), extra_indices_per_token=LIST.to("meta")),
    *rows(TypeError, "{name} is list, not a tensor", extra_k=[0], extra_indices_per_token=[0], extra_topk_length=[0]),
    *rows(ValueError, "{name} has shape .* 3 or 4 dimensions", extra_k=BYTES[0, 0]),
    *rows(
        ValueError,
        "{name} has shape .* and q head_dim 512: they must be equal",
        extra_k=NUMBERS.new_zeros(2, 3, 1, 576),
    ),
    *rows(ValueError, "{name} has 528 bytes per token .* pass kv_format", extra_k=BYTES.new_zeros(2, 3, 1, 528)),
    *rows(ValueError, "{name} has shape .* one head", extra_k=BYTES.new_zeros(2, 3, 2, 584)),
    *rows(
        ValueError, "{name} has dtype torch.float16 and q torch.bfloat16: they must be equal", extra_k=NUMBERS.half()
    ),
    *rows(ValueError, "{name} has dtype torch.float8_e4m3fn and q torch.bfloat16", extra_k=BYTES.view(E4M3)),
    (
        dict(q=Q.new_zeros(4, 8, 576), k=NUMBERS.new_zeros(3, 16, 1, 576), v=None),
        ValueError,
        r"q has head_dim 576, but extra_k .*kv_format='v4'\) has keys of 512 columns",
    ),
    *rows(ValueError, "page size must be known: pass", extra_k=BYTES.flatten(0, 1)),
    (
        dict(q=Q.new_zeros(4, 8, 576), k=NUMBERS, v=NUMBERS, k_rope=NUMBERS[..., :64]),
        ValueError,
        "extra_k is given with k_rope",
    ),
    *rows(ValueError, "{name} has stride 2 in its last", extra_k=BYTES.new_zeros(2, 3, 1, 1168)[..., ::2]),
    *rows(
        ValueError, r"{name} has strides .* 3 \* 584 adjacent bytes", extra_k=BYTES.new_zeros(2, 3, 1, 1168)[..., :584]
    ),
    (dict(k=NUMBERS, v=NUMBERS.clone()), ValueError, "extra_k is given, but v is not k in the same memory"),
    (dict(k=NUMBERS, v=NUMBERS, kv_format="v3.2"), ValueError, "extra_k has dtype .* kv_format='v3.2' is .* 656"),
    (dict(kv_format="v3.2"), ValueError, "k has dtype .* kv_format='v3.2' is .* 656"),
    (
        dict(k=NUMBERS, v=NUMBERS, extra_k=NUMBERS, kv_format="v4"),
        ValueError,
        "k has dtype torch.bfloat16 .* kv_format='v4'",
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_refusals(change, error, words):
    out = torch.full((4, 8, 512), 7.0, dtype=BF16)
    given: dict[str, Any] = dict(q=Q, k=BYTES, v=BYTES, kv_indices_per_token=LIST, out=out)
    given |= dict(extra_k=BYTES, extra_indices_per_token=LIST, extra_topk_length=ints(1, 2, 3, 4))
    given |= change
    given["v"] = given["k"][..., :512] if given["v"] is None else given["v"]
    with pytest.raises(error, match=words):
        ck.attention(**given)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("name", ["extra_k", "extra_indices_per_token", "extra_topk_length"])
def test_a_second_cache_needs_lists(name):
    value = {"extra_k": BYTES, "extra_indices_per_token": LIST}.get(name, ints(1, 1, 1, 1))
    with pytest.raises(ValueError, match=f"{name} is given without kv_indices_per_token"):
        ck.attention(Q, NUMBERS[0], NUMBERS[0], **{name: value})


def test_an_unused_page_may_be_anything():
    """All bytes but those of listed tokens are 255, NaN: only these are read."""
    problem = make(["v4", "v4"], 5, lists=["last"], lengths=False, pages=9, page_size=7)
    for scope in problem.scopes:
        cache = scope.cache
        assert isinstance(cache, quantized_caches.Cache)
        assert int(cache.numbers().isnan().all(-1).sum()) == cache.slots - 1
    found = run(problem)
    assert bool(found[0].isfinite().all())
    problem.check(*found)
