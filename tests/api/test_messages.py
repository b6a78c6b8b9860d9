"""Messages for the mistakes that callers make: they name the argument and the value, and say what to pass."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from problems import make_batch
from refusals import refuse
from small_calls import HEADS, PAGE, Calls, ints, qkv_of

import cutlass_kernels as ck
from cutlass_kernels._compute import selection
from cutlass_kernels.flash_attn import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

pytestmark = pytest.mark.runs_nothing("calls are refused, or planned only")

E4M3 = torch.float8_e4m3fn
WRONG = (TypeError, ValueError)
PLANNED = ("paged", "ragged", "decode")
# Subject, error, a call, and words that the sentence holds.
Row = tuple[str, Any, Callable[[Calls], Any], tuple[str, ...]]


@pytest.fixture
def calls(target) -> Calls:
    return Calls(target)


def run(c: Calls, kind: str, method: str = "run", kv_layout: str = "NHD", **given: Any) -> Any:
    """A method of a planned wrapper, with some of its tensors replaced."""
    data = dict(q=c.q[:1] if kind == "decode" else c.q)
    data |= dict(k=c.k, v=c.v) if kind == "ragged" else dict(paged_kv_cache=c.cache)
    return getattr(c.planned(kind, kv_layout), method)(**data | given)


def attend(c: Calls, **given: Any) -> Any:
    return ck.attention(**dict(zip("qkv", c.qkv)) | given)


def dense(c: Calls, *more: Any, **given: Any) -> Any:
    """FlashAttention's function of equal lengths."""
    return flash_attn_func(*(x[None] for x in c.qkv), *more, **given)


def varlen(c: Calls, *more: Any, **given: Any) -> Any:
    return flash_attn_varlen_func(*c.qkv, ints(0, 5), ints(0, 20), 5, 20, *more, **given)


def cached(c: Calls, **given: Any) -> Any:
    cache = torch.zeros(1, 32, 2, 64).half()
    try:
        return flash_attn_with_kvcache(c.q[None], cache, cache, **given)
    finally:
        assert not cache.any()


def sink_run(c: Calls, **given: Any) -> Any:
    sink = ck.BatchAttentionWithAttentionSinkWrapper(c.target.workspace())
    sink.plan(**dict(num_qo_heads=4, num_kv_heads=2) | c.plans["paged"])
    return sink.run(c.q, c.cache, **given)


def shared_prefix(c: Calls, page_size: Any) -> Any:
    wrapper = ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(c.target.workspace())
    return wrapper.begin_forward(ints(0, 5), *c.pages.table(), *HEADS, page_size)


def to(c: Calls, dtype: torch.dtype, names: str) -> dict[str, torch.Tensor]:
    return {name: getattr(c, name).to(dtype) for name in names}


def on(c: Calls, given: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(c.q.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}


def arguments() -> Iterator[Row]:
    """In the wrong place, or not what they are taken for."""
    words = ("mask is bool", "For the causal mask, pass causal=True by keyword")
    single = ck.single_prefill_with_kv_cache
    yield "mask", ValueError, lambda c: single(*c.qkv, True), ("custom_mask", *words)
    yield "mask", ValueError, lambda c: single(*c.qkv, None, True), ("packed_custom_mask", *words)
    plan = lambda c: c.wrapper("ragged").plan(ints(0, 5), ints(0, 20), *HEADS, None, True)  # noqa: E731
    yield "mask", ValueError, plan, ("packed_custom_mask", *words)
    for causal in ("yes", "False", 2, 0.5, torch.ones(3)):
        shown = f"causal={causal!r}" if not isinstance(causal, torch.Tensor) else "a tensor of shape (3,)"
        words = (shown, type(causal).__name__, "pass True or False")
        yield "causal", TypeError, lambda c, x=causal: c.single(causal=x), words
        yield "causal", TypeError, lambda c, x=causal: c.cascade(causal=x), words
        for kind in ("paged", "ragged"):
            yield "causal", TypeError, lambda c, x=causal, k=kind: c.planned(k, causal=x), words
            yield "causal", TypeError, lambda c, x=causal, k=kind: run(c, k, "forward", causal=x), words
    for value in (2, "yes", None):
        words = (f"return_lse={value!r}",)
        yield "return_lse", TypeError, lambda c, x=value: attend(c, return_lse=x), words
        yield "return_lse", TypeError, lambda c, x=value: run(c, "paged", return_lse=x), ("return_lse",)
        yield "return_lse", TypeError, lambda c, x=value: c.decode(return_lse=x), words
        yield "return_lse", TypeError, lambda c, x=value: c.cascade().run(c.q, c.cache, return_lse=x), words
        for name in ("return_attn_probs", "return_softmax_lse"):
            words = (f"{name}={value!r}", "pass True or False")
            yield "return_lse", TypeError, lambda c, x=value, name=name: varlen(c, **{name: x}), words
    no = "disable_split_kv='no'"
    yield "disable_split_kv", TypeError, lambda c: c.planned("paged", disable_split_kv="no"), (no,)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "q", "k"):
        ends = dict(cu_seqlens_q=ints(0, 5), cu_seqlens_k=ints(0, 20)) | {name: [0, 3]}
        yield "lists", WRONG, lambda c, x=ends: attend(c, **x), (f"{name} is", "list")
    of_caches = ("qv", "rotary_cos", "cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cache_seqlens")
    for name in ("k", *of_caches):
        new = torch.zeros(1, 1, 2, 64).half()
        given = dict(k=new, v=new, cache_seqlens=4) | {name: [0, 3]}
        yield "lists", TypeError, lambda c, x=given: cached(c, **x), (name, "list")
    for value in (4.5, torch.tensor([4.5])):
        left = dict(cache_leftpad=ints(0), cache_seqlens=value)
        yield "cache_seqlens", WRONG, lambda c, x=left: cached(c, **x), ("cache_seqlens",)
    words = ("softmax_scale=0", "FlashAttention-3", "FlashAttention-2 has dropout_p")
    packed = lambda c: flash_attn_qkvpacked_func(torch.zeros(1, 9, 3, 2, 64).half(), 0.0)  # noqa: E731
    yield "dropout", ValueError, lambda c: dense(c, 0.0, 0.125, True), words
    yield "dropout", ValueError, packed, words
    yield "dropout", TypeError, lambda c: varlen(c, 0.0), ("seqused_q=0.0", *words[1:])
    word = "{}.run() got an unexpected keyword argument 'causal'"
    for method in ("run", "forward"):
        words = (word.format("BatchDecodeWithPagedKVCacheWrapper"),)
        yield "keyword", TypeError, lambda c, m=method: run(c, "decode", m, causal=True), words
    words = (word.format("BatchAttentionWithAttentionSinkWrapper"),)
    yield "keyword", TypeError, lambda c: sink_run(c, causal=True), words


def shapes() -> Iterator[Row]:
    """Shapes, layouts and index vectors."""
    k, v, cache = (lambda c: c.k.transpose(0, 1)), (lambda c: c.v.transpose(0, 1)), lambda c: c.cache.transpose(2, 3)
    other, back = "kv_layout='HND' fits: pass it", "kv_layout='NHD' fits: pass it"
    yield "layout", RuntimeError, lambda c: c.single(k=k(c), v=v(c)), ("num_kv_heads=20", other)
    yield "layout", RuntimeError, lambda c: c.decode(k=k(c), v=v(c)), (other,)
    yield "layout", RuntimeError, lambda c: c.padded(k_unique=k(c)[None], v_unique=v(c)[None]), (other,)
    yield "layout", ValueError, lambda c: run(c, "ragged", k=k(c), v=v(c)), (f"{other} to the constructor",)
    for kind in ("paged", "decode"):
        words = (f"{other} to the constructor",)
        yield "layout", ValueError, lambda c, x=kind: run(c, x, paged_kv_cache=cache(c)), words
    yield "layout", ValueError, lambda c: c.append(paged_kv_cache=cache(c)), (other,)
    yield "layout", RuntimeError, lambda c: c.single(kv_layout="HND"), (back,)
    yield "layout", ValueError, lambda c: run(c, "paged", kv_layout="HND"), (back,)
    pool = lambda c: dict(qkv=(c.q, cache(c).contiguous()), block_tables=c.pages.table()[1][None])  # noqa: E731
    words = ("input_layout='Q_PAGED_KV_HND' fits",)
    yield "layout", RuntimeError, lambda c: c.fused("Q_PAGED_KV_NHD", **pool(c)), words
    yield "layout", RuntimeError, lambda c: c.fused(qkv=(c.q, k(c), v(c))), ("k.transpose(0, 1)",)
    q, kv = torch.zeros(2, 24, 5, 64).half(), torch.zeros(2, 8, 16, 64).half()
    for given, words in (
        (dict(q=q), ("num_qo_heads=5", "num_kv_heads=16", "use q.transpose(1, 2)", "kv_layout='HND'")),
        (dict(q=q, kv_layout="HND"), ("num_kv_heads=8", "use q.transpose(1, 2)")),
        (dict(q=q.transpose(1, 2)), ("num_kv_heads=16", "kv_layout='HND' fits")),
    ):
        yield "heads first", RuntimeError, lambda c, x=given: attend(c, **on(c, dict(k=kv, v=kv) | x)), words
    for shape, remedy in (((4, 64), "q.unsqueeze(0)"), ((1, 5, 4, 64), "q.flatten(0, 1)")):
        words = (f"q has shape {shape}", "3 dimensions, [rows, num_qo_heads, head_dim]", remedy)
        of = lambda c, x=shape: c.q[0] if len(x) == 2 else c.q[None]  # noqa: E731
        yield "dimensions", ValueError, lambda c, of=of: c.single(q=of(c)), words
        yield "dimensions", ValueError, lambda c, of=of: c.padded(q=of(c)), words
        yield "dimensions", ValueError, lambda c, of=of: c.fused(qkv=(of(c), c.k, c.v)), words
        for kind in PLANNED:
            yield "dimensions", ValueError, lambda c, of=of, x=kind: run(c, x, q=of(c)), words
    words = ("2 dimensions, [num_qo_heads, head_dim]", "single_prefill_with_kv_cache for several rows")
    yield "dimensions", ValueError, lambda c: c.decode(q=c.q), words
    why = "needs 2: the start of each request and the end of the last, so batch_size + 1"
    for kind, name, told_by in (
        ("paged", "paged_kv_indptr", "qo_indptr"),
        ("ragged", "kv_indptr", "qo_indptr"),
        ("decode", "indptr", "last_page_len"),
    ):
        words = (f"{name} has 3 elements", why, f"{told_by} says batch_size=1")
        yield "indptr", ValueError, lambda c, x=kind, name=name: c.planned(x, **{name: ints(0, 1, 2)}), words
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        words = (f"{name} has 3 elements", why, "batch_size=1")
        yield "indptr", ValueError, lambda c, name=name: c.fused(**{name: ints(0, 1, 2)}), words
    words = ("paged_kv_last_page_len has 2 elements", "needs 1: one per request")
    yield "indptr", ValueError, lambda c: c.planned("paged", paged_kv_last_page_len=ints(4, 4)), words
    words = ("pass 0 and then their cumulative sum",)
    yield "indptr", RuntimeError, lambda c: c.planned("ragged", qo_indptr=ints(5, 5)), words
    for method in ("run", "forward"):
        for kind in ("paged", "decode"):
            pair = lambda c, m=method, x=kind: getattr(c.planned(x), m)(c.q[:1], *c.cache.unbind(1))  # noqa: E731
            yield "pair", TypeError, pair, ("one argument, the tuple (k_cache, v_cache)", "(5, 16, 2, 64)")


def numbers() -> Iterator[Row]:
    """Dtypes and numbers."""
    words = ("say the output's dtype, e.g. o_dtype=torch.bfloat16",)
    yield "o_dtype", ValueError, lambda c: c.single(**to(c, E4M3, "qkv")), words
    yield "o_dtype", ValueError, lambda c: c.decode(q=c.q[0].to(E4M3), **to(c, E4M3, "kv")), words
    words = ("say the output's dtype, e.g. o_data_type=torch.bfloat16",)
    yield "o_dtype", ValueError, lambda c: c.planned("paged", q_data_type=E4M3), words
    yield "o_dtype", ValueError, lambda c: c.cascade(q_data_type=E4M3), words
    yield "o_dtype", ValueError, lambda c: c.planned("paged", o_data_type="int8"), ("o_data_type=torch.int8",)
    words = ("out_dtype=torch.float32 is not served",)
    yield "o_dtype", ValueError, lambda c: c.fused(out_dtype=torch.float32), words
    names = ("q", "k_shared", "v_shared", "k_unique", "v_unique")
    fp8 = lambda c: [x.to(E4M3) for x in (c.q[:1], c.k, c.v, c.k[None], c.v[None])]  # noqa: E731
    words = ("which this function does not serve",)
    yield "o_dtype", ValueError, lambda c: c.padded(**dict(zip(names, fp8(c)))), words
    for value in ("16", 16.0):
        words = (f"page_size={value!r}", type(value).__name__, "pass an integer")
        for kind in ("paged", "decode"):
            yield "page_size", TypeError, lambda c, x=value, k=kind: c.planned(k, page_size=x), words
        yield "page_size", TypeError, lambda c, x=value: ck.get_seq_lens(ints(0, 2), ints(4), x), words
        yield "page_size", TypeError, lambda c, x=value: shared_prefix(c, x), words
    words = ("page_size=0 must be positive",)
    yield "page_size", ValueError, lambda c: c.planned("paged", page_size=0), words
    words = ("page_size=-1 must be positive",)
    yield "page_size", ValueError, lambda c: ck.get_seq_lens(ints(0, 2), ints(4), -1), words
    for name in ("max_q_len", "max_kv_len", "batch_size"):
        for value in ("5", 5.0):
            words = (f"{name}={value!r}", "pass an integer")
            yield "fused", TypeError, lambda c, x=value, name=name: c.fused(**{name: x}), words
    words = ("seq_lens='nonsense'", "str", "pass an int32 tensor or None")
    for kind in PLANNED:
        yield "lengths", TypeError, lambda c, k=kind: c.planned(k, seq_lens="nonsense"), words
    yield "lengths", TypeError, lambda c: c.fused(seq_lens="nonsense"), words
    places = lambda c: ck.get_batch_indices_positions(ints(0, 5), "nonsense", 5)  # noqa: E731
    yield "lengths", TypeError, places, ("seq_lens is str",)
    for kind in ("paged", "ragged"):
        words = ("seq_lens_q='nonsense'",)
        yield "lengths", TypeError, lambda c, k=kind: c.planned(k, seq_lens_q="nonsense"), words
    for value in ("0.125", b"1", True):
        words = (f"sm_scale={value!r} is not a number",)
        for call in (Calls.single, attend, lambda c, **given: c.planned("paged", **given)):
            yield "scales", TypeError, lambda c, x=value, call=call: call(c, sm_scale=x), words
        yield "scales", TypeError, lambda c, x=value: run(c, "decode", v_scale=x), ("is not a number",)
    for kind in PLANNED:
        for value in (-7, -2, 0):
            unit = "keys" if kind == "ragged" else "pages"
            words = (f"fixed_split_size={value} must be at least 1, the {unit}", "None or -1")
            yield "splits", ValueError, lambda c, x=value, k=kind: c.planned(k, fixed_split_size=x), words
        words = ("fixed_split_size=2.0", "pass an integer")
        yield "splits", TypeError, lambda c, k=kind: c.planned(k, fixed_split_size=2.0), words
    for values, error, word in (
        (((1.9, -1), [1, 2.0], ("1", 2), torch.tensor([1.5, 2.0])), TypeError, "pass an integer"),
        (((3,), 3, torch.tensor(3)), ValueError, "is not a pair"),
    ):
        for value in values:
            yield "windows", error, lambda c, x=value: attend(c, window=x), ("window=", word)
            yield "windows", error, lambda c, x=value: dense(c, window_size=x), ("window_size=", word)
    qkv = torch.zeros(1, 9, 12, 64).half()
    for heads in (12, 9, 5, 0, -2):
        words = (f"num_heads_q={heads}", "Hkv")
        yield "packed", ValueError, lambda c, x=heads: flash_attn_qkvpacked_func(qkv, num_heads_q=x), words
    words = ("num_heads_q=8.0", "pass an integer")
    yield "packed", TypeError, lambda c: flash_attn_qkvpacked_func(qkv, num_heads_q=8.0), words
    words = ("positions[1]=40", "the 2 pages of request 0 have room for 32 tokens", "add its new pages")
    yield "append", ValueError, lambda c: c.append(positions=ints(3, 40)), words
    yield "append", ValueError, lambda c: c.append(positions=ints(3, 32)), ("positions[1]=32",)
    words = ("batch_indices[1]=7", "only 1 requests")
    yield "append", ValueError, lambda c: c.append(batch_indices=ints(0, 7)), words
    yield "append", ValueError, lambda c: c.append(kv_indptr=ints(0, 9)), ("kv_indptr ends at 9", "2 pages")


@pytest.mark.parametrize(
    "error,call,words", [pytest.param(*row[1:], id=row[0]) for rows in (arguments, shapes, numbers) for row in rows()]
)
def test_mistakes(calls, error, call, words):
    refuse(error, lambda: call(calls), *(rf"\w*{re.escape(word)}\S*" for word in words))


def test_neighbours_of_mistakes_are_served(calls):
    k, v = calls.cache.unbind(1)
    for kind in ("paged", "decode"):
        for method in ("run", "forward"):
            run(calls, kind, method, paged_kv_cache=(k, v))
    for kind in PLANNED:
        for none in (None, -1):
            calls.planned(kind, fixed_split_size=none)
    q, kv = calls.q.new_zeros(2, 5, 24, 64), calls.q.new_zeros(2, 8, 16, 64)
    ck.attention(q, kv, kv, kv_layout="HND")
    calls.append(positions=ints(-1, 31), batch_indices=ints(5, 0))  # a token that is skipped may say anything


def test_numbers_of_numpy(calls):
    numpy = pytest.importorskip("numpy")
    want, ragged = calls.single(causal=True), calls.planned("ragged", causal=True).run(*calls.qkv)
    for causal in (1, numpy.bool_(True), numpy.int64(1)):
        assert torch.equal(calls.single(causal=causal), want)
        assert torch.equal(calls.planned("ragged", causal=causal).run(*calls.qkv), ragged)
    pages = calls.planned("paged", page_size=numpy.int64(PAGE))
    assert torch.equal(pages.run(calls.q, calls.cache), run(calls, "paged"))


def test_no_layout_is_proposed_that_fits_as_little(calls):
    for layout in ("NHD", "HND"):
        with pytest.raises(RuntimeError) as caught:
            calls.single(k=calls.k[:3, :1].repeat(1, 3, 1), v=calls.v[:3, :1].repeat(1, 3, 1), kv_layout=layout)
        assert "fits" not in str(caught.value)


def test_append_writes_nothing_where_it_refuses(calls):
    cache = calls.cache.clone()
    refuse(ValueError, lambda: calls.append(paged_kv_cache=cache, positions=ints(3, 40)), "positions")
    assert torch.equal(cache.view(torch.int16), calls.cache.view(torch.int16))


# --- packed masks ------------------------------------------------------------------------------------------------


def test_packed_masks_in_big_endian_order():
    """Seen where the last byte of a mask is not full, and on the CPU only."""
    batch = make_batch([5, 3], [20, 7], *HEADS)
    mask = torch.rand(5 * 20 + 3 * 7) < 0.5
    mask[99] = mask[-1] = True
    plan = ck.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8)).plan
    bounds = (batch.qo_indptr(), batch.kv_indptr(), *HEADS)
    for order in ("little", "big"):
        bits, _ = ck.segment_packbits(mask, ints(0, 100, 121), bitorder=order)
        one = ck.packbits(mask[:100], bitorder=order)
        single = [x[: 5 if i == 0 else 20] for i, x in enumerate(qkv_of(batch))]
        packed = [
            lambda: plan(*bounds, packed_custom_mask=bits),
            lambda: ck.single_prefill_with_kv_cache(*single, packed_custom_mask=one),
        ]
        for call in packed:
            if order == "little":
                call()
            else:
                refuse(ValueError, call, "big-endian", "bitorder='little'", "not the default of packbits")


def test_bits_behind_a_mask_may_be_anything():
    """Only what looks like big-endian packing is refused."""
    batch = make_batch([5], [5], *HEADS)
    bits = torch.full((4,), 255, dtype=torch.uint8)
    want = ck.single_prefill_with_kv_cache(*qkv_of(batch))
    assert torch.equal(ck.single_prefill_with_kv_cache(*qkv_of(batch), packed_custom_mask=bits), want)


def test_packbits_warns_of_its_default():
    for function in (ck.packbits, ck.segment_packbits):
        assert 'bitorder="little"' in function.__doc__ and "packed_custom_mask" in function.__doc__


# --- explain -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_explain_of_a_device_that_is_not_here():
    words = ("device='cuda' is not here", "pass compute_capability, e.g. 90")
    refuse(ValueError, lambda: ck.explain(device="cuda"), *words)
    assert ck.explain(device="cuda", compute_capability=90).request.compute_capability == 90


def test_explain_of_nonsense():
    refuse(ValueError, lambda: ck.explain(device="cuda:77"), "device='cuda:77' is not here")
    for value in (9.0, "9.0", "90", (9, 0)):
        words = (r"10 \* major \+ minor", r"e\.g\. 90 for 9\.0")
        refuse(TypeError, lambda value=value: ck.explain(compute_capability=value), *words)
    words = r"compute_capability=9 is not 10 \* major \+ minor"
    refuse(ValueError, lambda: ck.explain(compute_capability=9), words)


# --- warnings ----------------------------------------------------------------------------------------------------


def warned_at(call: Callable[[], Any], error: type[Exception] | None = None) -> list[tuple[str, int]]:
    """Files and lines that the warnings of ``call`` point at. A call that computes may raise after them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if error is None:
            call()
        else:
            with pytest.raises(error):
                call()
    return [(x.filename, x.lineno) for x in caught]


def line_of(call: Callable[[], Any]) -> tuple[str, int]:
    """The line of a function that consists of one call."""
    return __file__, call.__code__.co_firstlineno + 1


def test_a_warning_of_append_points_at_its_caller():
    indices = (ints(0, 0), ints(3, 4), torch.zeros(1, 2, PAGE, 2, 64), ints(0), ints(0, 1), ints(5))
    key = torch.ones(2, 2, 64, requires_grad=True)

    def append():
        ck.append_paged_kv_cache(key, key, *indices)

    assert warned_at(append) == [line_of(append)]


def test_a_warning_of_a_plan_points_at_its_caller():
    """However many functions of the library and of torch lie between."""
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(1 << 20, dtype=torch.uint8), backend="fa2")
    given = dict(qo_indptr=ints(0, 5), kv_indptr=ints(0, 20), num_qo_heads=4, num_kv_heads=2, q_data_type=E4M3)

    def plan():
        wrapper.plan(**given, head_dim_qk=64)

    def size():
        wrapper.workspace_size(**given, head_dim=64)

    def inside_torch():
        torch.no_grad()(wrapper.begin_forward)(**given, head_dim=64)

    for call in (plan, size, inside_torch):
        assert warned_at(call, ck.BackendError) == [line_of(call)]  # fa2 has no CPU tensors


@pytest.mark.gpu
def test_a_warning_of_the_reference_points_at_its_caller(monkeypatch):
    q, k, v = (torch.zeros(3, 2, 64, dtype=torch.float64, device="cuda") for _ in range(3))

    def prefill():
        ck.single_prefill_with_kv_cache(q, k, v)

    def decode():
        ck.single_decode_with_kv_cache(q[0], k, v)

    def padded():
        ck.batch_decode_with_shared_prefix_padded_kv_cache(q, k, v, k[:, None], v[:, None])

    for call in (prefill, decode, padded):
        monkeypatch.setattr(selection, "_warned", set())
        places = warned_at(call)
        assert places and set(places) == {line_of(call)}


def test_kernels_that_serve_the_types_but_not_the_tensors(monkeypatch):
    """As where an fp8 cache lies below too many rows: of which tensors, and what to do."""
    monkeypatch.setattr(selection, "select", lambda backend, request: backend)
    q, k, v = (torch.randn(5, heads, 64).half() for heads in (4, 2, 2))
    with pytest.raises(ck.BackendError) as caught:
        ck.attention(q, k, v, cu_seqlens_k=torch.tensor([0, 5], dtype=torch.int32), backend="fa3")
    for words in ("backend='fa3'", "(5, 4, 64) with strides (256, 64, 1)", "(5, 2, 64)", "use backend='auto'"):
        assert words.lower() in str(caught.value).lower()
