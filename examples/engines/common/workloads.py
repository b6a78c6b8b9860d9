"""What the engines are asked to compute: prompts of the logits check, and the benchmark that both engines ship."""

from __future__ import annotations

import random
from dataclasses import dataclass

CHUNK = 512  # tokens that a step of the check's engine takes: longer prompts are prefilled in chunks
LONGEST = 2048  # prompt and answer of every workload but that of the profile


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens to generate."""

    prompt: list[int]
    new_tokens: int


def check_requests(vocab: int) -> list[Request]:
    """Prompts that share prefixes of more than a page of 256 tokens, need chunks, or end beside a page's end."""
    draw = random.Random(1)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(2, vocab) for _ in range(count)]

    prefix = tokens(600)
    prompts = [
        prefix + tokens(37),
        prefix + tokens(90),
        tokens(250),
        prefix[:300] + tokens(11),
        tokens(1100),
        tokens(2),
        tokens(256),
        prefix + tokens(5),
    ]
    return [Request(prompt, 24 + 3 * i) for i, prompt in enumerate(prompts)]


def follow_ups(requests: list[Request], answers: list[list[int]], vocab: int) -> list[Request]:
    """Second turns: some prompts with their answers and new tokens. The engine has most of their keys already."""
    draw = random.Random(2)
    turns = []
    for i in (0, 2, 4):
        more = [draw.randrange(2, vocab) for _ in range(20 + i)]
        turns.append(Request(requests[i].prompt + answers[i] + more, 16))
    return turns


def bench_requests(count: int, vocab: int) -> list[Request]:
    """Prompts and answers of 100 to 1024 tokens, as in both engines' own benchmark, where ``count`` is 256."""
    draw = random.Random(0)
    tokens = min(10001, vocab)
    prompts = [[draw.randrange(tokens) for _ in range(draw.randint(100, 1024))] for _ in range(count)]
    return [Request(prompt, draw.randint(100, 1024)) for prompt in prompts]


def profile_requests(count: int, length: int, new_tokens: int, vocab: int) -> list[Request]:
    """Prompts of one length."""
    draw = random.Random(3)
    return [Request([draw.randrange(vocab) for _ in range(length)], new_tokens) for _ in range(count)]
