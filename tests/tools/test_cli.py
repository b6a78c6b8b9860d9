"""The command line: every command with and without a GPU, its JSON, its errors, and that it finds what is wrong."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from commands import invoke, python, words
from environment import choose_backend
from rich.console import Console

import cutlass_kernels
from cutlass_kernels import _cli
from cutlass_kernels._compute import selection

_cases, _check, _info = _cli._check._cases, _cli._check, _cli._info
_list_cases = _check._list_cases

KERNEL = {
    "name": "stand-in",
    "backend": "reference",  # computes float16 with PyTorch, so the path to a kernel runs without one
    "q_dtype": "float16",
    "kv_dtype": "float16",
    "head_dim_qk": 64,
    "head_dim_vo": 64,
    "features": ["interval_mask", "soft_cap", "sinks", "ragged_kv"],
    "min_compute_capability": 80,
    "max_compute_capability": 0,
}


def run_cli(*arguments: str, code: int = 0) -> str:
    return invoke(_cli.app, *arguments, code=code)


# --- the package and the command line ---


def test_importing_the_package_imports_no_command_line():
    code = (
        "import sys, cutlass_kernels, cutlass_kernels.integrations.transformers\n"
        "assert not {'typer', 'rich', 'click', 'transformers'} & set(sys.modules)"
    )
    python("-c", code)


def test_runs_as_a_module():
    done = python("-m", "cutlass_kernels", "--help", NO_COLOR="1", COLUMNS="200")
    assert "python -m cutlass_kernels" in done.stdout
    for name in ("info", "check", "explain"):
        assert name in done.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_says_in_one_sentence_what_to_install_where_a_package_is_missing(package):
    code = (
        f"import sys, runpy; sys.modules[{package!r}] = None\nrunpy.run_module('cutlass_kernels', run_name='__main__')"
    )
    done = python("-c", code, code=1)
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"The command line needs {package}")
    assert "pip install typer rich" in done.stderr and "cutlass_kernels[cli]" in done.stderr


def test_prints_its_version():
    assert run_cli("--version") == f"cutlass_kernels {cutlass_kernels.__version__}\n"


@pytest.mark.parametrize("command", ["info", "check", "explain"])
def test_help_describes_every_option(command):
    text = run_cli(command, "--help")
    assert "--help" in text and "Usage" in text


# --- info ---


def test_info_json_holds_all_facts(clean_environment):
    facts = json.loads(run_cli("info", "--json"))
    assert facts["cutlass_kernels"] == cutlass_kernels.__version__
    assert facts["torch"] == torch.__version__
    assert facts["torch_cuda"] == torch.version.cuda
    assert len(facts["kernels"]) == len(cutlass_kernels.list_kernels())
    assert bool(facts["kernels"]) == (facts["why_no_kernels"] is None)
    assert len(facts["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert facts["default_backend"]["cpu"] == "reference"
    assert facts["environment"] == {}


def test_info_prints_the_same():
    text = run_cli("info")
    assert torch.__version__ in text and "default backend" in text


@pytest.mark.parametrize("commit", ["1f40bdd2a0c1+", None])
def test_info_names_the_commit(commit, monkeypatch):
    monkeypatch.setattr(_info, "commit", lambda: commit)
    assert json.loads(run_cli("info", "--json"))["commit"] == commit
    version = cutlass_kernels.__version__
    assert (f"{version}, commit {commit}" if commit else f"{version} ") in run_cli("info")


def test_info_shows_the_override(clean_environment):
    choose_backend(clean_environment, "reference", "auto")
    facts = json.loads(run_cli("info", "--json"))
    assert facts["environment"] == dict(zip(selection.VARIABLES, ("reference", "auto")))
    assert "_BACKEND=reference" in run_cli("info") and "FORCE_BACKEND=auto" in run_cli("info")


def test_info_tables_of_gpus_and_kernels(monkeypatch):
    gpu = {"index": 0, "name": "GPU X", "compute_capability": 90, "multiprocessors": 132, "memory_bytes": 80 << 30}
    monkeypatch.setattr(_info, "gpus", lambda: [gpu])
    monkeypatch.setattr(cutlass_kernels, "list_kernels", lambda: [KERNEL])
    text = run_cli("info")
    assert all(part in text for part in ("GPU X", "9.0", "132", "80.0 GiB", "64", "sm_80 and up", "1 compiled kernels"))
    assert all(part in run_cli("info", "--kernels") for part in ("64/64", "sm_80 and up", "soft_cap"))


def test_info_survives_a_broken_nvcc(monkeypatch, tmp_path):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert json.loads(run_cli("info", "--json"))["nvcc"] == {"path": str(nvcc), "version": "unknown"}
    monkeypatch.setenv("PATH", "")
    assert json.loads(run_cli("info", "--json"))["nvcc"] is None


@pytest.mark.parametrize(
    ("low", "high", "text"), [(80, 0, "sm_80 and up"), (90, 90, "sm_90"), (80, 89, "sm_80 to sm_89")]
)
def test_capability_ranges(low, high, text):
    assert _info.capability_range({"min_compute_capability": low, "max_compute_capability": high}) == text


# --- check ---


@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_check_of_the_reference(options):
    text = run_cli("check", "--device", "cpu", *options)
    assert "reference float32 on cpu" in text and "all within their bounds" in text
    assert ("bfloat16" in text) == (not options)
    assert re.search(r"^\[1/\d+\] reference float32 on cpu$", text, re.MULTILINE), "no progress without a terminal"


def test_check_fails_on_a_wrong_result(monkeypatch):
    correct = _cases.compute
    single = _check._closed_forms.single_prefill_with_kv_cache_return_lse

    def off_by_one(*args, window_left=-1, **kwargs):
        return single(*args, window_left=window_left + 1 if window_left > 0 else -1, **kwargs)

    monkeypatch.setattr(_check._closed_forms, "single_prefill_with_kv_cache_return_lse", off_by_one)
    text = run_cli("check", "--device", "cpu", "--quick", code=1)
    assert "FAILED" in text and "equal keys" in text
    assert _cases.compute is correct


def test_check_reports_a_case_that_raises(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("[launch] failed")

    monkeypatch.setattr(_check._closed_forms, "merge_state", broken)
    text = run_cli("check", "--device", "cpu", "--quick", code=1)
    assert "RuntimeError: [launch] failed" in text


def run(kernels, capability=90, quick=False):
    rows, jobs = _check.kernel_jobs(kernels, torch.device("cpu"), capability, quick)
    _check.run_jobs(jobs, Console(quiet=True))
    return rows


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("head_dim", "head_dim_vo"), [(64, 64), (192, 128)])
def test_kernel_cases_agree_with_the_reference(dtype, head_dim, head_dim_vo):
    kernel = {**KERNEL, "q_dtype": dtype, "kv_dtype": dtype, "head_dim_qk": head_dim, "head_dim_vo": head_dim_vo}
    (row,) = run([kernel])
    assert row.faults == [] and row.cases == len(_cases.CASES)
    assert 0.0 < row.out_error < row.tolerance[0] * 2


def test_kernel_cases_of_8_bit_types():
    kernel = {**KERNEL, "q_dtype": "float8_e4m3fn", "kv_dtype": "float8_e4m3fn"}
    (row,) = run([kernel], quick=True)
    assert row.faults == [] and 0 < row.cases < len(_cases.CASES)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", *_list_cases._FORMATS])
def test_list_cases_agree_with_the_reference(kv_dtype):
    """Kernels of quantized caches have these alone."""
    columns = 576 if kv_dtype in ("bfloat16", "float8_e4m3fn", "latent_v32") else 512
    kernel = {**KERNEL, "q_dtype": "bfloat16", "kv_dtype": kv_dtype, "head_dim_qk": columns, "head_dim_vo": 512}
    served = [case for case in _list_cases.CASES if _list_cases.is_served(case, kernel)]
    (row,) = run([kernel], quick=not _list_cases.is_quantized(kernel))
    quick = [case for case in _cases.CASES if case.quick and not _list_cases.is_quantized(kernel)]
    expected = served if _list_cases.is_quantized(kernel) else [case for case in served if case.quick]
    assert row.faults == [] and row.cases == len(quick) + len(expected)
    for case in served:
        inputs, again = (_list_cases.draw(case, kernel, torch.device("cpu")) for _ in range(2))
        assert torch.equal(inputs.caches[-1], again.caches[-1]) and torch.equal(inputs.lists[-1], again.lists[-1])
    assert any(case.extra for case in served) == (columns == 512)


def test_kernel_of_another_gpu_is_skipped():
    rows = run([{**KERNEL, "min_compute_capability": 100}, {**KERNEL, "max_compute_capability": 89}], quick=True)
    assert [row.cases for row in rows] == [0, 0]
    assert rows[0].skipped == "runs on sm_100 and up" and rows[1].skipped == "runs on sm_80 to sm_89"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out, lse: (out + 0.01, lse),
        lambda out, lse: (out, lse + 0.01),
        lambda out, lse: (out.fill_(float("nan")), lse),
        lambda out, lse: (out, torch.where(lse.isinf(), 0.0, lse)),
        lambda out, lse: (out[:, :1], lse),
        lambda out, lse: (out + 6e-4 * out.sign(), lse),  # the tolerance is 1e-3
    ],
    ids=["output", "lse", "nan", "finite lse of empty rows", "shape", "twice plain PyTorch"],
)
def test_kernel_errors_are_found(monkeypatch, spoil):
    compute = _cases.compute

    def spoiled(case, inputs, backend):
        result = compute(case, inputs, backend)
        return spoil(*result) if inputs.q.dtype == torch.float16 else result

    monkeypatch.setattr(_cases, "compute", spoiled)
    (row,) = run([KERNEL], quick=True)
    assert row.faults


def test_cases_are_the_same_on_every_run():
    case = _cases.CASES[0]
    first, second = (_cases.draw(case, KERNEL, torch.device("cpu")) for _ in range(2))
    assert torch.equal(first.q, second.q) and torch.equal(first.v, second.v)
    assert len({case.name for case in _cases.CASES}) == len(_cases.CASES)


@pytest.mark.parametrize(("device", "says"), [("nowhere", "is no device"), ("meta", "not supported")])
def test_check_of_an_unknown_device(device, says):
    assert says in words(run_cli("check", "--device", device, code=2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_check_of_an_absent_gpu():
    assert "sees 0 CUDA devices" in words(run_cli("check", "--device", "cuda", code=2))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [(), ("--quick",)])
def test_check_of_every_kernel_of_this_gpu(options):
    text = run_cli("check", "--device", "cuda", *options)
    for kernel in cutlass_kernels.list_kernels():
        assert _info.kernel_name(kernel) in text
    assert "all within their bounds" in text


# --- explain ---


def test_explain_json():
    told = json.loads(run_cli("explain", "--device", "cpu", "--json"))
    assert told["selected"] == "reference"
    assert list(told["reasons"]) == list(selection.BACKENDS)
    assert told["reasons"]["reference"] == [] and told["reasons"]["fa2"]


@pytest.mark.parametrize("capability", ["90", "9.0", "sm_90", "sm_90a"])
def test_explain_of_a_gpu_that_is_not_here(capability):
    options = ("--kv-heads", "8", "--dtype", "bf16", "-f", "causal,window", "-f", "sinks")
    text = run_cli("explain", "--cc", capability, *options)
    assert "cuda sm_90, q bfloat16" in text and "heads 32/8" in text and "causal sinks window" in text
    assert "selected" in text


@pytest.mark.parametrize("codes, capability, told", [((80, 90), 100, True), ((80, 90), 89, False), ((80,), 90, True)])
def test_explain_says_where_the_driver_compiles(codes, capability, told, monkeypatch):
    request = SimpleNamespace(__str__=lambda: "request", compute_capability=capability)
    explained = selection.Explanation(request, "fa2", {name: [] for name in selection.BACKENDS})
    monkeypatch.setattr(cutlass_kernels, "explain", lambda **_: explained)
    monkeypatch.setattr(selection, "why_first", lambda request: "")
    monkeypatch.setattr(_cli._explain.native, "_C", SimpleNamespace(machine_codes=codes))
    assert ("the driver compiles PTX" in words(run_cli("explain"))) == told


def test_explain_prints_reasons_as_they_are(monkeypatch):
    request = SimpleNamespace(__str__=lambda: "request")
    told = selection.Explanation(request, None, {name: ["takes [64, 128] only"] for name in selection.BACKENDS})
    monkeypatch.setattr(cutlass_kernels, "explain", lambda **_: told)
    text = run_cli("explain")
    assert text.count("takes [64, 128] only") == len(selection.BACKENDS) and "cannot serve" in text


def test_explain_mentions_the_override(clean_environment):
    choose_backend(clean_environment, "reference", "auto")
    text = run_cli("explain", "--device", "cpu")
    assert "CUTLASS_KERNELS_BACKEND=reference is set: it replaces backend='auto'." in text
    assert "CUTLASS_KERNELS_FORCE_BACKEND=auto is set: it replaces every backend." in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--feature", "magic"), "magic"),
        (("--dtype", "float17"), "float17"),
        (("--cc", "hopper"), "write it as 90 or 9.0"),
        (("--heads", "6", "--kv-heads", "4"), "num_qo_heads=6"),
        (("--device", "nowhere"), "nowhere"),
    ],
)
def test_explain_of_nonsense(options, says):
    assert says in words(run_cli("explain", *options, code=2))


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs a torch without CUDA")
def test_explain_of_an_absent_gpu():
    assert "--compute-capability" in words(run_cli("explain", "--device", "cuda", code=2))
