"""Models with random weights, and directories of them: what an engine reads in place of a download.

A directory holds ``config.json``, ``model.safetensors`` in bfloat16 and a tokenizer whose words are ``t0``, ``t1``, ...
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

POSITIONS = 32768
# Queries are scaled by this. Weights as transformers draws them give almost equal softmax weights, so that a wrong page
# would hardly change a logit.
SHARPNESS = 2.0
CONFIGS = {
    "qwen3": "Qwen3Config",
    "qwen2": "Qwen2Config",
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "gemma3": "Gemma3TextConfig",
    "gemma4": "Gemma4TextConfig",
    "gpt_oss": "GptOssConfig",
    "bert": "BertConfig",
}
# Norms of queries whose weight is not a plain factor: Gemma 3 adds 1, and Gemma 4 does not scale by head_dim ** -0.5.
SHARPEN_NORM = {
    "qwen3": lambda weight: weight.mul_(SHARPNESS),
    "gemma3": lambda weight: weight.add_(1).mul_(SHARPNESS).sub_(1),
    "gemma4": lambda weight: weight.mul_(SHARPNESS * weight.numel() ** -0.5),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model. ``family`` is one of CONFIGS."""

    family: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    layers: int
    vocab: int
    head_dim: int = 128
    tied: bool = False
    theta: float | None = 1e6  # of RoPE; None: as the family has it


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


def build(shape: Shape, device: str, **options: Any) -> Any:
    """The model in bfloat16. The weights are the same on every call with the same device.

    ``options``: more of the configuration.
    """
    import transformers

    sizes: dict[str, Any] = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": shape.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.family not in ("qwen2", "bert"):  # hidden / heads there
        sizes["head_dim"] = shape.head_dim
    if shape.theta is not None:
        sizes["rope_theta"] = shape.theta
    if shape.family == "mistral":
        sizes["sliding_window"] = None
    config = getattr(transformers, CONFIGS[shape.family])(**sizes | options)
    kind = transformers.AutoModelForMaskedLM if shape.family == "bert" else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    with torch.device(device):
        model = kind.from_config(config, dtype=torch.bfloat16)
    _sharpen(model, shape.family)
    return model.eval()


@torch.no_grad()
def _sharpen(model: Any, family: str) -> None:
    for name, weight in model.named_parameters():
        if family in SHARPEN_NORM:
            if name.endswith("q_norm.weight"):
                SHARPEN_NORM[family](weight)
        elif name.endswith(("q_proj.weight", "q_proj.bias", "query.weight", "query.bias")):
            weight.mul_(SHARPNESS)
        elif name.endswith("sinks"):
            weight.normal_()


def write_model(directory: Path, shape: Shape, device: str) -> None:
    """Writes the model and its tokenizer."""
    model = build(shape, device)
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


def describe(shape: Shape) -> dict[str, Any]:
    return asdict(shape)
