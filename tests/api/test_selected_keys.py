"""attention(kv_indices_per_token=): query rows with keys of their own (sparse attention), against the oracle."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
from captures import capture, no_waiting
from compare import assert_bitwise
from guards import Guarded, poison_
from mla_problems import DEVICES
from pairs import every
from ran import counts
from refusals import Row, rows
from selected_problems import make, run

import cutlass_kernels as ck
from cutlass_kernels._attend import selected_keys

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
BF16, HALF = torch.bfloat16, torch.float16


def some(target: Any, seed: int, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A random problem of latent attention, and options of the oracle."""
    rng = random.Random(seed)
    on_gpu = target.device != "cpu"
    heads = rng.choice([1, 2, 7, 8, 16, 32, 64, 96, 128])
    sizes = dict(
        rows=rng.choice([1, 2, 3, 7, 40 if on_gpu else 12]),
        heads=heads,
        width=rng.choice([1, 2, 31, 64, 65, 100, 2048 if on_gpu else 200]),
        device=target.device,
        dtype=rng.choice([BF16, HALF]),
        pages=rng.choice([1, 9, 300 if on_gpu else 20]),
        page_size=rng.choice([1, 2, 16, 64]),
        gap=rng.choice([0, 0, 3]),
        lengths=rng.choice([None, "random"]),
        seed=seed,
    )
    options: dict[str, Any] = dict(sm_scale=rng.choice([None, 192**-0.5, 2.0]))
    if rng.random() < 0.4:
        options["sinks"] = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(target.device) * 3
    if rng.random() < 0.2:
        options["soft_cap"] = 5.0
    return make(**{**sizes, **changes}), options


def given_of(options: dict[str, Any]) -> dict[str, Any]:
    """The oracle's options under the names of attention()."""
    return {{"soft_cap": "logits_soft_cap"}.get(name, name): x for name, x in options.items()}


@every(dims=[(576, 512), (512, 512)], seed=range(40))
def test_random_lists(target, dims, seed):
    problem, options = some(target, seed, dims=dims)
    problem.check(*run(problem, target.backend, **given_of(options)), **options)


@every(kv_heads=[1, 2, 3], dims=[(64, 64), (128, 64), (512, 512), (80, 80)], dtype=[HALF, torch.float32])
def test_other_sizes_on_the_cpu(kv_heads, dims, dtype):
    problem = make(5, 6, 33, "cpu", dtype, kv_heads=kv_heads, dims=dims, lengths="random", seed=kv_heads)
    problem.check(*run(problem))


def test_natural_logarithms_and_none_at_all(target):
    problem = make(4, 8, 40, target.device)
    want, lse, _ = run(problem, target.backend)
    call = problem.arguments() | dict(backend=target.backend)
    found, natural = ck.attention(**call, return_lse=True, lse_base=math.e)
    torch.testing.assert_close(natural, lse * math.log(2.0))
    for result in (found, ck.attention(**call)):
        assert_bitwise(result, want)


def test_a_slot_counts_as_often_as_it_is_listed(target):
    problem = make(3, 4, 77, target.device, lists=["one"])
    out, lse, max_logits = run(problem, target.backend)
    problem.check(out, lse, max_logits)
    torch.testing.assert_close(lse * math.log(2.0), max_logits + math.log(77.0))
    values = problem.cache.flatten(0, 1)[problem.indices[:, 0, 0].long(), 0, :512]
    torch.testing.assert_close(out, values[:, None].expand_as(out), atol=1e-2, rtol=1e-2)


@every(dims=[(576, 512), (512, 512)], sinks=[False, True], lengths=[None, [0, 0, 0]])
def test_rows_without_keys(target, dims, sinks, lengths):
    lists = ["none"] if lengths is None else ["full"]
    problem = make(3, 4, 70, target.device, dims=dims, lists=lists, lengths=lengths)
    given = dict(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=target.device)) if sinks else {}
    out, lse, max_logits = run(problem, target.backend, **given)
    assert not out.any() and bool((max_logits == -math.inf).all())
    if sinks:
        torch.testing.assert_close(lse * math.log(2.0), given["sinks"].expand_as(lse))
    else:
        assert bool((lse == -math.inf).all())


def test_lengths_hide_what_lies_behind(target):
    """It may be slots of NaN."""
    problem = make(6, 4, 50, target.device, lists=["full"], lengths=[0, 1, 49, 50, 25, 7])
    assert bool(problem.cache.isnan().any())
    problem.check(*run(problem, target.backend))


def test_no_indices_and_no_slots():
    problem = make(3, 4, 0)
    for empty in (problem, dataclasses.replace(make(3, 4, 5), cache=problem.cache[:0])):
        out, lse, max_logits = run(empty)
        assert not out.any() and bool((lse == -math.inf).all()) and bool((max_logits == -math.inf).all())
    none = make(0, 4, 5)
    assert run(none)[0].shape == (0, 4, 512)


# --- forms of queries, caches and lists ---


def same(target: Any, found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for x, y in zip(found, want, strict=True):
        if target.is_reference:
            assert_bitwise(x.reshape(y.shape), y)
        else:
            torch.testing.assert_close(x.reshape(y.shape), y, atol=1e-2, rtol=1e-2)


@every(form=["HND", "tokens", "tokens HND", "pages of 5", "dense", "parts", "strided lists", "one list"])
def test_forms_give_the_same(target, form):
    problem = make(6, 8, 45, target.device, lengths="random", page_size=15)
    if form == "one list":  # of all rows
        problem.indices = problem.indices[:1].repeat(6, 1, 1)
        problem.cache.nan_to_num_()
    want, call = run(problem, target.backend), problem.arguments()
    tokens = problem.cache.flatten(0, 1)
    if form == "HND":
        call["kv_layout"] = "HND"
        call |= {x: call[x].transpose(1, 2) for x in "kv"}
    elif form.startswith("tokens"):
        k = tokens.transpose(0, 1) if form == "tokens HND" else tokens
        call |= dict(k=k, v=k[..., :512], kv_layout=form.removeprefix("tokens").strip() or "NHD")
    elif form == "pages of 5":
        k = tokens.unflatten(0, (-1, 5))
        call |= dict(k=k, v=k[..., :512])
    elif form == "dense":  # a page for each request
        k = tokens.unflatten(0, (3, -1))
        call |= dict(k=k, v=k[..., :512], q=problem.q.unflatten(0, (3, 2)))
    elif form == "parts":
        parts = [x.split([512, 64], -1) for x in (problem.q, problem.cache)]
        (q, q_rope), (k, k_rope) = ([x.contiguous() for x in part] for part in parts)
        call |= dict(q=q, q_rope=q_rope, k=k, v=k, k_rope=k_rope)
    elif form == "strided lists":
        wide = torch.full((6, 1, 90), -7, dtype=INT32, device=target.device)
        call["kv_indices_per_token"] = wide[..., ::2].copy_(problem.indices)
    else:
        call["kv_indices_per_token"] = problem.indices[:1].expand(6, -1, -1)
    same(target, run(problem, target.backend, **call), want)


@every(batch=[1, 2, 6])
def test_lengths_of_requests(target, batch):
    """``[B, n, ...]``: a length for each request, or for each row."""
    per_request = [[17], [50, 3], [0, 1, 50, 49, 20, 33]][[1, 2, 6].index(batch)]
    each = [n for n in per_request for _ in range(6 // batch)]
    problem = make(6, 4, 50, target.device, lengths=each)
    q = problem.q.unflatten(0, (batch, -1))
    short = torch.tensor(per_request, dtype=INT32, device=target.device)
    want = run(problem, target.backend)
    same(target, run(problem, target.backend, q=q), want)
    same(target, run(problem, target.backend, q=q, topk_length=short), want)


def test_results_go_where_they_are_asked_for(target):
    problem = make(5, 4, 40, target.device)
    out, _, max_logits = run(problem, target.backend)
    wide = Guarded((5, 4, 512), BF16, target.device, (4 * 600 + 8, 600, 1))
    logits = Guarded((5, 4), torch.float32, target.device, (7, 1))
    result = ck.attention(
        **problem.arguments(), out=wide.tensor, max_logits=logits.tensor, backend=target.backend, return_lse=False
    )
    assert result is wide.tensor
    assert_bitwise(wide.tensor, out)
    assert_bitwise(logits.tensor, max_logits)
    wide.check()
    logits.check()


def test_rows_are_gathered_some_at_a_time(monkeypatch):
    problem = make(9, 4, 40, lengths="random")
    want = run(problem)
    monkeypatch.setattr(selected_keys, "_BYTES", 2 * 40 * 576 * 2)
    for x, y in zip(run(problem), want):
        torch.testing.assert_close(x, y, atol=1e-2, rtol=1e-2)
    problem.check(*run(problem))


# --- fp8 ---


def of_e4m3(target: Any) -> None:
    if target.backend == "fa3":
        pytest.skip("fa3 reads latent caches of 16 bits")


@every(dims=[(576, 512), (512, 512)], seed=range(8), queries=[BF16, HALF, E4M3])
def test_caches_of_e4m3(target, dims, seed, queries):
    of_e4m3(target)
    problem, options = some(target, seed, dims=dims, dtype=queries, kv_dtype=E4M3)
    given = given_of(options) | dict(k_descale=0.5, v_descale=0.5)
    every_head = torch.full(problem.q.shape[:2], 0.5, device=target.device)
    problem.check(*run(problem, target.backend, **given), **options, head_scale=every_head, out_scale=every_head)


@every(dtype=[BF16, E4M3])
def test_what_lies_behind_512_columns_is_not_read(target, dtype):
    """K = V: queries and keys have no columns of the position, and NaN in their place."""
    if dtype == E4M3:
        of_e4m3(target)
    problem = make(5, 16, 70, target.device, dims=(512, 512), kv_dtype=dtype, lengths="random")
    wide = [poison_(x.new_empty(*x.shape[:-1], 576)) for x in (problem.q, problem.cache)]
    q, k = (x[..., :512].copy_(y) for x, y in zip(wide, (problem.q, problem.cache)))
    problem.check(*run(problem, target.backend, q=q, k=k, v=k))


@every(form=["one", "head", "request", "row"])
def test_scales_in_tensors(target, form):
    of_e4m3(target)
    problem = make(6, 4, 40, target.device, kv_dtype=E4M3, lists=["full"])
    shape = {"one": (1,), "head": (1, 1), "request": (3, 1), "row": (6, 1)}[form]
    q = problem.q.unflatten(0, (3, 2)) if form == "request" else problem.q
    k_descale = torch.linspace(0.25, 0.75, math.prod(shape), device=target.device).view(shape)
    factors = k_descale.view(-1, 1).repeat_interleave(6 // k_descale.size(0), 0).expand(6, 4)
    found = run(problem, target.backend, q=q, k_descale=k_descale, v_descale=k_descale)
    problem.check(*found, head_scale=factors, out_scale=factors)


# --- kernels ---


def test_kernels_compute_it(kernels):
    problem = make(4, 64, 128, kernels.device, lengths="random")
    run(problem, kernels.backend)  # loads it
    before = counts()
    with no_waiting():
        run(problem, kernels.backend)
    assert (counts() - before).keys() == {kernels.backend}


@every(width=[40, 2048])
def test_rows_of_impossible_lengths_are_not_written(kernels, width):
    """Whether their keys are split or not."""
    problem = make(4, 16, width, kernels.device, lists=["full"], lengths=[width, 0, width, 3])
    out, _, max_logits = run(problem, kernels.backend)
    problem.lengths = torch.tensor([width + 1, -5, 2**31 - 1, 3], dtype=INT32, device=kernels.device)
    found, _, largest = run(problem, kernels.backend)
    assert found[:3].isnan().all() and largest[:3].isnan().all()
    assert_bitwise(found[3], out[3])
    assert_bitwise(largest[3], max_logits[3])


@every(heads=[8, 128], splits=[0, 1, 7])
def test_splits_of_long_lists(kernels, heads, splits):
    problem = make(3, heads, 5000, kernels.device, pages=200, page_size=64, lengths=[5000, 17, 2048])
    problem.check(*run(problem, kernels.backend, num_splits=splits))


def test_graphs_follow_lists_lengths_and_keys(kernels):
    sizes = dict(device=kernels.device, pages=40, page_size=64, lengths="random")
    problems = [make(16, 128, 300, seed=seed, **sizes) for seed in range(4)]
    static = make(16, 128, 300, seed=9, **sizes)
    given = dict(max_logits=torch.empty(16, 128, device=kernels.device), return_lse=True, backend=kernels.backend)
    graph, results = capture(lambda: (*ck.attention(**static.arguments(), **given), given["max_logits"]))
    for problem in problems:
        for name in ("q", "cache", "indices", "lengths"):
            getattr(static, name).copy_(getattr(problem, name))
        for x in results:
            poison_(x)
        graph.replay()
        problem.check(*results)


@every(lengths=["random", "all", None])
def test_a_row_does_not_depend_on_the_others(kernels, lengths):
    """Nor on whether the GPU or the host knows that all of its list counts."""
    some = [3000] * 40 if lengths == "all" else lengths
    problem = make(40, 16, 3000, kernels.device, pages=60, page_size=64, lengths=some, lists=["any"])
    want = run(problem, kernels.backend, batch_invariant=True)
    if lengths == "all":
        problem.lengths = None
    for mine in (slice(0, 1), slice(7, 9), slice(20, 40)):
        counts = None if problem.lengths is None else problem.lengths[mine]
        part = dataclasses.replace(problem, q=problem.q[mine], indices=problem.indices[mine], lengths=counts)
        for x, y in zip(run(part, kernels.backend, batch_invariant=True), want):
            assert_bitwise(x, y[mine])


@pytest.mark.gpu
def test_other_sizes_fall_back_and_warn():
    problem = make(3, 4, 20, "cuda:0", dims=(128, 128))
    with pytest.warns(ck.PerformanceWarning, match="kv_indices_per_token"):
        found = run(problem)
    problem.check(*found)
    with pytest.raises(ValueError, match="kv_indices_per_token, for these tensors and options, has no fa2 kernel"):
        run(problem, "fa2")


# --- refusals ---

Q, LATENT = torch.zeros(4, 8, 576, dtype=BF16), torch.zeros(3, 16, 1, 576, dtype=BF16)
LIST = torch.zeros(4, 1, 5, dtype=INT32)


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=INT32)


SHAPE, ALONE = r"{name} has shape \(.*int32 tensor \[4, 1, K\]", "{name}=.* is given with kv_indices_per_token"
REFUSED: list[Row] = [
    *rows(ValueError, SHAPE, kv_indices_per_token=LIST.long()),
    *rows(ValueError, SHAPE, kv_indices_per_token=LIST[:3]),
    *rows(ValueError, SHAPE, kv_indices_per_token=LIST.expand(4, 2, 5)),
    *rows(ValueError, SHAPE, kv_indices_per_token=LIST[:, 0]),
    *rows(ValueError, "{name} is on meta, but the queries", kv_indices_per_token=LIST.to("meta")),
    *rows(ValueError, "{name} is on meta, but the queries", topk_length=ints(1, 1, 1, 1).to("meta")),
    *rows(TypeError, "{name} is list, not a tensor", kv_indices_per_token=[0], topk_length=[0]),
    *rows(ValueError, r"{name} has shape .*int32 tensor \[4\]", topk_length=ints(1, 1, 1)),
    *rows(ValueError, r"{name} has shape .*torch.int64", topk_length=ints(1, 1, 1, 1).long()),
    *rows(ValueError, r"{name}\[2\]=6 must lie between 0 and 5", topk_length=ints(1, 1, 6, 9)),
    *rows(ValueError, r"{name}\[1\]=-1 must lie between 0 and 5", topk_length=ints(1, -1, 1, 1)),
    *rows(ValueError, r"{name} has shape \(4, 7\)", max_logits=torch.zeros(4, 7)),
    *rows(ValueError, "{name} has shape .* torch.float64", max_logits=torch.zeros(4, 8).double()),
    *rows(ValueError, ALONE, causal=True, chunk_size=3, window=(3, -1), kv_shard=(2, 0, 1), cu_seqlens_q=ints(0, 4)),
    *rows(ValueError, ALONE, cu_seqlens_k=ints(0, 4), seqused_q=ints(4), seqused_k=ints(5), page_table=ints(1)[None]),
    *rows(ValueError, ALONE, kv_indptr=ints(0, 1), kv_indices=ints(0), kv_last_page_len=ints(1)),
    *rows(ValueError, ALONE, packed_custom_mask=torch.zeros(8, dtype=torch.uint8), mask_indptr=ints(0, 1)),
    *rows(ValueError, ALONE, alibi_slopes=torch.zeros(8)),
    (dict(k_descale=torch.ones(3, 1)), ValueError, r"k_descale has shape \(3, 1\): pass .* \[4, 1\]"),
]


@DEVICES
@pytest.mark.parametrize(("change", "error", "words"), REFUSED)
def test_refusals(device, change, error, words):
    if device != "cpu" and "must lie between 0 and 5" in words:
        pytest.skip("lengths on a GPU are not read back")

    def here(x: Any) -> Any:
        return x.to(device) if isinstance(x, torch.Tensor) and x.is_cpu else x

    out = torch.zeros(4, 8, 512, dtype=BF16, device=device)
    given = dict(q=Q, k=LATENT, v=LATENT[..., :512], kv_indices_per_token=LIST, out=out)
    assert ck.attention(**{name: here(x) for name, x in given.items()}) is out
    out.fill_(7.0)
    with pytest.raises(error, match=words):
        ck.attention(**{name: here(x) for name, x in (given | change).items()})
    assert bool((out == 7.0).all())


@pytest.mark.parametrize(
    ("name", "value"), [("topk_length", ints(1, 1, 1, 1)), ("max_logits", torch.zeros(4, 8))], ids=["lengths", "logits"]
)
def test_what_belongs_to_lists_is_refused_without(name, value):
    with pytest.raises(ValueError, match=f"{name} is given without kv_indices_per_token"):
        ck.attention(Q, LATENT[0], LATENT[0, ..., :512], **{name: value})


def test_masks_that_hide_nothing_and_bounds_of_lengths_are_accepted(target):
    problem = make(3, 4, 20, target.device)
    given = dict(window=[-1, -5], causal=0, chunk_size=0, max_seqlen_q=1, max_seqlen_k=7)
    problem.check(*run(problem, target.backend, **given))
