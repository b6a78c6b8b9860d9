"""The logits check: a batch on several ranks, or on one device, against transformers with the same tokens and weights.

It is that of the engine examples (``engines.common.forcing``), request by request. transformers in float32 says what
the logits should be, transformers in bfloat16 how far bfloat16 is from that. Decode steps are given their tokens.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from engines.common import forcing

from .batch import Batch

# Root mean square errors may be this many times those of transformers in bfloat16: the bound of all engine examples.
# Errors of float32 are 2**-16 of those of bfloat16: its bound is 65 times that.
LIMITS = {torch.bfloat16: forcing.FACTOR, torch.float32: 1e-3}


def random_tokens(lengths: list[int], vocab: int, seed: int) -> list[list[int]]:
    """The same on every rank."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(n)] for n in lengths]


def record(batch: Batch, prompts: list[list[int]], forced: list[list[int]]) -> list[forcing.Recording]:
    """Logits of the last prompt token and of every forced token, of each request. All ranks run this together."""
    recordings = []
    for prompt, tokens in zip(prompts, forced):
        recording = forcing.Recording(tokens={0: prompt + tokens})
        # The control misses half of a short prompt, 16 keys of a long one. The first token stays: every row sees a key.
        recording.hidden[0] = slice(1, 1 + min(16, len(prompt) // 2))
        recordings.append(recording)
    _add(recordings, prompts, 0, batch.prefill())
    for i, of_step in enumerate(zip(*forced)):
        logits = batch.step(torch.tensor(of_step, device=batch.tokens.device))
        _add(recordings, prompts, i + 1, logits)
    return recordings


def _add(recordings: list[forcing.Recording], prompts: list[list[int]], step: int, logits: torch.Tensor) -> None:
    for recording, prompt, row in zip(recordings, prompts, logits):
        recording.add([(0, len(prompt) - 1 + step)], "decode" if step else "prefill", row[None])


class Judge:
    """transformers with SDPA: the model in float32, and in bfloat16."""

    def __init__(self, model: Any) -> None:
        self.dtype = model.dtype
        self.exact, self.baseline = copy.deepcopy(model).float(), copy.deepcopy(model).bfloat16()
        for reference in (self.exact, self.baseline):
            reference.set_attn_implementation("sdpa")

    def judge(self, recordings: list[forcing.Recording]) -> list[dict[str, Any]]:
        """As ``engines.common.report`` prints it, for each request."""
        found = []
        for recording in recordings:
            logits = forcing.judge_by(self.exact, self.baseline, recording)
            for kind in forcing.KINDS:
                logits[kind]["ok"] &= logits[kind]["ratio"] <= LIMITS[self.dtype]
                logits["ok"] &= logits[kind]["ok"]
            found.append({"ok": logits["ok"], "logits": logits, "counts": {}, "missing": []})
        return found
