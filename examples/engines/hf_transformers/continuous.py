"""Continuous batching: ``generate_batch``, and a log of the logits of all its forward passes."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..common import forcing
from ..common.cli import OURS


def attention(name: str, own: str = "sdpa") -> str:
    """The ``attn_implementation`` of an attention of the command line. ``own``: transformers' own for this model."""
    if name == OURS:
        from cutlass_kernels.integrations.continuous_batching import register

        return register()
    if name != "sdpa":
        return name
    # Versions in which attention writes into the pages have other names.
    return "sdpa" if own == "sdpa" and "auto_switch_to_flash" in _fields() else f"paged|{own}"


def _fields() -> set[str]:
    from transformers import ContinuousBatchingConfig

    return {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}


def generate(
    model: Any, prompts: list[list[int]], new_tokens: int, sample: bool = False, keep: bool = False, **config: Any
) -> list[list[int]]:
    """The answers. ``keep``: the model keeps pages and graphs for the next call. ``config``: the engine's limits."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if "auto_switch_to_flash" in _fields():
        config["auto_switch_to_flash"] = False
    sampling = {"do_sample": True, "top_k": 0} if sample else {"do_sample": False}
    limits = {"max_new_tokens": new_tokens, "eos_token_id": -1, "pad_token_id": 0}
    results = model.generate_batch(
        inputs=prompts,
        generation_config=GenerationConfig(**limits, **sampling),
        continuous_batching_config=ContinuousBatchingConfig(**config),
        persistent_manager=keep,
    )
    errors = {result.error for result in results.values() if result.error is not None}
    if errors or len(results) < len(prompts):
        raise RuntimeError(f"generate_batch finished {len(results)} of {len(prompts)} requests; errors: {errors}")
    ordered = sorted(results.values(), key=lambda result: int(result.request_id.rsplit("_", 1)[-1]))
    for result, prompt in zip(ordered, prompts):
        assert list(result.prompt_ids) == prompt, f"{result.request_id} has another prompt"
    return [list(result.generated_tokens) for result in ordered]


class Log:
    """Logits of every forward pass, with the token and position of their rows.

    They are copied on the device, so that the CUDA graphs of the engine hold the copies and every replay adds rows.
    Which sequence a row belongs to is found afterwards: by position and token, which are drawn at random.
    """

    def __init__(self, model: Any, room: int = 12288) -> None:
        where = model.device
        self.model, self.room = model, room
        self.logits = torch.empty(room, model.config.get_text_config().vocab_size, dtype=model.dtype, device=where)
        self.places = torch.full((room, 2), -1, dtype=torch.long, device=where)  # position, token
        self.count = torch.zeros((), dtype=torch.long, device=where)

    def __enter__(self) -> Log:
        forward = self.model.forward

        @functools.wraps(forward)
        def logged(**call: Any) -> Any:
            output = forward(**call)
            rows = call["logits_indices"]
            logits = output.logits[0] if "logits_to_keep" in call else output.logits[0, rows]
            self._add(logits, torch.stack([call["position_ids"][0, rows], call["input_ids"][0, rows]], 1))
            return output

        self.model.forward = logged
        return self

    def __exit__(self, *error: object) -> None:
        del self.model.forward  # that of the class is back

    def _add(self, logits: torch.Tensor, places: torch.Tensor) -> None:
        rows = (self.count + torch.arange(len(logits), device=logits.device)).clamp(max=self.room - 1)
        self.logits.index_copy_(0, rows, logits.to(self.logits.dtype))
        self.places.index_copy_(0, rows, places.long())
        self.count.add_(len(logits))

    def recording(self, prompts: list[list[int]], answers: list[list[int]]) -> forcing.Recording:
        """The rows that chose the tokens of the answers."""
        count = int(self.count)
        if count >= self.room:
            raise RuntimeError(f"the engine computed {count} rows of logits, more than the log holds ({self.room}).")
        recording, owners = forcing.Recording(), dict[tuple[int, int], list[int]]()
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            tokens = recording.tokens[i] = prompt + answer
            for position in range(len(prompt) - 1, len(tokens) - 1):
                owners.setdefault((position, tokens[position]), []).append(i)
        for row, (position, token) in enumerate(self.places[:count].tolist()):
            # Rows of a graph's padding repeat those of requests. A place of two sequences tells nothing.
            found = owners.pop((position, token), [])
            if len(found) == 1:
                kind = "prefill" if position == len(prompts[found[0]]) - 1 else "decode"
                recording.add([(found[0], position)], kind, self.logits[row : row + 1])
        if owners:
            recording.counts["rows that were not found"] = len(owners)
        recording.counts["logged rows"] = count
        return recording
