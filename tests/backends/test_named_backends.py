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


# A case takes a ``target`` on the CPU or a ``kernel_backend``, may have a marker, and does what its name says. "auto"
# is the reference there; the check asks what computed, not what the case says of itself.
OTHER = "named after {}, but other backends computed: {{'reference': 1}}"
NOTHING = "FAILED .*named after {}, which computed nothing"
REFERENCE, FA2 = "target=Target('cpu', 'reference')", "target=Target('cpu', 'fa2')"
CASES = {  # name: what it takes, marker, body, outcome
    "passes": (REFERENCE, "", "call()", "PASSED"),
    "another_ran": (FA2, "", "choose_backend(monkeypatch); call()", f"FAILED .*{OTHER.format('fa2')}"),
    "auto_is_replaced": (FA2, "", "assert 'fa2' in str(pytest.raises(ValueError, call).value)", NOTHING.format("fa2")),
    "nothing_ran": (REFERENCE, "", "pass", NOTHING.format("reference")),
    "another_than_the_kernels": ("kernel_backend='fa3'", "", "call()", f"FAILED .*{OTHER.format('fa3')}"),
    "only_what_is_compared_with": (FA2, "also_runs('reference')", "call(backend='reference')", NOTHING.format("fa2")),
    "marked": (REFERENCE, "runs_nothing('it is a test of the marker')", "pass", "PASSED"),
    "marked_but_another_ran": (
        FA2,
        "runs_nothing('but another backend runs')",
        "call(backend='reference')",
        f"FAILED .*{OTHER.format('fa2')}",
    ),
    "refused_and_served_by_auto": (
        FA2,
        "",
        "monkeypatch.setitem(targets.UNSERVED, 'fa2', frozenset({'cpu'}));"
        " target.attempt(lambda backend: call(backend=backend), ['cpu'])",
        "PASSED",
    ),
    "skips": (FA2, "", "pytest.skip('says so')", "SKIPPED .*says so"),
}
HEAD = """
import pytest
import targets
from targets import Target
from environment import choose_backend
from test_named_backends import call
"""


def source() -> str:
    parts = [HEAD]
    for name, (given, marker, body, _) in CASES.items():
        parameter, _, value = given.partition("=")
        backend = re.findall(r"\w+", value)[-1]
        parts.append(f"@pytest.mark.parametrize('{parameter}', [{value}], ids=['{backend}'])")
        parts += [f"@pytest.mark.{marker}"] if marker else []
        parts.append(f"def test_{name}({parameter}, monkeypatch):\n    {body}\n")
    return "\n".join(parts)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> str:
    """What pytest says of the cases, in a process of its own."""
    folder: Path = tmp_path_factory.mktemp("cases")
    (folder / "test_cases.py").write_text(source())
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


@pytest.mark.parametrize("name", CASES)
def test_outcome(outcomes, name):
    word, _, rest = CASES[name][-1].partition(" ")
    where = "" if word == "SKIPPED" else rf".*::test_{name}\b"
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
