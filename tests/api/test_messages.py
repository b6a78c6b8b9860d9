"""Messages for the mistakes that callers make: they name the argument and the value, and say what to pass."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import make_batch
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


def refuse(error: type[Exception] | tuple[type[Exception], ...], call: Callable[[], Any], *words: str) -> None:
    """``call`` raises ``error`` with all these words."""
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in {caught.value}"


@pytest.fixture
def calls(target) -> Calls:
    return Calls(target)


# --- arguments in the wrong place --------------------------------------------------------------------------------


def test_causal_as_fourth_argument(calls):
    single, plan = ck.single_prefill_with_kv_cache, calls.wrapper("ragged").plan
    words = ("mask is bool", "For the causal mask, pass causal=True by keyword")
    refuse(ValueError, lambda: single(*calls.qkv, True), "custom_mask", *words)
    refuse(ValueError, lambda: single(*calls.qkv, None, True), "packed_custom_mask", *words)
    refuse(ValueError, lambda: plan(ints(0, 5), ints(0, 20), *HEADS, None, True), "packed_custom_mask", *words)


@pytest.mark.parametrize("kind", ["paged", "decode"])
@pytest.mark.parametrize("method", ["run", "forward"])
def test_keys_and_values_of_a_paged_cache_given_separately(calls, kind, method):
    rows = calls.q if kind == "paged" else calls.q[:1]
    call = getattr(calls.planned(kind), method)
    k, v = calls.cache.unbind(1)
    refuse(TypeError, lambda: call(rows, k, v), "one argument, the tuple (k_cache, v_cache)", str(tuple(v.shape)))
    call(rows, (k, v))


@pytest.mark.parametrize("causal", ["yes", "False", 2, 0.5, torch.ones(3)], ids=str)
def test_causal_that_is_no_bool(calls, causal):
    shown = f"causal={causal!r}" if not isinstance(causal, torch.Tensor) else "a tensor of shape (3,)"
    words = (shown, type(causal).__name__, "pass True or False")
    refuse(TypeError, lambda: calls.single(causal=causal), *words)
    refuse(TypeError, lambda: calls.cascade(causal=causal), *words)
    for kind, data in (("paged", (calls.q, calls.cache)), ("ragged", calls.qkv)):
        refuse(TypeError, lambda: calls.planned(kind, causal=causal), *words)
        wrapper = calls.planned(kind)
        refuse(TypeError, lambda: wrapper.forward(*data, causal=causal), *words)


def test_causal_that_is_a_bool_of_another_kind(calls):
    numpy = pytest.importorskip("numpy")
    want = calls.single(causal=True)
    for causal in (1, numpy.bool_(True), numpy.int64(1)):
        assert torch.equal(calls.single(causal=causal), want)
        assert torch.equal(calls.planned("ragged", causal=causal).run(*calls.qkv), want)


# --- shapes and layouts ------------------------------------------------------------------------------------------


def test_keys_in_the_other_layout(calls):
    k, v, cache = calls.k.transpose(0, 1), calls.v.transpose(0, 1), calls.cache.transpose(2, 3)
    other = "kv_layout='HND' fits: pass it"
    refuse(RuntimeError, lambda: calls.single(k=k, v=v), "num_kv_heads=20", other)
    refuse(RuntimeError, lambda: calls.decode(k=k, v=v), other)
    refuse(RuntimeError, lambda: calls.padded(k_unique=k[None], v_unique=v[None]), other)
    refuse(ValueError, lambda: calls.planned("ragged").run(calls.q, k, v), f"{other} to the constructor")
    refuse(ValueError, lambda: calls.planned("paged").run(calls.q, cache), f"{other} to the constructor")
    refuse(ValueError, lambda: calls.planned("decode").run(calls.q[:1], cache), f"{other} to the constructor")
    refuse(ValueError, lambda: calls.append(paged_kv_cache=cache), other)
    back = "kv_layout='NHD' fits: pass it"
    refuse(RuntimeError, lambda: calls.single(kv_layout="HND"), back)
    refuse(ValueError, lambda: calls.planned("paged", "HND").run(calls.q, calls.cache), back)
    table = calls.pages.table()[1][None]
    refuse(
        RuntimeError,
        lambda: calls.fused("Q_PAGED_KV_NHD", qkv=(calls.q, cache.contiguous()), block_tables=table),
        "input_layout='Q_PAGED_KV_HND' fits",
    )
    refuse(RuntimeError, lambda: calls.fused(qkv=(calls.q, k, v)), "k.transpose(0, 1)")


def test_no_layout_is_proposed_that_fits_as_little(calls):
    for layout in ("NHD", "HND"):
        with pytest.raises(RuntimeError) as caught:
            calls.single(k=calls.k[:3, :1].repeat(1, 3, 1), v=calls.v[:3, :1].repeat(1, 3, 1), kv_layout=layout)
        assert "fits" not in str(caught.value)


@pytest.mark.parametrize("dims,remedy", [(2, "q.unsqueeze(0)"), (4, "q.flatten(0, 1)")])
def test_queries_of_two_or_four_dimensions(calls, dims, remedy):
    q = calls.q[0] if dims == 2 else calls.q[None]
    words = (f"q has shape {tuple(q.shape)}", "3 dimensions, [rows, num_qo_heads, head_dim]", remedy)
    refuse(ValueError, lambda: calls.single(q=q), *words)
    refuse(ValueError, lambda: calls.padded(q=q), *words)
    refuse(ValueError, lambda: calls.fused(qkv=(q, calls.k, calls.v)), *words)
    refuse(ValueError, lambda: calls.planned("ragged").run(q, calls.k, calls.v), *words)
    refuse(ValueError, lambda: calls.planned("paged").run(q, calls.cache), *words)
    refuse(ValueError, lambda: calls.planned("decode").run(q, calls.cache), *words)


def test_several_rows_for_single_decode(calls):
    words = ("2 dimensions, [num_qo_heads, head_dim]", "single_prefill_with_kv_cache for several rows")
    refuse(ValueError, lambda: calls.decode(q=calls.q), *words)


def test_indptr_of_a_wrong_length(calls):
    why = "needs 2: the start of each request and the end of the last, so batch_size + 1"
    more = ints(0, 1, 2)
    for kind, name, told_by in (
        ("paged", "paged_kv_indptr", "qo_indptr"),
        ("ragged", "kv_indptr", "qo_indptr"),
        ("decode", "indptr", "last_page_len"),
    ):
        words = (f"{name} has 3 elements", why, f"{told_by} says batch_size=1")
        refuse(ValueError, lambda: calls.planned(kind, **{name: more}), *words)
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        refuse(ValueError, lambda: calls.fused(**{name: more}), f"{name} has 3 elements", why, "batch_size=1")
    last = ints(4, 4)
    refuse(
        ValueError,
        lambda: calls.planned("paged", paged_kv_last_page_len=last),
        "paged_kv_last_page_len has 2 elements",
        "needs 1: one per request",
    )


def test_lengths_in_place_of_an_indptr(calls):
    refuse(RuntimeError, lambda: calls.planned("ragged", qo_indptr=ints(5, 5)), "pass 0 and then their cumulative sum")


# --- dtypes and numbers ------------------------------------------------------------------------------------------


def test_the_output_dtype_has_the_name_of_its_keyword(calls):
    q, k, v = (x.to(E4M3) for x in calls.qkv)
    for call in (lambda: calls.single(q=q, k=k, v=v), lambda: calls.decode(q=q[0], k=k, v=v)):
        refuse(ValueError, call, "say the output's dtype, e.g. o_dtype=torch.bfloat16")
    for plan in (lambda: calls.planned("paged", q_data_type=E4M3), lambda: calls.cascade(q_data_type=E4M3)):
        refuse(ValueError, plan, "say the output's dtype, e.g. o_data_type=torch.bfloat16")
    refuse(ValueError, lambda: calls.planned("paged", o_data_type="int8"), "o_data_type=torch.int8")
    refuse(ValueError, lambda: calls.fused(out_dtype=torch.float32), "out_dtype=torch.float32 is not served")
    refuse(
        ValueError,
        lambda: calls.padded(q=q[:1], k_shared=k, v_shared=v, k_unique=k[None], v_unique=v[None]),
        "which this function does not serve",
    )


@pytest.mark.parametrize("value", ["16", 16.0], ids=repr)
def test_page_size_that_is_no_integer(calls, value):
    words = (f"page_size={value!r}", type(value).__name__, "pass an integer")
    for kind in ("paged", "decode"):
        refuse(TypeError, lambda: calls.planned(kind, page_size=value), *words)
    refuse(TypeError, lambda: ck.get_seq_lens(ints(0, 2), ints(4), value), *words)
    wrapper = ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(calls.target.workspace())
    refuse(TypeError, lambda: wrapper.begin_forward(ints(0, 5), *calls.pages.table(), *HEADS, value), *words)


def test_page_size_that_is_not_positive(calls):
    refuse(ValueError, lambda: calls.planned("paged", page_size=0), "page_size=0 must be positive")
    refuse(ValueError, lambda: ck.get_seq_lens(ints(0, 2), ints(4), -1), "page_size=-1 must be positive")


def test_page_size_of_numpy(calls):
    numpy = pytest.importorskip("numpy")
    want = calls.planned("paged").run(calls.q, calls.cache)
    assert torch.equal(calls.planned("paged", page_size=numpy.int64(PAGE)).run(calls.q, calls.cache), want)


@pytest.mark.parametrize("name", ["max_q_len", "max_kv_len", "batch_size"])
@pytest.mark.parametrize("value", ["5", 5.0], ids=repr)
def test_numbers_of_the_fused_prefill(calls, name, value):
    refuse(TypeError, lambda: calls.fused(**{name: value}), f"{name}={value!r}", "pass an integer")


def test_lengths_that_are_nonsense(calls):
    words = ("seq_lens='nonsense'", "str", "pass an int32 tensor or None")
    for kind in ("paged", "ragged", "decode"):
        refuse(TypeError, lambda: calls.planned(kind, seq_lens="nonsense"), *words)
    refuse(TypeError, lambda: calls.fused(seq_lens="nonsense"), *words)
    refuse(TypeError, lambda: ck.get_batch_indices_positions(ints(0, 5), "nonsense", 5), "seq_lens is str")
    for kind in ("paged", "ragged"):
        refuse(TypeError, lambda: calls.planned(kind, seq_lens_q="nonsense"), "seq_lens_q='nonsense'")


# --- appending ---------------------------------------------------------------------------------------------------


def test_append_outside_the_pages(calls):
    words = ("positions[1]=40", "the 2 pages of request 0 have room for 32 tokens", "add its new pages")
    refuse(ValueError, lambda: calls.append(positions=ints(3, 40)), *words)
    refuse(ValueError, lambda: calls.append(positions=ints(3, 32)), "positions[1]=32")
    refuse(ValueError, lambda: calls.append(batch_indices=ints(0, 7)), "batch_indices[1]=7", "only 1 requests")
    refuse(ValueError, lambda: calls.append(kv_indptr=ints(0, 9)), "kv_indptr ends at 9", "2 pages")
    calls.append(positions=ints(-1, 31), batch_indices=ints(5, 0))  # a token that is skipped may say anything


def test_append_writes_nothing_where_it_refuses(calls):
    cache = calls.cache.clone()
    refuse(ValueError, lambda: calls.append(paged_kv_cache=cache, positions=ints(3, 40)))
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


def test_explain_of_a_device_number_that_is_not_here():
    refuse(ValueError, lambda: ck.explain(device="cuda:77"), "device='cuda:77' is not here")


@pytest.mark.parametrize("value", [9.0, "9.0", "90", (9, 0)], ids=repr)
def test_explain_of_a_version(value):
    refuse(TypeError, lambda: ck.explain(compute_capability=value), "10 * major + minor", "e.g. 90 for 9.0")


def test_explain_of_a_major_version():
    refuse(ValueError, lambda: ck.explain(compute_capability=9), "compute_capability=9 is not 10 * major + minor")


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
    from cutlass_kernels._compute import selection

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


# --- what cannot be meant ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["0.125", b"1", True], ids=repr)
def test_scales_that_are_no_numbers(calls, value):
    words = f"sm_scale={value!r} is not a number"
    refuse(TypeError, lambda: calls.single(sm_scale=value), words)
    refuse(TypeError, lambda: calls.planned("paged", sm_scale=value), words)
    refuse(TypeError, lambda: ck.attention(*calls.qkv, sm_scale=value), words)
    refuse(TypeError, lambda: calls.planned("decode").run(calls.q[:1], calls.cache, v_scale=value), "is not a number")


@pytest.mark.parametrize("value", [2, "yes", None], ids=repr)
def test_return_lse_that_is_no_bool(calls, value):
    refuse(TypeError, lambda: ck.attention(*calls.qkv, return_lse=value), f"return_lse={value!r}")
    refuse(TypeError, lambda: calls.planned("paged").run(calls.q, calls.cache, return_lse=value), "return_lse")
    refuse(TypeError, lambda: calls.decode(return_lse=value), f"return_lse={value!r}")
    refuse(TypeError, lambda: calls.cascade().run(calls.q, calls.cache, return_lse=value), f"return_lse={value!r}")
    for name in ("return_attn_probs", "return_softmax_lse"):
        call = functools.partial(flash_attn_varlen_func, *calls.qkv, ints(0, 5), ints(0, 20), 5, 20)
        refuse(TypeError, lambda: call(**{name: value}), f"{name}={value!r}", "pass True or False")


@pytest.mark.parametrize("kind", ["paged", "ragged", "decode"])
@pytest.mark.parametrize("value", [-7, -2, 0], ids=repr)
def test_fixed_split_sizes_below_one(calls, kind, value):
    unit = "keys" if kind == "ragged" else "pages"
    words = (f"fixed_split_size={value} must be at least 1, the {unit}", "None or -1")
    refuse(ValueError, lambda: calls.planned(kind, fixed_split_size=value), *words)
    refuse(TypeError, lambda: calls.planned(kind, fixed_split_size=2.0), "fixed_split_size=2.0", "pass an integer")
    for none in (None, -1):
        calls.planned(kind, fixed_split_size=none)


def test_disable_split_kv_that_is_no_bool(calls):
    refuse(TypeError, lambda: calls.planned("paged", disable_split_kv="no"), "disable_split_kv='no'")


@pytest.mark.parametrize("value", [(1.9, -1), [1, 2.0], ("1", 2), torch.tensor([1.5, 2.0])], ids=str)
def test_windows_of_other_numbers(calls, value):
    refuse(TypeError, lambda: ck.attention(*calls.qkv, window=value), "window=", "pass an integer")
    call = functools.partial(flash_attn_func, *(x[None] for x in calls.qkv))
    refuse(TypeError, lambda: call(window_size=value), "window_size=", "pass an integer")


@pytest.mark.parametrize("value", [(3,), 3, torch.tensor(3)], ids=str)
def test_windows_that_are_no_pairs(calls, value):
    refuse(ValueError, lambda: ck.attention(*calls.qkv, window=value), "window=", "is not a pair")
    call = functools.partial(flash_attn_func, *(x[None] for x in calls.qkv))
    refuse(ValueError, lambda: call(window_size=value), "window_size=", "is not a pair")


def test_heads_before_rows_or_tokens(calls):
    q, kv = calls.q.new_zeros(2, 24, 5, 64), calls.q.new_zeros(2, 8, 16, 64)
    words = ("num_qo_heads=5", "num_kv_heads=16", "use q.transpose(1, 2)", "kv_layout='HND'")
    refuse(RuntimeError, lambda: ck.attention(q, kv, kv), *words)
    refuse(RuntimeError, lambda: ck.attention(q, kv, kv, kv_layout="HND"), "num_kv_heads=8", "use q.transpose(1, 2)")
    refuse(RuntimeError, lambda: ck.attention(q.transpose(1, 2), kv, kv), "num_kv_heads=16", "kv_layout='HND' fits")
    ck.attention(q.transpose(1, 2), kv, kv, kv_layout="HND")


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "q", "k"])
def test_lists_in_place_of_tensors(calls, name):
    given: dict[str, Any] = dict(q=calls.q, k=calls.k, v=calls.v, cu_seqlens_q=ints(0, 5), cu_seqlens_k=ints(0, 20))
    refuse((TypeError, ValueError), lambda: ck.attention(**given | {name: [0, 3]}), f"{name} is", "list")


CACHED = ("k", "qv", "rotary_cos", "cache_batch_idx", "cache_leftpad", "page_table", "cu_seqlens_q", "cache_seqlens")


@pytest.mark.parametrize("name", CACHED)
def test_lists_in_place_of_tensors_beside_a_cache(calls, name):
    cache = torch.zeros(1, 32, 2, 64).half()
    new = torch.zeros(1, 1, 2, 64).half()
    given: dict[str, Any] = dict(k=new, v=new, cache_seqlens=4) | {name: [0, 3]}
    refuse(TypeError, lambda: flash_attn_with_kvcache(calls.q[None], cache, cache, **given), name, "list")
    assert not cache.any()


@pytest.mark.parametrize("value", [4.5, torch.tensor([4.5])], ids=str)
def test_lengths_of_a_cache_that_are_no_integers(calls, value):
    cache = torch.zeros(1, 32, 2, 64).half()
    call = functools.partial(flash_attn_with_kvcache, calls.q[None], cache, cache, cache_leftpad=ints(0))
    refuse((TypeError, ValueError), lambda: call(cache_seqlens=value), "cache_seqlens")


def test_dropout_by_position(calls):
    q, k, v = (x[None] for x in calls.qkv)
    words = ("softmax_scale=0", "FlashAttention-3", "FlashAttention-2 has dropout_p")
    refuse(ValueError, lambda: flash_attn_func(q, k, v, 0.0, 0.125, True), *words)
    refuse(ValueError, lambda: flash_attn_qkvpacked_func(torch.zeros(1, 9, 3, 2, 64).half(), 0.0), *words)
    ends = (ints(0, 5), ints(0, 20), 5, 20)
    refuse(TypeError, lambda: flash_attn_varlen_func(*calls.qkv, *ends, 0.0), "seqused_q=0.0", *words[1:])


@pytest.mark.parametrize("heads", [12, 9, 5, 0, -2])
def test_query_heads_of_packed_tensors(heads):
    qkv = torch.zeros(1, 9, 12, 64).half()
    refuse(ValueError, lambda: flash_attn_qkvpacked_func(qkv, num_heads_q=heads), f"num_heads_q={heads}", "Hkv")
    refuse(TypeError, lambda: flash_attn_qkvpacked_func(qkv, num_heads_q=8.0), "num_heads_q=8.0", "pass an integer")


def test_an_unknown_keyword_names_the_callers_class(calls):
    words = "BatchDecodeWithPagedKVCacheWrapper.run() got an unexpected keyword argument 'causal'"
    refuse(TypeError, lambda: calls.planned("decode").run(calls.q[:1], calls.cache, causal=True), words)
    refuse(TypeError, lambda: calls.planned("decode").forward(calls.q[:1], calls.cache, causal=True), words)
    sink = ck.BatchAttentionWithAttentionSinkWrapper(calls.target.workspace())
    sink.plan(**dict(num_qo_heads=4, num_kv_heads=2) | calls.plans["paged"])
    words = words.replace("BatchDecodeWithPagedKVCache", "BatchAttentionWithAttentionSink")
    refuse(TypeError, lambda: sink.run(calls.q, calls.cache, causal=True), words)


def test_kernels_that_serve_the_types_but_not_the_tensors(monkeypatch):
    """As where an fp8 cache lies below too many rows: of which tensors, and what to do."""
    monkeypatch.setattr(selection, "select", lambda backend, request: backend)
    q, k, v = (torch.randn(5, heads, 64).half() for heads in (4, 2, 2))
    with pytest.raises(ck.BackendError) as caught:
        ck.attention(q, k, v, cu_seqlens_k=torch.tensor([0, 5], dtype=torch.int32), backend="fa3")
    for words in ("backend='fa3'", "(5, 4, 64) with strides (256, 64, 1)", "(5, 2, 64)", "use backend='auto'"):
        assert words.lower() in str(caught.value).lower()
