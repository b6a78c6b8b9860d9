"""The ways to run a model, each with a recording of its logits, and the check of all modes of a case."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..common import forcing, models, workloads
from ..common.cli import OURS, kept_errors
from . import continuous
from .cases import case_of

NEW_TOKENS = 12
STRIDE = 29  # of the rows that are kept where a mode computes those of a whole prompt
BEFORE_END = slice(-80, -64)  # keys that the control misses: windows still reach them from the last rows

Prompts = list[list[int]]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def attention(name: str, own: str = "sdpa") -> str:
    """The ``attn_implementation`` of an attention of the command line. ``own``: transformers' own for this model."""
    if name == OURS:
        from cutlass_kernels.integrations.transformers import register

        return register()
    return own if name == "sdpa" else name


def padded(prompts: Prompts, side: str, where: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask ``[prompts, longest]``."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, tokens) in enumerate(zip(prompts, map(torch.tensor, prompts))):
        place = slice(longest - len(prompt), longest) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = tokens, 1
    return ids.to(where), mask.to(where)


# --- modes ---


def generate(model: Any, prompts: Prompts, cache: str | None = None) -> forcing.Recording:
    """A batch with padding on the left; ``cache="static"``: transformers compiles its steps on GPUs."""
    ids, mask = padded(prompts, "left", model.device)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "top_k": 0, "pad_token_id": 0}
    keep = {"output_logits": True, "return_dict_in_generate": True}
    found = model.generate(ids, attention_mask=mask, cache_implementation=cache, **options, **keep)
    recording = forcing.Recording()
    for step, logits in enumerate(found.logits):
        places: list[Any] = [(i, len(prompt) - 1 + step) for i, prompt in enumerate(prompts)]
        recording.add(places, "decode" if step else "prefill", logits)
    new = found.sequences[:, ids.size(1) :].tolist()
    recording.tokens.update({i: prompt + new[i] for i, prompt in enumerate(prompts)})
    return recording


def generate_static(model: Any, prompts: Prompts) -> forcing.Recording:
    """Counts what was compiled: a GPU has to have compiled steps."""
    from torch._dynamo.utils import counters

    counters.clear()
    recording = generate(model, prompts, "static")
    if torch.cuda.is_available():
        recording.counts["compiled graphs"] = counters["stats"]["unique_graphs"]
        recording.counts["compiled without CUDA graphs"] = counters["inductor"]["cudagraph_skips"]
    return recording


def _rows_of(prompt: list[int]) -> list[int]:
    return list(range(len(prompt) - 1, -1, -STRIDE))[::-1]


def right(model: Any, prompts: Prompts) -> forcing.Recording:
    """One forward pass with padding on the right: of causal models, and of encoders."""
    ids, mask = padded(prompts, "right", model.device)
    logits = model(input_ids=ids, attention_mask=mask).logits
    recording = forcing.Recording(tokens=dict(enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        rows = _rows_of(prompt)
        recording.add([(i, row) for row in rows], "prefill", logits[i, rows])
    return recording


def packed(model: Any, prompts: Prompts) -> forcing.Recording:
    """All prompts in one row: positions that begin again begin another sequence."""
    ids = torch.tensor([[token for prompt in prompts for token in prompt]], device=model.device)
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None].to(model.device)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
    recording, first = forcing.Recording(tokens=dict(enumerate(prompts))), 0
    for i, prompt in enumerate(prompts):
        rows = _rows_of(prompt)
        recording.add([(i, row) for row in rows], "prefill", logits[[first + row for row in rows]])
        first += len(prompt)
    return recording


def batched(model: Any, prompts: Prompts) -> forcing.Recording:
    """Continuous batching, with chunks of prompts."""
    with continuous.Log(model) as log:
        config: dict[str, Any] = {"max_batch_tokens": workloads.CHUNK, "num_blocks": 64, "max_requests_per_batch": 16}
        answers = continuous.generate(model, prompts, NEW_TOKENS, sample=True, **config)
    return log.recording(prompts, answers)


MODES: dict[str, Callable[[Any, Prompts], forcing.Recording]] = {
    "dynamic": generate,
    "static": generate_static,
    "right": right,
    "packed": packed,
    "continuous": batched,
    "encoder": right,
}
WITH_STEPS = ("dynamic", "static", "continuous")


# --- the check ---


def check(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All modes of the model ``args.part``: logits against transformers. A mode that fails leaves the others alone."""
    case = case_of(args.part, args.model == "tiny")
    model = models.build(case.shape, device(), **case.options)
    exact, baseline = copy.deepcopy(model).float(), copy.deepcopy(model)
    for reference in (exact, baseline):
        reference.set_attn_implementation(case.own)
        if "num_local_experts" in case.options:
            reference.set_experts_implementation("eager")  # others may lack float32
    prompts = [request.prompt for request in workloads.check_requests(case.shape.vocab)]
    found: dict[str, Any] = {"modes": {}, "errors": {}}
    for mode in case.modes:
        start = time.perf_counter()
        with kept_errors(found["errors"], mode), torch.no_grad():
            named = continuous.attention if mode == "continuous" else attention
            model.set_attn_implementation(named(args.attention, case.own))
            torch.manual_seed(1)
            recording = MODES[mode](model, prompts)
            of = found["modes"][mode] = _judged(mode, recording, prompts, exact, baseline)
            figures = ", ".join(f"{kind} {of['logits'][kind]['ratio']:.2f}" for kind in _kinds(mode))
            print(f"{args.part} {mode}: {figures} ({time.perf_counter() - start:.0f} s)", flush=True)
    found["ok"] = not found["errors"] and all(of["ok"] for of in found["modes"].values())
    return found


def _kinds(mode: str) -> tuple[str, ...]:
    return forcing.KINDS if mode in WITH_STEPS else ("prefill",)


def _judged(mode: str, recording: forcing.Recording, prompts: Prompts, exact: Any, baseline: Any) -> dict[str, Any]:
    for i, prompt in enumerate(prompts):
        if len(prompt) > -2 * BEFORE_END.start:
            recording.hidden[i] = slice(*(len(prompt) + x for x in (BEFORE_END.start, BEFORE_END.stop)))
    logits = forcing.judge_by(exact, baseline, recording, _kinds(mode))
    wanted = {"static": ["compiled graphs"]}.get(mode, []) if torch.cuda.is_available() else []
    counts = dict(recording.counts)
    missing = [name for name in wanted if not counts.get(name)]
    if counts.get("rows that were not found"):
        missing.append("all rows")
    return {"ok": logits["ok"] and not missing, "logits": logits, "counts": counts, "missing": missing}
