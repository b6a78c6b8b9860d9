"""Direct calls (``_native``): they take what a kernel takes and nothing else, and compute what other calls compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch
from public_calls import ATTENTION, public_call, several

import cutlass_kernels as ck
from cutlass_kernels import _native, _select

HALF, E4M3, INTS = torch.float16, torch.float8_e4m3fn, torch.int32


class Elsewhere(torch.nn.Parameter):
    """A tensor of another device, for :func:`on_a_gpu`."""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """CPU tensors are read as those of a GPU, but for those whose ids are in the set: what is accepted then fails,
    as there is no such GPU."""
    if _native._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, what is accepted would run on addresses of the CPU")
    elsewhere: set[int] = set()

    def facts(x: torch.Tensor) -> Any:
        found = _native._facts(x)
        return found and (found[0], 2, int(id(x) in elsewhere), *found[3:])

    described: list[Any] = []
    monkeypatch.setattr(_native._C, "use_torch", lambda api, functions: described.append(functions))
    _native._describe_torch()
    monkeypatch.undo()
    functions = described[0] | {
        "facts": facts,
        "device": lambda *index: "cpu",
        "stream_of": lambda index: 0,
    }
    _native._C.use_torch(None, functions)
    yield elsewhere
    _native._describe_torch()


def is_accepted(call: Callable[..., Any], arguments: dict[str, Any]) -> bool:
    """Whether a direct call goes as far as to ask for the GPU."""
    try:
        assert call(*arguments.values()) is None
    except RuntimeError as error:
        assert "GPU failed" in str(error)
        return True
    return False


def single(rows: int = 5, keys: int = 20, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (64, 64)) -> dict:
    return dict(
        q=torch.zeros(rows, heads[0], dims[0], dtype=HALF),
        k=torch.zeros(keys, heads[1], dims[0], dtype=HALF),
        v=torch.zeros(keys, heads[1], dims[1], dtype=HALF),
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


def strided(*shape: int, by: int) -> torch.Tensor:
    """A float16 tensor whose last dimension but one is a slice of a larger one."""
    return torch.zeros(*shape[:-2], shape[-2] * by, shape[-1], dtype=HALF)[..., ::by, :]


def shifted(*shape: int) -> torch.Tensor:
    """A float16 tensor that begins 8 bytes behind a multiple of 16."""
    count = 1
    for size in shape:
        count *= size
    whole = torch.zeros(count + 8, dtype=HALF)
    return whole[(-(whole.data_ptr() // 2) % 8) + 4 :][:count].view(shape)


SERVED = {
    "as it is": {},
    "no mask": dict(causal=False),
    "window": dict(window_left=7),
    "no window": dict(window_left=None),
    "numbers": dict(sm_scale=0.5, logits_soft_cap=30, k_scale=2, v_scale=0.25, q_scale=1.5),
    "sinks": dict(sinks=torch.zeros(4)),
    "HND": dict(kv_layout="HND", k=torch.zeros(2, 20, 64, dtype=HALF), v=torch.zeros(2, 20, 64, dtype=HALF)),
    "other values": single(dims=(128, 64)),
    "slices": dict(q=strided(5, 4, 64, by=2)),
    "places": dict(out=torch.zeros(5, 4, 64, dtype=HALF), lse=torch.zeros(5, 4), return_lse=True),
    "transposed LSE": dict(lse=torch.zeros(4, 5).t(), return_lse=True),
    "new LSE": dict(return_lse=True),
    "one row": single(rows=1),
    "no keys": single(keys=0) | dict(k=torch.zeros(0, 2, 64, dtype=HALF), v=torch.zeros(0, 2, 64, dtype=HALF)),
    "fa2": dict(backend="fa2"),
    "fa3": dict(backend="fa3"),
}
LEFT_TO_PYTHON = {
    "no tensor": dict(q=[1.0]),
    "None": dict(k=None),
    "subclass": dict(v=Elsewhere(torch.zeros(20, 2, 64, dtype=HALF), requires_grad=False)),
    "fp32": dict(q=torch.zeros(5, 4, 64), k=torch.zeros(20, 2, 64), v=torch.zeros(20, 2, 64)),
    "other k": dict(k=torch.zeros(20, 2, 64, dtype=torch.bfloat16)),
    "other v": dict(v=torch.zeros(20, 2, 64, dtype=torch.bfloat16)),
    "fp8 keys": dict(k=torch.zeros(20, 2, 64).to(E4M3), v=torch.zeros(20, 2, 64).to(E4M3)),
    "q of 2 dimensions": dict(q=torch.zeros(4, 64, dtype=HALF)),
    "q of 4 dimensions": dict(q=torch.zeros(1, 5, 4, 64, dtype=HALF)),
    "k of 4 dimensions": dict(k=torch.zeros(1, 20, 2, 64, dtype=HALF)),
    "v of 2 dimensions": dict(v=torch.zeros(20, 64, dtype=HALF)),
    "fewer values": dict(v=torch.zeros(19, 2, 64, dtype=HALF)),
    "more heads of v": dict(v=torch.zeros(20, 4, 64, dtype=HALF)),
    "other dimension of k": dict(k=torch.zeros(20, 2, 128, dtype=HALF)),
    "heads that do not divide": dict(k=torch.zeros(20, 3, 64, dtype=HALF), v=torch.zeros(20, 3, 64, dtype=HALF)),
    "no heads": dict(q=torch.zeros(5, 0, 64, dtype=HALF)),
    "HND taken for NHD": dict(k=torch.zeros(2, 20, 64, dtype=HALF)),
    "unknown layout": dict(kv_layout="DHN"),
    "layout that is no text": dict(kv_layout=1),
    "last dimension of k": dict(k=torch.zeros(20, 2, 128, dtype=HALF)[..., ::2]),
    "last dimension of q": dict(q=torch.zeros(5, 4, 128, dtype=HALF)[..., ::2]),
    "address of q": dict(q=shifted(5, 4, 64)),
    "address of k": dict(k=shifted(20, 2, 64)),
    "address of v": dict(v=shifted(20, 2, 64)),
    "strides of q": dict(q=torch.zeros(5, 4, 68, dtype=HALF)[..., :64]),
    "broadcast heads": dict(k=torch.zeros(20, 1, 64, dtype=HALF).expand(20, 2, 64)),
    "causal that is no bool": dict(causal=1),
    "window that is no integer": dict(window_left=3.0),
    "window that is a bool": dict(window_left=True),
    "cap that is no number": dict(logits_soft_cap="30"),
    "cap that is not finite": dict(logits_soft_cap=float("nan")),
    "scale that is not finite": dict(sm_scale=float("inf")),
    "huge scale": dict(sm_scale=10**400),
    "scale in a tensor": dict(k_scale=torch.ones(1)),
    "v_scale in a tensor": dict(v_scale=torch.ones(1)),
    "q_scale in a text": dict(q_scale="1"),
    "sinks of another type": dict(sinks=torch.zeros(4, dtype=HALF)),
    "sinks of another size": dict(sinks=torch.zeros(2)),
    "sinks that are no vector": dict(sinks=torch.zeros(4, 1)),
    "sinks apart": dict(sinks=torch.zeros(8)[::2]),
    "list of sinks": dict(sinks=[torch.zeros(4)]),
    "out of another type": dict(out=torch.zeros(5, 4, 64)),
    "out of another size": dict(out=torch.zeros(6, 4, 64, dtype=HALF)),
    "out of other heads": dict(out=torch.zeros(5, 2, 64, dtype=HALF)),
    "out of another dimension": dict(out=torch.zeros(5, 4, 128, dtype=HALF)),
    "out of 2 dimensions": dict(out=torch.zeros(5, 256, dtype=HALF)),
    "address of out": dict(out=shifted(5, 4, 64)),
    "lse of another type": dict(lse=torch.zeros(5, 4, dtype=HALF)),
    "lse of another size": dict(lse=torch.zeros(4, 5)),
    "lse of 3 dimensions": dict(lse=torch.zeros(5, 4, 1)),
    "lse in one place": dict(lse=torch.zeros(5, 1).expand(5, 4)),
    "return_lse that is no bool": dict(return_lse=1),
    "reference": dict(backend="reference"),
    "unknown backend": dict(backend="fa4"),
    "backend that is no text": dict(backend=None),
}


@pytest.mark.parametrize("change", SERVED)
def test_single_is_accepted(on_a_gpu: set[int], change: str) -> None:
    assert is_accepted(_native.single_prefill, single() | SERVED[change])


@pytest.mark.parametrize("change", LEFT_TO_PYTHON)
def test_single_is_left_to_python(on_a_gpu: set[int], change: str) -> None:
    assert not is_accepted(_native.single_prefill, single() | LEFT_TO_PYTHON[change])


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "out", "lse"])
def test_single_on_two_gpus_is_left_to_python(on_a_gpu: set[int], name: str) -> None:
    places = dict(out=torch.zeros(5, 4, 64, dtype=HALF), lse=torch.zeros(5, 4), sinks=torch.zeros(4))
    arguments = single() | places
    assert is_accepted(_native.single_prefill, arguments)
    on_a_gpu.add(id(arguments[name]))
    assert not is_accepted(_native.single_prefill, arguments)


def test_single_on_the_cpu_is_left_to_python() -> None:
    assert _native.single_prefill(*single().values()) is None


def test_decode(on_a_gpu: set[int]) -> None:
    arguments = single(rows=1)
    arguments |= dict(q=arguments["q"][0], causal=False)
    places = dict(out=torch.zeros(4, 64, dtype=HALF), lse=torch.zeros(4), return_lse=True)
    for served in ({}, places, dict(return_lse=True)):
        assert is_accepted(_native.single_decode, arguments | served)
    for wrong in (
        dict(q=single()["q"]),
        dict(out=torch.zeros(1, 4, 64, dtype=HALF)),
        dict(out=torch.zeros(2, 64, dtype=HALF)),
        dict(out=torch.zeros(4, 128, dtype=HALF)[:, ::2]),
        dict(lse=torch.zeros(1, 4)),
        dict(lse=torch.zeros(5)),
        dict(lse=torch.zeros(1).expand(4)),
    ):
        assert not is_accepted(_native.single_decode, arguments | wrong)


# --- the fused prefill ---


def fused(layout: str, dtype: torch.dtype = HALF, page: int = 16, **changes: Any) -> dict[str, Any]:
    q = torch.zeros(8, 4, 64).to(dtype)
    pages = {"HND": (2, page), "NHD": (page, 2)}.get(layout[-3:], ())
    pool = torch.zeros(10, 2, *pages, 64).to(dtype)
    qkv = {
        "PACKED_QKV": torch.zeros(8, 3, 4, 64).to(dtype),
        "CONTIGUOUS_Q_KV": (q, torch.zeros(30, 2, 2, 64).to(dtype)),
        "SEPARATE_Q_K_V": (q, *(torch.zeros(30, 2, 64).to(dtype) for _ in range(2))),
        "Q_PAGED_KV_HND": (q, pool),
        "Q_PAGED_KV_NHD": (q, pool),
    }[layout]
    arguments = dict(
        qkv=qkv,
        input_layout=layout,
        max_q_len=8,
        max_kv_len=8 if layout == "PACKED_QKV" else 20,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
        batch_size=2,
        cum_seq_lens_q=torch.tensor([0, 5, 8], dtype=torch.int32),
        cum_seq_lens_kv=torch.tensor([0, 20, 30], dtype=torch.int32),
        block_tables=torch.zeros(2, 3, dtype=torch.int32) if layout.startswith("Q_PAGED") else None,
        out=None,
        out_dtype=None,
        sinks=None,
        logits_soft_cap_scale=None,
        mask_mode="causal",
        window_left=-1,
        chunked_attention_size=0,
        save_softmax_stats=False,
        skip_softmax_threshold_scale_factor=0,
        backend="auto",
    )
    return arguments | changes


FUSED_LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"]
FUSED_SERVED = {
    "as it is": {},
    "padding": dict(mask_mode="padding"),
    "window": dict(mask_mode="sliding_window", window_left=0),
    "causal window": dict(window_left=9),
    "chunks": dict(mask_mode="chunked", chunked_attention_size=32),
    "default scale": dict(bmm1_scale=0),
    "cap": dict(logits_soft_cap_scale=30.0),
    "skipping": dict(skip_softmax_threshold_scale_factor=900.0),
    "statistics": dict(save_softmax_stats=True),
    "sinks": dict(sinks=torch.zeros(4)),
    "out": dict(out=torch.zeros(8, 4, 64, dtype=HALF)),
    "out_dtype": dict(out_dtype=HALF),
}
FUSED_LEFT = {
    "unknown layout": dict(input_layout="Q_K_V"),
    "longer queries than keys": dict(max_q_len=21),
    "no bound": dict(max_q_len=0),
    "bound in a float": dict(max_kv_len=20.0),
    "bmm1_scale in a tensor": dict(bmm1_scale=torch.ones(1)),
    "bmm2_scale in a tensor": dict(bmm2_scale=torch.ones(1)),
    "no scale": dict(bmm1_scale=None),
    "no requests": dict(batch_size=0),
    "other batch": dict(batch_size=3),
    "int64 offsets": dict(cum_seq_lens_q=torch.zeros(3, dtype=torch.int64)),
    "int64 offsets of keys": dict(cum_seq_lens_kv=torch.zeros(3, dtype=torch.int64)),
    "offsets apart": dict(cum_seq_lens_kv=torch.zeros(6, dtype=INTS)[::2]),
    "no offsets": dict(cum_seq_lens_q=None),
    "text": dict(out_dtype="float16"),
    "another type": dict(out_dtype=torch.bfloat16),
    "out of another type": dict(out=torch.zeros(8, 4, 64, dtype=torch.bfloat16)),
    "upper case": dict(mask_mode="CAUSAL"),
    "unknown mask": dict(mask_mode="prefix"),
    "padding in a window": dict(mask_mode="padding", window_left=3),
    "padding in chunks": dict(mask_mode="padding", chunked_attention_size=4),
    "chunks of no size": dict(mask_mode="chunked"),
    "chunks of 3": dict(chunked_attention_size=3),
    "chunks below 0": dict(chunked_attention_size=-4),
    "window and chunks": dict(window_left=3, chunked_attention_size=4),
    "window in a float": dict(window_left=3.0),
    "negative skipping": dict(skip_softmax_threshold_scale_factor=-1.0),
    "statistics in a number": dict(save_softmax_stats=1),
    "list of sinks": dict(sinks=[torch.zeros(4)]),
    "backend": dict(backend="reference"),
}


@pytest.mark.parametrize("layout", FUSED_LAYOUTS)
@pytest.mark.parametrize("change", FUSED_SERVED)
def test_fused_is_accepted(on_a_gpu: set[int], layout: str, change: str) -> None:
    assert is_accepted(_native.fused_prefill, fused(layout) | FUSED_SERVED[change])


@pytest.mark.parametrize("layout", FUSED_LAYOUTS)
@pytest.mark.parametrize("change", FUSED_LEFT)
def test_fused_is_left_to_python(on_a_gpu: set[int], layout: str, change: str) -> None:
    assert not is_accepted(_native.fused_prefill, fused(layout) | FUSED_LEFT[change])


def test_tensors_of_layouts(on_a_gpu: set[int]) -> None:
    ok = lambda **changes: is_accepted(_native.fused_prefill, fused(**changes))  # noqa: E731
    q, zeros = torch.zeros(8, 4, 64, dtype=HALF), lambda *shape: torch.zeros(*shape, dtype=HALF)
    assert not ok(layout="PACKED_QKV", max_kv_len=9)
    assert not ok(layout="PACKED_QKV", qkv=zeros(8, 2, 4, 64))
    assert not ok(layout="PACKED_QKV", qkv=(q, q, q))
    assert not ok(layout="CONTIGUOUS_Q_KV", qkv=(q, zeros(30, 3, 2, 64)))
    assert not ok(layout="CONTIGUOUS_Q_KV", qkv=(q, zeros(30, 2, 3, 64)))
    assert not ok(layout="CONTIGUOUS_Q_KV", qkv=(q, zeros(30, 2, 2, 128)))
    assert not ok(layout="CONTIGUOUS_Q_KV", qkv=(q, zeros(30, 2, 2, 64).bfloat16()))
    assert not ok(layout="CONTIGUOUS_Q_KV", block_tables=torch.zeros(2, 3, dtype=INTS))
    assert not ok(layout="SEPARATE_Q_K_V", qkv=(q, zeros(30, 2, 64), zeros(29, 2, 64)))
    assert not ok(layout="SEPARATE_Q_K_V", qkv=(q, zeros(30, 2, 64), zeros(30, 4, 64)))
    assert not ok(layout="SEPARATE_Q_K_V", qkv=(q, zeros(30, 2, 64)))
    assert ok(layout="SEPARATE_Q_K_V", qkv=(q, zeros(30, 2, 64), zeros(30, 2, 128)))
    assert not ok(layout="Q_PAGED_KV_NHD", qkv=(q, zeros(10, 16, 2, 64)))
    assert not ok(layout="Q_PAGED_KV_NHD", qkv=[q, zeros(10, 2, 16, 2, 64)])
    assert not ok(layout="Q_PAGED_KV_NHD", qkv=(q, zeros(10, 3, 16, 2, 64)))
    for tables in (None, torch.zeros(3, 3, dtype=INTS), torch.zeros(2, 3), torch.zeros(2, 2, 3, dtype=INTS)):
        assert not ok(layout="Q_PAGED_KV_NHD", block_tables=tables)
    assert not ok(layout="Q_PAGED_KV_NHD", block_tables=torch.zeros(3, 2, dtype=INTS).t())
    assert not ok(layout="Q_PAGED_KV_NHD", block_tables=torch.zeros(1, 3, dtype=INTS).expand(2, 3))
    assert ok(layout="Q_PAGED_KV_NHD", block_tables=torch.zeros(2, 8, dtype=INTS)[:, :3])


def test_separate_caches(on_a_gpu: set[int]) -> None:
    q, whole = torch.zeros(8, 4, 64, dtype=HALF), torch.zeros(24, 16, 2, 64, dtype=HALF)
    tables = torch.zeros(2, 2, 3, dtype=INTS)
    ok = lambda k, v, tables: is_accepted(  # noqa: E731
        _native.fused_prefill, fused("Q_PAGED_KV_NHD", qkv=(q, (k, v)), block_tables=tables)
    )
    assert ok(whole[:10], whole[10:20], tables)
    assert not ok(whole[:10], whole[10:20], tables[:, 0])
    assert not ok(whole[10:20], whole[:10], tables)
    assert not ok(whole[:10], whole[10:21], tables)
    assert not ok(whole[:10], whole.view(-1)[10 * 2048 + 8 :][: 10 * 2048].view(10, 16, 2, 64), tables)
    assert not ok(whole[:20:2], whole[1:20:2], tables)
    assert not ok(whole[:10], torch.zeros(10, 16, 2, 128, dtype=HALF), tables)


def test_fp8_of_the_fused_prefill(on_a_gpu: set[int]) -> None:
    for layout in FUSED_LAYOUTS:
        for wanted in ({}, dict(out_dtype=HALF), dict(out_dtype=torch.bfloat16)):
            assert is_accepted(_native.fused_prefill, fused(layout, E4M3, **wanted))
        assert not is_accepted(_native.fused_prefill, fused(layout, E4M3, out_dtype=torch.float32))
    assert not is_accepted(_native.fused_prefill, fused("Q_PAGED_KV_NHD", E4M3, page=12))
    assert is_accepted(_native.fused_prefill, fused("Q_PAGED_KV_NHD", page=12))


# --- on a GPU ---


def general(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves every call to Python."""
    for name in ("single_prefill", "single_decode", "fused_prefill"):
        monkeypatch.setattr(_native, name, _native.not_direct)
    monkeypatch.setattr(_native, "direct_run", lambda description: _native.not_direct)


@pytest.mark.gpu
@pytest.mark.usefixtures("the_targets_backend")
@pytest.mark.parametrize("name", ATTENTION)
def test_direct_calls_compute_what_others_compute(target, name, monkeypatch):
    if target.is_reference:
        pytest.skip("the reference is never called directly")
    call = public_call(name, target)
    results = [call() for _ in range(2)]
    with monkeypatch.context() as patched:
        general(patched)
        results.append(public_call(name, target).run(*call.tensors))
    for other in results[1:]:
        for a, b in zip(results[0], several(other)):
            assert_bitwise(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["single", "decode", "ragged", "paged", "pair", "HND"])
def test_usual_calls_are_direct(target, kind, monkeypatch):
    if target.is_reference:
        pytest.skip("the reference is never called directly")
    batch = make_batch([5, 3], [20, 33], 4, 2, 64, device=target.device)
    sinks = torch.randn(4, device=target.device)
    one = make_batch([9], [33], 4, 2, 64, device=target.device)
    if kind == "single":
        run = lambda **more: ck.single_prefill_with_kv_cache(one.q, one.k, one.v, backend=target.backend, **more)  # noqa: E731
    elif kind == "decode":
        run = lambda **more: ck.single_decode_with_kv_cache(one.q[0], one.k, one.v, backend=target.backend, **more)  # noqa: E731
    elif kind == "ragged":
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, causal=True)
        run = lambda **more: wrapper.run(batch.q, batch.k, batch.v, **more)  # noqa: E731
    else:
        layout, form = ("HND", "stacked") if kind == "HND" else ("NHD", "tuple" if kind == "pair" else "stacked")
        paged = batch.paged(16, layout, form)
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), layout, backend=target.backend)
        wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 16, causal=True)
        run = lambda **more: wrapper.run(batch.q, paged.cache, **more)  # noqa: E731
    given = [dict(), dict(return_lse=True), dict(sinks=sinks, return_lse=True), dict(k_scale=0.5, v_scale=2.0)]
    with monkeypatch.context() as patched:
        general(patched)
        want = [several(run(**more)) for more in given]
    if kind not in ("single", "decode"):
        wrapper._plan_info.direct = None
    monkeypatch.setattr(_select, "compute", lambda *args: pytest.fail("the call was left to Python"))
    for more, results in zip(given, want):
        for a, b in zip(several(run(**more)), results):
            assert_bitwise(a, b)
