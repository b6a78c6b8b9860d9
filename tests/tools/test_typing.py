"""What a type checker says of calls of the public functions: right ones pass, wrong ones do not."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import make_signatures
import pytest
import torch

import cutlass_kernels as ck

# A line that must be refused ends in "# wrong".
PROGRAM = """
import torch
from torch import Tensor
from typing_extensions import assert_type
import cutlass_kernels as ck

workspace = torch.empty(1 << 20, dtype=torch.uint8)
x = torch.zeros(4, 2, 64)
ints = torch.tensor([0, 4], dtype=torch.int32)
flag = bool(x.numel())
Pair = tuple[Tensor, Tensor]

assert_type(ck.single_prefill_with_kv_cache(x, x, x, causal=True, sm_scale=0.1, backend="fa2"), Tensor)
assert_type(ck.single_prefill_with_kv_cache(x, x, x, None, None, True, return_lse=True, sinks=x), Pair)
assert_type(ck.single_prefill_with_kv_cache_return_lse(x, x, x, None, None, True, k_scale=2, out=x), Pair)
ck.single_prefill_with_kv_cache_return_lse(x, x, x, return_lse=False)  # wrong
ck.single_prefill_with_kv_cache_return_lse(x, x, x, nonsense=1)  # wrong
ck.single_prefill_with_kv_cache_return_lse(x, x, x, scale_q="1")  # wrong
both: Pair = ck.single_prefill_with_kv_cache(x, x, x)  # wrong
out: Tensor = ck.single_prefill_with_kv_cache(x, x, x, return_lse=True)  # wrong
ck.single_prefill_with_kv_cache(x, x, x, return_lse=True, out="x")  # wrong
ck.single_prefill_with_kv_cache(x, x, x, None, None, True, "NHD", "NONE", False, "0.1")  # wrong
ck.single_prefill_with_kv_cache(x, x, x, causal="yes")  # wrong
ck.single_prefill_with_kv_cache(x, x)  # wrong
assert_type(ck.single_decode_with_kv_cache(x[0], x, x, window_left=3, sinks=None), Tensor)
assert_type(ck.single_decode_with_kv_cache(x[0], x, x, return_lse=True, o_dtype="float16"), Pair)
options = ("NHD", "NONE", False, 1.0, 1.0, 1.0, -1, None, None, None, None)
assert_type(ck.single_decode_with_kv_cache(x[0], x, x, *options, True), Pair)
ck.single_decode_with_kv_cache(x[0], x, x, causal=True)  # wrong
ck.single_decode_with_kv_cache(x[0], x, x, *options, 1)  # wrong
ck.single_decode_with_kv_cache(x[0], x, x, window_left="3")  # wrong

paged = ck.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="auto")
ck.BatchPrefillWithPagedKVCacheWrapper(3, "garbage", nonsense=1)  # wrong
ck.BatchPrefillWithPagedKVCacheWrapper(3)  # wrong
paged.plan(ints, ints, ints, ints, 2, 2, 64, 16, causal=True, q_data_type=torch.float16, kv_data_type="float16")
paged.plan(ints, ints, ints, ints, 2, 2, 64, "16")  # wrong
paged.plan(ints, ints, ints, ints, 2, 2, 64, 16, casual=True)  # wrong
assert_type(paged.run(x, (x, x), k_scale=0.5, return_lse=True, window_left=-1), Pair)
assert_type(paged.run(x, x, 0.5, 0.5), Tensor)
assert_type(paged.run(x, x, 0.5, 0.5, True), Pair)
assert_type(paged.run(x, x, 0.5, 0.5, flag), Tensor | Pair)
assert_type(paged.run_return_lse(x, x, 0.5, lse_base="ln"), Pair)
assert_type(paged.run_return_lse(x, (x, x), x, x, x), Pair)
sinks = ck.BatchAttentionWithAttentionSinkWrapper(workspace, "NHD", window_left=3)
assert_type(sinks.run_return_lse(x, x, x, 0.1), Pair)
sinks.run(x, x, 0.1, x)  # wrong
assert_type(ck.trtllm_batch_decode_with_kv_cache(x, x, x, ints, ints, 4, x, 1.0, sinks=[x]), Tensor)
assert_type(ck.trtllm_batch_decode_with_kv_cache(x, (x, x), x, ints, ints, 4, return_lse=True), Pair)
assert_type(ck.xqa_batch_decode_with_kv_cache(x, x, x, ints, ints, 4, mask=None), Tensor)
lengths = (3, 4, 0.1, 1.0, 1, ints, ints)
paged.run(x, x, x)[0] + paged.run(x, x, x, 0.5, 0.5)  # wrong
paged.run(x, [x, x])  # wrong
paged.run(x, x, lse_layout=1, return_lse=True)  # wrong
paged.run(x, x, x, x, x, x)  # wrong
paged.run_return_lse(x)  # wrong
paged.run_return_lse(x, x, return_lse=True)  # wrong
paged.run_return_lse(x, x, o_scale=0.5)  # wrong
assert_type(paged.forward(x, x, True, "NONE", out=x, return_lse=True), Pair)
assert_type(paged.forward_return_lse(x, x, True, sinks=x), Pair)
paged.forward(x, x, causal="yes")  # wrong
paged.forward_return_lse(x, x, causal="yes")  # wrong
paged.forward_return_lse(x, x, x)  # wrong
sizes: tuple[int, int] = paged.workspace_size(ints, ints, ints, ints, 2, 2, 64, 16)

ragged = ck.BatchPrefillWithRaggedKVCacheWrapper(workspace)
ck.BatchPrefillWithRaggedKVCacheWrapper(workspace, layout="NHD")  # wrong
ragged.plan(ints, ints, 2, 2, 64, window_left=3)
ragged.plan(ints, ints, 2.0, 2, 64)  # wrong
assert_type(ragged.run(x, x, x, return_lse=True, v_scale=0.5), Pair)
assert_type(ragged.run(x, x, x, True), Pair)
assert_type(ragged.run(x, x, x, False), Tensor)
assert_type(ragged.run(x, x, x, flag), Tensor | Pair)
assert_type(ragged.run_return_lse(x, x, x, lse_layout="HN"), Pair)
assert_type(ragged.run_return_lse(x, x, x, x, x, x), Pair)
ragged.run(x, x, x, out="x")  # wrong
ragged.run(x, x, x, 0.5)  # wrong
ragged.run(x, x, x, x)  # wrong
ragged.run_return_lse(x, x)  # wrong
ragged.run_return_lse(x, x, x, use_fp16_softmax=True)  # wrong
assert_type(ragged.forward(x, x, x, True), Tensor)
assert_type(ragged.forward(x, x, x, causal=True, return_lse=True, k_scale=x), Pair)
assert_type(ragged.forward_return_lse(x, x, x, False, "ALIBI"), Pair)
ragged.forward(x, x, x, causal=x)  # wrong
ragged.forward(x, x, x, return_lse=True, lse_base=2)  # wrong
ragged.forward_return_lse(x, x, x, nonsense=1)  # wrong

decode = ck.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
decode.plan(ints, ints, ints, 2, 2, 64, 16, q_data_type="bfloat16")
decode.plan(ints, ints, ints, 2, 2, 64, 16, causal=True)  # wrong
assert_type(decode.run(x, (x, x), return_lse=True, lse_base="ln"), Pair)
assert_type(decode.run(x, x, 0.5, x, None, True), Pair)
assert_type(decode.run(x, x, 0.5, 0.5, 0.5, flag), Tensor | Pair)
assert_type(decode.run_return_lse(x, x, sinks=x), Pair)
decode.run(x, x, q_len_per_req=1.5)  # wrong
decode.run(x, x, 0.5, 0.5, 0.5, 0.5)  # wrong
decode.run_return_lse(x, x, sinks=0.5)  # wrong
assert_type(decode.forward(x, x, "NONE", q_len_per_req=1), Tensor)
assert_type(decode.forward(x, x, window_left=3, return_lse=True), Pair)
assert_type(decode.forward_return_lse(x, x, "NONE", 0.5), Pair)
decode.forward(x, x, True)  # wrong
decode.forward(x, x, causal=True)  # wrong
decode.forward_return_lse(x, x, causal=True)  # wrong
graphed = ck.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace, ints, ints, ints)
graphed.run(x, x, return_lse=2)  # wrong
decode.begin_forward(ints, ints, ints, 2, 2, 64, "16")  # wrong

levels = ck.MultiLevelCascadeAttentionWrapper(2, workspace)
levels.plan([ints], [ints], [ints], [ints], 2, 2, 64, 16)
levels.plan([ints], [ints], [ints], [ints], 2, 2, 64, None)  # wrong
assert_type(levels.run(x, (x, x), return_lse=True, k_scale=0.5), Pair)
levels.run(x, x, lse=x)  # wrong
levels.run(x, x, True)  # wrong
levels.forward(x, x, out=1)  # wrong

shared = ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace)
assert_type(shared.forward(x, x, x, (x, x), causal=False), Tensor)
shared.forward(x, x, x, x, return_lse=True)  # wrong
shared.run(x, x, x, x, causal="yes")  # wrong
shared_decode = ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace)
assert_type(shared_decode.run(x, x, x, x, sm_scale=0.1), Tensor)
shared_decode.forward(x, x, x, x, causal=True)  # wrong
assert_type(ck.batch_decode_with_shared_prefix_padded_kv_cache(x, x, x, x, x, "HND"), Tensor)
ck.batch_decode_with_shared_prefix_padded_kv_cache(x, x, x, x)  # wrong
ck.batch_decode_with_shared_prefix_padded_kv_cache(x, x, x, x, x, nonsense=1)  # wrong

latent = ck.BatchMLAPagedAttentionWrapper(workspace)
latent.plan(ints, ints, ints, ints, 2, 512, 64, 16, True, 0.1, torch.float16, torch.float16)
latent.plan(metadata=ck.mla.MLAPlanMetadata.csr(ints, ints, ints, ints), num_heads=2, lse_mode="base2")
latent.plan(ints, ints, ints, ints, 2, 512, 64, "16")  # wrong
ck.mla.MLAPlanMetadata.dense(ints, ints)  # wrong
assert_type(latent.run(x, x, x, x, None, None, True), Pair)
assert_type(latent.run(query=x, kv_cache=(x, x), sinks=x, bmm1_scale=0.1), Tensor)
latent.run(x, x, x, 3)  # wrong
assert_type(ck.mla.flash_mla_with_kvcache(x, x, ints, ints, 512, None, None, 0.1, True), Pair)
assert_type(ck.mla.flash_mla_sparse_fwd(x, x, ints, 0.1, attn_sink=x), tuple[Tensor, Tensor, Tensor])
ck.append_paged_mla_kv_cache(x, x, ints, ints, x, x, ints, ints, ints)

def fused(save: bool) -> None:
    batch = ("SEPARATE_Q_K_V", workspace, ints, 4, 4, 0.1, 1.0, 1, ints, ints)
    assert_type(ck.trtllm_fmha_v2_prefill((x, x, x), *batch, out=x), Tensor)
    assert_type(ck.trtllm_fmha_v2_prefill([x, x, x], *batch, mask_mode="padding", save_softmax_stats=True), Pair)
    assert_type(ck.trtllm_fmha_v2_prefill(x, *batch, save_softmax_stats=save), Tensor | Pair)
    options = (None, None, None, None, None, None, "causal", -1, 0)
    assert_type(ck.trtllm_fmha_v2_prefill(x, *batch, *options, True, 0.5), Pair)
    ck.trtllm_fmha_v2_prefill(x, *batch, save_softmax_stats=True).shape  # wrong
    ck.trtllm_fmha_v2_prefill(x, *batch, save_softmax_stats="yes")  # wrong
    ck.trtllm_fmha_v2_prefill(x, *batch, return_lse=True)  # wrong
    ck.trtllm_fmha_v2_prefill(x, "PACKED_QKV", workspace, ints, 4)  # wrong

ck.merge_state(x, x[..., 0], x, x[..., 0])[0].float()
ck.merge_state(x, x[..., 0], x)  # wrong
ck.explain(device="cpu").selected
ck.explain(device="cpu").chosen  # wrong
"""

# Calls that return an output, with ``return_lse`` a pair, and refuse what they do not know.
WITH_LSE = """
ck.single_prefill_with_kv_cache(x, x, x
ck.single_decode_with_kv_cache(x[0], x, x
paged.run(x, x
paged.run(x, x, x, x, x
paged.run(x, x, q_scale=x, out=x
paged.forward(x, x, causal=True
sinks.run(x, x, x, 0.1, out=x
ragged.run(x, x, x, out=x
ragged.run(x, x, x, x, x, x
ragged.forward(x, x, x
decode.run(x, x, q_len_per_req=1
decode.run(x, x, x, x, x
decode.forward(x, x
graphed.run(x, x
levels.run(x, x
levels.forward(x, x
latent.run(x, x, x, x, out=x
latent.run(x, x, x, x, return_lse_base_on_e=True
ck.trtllm_batch_decode_with_kv_cache(x, x, x, ints, ints, 4
ck.trtllm_batch_context_with_kv_cache(x, x, x, ints, ints, *lengths
"""
for call in WITH_LSE.split("\n")[1:-1]:
    PROGRAM += f"""
assert_type({call}), Tensor)
assert_type({call}, return_lse=True), Pair)
assert_type({call}, return_lse=flag), Tensor | Pair)
{call}, return_lse=True).shape  # wrong
{call}, return_lse="yes")  # wrong
{call}, nonsense=1)  # wrong
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


def test_the_signatures_are_up_to_date() -> None:
    made = make_signatures.made()
    assert made == make_signatures.TARGET.read_text(), "run `python tools/make_signatures.py`"


def test_no_function_with_two_results_is_left_out() -> None:
    public = [getattr(ck, name) for name in ck.__all__]
    functions = [x for x in public if inspect.isfunction(x)]
    for owner in filter(inspect.isclass, public):
        functions += [x for name, x in inspect.getmembers(owner, inspect.isfunction) if not name.startswith("_")]
    flagged = [x for x in functions if {"return_lse", "save_softmax_stats"} & inspect.signature(x).parameters.keys()]
    assert flagged
    typed = {row.functions[0].__qualname__ for row in make_signatures.every()}
    assert {x.__qualname__ for x in flagged} - typed == {"BatchPODWithPagedKVCacheWrapper.run"}  # always returns a pair


def test_no_function_unwraps_to_a_stub() -> None:
    """Tools that unwrap functions, such as profilers and mocks, call what they find."""
    for name, function in [(name, getattr(ck, name)) for name in ck.__all__]:
        if inspect.isfunction(function):
            source = inspect.getsource(inspect.unwrap(function))
            assert not source.rstrip().endswith("raise NotImplementedError"), name
    q = k = v = torch.randn(3, 2, 64).half()
    for function in (ck.single_prefill_with_kv_cache, ck.single_prefill_with_kv_cache_return_lse):
        assert len(inspect.unwrap(function)(q, k, v)) == len(function(q, k, v))
        assert "custom_mask" in inspect.signature(function).parameters
