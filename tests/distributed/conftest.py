"""Ranks with gloo on the CPU, and with NCCL where there are several GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ranks
import torch


@pytest.fixture(scope="session")
def gloo() -> Iterator[ranks.Processes]:
    yield from ranks.started("cpu", ranks.MOST)


@pytest.fixture(scope="session")
def nccl() -> Iterator[ranks.Processes]:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs, this machine has {count}")
    yield from ranks.started("cuda", min(count, ranks.MOST))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def processes(request: pytest.FixtureRequest) -> ranks.Processes:
    if request.param == "cpu" and request.node.callspec.params.get("comm") == "symmetric":
        pytest.skip("symmetric memory needs GPUs")
    found: ranks.Processes = request.getfixturevalue("nccl" if request.param == "cuda" else "gloo")
    return found
