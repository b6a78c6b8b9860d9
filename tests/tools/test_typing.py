"""What a type checker says of calls of the public functions: right ones pass, wrong ones do not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cutlass_kernels as ck

# A line that must be refused ends in "# wrong".
PROGRAM = """
import torch
import cutlass_kernels as ck

workspace = torch.empty(1 << 20, dtype=torch.uint8)
x = torch.zeros(4, 2, 64)
ints = torch.tensor([0, 4], dtype=torch.int32)

out: torch.Tensor = ck.single_prefill_with_kv_cache(x, x, x, causal=True, sm_scale=0.1, backend="fa2")
both: tuple[torch.Tensor, torch.Tensor] = ck.single_prefill_with_kv_cache_return_lse(x, x, x)
ck.single_prefill_with_kv_cache(x, x, x, causal="yes")  # wrong
ck.single_prefill_with_kv_cache(x, x)  # wrong
ck.single_prefill_with_kv_cache(x, x, x, nonsense=1)  # wrong
ck.single_decode_with_kv_cache(x[0], x, x, window_left=3, sinks=None)
ck.single_decode_with_kv_cache(x[0], x, x, window_left="3")  # wrong

paged = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
ck.BatchPrefillWithPagedKVCacheWrapper(3, "garbage", nonsense=1)  # wrong
ck.BatchPrefillWithPagedKVCacheWrapper(3)  # wrong
paged.plan(ints, ints, ints, ints, 2, 2, 64, 16, causal=True, q_data_type=torch.float16, kv_data_type="float16")
paged.plan(ints, ints, ints, ints, 2, 2, 64, "16")  # wrong
paged.plan(ints, ints, ints, ints, 2, 2, 64, 16, casual=True)  # wrong
paged.run(x, (x, x), k_scale=0.5, return_lse=True)
paged.run(x, x, return_lse="yes")  # wrong
paged.forward(x, x, causal=True)
paged.forward(x, x, causal="yes")  # wrong
sizes: tuple[int, int] = paged.workspace_size(ints, ints, ints, ints, 2, 2, 64, 16)

ragged = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace)
ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, layout="NHD")  # wrong
ragged.plan(ints, ints, 2, 2, 64, window_left=3)
ragged.plan(ints, ints, 2.0, 2, 64)  # wrong
ragged.run(x, x, x, out=x)
ragged.run(x, x, x, out="x")  # wrong

decode = ck.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
decode.plan(ints, ints, ints, 2, 2, 64, 16, q_data_type="bfloat16")
decode.plan(ints, ints, ints, 2, 2, 64, 16, causal=True)  # wrong
decode.run(x, x, q_len_per_req=1)
decode.begin_forward(ints, ints, ints, 2, 2, 64, "16")  # wrong

levels = ck.MultiLevelCascadeAttentionWrapper(2, workspace)
levels.plan([ints], [ints], [ints], [ints], 2, 2, 64, 16)
levels.plan([ints], [ints], [ints], [ints], 2, 2, 64, None)  # wrong

ck.merge_state(x, x[..., 0], x, x[..., 0])[0].float()
ck.merge_state(x, x[..., 0], x)  # wrong
ck.explain(device="cpu").selected
ck.explain(device="cpu").chosen  # wrong
"""


def test_right_and_wrong_calls(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    package = os.path.dirname(os.path.dirname(os.path.abspath(ck.__file__)))
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports_for_stubs = false\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", config, "--cache-dir", tmp_path / "cache", program],
        capture_output=True,
        text=True,
        env=os.environ | {"MYPYPATH": package if "site-packages" not in package else ""},
        cwd=tmp_path,
        timeout=300,
    )
    refused = {int(line) for line in re.findall(r"^program\.py:(\d+): error", done.stdout, re.M)}
    wrong = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert refused == wrong, done.stdout + done.stderr
