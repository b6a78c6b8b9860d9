"""nano-vllm on this library: are its logits right, how fast is it, and how much of that is attention?

    python examples/engines/nano_vllm/run.py --engine ../nano-vllm
    python examples/engines/nano_vllm/run.py --engine ../nano-vllm --against sdpa --out nano-vllm.json

Exit code 1 if the logits are too far from transformers' in float32, or if a step fails. See README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples/, whose package "engines" this is part of

from engines.common import cli, models
from engines.nano_vllm import engine

OTHERS = ["sdpa", "varlen", "flash_attn", "flashinfer"]


def main() -> int:
    parser = cli.make_parser(str(__doc__).split("\n")[0], OTHERS, list(models.PRESETS))
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    # The engine has one model, Qwen3: a preset gives its sizes.
    return cli.run(parser, {"check": engine.check, "speed": engine.speed}, "qwen3", __file__)


if __name__ == "__main__":
    sys.exit(main())
