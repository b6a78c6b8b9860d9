"""Figures of the pages are those of docs/data, and nothing else that looks like one stands there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import site_figures
from paths import ROOT
from sources import digests

# A speed or a time as measured: a number with one of these units.
MEASURED = re.compile(r"\b\d[\d.,]* ?(?:TFLOP/s|TB/s|us|times as (?:fast|long)|% (?:faster|slower))(?!\w)")
# Pages whose figures have another source, which they name: the log by date, several GPUs, engines, the cost model.
OTHERS = {"docs/engines.md", "docs/multi-gpu.md", "docs/scaling.md", "docs/kernels/fa2.md", "docs/kernels/fa3.md"}
PAGES = [path for path in site_figures.PAGES if path.relative_to(ROOT).as_posix() not in OTHERS]
# Sections, by their headings, that are about such figures; and statements of limits.md, which link to the log.
SECTIONS = {"Two and four GPUs", "Slower paths", "Skipping negligible KV blocks"}


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", site_figures.PAGES, ids=names)
def test_blocks_are_what_the_data_say(path):
    text = path.read_text()
    assert text == site_figures.update(text), "run python tools/site_figures.py"
    assert text.count("<!-- figures: ") == text.count("<!-- end of figures -->")


def test_every_block_is_on_a_page():
    pages = "".join(path.read_text() for path in site_figures.PAGES)
    assert {name for name in site_figures.BLOCKS if f"<!-- figures: {name} -->" not in pages} == set()
    assert "(Not measured yet" not in pages


@pytest.mark.parametrize("path", PAGES, ids=names)
def test_no_other_figures(path):
    text = site_figures.BLOCK.sub("", path.read_text())
    for section in re.split(r"^(?=#{2,3} )", text, flags=re.MULTILINE):
        if section.splitlines()[0].lstrip("# ") not in SECTIONS:
            found = [line for line in section.splitlines() if MEASURED.search(line)]
            assert not found, f"measured by what? Add them to a block of tools/site_figures.py: {found}"


@pytest.mark.parametrize("path", sorted(site_figures.DATA.glob("*.json")), ids=lambda path: path.stem)
def test_data_say_where_they_are_from(path):
    data = json.loads(path.read_text())
    assert {"date", "command", "commit", "gpu", "torch", "sources"} <= set(data["environment"])
    assert not data["environment"]["commit"].endswith(("+", "changes"))
    assert " /" not in data["environment"]["command"], "a path of one machine"
    for result in data["results"] if path.stem != "errors" else ():  # those are not timed
        assert result["rounds"] >= 5 and result["seconds"] > 0, result


def test_blocks_name_folders_that_exist():
    assert {folder for block in site_figures.BLOCKS.values() for folder in block.folders} <= set(digests())


def test_pages_say_that_kernels_have_changed(monkeypatch):
    environment = json.loads((site_figures.DATA / "decode.json").read_text())["environment"]
    monkeypatch.setattr(site_figures, "digests", lambda: {"fa2": "new", "fa3": environment["sources"]["fa3"]})
    assert site_figures.caption(environment, ("fa2", "fa3")).endswith("The sources of fa2 have changed since.")
    assert "changed" not in site_figures.caption(environment, ("fa3",))


def test_digests_change_with_the_sources(tmp_path):
    (tmp_path / "fa2").mkdir()
    for name in ("fa2/a.h", "fa2/notes.md", "b.cu"):
        (tmp_path / name).write_text("1")
    before = digests(tmp_path)
    assert set(before) == {"fa2", "others"}
    (tmp_path / "fa2" / "notes.md").write_text("2")
    (tmp_path / "fa2" / "a.h").write_text("\n1  // a comment\n")
    assert digests(tmp_path) == before
    (tmp_path / "fa2" / "a.h").write_text("2")
    after = digests(tmp_path)
    assert after["others"] == before["others"] and after["fa2"] != before["fa2"]
