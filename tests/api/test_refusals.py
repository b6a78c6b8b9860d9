"""Refusals: the class the contract names, a sentence with the offending value, and outputs left alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from guards import Guarded
from problems import graph_buffers
from refusals import Calls, refuse
from wrapper_problems import Wrapped, batch_for

import cutlass_kernels as ck

pytestmark = pytest.mark.runs_nothing("calls are refused before a backend computes")
E4M3, E5M2, F16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32
WRONG = (ValueError, RuntimeError)
Given = dict[str, Any] | Callable[[Calls], dict[str, Any]]
# Subject, error, a call, and words that the sentence holds: literally, as whole words and numbers.
Row = tuple[str, Any, Callable[[Calls], Any], tuple[Any, ...]]
RUNS, PLANS, SINGLES = "ragged paged", "ragged paged", "single decode"


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def of(given: Given, c: Calls) -> dict[str, Any]:
    return given(c) if callable(given) else given


def calls_of(subject: str, functions: str, error: Any, given: Given, *words: Any) -> Iterator[Row]:
    """The same arguments to several functions of Calls."""
    for name in functions.split():
        yield subject, error, lambda c, name=name: getattr(c, name)(**of(given, c)), words


def table() -> Iterator[Row]:
    for layout in ("nhd", "DHN", ""):
        given = dict(kv_layout=layout)
        yield from calls_of("kv_layout", f"{SINGLES} {PLANS} padded", KeyError, given, f"kv_layout={layout!r}")
    for mode in ("ROPE", "alibi", "none "):
        yield from calls_of("pos_encoding_mode", f"{SINGLES} {PLANS}", KeyError, dict(pos_encoding_mode=mode), mode)
    for backend in ("fa4", "cutlass", "trtllm-gen", ""):
        word = f"backend={backend!r}"
        yield "backend", ValueError, lambda c, x=backend: c.single(backend=x), (word,)
        for kind in PLANS.split():
            yield "backend", ValueError, lambda c, x=backend, kind=kind: c.make(kind, backend=x), (word,)

    # heads and sizes
    words = ("num_qo_heads=3", "num_kv_heads=2")
    yield "groups", RuntimeError, lambda c: c.single(q=c.zeros(5, 3, 64)), words
    yield "groups", RuntimeError, lambda c: c.decode(q=c.zeros(3, 64)), words
    for heads in ((3, 2), (0, 2), (-2, 2), (4, 0), (4, -2)):
        words = (f"num_qo_heads={heads[0]}", f"num_kv_heads={heads[1]}")
        yield from calls_of("numbers of heads", PLANS, RuntimeError, dict(heads=(*heads, 64)), *words)
    words = ("head_dim=63 is odd", "ROPE_LLAMA")
    rope = dict(pos_encoding_mode="ROPE_LLAMA")
    yield from calls_of("rope turns pairs", PLANS, ValueError, dict(heads=(4, 2, 63), **rope), *words)
    cut = lambda c: dict(zip("qkv", (x[..., :63] for x in c.qkv)), **rope)  # noqa: E731
    yield from calls_of("rope turns pairs", "single", ValueError, cut, *words)

    # index vectors
    bad = ints(0, 9, 5)
    yield from calls_of("decreasing", PLANS, RuntimeError, dict(qo_indptr=bad), "qo_indptr", 9, 5)
    yield from calls_of("decreasing", "ragged", RuntimeError, dict(kv_indptr=bad), "kv_indptr", 9, 5)
    yield from calls_of("decreasing", "paged", RuntimeError, dict(paged_kv_indptr=bad), "paged_kv_indptr", 9, 5)
    yield from calls_of("start", PLANS, RuntimeError, dict(qo_indptr=ints(2, 5, 14)), "qo_indptr starts at 2")
    short = dict(qo_indptr=ints(0, 14))
    yield from calls_of("lengths of vectors", "paged", ValueError, short, "paged_kv_indptr", 3, 2)
    yield from calls_of("lengths of vectors", "ragged", ValueError, short, "kv_indptr", 3, 2)
    last = dict(paged_kv_last_page_len=ints(4))
    yield from calls_of("lengths of vectors", "paged", ValueError, last, "paged_kv_last_page_len", 1, 2)
    for entry in (0, 17, -1):
        given, words = (
            dict(paged_kv_last_page_len=ints(4, entry)),
            (f"paged_kv_last_page_len[1]={entry}", "page_size=16"),
        )
        yield from calls_of("last_page_len", "paged", WRONG, given, *words)

    # types
    types = ("float16", "bfloat16")
    mixed = lambda c: dict(k=c.k.bfloat16(), v=c.v.bfloat16())  # noqa: E731
    yield from calls_of("mixed types", SINGLES, WRONG, mixed, "q", *types)
    yield "mixed types", WRONG, lambda c: c.single(v=c.v.bfloat16()), ("k", "v", *types)
    for dtype in (torch.int32, torch.bool, torch.complex64):
        zeros = lambda c, x=dtype: {name: torch.zeros_like(y, dtype=x) for name, y in zip("qkv", c.qkv)}  # noqa: E731
        words = ("q has dtype", dtype, "not served")
        yield from calls_of("types of no numbers", "single", ValueError, zeros, *words)
        row = lambda c, x=zeros: dict(x(c), q=x(c)["q"][0])  # noqa: E731
        yield from calls_of("types of no numbers", "decode", ValueError, row, *words)
    words = ("float8_e4m3fn", "float8_e5m2", "must have the dtype of q")
    two = lambda c: dict(q=c.q.to(E4M3), k=c.k.to(E5M2), v=c.v.to(E5M2), o_dtype=F16)  # noqa: E731
    yield from calls_of("two types of fp8", "single", ValueError, two, *words)
    given = dict(q_data_type=E4M3, kv_data_type=E5M2, o_data_type=F16)
    yield from calls_of("two types of fp8", PLANS, ValueError, given, *words)
    yield "8-bit queries", WRONG, lambda c: Calls(c.target, E4M3).single(), ("o_dtype",)
    bytes_ = lambda c: {name: c.zeros(20, 2, 64, dtype=torch.uint8) for name in "kv"}  # noqa: E731
    yield from calls_of("4-bit caches", "single", ValueError, bytes_, "uint8", "kv_cache_sf")

    # numbers
    for name in ("sm_scale", "logits_soft_cap"):
        for value in (float("inf"), -float("inf"), float("nan")):
            words = (f"{name}={value}", "is not finite")
            yield from calls_of("not finite", f"single {PLANS}", ValueError, {name: value}, *words)
        words = (name, "(2,)", "one number")
        yield from calls_of("one number for all", f"single {PLANS}", ValueError, {name: torch.ones(2)}, *words)
    for name in ("rope_scale", "rope_theta"):
        for value in (0.0, -1.0):
            words = (f"{name}={value}", "must be positive")
            yield from calls_of("rope of no size", f"single {PLANS}", ValueError, {name: value, **rope}, *words)

    # shapes, strides and devices of single calls
    yield "shapes", WRONG, lambda c: c.single(k=c.k[:5], v=c.v[:4]), ("k has 5", "v has 4")
    yield "shapes", WRONG, lambda c: c.single(k=c.k[..., :32]), ("q has head_dim 64", "k 32")
    yield "shapes", WRONG, lambda c: c.single(q=c.q[0]), ("q", "(4, 64)", "3 dimensions")
    yield "shapes", ValueError, lambda c: c.single(k=c.k[None]), ("3 dimensions",)
    for name in "qkv":
        words = (f"scale_{name}", "(3,)", "one per head")
        yield "scales", ValueError, lambda c, x=name: c.single(**{f"scale_{x}": c.zeros(3, dtype=F32)}), words
        apart = lambda c, x=name: {x: torch.cat([getattr(c, x)] * 2, -1)[..., ::2]}  # noqa: E731
        yield from calls_of("strides", "single", ValueError, apart, name, "stride 2", "must be contiguous")
    for name in "kv":
        words = (name, "is on meta", "move it there")
        yield "devices", ValueError, lambda c, x=name: c.single(**{x: getattr(c, x).to("meta")}), words

    # masks
    flags = lambda *shape: lambda c: dict(custom_mask=c.zeros(*shape, dtype=torch.bool))  # noqa: E731
    packed = lambda c: dict(packed_custom_mask=c.zeros(3, dtype=torch.uint8))  # noqa: E731
    yield from calls_of("masks", PLANS, WRONG, flags(7), "custom_mask", 7, 181)
    yield from calls_of("masks", PLANS, WRONG, packed, "packed_custom_mask", 3, 24)
    yield from calls_of("masks", "single", WRONG, flags(7), "custom_mask", 7, 14 * 29)
    yield from calls_of("masks", "single", WRONG, packed, "packed_custom_mask", 3, 51)
    # as many elements as [14, 29]
    yield from calls_of("masks", "single", ValueError, flags(29, 14), "custom_mask", 29, 14)
    huge = lambda c: dict(packed(c), qo_indptr=ints(0, 1 << 20), kv_indptr=ints(0, 1 << 20))  # noqa: E731
    yield from calls_of("masks", "ragged", ValueError, huge, 1 << 37, "int32 offsets")
    items = lambda c: dict(prefix_len_ptr=ints(3, 3).to(c.device).to(torch.uint32))  # noqa: E731
    words = ("token_pos_in_items_ptr", "token_pos_in_items_len", "max_item_len_ptr")
    yield from calls_of("items", PLANS, WRONG, items, *words)

    # workspaces, and what is not there
    for kind in PLANS.split():
        for at, words in ((slice(8, None), "must be 16-byte aligned"), (slice(None, None, 16), "not contiguous")):
            crooked = lambda c, at=at: c.target.workspace()[at]  # noqa: E731
            first, second = (f"{name}_workspace_buffer" for name in ("float", "int"))
            yield "workspaces", ValueError, lambda c, k=kind, x=crooked: c.make(k, x(c)), (first, words)
            reset = lambda c, *sizes, k=kind: c.make(k).reset_workspace_buffer(*sizes)  # noqa: E731
            both = lambda c, x=crooked: (x(c), c.target.workspace())  # noqa: E731
            yield "workspaces", ValueError, lambda c, r=reset, x=both: r(c, *x(c)), (first, words)
            if words == "must be 16-byte aligned":
                yield "workspaces", ValueError, lambda c, r=reset, x=both: r(c, *x(c)[::-1]), (second, words)
        yield "no plan", RuntimeError, lambda c, k=kind: c.make(k).run(c.q, *c.kv_of(k)), ("has no plan",)
        yield "not served", NotImplementedError, lambda c, k=kind: c.make(k, jit_args=["x"]), ("jit_args",)
    yield "not served", NotImplementedError, lambda c: c.single(kv_cache_sf=c.data.cache), ("kv_cache_sf",)
    for name in ("v_indptr", "o_indptr"):
        given = lambda c, x=name: {x: c.batch.kv_indptr()}  # noqa: E731
        yield from calls_of("not served", "ragged", NotImplementedError, given, name)


def runs() -> Iterator[tuple[str, str, Any, Given, tuple[Any, ...]]]:
    """Subject, wrappers, error, arguments of run(), and words."""
    # The default plan is float16: a bf16 caller who forgot to say so must hear it.
    types, bf16 = ("bfloat16", "float16"), lambda c: dict(q=c.q.bfloat16())
    yield "types", RUNS, ValueError, bf16, (*types, "q_data_type")
    kv = lambda c: dict(kv=(c.k.bfloat16(), c.v.bfloat16()))  # noqa: E731
    yield "types", "ragged", ValueError, kv, (*types, "kv_data_type")
    yield "types", "paged", ValueError, lambda c: dict(kv=(c.data.cache.bfloat16(),)), (*types, "kv_data_type")
    zero = lambda c: dict(plan=dict(kv_data_type=torch.uint8), kv=(c.data.cache.to(torch.uint8) * 0,))  # noqa: E731
    yield "types", "paged", ValueError, zero, ("uint8", "kv_cache_sf")
    for rows in (13, 15):  # without places, whose sizes would be refused instead
        more = lambda c, n=rows: dict(q=torch.cat([c.q, c.q])[:n], out=None, lse=None)  # noqa: E731
        yield "rows", RUNS, ValueError, more, (rows, 14)

    # out and lse
    for shape, dtype in [((13, 4, 64), F16), ((14, 4, 32), F16), ((14, 256), F16), ((14, 4, 64), F32)]:
        yield "out", RUNS, ValueError, dict(out=(shape, dtype)), ("out", shape, dtype)
    yield "out", RUNS, ValueError, dict(out=((14, 4, 64), torch.bfloat16)), ("out", (14, 4, 64), torch.bfloat16)
    for shape, dtype in [((13, 4), F32), ((14, 2), F32), ((4, 14), F32), ((14, 4), F16)]:
        yield "lse", RUNS, ValueError, dict(lse=(shape, dtype)), ("lse", shape, dtype)
    yield "lse", RUNS, ValueError, dict(lse_layout="HN"), ("lse", "(14, 4)", "(4, 14)")
    yield "lse", RUNS, ValueError, dict(lse=None, lse_base="log10"), ("lse_base='log10'",)
    yield "lse", RUNS, ValueError, dict(lse=None, lse_layout="NHD"), ("lse_layout='NHD'",)
    apart = lambda c: dict(out=c.zeros(14, 4, 128)[..., ::2])  # noqa: E731
    yield "out", RUNS, ValueError, apart, ("out", "stride 2", "must be contiguous")

    # shapes
    yield "shapes", "ragged", WRONG, lambda c: dict(q=c.q[:, :2]), ("q", "(14, 2, 64)", "num_qo_heads=4")
    for at, words in [
        ((slice(None), slice(1)), ("k has 1", "plan 2")),
        (slice(20), ("k has 20", "v 20", "kv_indptr", 29)),
    ]:
        yield "shapes", "ragged", WRONG, lambda c, at=at: dict(kv=(c.k[at], c.v[at])), words
    yield "shapes", "ragged", WRONG, lambda c: dict(kv=(c.k[..., :32], c.v)), ("k", "dimension 32", 64)
    yield "shapes", "paged", WRONG, lambda c: dict(q=c.q[..., :32]), ("q", "(14, 4, 32)", "head_dim_qk=64")
    words = ("paged_kv_cache", 8, "page_size=16")
    yield "shapes", "paged", WRONG, lambda c: dict(kv=(c.data.cache[:, :, :8],)), words
    yield "shapes", "paged", WRONG, lambda c: dict(kv=(c.data.cache[..., :32],)), ("k", "dimension 32", 64)

    # caches
    for cache in ({"k": 1}, None, "cache"):
        yield "containers", "paged", KeyError, dict(kv=(cache,)), (type(cache).__name__,)
    yield "containers", "paged", KeyError, lambda c: dict(kv=([c.data.k_cache, c.data.v_cache],)), ("list",)
    words = ("(2, 16, 2, 64)", "5 dimensions")
    yield "ranks", "paged", ValueError, lambda c: dict(kv=(c.data.cache[0],)), words
    words = ("(1, 6, 2, 16, 2, 64)", "5 dimensions")
    yield "ranks", "paged", ValueError, lambda c: dict(kv=(c.data.cache[None],)), words
    words = ("k_cache has shape (6, 2, 16, 2, 64)", "page_size")
    yield "ranks", "paged", ValueError, lambda c: dict(kv=((c.data.cache,) * 2,)), words
    for cut in (
        lambda x: x[:-1],
        lambda x: x[:, :8],
        lambda x: x[:, :, :1],
        lambda x: x[:, 0],
    ):
        other = lambda c, cut=cut: dict(kv=((c.data.k_cache, cut(c.data.v_cache)),))  # noqa: E731
        words = ("(6, 16, 2, 64)", tuple(cut(torch.empty(6, 16, 2, 64)).shape), "equal pages, page_size and heads")
        yield "ranks", "paged", ValueError, other, words
    halves = lambda c: (x.repeat_interleave(2, -1)[..., ::2] for x in (c.data.k_cache, c.data.v_cache))  # noqa: E731
    words = ("k_cache", "stride 2", "must be contiguous")
    yield "strides", "paged", ValueError, lambda c: dict(kv=(tuple(halves(c)),)), words
    for page in (-1, 99):
        indices = lambda c, x=page: dict(plan=dict(paged_kv_indices=c.pages_with(x)))  # noqa: E731
        yield "page numbers", "paged", ValueError, indices, ("paged_kv_indices", page)

    # options
    window = dict(plan=dict(window_left=4), window_left=5)
    yield "window_left", "paged", AssertionError, window, ("window_left=5", 4)
    for shape, dtype in [((2,), F32), ((4, 1), F32), ((4,), torch.int32)]:
        sinks = lambda c, x=shape, y=dtype: dict(sinks=c.zeros(*x, dtype=y))  # noqa: E731
        yield "sinks", RUNS, ValueError, sinks, ("sinks", dtype, "one per query head")
    yield "sinks", RUNS, ValueError, dict(sinks=torch.zeros(4, device="meta")), ("sinks", "is on meta", "move it there")
    for name in ("q_scale", "k_scale", "v_scale"):
        three = lambda c, x=name: {x: c.zeros(3, dtype=F32)}  # noqa: E731
        yield "scales", RUNS, ValueError, three, (f"scale_{name[0]}", "(3,)", "one per head")
    for name in ("kv_cache_sf", "use_fp16_softmax", "uses_spcompress"):
        given = lambda c, x=name: {x: c.data.cache if x == "kv_cache_sf" else True}  # noqa: E731
        yield "not served", "paged", NotImplementedError, given, (name,)


def literally(words: tuple[Any, ...]) -> list[str]:
    return [re.escape(str(word)) for word in words]


@pytest.mark.parametrize("error,call,words", [pytest.param(*row[1:], id=row[0]) for row in table()])
def test_calls_and_plans(calls, error, call, words):
    refuse(error, lambda: call(calls), *literally(words))


@pytest.mark.parametrize(
    "kind,error,given,words", [pytest.param(kind, *x[2:], id=f"{x[0]}-{kind}") for x in runs() for kind in x[1].split()]
)
def test_runs(calls, kind, error, given, words):
    """They leave the places of results alone."""
    given = {"out": ((14, 4, 64), F16), "lse": ((14, 4), F32), "return_lse": True} | of(given, calls)
    places = {name: Guarded(*given[name], calls.device) for name in ("out", "lse") if isinstance(given[name], tuple)}
    given |= {name: x.tensor for name, x in places.items()}
    refuse(error, lambda: calls.run(kind, **given), *literally(words))
    for name, place in places.items():
        place.check_untouched(name)


# --- what is told of refusals, and what they leave ---------------------------------------------------------------


def test_return_lse_is_a_bool(calls):
    factor = torch.ones(1, device=calls.device)
    refuse(TypeError, lambda: calls.ragged().run(*calls.qkv, factor), "return_lse", "Tensor")
    more = (1.0, 1.0, factor.cpu().double()[0])
    refuse(TypeError, lambda: calls.paged().run(calls.q, calls.data.cache, *more), "return_lse", "Tensor")


def test_refusals_do_not_print_tensors(calls):
    message = refuse(NotImplementedError, lambda: calls.run("ragged", o_scale=calls.q), "o_scale")
    assert "a tensor (14, 4, 64)" in message
    message = refuse(TypeError, lambda: calls.single(causal=calls.q), "causal")
    assert "causal=a tensor of shape (14, 4, 64)" in message


def test_keys_may_start_elsewhere(calls):
    # Engines pass a slice of a larger batch's offsets.
    ragged = calls.ragged(qo_indptr=ints(0, 9), kv_indptr=calls.batch.kv_indptr()[1:])
    assert torch.equal(ragged.run(calls.q[5:], calls.k, calls.v), calls.run("ragged")[5:])


def test_numbers_behind_the_last_page_are_not_read(calls):
    for wrong in (-1, 99):
        unused = torch.cat([calls.data.indices, ints(wrong)])
        assert torch.equal(calls.run("paged", plan=dict(paged_kv_indices=unused)), calls.run("paged"))


def test_a_new_workspace_has_no_plan(calls):
    wrapper = calls.ragged()
    wrapper.reset_workspace_buffer(calls.target.workspace())
    refuse(RuntimeError, lambda: wrapper.run(*calls.qkv), "has no plan")


def test_a_small_workspace(target):
    """Kernels split the keys of one row, and need room for the results; the reference splits nothing."""
    w = Wrapped(
        target, "ragged", batch_for("ragged", target, (1,), (20000,), (8, 1, 64)), workspace=target.workspace(16)
    )
    if not target.is_reference:
        needed, _ = w.wrapper.workspace_size(*w.vectors(), *w.sizes, causal=True)
        words = ("float_workspace_buffer has 16 bytes", needed, "disable_split_kv=True")
        refuse(RuntimeError, lambda: w.plan(causal=True), *words)
    w.plan(causal=True, disable_split_kv=not target.is_reference)
    single = Wrapped(target, "single", w.batch).plan(causal=True).run()
    torch.testing.assert_close(w.run(), single, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("head_dim", [100, 520])
def test_head_dim_without_kernel(kernel_backend, head_dim):
    q, k, v = (torch.zeros(5, 2, head_dim, dtype=F16, device="cuda:0") for _ in range(3))
    call = ck.single_prefill_with_kv_cache
    refuse(RuntimeError, lambda: call(q, k, v, backend=kernel_backend), head_dim, kernel_backend)


@pytest.mark.gpu
def test_tensors_on_two_devices():
    q, k, v = (torch.zeros(5, 2, 64, dtype=F16) for _ in range(3))
    refuse(WRONG, lambda: ck.single_prefill_with_kv_cache(q.cuda(), k, v), "cpu", "cuda")


def test_a_failed_plan_or_run_leaves_the_wrapper_usable(calls):
    wrapper, data = calls.paged(causal=True), (calls.q, calls.data.cache)
    before = wrapper.run(*data)
    with pytest.raises(RuntimeError, match="qo_indptr decreases from 9 to 5"):
        wrapper.plan(ints(0, 9, 5), *calls.data.table(), *calls.batch.heads, 16)
    for run in (wrapper.run, wrapper.forward):  # the latter with options of its own
        with pytest.raises(ValueError, match="q has 3 rows"):
            run(calls.q[:3], calls.data.cache)
    assert torch.equal(wrapper.run(*data), before)


@pytest.mark.parametrize("name", ["num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"])
def test_sizes_that_are_whole_floats(calls, name):
    # Refused before anything is remembered: the same plan with integers works.
    sizes = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim_qk": 64, "head_dim_vo": 64}
    wrapper, offsets = calls.make("ragged", backend=calls.target.backend), ints(0, 5)
    refuse(TypeError, lambda: wrapper.plan(offsets, offsets, **{**sizes, name: float(sizes[name])}), name, "integer")
    wrapper.plan(offsets, offsets, **sizes)
    q, k = calls.zeros(5, 4, 64), calls.zeros(5, 2, 64)
    assert wrapper.run(q, k, k).shape == q.shape


# --- wrappers for CUDA graphs, whose buffers and numbers of rows stay as they were made ---------------------------


def buffers_of(kind: str, device: str) -> dict[str, torch.Tensor]:
    given = graph_buffers(2, 8, device)
    del given["use_cuda_graph"]
    if kind == "paged":
        return given
    return dict(qo_indptr_buf=given["qo_indptr_buf"], kv_indptr_buf=given["paged_kv_indptr_buf"])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_graph_wrappers_need_all_buffers(calls, kind):
    given = buffers_of(kind, calls.device)

    def refused(buffers: dict[str, torch.Tensor], *words: Any) -> None:
        refuse(ValueError, lambda: calls.make(kind, use_cuda_graph=True, **buffers), *words)

    calls.make(kind, use_cuda_graph=True, **given)
    for name, buffer in given.items():
        refused({k: v for k, v in given.items() if k != name}, name)
        refused(given | {name: buffer.long()}, name, "int64")
        if name != "paged_kv_indices_buf":
            refused(given | {name: buffer[:1]}, f"{name}.* 1|1.*{name}")
    mask, offsets = calls.zeros(64, dtype=torch.uint8), given["qo_indptr_buf"]
    refused(given | dict(custom_mask_buf=mask), "custom_mask_buf", "mask_indptr_buf", "both or none")
    of_mask = dict(custom_mask_buf=mask, mask_indptr_buf=offsets[:2])
    refused(given | of_mask, "mask_indptr_buf has 2 elements", 3)


def test_graph_plans_stay_in_bounds(calls):
    table, rest = calls.data.table(), (*calls.batch.heads, 16)

    def fresh() -> Any:
        wrapper = calls.make("paged", use_cuda_graph=True, **buffers_of("paged", calls.device))
        assert wrapper.is_cuda_graph_enabled
        wrapper.plan(calls.batch.qo_indptr(), *table, *rest)
        return wrapper

    mask = torch.ones(5 * 20 + 81, dtype=torch.bool, device=calls.device)
    more_pages = (ints(0, 2, 9), torch.arange(9).int(), ints(1, 1))
    for vectors, options, words in (
        ((ints(0, 5), ints(0, 2), table[1], ints(4)), {}, ("batch_size=2", "1 requests")),
        ((ints(0, 5, 14), *more_pages), {}, ("paged_kv_indices_buf", 9, 8)),
        ((ints(0, 5, 15), *table), {}, ("total number of rows cannot exceed", 15, 14)),
        ((ints(0, 5, 14), *table), dict(custom_mask=mask), ("custom_mask_buf",)),
    ):
        refuse(ValueError, lambda: fresh().plan(*vectors, *rest, **options), *words)
    fresh().plan(ints(0, 3, 7), *table, *rest)
    wrapper = calls.make("ragged", use_cuda_graph=True, **buffers_of("ragged", calls.device))
    wrapper.plan(*calls.vectors["ragged"].values(), *calls.batch.heads)
    refuse(ValueError, lambda: wrapper.plan(ints(0, 5), ints(0, 5), *calls.batch.heads), "batch_size=2", "1 requests")


def test_the_mask_of_a_graph_wrapper_is_planned(calls):
    masks = dict(custom_mask_buf=calls.zeros(64, dtype=torch.uint8), qk_indptr_buf=calls.zeros(3, dtype=torch.int32))
    wrapper = calls.make("ragged", use_cuda_graph=True, **buffers_of("ragged", calls.device), **masks)
    vectors = calls.vectors["ragged"].values()
    wrapper.plan(*vectors, *calls.batch.heads, causal=True)
    before = wrapper.run(*calls.qkv)
    refuse(ValueError, lambda: wrapper.forward(*calls.qkv, causal=False), "causal=False", r"plan\(\)")
    assert torch.equal(wrapper.forward(*calls.qkv, causal=True), before)
    # A mask of the caller's wins over causal, as always.
    mask = torch.ones(5 * 20 + 9 * 9, dtype=torch.bool, device=calls.device)
    wrapper.plan(*vectors, *calls.batch.heads, custom_mask=mask)
    assert torch.equal(wrapper.forward(*calls.qkv, causal=True), wrapper.forward(*calls.qkv, causal=False))
