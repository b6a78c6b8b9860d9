"""FlashMLA's functions of sparse attention: names, and the conventions that FlashMLA writes down."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import sys
from typing import Any

import mla_problems
import pytest
import torch
from captures import capture
from compare import assert_bitwise
from guards import poison_
from mla_problems import DEVICES, SCALE
from pairs import every
from refusals import Row, rows
from selected_problems import Selected, make

import cutlass_kernels as ck
from cutlass_kernels import flash_mla, mla
from cutlass_kernels._attend import plan_free
from cutlass_kernels._core import call_table

INT32, U8, E4M3 = torch.int32, torch.uint8, torch.float8_e4m3fn
SINKS = torch.tensor([0.5, -30.0, 4.0, math.inf, -math.inf, 0.0, 1e4, -2.0])


def as_flash_mla(problem: Selected, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Output, largest logits and LSE, in double precision and FlashMLA's words: an index that is not valid is -1, the
    sink scales the output by ``exp(lse) / (exp(lse) + exp(sink))``, and a query without keys has 0, -inf and +inf."""
    kv = problem.cache.flatten(0, 1)[:, 0].double()
    indices, topk = problem.indices[:, 0].long(), problem.indices.size(2)
    invalid = (indices < 0) | (indices >= kv.size(0))
    if problem.lengths is not None:
        invalid |= torch.arange(topk, device=kv.device) >= problem.lengths[:, None]
    keys = kv[indices.masked_fill(invalid, 0)].masked_fill(invalid[..., None], 0.0)  # [rows, topk, 576]
    logits = torch.einsum("rhd,rkd->rhk", problem.q.double(), keys) * SCALE
    logits = logits.masked_fill(invalid[:, None], -math.inf)
    lse, largest = logits.logsumexp(-1), logits.amax(-1)
    lonely = lse == -math.inf
    weights = (logits - lse[..., None]).exp().masked_fill(lonely[..., None], 0.0)
    out = weights @ keys[..., :512]
    if sinks is not None:
        out = out / (1 + (sinks.double() - lse).exp().nan_to_num(0.0, posinf=math.inf))[..., None]
    return out.masked_fill(lonely[..., None], 0.0), largest, lse.masked_fill(lonely, math.inf)


def close(found: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    out, *others = found
    torch.testing.assert_close(out.double(), want[0], atol=1e-2, rtol=1e-2)
    for x, y in zip(others, want[1:], strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, atol=1e-3, rtol=1e-5)


def decode(problem: Selected, batch: int, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """flash_mla_with_kvcache(indices=) of so many requests."""
    q, indices = (x.unflatten(0, (batch, -1)) for x in (problem.q, problem.indices[:, 0]))
    lengths = None if problem.lengths is None else problem.lengths.unflatten(0, (batch, -1))[:, 0]
    call: dict[str, Any] = dict(softmax_scale=SCALE, indices=indices, topk_length=lengths)
    return flash_mla.flash_mla_with_kvcache(q, problem.cache, None, None, 512, **(call | given))


def prefill(problem: Selected, **given: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash_mla_sparse_fwd() over the slots of the cache."""
    call: dict[str, Any] = dict(sm_scale=SCALE, topk_length=problem.lengths)
    return flash_mla.flash_mla_sparse_fwd(problem.q, problem.cache.flatten(0, 1), problem.indices, **(call | given))


@DEVICES
@every(sinks=[False, True], lengths=[None, "random"], width=[1, 64, 100])
def test_prefill(device, sinks, lengths, width):
    problem = make(14, 8, width, device, lengths=lengths)
    given = SINKS.to(device) if sinks else None
    out, max_logits, lse = prefill(problem, attn_sink=given)
    assert out.shape == (14, 8, 512) and max_logits.shape == lse.shape == (14, 8)
    close((out, max_logits, lse), as_flash_mla(problem, given))


@DEVICES
@every(sinks=[False, True], rows=[1, 2], page_size=[1, 16, 64])
def test_decode(device, sinks, rows, page_size):
    each = [n for n in (0, 80, 17, 1, 64, 80, 33) for _ in range(rows)]
    problem = make(7 * rows, 8, 80, device, lengths=each, page_size=page_size, gap=page_size % 2)
    given = SINKS.to(device) if sinks else None
    out, lse = decode(problem, 7, attn_sink=given)
    assert out.shape == (7, rows, 8, 512) and lse.shape == (7, 8, rows)
    want, _, want_lse = as_flash_mla(problem, given)
    close((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), (want, want_lse))
    assert bool((lse[0] == math.inf).all()) and not out[0].any()


@DEVICES
def test_sinks_change_outputs_alone(device):
    problem = make(7, 8, 60, device)
    (plain, *same), (out, *others) = prefill(problem), prefill(problem, attn_sink=SINKS.to(device))
    for x, y in zip(others, same):
        assert_bitwise(x, y)
    assert not out[:, 3].any()  # inf
    torch.testing.assert_close(out[:, 4], plain[:, 4])  # -inf


@DEVICES
def test_both_functions_are_attention(device):
    problem = make(6, 16, 50, device, lengths="random")
    want, lse = ck.attention(**problem.arguments(), sm_scale=SCALE, return_lse=True, lse_base=math.e)
    out, _, natural = prefill(problem)
    assert_bitwise(out, want)
    assert_bitwise(natural, torch.where(lse == -math.inf, math.inf, lse))
    place = poison_(torch.empty_like(out))
    assert prefill(problem, out=place)[0] is place
    assert_bitwise(place, out)
    problem.lengths = None
    assert_bitwise(decode(problem, 3)[0].flatten(0, 1), prefill(problem)[0])


@DEVICES
@every(bytes_=[None, torch.uint8, torch.int8], queries=[torch.bfloat16, E4M3])
def test_caches_of_e4m3(device, bytes_, queries):
    problem = make(4, 8, 70, device, kv_dtype=E4M3)
    problem.q = problem.q.to(queries)
    cache = problem.cache.view(bytes_) if bytes_ else problem.cache
    given = dataclasses.replace(problem, cache=cache)
    one, half = torch.ones(1, device=device), torch.full((1,), 0.5, device=device)
    out, lse = decode(given, 2, is_fp8_kvcache=True, descale_q=one, descale_k=half)
    wide = (problem.cache.float() * 0.5).to(torch.bfloat16)
    known = dataclasses.replace(problem, q=problem.q.to(torch.bfloat16), cache=wide)
    want, _, want_lse = as_flash_mla(known)
    assert out.dtype == torch.bfloat16
    close((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), (want, want_lse))


def test_what_dense_calls_need_is_not_read():
    problem = make(4, 8, 70)
    q, indices = problem.q.unflatten(0, (2, 2)), problem.indices.view(2, 2, 70)
    given = (torch.full((2, 1), 99, dtype=INT32), torch.tensor([500, 7], dtype=INT32), 512)
    metadata = flash_mla.get_mla_metadata(given[1], 16, 1, 8, False, 70)
    out, lse = flash_mla.flash_mla_with_kvcache(q, problem.cache, *given, *metadata, SCALE, False, False, indices)
    for x, y in zip((out, lse), decode(problem, 2)):
        assert_bitwise(x, y)


@DEVICES
def test_keys_that_are_values(device):
    """K = V of 512 columns, as GLM-5.3-Flash and DeepSeek V4 have them."""
    problem = make(5, 6, 40, device, dims=(512, 512))
    out, max_logits, _ = prefill(problem, sm_scale=0.1)
    want, _ = problem.expected(sm_scale=0.1)
    torch.testing.assert_close(out.double(), want.out, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(max_logits.double(), want.largest, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
def test_layers_share_a_schedule_and_graphs_follow():
    sizes = dict(device="cuda:0", pages=60, page_size=64, lists=["any"])
    first, second = (make(32, 64, 512, seed=seed, **sizes) for seed in (1, 2))
    metadata, _ = flash_mla.get_mla_metadata()
    graph, results = capture(lambda: [decode(first, 16, tile_scheduler_metadata=metadata) for _ in range(2)])
    for problem in (second, first):
        first.indices.copy_(problem.indices.clone())
        first.cache.copy_(problem.cache.clone())
        first.q.copy_(problem.q.clone())
        for result in results:
            for x in result:
                poison_(x)
        graph.replay()
        want, _, want_lse = as_flash_mla(first)
        for out, lse in results:
            close((out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)), (want, want_lse))


# --- dense calls ---

CACHES = {"fp16": torch.float16, "bf16": torch.bfloat16, "e4m3": E4M3}
LENGTHS: dict[str, list[int]] = {"none": [0], "short": [0, 64, 2], "split": [5000, 0, 3]}


def pages(kv_dtype: torch.dtype, lens: list[int], rows: int, heads: int, device: str) -> dict[str, Any]:
    """Arguments of attention(). Tables have room for 5000 keys, which are split, or for 64."""
    room = [64 if 64 in lens else 5000] * len(lens)
    dtype = torch.float16 if kv_dtype == torch.float16 else torch.bfloat16
    problem = mla_problems.make([rows] * len(lens), room, heads, 64, device, dtype)
    cache = problem.cache.nan_to_num().to(kv_dtype).unsqueeze(2)
    given: dict[str, Any] = dict(q=problem.q.unflatten(0, (-1, rows)), k=cache, v=cache[..., :512], causal=True)
    given |= dict(page_table=problem.table, seqused_k=torch.tensor(lens, dtype=INT32, device=device))
    return given | dict(sm_scale=SCALE, return_lse=True, lse_base=math.e)


def check_rows_without_keys(found: tuple[torch.Tensor, torch.Tensor], given: dict[str, Any], want: Any) -> None:
    """All but their LSE is what attention() gives."""
    (out, lse), (want_out, want_lse) = found, want
    positions = given["seqused_k"][:, None] + torch.arange(out.size(1), device=out.device) - out.size(1)
    empty = positions < 0 if given["causal"] else (given["seqused_k"] == 0)[:, None].expand_as(positions)
    assert bool(empty.any()) and not out[empty].any() and bool((lse[empty] == math.inf).all())
    assert_bitwise(out, want_out)
    assert_bitwise(lse[~empty], want_lse[~empty])
    assert bool((want_lse[empty] == -math.inf).all())


@DEVICES
@every(kv_dtype=CACHES, lens=LENGTHS, heads=[8, 128], rows=[1, 4], causal=[False, True], schedule=[False, True])
def test_dense_rows_without_keys(device, kv_dtype, lens, heads, rows, causal, schedule):
    given = pages(kv_dtype, lens, rows, heads, device) | dict(causal=causal)
    want = ck.attention(**given)
    metadata = flash_mla.get_mla_metadata()[0] if schedule else None
    for _ in range(2):  # layers
        out, lse = flash_mla.flash_mla_with_kvcache(
            given["q"], given["k"], given["page_table"], given["seqused_k"], 512, metadata, None, SCALE, causal
        )
        check_rows_without_keys((out, lse.transpose(1, 2)), given, want)


@mla_problems.PLACES
@every(kv_dtype=CACHES, lens=LENGTHS, heads=[8, 64], rows=[1, 40], num_splits=[1, 5], sinks=[False, True])
def test_dense_rows_without_keys_of_each_backend(place, kv_dtype, lens, heads, rows, num_splits, sinks):
    device, backend = place
    if backend == "fa3" and kv_dtype == E4M3:
        pytest.skip("fa3 has no kernel for latent caches of e4m3: fa2 reads them")
    given = pages(kv_dtype, lens, rows, heads, device) | dict(num_splits=num_splits, backend=backend)
    (_, want_lse), some = ck.attention(**given), SINKS.clamp(-30, 30).repeat(heads // 8).to(device)
    given["sinks"] = some if sinks else None
    call = call_table.Call(**given, flash_mla_lse=True)
    found = plan_free.attend(tuple(call))
    want = ck.attention(**given)[0]
    check_rows_without_keys(found, given, (want, want_lse))


@DEVICES
def test_dense_rows_without_keys_of_512_columns(device):
    """Kernels for other head dimensions do not write FlashMLA's LSE."""
    given = pages(torch.bfloat16, LENGTHS["split"], 2, 8, device)
    given["q"], given["k"] = (given[name][..., :512].contiguous() for name in "qk")
    given["v"] = given["k"]
    want = ck.attention(**given)
    options = None, None, SCALE, True
    out, lse = flash_mla.flash_mla_with_kvcache(
        given["q"], given["k"], given["page_table"], given["seqused_k"], 512, *options
    )
    check_rows_without_keys((out, lse.transpose(1, 2)), given, want)


# --- names and refusals ---


def test_names_and_positions():
    parameters = inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters
    positional = [name for name, x in parameters.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"]
    assert parameters["d_v"].default == 512
    for name in flash_mla.__all__:
        assert getattr(flash_mla, name) is getattr(mla, name)


def test_the_module_stands_in_for_flash_mla(monkeypatch):
    for name in ("flash_mla", "flash_mla.flash_mla_interface"):
        monkeypatch.setitem(sys.modules, name, flash_mla)
    found = importlib.import_module("flash_mla.flash_mla_interface")
    problem = make(3, 4, 20)
    for x, y in zip(
        found.flash_mla_sparse_fwd(problem.q, problem.cache.flatten(0, 1), problem.indices, SCALE), prefill(problem)
    ):
        assert_bitwise(x, y)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


IS_INT32 = r"indices has shape .*: it must be an int32 tensor \[4, 1, K\]"
PREFILL: list[Row] = [
    *rows(ValueError, "{name} has shape", q=zeros(1, 4, 8, 576), kv=zeros(9, 576), indices=torch.zeros(4, 5)),
    *rows(ValueError, IS_INT32, indices=torch.zeros(4, 1, 5)),
    *rows(ValueError, IS_INT32, indices=torch.zeros(3, 1, 5, dtype=INT32)),
    *rows(ValueError, "{name}={value}, but kv has 576 columns", d_v=640),
    *rows(TypeError, "sm_scale='x'", sm_scale="x"),
    *rows(TypeError, "{name} is NoneType", q=None, kv=None, indices=None),
    *rows(ValueError, "q has head_dim 576 and kv 512", kv=zeros(9, 1, 512)),
    *rows(
        ValueError, r"topk_length\[1\]=6 must lie between 0 and 5", topk_length=torch.tensor([1, 6, 1, 1], dtype=INT32)
    ),
]


@pytest.mark.parametrize(("change", "error", "words"), PREFILL)
def test_prefill_refuses_in_a_sentence(change, error, words):
    given: dict[str, Any] = dict(q=zeros(4, 8, 576), kv=zeros(9, 1, 576), indices=torch.zeros(4, 1, 5, dtype=INT32))
    with pytest.raises(error, match=words):
        flash_mla.flash_mla_sparse_fwd(**{**given, "sm_scale": 0.1, **change})


OF_REQUESTS = r"{name} has shape .*: it must be an int32 tensor \[2, 1, topk\], as q has 2 requests of 1 rows"
DECODE: list[Row] = [
    *rows(ValueError, "causal=True is given with indices", causal=True),
    *rows(ValueError, OF_REQUESTS, indices=torch.zeros(2, 1, 5)),
    *rows(ValueError, OF_REQUESTS, indices=torch.zeros(2, 2, 5, dtype=INT32)),
    *rows(ValueError, "{name} has shape", indices=torch.zeros(2, 5, dtype=INT32)),
    *rows(ValueError, r"{name} has shape \(3,\)", topk_length=torch.zeros(3, dtype=INT32)),
    *rows(ValueError, r"{name}\[0\]=-1 must lie between 0 and 5", topk_length=torch.tensor([-1, 0], dtype=INT32)),
    *rows(ValueError, r"{name} has shape \(7,\)", attn_sink=torch.zeros(7)),
    *rows(NotImplementedError, "288 bytes per token, a format", k_cache=torch.zeros(9, 64, 1, 288, dtype=U8)),
    *rows(NotImplementedError, "352 bytes per token, a format", k_cache=torch.zeros(9, 64, 1, 352).to(E4M3)),
    *rows(ValueError, "{name} has dtype torch.int8 and shape", k_cache=torch.zeros(9, 64, 1, 600, dtype=torch.int8)),
    *rows(ValueError, "{name} has dtype torch.uint8 .* 656, 584 or 528", k_cache=torch.zeros(9, 64, 1, 640, dtype=U8)),
    (
        dict(q=zeros(2, 1, 8, 512), k_cache=torch.zeros(9, 64, 1, 528, dtype=U8)),
        ValueError,
        "k_cache has 528 bytes .* pass kv_format='v3.2_nope' or 'v4.1_pages' or 'v4.1_tokens'",
    ),
    *rows(ValueError, "{name}='v4.1' is unknown: use one of 'v3.2', ", kv_format="v4.1"),
    *rows(ValueError, "{name}=.* is unknown", kv_format=["V4"]),
    *rows(ValueError, "k_cache has dtype torch.bfloat16 .* kv_format='v4' is uint8 with 584", kv_format="V4"),
    (
        dict(k_cache=torch.zeros(9, 16, 1, 656, dtype=U8), kv_format="v4"),
        ValueError,
        "k_cache has dtype torch.uint8 .* kv_format='v4' is uint8 with 584",
    ),
    *rows(ValueError, "is_fp8_kvcache=True, but k_cache has dtype torch.bfloat16", is_fp8_kvcache=True),
    (
        dict(
            q=zeros(2, 1, 8, 512).to(E4M3),
            k_cache=torch.zeros(9, 16, 1, 584, dtype=U8),
            extra_k_cache=zeros(9, 16, 1, 512).to(E4M3),
            extra_indices_in_kvcache=torch.zeros(2, 1, 5, dtype=INT32),
            descale_k=0.5,
        ),
        ValueError,
        "descale_k=0.5 is given, but one of k_cache and extra_k_cache is a quantized latent cache",
    ),
    (
        dict(
            q=zeros(2, 1, 8, 512),
            k_cache=zeros(9, 16, 1, 512).to(E4M3),
            extra_k_cache=torch.zeros(9, 16, 1, 584, dtype=U8),
            extra_indices_in_kvcache=torch.zeros(2, 1, 5, dtype=INT32),
            descale_k=torch.ones(1),
        ),
        ValueError,
        "descale_k=.* is given, but one of k_cache and extra_k_cache is a quantized latent cache",
    ),
    (
        dict(k_cache=torch.zeros(9, 16, 1, 656, dtype=U8), head_dim_v=256),
        ValueError,
        "head_dim_v=256, but values of a quantized latent cache have 512",
    ),
    *rows(ValueError, "{name} is given without extra_indices_in_kvcache", extra_k_cache=zeros(9, 16, 1, 576)),
    (
        dict(extra_k_cache=zeros(9, 16, 1, 576), extra_indices_in_kvcache=torch.zeros(2, 1, 5)),
        ValueError,
        r"extra_indices_in_kvcache has shape .*int32 tensor \[2, 1, topk\]",
    ),
    *rows(ValueError, "{name} is given without extra_k_cache", extra_topk_length=torch.zeros(2, dtype=INT32)),
]


@pytest.mark.parametrize(("change", "error", "words"), DECODE)
def test_decode_refuses_in_a_sentence(change, error, words):
    given: dict[str, Any] = dict(q=zeros(2, 1, 8, 576), k_cache=zeros(9, 16, 1, 576), block_table=None)
    given |= dict(cache_seqlens=None, head_dim_v=512, indices=torch.zeros(2, 1, 5, dtype=INT32))
    with pytest.raises(error, match=words):
        flash_mla.flash_mla_with_kvcache(**{**given, **change})
