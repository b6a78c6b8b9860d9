"""Who computes: auto, an explicit backend, the environment, and explain()."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from compare import assert_close
from environment import choose_backend, why_no_fa3
from pairs import every
from planned_runs import attend
from problems import Batch, Options, expect, make_batch
from targets import Target
from wrapper_problems import KINDS, Wrapped

import cutlass_kernels as ck
from cutlass_kernels._compute import selection
from cutlass_kernels._compute.request_facts import Request

VARIABLE, FORCED = "CUTLASS_KERNELS_BACKEND", "CUTLASS_KERNELS_FORCE_BACKEND"
KERNELS = ["fa2", "fa3"]


def small(device: str = "cpu") -> Batch:
    return make_batch([5], [9], 4, 2, 64, device=device)


def single(backend: str = "auto", device: str = "cpu") -> tuple[torch.Tensor, ...]:
    return Wrapped(Target(device, backend), "single", small(device)).plan().run(return_lse=True)


def wrapped(kind: str, backend: str = "auto", device: str = "cpu") -> Wrapped:
    return Wrapped(Target(device, backend), kind, small(device))


def check(result: tuple[torch.Tensor, ...], options: Options | None = None) -> None:
    want = expect(small(), options)
    assert_close(result[0].cpu(), want.out)


def refuses_cpu_tensors(backend: str) -> Any:
    """ValueError and RuntimeError: callers catch either."""
    return pytest.raises(ck.BackendError, match=f"backend='{backend}' needs CUDA tensors.* or 'reference'")


def test_cpu_tensors_go_to_the_reference(clean_environment):
    said = ck.explain(device="cpu")
    assert said.selected == "reference" and not said.reasons["reference"]
    for backend in KERNELS:
        assert said.reasons[backend], f"{backend} gives no reason"
        assert backend in str(said)
    assert wrapped("ragged").plan().wrapper._backend == "reference"


def test_auto_on_the_cpu_does_not_warn(clean_environment):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in KINDS:
            wrapped(kind).plan().run()


@every(backend=KERNELS)
def test_explicit_kernels_refuse_cpu_tensors(backend, clean_environment):
    assert issubclass(ck.BackendError, ValueError) and issubclass(ck.BackendError, RuntimeError)
    for kind in KINDS:
        with refuses_cpu_tensors(backend):
            wrapped(kind, backend).plan().run()
    fp8 = small().q.to(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match=f"backend='{backend}' needs CUDA tensors"):  # as FlashInfer raises
        ck.single_prefill_with_kv_cache(fp8, fp8, fp8, o_dtype=torch.float16, backend=backend)


def test_environment_stands_for_auto(clean_environment):
    choose_backend(clean_environment, "reference")
    check(single())
    choose_backend(clean_environment, "fa2")
    with refuses_cpu_tensors("fa2"):
        single()
    single("reference")  # an explicit choice is not overridden
    choose_backend(clean_environment, "fa17")
    with pytest.raises(ValueError, match=f"(?s)(fa17.*{VARIABLE}|{VARIABLE}.*fa17)"):
        single()


def test_a_forced_backend_replaces_a_named_one(clean_environment):
    ragged = wrapped("ragged", "fa2")
    for auto, forced in ((None, "auto"), (None, "reference"), ("reference", "auto"), ("fa2", "reference")):
        choose_backend(clean_environment, auto, forced)
        check(single("fa3"))
        ragged.plan().check()
    with pytest.raises(ValueError, match="'fa17' is not a backend"):
        single("fa17")
    for auto, forced, name in ((None, "fa17", FORCED), ("fa17", "auto", VARIABLE)):
        choose_backend(clean_environment, auto, forced)
        with pytest.raises(ValueError, match=f"environment variable {name}='fa17' is not"):
            single("fa2")


def test_a_forced_backend_decides_about_fp8_queries(clean_environment):
    """fa2 has no kernel for them: paged wrappers refuse, ragged ones convert. What is forced counts, not the name."""
    e4m3 = dict(q_data_type=torch.float8_e4m3fn, kv_data_type=torch.float8_e4m3fn, o_data_type=torch.float16)
    choose_backend(clean_environment, forced="reference")
    wrapped("paged", "fa2").plan(**e4m3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ragged = wrapped("ragged", "fa2").plan(**e4m3)
    assert ragged.wrapper._plan_info.shape.cast is None
    choose_backend(clean_environment, forced="fa2")
    with pytest.raises(AssertionError, match="backend='fa2' has no fp8 tensor cores"):
        wrapped("paged").plan(**e4m3)
    with pytest.raises(ck.BackendError, match="the environment puts 'fa2' in place of backend='fa3'"):
        single("fa3")


def test_the_environment_is_read_once():
    """Before the first call, and a forced backend is named."""
    program = """
import os, torch, cutlass_kernels as ck
os.environ["CUTLASS_KERNELS_FORCE_BACKEND"] = "fa17"
q = torch.zeros(2, 1, 64, dtype=torch.float16)
ck.single_prefill_with_kv_cache(q, q, q, backend="fa2")
"""
    environment = {**os.environ, FORCED: "reference", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"{FORCED}=reference replaces every backend") == 1, done.stderr


def test_auto_is_not_sticky(clean_environment):
    ragged = wrapped("ragged")
    choose_backend(clean_environment, "reference")
    assert ragged.plan().wrapper._backend == "reference"
    choose_backend(clean_environment, "fa2")
    with refuses_cpu_tensors("fa2"):
        ragged.plan().run()
    choose_backend(clean_environment)
    ragged.plan(Options(causal=True)).check()


def test_explain_reads_a_query(clean_environment):
    q = torch.zeros(3, 8, 80, dtype=torch.bfloat16)
    said = ck.explain(q, num_kv_heads=2)
    assert said.selected == "reference"
    text = str(said)
    assert "bfloat16" in text and "80" in text and "8/2" in text


def test_explain_refuses_unknown_features(clean_environment):
    with pytest.raises(ValueError, match="telepathy"):
        ck.explain(device="cpu", features=["telepathy"])


def test_explain_about_a_gpu_that_is_not_here(clean_environment):
    said = ck.explain(device="cuda", compute_capability=70)
    assert said.selected == "reference"
    for backend in KERNELS:
        assert said.reasons[backend] and all(reason in str(said) for reason in said.reasons[backend])


@pytest.mark.parametrize("capability,selected", [(80, "fa2"), (89, "fa2"), (90, "fa3"), (100, "fa2"), (120, "fa2")])
def test_auto_takes_fa3_on_hopper_alone(capability, selected, extension, clean_environment):
    built = {(kernel["backend"], kernel["head_dim_qk"]) for kernel in ck.list_kernels()}
    if not {("fa2", 128), ("fa3", 128)} <= built:
        pytest.skip("this build lacks one of the backends, or head dimension 128")
    said = ck.explain(device="cuda", compute_capability=capability, features=["causal", "window", "soft_cap", "sinks"])
    limits = [
        (kernel["min_compute_capability"], kernel["max_compute_capability"])
        for kernel in ck.list_kernels()
        if kernel["backend"] == selected
    ]
    has_code = any(low <= capability and (not high or capability <= high) for low, high in limits)
    assert said.selected == (selected if has_code else "reference")
    if capability != 90:
        (reason,) = said.reasons["fa3"]
        assert "9.0" in reason and f"{capability // 10}.{capability % 10}" in reason


def test_auto_takes_fa2_for_short_queries(extension, clean_environment):
    if not {"fa2", "fa3"} <= {kernel["backend"] for kernel in ck.list_kernels() if kernel["head_dim_qk"] == 128}:
        pytest.skip("this build lacks one of the backends, or head dimension 128")
    for kv_dtype, words in (
        ("float16", "the faster one for short queries"),
        ("fp8", "reads the fp8 cache without a copy"),
    ):
        said = ck.explain(compute_capability=90, kv_dtype=kv_dtype, batch_size=4, qo_len=1, kv_len=1000)
        assert said.selected == "fa2" and said.is_before_others and words in str(said)


# What the registry calls the features of a request.
REGISTERED = {
    "causal": "interval_mask",
    "custom_mask": "bit_mask",
    "multi_item": "bit_mask",
    "soft_cap": "soft_cap",
    "alibi": "alibi",
    "sinks": "sinks",
    "paged": "paged_kv",
    "head_scale": "device_scales",
    "tensor_scale": "device_scales",
    "stats": "stats",
}


@every(backend=KERNELS, feature=REGISTERED.keys())
def test_a_backend_serves_what_its_kernels_have(feature, backend, extension, clean_environment):
    kernels = [kernel for kernel in ck.list_kernels() if kernel["backend"] == backend]
    if not kernels:
        pytest.skip(f"this build has no {backend} kernels")
    kernel = kernels[0]
    said = ck.explain(
        device="cuda",
        compute_capability=90,
        q_dtype=kernel["q_dtype"],
        head_dim_qk=kernel["head_dim_qk"],
        head_dim_vo=kernel["head_dim_vo"],
        features=[feature],
    )
    against = said.reasons[backend]
    assert (not against) == (REGISTERED[feature] in kernel["features"])
    assert all(backend in reason for reason in against)


@every(feature=["unaligned", "unsized"])
def test_fa3_names_what_it_lacks(feature, extension, clean_environment):
    said = ck.explain(device="cuda", compute_capability=90, features=[feature])
    assert said.selected != "fa3"
    assert any("fa3" in reason for reason in said.reasons["fa3"])


def test_explain_ignores_the_environment(clean_environment):
    choose_backend(clean_environment, "fa3")
    assert ck.explain(device="cpu").selected == "reference"


@every(kind=["ragged", "paged"], mode=["ROPE_LLAMA", "ALIBI"])
def test_explicit_fa3_with_position_encoding_is_refused_not_dropped(kind, mode, clean_environment):
    with refuses_cpu_tensors("fa3"):
        wrapped(kind, "fa3").plan(pos_encoding_mode=mode).run()


@pytest.mark.parametrize(
    "dtype,said",
    [
        (torch.float32, "no kernel serves it. .*float32"),
        (torch.float16, "serves such requests: use backend='auto'"),  # where backend="reference" was asked for
    ],
    ids=str,
)
def test_what_a_cuda_graph_cannot_hold_is_told_why(extension, clean_environment, dtype, said):
    request = Request("cuda", 90, dtype, dtype, dtype, 8, 2, 64, 64, frozenset(), None)
    assert re.search(rf"a CUDA graph cannot hold .*{said}", str(selection.not_captured(request)))


def test_importing_does_not_touch_cuda():
    code = "import torch, cutlass_kernels as c; c.list_kernels(); c.explain(device='cpu')"
    code += "; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_version_and_public_names():
    assert isinstance(ck.__version__, str)
    for name in ck.__all__:
        assert hasattr(ck, name), name
    assert hasattr(ck.prefill, "trtllm_fmha_v2_prefill")
    for name in ("merge_state", "merge_state_in_place", "merge_states"):
        assert getattr(ck.cascade, name) is getattr(ck, name)


@pytest.mark.gpu
@every(
    features=[[], ["causal"], ["window"], ["soft_cap"], ["sinks"], ["causal", "window", "soft_cap"]],
    head_dim=[40, 64, 96, 128, 192, 256],
)
def test_kernels_serve_what_they_should(features, head_dim, clean_environment):
    said = ck.explain(device="cuda:0", head_dim_qk=head_dim, num_qo_heads=8, num_kv_heads=2, features=features)
    assert not said.reasons["fa2"]
    assert said.selected == ("fa2" if why_no_fa3() else "fa3")


@pytest.mark.gpu
def test_auto_on_cuda_warns_where_only_the_reference_serves(clean_environment):
    # More than any kernel has: the reference takes over, and says so once.
    batch = make_batch([5], [9], 2, 2, 600, device="cuda:0")
    assert ck.explain(batch.q).selected == "reference"
    with pytest.warns(ck.PerformanceWarning):
        out = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v)
    assert_close(out, expect(batch).out)


@pytest.mark.gpu
def test_backends_agree(clean_environment):
    batch = make_batch([70, 5], [200, 130], 8, 2, 128, device="cuda:0")
    # auto is fa3 where that runs.
    outs = [attend(backend, batch, Options(causal=True))[0] for backend in ("reference", "fa2", "auto")]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-3, atol=1e-3)
