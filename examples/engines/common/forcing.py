"""The logits check: what an engine computed, against transformers with the same tokens and weights.

The engine runs as it always does, and samples. Each row of logits is kept with its sequence and position. Afterwards
transformers reads the whole sequences in one pass each, "teacher-forced" by the tokens that the engine chose:

    exact      float32, SDPA: what the logits should be
    baseline   bfloat16, SDPA: how far bfloat16 is from that
    control    float32, but 16 keys are hidden: how far a wrong page of 16 keys would be

The engine may be FACTOR times as far from ``exact`` as ``baseline`` is, in the root mean square over all logits, and
MAX_FACTOR times in the largest difference. The control has to be beyond that bound, or else the check shows nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch

FACTOR = 1.5
MAX_FACTOR = 2.0
HIDDEN_KEYS = slice(64, 80)  # of the control, unless a recording names others
KINDS = ("prefill", "decode")


@dataclass
class Row:
    """Logits ``[vocab]`` of the token after ``position``."""

    position: int
    kind: str  # of KINDS
    logits: torch.Tensor


@dataclass
class Recording:
    """Rows of logits by sequence, and what the engine did meanwhile."""

    rows: dict[Hashable, list[Row]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[Hashable, list[int]] = field(default_factory=dict)  # prompt and answer
    hidden: dict[Hashable, slice] = field(default_factory=dict)  # keys that the control misses
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, places: list[tuple[Hashable, int]], kind: str, logits: torch.Tensor) -> None:
        """``logits`` ``[len(places), vocab]`` of sequences and positions."""
        copy = logits.detach().to("cpu", copy=True)
        for (sequence, position), row in zip(places, copy):
            self.rows[sequence].append(Row(position, kind, row))

    def saw_prompt(self, sequence: Hashable, cached: int) -> None:
        """Counts a prompt's first step: so many of its tokens came from the prefix cache."""
        if sequence not in self.rows:
            self.counts["prompts with a cached prefix"] += cached > 0
            self.counts["cached tokens"] += cached


@dataclass
class Distance:
    """From the exact logits: sum of squares and largest difference."""

    squares: float = 0.0
    largest: float = 0.0

    def add(self, logits: torch.Tensor, exact: torch.Tensor) -> None:
        difference = (logits.to(exact) - exact).abs()
        if not bool(difference.isfinite().all()):
            self.squares = self.largest = math.inf
            return
        self.squares += float(difference.double().square().sum())
        self.largest = max(self.largest, float(difference.max()))


@torch.inference_mode()
def logits_at(model: Any, tokens: list[int], positions: list[int], hide: slice | None = None) -> torch.Tensor:
    """Logits ``[positions, vocab]`` of a transformers model. No row sees the keys of ``hide``."""
    mask = torch.ones(1, len(tokens), dtype=torch.long, device=model.device)
    if hide is not None:
        mask[:, hide] = 0
    ids = torch.tensor([tokens], device=model.device)
    keep = torch.tensor(positions, device=model.device)
    if not model.can_generate():  # an encoder
        return model(input_ids=ids, attention_mask=mask).logits[0, keep]
    return model(input_ids=ids, attention_mask=mask, logits_to_keep=keep, use_cache=False).logits[0]


def judge(directory: str, recording: Recording, device: str) -> dict[str, Any]:
    """Errors of a recording against the model of ``directory``, the bound, and whether all is well."""
    from transformers import AutoModelForCausalLM

    exact, baseline = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="sdpa").to(device)
        for dtype in (torch.float32, torch.bfloat16)
    )
    return judge_by(exact, baseline, recording)


def judge_by(
    exact_model: Any, baseline_model: Any, recording: Recording, kinds: tuple[str, ...] = KINDS
) -> dict[str, Any]:
    """As ``judge()``, by models in float32 and in bfloat16. ``kinds`` are those that should have rows."""
    torch.set_float32_matmul_precision("highest")
    device = exact_model.device
    names = ("engine", "baseline", "control")
    distances = {kind: {name: Distance() for name in names} for kind in kinds}
    count, square, largest = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0.0), dict.fromkeys(kinds, 0.0)
    for sequence, rows in recording.rows.items():
        tokens, positions = recording.tokens[sequence], [row.position for row in rows]
        tokens = tokens[: max(positions) + 1]
        hidden = recording.hidden.get(sequence, HIDDEN_KEYS)
        exact = logits_at(exact_model, tokens, positions).float()
        given = {
            "engine": torch.stack([row.logits for row in rows]).to(device),
            "baseline": logits_at(baseline_model, tokens, positions),
            "control": logits_at(exact_model, tokens, positions, hidden),
        }
        for kind in kinds:
            mine = [i for i, row in enumerate(rows) if row.kind == kind]
            if not mine:
                continue
            count[kind] += len(mine)
            square[kind] += float(exact[mine].double().square().sum())
            largest[kind] = max(largest[kind], float(exact[mine].abs().max()))
            for name, logits in given.items():
                # The control tells nothing of short sequences: their hidden keys are later than their rows.
                if name == "control" and len(tokens) <= hidden.stop:
                    continue
                distances[kind][name].add(logits[mine], exact[mine])
    vocab = next(iter(recording.rows.values()))[0].logits.numel()
    return verdict(distances, count, {kind: (square[kind], largest[kind]) for kind in kinds}, vocab)


def verdict(
    distances: dict[str, dict[str, Distance]],
    count: dict[str, int],
    sizes: dict[str, tuple[float, float]],
    vocab: int,
) -> dict[str, Any]:
    """The figures of each kind of row, and ``ok``. ``sizes``: sum of squares and largest of the exact logits."""
    result: dict[str, Any] = {"ok": True, "factor": FACTOR, "max_factor": MAX_FACTOR}
    for kind, found in distances.items():
        values = max(count[kind] * vocab, 1)
        rms = {name: math.sqrt(distance.squares / values) for name, distance in found.items()}
        # One unit in the last place of the largest logit: what rounding a logit to bfloat16 can cost.
        floor = torch.finfo(torch.bfloat16).eps * sizes[kind][1]
        bound, max_bound = FACTOR * rms["baseline"], MAX_FACTOR * found["baseline"].largest + floor
        fine = count[kind] > 0 and rms["engine"] <= bound and found["engine"].largest <= max_bound
        sharp = rms["control"] > bound
        result[kind] = {
            "rows": count[kind],
            "logits_rms": math.sqrt(sizes[kind][0] / values),
            "rms": rms["engine"],
            "baseline_rms": rms["baseline"],
            "control_rms": rms["control"],
            "ratio": rms["engine"] / max(rms["baseline"], 1e-30),
            "max": found["engine"].largest,
            "baseline_max": found["baseline"].largest,
            "ok": fine and sharp,
            "control_ok": sharp,
        }
        result["ok"] &= fine and sharp
    return result
