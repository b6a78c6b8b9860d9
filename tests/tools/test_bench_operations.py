"""The benchmark's operations without a GPU: every column that a CPU has computes what is expected of its case."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from typing import Any

import check
import oracle
import pytest
import report as reporting
import torch
from backend import module
from inputs import make_inputs
from operations import OPERATIONS, WORKLOADS, block_sparse, mla_decode, mla_sparse, prefill
from operations.append_by_slot import Append
from operations.block_sparse import BlockSparse
from operations.fused import Fused
from operations.latent_append import LatentAppend
from operations.merge import Merge, expect_merged, make_states
from operations.mla_decode import MlaDecode
from operations.mla_sparse import MlaSparse
from operations.rope import Rope
from operations.shared_prefix import SharedPrefix
from problem import Problem, random_mask, with_pages

import cutlass_kernels as ck
from cutlass_kernels import flash_mla

CPU = torch.device("cpu")
MLA = OPERATIONS["mla_decode"]
SPARSE = OPERATIONS["block_sparse"]
PREFILL = OPERATIONS["prefill"].backends
SMALL = Problem("small", "one", (40,), (70,), 4, 2, 16, 16, window_left=9, soft_cap=5.0, sinks=True)


# --- what is expected --------------------------------------------------------------------------------------------


def full_mask(case: Problem, request: int) -> torch.Tensor:
    qo, kv = case.qo_lens[request], case.kv_lens[request]
    if case.custom_mask == "random":
        return random_mask(qo, kv)
    causal = case.causal or case.custom_mask == "causal"
    return oracle.visible(qo, kv, causal=causal, window_left=case.window_left)


@pytest.mark.parametrize("elements", [check.ELEMENTS, 1], ids=["all heads", "head by head"])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        Problem("g", "batch", (3, 700, 20), (3, 900, 64), 4, 4, 32, 16),
        Problem("g", "full", (5,), (33,), 2, 1, 8, 8, causal=False),
        Problem("g", "bits", (600,), (700,), 4, 2, 8, 8, causal=False, custom_mask="causal"),
        Problem("g", "random bits", (600,), (700,), 4, 2, 8, 8, causal=False, custom_mask="random"),
        Problem("g", "alibi", (9, 530), (30, 600), 8, 2, 8, 8, alibi=True),
        Problem("g", "pages", (3, 1), (30, 600), 8, 2, 8, 8, page_size=5),
    ],
    ids=lambda case: case.column,
)
def test_expected_result_is_that_of_the_oracle(case: Problem, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ELEMENTS", elements)
    inputs = make_inputs(case, CPU)
    expected = check.expect(case, inputs)
    qo, kv = inputs.qo_indptr.tolist(), inputs.kv_indptr.tolist()
    outs = []
    for b in range(len(case.qo_lens)):
        keys = slice(kv[b], kv[b + 1])
        exact = oracle.attention(
            inputs.q[qo[b] : qo[b + 1]],
            inputs.k[keys],
            inputs.v[keys],
            mask=full_mask(case, b),
            sm_scale=case.head_dim_qk**-0.5,
            soft_cap=case.soft_cap or None,
            sinks=inputs.sinks,
            alibi="relative" if case.alibi else None,
        )
        outs.append(exact.out)
    torch.testing.assert_close(expected.out.double(), torch.cat(outs), atol=2e-5, rtol=2e-5)
    assert expected.coverage == "all rows"
    assert expected.plain.largest > expected.plain.rms > 0
    assert check.fault(torch.cat(outs).to(inputs.q.dtype), expected) is None


@pytest.mark.parametrize("elements", [check.ELEMENTS, 1], ids=["at once", "token by token"])
@pytest.mark.parametrize("states", [2, 5])
def test_expected_merge_is_that_of_the_oracle(states: int, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ELEMENTS", elements)
    case = Merge(7, states, 3, 16)
    inputs = make_states(case, CPU)
    expected = expect_merged(inputs)
    torch.testing.assert_close(expected.out.double(), oracle.merge(inputs.v, inputs.s)[0], atol=2e-6, rtol=2e-6)
    assert check.fault(inputs.v[:, 0], expected) is not None
    read = sum(x.numel() * x.element_size() for x in (inputs.v, inputs.s))
    assert case.bytes == pytest.approx(read * (states + 1) / states)


def test_wrong_results_are_noticed() -> None:
    inputs = make_inputs(SMALL, CPU)
    expected = check.expect(SMALL, inputs)
    right = expected.out.to(torch.bfloat16)
    assert check.fault(right, expected) is None
    wrong = right.clone()
    wrong[7, 1, 3] += 0.25
    assert "largest error" in str(check.fault(wrong, expected))
    noisy = right + (0.02 * torch.sin(torch.arange(right.numel()))).view_as(right).to(right.dtype)
    assert "error" in str(check.fault(noisy, expected))
    wrong[0, 0, 0] = math.nan
    assert "NaN positions differ: 1 unexpected at [(0, 0, 0)]" in str(check.fault(wrong, expected))
    assert "shape" in str(check.fault(right[1:], expected))


def test_large_cases_are_checked_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ROWS", 8)
    monkeypatch.setattr(check, "PAIRS", 40 * 70 * 4 / 2)
    expected = check.expect(SMALL, make_inputs(SMALL, CPU))
    assert expected.coverage == "16 of 40 rows"
    assert expected.rows.tolist() == [*range(8), *range(32, 40)]


# --- what columns compute ----------------------------------------------------------------------------------------


def packed(layout: str) -> Fused:
    heads, page_size = (4, 4) if layout == "PACKED_QKV" else (4, 2), 8 if "PAGED" in layout else 0
    return Fused(Problem("g", "c", (7, 20), (7, 20), *heads, 16, 16, page_size=page_size), layout)


def decode(batch: int, page_size: int) -> Problem:
    return Problem("g", "c", (1,) * batch, (40,) * batch, 4, 2, 16, 16, page_size=page_size)


PREFIX = SharedPrefix(Problem("g", "c", (1,) * 3, (43,) * 3, 4, 2, 16, 16, page_size=4), 32)
SELECTED = MlaSparse(Problem("g", "c", (7,), (50,), 4, 1, 576, 512, causal=False, sinks=True), 9)
LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_NHD", "Q_PAGED_KV_HND"]


def flip_a_bit(x: Any) -> None:
    x.key_cache.view(torch.uint8)[0, 0, 0, 0] ^= 0x40


def scale_a_token(x: Any) -> None:
    x[0].ckv[3] *= 2


def turn_further(x: Any) -> None:
    x.positions += 1


# An operation, a case, its columns, and what spoils the result of a call where that is read from the inputs.
COLUMNS: list[tuple[str, Any, list[str], Any]] = [
    *(("merge", Merge(7, states, 3, 16), ["auto", "torch"], None) for states in (2, 5)),
    *(
        ("append_by_slot", Append(37, 2, 64, cache, "float16"), ["auto", "torch"], flip_a_bit)
        for cache in ("float16", "float8_e4m3fn")
    ),
    *(
        ("latent_append", LatentAppend(37, name, heads, "float16"), columns, scale_a_token)
        for name in ("v3.2", "v3.2_nope", "v4", "v4.1_pages")
        for heads, columns in ((None, ["auto"]), (3, ["auto", "two_calls"]))
        if name != "v3.2_nope" or heads is None
    ),
    *(
        ("rope", Rope(37, 4, 2, 64, cache, "float16"), ["auto", "two_calls"], turn_further)
        for cache in (None, "float16", "float8_e4m3fn")
    ),
    *(("fused", packed(layout), ["auto"], None) for layout in LAYOUTS),
    ("shared_prefix", PREFIX, ["levels", "shared", "plain", "copies"], None),
    ("mla_sparse", SELECTED, ["auto", "reference"], None),
    *(("decode", decode(*sizes), ["reference"], None) for sizes in ((1, 0), (3, 16))),
]


@pytest.mark.parametrize(
    ("name", "case", "column", "spoil"),
    [
        pytest.param(name, case, column, spoil, id=f"{name} {case.label}: {column}")
        for name, case, columns, spoil in COLUMNS
        for column in columns
    ],
)
def test_columns_compute_what_is_expected(name: str, case: Any, column: str, spoil: Any) -> None:
    operation = OPERATIONS[name]
    inputs = operation.inputs(case, CPU)
    expected = operation.expect(case, inputs)
    timed = operation.backends[column].make(case, inputs)
    for _ in range(2):  # the second call reads another copy of pages
        assert check.fault(timed.output(timed.call()), expected) is None
    if spoil is not None:
        spoil(inputs)
        assert check.fault(timed.output(None), expected) is not None


def test_shared_prefixes_are_read_once() -> None:
    assert PREFIX.bytes == PREFIX.problem.bytes - 2 * 2 * 32 * 2 * 32


@pytest.mark.parametrize("case", with_pages(Problem("g", "", (7, 1), (40, 33), 4, 2, 16, 16), (5, 16)))
def test_peers_get_the_same_problem(case: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """With our library in the place of FlashInfer, and a FlashAttention that gathers pages."""
    inputs = make_inputs(case, CPU)
    expected = check.expect(case, inputs)
    monkeypatch.setattr(prefill, "module", lambda name: ck)
    timed = prefill.flashinfer("reference", case, inputs)
    assert check.fault(timed.output(timed.call()), expected) is None
    if not case.page_size:
        return

    def attend(q: Any, k: Any, v: Any, *, cache_seqlens: Any, page_table: Any, cu_seqlens_q: Any, **more: Any) -> Any:
        assert (more["max_seqlen_q"], more["causal"]) == (7, True)
        outs = []
        for b, length in enumerate(cache_seqlens.tolist()):
            keys, values = (x[page_table[b].long()].flatten(0, 1)[:length] for x in (k, v))
            rows = slice(*cu_seqlens_q[b : b + 2].tolist())
            outs.append(ck.single_prefill_with_kv_cache(q[rows], keys, values, causal=True))
        return torch.cat(outs)

    library = types.SimpleNamespace(flash_attn_with_kvcache=attend)
    monkeypatch.setattr(prefill, "module", lambda name: library)
    timed = prefill.flash_attn_3(case, inputs)
    assert check.fault(timed.output(timed.call()), expected) is None


def test_a_peer_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Problem("g", "", (7, 1), (40, 33), 4, 2, 16, 16, page_size=16)
    columns = [(PREFILL[f"flashinfer_{name}"], pages, "flashinfer") for name in ("fa2", "fa3")]
    columns.append((MLA.backends["flash_mla"], latent(1), "flash_mla"))
    columns.append((OPERATIONS["mla_sparse"].backends["flash_mla"], SELECTED, "flash_mla"))
    for column, case, name in columns:
        monkeypatch.setitem(sys.modules, name, None)
        module.cache_clear()
        reason = column.why_not(case, torch.device("cuda"))
        module.cache_clear()
        assert reason is not None and reason.startswith(f"{name} cannot be imported: ")


# --- latent attention --------------------------------------------------------------------------------------------


def latent(rows: int = 2, page_size: int = 64, kv_dtype: str = "bfloat16", heads: int = 4) -> MlaDecode:
    lens = (70, 7, 64)
    sizes = ((rows,) * len(lens), lens, heads, 1, 576, 512)
    return MlaDecode(Problem("g", "c", *sizes, causal=rows > 1, page_size=page_size), kv_dtype)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "page_size"), [(1, 64), (2, 64), (3, 5)])
def test_latent_attention_reads_values_from_the_cache(rows: int, page_size: int, kv_dtype: str) -> None:
    case = latent(rows, page_size, kv_dtype)
    inputs = MLA.inputs(case, CPU)
    expected = MLA.expect(case, inputs)
    assert inputs.pages is not None and isinstance(inputs.pages.cache, torch.Tensor)
    table, lengths = mla_decode._table_and_lengths(inputs)
    exact = []
    for b, length in enumerate(lengths.tolist()):
        keys = inputs.pages.cache.double()[table[b].long()].flatten(0, 1)[:length, None]
        mask = oracle.visible(rows, length, causal=rows > 1)
        q = inputs.q[b * rows : (b + 1) * rows]
        exact.append(oracle.attention(q, keys, keys[..., :512], mask=mask, sm_scale=576**-0.5).out)
    torch.testing.assert_close(expected.out.double(), torch.cat(exact), atol=2e-5, rtol=2e-5)
    timed = MLA.backends["reference"].make(case, inputs)
    for _ in range(2):  # the second call reads another copy of the cache
        assert check.fault(timed.output(timed.call()), expected) is None


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("rows", [1, 2])
def test_peers_of_latent_attention_get_the_same_problem(
    rows: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With our functions of the same names in the place of FlashInfer and FlashMLA."""
    case = latent(rows, kv_dtype=kv_dtype)
    inputs = MLA.inputs(case, CPU)
    expected = MLA.expect(case, inputs)
    monkeypatch.setattr(mla_decode, "module", lambda name: {"flashinfer": ck, "flash_mla": ck.mla}[name])
    for timed in (mla_decode.flashinfer("reference", case, inputs), mla_decode.flash_mla(case, inputs)):
        for _ in range(2):
            assert check.fault(timed.output(timed.call()), expected) is None


def test_columns_of_latent_attention_honour_what_they_serve() -> None:
    cases = [latent(1), latent(2), latent(2, page_size=16), latent(1, kv_dtype="float8_e4m3fn")]

    def honour(name: str) -> list[bool]:
        backend = MLA.backends[name]
        return [not case.features - backend.honours and backend.refuses(case, CPU) is None for case in cases]

    assert honour("flash_mla") == [True, True, False, False]
    assert honour("flashinfer_fa3") == honour("flashinfer_fa2") == honour("reference") == [True] * 4


def test_an_fp8_cache_that_no_kernel_reads_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under "auto", PyTorch would be."""
    case = latent(1, kv_dtype="float8_e4m3fn")
    kernel = {"backend": "fa2", "q_dtype": "bfloat16", "kv_dtype": "bfloat16", "head_dim_qk": 576}
    monkeypatch.setattr(ck, "list_kernels", lambda: [kernel])
    for name, words in (("auto", "no kernel"), ("fa2", "no fa2 kernel"), ("fa3", "no fa3 kernel")):
        assert MLA.backends[name].refuses(case, CPU) == f"{words} reads a latent cache of float8_e4m3fn"
    kernel["kv_dtype"] = "float8_e4m3fn"
    assert MLA.backends["auto"].refuses(case, CPU) is None
    assert "needs CUDA tensors" in str(MLA.backends["fa2"].refuses(case, CPU))
    assert "no fa3 kernel" in str(MLA.backends["fa3"].refuses(case, CPU))


def test_selected_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row sees what its list names; FlashMLA, here our function of that name, gets the same problem."""
    operation = OPERATIONS["mla_sparse"]
    x = operation.inputs(SELECTED, CPU)
    assert x.lists.shape == (7, 1, 9) and all(len(set(row.tolist())) == 9 for row in x.lists[:, 0])
    expected, q, k = operation.expect(SELECTED, x), x.inputs.q, x.inputs.k
    exact = oracle.selected(q, k, k[..., :512], x.lists, sm_scale=576**-0.5, sinks=x.inputs.sinks)
    torch.testing.assert_close(expected.out.double(), exact.out, atol=2e-5, rtol=2e-5)
    monkeypatch.setattr(mla_sparse, "module", lambda name: flash_mla)
    timed = mla_sparse.flash_mla(SELECTED, x)
    assert check.fault(timed.output(timed.call()), expected) is None
    columns = operation.backends.values()
    assert [column.name for column in columns if not SELECTED.features - column.honours] == list(operation.backends)
    half = MlaSparse(dataclasses.replace(SELECTED.problem, dtype="float16"), 9)
    assert "bfloat16 alone" in str(operation.backends["flash_mla"].refuses(half, CPU))


def test_a_kernel_without_lists_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small call that is tried is on the CPU here, of which no kernel computes anything."""
    make, cuda = mla_sparse._inputs, torch.device("cuda")
    monkeypatch.setattr(mla_sparse.api, "refused", lambda *problem: None)
    monkeypatch.setattr(mla_sparse, "_inputs", lambda case, device: make(case, CPU))
    for name in ("fa2", "fa3", "auto"):
        reason = OPERATIONS["mla_sparse"].backends[name].refuses(SELECTED, cuda)
        assert reason is not None and ("backend='fa2'" if name == "auto" else f"backend='{name}'") in reason
    assert OPERATIONS["mla_sparse"].backends["reference"].refuses(SELECTED, cuda) is None
    older = types.SimpleNamespace(attention=lambda q, k, v, sm_scale, backend: None)
    assert "unexpected keyword argument" in str(mla_sparse._refused(older, "fa3", SELECTED, cuda))
    monkeypatch.setattr(ck, "attention", lambda *tensors, **options: None)
    assert OPERATIONS["mla_sparse"].backends["auto"].refuses(SELECTED, cuda) is None


def test_work_of_selected_tokens() -> None:
    cases = [case for case in WORKLOADS["mla-sparse"].cases("bfloat16") if isinstance(case, MlaSparse)]
    assert {case.group: case.work for case in cases} == {
        "128 heads, top-k 2048": 2 * 4096 * 128 * 2048 * (576 + 512),
        "64 heads, top-k 512": 2 * 4096 * 64 * 512 * (576 + 512),
    }
    assert [case.column for case in cases] == ["8k", "32k", "64k", "96k", "128k"] * 2
    assert cases[0].bytes == 2 * (4096 * 128 * (576 + 512) + 8192 * 576) + 4 * 4096 * 2048


def test_work_of_latent_attention() -> None:
    """FLOPs of all heads, bytes of the cache alone."""
    cases = {case.label: case for case in WORKLOADS["mla-decode"].cases("bfloat16") if isinstance(case, MlaDecode)}
    case = cases["128 heads, 1 token 128 x 4k"]
    assert case.work == 2 * 128 * 128 * 4096 * (576 + 512)
    assert case.bytes == 128 * 4096 * 576 * 2
    two = cases["128 heads, 2 tokens 128 x 4k"]
    assert two.work == case.work + 2 * 128 * 128 * 4095 * (576 + 512)  # the first token does not see the second
    assert two.bytes == case.bytes
    assert [case.column for case in cases.values() if case.group == "16 heads, 1 token"] == [
        "1 x 4k",
        "1 x 16k",
        "64 x 4k",
        "64 x 16k",
    ]
    assert {(case.problem.page_size, case.problem.num_kv_heads) for case in cases.values()} == {(64, 1)}
    assert {case.features for case in cases.values()} == {
        frozenset({"gqa", "head_dim_vo", "paged"}),
        frozenset({"append", "causal", "gqa", "head_dim_vo", "paged"}),
    }


def test_fp8_is_the_type_of_the_latent_cache() -> None:
    pairs = zip(WORKLOADS["mla-decode"].cases("float8_e4m3fn"), WORKLOADS["mla-decode"].cases("bfloat16"))
    for case, other in pairs:
        assert isinstance(case, MlaDecode)
        assert (case.problem.dtype, case.kv_dtype) == ("bfloat16", "float8_e4m3fn")
        assert (case.label, case.work, case.bytes) == (other.label, other.work, other.bytes / 2)
        assert case.features == other.features | {"fp8"}


def test_terabytes_have_two_decimals() -> None:
    result = reporting.Result("fa3", "g", "c", 1.0, figure=3.456)
    assert reporting.cell(result, "TB/s") == "3.46"
    assert reporting.cell(result, "TFLOP/s") == "3.5"


def test_prefill_of_latent_attention_has_192_columns() -> None:
    cases = [case for case in WORKLOADS["mla-prefill"].cases("bfloat16") if isinstance(case, Problem)]
    assert [case.qo_lens for case in cases] == [(2048,), (4096,), (8192,), (2048,) * 8, (4096,) * 4, (8192,) * 2]
    assert {(case.num_qo_heads, case.head_dim_qk, case.head_dim_vo, case.causal) for case in cases} == {
        (128, 192, 128, True)
    }
    peers = [backend for backend in OPERATIONS["prefill"].peers if not cases[0].features - backend.honours]
    assert {"cudnn", "flash_attn_3", "flashinfer_fa2", "flashinfer_fa3"} <= {backend.name for backend in peers}


# --- masks of blocks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.25, 1.0])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_blocks_are_those_of_the_pattern(
    heads: tuple[int, int], density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = BlockSparse(Problem("g", "c", (64,), (96,), *heads, 16, 16, causal=False), 16, density)
    inputs: Any = SPARSE.inputs(case, CPU)
    expected = SPARSE.expect(case, inputs)
    assert case.work == 4 * 16 * heads[0] * int(inputs.mask.sum())
    assert case.seen == math.ceil(6 * density)
    monkeypatch.setattr(block_sparse, "module", lambda name: ck)
    for make in (
        SPARSE.backends["blocks"].make,
        SPARSE.backends["heads"].make,
        SPARSE.backends["flashinfer_heads"].make,
        lambda case, x: block_sparse._blocks(ck, case, x, backend="reference"),
    ):
        timed = make(case, inputs)
        assert check.fault(timed.output(timed.call()), expected) is None
