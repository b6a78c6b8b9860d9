"""Random cases are new in every run, and a failing run says how to draw them again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from paths import TESTS

import cutlass_kernels as ck

HERE = str(TESTS)
CASES = """
import os

from hypothesis import given, strategies as st


@given(x=st.integers(0, 2**60))
def test_fails_for_large_numbers(x):
    with open(os.environ["DRAWN"], "a") as file:
        print(x, file=file)
    assert x < 1000
"""


def run(folder: Path, *options: str, **variables: str) -> tuple[str, list[str]]:
    """What a failing run prints, and what it has drawn."""
    folder.mkdir(exist_ok=True)
    (folder / "test_cases.py").write_text(CASES)
    drawn = folder / "drawn"
    drawn.unlink(missing_ok=True)
    package = os.path.dirname(os.path.dirname(os.path.abspath(ck.__file__)))
    path = os.pathsep.join([package, HERE, os.environ.get("PYTHONPATH", "")])
    environment = {name: x for name, x in os.environ.items() if name not in ("CK_TEST_SEED", "HYPOTHESIS_PROFILE")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options, "test_cases.py"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env=environment | {"PYTHONPATH": path, "DRAWN": str(drawn)} | variables,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, drawn.read_text().split()


def seed_of(text: str) -> str:
    (seed,) = set(re.findall(r"drawn with seed (\d+): CK_TEST_SEED=\1 or --hypothesis-seed=\1 ", text))
    return seed


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> tuple[str, list[str]]:
    return run(tmp_path_factory.mktemp("first"))


def test_a_failure_prints_the_case_and_the_seed(first):
    text, drawn = first
    assert "x=1000" in text, text  # shrunk to the smallest
    assert "reproduce_failure" in text and seed_of(text)
    assert len(drawn) > 1


@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["", "quiet"])
def test_another_run_draws_others(first, tmp_path, quiet):
    # Also where hypothesis would draw the same ones for ever: in CI.
    text, drawn = run(tmp_path, *quiet, CI="true")
    assert seed_of(text) != seed_of(first[0])
    assert drawn != first[1]


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_seed_draws_the_same(first, tmp_path, how):
    seed = seed_of(first[0])
    options, variables = ([f"--hypothesis-seed={seed}"], {}) if how == "option" else ([], {"CK_TEST_SEED": seed})
    text, drawn = run(tmp_path, *options, **variables)
    assert seed_of(text) == seed
    assert drawn == first[1]
