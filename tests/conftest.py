"""Targets, markers, seeding and hypothesis profiles shared by all tests.

A *target* is a device and a backend. A test that takes the ``target`` fixture states the contract once and runs on
every target; the ones that need a GPU carry the ``gpu`` marker and skip, saying why, where there is none.

Where tests stack many parameters and are marked ``pairwise``, the CPU runs a sample of their cases, in which every two
values that occur together still do; ``--every-case`` runs all.

A case runs the backend that it is named after and no other, or it fails. In place of ``backend="auto"`` stands the
target's. What cannot be served is listed in ``targets.UNSERVED`` and must be refused (``Target.attempt``).
"""

from __future__ import annotations

import importlib.util
import os
import random
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pairs
import pytest
import ran
import torch
from environment import choose_backend, why_no_fa3
from hypothesis import HealthCheck, Phase, settings
from targets import KERNELS, TARGETS, Target

SEED = "CK_TEST_SEED"  # of the random cases; every run draws its own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of ``-n auto``: one per core, as far as the GPU has 8 GiB for each."""
    cores = len(os.sched_getaffinity(0))
    if not torch.cuda.is_available():
        return cores
    return max(1, min(cores, torch.cuda.get_device_properties(0).total_memory >> 33))


def _why_no_gpu() -> str | None:
    if not torch.cuda.is_available():
        return "no CUDA device"
    import cutlass_kernels

    if not cutlass_kernels.list_kernels():
        return "no compiled kernels in this installation"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    package = importlib.util.find_spec("cutlass_kernels")
    if package is None or package.origin is None:  # no origin: the folder of the C++ sources
        raise pytest.UsageError("the tests need the package installed: pip install .")
    config.addinivalue_line("markers", "gpu: needs a CUDA device and compiled kernels")
    config.addinivalue_line("markers", "hopper: besides gpu, needs a device that fa3 runs on")
    config.addinivalue_line("markers", "slow: takes more than a few seconds")
    config.addinivalue_line("markers", "also_runs(backends): besides the one it is named after, the case runs these")
    config.addinivalue_line("markers", "pairwise: on the CPU a sample of the cases runs (tests/pairs.py)")
    config.addinivalue_line("markers", "runs_nothing(why): passes without computing attention in this process")
    # Threads that share an operation wait actively: for tensors of this size longer than they compute, and beside other
    # processes many times as long.
    torch.set_num_threads(1)
    ran.install()
    if config.getoption("--hypothesis-seed") is None:  # hypothesis reads it behind this
        seed = os.environ.get(SEED) or str(random.SystemRandom().randrange(2**32))
        config.option.hypothesis_seed = os.environ[SEED] = seed  # the variable reaches the processes of xdist


def _seed_of(config: pytest.Config) -> str:
    seed = config.getoption("--hypothesis-seed")
    return f"random cases are drawn with seed {seed}: {SEED}={seed} or --hypothesis-seed={seed} draws them again"


def pytest_report_header(config: pytest.Config) -> str:
    return _seed_of(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if terminalreporter.stats.get("failed"):  # also where the header is not shown
        terminalreporter.write_line(_seed_of(config))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-case", action="store_true", help="no samples of tests that are marked pairwise")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    if not config.getoption("--every-case"):
        # On a GPU all cases run: of three parameters together depend a kernel, its tile and how it reads pages.
        left_out = {x for x in pairs.outside_of_samples(items) if reason is not None or not x.get_closest_marker("gpu")}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    mark, what = ("gpu", "needs a GPU") if reason is not None else ("hopper", "needs fa3")
    if reason is None:
        reason = why_no_fa3()
    if reason is not None:
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"{what}: {reason}"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    # A test sees the same numbers alone and in the whole run.
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def named_backend(fixtures: Mapping[str, Any]) -> str | None:
    """The backend that a case is named after: its target's, or its ``kernel_backend``."""
    targets = [x.backend for x in fixtures.values() if isinstance(x, Target)]
    return targets[0] if targets else fixtures.get("kernel_backend")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A case that passes has run the backend that it is named after, and no other."""
    named = named_backend(getattr(item, "funcargs", {}))
    if named is None:
        yield
        return
    also = item.get_closest_marker("also_runs")
    with ran.recorded(named, () if also is None else also.args) as record:
        yield
    record.check(may_run_nothing=item.get_closest_marker("runs_nothing") is not None)


@pytest.fixture(scope="session", params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return request.param


@pytest.fixture(params=[x for x in TARGETS if x.marks])
def kernels(request: pytest.FixtureRequest) -> Target:
    """A target with compiled kernels, for tests of what PyTorch does not do: graphs, splits."""
    return request.param


@pytest.fixture
def calls(target: Target) -> Any:
    """Calls of every kind on the target, to be refused."""
    from refusals import Calls

    return Calls(target)


@pytest.fixture(params=KERNELS)
def kernel_backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def extension() -> Path:
    """The file of the compiled module."""
    spec = importlib.util.find_spec("cutlass_kernels._C")
    if spec is None or spec.origin is None:
        pytest.skip("cutlass_kernels is installed without compiled kernels")
    return Path(spec.origin)


@pytest.fixture(scope="session")
def library(extension: Path) -> Path:
    """The shared library with the kernels, beside the compiled module."""
    (found,) = extension.parent.glob("libcutlass_kernels.so.*")
    return found


@pytest.fixture(scope="session")
def recording_module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    from recorded_calls import load_module

    folder = tmp_path_factory.getbasetemp()
    return load_module(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)


@pytest.fixture
def gpu(recording_module: ModuleType) -> Any:
    """A stand-in for a GPU, which records what the bindings of attention launch."""
    from recorded_calls import Gpu

    return Gpu(recording_module)


@pytest.fixture(autouse=True)
def the_targets_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of "auto", which some functions take no other word for, stands the backend of the case."""
    place = next((x for x in ("target", "kernels") if x in request.fixturenames), None)
    target = None if place is None else request.getfixturevalue(place)
    if target is not None and not target.is_reference:
        choose_backend(monkeypatch, target.backend)


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No variable of ours leaks in from the caller's shell."""
    choose_backend(monkeypatch)
    for name in list(os.environ):
        if name.startswith(("CUTLASS_KERNELS_", "CK_")):
            monkeypatch.delenv(name)
    yield monkeypatch


_common: dict[str, Any] = dict(
    deadline=None,
    derandomize=False,  # hypothesis sets it where the variable CI is set
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
settings.register_profile("ci", max_examples=250, database=None, **_common)
settings.register_profile("long", max_examples=2500, phases=list(Phase), **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
