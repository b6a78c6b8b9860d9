"""Throughput of prompts, of ``generate`` and of ``generate_batch``, and the share of attention."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ..common import models, workloads
from ..common.cli import kept_errors
from ..common.shares import MARKS, profiled, window
from . import continuous
from .modes import attention, device, padded

SETTLE = 3  # steps before the profiled ones
REPEATS = 3
PAGE, PROMPT = 256, 1024  # tokens of the engine's pages, and of the longest prompt of workloads.bench_requests
CACHES = {"dynamic": None, "static": "static"}  # transformers compiles steps on static caches


class Batch:
    """A left-padded batch: prompts of half the length to the whole."""

    def __init__(self, model: Any, args: argparse.Namespace) -> None:
        draw = random.Random(4)
        vocab, length = model.config.vocab_size, args.profile_length
        lengths = [length, *(draw.randint(length // 2, length) for _ in range(args.profile_sequences - 1))]
        self.prompts = [[draw.randrange(1, vocab) for _ in range(n)] for n in lengths]
        self.model, (self.ids, self.mask) = model, padded(self.prompts, "left", model.device)
        # One number, so that the profile runs what was compiled for the benchmark.
        self.new_tokens = max(args.new_tokens, SETTLE + args.profile_steps + 2)
        self.tokens = sum(lengths)

    def prefill(self) -> int:
        """The forward pass of the prompts, as ``generate`` makes it: one step."""
        self.model(self.ids, attention_mask=self.mask, use_cache=True, logits_to_keep=1)
        return 1

    def generate(self, cache: str, **options: Any) -> None:
        options |= {"max_new_tokens": self.new_tokens, "do_sample": False, "pad_token_id": 0}
        self.model.generate(self.ids, attention_mask=self.mask, cache_implementation=CACHES[cache], **options)


def speed(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Benchmarks and profiles. One that fails leaves the others alone."""
    model = models.build(models.shape_of(args.model, None, args.layers), device())
    found: dict[str, Any] = {"errors": {}}
    if "bench" in args.steps:
        found["bench"] = {"modes": {}}
    if "profile" in args.steps:
        found["profile"] = {}
    with torch.no_grad():
        batch = Batch(model, args)
        model.set_attn_implementation(attention(args.attention))
        modes = ("prefill", "dynamic", "static")
        for name in modes if "bench" in found else ():
            with kept_errors(found["errors"], name):
                _bench(name, batch, found)
        with kept_errors(found["errors"], "continuous"):
            _continuous(model, args, found)
        model.set_attn_implementation(attention(args.attention))
        for name in modes if "profile" in found else ():  # once the profiler ran, launches take longer
            with kept_errors(found["errors"], f"profile of {name}"):
                _profile(name, batch, args, found)
    return {**found, "ok": not found["errors"]}


def _call(name: str, batch: Batch) -> Callable[[], int | None]:
    """Prompts, or generation with a cache."""
    call: Callable[[], int | None] = batch.prefill if name == "prefill" else lambda: batch.generate(name)
    for _ in range(2):  # the second call records CUDA graphs of what the first one compiled
        call()
    return call


def _bench(name: str, batch: Batch, found: dict[str, Any]) -> None:
    call = _call(name, batch)
    new_tokens = 0 if name == "prefill" else len(batch.prompts) * batch.new_tokens
    seconds = statistics.median(_seconds(call) for _ in range(REPEATS))
    found["bench"]["modes"][name] = _figures(name, len(batch.prompts), batch.tokens, new_tokens, seconds)


def _profile(name: str, batch: Batch, args: argparse.Namespace, found: dict[str, Any]) -> None:
    _call(name, batch)
    marks = MARKS[args.attention]
    if name == "prefill":
        found["profile"][name] = profiled(batch.prefill, marks)
    else:
        found["profile"][f"decode, {name}"] = _profiled_steps(batch, name, args.profile_steps, marks)


def _profiled_steps(batch: Batch, cache: str, steps: int, marks: tuple[str, ...]) -> dict[str, Any]:
    """A window of decode steps: a criterion, which ``generate`` asks after every step, opens and closes it."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    found: dict[str, Any] = {"steps": steps}
    opened = ExitStack()

    class Window(StoppingCriteria):
        count = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            self.count += 1
            if self.count == SETTLE:
                opened.enter_context(window(found, marks))
            if self.count == SETTLE + steps:
                opened.close()
            return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    with opened:
        batch.generate(cache, stopping_criteria=StoppingCriteriaList([Window()]))
    return found


def _continuous(model: Any, args: argparse.Namespace, found: dict[str, Any]) -> None:
    """The first call makes the pages and captures the graphs. Every call has prompts of its own: pages are shared.

    All requests have room. The engine's own choice, most of the memory, would cost SDPA a mask of all of that.
    """
    model.set_attn_implementation(continuous.attention(args.attention))
    requests = workloads.bench_requests(3 * args.sequences, model.config.vocab_size)
    turns = [[r.prompt for r in requests[i::3]] for i in range(3)]

    limits: dict[str, Any] = {
        "num_blocks": args.sequences * -(-(PROMPT + args.new_tokens) // PAGE),
        "max_batch_tokens": 2048,
    }

    def turn(prompts: list[list[int]]) -> int:
        continuous.generate(model, prompts, args.new_tokens, keep=True, **limits)
        return args.new_tokens

    try:
        turn(turns[0])
        if "bench" in found:
            seconds = _seconds(lambda: turn(turns[1]))
            prompt_tokens, new_tokens = sum(map(len, turns[1])), len(turns[1]) * args.new_tokens
            figures = _figures("continuous", len(turns[1]), prompt_tokens, new_tokens, seconds)
            found["bench"]["modes"]["continuous"] = figures
        if "profile" in found:
            found["profile"]["continuous"] = profiled(lambda: turn(turns[2]), MARKS[args.attention])
    finally:
        model.destroy_cached_continuous_batching_manager()


def _seconds(call: Callable[[], Any]) -> float:
    """Wall time of ``call`` with the GPU idle before and after."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _figures(name: str, sequences: int, prompt_tokens: int, new_tokens: int, seconds: float) -> dict[str, Any]:
    figures = {
        "sequences": sequences,
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "tokens_per_second": (new_tokens or prompt_tokens) / seconds,
    }
    print(f"{name}: {figures['tokens_per_second']:,.0f} tokens per second", flush=True)
    return figures
