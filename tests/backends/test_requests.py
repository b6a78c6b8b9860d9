"""Requests: what is asked of a kernel, which backend reads 8 bits as they are, and what is computed from copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import every
from problems import FP8

import cutlass_kernels as ck
from cutlass_kernels._compute import half_precision, kernels, request_facts
from cutlass_kernels._compute.request_facts import Layout, Request

HALF, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = FP8
SHORT, FEW, SOME = request_facts.SHORT_ROWS, request_facts.FEW_ROWS, request_facts.SOME_ROWS


def request(
    q: torch.dtype = E4M3,
    kv: torch.dtype | None = None,
    o: torch.dtype = BF16,
    features: str = "",
    layout: Layout | None = None,
    dims: tuple[int, int] = (128, 128),
) -> Request:
    return Request("cuda", 90, q, kv or q, o, 8, 2, *dims, frozenset(features.split()), layout)


# --- who reads caches of 8 bits ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "types,rows,requests,group_size,dims,feature",
    [
        ((HALF, E4M3), 4, 4, 8, (128, 128), "short_queries"),
        ((BF16, E5M2), SHORT // 4, 1, 4, (64, 64), "short_queries"),
        ((BF16, E5M2), SHORT // 4 + 1, 1, 4, (64, 64), "fp8_few_rows"),
        ((BF16, E4M3), FEW // 2, 2, 4, (64, 64), "fp8_few_rows"),  # the average counts
        ((BF16, E4M3), FEW // 2 + 1, 2, 4, (64, 64), "fp8_some_rows"),
        ((BF16, E4M3), SOME, 1, 1, (80, 80), "fp8_some_rows"),
        ((BF16, E4M3), SOME + 1, 1, 1, (80, 80), ""),
        ((BF16, E4M3), 64, 1, 4, (256, 256), "fp8_some_rows"),
        ((BF16, E4M3), 65, 1, 4, (256, 256), ""),
        ((BF16, E4M3), 4, 4, 8, (72, 128), ""),  # rows of 72 bytes
        ((BF16, E4M3), None, 4, 8, (128, 128), ""),
        ((BF16, BF16), 8, 4, 8, (72, 72), "short_queries"),
        ((BF16, BF16), 8, 4, 8, (192, 128), ""),  # which fa2 would pad
        ((BF16, BF16), 9, 4, 8, (128, 128), ""),
        ((BF16, BF16), 1, 4, 32, (128, 128), ""),  # more heads than rows of the tile
        ((BF16, HALF), 4, 4, 4, (128, 128), ""),
        ((E4M3, E4M3), 4, 4, 8, (128, 128), ""),
    ],
)
def test_feature_of_rows(types, rows, requests, group_size, dims, feature):
    assert request_facts.feature_of_rows(*types, rows, requests, group_size, dims) == feature


def native_dims() -> set[int]:
    return {k["head_dim_qk"] for k in ck.list_kernels() if k["backend"] == "fa2" and k["kv_dtype"] == "float8_e4m3fn"}


@pytest.mark.parametrize(
    "features,selected",
    [
        (["short_queries"], "fa2"),
        (["short_queries", "paged", "causal", "sinks"], "fa2"),
        (["short_queries", "custom_mask", "tensor_scale"], "fa2"),
        (["short_queries", "rope"], "fa3"),  # rotation takes copies anyway
        (["fp8_few_rows"], "fa2"),
        (["fp8_few_rows", "paged"], "fa3"),  # which reads pages
        (["fp8_few_rows", "paged", "custom_mask", "alibi"], "fa3"),
        (["fp8_some_rows"], "fa3"),
        (["paged"], "fa3"),
    ],
)
def test_auto_reads_caches_by(features, selected, extension, clean_environment):
    said = ck.explain(device="cuda", compute_capability=90, q_dtype="bfloat16", kv_dtype=E4M3, features=features)
    if said.reasons["fa2"] or said.reasons["fa3"] or 128 not in native_dims():
        pytest.skip("this build lacks one of the backends, or the kernels that read fp8")
    assert said.selected == selected
    assert not said.reasons["reference"]


# --- who reads e4m3 ------------------------------------------------------------------------------------------------


@pytest.fixture
def reads_as_is(extension):
    if not any(kernel["q_dtype"] == "float8_e4m3fn" for kernel in kernels.kernels()):
        pytest.skip("this build has no fp8 kernels")
    return kernels.reads_as_is


READ = ["", "causal window soft_cap sinks paged", "head_scale", "tensor_scale paged", "chunk"]
COPIED = ["custom_mask", "multi_item", "alibi", "rope", "fp8_copies", "stats", "head_scale rope"]


@every(features=READ, o=[HALF, BF16, E4M3])
def test_fp8_is_read_as_it_is(reads_as_is, features, o):
    assert reads_as_is("fa3", request(features=features, o=o))
    assert not reads_as_is("fa2", request(features=features, o=o))


@every(features=COPIED)
def test_what_kernels_of_fp8_lack_is_computed_from_copies(reads_as_is, features):
    asked = request(features=features)
    assert not reads_as_is("fa3", asked)
    prepared = half_precision.prepared_request(asked)
    assert prepared is not None and prepared.q_dtype == BF16
    assert prepared.features == asked.features - {"rope", "fp8_copies"}


@every(changed=[dict(q=E5M2), dict(o=E5M2), dict(o=FP32), dict(dims=(512, 512))])
def test_other_types_and_sizes_are_not(reads_as_is, changed):
    assert not reads_as_is("fa3", request(**changed))


def test_strides_that_maps_do_not_take_are_copied(reads_as_is):
    assert reads_as_is("fa3", request(layout=Layout(2, 2, ())))
    assert not reads_as_is("fa3", request(layout=Layout(2, 2, (("k", 0, 128),))))


@every(features=[*READ, *COPIED], o=["bfloat16", "float8_e4m3fn"])
def test_fa3_serves_both(reads_as_is, features, o):
    said = ck.explain(device="cuda", compute_capability=90, q_dtype=E4M3, o_dtype=o, features=features.split())
    assert said.selected == "fa3", said


def test_e5m2_is_not_written(reads_as_is):
    said = ck.explain(device="cuda", compute_capability=90, q_dtype=E4M3, o_dtype=E5M2)
    assert said.selected == "reference" and "float8_e5m2" in str(said.reasons["fa3"]), said


# --- what is computed from copies ----------------------------------------------------------------------------------


def strides(names: str) -> Layout:
    return Layout(2, 5, tuple((name, 0, 64) for name in names))


@pytest.mark.parametrize(
    "asked,wanted",
    [
        (request(HALF, HALF, HALF, "rope causal"), request(HALF, HALF, HALF, "causal")),
        (request(BF16, E4M3, BF16, "paged"), request(BF16, BF16, BF16, "paged")),
        (request(HALF, E4M3, HALF, "rope"), request(HALF, HALF, HALF)),
        (request(E4M3, E4M3, BF16), request(BF16, BF16, BF16)),
        (request(E4M3, E4M3, HALF, "head_scale"), request(HALF, HALF, HALF, "head_scale")),
        # e4m3 is rounded from an output of 16 bits.
        (request(E4M3, E4M3, E4M3, "alibi", strides("qkvo")), request(HALF, HALF, HALF, "alibi", strides(""))),
        (request(E4M3, E4M3, E4M3, "rope", strides("qkvo")), request(HALF, HALF, HALF, "", strides(""))),
        (
            request(E4M3, E4M3, E4M3, "fp8_copies causal", strides("qkvo")),
            request(HALF, HALF, HALF, "causal", strides("")),
        ),
        # Not for this module to refuse: kernels say what they write.
        (request(E4M3, E4M3, E5M2), request(HALF, HALF, E5M2)),
        (request(E4M3, E4M3, FP32), request(HALF, HALF, FP32)),
        # Strides of what is copied do not matter.
        (request(HALF, HALF, HALF, "rope", strides("qkvo")), request(HALF, HALF, HALF, "", strides("vo"))),
        (request(HALF, E4M3, HALF, "", strides("qkvo")), request(HALF, HALF, HALF, "", strides("qo"))),
        (request(HALF, E4M3, HALF, "rope fp8_copies", strides("qkvo")), request(HALF, HALF, HALF, "", strides("o"))),
        (request(HALF, HALF, HALF), None),
        (request(HALF, HALF, HALF, "causal window paged alibi"), None),
    ],
)
def test_a_kernel_is_asked_for_16_bits_and_no_rotation(asked, wanted):
    assert half_precision.prepared_request(asked) == wanted


def test_every_kernel_serves_what_copies_make_of_it(extension):
    for kernel in ck.list_kernels():
        q, backend = kernel["q_dtype"], kernel["backend"]
        # Copies of latent keys (576/512) have values of their own, which no kernel reads.
        if getattr(torch, q) in FP8 or kernel["head_dim_qk"] > 512:
            continue
        sizes = dict(head_dim_qk=kernel["head_dim_qk"], head_dim_vo=kernel["head_dim_vo"], device="cuda")
        sizes["compute_capability"] = kernel["min_compute_capability"]
        for types in ((q, q), (q, "float8_e5m2"), ("float8_e4m3fn", "float8_e4m3fn")):
            said = ck.explain(q_dtype=types[0], kv_dtype=types[1], o_dtype=q, features=["rope"], **sizes)
            assert not said.reasons[backend], said
        said = ck.explain(q_dtype="float8_e4m3fn", o_dtype="float8_e4m3fn", **sizes)
        assert not said.reasons[backend], said
        for types in (("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn"), (q, "float8_e4m3fn")):
            said = ck.explain(q_dtype=types[0], o_dtype=types[1], **sizes)
            assert any("o_dtype" in reason and backend in reason for reason in said.reasons[backend]), said


@pytest.mark.parametrize(
    "changed,words",
    [
        ({"head_dim_qk": 12}, ["head_dim_qk=12", "multiple of 8"]),
        ({"head_dim_qk": 1024}, ["head_dim_qk=1024", "512"]),
        ({"num_qo_heads": 0}, ["num_qo_heads=0", "positive"]),
        ({"rope_scale": -1.0}, ["rope_scale=-1", "positive"]),
        ({"q": 24}, ["q lies at an address", "16 bytes"]),
        ({"k_st": 60}, ["k lies at an address", "strides"]),
        ({"total_q": 1 << 40}, ["total_q=1099511627776", "split the batch"]),
        ({"dtype": "float32"}, ["dtype=float32", "bfloat16"]),
        ({"q_dtype": "bfloat16"}, ["q_dtype=bfloat16", "float16"]),
        ({"batch_size": 2}, ["qo_indptr and kv_indptr", "single request"]),
        ({"page_size": 4, "num_indices": 3, "qo_indptr": 16, "kv_indptr": 16}, ["indices, last_page_len"]),
    ],
)
def test_contradictions_are_sentences(extension, changed, words):
    from cutlass_kernels import _C

    given: dict[str, Any] = dict(q_dtype="float16", kv_dtype="float16", dtype="float16", num_qo_heads=1, num_kv_heads=1)
    given |= dict(head_dim_qk=64, head_dim_vo=64, batch_size=1, qo_indptr=0, kv_indptr=0, total_q=4, total_kv=4)
    given |= dict(q=32, q_st=64, q_sh=64, k=32, k_st=64, k_sh=64, k_page=0, v=32, v_st=64, v_sh=64, v_page=0)
    given |= dict(indices=0, v_indices=0, last_page_len=0, page_size=0, num_indices=0, num_pages=0, window_left=-1)
    given |= dict(rope_scale=1.0, rope_theta=1e4, q_copy=32, k_copy=32, v_copy=0, tables=0, stream=0)
    with pytest.raises(ValueError) as caught:
        _C.prepare(*(given | changed).values())
    for word in words:
        assert word in str(caught.value)
