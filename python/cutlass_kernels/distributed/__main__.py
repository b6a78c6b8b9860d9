"""``python -m cutlass_kernels.distributed plan``: what to expect of a number of GPUs, from the cost model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from . import _cost, _cost_decode, _plan_report
from ._gather_plan import Mask
from ._hardware import GPUS, Cluster
from ._shards import LAYOUTS

DTYPES = {"bf16": 2, "fp16": 2, "fp8": 1}
SUFFIXES = {"k": 1 << 10, "m": 1 << 20}


def count(text: str) -> int:
    """``131072``, ``128k`` or ``1M``: k is 1024, M 1024 times as many."""
    number, unit = (text[:-1], SUFFIXES[text[-1].lower()]) if text[-1:].lower() in SUFFIXES else (text, 1)
    try:
        value = float(number) * unit
    except ValueError:
        value = 0.0
    if not 1 <= value < 1 << 40 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more, such as 4096, 128k or 1M.")
    return int(value)


def counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def heads(text: str) -> tuple[int, int]:
    """``64/8``, or ``64`` with as many key heads."""
    try:
        query, key = map(int, text.split("/") if "/" in text else (text, text))
    except ValueError:
        query, key = 0, 1
    if query < 1 or key < 1 or query % key:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not query heads/key heads, the latter dividing the former: 64/8."
        )
    return query, key


EXAMPLES = """examples:
  python -m cutlass_kernels.distributed plan --tokens 128k
  python -m cutlass_kernels.distributed plan --tokens 1M --gpus 64 --gpu h200 --curve
  python -m cutlass_kernels.distributed plan --mode decode --tokens 128k --requests 8 --heads 32/8 --curve"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cutlass_kernels.distributed", description=__doc__)
    about = "expected time and efficiency of a prefill or a decode step over GPUs"
    plan = parser.add_subparsers(dest="command", required=True).add_parser(
        "plan", help=about, description=about, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(*names: str, **options: Any) -> None:
        default = options.get("default")
        if default is not None and default is not False:
            shown = "/".join(map(str, default)) if isinstance(default, tuple) else default
            options["help"] = f"{options.get('help', '')} ({shown})".strip()
        plan.add_argument(*names, **options)

    add("--gpus", type=count, default=8, help="GPUs that tokens are spread over")
    add("--gpus-per-node", type=count, default=8, help="GPUs that NVLink connects")
    add("--gpu", choices=sorted(GPUS), default="h100", help="of which kind")
    add("--mode", choices=("prefill", "decode"), default="prefill", help="a prompt, or a token per request")
    add("--tokens", type=count, help="of each request: 4096, 128k, 1M")
    add("--requests", type=count, default=1, help="of --tokens tokens each")
    add("--seqlens", type=counts, help="instead of --tokens: of every request, with commas")
    add("--heads", type=heads, default=(64, 8), help="query heads/key heads")
    add("--head-dim", type=int, choices=(64, 128, 256), default=128, help="of keys and values")
    add("--dtype", choices=sorted(DTYPES), default="bf16", help="of all tensors")
    add("--layout", choices=LAYOUTS, default="zigzag", help="which tokens a GPU has")
    add("--window", type=count, help="keys before its own that a row sees")
    add("--full", action="store_true", help="no causal mask")
    add("--graph", action="store_true", help="captured: the host does not count; decode steps always are")
    add("--comm", choices=("allgather", "ring", "ulysses", "hybrid"), help="this method only")
    add("--curve", action="store_true", help="a row for each power of two of GPUs, up to --gpus")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    args = parser.parse_args(arguments)
    if (args.tokens is None) == (args.seqlens is None):
        parser.error("Pass either --tokens, with --requests if there are several, or --seqlens.")
    lens = args.seqlens or (args.tokens,) * args.requests
    cluster = Cluster(GPUS[args.gpu], args.gpus, args.gpus_per_node)
    if args.mode == "decode":
        num_qo_heads, num_kv_heads = args.heads
        step = _cost_decode.Step(lens, num_qo_heads, num_kv_heads, args.head_dim, DTYPES[args.dtype])
        sys.stdout.write(_plan_report.decode(step, cluster, args.curve))
        return
    if args.full and args.window is not None:
        parser.error("--window needs a causal mask: leave --full away.")
    mask = Mask(-1 if args.window is None else args.window, -1 if args.full else 0, 0)
    shape = (*args.heads, args.head_dim, args.head_dim, DTYPES[args.dtype])
    problem = _cost.Problem(args.layout, 256, lens, lens, mask, *shape)
    try:
        sys.stdout.write(_plan_report.prefill(problem, cluster, args.graph, args.comm, args.curve))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
