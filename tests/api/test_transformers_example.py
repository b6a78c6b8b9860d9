"""The engine example of transformers, with tiny models on the CPU: modes of the check, log, benchmark, command line."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")
sys.path.insert(0, str(ROOT / "examples"))  # whose package "engines" is tested

from engines.common import cli, report, workloads
from engines.hf_transformers import cases, continuous, modes, run, speed

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="tiny models stand in for the example where it cannot run: on a GPU, run it"
)


def options(**more: Any) -> argparse.Namespace:
    sizes = dict(new_tokens=3, profile_sequences=2, profile_length=9, profile_steps=2, sequences=2, layers=None)
    return argparse.Namespace(**{"model": "tiny", "attention": "ours", "steps": ["bench", "profile"], **sizes, **more})


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch):
    def requests(lengths: list[int], vocab: int) -> list[workloads.Request]:
        generator = torch.Generator().manual_seed(0)
        return [workloads.Request(torch.randint(2, vocab, (n,), generator=generator).tolist(), 3) for n in lengths]

    monkeypatch.setattr(workloads, "check_requests", lambda vocab: requests([180, 170, 2], vocab))
    monkeypatch.setattr(workloads, "bench_requests", lambda count, vocab: requests([5, 9] * (count // 2), vocab))
    monkeypatch.setattr(modes, "NEW_TOKENS", 4)


def test_every_mode_has_a_model():
    assert {mode for case in cases.CASES.values() for mode in case.modes} == set(modes.MODES)
    for name in cases.CASES:
        tiny = cases.case_of(name, tiny=True).shape
        assert tiny.hidden == tiny.heads * tiny.head_dim and tiny.heads % tiny.kv_heads == 0
    assert cases.case_of("qwen-28-4", tiny=True).shape.heads == 7


@pytest.mark.parametrize("name", ["llama-8b", "gemma3-4b", "gemma4", "gpt-oss-20b", "mistral-7b", "bert-base"])
def test_check(name):
    if name not in cases.available():
        pytest.skip(f"transformers {version('transformers')} does not have {name}")
    found = modes.check(options(part=name), Path())
    assert found["ok"], found["errors"] or report.report({"runs": {"ours": {f"check {name}": found}}})
    assert tuple(found["modes"]) == cases.CASES[name].modes
    for mode, of in found["modes"].items():
        assert set(of["logits"]) >= set(modes._kinds(mode)) and not of["missing"]


def test_a_mode_that_fails_and_one_that_is_wrong(monkeypatch):
    def fails(model: Any, prompts: Any) -> Any:
        raise RuntimeError("no such luck")

    def wrong(model: Any, prompts: Any) -> Any:
        recording = modes.right(model, prompts)
        recording.rows[0][-1].logits += 1
        return recording

    monkeypatch.setattr(modes, "MODES", {**modes.MODES, "dynamic": fails, "static": wrong})
    monkeypatch.setattr(modes, "WITH_STEPS", ("continuous",))
    found = modes.check(options(part="llama-8b"), Path())
    assert not found["ok"] and found["errors"] == {"dynamic": "RuntimeError: no such luck"}
    assert {mode: of["ok"] for mode, of in found["modes"].items()} == {
        "static": False,
        "right": True,
        "packed": True,
        "continuous": True,
    }
    text = report.report({"runs": {"ours": {"check llama-8b": found}}})
    assert "ours, check llama-8b dynamic: FAILED\n  RuntimeError: no such luck" in text
    assert "ours llama-8b static" in text and text.count("TOO FAR") == 1


def test_log():
    """Rows of padding repeat others; a token at a position of two sequences tells nothing."""

    class Model(torch.nn.Module):
        device, dtype = torch.device("cpu"), torch.float32
        config = argparse.Namespace(get_text_config=lambda: argparse.Namespace(vocab_size=2))

        def forward(self, **call: Any) -> Any:
            return argparse.Namespace(logits=torch.stack([call["input_ids"][0], call["position_ids"][0]], 1)[None])

    model = Model()
    with continuous.Log(model, room=8) as log:
        ids, places = torch.tensor([[5, 7, 8, 7]]), torch.tensor([[0, 1, 1, 2]])
        rows = torch.tensor([1, 2, 3, 0, 1])
        model(input_ids=ids, position_ids=places, logits_indices=rows)
    assert "forward" not in vars(model)
    recording = log.recording([[5, 7], [6, 8], [5, 9]], [[7, 1], [3, 1], [2, 1]])
    found = {i: [(row.position, row.kind, row.logits.tolist()) for row in rows] for i, rows in recording.rows.items()}
    assert found == {0: [(1, "prefill", [7, 1]), (2, "decode", [7, 2])], 1: [(1, "prefill", [8, 1])]}
    assert recording.counts["rows that were not found"] == 3  # of sequences 1 and 2
    assert dict(continuous.Log(model).recording([[1, 2], [3, 2]], [[0], [0]]).rows) == {}
    with continuous.Log(model, room=5) as log, pytest.raises(RuntimeError, match="more than the log holds"):
        model(input_ids=ids, position_ids=places, logits_indices=rows)
        log.recording([], [])


@pytest.mark.parametrize("attention", ["ours", "sdpa"])
def test_speed(attention):
    found = speed.speed(options(attention=attention), Path())
    assert found["ok"], found["errors"]
    bench, profile = found["bench"]["modes"], found["profile"]
    assert list(bench) == ["prefill", "dynamic", "static", "continuous"]
    assert list(profile) == ["continuous", "prefill", "decode, dynamic", "decode, static"]  # after all that is timed
    assert bench["prefill"]["new_tokens"] == 0 < bench["static"]["new_tokens"] == 2 * 7
    assert bench["continuous"] | {"seconds": 1, "tokens_per_second": 1} == dict(
        sequences=2, seconds=1, prompt_tokens=14, new_tokens=6, tokens_per_second=1
    )
    text = report.report({"runs": {attention: {"speed": found}}})
    assert f"{attention} continuous" in text and "FAILED" not in text


def test_command_line(monkeypatch, tmp_path, capsys):
    """A process for each model; one without a result fails alone."""
    children = []

    def spawn(args: Any, arguments: Any, child: str, script: str) -> dict[str, Any]:
        children.append(child)
        return {"error": "gone"} if child.endswith("bert-base") else {"ok": True, "modes": {}, "errors": {}}

    monkeypatch.setattr(cli, "_spawn", spawn)
    out = tmp_path / "out.json"
    command = ["run.py", "--models", "bert-base,llama-8b", "--against", "sdpa", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert run.main() == 1
    assert children == ["check:ours:bert-base", "check:ours:llama-8b", "speed:ours", "speed:sdpa"]
    assert "ours, check bert-base: FAILED\n  gone" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert results["runs"]["ours"]["check llama-8b"]["ok"] and not results["ok"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--models", "gpt-5"])
    with pytest.raises(SystemExit):
        run.main()
