"""Targets: a device and a backend each, on which a test states the contract once.

They are no part of conftest.py, whose name a folder of tests has too: ``from conftest import`` finds either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import ran
import torch
from environment import choose_backend

# What each backend refuses when asked for by name. A feature that starts to work is removed here, and the same tests
# then require it: attempt() fails when a call that is listed as unserved goes through.
UNSERVED: dict[str, frozenset[str]] = {
    "reference": frozenset(),
    # FlashInfer's callers expect the refusal of fp8 batches (contract 0.8); single calls are served.
    "fa2": frozenset({"fp8_batch", "unaligned", "qv"}),
    # TMA cannot address a token stride of 0. attention() makes no copies of keys, and fa3 reads no e5m2.
    "fa3": frozenset({"unaligned", "stride_0", "qv", "e5m2_keys_as_they_are"}),
}
REFUSALS = (ValueError, RuntimeError, NotImplementedError, AssertionError)
WORKSPACE_BYTES = {"cpu": 1 << 20, "cuda": 128 << 20}


@dataclass(frozen=True)
class Target:
    device: str
    backend: str

    @property
    def is_reference(self) -> bool:
        return self.backend == "reference"

    def serves(self, *needs: str) -> bool:
        return not UNSERVED[self.backend].intersection(needs)

    def attempt(self, call: Callable[[str], Any], needs: Iterable[str] = ()) -> Any:
        """``call(backend)``. Where the backend does not serve ``needs`` it must refuse by name, and auto must serve."""
        if self.serves(*needs):
            return call(self.backend)
        with pytest.raises(REFUSALS) as refusal:
            call(self.backend)
        assert self.backend in str(refusal.value), f"the refusal does not name the backend: {refusal.value}"
        with pytest.MonkeyPatch.context() as environment, ran.in_place_of_a_refusal():
            choose_backend(environment)
            return call("auto")

    def workspace(self, size: int | None = None) -> torch.Tensor:
        size = WORKSPACE_BYTES[self.device.split(":")[0]] if size is None else size
        return torch.zeros(size, dtype=torch.uint8, device=self.device)

    def __str__(self) -> str:
        return f"{self.device.split(':')[0]}-{self.backend}"


TARGETS = [
    pytest.param(Target("cpu", "reference"), id="cpu-reference"),
    pytest.param(Target("cuda:0", "fa2"), id="cuda-fa2", marks=pytest.mark.gpu),
    pytest.param(Target("cuda:0", "fa3"), id="cuda-fa3", marks=[pytest.mark.gpu, pytest.mark.hopper]),
]
# The compiled backends, for tests of what the reference does not have.
KERNELS = [
    pytest.param("fa2", marks=pytest.mark.gpu),
    pytest.param("fa3", marks=[pytest.mark.gpu, pytest.mark.hopper]),
]
