"""Tries an installed wheel: the extension loads, lists its kernels, and a call computes.

    pip install dist/*.whl && python tools/try_wheel.py

Run it outside the source tree's Python path: it imports what is installed.
"""

from __future__ import annotations

import platform
import time
from importlib import metadata

import torch

import cutlass_kernels as ck


def main() -> None:
    kernels = ck.list_kernels()
    assert kernels, "the extension did not load: python -m cutlass_kernels info says why"
    assert ck.__version__ == metadata.version("cutlass_kernels")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(7, 8, 64, dtype=torch.float16, device=device)
    k, v = torch.randn(2, 33, 2, 64, dtype=torch.float16, device=device)
    start = time.perf_counter()
    out, lse = ck.single_prefill_with_kv_cache(q, k, v, causal=True, return_lse=True)
    keys, values = (x.float().repeat_interleave(4, 1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys) / 8
    rows, columns = torch.meshgrid(torch.arange(7), torch.arange(33), indexing="ij")
    logits = logits.masked_fill((columns > rows + 26).to(device), float("-inf"))
    want = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values)
    torch.testing.assert_close(out.float(), want, atol=3e-3, rtol=3e-3)
    assert lse.shape == (7, 8)
    print(
        f"cutlass_kernels {ck.__version__}, Python {platform.python_version()}, torch {torch.__version__}: "
        f"{len(kernels)} kernels, a call on {device} agrees ({time.perf_counter() - start:.2f} s)"
    )


if __name__ == "__main__":
    main()
