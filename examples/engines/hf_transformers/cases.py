"""The models of the check, and what each of them does: every mode, and every kind of attention, at least once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ..common.models import CONFIGS, Shape

VOCAB = 16384  # logits of whole prompts are kept
HYBRID = {"layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Case:
    """A model. ``options``: more of its configuration. ``modes``: of modes.MODES."""

    shape: Shape
    modes: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    own: str = "sdpa"  # transformers' own attention


CASES = {
    "llama-8b": Case(
        Shape("llama", 4096, 14336, 32, 8, 2, VOCAB, theta=5e5),
        ("dynamic", "static", "right", "packed", "continuous"),
    ),
    "qwen3-8b": Case(Shape("qwen3", 4096, 12288, 32, 8, 2, VOCAB), ("dynamic", "continuous")),
    "gemma3-4b": Case(
        Shape("gemma3", 2560, 10240, 8, 4, 2, VOCAB, head_dim=256, tied=True, theta=None),
        ("dynamic", "static", "right", "continuous"),
        {**HYBRID, "sliding_window": 512},
    ),
    # head_dim 256 in layers with a window, 512 in the others.
    "gemma4": Case(
        Shape("gemma4", 2560, 10240, 8, 4, 2, VOCAB, head_dim=256, tied=True, theta=None),
        ("dynamic", "static", "packed"),
        {**HYBRID, "sliding_window": 512, "hidden_size_per_layer_input": 0, "global_head_dim": 512},
    ),
    # All experts are chosen: rounding would choose others, and that would be no matter of attention.
    "gpt-oss-20b": Case(
        Shape("gpt_oss", 2880, 2880, 64, 8, 2, VOCAB, head_dim=64, theta=None),
        ("dynamic", "static", "continuous"),
        {**HYBRID, "sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 2},
        own="eager",
    ),
    "mistral-7b": Case(
        Shape("mistral", 4096, 14336, 32, 8, 2, VOCAB),
        ("dynamic", "packed", "continuous"),
        {"sliding_window": 256},
    ),
    "qwen-28-4": Case(Shape("qwen2", 3584, 18944, 28, 4, 2, VOCAB), ("dynamic", "continuous")),
    "bert-base": Case(Shape("bert", 768, 3072, 12, 12, 4, VOCAB, head_dim=64, theta=None), ("encoder",)),
}


def case_of(name: str, tiny: bool = False) -> Case:
    """A case, whose queries and keys are of order 1. ``tiny``: with the same ratios of heads, for a trial on a CPU."""
    case = CASES[name]
    if tiny:
        ratio, dim = case.shape.heads // case.shape.kv_heads, 32
        heads = ratio if ratio > 4 else 4
        sizes: dict[str, Any] = {
            "heads": heads,
            "kv_heads": heads // ratio,
            "head_dim": dim,
            "hidden": heads * dim,
            "layers": 2,
        }
        more = {"global_head_dim": 2 * dim} if "global_head_dim" in case.options else {}
        shape = replace(case.shape, intermediate=256, vocab=1024, **sizes)
        case = replace(case, shape=shape, options=case.options | more)
    return replace(case, options={"initializer_range": case.shape.hidden**-0.5, **case.options})


def available() -> list[str]:
    """Cases that the installed transformers has a configuration for."""
    try:
        import transformers
    except ImportError:  # --help needs none
        return list(CASES)
    return [name for name, case in CASES.items() if hasattr(transformers, CONFIGS[case.shape.family])]
