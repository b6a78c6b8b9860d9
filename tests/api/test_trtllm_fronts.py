"""FlashInfer's plan-free functions over paged caches: what attention() gives of the same arguments by its own names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from compare import assert_bitwise, assert_close
from plan_free_problems import Mask, Options, expect, page_table, queries
from problems import make_batch
from refusals import rows

import cutlass_kernels as ck

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DECODE, CONTEXT = ck.trtllm_batch_decode_with_kv_cache, ck.trtllm_batch_context_with_kv_cache
XQA = ck.xqa_batch_decode_with_kv_cache
LAYOUT = {DECODE: "HND", XQA: "NHD", CONTEXT: "HND"}  # unless told
OFFSETS = {DECODE: "cum_seq_lens_q", XQA: "q_cu_seq_lens"}
FUNCTIONS = pytest.mark.parametrize("function", LAYOUT, ids=lambda x: x.__name__)
EMPTY = torch.empty(0, dtype=torch.uint8)
SINKS = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 8.0])


class Requests:
    """Requests over pages: a call of a function on them, and that of attention() with the same arguments."""

    def __init__(self, target, qo_lens, kv_lens=(90, 7, 200, 16), layout="HND", form="stacked", dim=64, **sizes):
        self.batch = make_batch(qo_lens, kv_lens, 8, 2, dim, device=target.device, **sizes)
        self.target, self.layout, self.q, self.rows = target, layout, self.batch.q, max(qo_lens)
        paged = self.batch.paged(16, layout, form=form)
        self.cache, self.k, self.v = paged.cache, paged.k_cache, paged.v_cache
        self.table = page_table(paged, len(kv_lens)).to(target.device)
        self.lens = torch.tensor(kv_lens, dtype=torch.int32, device=target.device)
        self.most, self.scale = max(kv_lens), dim**-0.5
        self.offsets = self.batch.qo_indptr(target.device)

    def call(self, function: Any, bmm1: Any = None, bmm2: Any = 1.0, **options: Any) -> Any:
        tensors = (self.q, self.cache, EMPTY.to(self.target.device), self.table, self.lens)
        scales = (self.scale if bmm1 is None else bmm1, bmm2)
        if self.layout != LAYOUT[function]:
            options["kv_layout"] = self.layout
        if function is CONTEXT:
            offsets = self.offsets, self.batch.kv_indptr(self.target.device)
            return CONTEXT(*tensors, self.rows, self.most, *scales, len(self.lens), *offsets, **options)
        if OFFSETS[function] not in options:
            options = dict(q_len_per_req=self.rows) | options
        return function(*tensors, self.most, *scales, **options)

    def attention(self, dense: bool, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE ``[rows, ...]``."""
        q, whose = queries(self.batch, dense)
        given = dict(page_table=self.table, seqused_k=self.lens, max_seqlen_k=self.most, kv_layout=self.layout)
        given |= dict(causal=True, sm_scale=self.scale, return_lse=True) | whose | options
        out, lse = ck.attention(q, self.k, self.v, backend=self.target.backend, **given)
        return out.flatten(0, -3), lse.flatten(0, -2)

    def same(self, function: Any, given: dict[str, Any], wanted: dict[str, Any], dtype: Any = None) -> torch.Tensor:
        """The same bits as attention(), which computes in the dtype of queries; in ``dtype``. Returns its LSE."""
        dense = function is not CONTEXT and OFFSETS[function] not in given
        want, lse = self.attention(dense, **wanted)
        out = self.call(function, **given)
        if "return_lse" in given:
            assert_bitwise(out[1], lse, "lse")
            out = out[0]
        assert_bitwise(out, want if dtype is None else want.to(dtype))
        assert given.get("out") is None or out is given["out"]
        return lse

    def compare(self, out: torch.Tensor, mask: Mask) -> None:
        want, _, base = expect(self.batch, mask, Options())
        assert_close(out, want, base.to(out.dtype))


def decode(target, rows: int = 1, **sizes: Any) -> Requests:
    return Requests(target, [rows] * 4, **sizes)


# Arguments, and those of attention(), on a device.
CASES: dict[str, Any] = {
    "nothing": lambda _: ({}, {}),
    "no window": lambda _: (dict(window_left=None), {}),
    **{f"window {x}": lambda _, x=x: (dict(window_left=x), dict(window=(x, -1))) for x in (0, 5, 1000)},
    "sinks": lambda at: (dict(sinks=at(SINKS)), dict(sinks=at(SINKS))),
    "a list of sinks": lambda at: (dict(sinks=[at(SINKS)]), dict(sinks=at(SINKS))),
    "numbers": lambda _: (dict(bmm1=0.3, bmm2=1.7), dict(sm_scale=0.3, v_descale=1.7)),
    "a number and a tensor": lambda at: (dict(bmm1=0.3, bmm2=at(1.7)), dict(sm_scale=0.3, v_descale=at(1.7))),
    "tensors": lambda at: (
        dict(bmm1=at(0.3), bmm2=at(1.7)),
        dict(sm_scale=1.0, q_descale=at(0.3), v_descale=at(1.7)),
    ),
}


@pytest.mark.pairwise
@FUNCTIONS
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("form", ["stacked", "split"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_arguments(target, function, layout, form, rows, case):
    at = lambda x: torch.as_tensor([x] if isinstance(x, float) else x).to(target.device)  # noqa: E731
    given, wanted = CASES[case](at)
    decode(target, rows, layout=layout, form=form).same(
        function, given | ({} if function is XQA else dict(return_lse=True)), wanted
    )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("form", ["stacked", "split"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [-1, 9])
def test_context(target, layout, form, causal, window):
    requests = Requests(target, [20, 1, 33, 0], [50, 70, 33, 5], layout, form)
    requests.same(CONTEXT, dict(causal=causal, window_left=window), dict(causal=causal, window=(window, -1)))


def test_query_lengths_that_differ(target):
    requests = Requests(target, [1, 3, 0, 2], [90, 7, 50, 16])
    offsets, every = requests.offsets, dict(max_seqlen_q=6)
    requests.same(DECODE, dict(max_q_len=3, cum_seq_lens_q=offsets, q_len_per_req=None), {})
    requests.same(DECODE, dict(cum_seq_lens_q=offsets), every)
    requests.same(XQA, dict(q_len_per_req=3, q_cu_seq_lens=offsets), {})
    requests.same(XQA, dict(q_cu_seq_lens=offsets.view(torch.uint32)), every)


def test_other_forms_of_tensors(target):
    requests = decode(target)
    integers = requests.table, requests.lens
    for change in (lambda x: x.view(torch.uint32), lambda x: x.long()):
        want, _ = requests.attention(True)
        requests.table, requests.lens = (change(x) for x in integers)
        assert_bitwise(requests.call(DECODE), want)
        requests.table, requests.lens = integers
    requests = decode(target, 2)
    requests.batch.q = requests.q = torch.cat([requests.q, requests.q], 1)[:, :8]  # with the heads of others between
    requests.same(DECODE, {}, {})
    requests = decode(target, layout="NHD", form="split")
    both = torch.cat([requests.k, requests.v], -1)
    requests.cache = requests.k, requests.v = both[..., :64], both[..., 64:]
    requests.same(XQA, {}, {})
    requests = decode(target)
    requests.v, requests.cache = requests.k, requests.cache[:, :1]  # keys that are values too
    requests.same(DECODE, {}, {})


def test_arguments_without_effect(target):
    requests = decode(target)
    given = dict(enable_pdl=True, max_q_len=1, skip_softmax_threshold_scale_factor=1e3)
    given |= dict(multi_ctas_kv_counter_buffer=EMPTY, cp_world=1, cp_rank=0, o_scale=None)
    for backend in ("auto", "xqa", "trtllm-gen"):
        requests.same(DECODE, dict(backend=backend, **given), {})


def test_a_scale_in_base_2_replaces_the_other(target):
    requests = decode(target)
    scale = torch.tensor([requests.scale / math.log(2.0)], device=target.device)
    requests.compare(requests.call(DECODE, 99.0, bmm1_scale_log2=scale), Mask(causal=True))


# --- dtypes, and places for results ---


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rows", [1, 2])
def test_8_bit_caches(target, kv_dtype, rows):
    if target.backend == "fa3":
        pytest.skip("fa2 reads such caches")
    requests = decode(target, rows, kv_dtype=kv_dtype)
    scale = 0.5 * requests.scale
    requests.same(DECODE, dict(bmm1=scale, bmm2=2.0), dict(sm_scale=scale, v_descale=2.0))


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@pytest.mark.parametrize("wanted", [None, torch.bfloat16, "float16", E4M3])
def test_8_bit_queries(target, function, wanted):
    if target.backend == "fa2":
        pytest.skip("fa3 computes with them")
    requests = Requests(target, [1] * 3, [90, 7, 200], dim=128, dtype=E4M3)
    dtype = {None: E4M3, "float16": torch.float16}.get(wanted, wanted)
    requests.same(function, dict(out_dtype=wanted), dict(o_dtype=torch.float16 if dtype == E4M3 else dtype), dtype)


@pytest.mark.parametrize("rows", [1, 3])
def test_places_for_results(target, rows):
    for function in (DECODE, XQA):
        requests = decode(target, rows, layout="NHD")
        requests.same(function, dict(out=torch.full_like(requests.q, 7.0)), {})
        wide = torch.full((rows * 4, 8, 128), 7.0, dtype=requests.q.dtype, device=target.device)
        requests.same(function, dict(out=wide[..., :64]), {})
        assert bool((wide[..., 64:] == 7.0).all())
    lse = torch.full(requests.q.shape[:2], 7.0, device=target.device)
    want = requests.same(DECODE, dict(lse=lse), {})
    assert_bitwise(lse, want)
    assert requests.call(DECODE, lse=lse, return_lse=True)[1] is lse


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.bfloat16, torch.float32, E4M3])
@pytest.mark.parametrize("given", ["out", "out_dtype"])
def test_other_output_dtypes_are_converted(target, o_dtype, given):
    requests = decode(target)
    out = torch.empty(requests.q.shape, dtype=o_dtype, device=target.device)
    asked = dict(out=out) if given == "out" else dict(out_dtype=str(o_dtype).removeprefix("torch."))
    o_scale = 4.0 if o_dtype == E4M3 else 1.0
    requests.same(DECODE, dict(bmm2=0.25, o_scale=o_scale, **asked), dict(v_descale=0.25), o_dtype)


@pytest.mark.parametrize("o_dtype", [E4M3, E5M2], ids=str)
def test_an_fp8_output_is_limited_to_its_largest_number(target, o_dtype):
    found = decode(target).call(DECODE, bmm2=1e5, out_dtype=o_dtype)
    assert float(found.float().abs().max()) == torch.finfo(o_dtype).max


@pytest.mark.parametrize("o_dtype", [torch.float16, torch.float32, E4M3])
def test_rows_behind_the_last_request_are_not_written(target, o_dtype):
    requests = Requests(target, [4, 5], [30, 40])
    requests.q = torch.cat([requests.q, requests.q])
    out = torch.full_like(requests.q, 7.0, dtype=torch.float32).to(o_dtype)
    lse = torch.full(requests.q.shape[:2], 7.0, device=target.device)
    requests.call(CONTEXT, out=out, lse=lse)
    assert bool((out[9:].float() == 7.0).all()) and bool((lse[9:] == 7.0).all())
    assert not bool((out[:9].float() == 7.0).all(-1).any()) and not bool((lse[:9] == 7.0).any())


@pytest.mark.runs_nothing("an empty batch")
def test_no_requests(target):
    requests = decode(target, 2)
    requests.q, requests.table, requests.lens = requests.q[:0], requests.table[:0], requests.lens[:0]
    out, lse = requests.call(DECODE, return_lse=True)
    assert out.shape == (0, 8, 64) and lse.shape == (0, 8)


# --- masks of draft tokens ---


def packed(masks: list[torch.Tensor], width: int, device: str) -> torch.Tensor:
    """Masks ``[n, n]`` of requests as rows of bits, uint16 ``[rows, words]``."""
    words = []
    for mask in masks:
        for row in mask.tolist():
            number = sum(1 << c for c, seen in enumerate(row) if seen)
            words.append([number >> 16 * i & 0xFFFF for i in range((width + 31) // 32 * 2)])
    return torch.tensor(words, dtype=torch.int32).to(torch.uint16).to(device)


def drafts_of(requests: Requests, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Masks of draft tokens, and those of all keys that they mean."""
    drafts, whole, generator = [], [], torch.Generator().manual_seed(seed)
    for n, m in zip(requests.batch.qo_lens, requests.batch.kv_lens):
        drafts.append(torch.rand(n, n, generator=generator) < 0.5)
        every_key = torch.ones(n, m, dtype=torch.bool)
        every_key[:, m - n :] = drafts[-1]
        whole.append(every_key.to(requests.q.device))
    return drafts, whole


@pytest.mark.parametrize("function", [DECODE, XQA])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 40])
@pytest.mark.parametrize("window", [-1, 6])
def test_masks_of_draft_tokens(target, function, rows, window):
    requests = Requests(target, [rows] * 4, [rows, rows + 7, 200, 129])
    drafts, whole = drafts_of(requests, rows)
    bits = packed(drafts, rows, target.device).view(4, rows, -1)
    requests.compare(requests.call(function, window_left=window, mask=bits), Mask(window=(window, -1), bits=whole))


# Query lengths, bits in a row of the mask, and what bounds the lengths. Without a bound (the default of q_len_per_req
# is none), more rows in all than a row has bits.
DRAFTS = {
    "a bound": (XQA, [3, 0, 33, 1], [70, 5, 40, 16], 33, dict(q_len_per_req=33)),
    **{f"{f.__name__} {n} bits": (f, [2, 1, n] * 14, [70, 5, 41] * 14, n, {}) for f in (DECODE, XQA) for n in (2, 40)},
}


@pytest.mark.parametrize("case", DRAFTS)
def test_masks_of_drafts_whose_lengths_differ(target, case):
    function, qo_lens, kv_lens, width, bound = DRAFTS[case]
    requests = Requests(target, qo_lens, kv_lens)
    drafts, whole = drafts_of(requests)
    mask = packed(drafts, width, target.device)
    assert mask.shape == (requests.q.size(0), 2 if width == 2 else 4)
    given = {OFFSETS[function]: requests.offsets, **bound}
    requests.compare(requests.call(function, mask=mask, **given), Mask(bits=whole))


@pytest.mark.parametrize("rows,kv_lens,most", [(3, (90, 7, 200, 16), 200), (2, (40, 0, 1), 10**6)])
def test_a_causal_mask_is_the_default(target, rows, kv_lens, most):
    """Also of the padding of a graph: requests of length 0, and a bound of lengths beyond the table."""
    requests = Requests(target, [rows] * len(kv_lens), kv_lens, "NHD")
    requests.most = most
    mask = packed([torch.ones(rows, rows).tril()] * len(kv_lens), rows, target.device).view(len(kv_lens), rows, -1)
    requests.compare(requests.call(XQA, mask=mask), Mask(causal=True))


# --- what is refused ---


def small(function: Any = DECODE, **changes: Any) -> dict[str, Any]:
    given = dict(query=torch.zeros(2, 8, 64).half(), kv_cache=torch.zeros(6, 2, 2, 16, 64).half())
    given |= dict(workspace_buffer=EMPTY, block_tables=torch.zeros(2, 3).int(), seq_lens=torch.ones(2).int())
    if function is not CONTEXT:
        return given | dict(max_seq_len=48) | changes
    offsets = torch.arange(3, dtype=torch.int32)
    given |= dict(max_q_len=1, max_kv_len=48, bmm1_scale=1.0, bmm2_scale=1.0, batch_size=2)
    return given | dict(cum_seq_lens_q=offsets, cum_seq_lens_kv=offsets) | changes


NAMED, SHAPE = "{name}={value}", "{name} has shape"
FOUR_BITS = rows(NotImplementedError, NAMED, o_sf_scale=0.5, o_sf_vec_size=16, out_dtype="nvfp4")
FOUR_BITS += rows(NotImplementedError, "{name}=", kv_cache_sf=(EMPTY, EMPTY))
FOR_OTHER_GPUS = [
    *FOUR_BITS,
    *rows(NotImplementedError, NAMED, uses_shared_paged_kv_idx=False, enable_block_sparse_attention=True),
    *rows(NotImplementedError, NAMED, cp_world=2, cp_rank=1, bf16q_fp8kv_transform_mode="k_only"),
    *rows(NotImplementedError, NAMED, request_order_plan=3, backend="cake"),
    *rows(NotImplementedError, "{name}=a tensor", causal_seqlens_kv_global=EMPTY, request_order=EMPTY),
]
OF_CONTEXT = [*rows(..., "", use_fp16_softmax=True, uses_spcompress=True), *FOR_OTHER_GPUS[:5]]
ANY = (ValueError, TypeError, RuntimeError, KeyError)
WRONG = [
    *rows(ANY, "{name}={value} is unknown: use one of auto, trtllm-gen, xqa", backend="fa9"),
    *rows(ANY, r"{name} is \(3, 3\)", block_tables=torch.zeros(3, 3).int()),
    *rows(ANY, r"{name} is \(2, 2, 3\)", block_tables=torch.zeros(2, 2, 3).int()),
    *rows(ANY, r"{name} is \(3,\)", seq_lens=torch.zeros(3).int()),
    *rows(ANY, "{name} is list", seq_lens=[1, 1], query=[1]),
    *rows(ANY, "{name} is int", kv_cache=3, out=3),
    *rows(ANY, "{name}={value}, but query has 2 rows", q_len_per_req=3),
    *rows(ANY, NAMED, q_len_per_req=0),
    *rows(ANY, NAMED, q_len_per_req=None),
    *rows(ANY, SHAPE, query=torch.zeros(2, 1, 8, 64).half(), kv_cache=torch.zeros(6, 3, 2, 16, 64).half()),
    *rows(ANY, SHAPE, sinks=torch.zeros(3), out=torch.zeros(2, 8, 32).half(), lse=torch.zeros(8, 2)),
    *rows(ANY, SHAPE, bmm1_scale=torch.ones(3), bmm2_scale=torch.ones(0), out=torch.zeros(2, 8, 32)),
    *rows(ANY, "head_dim 64 and k 32", kv_cache=torch.zeros(6, 2, 2, 16, 32).half()),
    *rows(ANY, "must be the same|the dtype of q", kv_cache=torch.zeros(6, 2, 2, 16, 64)),
    *rows(ANY, "4-bit", kv_cache=torch.zeros(6, 2, 2, 16, 64).byte()),
    *rows(ANY, "KeyError|kv_layout", kv_layout="DHN"),
    *rows(ANY, "{name}={value} is for fp8 outputs", o_scale=2.0),
    *rows(ANY, "{name}=-1.0 is negative", skip_softmax_threshold_scale_factor=-1),
    *rows(ANY, "{name}=", bmm1_scale="big", bmm2_scale="big"),
    *rows(ANY, "{name}", max_seq_len="48"),
    *rows(ANY, "{name} is", mask=torch.ones(2, 1, 1)),
    (
        dict(out=torch.zeros(2, 8, 64).half(), out_dtype=torch.bfloat16),
        ANY,
        "out has dtype torch.float16, but out_dtype=torch.bfloat16",
    ),
    (
        dict(query=torch.zeros(18, 8, 64).half(), q_len_per_req=9, mask=torch.zeros(2, 9, 1).byte()),
        ANY,
        "8 bits per row, but requests have up to 9",
    ),
]
DRAFTS_OF_33 = dict(query=torch.zeros(36, 8, 64).half(), mask=torch.zeros(36, 2, dtype=torch.uint16))
REFUSED = [
    *[(DECODE, *row) for row in FOR_OTHER_GPUS + WRONG],
    *[(CONTEXT, x, NotImplementedError, f"does not serve {next(iter(x))}=") for x, *_ in OF_CONTEXT],
    (XQA, dict(kv_cache_sf=EMPTY), NotImplementedError, r"kv_cache_sf=a tensor .* Blackwell"),
    (CONTEXT, dict(batch_size=3), ValueError, "cum_seq_lens_q has 3 elements, but batch_size=3"),
    (CONTEXT, dict(seq_lens=torch.ones(1).int()), ValueError, "seq_lens is"),
    (CONTEXT, dict(backend="xqa"), ValueError, "backend='xqa' is unknown: use one of auto, trtllm-gen"),
    (
        XQA,
        DRAFTS_OF_33 | dict(q_cu_seq_lens=torch.tensor([0, 3, 36]).int()),
        ValueError,
        "a request has 33 draft tokens, but rows of mask",
    ),
]


@pytest.mark.parametrize("function,change,error,words", REFUSED)
def test_what_is_refused(function, change, error, words):
    with pytest.raises(error, match=words):
        function(**small(function, **change))
