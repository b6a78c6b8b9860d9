"""The oldest PyTorch that the package asks for computes the same, without a GPU and with the same compiled module."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from paths import ROOT

import cutlass_kernels as ck

INTERPRETER = "CK_TEST_OLDEST_TORCH"
# One file of every kind of call; what other files test is above torch.
FILES = [
    "api/test_singles.py",
    "api/test_batch_wrappers.py",
    "api/test_batch_decode.py",
    "api/test_cascade.py",
    "api/test_multi_level_cascade.py",
    "fused/test_fmha_v2.py",
    "api/test_page.py",
    "api/test_quantization.py",
    "api/test_versions.py",
    "api/test_engine_sequences.py",
    "backends/test_host_checks.py",
    "api/test_threads.py",
]


def oldest() -> str:
    """Major and minor release, as pyproject.toml asks for them."""
    (release,) = re.findall(r'^dependencies = .*"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    return release


def test_the_readme_names_it():
    assert re.search(rf"PyTorch {re.escape(oldest())}, or newer", (ROOT / "docs" / "install.md").read_text())


def test_every_named_file_is_there():
    assert [name for name in FILES if not (ROOT / "tests" / name).exists()] == []


@pytest.mark.slow
def test_calls_on_the_cpu():
    interpreter = os.environ.get(INTERPRETER)
    if not interpreter:
        pytest.skip(f"{INTERPRETER} names no Python interpreter with torch {oldest()} and tests/requirements.txt")
    package = os.path.dirname(os.path.dirname(os.path.abspath(ck.__file__)))
    environment = os.environ | {"PYTHONPATH": package, "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(
        [interpreter, "-c", "import torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env=environment,
    ).stdout
    assert re.match(rf"{re.escape(oldest())}\b", found), f"{interpreter} has torch {found}"
    done = subprocess.run(
        [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES],
        capture_output=True,
        text=True,
        timeout=800,
        cwd=ROOT / "tests",
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr
    assert re.search(r"\d{3,} passed", done.stdout), done.stdout
