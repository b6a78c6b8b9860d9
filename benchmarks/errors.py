"""Errors of outputs by type and number of keys, against float64 on the same numbers.

64 rows, 4 heads, queries and keys standard normal, values normal with mean 1 (a sum that shrinks then shows as a bias).
Outputs are fp16, of bf16 tensors bf16. The worst of head dimensions 64, 128 and 256 counts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lengths import tokens
from measure import environment
from timing import BURST, Monitor

import cutlass_kernels as ck

ROWS, HEADS = 64, 4
KEYS = [1 << n for n in (10, 12, 14, 16, 18, 20)]
HEAD_DIMS = (64, 128, 256)
F16, B16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
TYPES = {"e4m3": (E4M3, E4M3), "fp16, e4m3 cache": (F16, E4M3), "fp16": (F16, F16), "bf16": (B16, B16)}


def measured() -> dict[str, Any]:
    """A record per type, number of keys and kind of error."""
    results = []
    for name, types in TYPES.items():
        for keys in KEYS:
            found = [_errors(*types, keys, dim) for dim in HEAD_DIMS]
            for kind, values in zip(("error", "bias", "LSE"), zip(*found)):
                worst = max(values, key=abs)
                results.append(
                    {"group": name, "column": tokens(keys), "backend": kind, "figure": float(f"{worst:.2g}")}
                )
    facts = environment(BURST, "several", Monitor())
    del facts["settings"], facts["mode"]  # nothing is timed
    return {"environment": facts, "results": results}


def _errors(q_dtype: torch.dtype, kv_dtype: torch.dtype, keys: int, dim: int) -> tuple[float, float, float]:
    """Relative error (root mean square) and bias of the output, largest error of the LSE."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, HEADS, dim, device="cuda") for n in (ROWS, keys, keys))
    q, k, v = q.to(q_dtype), k.to(kv_dtype), v.add(1).to(kv_dtype)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(256 << 20, dtype=torch.uint8, device="cuda"))
    rows_at, keys_at = (torch.tensor([0, n], dtype=torch.int32) for n in (ROWS, keys))
    o_dtype = F16 if q_dtype == E4M3 else q_dtype
    dtypes: dict[str, Any] = dict(q_data_type=q_dtype, kv_data_type=kv_dtype, o_data_type=o_dtype)
    wrapper.plan(rows_at, keys_at, HEADS, HEADS, dim, **dtypes)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    wrong, exact, of_lse = [], [], 0.0
    for h in range(HEADS):
        s = q[:, h].double() @ k[:, h].double().T / math.sqrt(dim)
        exact.append(torch.softmax(s, -1) @ v[:, h].double())
        wrong.append(out[:, h].double() - exact[-1])
        of_lse = max(of_lse, float((lse[:, h].double() - torch.logsumexp(s, -1) / math.log(2)).abs().max()))
    errors, want = torch.stack(wrong), torch.stack(exact)
    return float(errors.norm() / want.norm()), float(errors.mean() / want.mean()), of_lse
