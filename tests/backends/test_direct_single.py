"""Direct calls of single requests: what ``_C.single_prefill`` and ``_C.single_decode`` launch, and what they leave to
Python."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from recorded_calls import BF16, CPU, CUDA, E4M3, HALF, Gpu, faults_of_matrix, rows_of, view


class Parameter(torch.nn.Parameter):
    """A subclass, which may stand for another tensor."""


class Text(str):
    """A subclass, too."""


class Number(float):
    """And another."""


def single(dtype: torch.dtype = HALF, **changes: Any) -> dict[str, Any]:
    """Arguments of ``single_prefill`` in their order: all that can lie apart does."""
    arguments = dict(
        q=rows_of(5, 4, 64, dtype=dtype, every=2, wide=64),
        k=rows_of(20, 2, 64, dtype=dtype, every=3),
        v=rows_of(20, 2, 128, dtype=dtype, every=2),
        out=None,
        lse=None,
        sinks=None,
        return_lse=False,
        causal=True,
        kv_layout="NHD",
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        backend="auto",
    )
    assert not changes.keys() - arguments.keys()
    return arguments | changes


def decode(**changes: Any) -> dict[str, Any]:
    return single(q=rows_of(4, 64, every=2), causal=False) | changes


def accepts(gpu: Gpu, **changes: Any) -> bool:
    return gpu.accepts(gpu.module.single_prefill, *single(**changes).values())


# --- what is launched ---


@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_a_call_as_it_is_launched(gpu: Gpu, dtype: torch.dtype) -> None:
    given = single(dtype)
    out = gpu.module.single_prefill(*given.values())
    assert out.shape == (5, 4, 128) and out.dtype == dtype
    launched = gpu.launched()
    for name, want in (
        ("q", view(given["q"])),
        ("k", view(given["k"])),
        ("v", view(given["v"])),
        ("o", view(out)),
        ("lse", (0, 0, 0)),
        ("dtypes", (str(dtype).split(".")[1],) * 3),
        ("heads", (4, 2)),
        ("head_dims", (64, 128)),
        ("batch_size", 1),
        ("totals", (5, 20)),
        ("indptrs", (0, 0)),
        ("causal", True),
        ("window_left", -1),
        ("chunk_size", 0),
        ("scales", (0.125, 0.0, 1.0)),
        ("sinks", 0),
        ("stats", 0),
        ("device", 0),
        ("stream", 64),
    ):
        assert launched[name] == want, name
    assert launched["pages"]["page_size"] == 0
    assert gpu.module.current_device() == 64


def test_every_option_arrives(gpu: Gpu) -> None:
    places = dict(out=rows_of(5, 4, 128, every=2), lse=torch.zeros(4, 6).t()[:5], sinks=torch.zeros(4), return_lse=True)
    numbers = dict(window_left=7, logits_soft_cap=30, sm_scale=0.5, q_scale=1.5, k_scale=2, v_scale=0.25)
    out, lse = gpu.module.single_prefill(*single(causal=False, backend="fa3", **places, **numbers).values())
    assert out is places["out"] and lse is places["lse"] and "empty" not in [name for name, _ in gpu.made]
    launched = gpu.launched()
    assert launched["o"] == view(out) and launched["lse"] == (lse.data_ptr(), 1, 6)
    assert launched["sinks"] == places["sinks"].data_ptr()
    assert launched["causal"] is False and launched["window_left"] == 7
    assert launched["scales"] == (1.5, 30.0, 0.25)
    assert launched["backend"] == "fa3" and launched["tile_counter"] == gpu.module.counters(0, 64).data_ptr()


def test_heads_before_tokens(gpu: Gpu) -> None:
    k, v = rows_of(2, 20, 64, every=3), rows_of(2, 20, 128, every=2)
    gpu.module.single_prefill(*single(k=k, v=v, kv_layout="HND").values())
    launched = gpu.launched()
    assert launched["k"] == view(k.transpose(0, 1)) and launched["v"] == view(v.transpose(0, 1))
    assert launched["heads"] == (4, 2) and launched["totals"] == (5, 20)


@pytest.mark.parametrize("like", [True, False])
def test_new_results(gpu: Gpu, like: bool) -> None:
    """Where the queries are contiguous and as wide as the values, an output is made like them."""
    q, v = torch.zeros(5, 4, 64, dtype=HALF), rows_of(20, 2, 64 if like else 128)
    out, lse = gpu.module.single_prefill(*single(q=q, v=v, return_lse=True).values())
    launched = gpu.launched()
    assert [name for name, _ in gpu.made] == ["empty_like" if like else "empty", "empty"]
    assert out.shape == (5, 4, v.size(2)) and lse.shape == (5, 4) and lse.dtype == torch.float32
    assert launched["o"] == view(out) and launched["lse"] == (lse.data_ptr(), 4, 1)


@pytest.mark.parametrize("q", [rows_of(5, 4, 64, every=2), rows_of(5, 4, 64, wide=8), rows_of(10, 4, 64)[::2]])
def test_no_output_is_like_queries_with_gaps(gpu: Gpu, q: torch.Tensor) -> None:
    out = gpu.module.single_prefill(*single(q=q, v=rows_of(20, 2, 64)).values())
    assert gpu.made[0][0] == "empty" and out.is_contiguous()


def test_decode_as_it_is_launched(gpu: Gpu) -> None:
    given = decode()
    out = gpu.module.single_decode(*given.values())
    launched = gpu.launched()
    assert out.shape == (4, 128) and launched["o"] == (out.data_ptr(), 4 * 128, 128)
    assert launched["q"] == (given["q"].data_ptr(), 4 * 128, 128) and launched["totals"] == (1, 20)
    assert launched["causal"] is False
    places = dict(out=rows_of(4, 128, every=2), lse=torch.zeros(8)[::2], return_lse=True)
    out, lse = gpu.module.single_decode(*decode(**places).values())
    launched = gpu.launched()
    assert out is places["out"] and lse is places["lse"]
    assert launched["o"] == (out.data_ptr(), 4 * 256, 256) and launched["lse"] == (lse.data_ptr(), 4, 2)
    q = torch.zeros(4, 64, dtype=HALF)
    out, lse = gpu.module.single_decode(*decode(q=q, v=rows_of(20, 2, 64), return_lse=True).values())
    assert out.shape == q.shape and lse.shape == (4,)
    assert gpu.launched()["lse"] == (lse.data_ptr(), 4, 1)


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_counters_of_a_call(gpu: Gpu, backend: str) -> None:
    """They are kept for the next call: the tile counter in 16 bytes, and then those of tiles whose keys are split."""
    gpu.module.single_decode(*decode(k=rows_of(5000, 2, 64), v=rows_of(5000, 2, 128), backend=backend).values())
    call, counters = gpu.launched(), gpu.module.counters(0, 64)
    (first, count), end = call["combine_counters"], counters.data_ptr() + counters.nbytes
    assert call["splits"] > 0 and call["partial_o"] > 0
    assert call["tile_counter"] == counters.data_ptr()
    assert first >= counters.data_ptr() + 16 and count > 0 and first + 8 * count == end


def test_no_rows(gpu: Gpu) -> None:
    out = gpu.module.single_prefill(*single(q=torch.zeros(0, 4, 64, dtype=HALF)).values())
    assert out.shape == (0, 4, 128) and not gpu.module.take_launches()


@pytest.mark.parametrize("call", ["single_prefill", "single_decode"])
def test_another_number_of_arguments(gpu: Gpu, call: str) -> None:
    for wrong in (list(single().values())[:-1], [*single().values(), None]):
        with pytest.raises(TypeError, match="number of arguments"):
            getattr(gpu.module, call)(*wrong)


# --- what is accepted ---

SERVED = {
    "as it is": {},
    "no window": dict(window_left=None),
    "any negative window": dict(window_left=-7),
    "window of no keys": dict(window_left=0),
    "numbers": dict(sm_scale=1, logits_soft_cap=0.0, q_scale=-1.0, v_scale=0),
    "sinks": dict(sinks=torch.zeros(4)),
    "parameter": dict(q=torch.nn.Parameter(torch.zeros(5, 4, 64, dtype=HALF), requires_grad=False)),
    "one row": dict(q=rows_of(1, 4, 64)),
    "no keys": dict(k=torch.zeros(0, 2, 64, dtype=HALF), v=torch.zeros(0, 2, 64, dtype=HALF)),
    "heads alone": dict(k=rows_of(20, 4, 64), v=rows_of(20, 4, 64)),
    "lse that is not returned": dict(lse=torch.zeros(5, 4)),
    "fa2": dict(backend="fa2"),
}


@pytest.mark.parametrize("change", SERVED)
def test_what_is_accepted(gpu: Gpu, change: str) -> None:
    assert accepts(gpu, **SERVED[change])


def test_numbers_beyond_what_counts(gpu: Gpu) -> None:
    most = 2**31 - 1024  # no request is longer, and positions a window away are numbers of 32 bits
    for window, launched in ((-7, -1), (0, 0), (2**31 - 1, most), (2**31, most), (2**62, most)):
        gpu.module.single_prefill(*single(window_left=window).values())
        assert gpu.launched()["window_left"] == launched
    gpu.module.single_prefill(*single(logits_soft_cap=-1.0).values())
    assert gpu.launched()["scales"][1] == 0.0


# --- what is left to Python ---

LEFT_TO_PYTHON = {
    "q that is no tensor": dict(q=[1.0]),
    "no k": dict(k=None),
    "v of a subclass": dict(v=Parameter(torch.zeros(20, 2, 128, dtype=HALF), requires_grad=False)),
    "fp32": dict(q=rows_of(5, 4, 64, dtype=torch.float32), k=torch.zeros(20, 2, 64), v=torch.zeros(20, 2, 64)),
    "types that no kernel reads": single(torch.float64),
    "q of another type": dict(q=rows_of(5, 4, 64, dtype=BF16)),
    "k of another type": dict(k=rows_of(20, 2, 64, dtype=BF16)),
    "v of another type": dict(v=rows_of(20, 2, 128, dtype=BF16)),
    "integers for q": single(BF16, q=torch.zeros(5, 4, 64, dtype=torch.int16)),
    "integers for k": single(BF16, k=torch.zeros(20, 2, 64, dtype=torch.int16)),
    "integers for v": dict(v=torch.zeros(20, 2, 128, dtype=torch.int16)),
    "fp8": single(E4M3),
    "fp8 keys": dict(k=rows_of(20, 2, 64, dtype=E4M3), v=rows_of(20, 2, 128, dtype=E4M3)),
    "fewer values": dict(v=rows_of(19, 2, 128)),
    "more heads of v": dict(v=rows_of(20, 4, 128)),
    "other dimension of k": dict(k=rows_of(20, 2, 128)),
    "heads that do not divide": dict(k=rows_of(20, 3, 64), v=rows_of(20, 3, 128)),
    "no query heads": dict(q=torch.zeros(5, 0, 64, dtype=HALF)),
    "no key heads": dict(k=torch.zeros(20, 0, 64, dtype=HALF), v=torch.zeros(20, 0, 128, dtype=HALF)),
    "unknown layout": dict(kv_layout="DHN"),
    "layout that is no text": dict(kv_layout=1),
    "layout of a subclass": dict(kv_layout=Text("NHD")),
    "causal that is no bool": dict(causal=1),
    "no causal": dict(causal=None),
    "window that is no integer": dict(window_left=3.0),
    "window that is a bool": dict(window_left=True),
    "window beyond 64 bits": dict(window_left=2**63),
    "cap that is no number": dict(logits_soft_cap="30"),
    "cap that is not finite": dict(logits_soft_cap=float("nan")),
    "scale that is not finite": dict(sm_scale=float("inf")),
    "scale beyond a double": dict(sm_scale=10**400),
    "scale that is a bool": dict(sm_scale=True),
    "scale of a subclass": dict(sm_scale=Number(1.0)),
    "q_scale in a text": dict(q_scale="1"),
    "k_scale in a tensor": dict(k_scale=torch.ones(1)),
    "v_scale in a tensor": dict(v_scale=torch.ones(1)),
    "list of sinks": dict(sinks=[torch.zeros(4)]),
    "sinks of another type": dict(sinks=torch.zeros(4, dtype=HALF)),
    "sinks of another size": dict(sinks=torch.zeros(2)),
    "sinks that are no vector": dict(sinks=torch.zeros(4, 1)),
    "sinks apart": dict(sinks=torch.zeros(8)[::2]),
    "return_lse that is no bool": dict(return_lse=1),
    "reference": dict(backend="reference"),
    "unknown backend": dict(backend="fa4"),
    "backend that is no text": dict(backend=None),
}
PLACES_LEFT_TO_PYTHON = {
    "lse that is no tensor": dict(lse=[0.0]),
    "lse of another type": dict(lse=torch.zeros(5, 4, dtype=HALF)),
    "lse of other rows": dict(lse=torch.zeros(6, 4)),
    "lse of other heads": dict(lse=torch.zeros(5, 5)),
    "lse of 1 dimension": dict(lse=torch.zeros(5)),
    "lse of 3 dimensions": dict(lse=torch.zeros(5, 4, 1)),
    "heads of lse in one place": dict(lse=torch.zeros(5, 1).expand(5, 4)),
    "rows of lse in one place": dict(lse=torch.zeros(1, 4).expand(5, 4)),
    "out that is no tensor": dict(out=[0.0]),
    "out of another type": dict(out=torch.zeros(5, 4, 128, dtype=BF16)),
    "out of other rows": dict(out=rows_of(6, 4, 128)),
    "out of other heads": dict(out=rows_of(5, 2, 128)),
    "out of another dimension": dict(out=rows_of(5, 4, 64)),
}


@pytest.mark.parametrize("change", LEFT_TO_PYTHON)
def test_what_is_left_to_python(gpu: Gpu, change: str) -> None:
    assert not accepts(gpu, **LEFT_TO_PYTHON[change])


@pytest.mark.parametrize("change", PLACES_LEFT_TO_PYTHON)
def test_places_are_checked_before_memory_is_asked_for(gpu: Gpu, change: str) -> None:
    assert not accepts(gpu, return_lse="lse" not in change, **PLACES_LEFT_TO_PYTHON[change])


@pytest.mark.parametrize(
    "change",
    [
        dict(v=rows_of(20, 2, 512)),
        dict(q=rows_of(5, 4, 60, wide=4), k=rows_of(20, 2, 60, wide=4)),
        dict(sm_scale=1e300),
        dict(v_scale=1e300),
    ],
    ids=["no such head dimension", "no whole vectors", "scale beyond a float", "v_scale beyond a float"],
)
def test_what_no_plan_is_made_for(gpu: Gpu, change: dict[str, Any]) -> None:
    assert not gpu.accepts(gpu.module.single_prefill, *single(**change).values(), planned=True)


MATRICES = {
    "q": single()["q"],
    "k": single()["k"],
    "v": single()["v"],
    "out": rows_of(5, 4, 128, every=2),
}


@pytest.mark.parametrize("fault", faults_of_matrix(MATRICES["q"]))
@pytest.mark.parametrize("name", MATRICES)
def test_tensors_as_no_kernel_reads_them(gpu: Gpu, name: str, fault: str) -> None:
    given = MATRICES[name]
    assert accepts(gpu, **{name: given})
    gpu.tell(given, **faults_of_matrix(given)[fault])
    assert not accepts(gpu, **{name: given})


@pytest.mark.parametrize("at", [0, 1])
def test_limits_of_tensors(gpu: Gpu, at: int) -> None:
    given = single()
    k, v = given["k"], given["v"]
    for most, accepted in ((1 << 30, True), ((1 << 30) + 8, False)):
        strides = (*k.stride()[:at], most, *k.stride()[at + 1 :])
        gpu.tell(k, strides=strides)
        assert gpu.accepts(gpu.module.single_prefill, *given.values()) == accepted
    for tokens, accepted in ((1 << 30, True), ((1 << 30) + 1, False)):
        gpu.tell(k, shape=(tokens, 2, 64))
        gpu.tell(v, shape=(tokens, 2, 128))
        assert gpu.accepts(gpu.module.single_prefill, *given.values()) == accepted


@pytest.mark.parametrize("device", [(CUDA, 1), (CPU, 0)], ids=["another GPU", "the CPU"])
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out", "lse"])
def test_tensors_of_two_devices(gpu: Gpu, name: str, device: tuple[int, int]) -> None:
    given = single(out=rows_of(5, 4, 128), lse=torch.zeros(5, 4), sinks=torch.zeros(4))
    assert gpu.accepts(gpu.module.single_prefill, *given.values())
    gpu.tell(given[name], device=device)
    assert not gpu.accepts(gpu.module.single_prefill, *given.values())


def test_the_device_of_all_tensors(gpu: Gpu) -> None:
    given = single(out=rows_of(5, 4, 128))
    for device, accepted in ((CPU, False), (CUDA, True)):
        for name in ("q", "k", "v", "out"):
            gpu.tell(given[name], device=(device, 3))
        assert (gpu.module.single_prefill(*given.values()) is not None) == accepted
    launched = gpu.launched()
    assert launched["device"] == 3 and launched["stream"] == 67
    assert gpu.module.current_device() == 64


@pytest.mark.parametrize(
    "change",
    [
        dict(q=rows_of(1, 4, 64)),
        dict(q=rows_of(4, 64)[..., None]),
        dict(q=torch.zeros(64, dtype=HALF)),
        dict(q=rows_of(4, 128)[:, ::2]),
        dict(out=rows_of(1, 4, 128)),
        dict(out=rows_of(4, 128)[..., None]),
        dict(out=rows_of(2, 128)),
        dict(out=rows_of(4, 64)),
        dict(out=rows_of(4, 256)[:, ::2]),
        dict(out=rows_of(4, 128, dtype=BF16)),
        dict(out=rows_of(4, 128, wide=4)),
        dict(out=rows_of(1, 128).expand(4, 128)),
        dict(lse=torch.zeros(1, 4)),
        dict(lse=torch.zeros(5)),
        dict(lse=torch.zeros(4, dtype=HALF)),
        dict(lse=torch.zeros(1).expand(4)),
    ],
)
def test_decode_that_is_left_to_python(gpu: Gpu, change: dict[str, Any]) -> None:
    assert gpu.accepts(gpu.module.single_decode, *decode().values())
    assert not gpu.accepts(gpu.module.single_decode, *decode(**change).values())


def test_the_address_of_a_row(gpu: Gpu) -> None:
    given = decode(out=rows_of(4, 128), return_lse=True)
    gpu.tell(given["out"], data=given["out"].data_ptr() + 8)
    assert not gpu.accepts(gpu.module.single_decode, *given.values())


def test_the_default_scale_is_that_of_the_queries(gpu: Gpu) -> None:
    gpu.module.single_prefill(*single(q=rows_of(5, 4, 128), k=rows_of(20, 2, 128), v=rows_of(20, 2, 64)).values())
    assert gpu.launched()["scales"][0] == pytest.approx(1 / math.sqrt(128))
