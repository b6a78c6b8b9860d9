"""nano-vllm with an attention of our choice, and what the example does with it. The engine's files are not edited."""

from __future__ import annotations

import argparse
import atexit
import gc
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch

from ..common import forcing, workloads
from ..common.shares import MARKS, profiled
from . import stand_ins

SETTLE = 3  # decode steps between the last prefill and the profiled ones


def use_attention(name: str) -> None:
    """Registers the module that nano-vllm imports as ``flash_attn``."""
    import transformers  # noqa: F401  looks for the real flash_attn, so it goes first

    if name == "ours":
        from cutlass_kernels import flash_attn as module

        sys.modules["flash_attn"] = module
    elif name != "flash_attn":  # else the package that is installed
        sys.modules["flash_attn"] = {
            "sdpa": stand_ins.sdpa,
            "varlen": stand_ins.varlen,
            "flashinfer": stand_ins.flashinfer,
        }[name]()


def load(args: argparse.Namespace, directory: Path, **config: Any) -> Any:
    """The engine, with ``args.attention`` in it."""
    use_attention(args.attention)
    sys.path.insert(0, str(args.engine.resolve()))
    from nanovllm import LLM

    llm = LLM(str(directory), enforce_eager=args.eager, tensor_parallel_size=1, **config)
    atexit.unregister(llm.exit)  # close() calls it
    return llm


def close(llm: Any) -> None:
    """Frees the GPU's memory."""
    llm.exit()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def sampling(new_tokens: int) -> Any:
    from nanovllm import SamplingParams

    return SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True)


def generate(llm: Any, requests: list[workloads.Request]) -> list[list[int]]:
    """The answers."""
    prompts, params = [r.prompt for r in requests], [sampling(r.new_tokens) for r in requests]
    return [answer["token_ids"] for answer in llm.generate(prompts, params, use_tqdm=False)]


# --- check ---


def record(llm: Any) -> tuple[forcing.Recording, dict[int, Any]]:
    """Keeps the logits that the engine's runner computes from now on, and the sequences they belong to."""
    recording, sequences = forcing.Recording(), dict[int, Any]()
    runner = llm.model_runner
    run, run_model = runner.run, runner.run_model
    places: list[tuple[Hashable, int]] = []

    def recorded_run(seqs: list[Any], is_prefill: bool) -> Any:
        places[:] = [(s.seq_id, s.num_cached_tokens + s.num_scheduled_tokens - 1) for s in seqs]
        for s in seqs:
            sequences[s.seq_id] = s
            if is_prefill:
                recording.saw_prompt(s.seq_id, s.num_cached_tokens)
                recording.counts["chunks"] += s.num_cached_tokens + s.num_scheduled_tokens < s.num_tokens
        return run(seqs, is_prefill)

    def recorded_model(input_ids: torch.Tensor, positions: torch.Tensor, is_prefill: bool) -> torch.Tensor:
        logits = run_model(input_ids, positions, is_prefill)
        recording.add(list(places), "prefill" if is_prefill else "decode", logits)
        recording.counts["graph replays"] += not (is_prefill or runner.enforce_eager or len(input_ids) > 512)
        return logits

    runner.run, runner.run_model = recorded_run, recorded_model
    return recording, sequences


def check(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The logits of the engine with prefix cache, chunks and graphs, against transformers."""
    config = {"max_num_batched_tokens": workloads.CHUNK, "max_num_seqs": 16, "max_model_len": workloads.LONGEST}
    llm = load(args, directory, gpu_memory_utilization=0.5, **config)
    vocab = llm.model_runner.config.hf_config.vocab_size
    recording, sequences = record(llm)
    requests = workloads.check_requests(vocab)
    answers = generate(llm, requests)
    generate(llm, workloads.follow_ups(requests, answers, vocab))
    recording.tokens.update({name: list(sequence.token_ids) for name, sequence in sequences.items()})
    close(llm)
    del llm
    gc.collect()
    logits = forcing.judge(str(directory), recording, "cuda" if torch.cuda.is_available() else "cpu")
    wanted = ["prompts with a cached prefix", "chunks", *([] if args.eager else ["graph replays"])]
    missing = [name for name in wanted if not recording.counts[name]]
    return {"ok": logits["ok"] and not missing, "logits": logits, "counts": dict(recording.counts), "missing": missing}


# --- bench and profile ---


def speed(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Throughput of the engine's own benchmark, and profiles of prefill and decode steps."""
    # "sdpa" gathers all pages that a request may have: shorter limits, and room for the copies, for all that it is
    # compared with. Otherwise the engine's benchmark's own settings.
    config: dict[str, Any] = {"max_model_len": 4096}
    if "sdpa" in args.against:
        longest = max(workloads.LONGEST, args.profile_length + args.profile_steps + SETTLE + 64)
        config = {"max_model_len": longest, "max_num_seqs": 256, "gpu_memory_utilization": 0.6}
    llm = load(args, directory, **config)
    vocab = llm.model_runner.config.hf_config.vocab_size
    found: dict[str, Any] = {"config": config}
    generate(llm, [workloads.Request([0] * 9, 64)])  # as the engine's benchmark does first
    if "bench" in args.steps:
        found["bench"] = bench(llm, workloads.bench_requests(args.sequences, vocab))
    if "profile" in args.steps:
        new_tokens = args.profile_steps + SETTLE + 4
        requests = workloads.profile_requests(args.profile_sequences, args.profile_length, new_tokens, vocab)
        found["profile"] = profile(llm, requests, args.profile_steps, MARKS[args.attention])
    close(llm)
    return found


def bench(llm: Any, requests: list[workloads.Request]) -> dict[str, Any]:
    """Tokens per second. A step ends when its tokens are on the CPU, so that times of steps are those of the GPU."""
    step, seconds, counts = llm.step, {True: 0.0, False: 0.0}, {True: 0, False: 0}

    def timed_step() -> Any:
        start = time.perf_counter()
        outputs, tokens = step()
        seconds[tokens > 0] += time.perf_counter() - start
        counts[tokens > 0] += 1
        return outputs, tokens

    llm.step = timed_step
    start = time.perf_counter()
    generate(llm, requests)
    total = time.perf_counter() - start
    llm.step = step
    new_tokens = sum(r.new_tokens for r in requests)
    return {
        "sequences": len(requests),
        "seconds": total,
        "prompt_tokens": sum(len(r.prompt) for r in requests),
        "new_tokens": new_tokens,
        "tokens_per_second": new_tokens / total,
        "prefill": {"steps": counts[True], "seconds": seconds[True]},
        "decode": {"steps": counts[False], "seconds": seconds[False]},
    }


def profile(llm: Any, requests: list[workloads.Request], steps: int, marks: tuple[str, ...]) -> dict[str, Any]:
    """Windows of prefill and of decode steps."""
    for request in requests:
        llm.add_request(request.prompt, sampling(request.new_tokens))

    def prefill() -> int:
        count = 0
        while llm.scheduler.waiting:
            llm.step()
            count += 1
        return count

    def decode() -> int:
        for _ in range(steps):
            llm.step()
        return steps

    found = {"prefill": profiled(prefill, marks)}
    for _ in range(SETTLE):
        llm.step()
    found["decode"] = profiled(decode, marks)
    while not llm.is_finished():
        llm.step()
    return found
