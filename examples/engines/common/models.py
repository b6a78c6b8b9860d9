"""Model directories with random weights: what an engine reads in place of a download.

A directory holds ``config.json``, ``model.safetensors`` in bfloat16 and a tokenizer whose words are ``t0``, ``t1``, ...
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

POSITIONS = 32768
# Queries are scaled by this. Weights as transformers draws them give almost equal softmax weights, so that a wrong page
# would hardly change a logit.
SHARPNESS = 2.0


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``family`` names the class of transformers' model."""

    family: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    theta: float = 1e6


PRESETS = {
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 16, 8, 28, 151936, tied=True),
    "qwen3-8b": Shape("qwen3", 4096, 12288, 32, 8, 8, 151936),
    "llama-8b": Shape("llama", 4096, 14336, 32, 8, 8, 128256, theta=5e5),
    "mistral-7b": Shape("mistral", 4096, 14336, 32, 8, 8, 32768),
    "qwen-28-4": Shape("qwen2", 3584, 18944, 28, 4, 8, 152064),
    "tiny": Shape("qwen3", 128, 256, 4, 2, 2, 1024, head_dim=64, tied=True, theta=1e4),
}


def shape_of(preset: str, family: str | None = None, layers: int | None = None) -> Shape:
    """The shape of a preset, with another family or number of layers where one is given."""
    shape = PRESETS[preset]
    return replace(shape, family=family or shape.family, layers=layers or shape.layers)


def model_directory(work: Path, preset: str, shape: Shape) -> Path:
    """Where the model of a shape lies below ``work``."""
    return work / f"{preset}-{shape.family}-{shape.layers}-layers"


def write_model(directory: Path, shape: Shape, device: str) -> None:
    """Writes the model and its tokenizer. The weights are the same on every call with the same device."""
    import transformers

    kind = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}[shape.family]
    options = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": shape.tied,
        "rope_theta": shape.theta,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.family != "qwen2":  # hidden / heads there
        options["head_dim"] = shape.head_dim
    if shape.family == "mistral":
        options["sliding_window"] = None
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight" if shape.family == "qwen3" else ("q_proj.weight", "q_proj.bias")):
                weight.mul_(SHARPNESS)
    directory.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(directory, shape.vocab)
    model.save_pretrained(directory)


def _write_tokenizer(directory: Path, vocab: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
    words.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", eos_token="t1", pad_token="t0")
    fast.save_pretrained(directory)


def describe(shape: Shape) -> dict[str, str | int | float | bool]:
    return asdict(shape)
