"""mini-sglang on this library: are its logits right, how fast is it, and how much of that is attention?

    python examples/engines/mini_sglang/run.py --engine ../mini-sglang
    python examples/engines/mini_sglang/run.py --engine ../mini-sglang --attention-backend fa --model llama-8b

Exit code 1 if the logits are too far from transformers' in float32, or if a step fails. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples/, whose package "engines" this is part of

from engines.common import cli
from engines.mini_sglang import engine

OTHERS = ["sdpa", "flashinfer", "sgl_kernel"]
FAMILIES = ["qwen3", "qwen2", "llama", "mistral"]


def main() -> int:
    parser = cli.make_parser(str(__doc__).split("\n")[0], OTHERS, cli.presets_of(FAMILIES))
    add = parser.add_argument
    add("--attention-backend", choices=["fi", "fa", "fa,fi"], default="fi", help="the engine's, for this library")
    add("--page-size", type=int, help="tokens of a page (check: 1 with fi, else 16; others: 256)")
    add("--helpers", choices=["auto", "flashinfer", "torch"], default="auto", help="norms, RoPE, samples")
    add("--kernels", choices=["auto", "engine", "torch"], default="auto", help="the engine's own compiled kernels")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile of --helpers torch")
    add("--eager", action="store_true", help="no CUDA graphs")
    return cli.run(parser, {"check": engine.check, "speed": engine.speed}, None, __file__)


if __name__ == "__main__":
    sys.exit(main())
