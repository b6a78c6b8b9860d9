"""The benchmark's cases: their FLOPs and bytes, workloads, and the pages of a cache."""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import itertools

import oracle
import pytest
import torch
from paths import ROOT

pytest.importorskip("typer")
from backend import ALL, ONLY_OURS
from inputs import make_inputs
from lengths import visible_pairs
from operations import OPERATIONS, WORKLOADS, cases_of, prefill
from operations.host import Host
from operations.prefill_workloads import paper, varlen
from problem import DENSITY, Problem, random_mask

CPU = torch.device("cpu")


def test_files_of_the_benchmark_import_no_circle() -> None:
    folder = ROOT / "benchmarks"
    names = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    imports: dict[str, set[str]] = {}
    for name in names:
        package, found = name.rpartition(".")[0], set()
        for node in ast.walk(ast.parse((folder / f"{name.replace('.', '/')}.py").read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                module = f"{package}.{node.module or ''}".strip(".") if node.level else str(node.module)
                found |= {module, f"{module}.__init__", *(f"{module}.{alias.name}" for alias in node.names)}
        imports[name] = (found & names) - {name}
    order = list(graphlib.TopologicalSorter(imports).static_order())
    assert order[-1] == "figures"  # and before it bench, which it calls
    assert {"problem", "backend", "operations.__init__"} <= imports["measure"] | imports["api"] | imports["bench"]


# --- work --------------------------------------------------------------------------------------------------------


def test_visible_pairs_are_those_of_the_mask() -> None:
    sizes = (0, 1, 2, 5, 8, 13)
    for qo, kv, causal, window in itertools.product(sizes, sizes, (False, True), (-1, 0, 1, 4, 20)):
        mask = oracle.visible(qo, kv, causal=causal, window_left=window)
        assert visible_pairs(qo, kv, causal, window) == int(mask.sum()), (qo, kv, causal, window)


def test_work_counts_both_products_of_visible_pairs() -> None:
    full = Problem("g", "c", (3, 5), (4, 9), 6, 2, 64, 32, causal=False)
    assert full.work == 2 * 6 * (64 + 32) * (3 * 4 + 5 * 9)
    causal = Problem("g", "c", (4,), (4,), 1, 1, 8, 8)
    assert causal.work == 2 * 16 * (1 + 2 + 3 + 4)


def test_work_of_custom_masks_is_that_of_their_bits() -> None:
    causal = Problem("g", "c", (5,), (9,), 2, 1, 8, 8)
    for kind in ("causal", "random"):
        case = dataclasses.replace(causal, causal=False, custom_mask=kind)
        mask = make_inputs(case, CPU).mask
        assert mask is not None
        assert mask.shape == (5, 9)
        assert case.pairs == int(mask.sum())
        assert case.features == {"custom_mask", "gqa"}
        assert (case.work == causal.work) == (kind == "causal")
    assert float(random_mask(64, 512).float().mean()) == pytest.approx(DENSITY, abs=0.02)
    for wrong in ({"causal": True}, {"window_left": 3}, {"qo_lens": (1, 1), "kv_lens": (2, 2)}):
        with pytest.raises(ValueError, match="the only mask"):
            dataclasses.replace(causal, **{"causal": False, "custom_mask": "causal", **wrong})
    with pytest.raises(ValueError, match="none of 'causal'"):
        dataclasses.replace(causal, causal=False, custom_mask="tree")


def test_bytes_count_every_tensor_once() -> None:
    case = Problem("g", "c", (3, 5), (4, 9), 6, 2, 64, 32)
    inputs = make_inputs(case, CPU)
    out = 8 * 6 * 32
    assert case.bytes == 2 * (inputs.q.numel() + inputs.k.numel() + inputs.v.numel() + out)


# --- workloads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads_are_consistent(name: str) -> None:
    (operation,) = [operation for operation in OPERATIONS.values() if name in operation.workloads]
    assert set(WORKLOADS[name].units) <= set(operation.units)
    cases = WORKLOADS[name].cases("float16")
    assert cases
    assert len({case.label for case in cases}) == len(cases)
    for case in cases:
        assert case.work > 0
        assert case.features <= ALL | ONLY_OURS
        assert case.detail
        if isinstance(case, Problem):
            assert case.dtype == "float16"
            assert len(case.qo_lens) == len(case.kv_lens)
            assert case.num_qo_heads % case.num_kv_heads == 0
            assert not case.causal or all(qo <= kv for qo, kv in zip(case.qo_lens, case.kv_lens))


def test_paper_workload_has_16k_tokens_of_hidden_size_2048() -> None:
    cases = paper("bfloat16")
    assert len(cases) == 36
    for case in cases:
        assert isinstance(case, Problem)
        assert sum(case.qo_lens) == 16384
        assert case.num_qo_heads * case.head_dim_qk == 2048
        assert case.dense


def test_model_workloads_ask_for_their_features() -> None:
    gpt_oss = WORKLOADS["gpt-oss"].cases("bfloat16")
    assert {case.features for case in gpt_oss} == {
        frozenset({"causal", "gqa", "sinks", "window"}),
        frozenset({"causal", "gqa", "sinks"}),
    }
    first = gpt_oss[0]
    assert isinstance(first, Problem)
    assert visible_pairs(1, 4096, True, first.window_left) == 128
    assert all("soft_cap" in case.features for case in WORKLOADS["gemma2"].cases("bfloat16"))
    assert all("head_dim_vo" in case.features for case in WORKLOADS["deepseek"].cases("bfloat16"))
    assert "ragged" in varlen("bfloat16")[0].features


def test_varlen_workload_is_the_same_every_time() -> None:
    assert varlen("bfloat16") == varlen("bfloat16")


def prefills(workload: str) -> list[Problem]:
    cases = WORKLOADS[workload].cases("bfloat16")
    return [case for case in cases if isinstance(case, Problem)]


def test_paged_workloads_stand_beside_the_same_without_pages() -> None:
    for name, sizes in (("paged", [0, 1, 5, 16, 64, 128]), ("append", [0, 16]), ("mixed", [0, 16])):
        for _, group in itertools.groupby(prefills(name), lambda case: case.group):
            cases = list(group)
            assert [case.page_size for case in cases] == sizes
            assert [case.column for case in cases] == ["ragged", *(f"page {n}" for n in sizes[1:])]
            assert len({(case.qo_lens, case.kv_lens, case.work, case.bytes) for case in cases}) == 1
            assert [case.features - cases[0].features for case in cases] == [set(), *([{"paged"}] * len(sizes[1:]))]
    first = prefills("paged")[1]
    assert first.label == "hd128 1x4k page 1"
    assert "pages of 1, needs causal gqa paged" in first.detail


def test_append_workload_has_few_rows_over_many_keys() -> None:
    cases = {case.group: case for case in prefills("append")}
    assert len(cases) == 18
    assert all("append" in case.features for case in cases.values())
    skew = cases["63x 1 over 1k + 1 over 64k, 32/8 hd128"]
    assert (sum(skew.qo_lens), sum(skew.kv_lens), max(skew.kv_lens)) == (64, 63 * 1024 + 65536, 65536)
    assert "ragged" in skew.features
    mixed = cases["2k prompt + 64x 1 over 4k, 32/8 hd128"]
    assert mixed.pairs == visible_pairs(2048, 2048, True) + 64 * 4096
    rank = cases["8x 64 over 8k, 8/1 hd128"]
    assert (rank.qo_lens, rank.num_qo_heads, rank.num_kv_heads) == ((64,) * 8, 8, 1)
    single = cases["256x 1 over 2k, 32/8 hd128"]
    assert single.bytes == pytest.approx(2 * 256 * 2048 * 8 * 256, rel=0.01)


def test_mixed_workload_has_prompts_beside_decoding_requests() -> None:
    cases = {case.group: case for case in prefills("mixed")}
    assert all({"append", "ragged"} <= case.features for case in cases.values())
    chunks = cases["4x 512 over 4k + 128x 1 over 2k, 32/8 hd128"]
    assert (chunks.qo_lens, chunks.kv_lens) == ((512,) * 4 + (1,) * 128, (4096,) * 4 + (2048,) * 128)
    assert chunks.pairs == 4 * visible_pairs(512, 4096, True) + 128 * 2048
    assert {case.head_dim_qk for case in cases.values()} == {64, 128, 256}


def test_masks_workload_asks_for_its_features() -> None:
    cases = prefills("masks")
    assert [case.features for case in cases[:4]] == [
        frozenset({"causal", "gqa"}),
        frozenset({"custom_mask", "gqa"}),
        frozenset({"custom_mask", "gqa"}),
        frozenset({"alibi", "causal", "gqa"}),
    ]
    assert len({case.group for case in cases}) == 3
    assert cases[0].work == cases[1].work == cases[3].work
    assert cases[2].pairs == pytest.approx(0.6 * 4096**2, rel=1e-3)
    assert [
        name for name, b in OPERATIONS["prefill"].backends.items() if not b.ours and not cases[1].features - b.honours
    ] == []


def test_host_calls_have_names_and_problems() -> None:
    cases = [case for case in WORKLOADS["calls"].cases("bfloat16") if isinstance(case, Host)]
    columns = [case.column for case in cases]
    for column in ("run() of 8", "plan() of 8, cuda offsets", "plan() of 128, cpu offsets", "paged run() of 128"):
        assert column in columns
    paged = cases[columns.index("paged plan() of 128, cuda indices")]
    assert (paged.problem.page_size, len(paged.problem.kv_lens), paged.features) == (16, 128, paged.problem.features)
    assert "paged" in paged.features
    assert "paged" not in cases[0].features


def test_workload_of_another_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="'paper' is none of host: use calls"):
        cases_of("host", ["paper"], "bfloat16")


# --- pages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 5, 16])
@pytest.mark.parametrize("dim_vo", [16, 8])
def test_pages_hold_the_same_keys_in_random_order(size: int, dim_vo: int) -> None:
    case = Problem("g", "c", (1, 2, 3), (37, 5, 80), 4, 2, 16, dim_vo, page_size=size)
    inputs = make_inputs(case, CPU)
    without = make_inputs(dataclasses.replace(case, page_size=0), CPU)
    pages = inputs.pages
    assert pages is not None and without.pages is None
    assert torch.equal(inputs.k, without.k)
    assert isinstance(pages.cache, torch.Tensor) == (dim_vo == 16)
    k, v = pages.cache.unbind(1) if isinstance(pages.cache, torch.Tensor) else pages.cache
    assert k.shape[1:] == (size, 2, 16)
    indices = pages.indices.tolist()
    assert sorted(indices) == list(range(k.size(0)))
    assert indices != sorted(indices)
    table = (pages.indptr.tolist(), indices, pages.last_page_len.tolist())
    keys, values = zip(*oracle.gather_pages(k, v, *table, "NHD"))
    assert torch.equal(torch.cat(keys), inputs.k)
    assert torch.equal(torch.cat(values), inputs.v)
    rows = prefill.page_table(pages)
    assert rows.dtype == torch.int32
    assert rows[2, : -(-80 // size)].tolist() == indices[pages.indptr[2] :]
    assert [x.dtype for x in inputs.indices(on_device=True)] == [torch.int32] * 4
