"""mini-sglang with an attention of our choice, and what the example does with it. The engine's files are not edited."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch

from ..common import forcing, workloads
from ..common.shares import MARKS, profiled
from . import _stand_ins, modules

SETTLE = 3  # decode steps between the last prefill and the profiled ones


def load(args: argparse.Namespace, directory: Path, longest: int, **config: Any) -> tuple[Any, dict[str, str]]:
    """The engine, with ``args.attention`` in it, and what stands for what."""
    import transformers  # noqa: F401  looks for packages that are replaced here, so it goes first

    used = modules.register(args.attention, args.helpers, longest)
    if args.compile:
        _stand_ins.compiled()
    sys.path.insert(0, str(args.engine.resolve() / "python"))
    used["kernels of minisgl"] = modules.replace_kernels(args.kernels, directory)
    from minisgl.llm import LLM

    backend = {"ours": args.attention_backend, "sgl_kernel": "fa"}.get(args.attention, "fi")
    used["attention_backend"] = backend
    print(", ".join(f"{name}: {value}" for name, value in used.items()), flush=True)
    graphs = {"cuda_graph_max_bs": 0} if args.eager else {}
    config = {**config, **graphs, "max_seq_len_override": longest}
    return LLM(str(directory), attention_backend=backend, **config), used


def close(llm: Any) -> None:
    llm.shutdown()
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.default_stream())


def sampling(new_tokens: int, temperature: float = 1.0) -> Any:
    from minisgl.core import SamplingParams

    return SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=new_tokens)


def generate(llm: Any, requests: list[workloads.Request]) -> list[list[int]]:
    """The answers. Every third request is greedy."""
    params = [sampling(r.new_tokens, 1.0 if i % 3 else 0.0) for i, r in enumerate(requests)]
    return [answer["token_ids"] for answer in llm.generate([r.prompt for r in requests], params)]


# --- check ---


class Recorder:
    """Keeps the logits that the engine computes from now on. Requests are numbered anew in every turn."""

    def __init__(self, llm: Any) -> None:
        from minisgl.scheduler.prefill import ChunkedReq

        self.recording, self.turn = forcing.Recording(), 0
        counts = self.recording.counts
        engine, sampler, graphs = llm.engine, llm.engine.sampler, llm.engine.graph_runner
        forward, sample, replay = engine.forward_batch, sampler.sample, graphs.replay
        places: list[tuple[Hashable, int]] = []
        kind = [""]

        def recorded_forward(batch: Any, args: Any) -> Any:
            places[:] = [((self.turn, r.uid), r.device_len - 1) for r in batch.reqs]
            kind[0] = "prefill" if batch.is_prefill else "decode"
            for r in batch.reqs if batch.is_prefill else ():
                self.recording.saw_prompt((self.turn, r.uid), r.cached_len)
                counts["chunks"] += isinstance(r, ChunkedReq)
            return forward(batch, args)

        def recorded_sample(logits: torch.Tensor, args: Any) -> torch.Tensor:
            self.recording.add(list(places), kind[0], logits.bfloat16())  # of the graphs: bfloat16 in float32
            return sample(logits, args)

        def counted_replay(batch: Any) -> torch.Tensor:
            counts["graph replays"] += 1
            return replay(batch)

        engine.forward_batch, sampler.sample, graphs.replay = recorded_forward, recorded_sample, counted_replay

    def add_tokens(self, requests: list[workloads.Request], answers: list[list[int]]) -> None:
        """Ends a turn."""
        for uid, (request, answer) in enumerate(zip(requests, answers)):
            self.recording.tokens[(self.turn, uid)] = request.prompt + answer
        self.turn += 1


def check(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """The logits of the engine with radix cache, chunks, graphs and overlapped scheduling, against transformers."""
    page_size = args.page_size or (1 if args.attention_backend == "fi" else 16)
    config = {"max_extend_tokens": workloads.CHUNK, "max_running_req": 16, "cuda_graph_max_bs": 16}
    llm, used = load(args, directory, workloads.LONGEST, page_size=page_size, memory_ratio=0.5, **config)
    vocab = llm.engine.sampler.vocab_size
    recorder = Recorder(llm)
    requests = workloads.check_requests(vocab)
    answers = generate(llm, requests)
    recorder.add_tokens(requests, answers)
    more = workloads.follow_ups(requests, answers, vocab)
    recorder.add_tokens(more, generate(llm, more))
    recording = recorder.recording
    close(llm)
    del llm, recorder
    gc.collect()
    logits = forcing.judge(str(directory), recording, "cuda" if torch.cuda.is_available() else "cpu")
    wanted = ["prompts with a cached prefix", "chunks", *([] if args.eager else ["graph replays"])]
    missing = [name for name in wanted if not recording.counts[name]]
    found = {"logits": logits, "counts": dict(recording.counts), "missing": missing, "used": used}
    return {"ok": logits["ok"] and not missing, "page_size": page_size, **found}


# --- bench and profile ---


def speed(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Throughput of the engine's own benchmark, and profiles of prefill and decode steps."""
    # The settings of the engine's benchmark. "sdpa" gathers as many keys as a request may have: shorter limits, and
    # room for the copies, for all that it is compared with.
    config = {"max_extend_tokens": 16384, "cuda_graph_max_bs": 256, "page_size": args.page_size or 256}
    longest, ratio = 4096, 0.9
    if "sdpa" in args.against:
        longest = max(workloads.LONGEST, args.profile_length + args.profile_steps + SETTLE + 64)
        ratio = 0.6
    llm, used = load(args, directory, longest, memory_ratio=ratio, **config)
    vocab = llm.engine.sampler.vocab_size
    found: dict[str, Any] = {"config": {**config, "longest": longest, "memory_ratio": ratio}, "used": used}
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
    """Tokens per second."""
    prompts, params = [r.prompt for r in requests], [sampling(r.new_tokens, 0.6) for r in requests]
    start = time.perf_counter()
    llm.generate(prompts, params)
    total = time.perf_counter() - start
    new_tokens = sum(r.new_tokens for r in requests)
    return {
        "sequences": len(requests),
        "seconds": total,
        "prompt_tokens": sum(len(prompt) for prompt in prompts),
        "new_tokens": new_tokens,
        "tokens_per_second": new_tokens / total,
    }


@torch.inference_mode()
def profile(llm: Any, requests: list[workloads.Request], steps: int, marks: tuple[str, ...]) -> dict[str, Any]:
    """Windows of prefill and of decode steps. A step launches a batch and reads the tokens of the one before."""
    from minisgl.llm.llm import RequestAllFinished

    llm.pending_requests = [(r.prompt, sampling(r.new_tokens)) for r in requests]
    llm.status_map, llm.counter = {}, 0
    launched: list[Any] = [None]

    def step() -> None:
        launched[0] = llm.overlap_loop(launched[0])

    def prefill() -> int:
        count = 0
        while llm.pending_requests or llm.prefill_manager.runnable:
            step()
            count += 1
        return count

    def decode() -> int:
        for _ in range(steps):
            step()
        return steps

    found = {"prefill": profiled(prefill, marks)}
    for _ in range(SETTLE):
        step()
    found["decode"] = profiled(decode, marks)
    try:
        while True:
            step()
    except RequestAllFinished:
        return found
