"""The benchmark's operations on latent and block-sparse attention, without a GPU: what the columns compute."""

from __future__ import annotations

import math
import sys
from typing import Any

import oracle
import pytest
import torch
from paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import check
import report as reporting
from backend import module
from operations import OPERATIONS, WORKLOADS, block_sparse, mla_decode
from operations.block_sparse import BlockSparse
from operations.mla_decode import MlaDecode
from problem import Problem

import cutlass_kernels as ck

CPU = torch.device("cpu")
MLA = OPERATIONS["mla_decode"]
SPARSE = OPERATIONS["block_sparse"]


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


def test_columns_of_latent_attention_honour_what_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [latent(1), latent(2), latent(2, page_size=16), latent(1, kv_dtype="float8_e4m3fn")]

    def honour(name: str) -> list[bool]:
        backend = MLA.backends[name]
        return [not case.features - backend.honours and backend.refuses(case, CPU) is None for case in cases]

    assert honour("flash_mla") == [True, True, False, False]
    assert honour("flashinfer_fa3") == honour("flashinfer_fa2") == honour("reference") == [True] * 4
    monkeypatch.setitem(sys.modules, "flash_mla", None)
    module.cache_clear()
    reason = MLA.backends["flash_mla"].why_not(cases[0], torch.device("cuda"))
    module.cache_clear()
    assert reason is not None and reason.startswith("flash_mla cannot be imported: ")


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
