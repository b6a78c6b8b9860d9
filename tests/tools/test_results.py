"""benchmarks/results: labels lead to entries, the log is in order, figures of a row are those of its entry."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
DAYS = sorted((RESULTS / "log").glob("*.md"), reverse=True)
LABEL = re.compile(r"\[(20\d\d-\d\d-\d\d[^\]]*)\](?!\(|: log/)")  # of an entry: [2026-11-29, build]
DEFINITION = re.compile(r"^\[([^\]]+)\]: (\S+)$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def entries(day: Path) -> dict[str, str]:
    """By anchor, the text of each entry of a log file."""
    _, *sections = re.split(r"^## ", day.read_text(), flags=re.MULTILINE)
    return {anchor(section.partition("\n")[0]): section for section in sections}


def numbers(text: str) -> set[str]:
    return {number.rstrip(",") for number in NUMBER.findall(text)}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_labels_of_entries_are_defined(path: Path) -> None:
    text = path.read_text()
    assert set(LABEL.findall(text.replace("\n", " "))) == {label for label, _ in DEFINITION.findall(text)}
    assert not re.search(r"\]\s?\[20", text), "a label behind another one is read as the target of the first"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_figures_of_a_row_are_those_of_its_entry(path: Path) -> None:
    text = path.read_text()
    entry_of = dict(DEFINITION.findall(text))
    for row in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        found: set[str] = set()
        for label in LABEL.findall(row):
            file, _, name = entry_of[label].partition("#")
            found |= numbers(entries(path.parent / file)[name])
        said = re.sub(r"\]\([^)]*\)", "", LABEL.sub("", row))
        if found:
            assert numbers(said) <= found, f"{row}\nnot in the entry: {sorted(numbers(said) - found)}"


@pytest.mark.parametrize("path", DAYS, ids=lambda path: path.name)
def test_a_log_file_has_headings_of_its_day(path: Path) -> None:
    headings = re.findall(r"^##? (.+)$", path.read_text(), re.MULTILINE)
    assert len(headings) > 1
    for heading in headings:
        assert path.stem[:10] in heading, f"{path.name}: {heading}"


def test_the_index_has_every_page_and_every_day() -> None:
    index = (RESULTS / "README.md").read_text()
    for path in PAGES + DAYS:
        if path.name != "README.md":
            assert f"]({path.relative_to(RESULTS).as_posix()})" in index, path.name
    for path in PAGES + DAYS:
        assert len(path.read_text().splitlines()) < 500, path.name
