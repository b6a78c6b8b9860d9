"""The example of examples/distributed as a user starts it: by torchrun, on one node, and as two nodes on one host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import python
from paths import ROOT

pytest.importorskip("transformers", reason="transformers is not installed")

SCRIPT = ROOT / "examples" / "distributed" / "run.py"
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]
# Few layers on a GPU: the test is of the commands, figures come from the whole example.
SIZES = {
    "cpu": ["--timed", "40"],
    "cuda": ["--layers", "2", "--prompts", "1100,500,7", "--timed", "2048", "--new-tokens", "8"],
}
SECONDS = 300


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def gpu_of(node: int) -> str:
    """What CUDA_VISIBLE_DEVICES of a node of one GPU is."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(node) if visible is None else visible.split(",")[node]


def launch(folder: Path, device: str, nodes: int, *options: str) -> list[tuple[int, str]]:
    """Exit code and output of the launcher of each node, for two processes in all."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, this machine has {torch.cuda.device_count()}")
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    launchers = []
    for node in range(nodes):
        counts = ["--nnodes", str(nodes), "--node-rank", str(node), "--nproc-per-node", str(2 // nodes)]
        command = [sys.executable, "-m", "torch.distributed.run", *counts, *where, str(SCRIPT), "--device", device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if device == "cuda" and nodes > 1:
            environment["CUDA_VISIBLE_DEVICES"] = gpu_of(node)
        with (folder / f"node{node}").open("w") as output:
            launchers.append(
                subprocess.Popen([*command, *options], stdout=output, stderr=subprocess.STDOUT, env=environment)
            )
    try:
        codes = [launcher.wait(SECONDS) for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.terminate()  # it ends its own processes
    return [(code, (folder / f"node{node}").read_text()) for node, code in enumerate(codes)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nodes, options", [(1, []), (2, ["--comm", "hybrid"])], ids=["one_node", "two_nodes"])
def test_logits_are_those_of_one_device(tmp_path, device, nodes, options):
    if device == "cuda" and nodes == 1:
        options = [*options, "--graph"]
    (code, text), *others = launch(tmp_path, device, nodes, *SIZES[device], *options)
    assert code == 0, text
    assert [code for code, _ in others] == [0] * (nodes - 1), others
    requests = {"cpu": 4, "cuda": 3}[device]
    for name in ("2 ranks, ", "one device, "):
        lines = [line for line in text.splitlines() if line.strip().startswith(name)]
        assert len(lines) == 2 * requests and all(line.endswith(" ok") for line in lines), text
    assert "Times of the whole model" in text and "ok" in text.splitlines()


@pytest.mark.parametrize("options, what", [([], "start it with torchrun"), (["--prompts", "3"], "4 tokens or more")])
def test_it_says_what_it_needs(monkeypatch, options, what):
    monkeypatch.delenv("RANK", raising=False)
    assert what in python(SCRIPT, "--device", "cpu", *options, code=2, timeout=SECONDS).stderr
