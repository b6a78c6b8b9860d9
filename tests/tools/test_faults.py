"""The table of planted faults fits the package and the tests. ``tests/faults.py`` runs it, which takes long."""

from __future__ import annotations

import collections

import pytest
from paths import ROOT

pytest.importorskip("tomllib")  # Python 3.11

from faults import PACKAGE, load


def test_each_fault_has_one_place():
    for fault in load():
        fault.planted_in((PACKAGE / fault.file).read_text())


def test_names_are_unique():
    counts = collections.Counter(fault.name for fault in load())
    assert [name for name, count in counts.items() if count > 1] == []


def test_named_tests_exist():
    for fault in load():
        assert fault.tests, fault.name
        for test in fault.tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).is_file(), f"{fault.name}: {file}"
            assert f"def {function.split('[')[0]}(" in (ROOT / file).read_text() or not function, test
