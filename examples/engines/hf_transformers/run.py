"""Hugging Face transformers on this library: are the logits right, how fast is it, and how much of that is attention?

    python examples/engines/hf_transformers/run.py
    python examples/engines/hf_transformers/run.py --against sdpa --out transformers.json

Exit code 1 if the logits are too far from transformers' in float32, or if a step fails. See README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # examples/, whose package "engines" this is part of

from engines.common import cli
from engines.hf_transformers import cases, modes, speed

OTHERS = ["sdpa", "flash_attention_2"]
FAMILIES = ["llama", "qwen3", "qwen2", "mistral"]


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in cases.CASES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"{text!r}: models are {', '.join(cases.CASES)}")
    return names


def main() -> int:
    parser = cli.make_parser(str(__doc__).split("\n")[0], OTHERS, cli.presets_of(FAMILIES), checkout=False)
    parser.add_argument("--models", type=_names, default=cases.available(), help="of the check, comma-separated")
    parser.add_argument("--new-tokens", type=cli.positive, default=128, help="tokens to generate in the benchmarks")
    parser.set_defaults(model="llama-8b", sequences=64, profile_sequences=8, profile_length=2048)
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # --help needs none
        version = "no version"
    return cli.run_package(parser, {"check": modes.check, "speed": speed.speed}, __file__, "transformers", version)


if __name__ == "__main__":
    sys.exit(main())
