"""FlashInfer's plan-free functions over paged caches: every argument against the oracle, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from plan_free_problems import Mask, Options, expect
from problems import Batch, make_batch
from trtllm_problems import CONTEXT, DECODE, E4M3, EMPTY, XQA, cache_and_table, compare, decode_batch, scale_of


@pytest.mark.parametrize("function", [DECODE, XQA])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("form", ["stacked", "split"])
@pytest.mark.parametrize("rows", [1, 3])
def test_decode(target, function, layout, form, rows):
    batch = decode_batch(target, rows)
    arguments = cache_and_table(batch, layout, form)
    compare(batch, function(batch.q, *arguments, scale_of(batch), kv_layout=layout, q_len_per_req=rows))


@pytest.mark.parametrize("function,layout", [(DECODE, "HND"), (XQA, "NHD"), (CONTEXT, "HND")])
def test_default_layouts(target, function, layout):
    batch = decode_batch(target)
    arguments = cache_and_table(batch, layout)
    if function is CONTEXT:
        ones, offsets = batch.qo_indptr(batch.device), batch.kv_indptr(batch.device)
        out = function(batch.q, *arguments[:4], 1, 200, scale_of(batch), 1.0, 4, ones, offsets)
    else:
        out = function(batch.q, *arguments, scale_of(batch))
    compare(batch, out)


def context(batch: Batch, arguments: tuple[Any, ...], bmm1: Any = None, bmm2: Any = 1.0, **options: Any) -> Any:
    cache, workspace, table, lens, most = arguments
    return CONTEXT(
        batch.q,
        cache,
        workspace,
        table,
        lens,
        max(batch.qo_lens),
        most,
        scale_of(batch) if bmm1 is None else bmm1,
        bmm2,
        len(batch.qo_lens),
        batch.qo_indptr(batch.device),
        batch.kv_indptr(batch.device),
        **options,
    )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("form", ["stacked", "split"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 9])
def test_context(target, layout, form, causal, window):
    batch = make_batch([20, 1, 33, 0], [50, 70, 33, 5], 8, 2, 64, device=target.device)
    out = context(batch, cache_and_table(batch, layout, form), kv_layout=layout, causal=causal, window_left=window)
    compare(batch, out, Mask(causal=causal, window=(window, -1)))


def test_keys_that_are_values_too(target):
    batch = decode_batch(target)
    batch.v = batch.k
    cache, *more = cache_and_table(batch)
    compare(batch, DECODE(batch.q, cache[:, :1], *more, scale_of(batch)))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("window", [0, 5, 1000, None])
def test_windows(target, rows, window):
    batch = decode_batch(target, rows)
    given = dict(window_left=window, q_len_per_req=rows)
    mask = Mask(True, (-1 if window is None else window, -1))
    compare(batch, DECODE(batch.q, *cache_and_table(batch), scale_of(batch), **given), mask)
    compare(batch, XQA(batch.q, *cache_and_table(batch, "NHD"), scale_of(batch), **given), mask)


@pytest.mark.parametrize("as_list", [False, True])
def test_sinks_are_natural_logits_and_join_the_lse(target, as_list):
    batch = decode_batch(target)
    sinks = torch.randn(8, device=target.device) * 3
    given = [sinks] if as_list else sinks
    options = Options(sinks=sinks)
    out, lse = DECODE(batch.q, *cache_and_table(batch), scale_of(batch), sinks=given, return_lse=True)
    assert_lse_close(lse, compare(batch, out, options=options))
    compare(batch, XQA(batch.q, *cache_and_table(batch, "NHD"), scale_of(batch), sinks=given), options=options)
    compare(batch, context(batch, cache_and_table(batch), sinks=given), options=options)


@pytest.mark.parametrize("kind", ["number", "tensor", "number and tensor"])
def test_scales(target, kind):
    """bmm1_scale multiplies logits, bmm2_scale the output; tensors stay on the device."""
    batch = decode_batch(target)
    bmm1, bmm2 = 0.3, 1.7
    options = Options(descales=dict(q_descale=bmm1 * math.sqrt(64), v_descale=bmm2))
    given: list[Any] = [bmm1, bmm2]
    if kind != "number":
        given[1] = torch.tensor([bmm2], device=target.device)
    if kind == "tensor":
        given[0] = torch.tensor([bmm1], device=target.device)
    compare(batch, DECODE(batch.q, *cache_and_table(batch), *given), options=options)
    compare(batch, XQA(batch.q, *cache_and_table(batch, "NHD"), *given), options=options)
    compare(batch, context(batch, cache_and_table(batch), *given), options=options)


def test_a_scale_in_base_2_replaces_the_other(target):
    batch = decode_batch(target)
    scale = torch.tensor([scale_of(batch) / math.log(2.0)], device=target.device)
    compare(batch, DECODE(batch.q, *cache_and_table(batch), 99.0, bmm1_scale_log2=scale))


@pytest.mark.parametrize("kv_dtype", [E4M3, torch.float8_e5m2])
@pytest.mark.parametrize("rows", [1, 2])
def test_8_bit_caches(target, kv_dtype, rows):
    if target.backend == "fa3":
        pytest.skip("fa2 reads such caches")
    batch = decode_batch(target, rows, kv_dtype=kv_dtype)
    options = Options(descales=dict(k_descale=0.5, v_descale=2.0))
    out = DECODE(batch.q, *cache_and_table(batch), 0.5 * scale_of(batch), 2.0, q_len_per_req=rows)
    compare(batch, out, options=options)


@pytest.mark.parametrize("function", ["decode", "context"])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16, "float16", E4M3])
def test_8_bit_queries(target, function, wanted):
    if target.backend == "fa2":
        pytest.skip("fa3 computes with them")
    batch = make_batch([1] * 3, [90, 7, 200], 8, 2, 128, dtype=E4M3, device=target.device)
    cache = cache_and_table(batch)
    if function == "decode":
        out = DECODE(batch.q, *cache, scale_of(batch), out_dtype=wanted)
    else:
        out = context(batch, cache, out_dtype=wanted)
    want, _, _ = expect(batch, Mask(causal=True), Options())
    assert out.dtype == {None: E4M3, "float16": torch.float16}.get(wanted, wanted)
    assert_close(out.float(), want, atol=0.12, rtol=0.12)


@pytest.mark.parametrize("rows", [1, 3])
def test_out(target, rows):
    batch = decode_batch(target, rows)
    out = torch.full_like(batch.q, 7.0)
    assert DECODE(batch.q, *cache_and_table(batch), scale_of(batch), out=out, q_len_per_req=rows) is out
    compare(batch, out)
    for function in (XQA, DECODE):
        wide = torch.full((rows * 4, 8, 128), 7.0, dtype=batch.q.dtype, device=target.device)
        place = wide[..., :64]
        given = dict(out=place, q_len_per_req=rows, kv_layout="NHD")
        assert function(batch.q, *cache_and_table(batch, "NHD"), scale_of(batch), **given) is place
        compare(batch, place)
        assert bool((wide[..., 64:] == 7.0).all())


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize("given", ["out", "out_dtype"])
def test_other_output_dtypes_are_converted(target, o_dtype, given):
    batch = decode_batch(target)
    out = torch.empty(batch.q.shape, dtype=o_dtype, device=target.device)
    asked = dict(out=out) if given == "out" else dict(out_dtype=str(o_dtype).removeprefix("torch."))
    o_scale = 4.0 if o_dtype == E4M3 else 1.0
    found = DECODE(batch.q, *cache_and_table(batch), scale_of(batch), 0.25, o_scale=o_scale, **asked)
    assert found.dtype == o_dtype and (given == "out_dtype" or found is out)
    want, _, base = expect(batch, Mask(causal=True), Options(descales=dict(v_descale=0.25)))
    if o_dtype == E4M3:
        assert_close(found.float(), want, atol=0.02, rtol=0.07)
    else:
        assert_close(found, want, base.to(o_dtype), atol=1e-2)


@pytest.mark.parametrize("o_dtype", [E4M3, torch.float8_e5m2], ids=str)
def test_an_fp8_output_is_limited_to_its_largest_number(target, o_dtype):
    batch = decode_batch(target)
    found = DECODE(batch.q, *cache_and_table(batch), scale_of(batch), 1e5, out_dtype=o_dtype)
    assert float(found.float().abs().max()) == torch.finfo(o_dtype).max


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.float32, E4M3])
def test_rows_behind_the_last_request_are_not_written(target, o_dtype):
    batch = make_batch([4, 5], [30, 40], 8, 2, 64, device=target.device)
    q = torch.cat([batch.q, batch.q])
    out = torch.full_like(q, 7.0, dtype=torch.float32).to(o_dtype)
    lse = torch.full(q.shape[:2], 7.0, device=target.device)
    cache, workspace, table, lens, _ = cache_and_table(batch)
    offsets = batch.qo_indptr(target.device)
    CONTEXT(q, cache, workspace, table, lens, 5, 40, scale_of(batch), 1.0, 2, offsets, None, out=out, lse=lse)
    assert bool((out[9:].float() == 7.0).all()) and bool((lse[9:] == 7.0).all())
    assert not bool((out[:9].float() == 7.0).all(-1).any()) and not bool((lse[:9] == 7.0).any())


@pytest.mark.parametrize("rows", [1, 3])
def test_lse(target, rows):
    batch = decode_batch(target, rows)
    lse = torch.full(batch.q.shape[:2], 7.0, device=target.device)
    given = dict(q_len_per_req=rows, lse=lse)
    out = DECODE(batch.q, *cache_and_table(batch), scale_of(batch), **given)
    want = compare(batch, out)
    assert_lse_close(lse, want)
    out, returned = DECODE(batch.q, *cache_and_table(batch), scale_of(batch), return_lse=True, **given)
    assert returned is lse
    out, new = context(batch, cache_and_table(batch), return_lse=True)
    assert_lse_close(new, want)


def test_query_lengths_that_differ(target):
    batch = make_batch([1, 3, 0, 2], [90, 7, 50, 16], 8, 2, 64, device=target.device)
    offsets = batch.qo_indptr(target.device)
    given = dict(max_q_len=3, cum_seq_lens_q=offsets, q_len_per_req=None)
    compare(batch, DECODE(batch.q, *cache_and_table(batch), scale_of(batch), **given))
    compare(batch, DECODE(batch.q, *cache_and_table(batch), scale_of(batch), cum_seq_lens_q=offsets))
    cache = cache_and_table(batch, "NHD")
    compare(batch, XQA(batch.q, *cache, scale_of(batch), q_len_per_req=3, q_cu_seq_lens=offsets))
    compare(batch, XQA(batch.q, *cache, scale_of(batch), q_cu_seq_lens=offsets.view(torch.uint32)))


# --- masks of draft tokens ---


def test_lengths_and_tables_of_other_integers(target):
    batch = decode_batch(target)
    cache, workspace, table, lens, most = cache_and_table(batch)
    want = DECODE(batch.q, cache, workspace, table, lens, most, scale_of(batch))
    got = DECODE(batch.q, cache, workspace, table.view(torch.uint32), lens.view(torch.uint32), most, scale_of(batch))
    assert_bitwise(got, want)
    assert_bitwise(DECODE(batch.q, cache, workspace, table.long(), lens.long(), most, scale_of(batch)), want)


def test_arguments_without_effect(target):
    batch = decode_batch(target)
    arguments = (batch.q, *cache_and_table(batch), scale_of(batch))
    want = DECODE(*arguments)
    given = dict(enable_pdl=True, max_q_len=1, skip_softmax_threshold_scale_factor=1e3)
    given |= dict(multi_ctas_kv_counter_buffer=EMPTY, cp_world=1, cp_rank=0, o_scale=None)
    for backend in ("auto", "xqa", "trtllm-gen"):
        assert_bitwise(DECODE(*arguments, backend=backend, **given), want)


def test_strided_queries(target):
    batch = decode_batch(target, 2)
    batch.q = torch.cat([batch.q, batch.q], 1)[:, :8]
    compare(batch, DECODE(batch.q, *cache_and_table(batch), scale_of(batch), q_len_per_req=2))


def test_keys_and_values_side_by_side(target):
    batch = decode_batch(target)
    (k, v), *more = cache_and_table(batch, "NHD", "split")
    both = torch.cat([k, v], -1)
    pair = (both[..., :64], both[..., 64:])
    compare(batch, XQA(batch.q, pair, *more, scale_of(batch)))


@pytest.mark.runs_nothing("an empty batch")
def test_no_requests(target):
    batch = decode_batch(target)
    cache, workspace, table, lens, most = cache_and_table(batch)
    out, lse = DECODE(batch.q[:0], cache, workspace, table[:0], lens[:0], most, 1.0, q_len_per_req=2, return_lse=True)
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


@pytest.mark.parametrize("place", [False, True])
def test_gradients_are_refused_not_dropped(target, place):
    batch = decode_batch(target)
    q = batch.q.clone().requires_grad_()
    out = torch.empty_like(batch.q) if place else None
    found = DECODE(q, *cache_and_table(batch), scale_of(batch), out=out)
    with pytest.raises(RuntimeError, match="forward only"):
        found.sum().backward()


REFUSED = [
    ("o_sf_scale=0.5", dict(o_sf_scale=0.5)),
    ("o_sf_vec_size=16", dict(o_sf_vec_size=16)),
    ("out_dtype='nvfp4'", dict(out_dtype="nvfp4")),
    ("kv_cache_sf=", dict(kv_cache_sf=(EMPTY, EMPTY))),
    ("uses_shared_paged_kv_idx=False", dict(uses_shared_paged_kv_idx=False)),
    ("enable_block_sparse_attention=True", dict(enable_block_sparse_attention=True)),
    ("cp_world=2", dict(cp_world=2)),
    ("cp_rank=1", dict(cp_rank=1)),
    ("causal_seqlens_kv_global=a tensor", dict(causal_seqlens_kv_global=EMPTY)),
    ("bf16q_fp8kv_transform_mode='k_only'", dict(bf16q_fp8kv_transform_mode="k_only")),
    ("request_order=a tensor", dict(request_order=EMPTY)),
    ("request_order_plan=3", dict(request_order_plan=3)),
    ("backend='cake'", dict(backend="cake")),
]


def small(**more: Any) -> dict[str, Any]:
    return (
        dict(
            query=torch.zeros(2, 8, 64).half(),
            kv_cache=torch.zeros(6, 2, 2, 16, 64).half(),
            workspace_buffer=EMPTY,
            block_tables=torch.zeros(2, 3).int(),
            seq_lens=torch.ones(2).int(),
            max_seq_len=48,
        )
        | more
    )


@pytest.mark.parametrize("message,change", REFUSED, ids=[x[0] for x in REFUSED])
def test_what_is_for_other_gpus_is_refused(message, change):
    with pytest.raises(NotImplementedError, match=message):
        DECODE(**small(**change))


def small_context(**more: Any) -> dict[str, Any]:
    given = small(max_q_len=1, max_kv_len=48, bmm1_scale=1.0, bmm2_scale=1.0, batch_size=2)
    del given["max_seq_len"]
    offsets = torch.arange(3, dtype=torch.int32)
    return given | dict(cum_seq_lens_q=offsets, cum_seq_lens_kv=offsets) | more


@pytest.mark.parametrize(
    "change", [dict(use_fp16_softmax=True), dict(uses_spcompress=True), *[x[1] for x in REFUSED[:5]]]
)
def test_what_context_refuses(change):
    with pytest.raises(NotImplementedError, match=f"does not serve {next(iter(change))}="):
        CONTEXT(**small_context(**change))


def test_xqa_refuses_4_bit_caches():
    with pytest.raises(NotImplementedError, match=r"kv_cache_sf=a tensor .* Blackwell"):
        XQA(**small(kv_cache_sf=EMPTY))


WRONG = [
    ("backend='fa9' is unknown: use one of auto, trtllm-gen, xqa", dict(backend="fa9")),
    ("block_tables is \\(3, 3\\)", dict(block_tables=torch.zeros(3, 3).int())),
    ("block_tables is \\(2, 2, 3\\)", dict(block_tables=torch.zeros(2, 2, 3).int())),
    ("seq_lens is \\(3,\\)", dict(seq_lens=torch.zeros(3).int())),
    ("seq_lens is list", dict(seq_lens=[1, 1])),
    ("q_len_per_req=3, but query has 2 rows", dict(q_len_per_req=3)),
    ("q_len_per_req=0", dict(q_len_per_req=0)),
    ("q_len_per_req=None", dict(q_len_per_req=None)),
    ("query has shape", dict(query=torch.zeros(2, 1, 8, 64).half())),
    ("query is list", dict(query=[1])),
    ("kv_cache has shape", dict(kv_cache=torch.zeros(6, 3, 2, 16, 64).half())),
    ("kv_cache is int", dict(kv_cache=3)),
    ("head_dim 64 and k 32", dict(kv_cache=torch.zeros(6, 2, 2, 16, 32).half())),
    ("must be the same|the dtype of q", dict(kv_cache=torch.zeros(6, 2, 2, 16, 64))),
    ("4-bit", dict(kv_cache=torch.zeros(6, 2, 2, 16, 64).byte())),
    ("KeyError|kv_layout", dict(kv_layout="DHN")),
    ("sinks has shape", dict(sinks=torch.zeros(3))),
    (
        "out has dtype torch.float16, but out_dtype=torch.bfloat16",
        dict(out=torch.zeros(2, 8, 64).half(), out_dtype=torch.bfloat16),
    ),
    ("out has shape", dict(out=torch.zeros(2, 8, 32).half())),
    ("out has shape", dict(out=torch.zeros(2, 8, 32))),
    ("out is int", dict(out=3)),
    ("lse has shape", dict(lse=torch.zeros(8, 2))),
    ("o_scale=2.0 is for fp8 outputs", dict(o_scale=2.0)),
    ("skip_softmax_threshold_scale_factor=-1.0 is negative", dict(skip_softmax_threshold_scale_factor=-1)),
    ("bmm1_scale has shape", dict(bmm1_scale=torch.ones(3))),
    ("bmm2_scale has shape", dict(bmm2_scale=torch.ones(0))),
    ("max_seq_len", dict(max_seq_len="48")),
    ("mask is", dict(mask=torch.ones(2, 1, 1))),
    (
        "8 bits per row, but requests have up to 9",
        dict(query=torch.zeros(18, 8, 64).half(), q_len_per_req=9, mask=torch.zeros(2, 9, 1).byte()),
    ),
]


@pytest.mark.parametrize("message,change", WRONG, ids=[f"{i}-{x[0][:20]}" for i, x in enumerate(WRONG)])
def test_what_makes_no_sense_is_refused_in_a_sentence(message, change):
    with pytest.raises((ValueError, TypeError, RuntimeError, KeyError), match=message):
        DECODE(**small(**change))


def test_offsets_of_another_batch_are_refused():
    with pytest.raises(ValueError, match="cum_seq_lens_q has 3 elements, but batch_size=3"):
        CONTEXT(**small_context(batch_size=3))
    with pytest.raises(ValueError, match="seq_lens is"):
        CONTEXT(**small_context(seq_lens=torch.ones(1).int()))
    with pytest.raises(ValueError, match="backend='xqa' is unknown: use one of auto, trtllm-gen"):
        CONTEXT(**small_context(backend="xqa"))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("with_out", [False, True])
def test_compiled(target, rows, with_out):
    batch = decode_batch(target, rows)
    cache, workspace, table, lens, most = cache_and_table(batch)
    scale = torch.tensor([0.3], device=target.device)

    def call(q, cache, table, lens, scale, out):
        given = dict(out=out, q_len_per_req=rows, return_lse=True)
        return DECODE(q, cache, workspace, table, lens, most, scale, 0.5, **given)

    want = call(batch.q, cache, table, lens, scale, None)
    out = torch.empty_like(batch.q) if with_out else None
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    found = compiled(batch.q, cache, table, lens, scale, out)
    for a, b in zip(found, want):
        assert_bitwise(a, b)
