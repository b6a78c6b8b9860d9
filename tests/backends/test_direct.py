"""Direct calls (``native``) compute what other calls compute. What they take: test_direct_*.py."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise
from problems import make_batch
from registry import Data, each, several

import cutlass_kernels as ck
from cutlass_kernels._compute import selection
from cutlass_kernels._core import native


def test_calls_on_the_cpu_are_left_to_python() -> None:
    if native._C is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")
    q, kv = torch.zeros(5, 4, 64, dtype=torch.float16), torch.zeros(20, 2, 64, dtype=torch.float16)
    others = (None, None, None, False, False, "NHD", -1, None, None, None, None, None, "auto")
    assert native.single_prefill(q, kv, kv, *others) is None
    assert native.single_decode(q[0], kv, kv, *others) is None


# --- on a GPU ---


def general(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves every call to Python."""
    for name in ("single_prefill", "single_decode", "fused_prefill"):
        monkeypatch.setattr(native, name, native.not_direct)
    monkeypatch.setattr(native, "direct_run", lambda *description: native.not_direct)


@pytest.mark.gpu
@pytest.mark.usefixtures("the_targets_backend")
@each(lambda entry: entry.attends)
def test_direct_calls_compute_what_others_compute(target, entry, monkeypatch):
    if target.is_reference:
        pytest.skip("the reference is never called directly")
    results = [[call() for call in entry.calls(Data(target))]]
    results.append([call() and call() for call in entry.calls(Data(target))])  # the second may go a shorter way
    with monkeypatch.context() as patched:
        general(patched)
        results.append([call() for call in entry.calls(Data(target))])
    for other in results[1:]:
        for found, want in zip(other, results[0], strict=True):
            for a, b in zip(found, want, strict=True):
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
    monkeypatch.setattr(selection, "compute", lambda *args: pytest.fail("the call was left to Python"))
    for more, results in zip(given, want):
        for a, b in zip(several(run(**more)), results):
            assert_bitwise(a, b)
