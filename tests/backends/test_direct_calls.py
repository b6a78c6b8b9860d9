"""What direct calls of every kind launch alike, and leave to Python alike. What differs: test_direct_*.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from direct_calls import (
    CALLS,
    FAR,
    LAYOUTS,
    Direct,
    Parameter,
    attention,
    expect,
    faults,
    fused,
    run,
    single,
    with_places,
)
from recorded_calls import BF16, CPU, CUDA, E4M3, HALF, Gpu, rows_of, view

SINGLE = ["single_prefill", "single_decode"]
PLAIN = [*SINGLE, "run"]  # of q, k and v in tensors of their own


class Text(str):
    """A subclass, which may stand for something else."""


class Number(float):
    """And another."""


# --- what is launched ---


@pytest.mark.parametrize(
    "name,dtype",
    [*((name, HALF) for name in (*PLAIN, "single_prefill of HND", "run of HND")), *((name, BF16) for name in SINGLE)],
)
def test_a_call_as_it_is_launched(gpu: Gpu, name: str, dtype: torch.dtype) -> None:
    call = CALLS[name](gpu)
    if dtype != HALF:
        call.given |= {x: call.given[x].to(dtype) for x in ("q", "k", "v")}
    q, k, v = (call.given[x] for x in "qkv")
    out = call()
    launched = gpu.launched()
    if name == "single_decode":
        assert out.shape == (4, 128)
        q, out = q[None], out[None]
    if name.endswith("HND"):
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    rows, batch = len(q), 2 if "run" in name else 1
    assert out.shape == (rows, 4, 128) and out.dtype == dtype
    expect(
        launched,
        q=(q.data_ptr(), q.size(1) * q.stride(1), q.stride(1)) if rows == 1 else view(q),
        k=view(k),
        v=view(v),
        o=(out.data_ptr(), 4 * 128, 128),
        dtypes=(str(dtype).split(".")[1],) * 3,
        heads=(4, 2),
        head_dims=(64, 128),
        batch_size=batch,
        totals=(rows, len(k)),
        causal=rows > 1,
    )
    assert (launched["indptrs"] == (0, 0)) == (batch == 1)
    assert launched["pages"]["page_size"] == 0
    assert gpu.module.current_device() == 64


@pytest.mark.parametrize("name", PLAIN)
def test_every_option_arrives(gpu: Gpu, name: str) -> None:
    call = with_places(CALLS[name](gpu))
    options = dict(causal=False, window_left=7, logits_soft_cap=30, sm_scale=0.5)
    numbers = dict(q_scale=1.5, k_scale=2, v_scale=0.25, return_lse=True)
    for option, value in (options | numbers | (dict(backend="fa3") if name in SINGLE else {})).items():
        call.given |= call.changes(option, value) or {}
    out, lse = call()
    assert out is call.given["out"] and lse is call.given["lse"] and "empty" not in [made for made, _ in gpu.made]
    launched = gpu.launched()
    o, of_lse = (out[None], lse[None]) if name == "single_decode" else (out, lse)
    assert launched["o"] == (out.data_ptr(), o.size(1) * o.stride(1) if len(o) == 1 else o.stride(0), o.stride(1))
    assert launched["lse"] == (lse.data_ptr(), 4 if len(o) == 1 else of_lse.stride(0), of_lse.stride(1))
    assert launched["sinks"] == call.given["sinks"].data_ptr()
    assert launched["causal"] is False and launched["window_left"] == 7
    assert launched["scales"] == (1.5, 30.0, 0.25)
    if name in SINGLE:
        assert launched["backend"] == "fa3" and launched["tile_counter"] == gpu.module.counters(0, 64).data_ptr()


@pytest.mark.parametrize("name", [*SINGLE, "run", *LAYOUTS[1:]])
def test_new_results(gpu: Gpu, name: str) -> None:
    """Where the queries are contiguous and as wide as the values, an output is made like them."""
    call, n = CALLS[name](gpu), 8 if name == "run" or name in LAYOUTS else 5
    queries = torch.zeros(n, 4, 64), rows_of(n, 4, 64, every=2), rows_of(n, 4, 64, wide=8), rows_of(2 * n, 4, 64)[::2]
    for i, q in enumerate(queries):
        q = (q[0] if name == "single_decode" else q).to(HALF)
        changes: dict[str, Any] = dict(q=q, v=rows_of(20, 2, 64), return_lse=True)
        if name in LAYOUTS:
            others = (rows_of(30, 2, 64),) * 2 if name == "SEPARATE_Q_K_V" else call.given["qkv"][1:]
            changes = dict(qkv=(q, *others))
        elif name == "run":
            call, changes["v"] = run(gpu, dim_vo=64), rows_of(30, 2, 64)
        gpu.made.clear()
        results = call(**changes)
        launched = gpu.launched()
        made = [name for name, _ in gpu.made if name != "zeros"]
        out, *lse = results if isinstance(results, tuple) else (results,)
        assert made == [
            "empty_like" if i == 0 or (q.dim() == 2 and q.is_contiguous()) else "empty",
            *["empty"] * len(lse),
        ]
        assert out.shape == q.shape and out.is_contiguous() and launched["o"] == (out.data_ptr(), 4 * 64, 64)
        for x in lse:
            assert x.shape == q.shape[:-1] and x.dtype == torch.float32 and launched["lse"] == (x.data_ptr(), 4, 1)
        assert len(lse) == (name not in LAYOUTS)
    if name in SINGLE:  # values that are wider than the queries
        gpu.made.clear()
        assert call(q=queries[0][0 if name == "single_decode" else ...].to(HALF)) is gpu.made[0][1]
        assert gpu.made[0][0] == "empty"


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_counters_of_a_call(gpu: Gpu, backend: str) -> None:
    """They are kept for the next call: the tile counter in 16 bytes, and then those of tiles whose keys are split."""
    call = single(gpu, decode=True, k=rows_of(5000, 2, 64), v=rows_of(5000, 2, 128), backend=backend).launched()
    counters = gpu.module.counters(0, 64)
    (first, count), end = call["combine_counters"], counters.data_ptr() + counters.nbytes
    assert call["splits"] > 0 and call["partial_o"] > 0
    assert call["tile_counter"] == counters.data_ptr()
    assert first >= counters.data_ptr() + 16 and count > 0 and first + 8 * count == end


def test_no_rows(gpu: Gpu) -> None:
    out = single(gpu)(q=torch.zeros(0, 4, 64, dtype=HALF))
    assert out.shape == (0, 4, 128) and not gpu.module.take_launches()


def test_the_default_scale_is_that_of_the_queries(gpu: Gpu) -> None:
    launched = single(gpu, q=rows_of(5, 4, 128), k=rows_of(20, 2, 128), v=rows_of(20, 2, 64)).launched()
    assert launched["scales"][0] == pytest.approx(1 / math.sqrt(128))


def test_numbers_beyond_what_counts(gpu: Gpu) -> None:
    most = 2**31 - 1024  # no request is longer, and positions a window away are numbers of 32 bits
    for window, launched in ((-7, -1), (0, 0), (2**31 - 1, most), (2**31, most), (2**62, most)):
        assert single(gpu).launched(window_left=window)["window_left"] == launched
    assert single(gpu).launched(logits_soft_cap=-1.0)["scales"][1] == 0.0
    assert fused(gpu, LAYOUTS[4]).launched(logits_soft_cap_scale=-1.0)["scales"][1] == 0.0


@pytest.mark.parametrize("name", CALLS)
def test_the_device_of_all_tensors(gpu: Gpu, name: str) -> None:
    call = with_places(CALLS[name](gpu))
    for device, accepted in ((CPU, False), (CUDA, "run" not in name)):  # a run is on the device of its plan
        for _, x, _ in call.tensors():
            gpu.tell(x, device=(device, 3))
        assert (call() is not None) == accepted
    for launched in gpu.module.take_launches():
        assert launched["device"] == 3 and launched["stream"] == 67
    assert gpu.module.current_device() == 64


# --- tensors that are left to Python ---

_APART = ("longer 0", "shorter 0", "none 0", "in one place 1", "reverse 1", "far 1", "longer 2", "shorter 2")
ACCEPTED = {  # of tensors that are more than one: other tokens or pages, distances of both, and head counts
    "PACKED_QKV qkv": {str(E4M3), "in one place 1", "reverse 1", "far 1"},
    "CONTIGUOUS_Q_KV qkv[1]": {*_APART},
    **{f"{layout} qkv[1]": {*_APART, "longer 3", "shorter 3"} for layout in LAYOUTS[3:]},
    "kv_indices": {"longer 0", "shorter 0", "none 0"},
    "block_tables": {"unaligned 0", "shorter 1", "none 1"},
    "page_table": {"unaligned 0", "shorter 1", "none 1"},
    "kv_indices_per_token": {"unaligned 0", "shorter 2", "none 2"}
    | {f"{fault} 1" for fault in ("in one place", "reverse", "unaligned", "far")},
    "lse": {f"{fault} {d}" for fault in ("unaligned", "far") for d in (0, 1)},
}
OPTIONAL = {"out", "lse", "sinks", "seqused_q", "topk_length", "max_logits"}


@pytest.mark.parametrize("name", CALLS)
def test_tensors_that_are_left_to_python(gpu: Gpu, name: str) -> None:
    call = with_places(CALLS[name](gpu))
    assert call.accepts()
    for argument, x, replaced in call.tensors():
        accepted = ACCEPTED.get(f"{name} {argument}", ACCEPTED.get(argument, set()))
        is_matrix = argument in ("q", "q_rope", "k_rope", "out") or (argument[0] in "kvq" and "_" not in argument)
        for fault, facts in faults(x):
            gpu.tell(x, **facts)
            wanted = fault in accepted or (fault == "address" and not is_matrix)
            assert call.accepts(planned=True) == wanted, (argument, fault)
            gpu.tell(x)
        for other in ([x], 1.0, Parameter(x, requires_grad=False)):
            assert not call.accepts(**replaced(other)), (argument, other)
        optional = argument in OPTIONAL or (name, argument) == ("attention, dense", "seqused_k")
        assert call.accepts(**replaced(None)) == optional, argument


@pytest.mark.parametrize("name", CALLS)
def test_queries_of_another_rank_make_no_output(gpu: Gpu, name: str) -> None:
    call = CALLS[name](gpu)
    _, q, _ = next(iter(call.tensors()))
    for fault, facts in faults(q):
        if "dimension" in fault:
            gpu.tell(q, **facts)
            assert not call.accepts(), fault
            gpu.tell(q)


@pytest.mark.parametrize("name", CALLS)
def test_places_are_checked_before_memory_is_asked_for(gpu: Gpu, name: str) -> None:
    call = with_places(CALLS[name](gpu))
    places = {place: call.given[place] for place in ("out", "lse") if place in call.given}
    call.given |= {"return_lse": True} if "return_lse" in call.given else {}
    for place, x in places.items():
        call.given |= dict.fromkeys(places) | {place: x}
        for fault, facts in faults(x):
            gpu.tell(x, **facts)
            of_dtype = "attention" in name and fault.startswith("torch.")  # any, as far as the plan can make it
            is_read = place == "lse" and fault in {*ACCEPTED["lse"], "address"}
            assert call.accepts(planned=of_dtype) == is_read, (place, fault)
            gpu.tell(x)


def of_one_type(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return dict(q=rows_of(5, 4, 64, dtype=dtype), k=rows_of(20, 2, 64, dtype=dtype), v=rows_of(20, 2, 128, dtype=dtype))


@pytest.mark.parametrize(
    "changes",
    [
        *(of_one_type(dtype) for dtype in (torch.float32, torch.float64, torch.int16, E4M3)),
        dict(k=rows_of(20, 2, 64, dtype=E4M3), v=rows_of(20, 2, 128, dtype=E4M3)),
        dict(k=rows_of(20, 3, 64), v=rows_of(20, 3, 128)),  # heads that do not divide
        dict(q=torch.zeros(5, 0, 64, dtype=HALF)),
        dict(k=torch.zeros(20, 0, 64, dtype=HALF), v=torch.zeros(20, 0, 128, dtype=HALF)),
    ],
)
def test_tensors_together_that_are_left_to_python(gpu: Gpu, changes: dict[str, Any]) -> None:
    assert not single(gpu).accepts(**changes)


def test_dense_keys_that_are_left_to_python(gpu: Gpu) -> None:
    call = attention(gpu, "dense")
    apart = torch.zeros(2, 18, 2, 64, dtype=HALF)[:, :15]
    assert call.accepts(k=apart, v=apart)
    longer = torch.zeros(2, 17, 2, 64, dtype=HALF)[:, :16]  # as many rows in all
    assert not call.accepts(k=apart) and not call.accepts(k=apart, v=longer)
    assert not call.accepts(k=rows_of(3, 15, 2, 64), v=rows_of(3, 15, 2, 64))


@pytest.mark.parametrize("at", [0, 1])
def test_limits_of_tensors(gpu: Gpu, at: int) -> None:
    call = single(gpu)
    k, v = call.given["k"], call.given["v"]
    for most, accepted in ((FAR, True), (FAR + 8, False)):
        gpu.tell(k, strides=(*k.stride()[:at], most, *k.stride()[at + 1 :]))
        assert call.accepts() == accepted
    for tokens, accepted in ((FAR, True), (FAR + 1, False)):
        gpu.tell(k, shape=(tokens, 2, 64))
        gpu.tell(v, shape=(tokens, 2, 128))
        assert call.accepts() == accepted


# --- options ---

ONE = torch.ones(1)
RIGHT: dict[str, list[Any]] = dict(
    window_left=[None, -7, 0],
    logits_soft_cap=[0.0, -1.0, 30],
    sm_scale=[1, None],
    q_scale=[-1.0],
    v_scale=[0],
    return_lse=[True],
    backend=["fa2", "fa3"],
    window=[(-1, -1), [3, -1], (2**40, 2**40)],
    num_splits=[3],
    lse_base=[2, 2.0, math.e],
    lse_heads_first=[True],
    batch_invariant=[True],
    q_descale=[2, ONE, torch.ones(2, 4), torch.ones(1, 2), torch.ones(2), torch.ones(())],
    o_dtype=[HALF],
)
WRONG: dict[str, list[Any]] = dict(
    causal=[1, None],
    kv_layout=["DHN", 1, Text("NHD")],
    window_left=[3.0, True, 2**63],
    logits_soft_cap=["30", math.nan],
    sm_scale=[math.inf, 10**400, True, Number(1.0), ONE],
    q_scale=["1", ONE],
    k_scale=["1", ONE],
    v_scale=["1", ONE],
    return_lse=[1],
    backend=["reference", "fa4", None],
    pos_encoding_mode=["ROPE_LLAMA"],
    input_layout=["Q_K_V", None],
    max_q_len=[21, 0, 5.0],
    max_kv_len=[20.0],
    bmm1_scale=[None, ONE, "1"],
    bmm2_scale=[None, ONE, "1"],
    batch_size=[2.0, 0, 3],
    out_dtype=["float16", BF16],
    logits_soft_cap_scale=["30"],
    mask_mode=["CAUSAL", "prefix"],
    chunked_attention_size=[3, -(2**63), 4.0],
    save_softmax_stats=[1],
    skip_softmax_threshold_scale_factor=[-1.0, "900"],
    window=[None, 3, (3,), (3.0, 1), (1, 2, 3)],
    chunk_size=[-1, 4.0],
    num_splits=[-1, 1.5],
    lse_base=[10, None, "2"],
    lse_heads_first=[None, 1],
    flash_mla_lse=[None, 1],
    batch_invariant=[None, 1],
    q_descale=["1", ONE.half(), torch.ones(3), torch.ones(3, 2), torch.ones(2, 4, 1)],
    o_dtype=["half", torch.int32],
    max_seqlen_k=[1.0],
    kv_shard=[[2, 0, 16], (2, 2, 16), (2, -1, 16), (2, 0, 0), (2, 0), (2.0, 0, 16)],
)


@pytest.mark.parametrize("name", CALLS)
def test_options(gpu: Gpu, name: str) -> None:
    call = CALLS[name](gpu)
    for accepted, options in ((True, RIGHT), (False, WRONG)):
        for option, values in options.items():
            for value in values:
                changes = call.changes(option, value)
                if changes is None or (accepted and "latent" in name):
                    continue
                assert call.accepts(**changes, planned=accepted) == accepted, (option, value)


@pytest.mark.parametrize(
    "change",
    [
        dict(q=torch.nn.Parameter(torch.zeros(5, 4, 64, dtype=HALF), requires_grad=False)),
        dict(q=rows_of(1, 4, 64)),
        dict(k=torch.zeros(0, 2, 64, dtype=HALF), v=torch.zeros(0, 2, 64, dtype=HALF)),
        dict(k=rows_of(20, 4, 64), v=rows_of(20, 4, 64)),
        dict(lse=torch.zeros(5, 4)),  # which is not returned
    ],
)
def test_what_is_accepted(gpu: Gpu, change: dict[str, Any]) -> None:
    assert single(gpu).accepts(**change)


@pytest.mark.parametrize("option", ["sm_scale", "v_scale", "bmm1_scale", "bmm2_scale"])
@pytest.mark.parametrize("name", [*PLAIN, "SEPARATE_Q_K_V"])
def test_scales_beyond_a_float_have_no_plan(gpu: Gpu, name: str, option: str) -> None:
    call = CALLS[name](gpu)
    changes = call.changes(option, 1e300)
    assert changes is None or not call.accepts(**changes, planned=True)


def test_heads_that_no_plan_is_made_for(gpu: Gpu) -> None:
    for change in (
        dict(v=rows_of(20, 2, 512)),
        dict(q=rows_of(5, 4, 60, wide=4), k=rows_of(20, 2, 60, wide=4)),
    ):
        assert not single(gpu).accepts(**change, planned=True)


@pytest.mark.parametrize("name", CALLS)
def test_another_number_of_arguments(gpu: Gpu, name: str) -> None:
    call: Direct = CALLS[name](gpu)
    for wrong in (list(call.given.values())[:-1], [*call.given.values(), None]):
        with pytest.raises(TypeError, match=r"number of arguments|other arguments"):
            call.function(*wrong)


def test_a_run_is_described_by_its_options(gpu: Gpu) -> None:
    call = run(gpu)
    for name in ("causal", "pos_encoding_mode", "window_left", "logits_soft_cap", "sm_scale"):
        options = call.given["options"]
        fewer = type(options)(**{other: x for other, x in vars(options).items() if other != name})
        with pytest.raises(AttributeError, match=name):
            call(options=fewer)
