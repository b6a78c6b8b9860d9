"""A case that is named after a backend runs that one, or fails: the check in ``conftest.py`` tells them apart."""

from __future__ import annotations

import concurrent.futures
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ran
import torch
from paths import TESTS
from problems import make_batch

import cutlass_kernels as ck

FOLDERS = [str(TESTS), str(TESTS / "backends")]


def call(device: str = "cpu", backend: str = "auto") -> torch.Tensor:
    batch = make_batch([5], [9], 4, 2, 64, device=device)
    return ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, backend=backend)


# Each test takes what its name says. On the CPU, "auto" is the reference; the check asks what computed, not what the
# case says of itself.
CASES = """
import pytest
from targets import Target
from environment import choose_backend
from test_named_backends import call

fa2 = pytest.mark.parametrize("target", [Target("cpu", "fa2")], ids=["fa2"])
reference = pytest.mark.parametrize("target", [Target("cpu", "reference")], ids=["reference"])


@reference
def test_passes(target):
    call()


@fa2
def test_another_ran(target, monkeypatch):
    choose_backend(monkeypatch)
    call()


@fa2
def test_auto_is_replaced(target):
    with pytest.raises(ValueError, match="fa2"):
        call()


@reference
def test_nothing_ran(target):
    pass


@pytest.mark.parametrize("kernel_backend", ["fa3"])
def test_another_than_the_kernels(kernel_backend):
    call()


@fa2
@pytest.mark.also_runs("reference")
def test_only_what_is_compared_with(target):
    call(backend="reference")


@reference
@pytest.mark.runs_nothing("it is a test of the marker")
def test_marked(target):
    pass


@fa2
@pytest.mark.runs_nothing("but another backend runs")
def test_marked_but_another_ran(target):
    call(backend="reference")


@fa2
def test_refused_and_served_by_auto(target, monkeypatch):
    import targets

    monkeypatch.setitem(targets.UNSERVED, "fa2", frozenset({"cpu"}))
    target.attempt(lambda backend: call(backend=backend), ["cpu"])


@fa2
def test_skips(target):
    pytest.skip("says so")
"""
OUTCOMES = {
    "test_passes": "PASSED",
    "test_another_ran": "FAILED .*named after fa2, but other backends computed: {'reference': 1}",
    "test_auto_is_replaced": "FAILED .*named after fa2, which computed nothing",
    "test_nothing_ran": "FAILED .*named after reference, which computed nothing",
    "test_another_than_the_kernels": "FAILED .*named after fa3, but other backends computed: {'reference': 1}",
    "test_only_what_is_compared_with": "FAILED .*named after fa2, which computed nothing",
    "test_marked": "PASSED",
    "test_marked_but_another_ran": "FAILED .*named after fa2, but other backends computed: {'reference': 1}",
    "test_refused_and_served_by_auto": "PASSED",
    "test_skips": "SKIPPED .*says so",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> str:
    """What pytest says of CASES, in a process of its own."""
    folder: Path = tmp_path_factory.mktemp("cases")
    (folder / "test_cases.py").write_text(CASES)
    package = os.path.dirname(os.path.dirname(os.path.abspath(ck.__file__)))
    path = os.pathsep.join([package, *FOLDERS, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", "-rA", "--tb=no"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "COLUMNS": "1000"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", OUTCOMES)
def test_outcome(outcomes, name):
    word, _, rest = OUTCOMES[name].partition(" ")
    where = "" if word == "SKIPPED" else rf".*::{name}\b"
    assert re.search(rf"(?m)^{word}{where}.*{rest}", outcomes), outcomes


def test_counts_of_the_reference():
    before = ran.counts()
    call()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(call).result()
    assert ran.counts() - before == {"reference": 2}


def test_counts_of_kernels(kernel_backend):
    before = ran.counts()
    call("cuda:0", kernel_backend)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(call, "cuda:0", kernel_backend).result()
    assert ran.counts() - before == {kernel_backend: 2}


def test_a_replay_counts_nothing(kernel_backend):
    call("cuda:0", kernel_backend)
    torch.cuda.synchronize()
    graph, before = torch.cuda.CUDAGraph(), ran.counts()
    batch = make_batch([5], [9], 4, 2, 64, device="cuda:0")
    with torch.cuda.graph(graph):
        ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, backend=kernel_backend)
    assert ran.counts() - before == {kernel_backend: 1}
    graph.replay()
    assert ran.counts() - before == {kernel_backend: 1}


def test_every_backend_is_counted(extension):
    from cutlass_kernels import _C

    assert {*_C.backends, "reference"} == set(ran.counts())
    with pytest.raises(ValueError, match="fa17"):
        _C.launch_count("fa17")
