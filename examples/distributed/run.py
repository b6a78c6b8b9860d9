"""A Llama-shaped model of transformers, context-parallel: are the logits those of one GPU, and how fast is it?

    torchrun --nproc-per-node 2 examples/distributed/run.py

Exit code 1 if the logits are too far from transformers' in float32. See README.md for two nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # examples/, whose package "engines" has the check

from cp_llama.attention import Attention, OneDevice, Ranks, register
from cp_llama.batch import Batch
from cp_llama.check import Judge, random_tokens, record
from cp_llama.speed import measure
from engines.common import models
from engines.common.cli import machine, positive
from engines.common.report import report, table

import cutlass_kernels

DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": dict(model="tiny", dtype="float32", page_size=16, new_tokens=6, prompts="150,94,45,5", timed="256,64"),
    "cuda": dict(
        model="llama-8b",
        dtype="bfloat16",
        page_size=256,
        new_tokens=16,
        prompts="9000,4090,1530,333",
        timed="32768,32768",
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=["tiny", "llama-8b"], help="cpu: tiny; cuda: llama-8b, with 8 layers")
    parser.add_argument("--layers", type=positive, help="layers, in place of the model's")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="cpu: float32; cuda: bfloat16")
    parser.add_argument("--prompts", type=_lengths, help="tokens of the prompts that are checked, comma-separated")
    parser.add_argument("--timed", type=_lengths, help="tokens of the prompts that are timed")
    parser.add_argument("--new-tokens", type=positive, help="decode steps (cpu: 6, cuda: 16)")
    parser.add_argument("--page-size", type=positive, help="tokens of a page (cpu: 16, cuda: 256)")
    parser.add_argument(
        "--comm",
        choices=["auto", "allgather", "ring", "ulysses", "hybrid"],
        default="auto",
        help="of cp_prefill; hybrid: heads among the ranks of a node, keys among nodes",
    )
    parser.add_argument("--graph", action="store_true", help="decode steps are replayed from a CUDA graph")
    return parser


def _lengths(text: str) -> list[int]:
    lengths = [int(n) for n in text.split(",")]
    if min(lengths) < 4:
        raise argparse.ArgumentTypeError(f"{text}: prompts need 4 tokens or more")
    return lengths


def parse() -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args()
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, _lengths(value) if name in ("prompts", "timed") else value)
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/distributed/run.py")
    if args.graph and args.device == "cpu":
        parser.error("--graph needs GPUs")
    world = int(os.environ["WORLD_SIZE"])
    for name in ("prompts", "timed"):
        # A model cannot compute 0 rows: transformers reshapes them with -1.
        if max(getattr(args, name)) <= (world - 1) * args.page_size:
            parser.error(f"--{name}: {world} ranks need a prompt of more than {(world - 1) * args.page_size} tokens")
    return args


def start(args: argparse.Namespace) -> torch.device:
    """Joins the process group that torchrun's variables describe. Each process of a node has a GPU of its own."""
    if args.device == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    # Calls that would fall back to PyTorch are errors.
    warnings.filterwarnings("error", category=cutlass_kernels.PerformanceWarning)
    return device


def ranks_of(args: argparse.Namespace) -> Ranks:
    """All ranks, and for "hybrid" the mesh of nodes and their ranks."""
    group = dist.group.WORLD
    assert group is not None
    if args.comm != "hybrid":
        return Ranks(group, None, args.comm)
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = dist.init_device_mesh(args.device, (dist.get_world_size() // per_node, per_node))
    return Ranks(group, mesh, args.comm)


def check(args: argparse.Namespace, model: Any, attentions: list[Attention], prints: bool) -> bool:
    """Logits on all ranks and on one device. True on ranks that do not print."""
    vocab = model.config.vocab_size
    prompts = random_tokens(args.prompts, vocab, seed=1)
    forced = random_tokens([args.new_tokens] * len(prompts), vocab, seed=2)
    recordings = {}
    for attention in attentions:
        batch = Batch(model, attention, prompts, args.new_tokens, args.page_size)
        if args.graph:
            batch.capture()
        recordings[attention.name] = record(batch, prompts, forced)
    if not prints:
        return True
    judge = Judge(model)
    runs = {
        f"{name}, {len(prompt)} tokens": {"check": found}
        for name, of_requests in recordings.items()
        for prompt, found in zip(prompts, judge.judge(of_requests))
    }
    print("\n" + report({"runs": runs}), flush=True)
    return all(run["check"]["ok"] for run in runs.values())


def time_it(args: argparse.Namespace, model: Any, attentions: list[Attention], prints: bool) -> None:
    prompts = random_tokens(args.timed, model.config.vocab_size, seed=3)
    rows = []
    for attention in attentions:
        of = measure(model, attention, prompts, args.new_tokens, args.page_size, args.graph)
        shares = [f"{share:.0%}" for share in of.get("shares", [])] or ["", ""]
        prefill = [f"{1e3 * of['prefill']:.1f}", f"{sum(args.timed) / of['prefill']:,.0f}", shares[0]]
        rows.append([attention.name, *prefill, f"{1e3 * of['decode']:.2f}", shares[1]])
    if prints:
        names = ["", "prefill ms", "tokens/s", "attention", "ms/decode step", "attention"]
        title = f"Times of the whole model, prompts of {', '.join(map(str, args.timed))} tokens"
        print("\n" + table(title, names, rows), flush=True)


def run(args: argparse.Namespace, device: torch.device) -> bool:
    """Check and times; whether the logits are right, on every rank."""
    ranks = ranks_of(args)
    prints = ranks.rank == 0
    shape = models.shape_of(args.model, "llama", args.layers)
    model = models.build(shape, str(device), initializer_range=shape.hidden**-0.5).to(getattr(torch, args.dtype))
    model.set_attn_implementation(register())
    if prints:
        print(f"{shape}, {args.dtype}, {ranks.name}\n{machine()}", flush=True)
    # Other ranks wait while the first one computes alone.
    attentions: list[Attention] = [ranks, OneDevice()] if prints else [ranks]
    every: list[Any] = [None] * ranks.world
    dist.all_gather_object(every, check(args, model, attentions, prints))
    time_it(args, model, attentions, prints)
    if prints:
        print("ok" if all(every) else "FAILED", flush=True)
    ranks.barrier()
    return all(every)


def main() -> int:
    args = parse()
    device = start(args)
    ok = run(args, device)
    # Nothing refers to the group any more: its threads end here. With gloo, one that still frees tensors while Python
    # exits would abort the process.
    dist.destroy_process_group()
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
