"""Memory: long sequences must not materialise the score matrix, and captured calls keep nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import weakref

import pytest
import torch
from paths import TESTS

LIMIT_MB = 1200  # a 32k x 32k fp32 score matrix of one head alone is 4096 MB

PROGRAM = """
    import json, resource, sys, time
    sys.path[:0] = {path!r}
    import torch
    import cutlass_kernels as ck
    import oracle

    def peak_mb():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    torch.manual_seed(0)
    length, options = {length}, {options!r}
    q, k, v = torch.randn(3, length, 1, 64).half()
    ck.single_prefill_with_kv_cache(q[:64], k[:64], v[:64], backend="reference", **options)  # loads what is lazy
    before, start = peak_mb(), time.monotonic()
    out, lse = ck.single_prefill_with_kv_cache(q, k, v, backend="reference", return_lse=True, **options)
    seconds, grown = time.monotonic() - start, peak_mb() - before
    worst, worst_lse = 0.0, 0.0
    for row in (0, 1, 63, 64, 1000, length // 2, length - 2, length - 1):
        keys = row + 1 if options.get("causal") else length
        first = max(0, row - options["window_left"]) if options.get("window_left", -1) >= 0 else 0
        cap = options.get("logits_soft_cap")
        want = oracle.attention(q[row : row + 1], k[first:keys], v[first:keys], soft_cap=cap)
        worst = max(worst, float((out[row].double() - want.out[0]).abs().max()))
        worst_lse = max(worst_lse, float((lse[row].double() - want.lse[0]).abs().max()))
    print(json.dumps(dict(grown=grown, seconds=seconds, worst=worst, worst_lse=worst_lse)))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "window_left": 1024}, {"causal": False, "logits_soft_cap": 30.0}],
    ids=["causal", "window", "cap"],
)
def test_long_prefill_in_bounded_memory(options):
    # A process of its own: the peak of this one depends on the tests before.
    import cutlass_kernels

    here = str(TESTS)
    package = os.path.dirname(os.path.dirname(os.path.abspath(cutlass_kernels.__file__)))
    length = 32768 if options["causal"] else 16384
    code = textwrap.dedent(PROGRAM).format(path=[package, here], length=length, options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["grown"] < LIMIT_MB, f"memory grew by {seen['grown']:.0f} MB"
    assert seen["worst"] < 1e-3 and seen["worst_lse"] < 1e-3, seen


@pytest.mark.gpu
def test_counters_of_a_captured_call_belong_to_its_graph():
    # They lie in the graph's memory pool. A reference of ours would keep the pool, 2 MB, as long as the process lives.
    module = pytest.importorskip("cutlass_kernels._C", reason="there are no compiled kernels", exc_type=ImportError)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        counters = module.counters(0, torch.cuda.current_stream().cuda_stream)
    assert counters.numel() == module.call_counters
    watched = weakref.ref(counters)
    del counters
    assert watched() is None
