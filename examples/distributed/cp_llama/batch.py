"""A batch of requests on a transformers model: one prefill of all prompts, then decode steps of one token each.

Every rank has all weights. In a prefill it computes its own tokens through all layers; in a decode step all ranks
compute the same token, and share the keys.
"""

from __future__ import annotations

from typing import Any

import torch

from cutlass_kernels.distributed import cp_indices, cp_positions

from .attention import Attention, Step
from .pages import Pages


class Batch:
    """Requests of unequal lengths, and their keys.

    Args:
        model: a causal model with ``attn_implementation`` of ``attention.register()``.
        attention: over ranks, or on one device.
        prompts: token ids of every request, the same on all ranks.
        new_tokens: the most decode steps.
        page_size: tokens of a page, and of a block in which prompts are dealt out.
    """

    def __init__(
        self, model: Any, attention: Attention, prompts: list[list[int]], new_tokens: int, page_size: int
    ) -> None:
        self.model, self.attention = model, attention
        self.seqlens = [len(prompt) for prompt in prompts]
        device, rank, world = model.device, attention.rank, attention.world
        room = [n + new_tokens for n in self.seqlens]
        self.pages = Pages(model.config, room, page_size, rank, world, device, model.dtype)
        self.tokens = torch.zeros(len(prompts), dtype=torch.int64, device=device)  # of the next step
        self.positions = torch.tensor(self.seqlens, device=device)  # of these
        self.requests = torch.arange(len(prompts), device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

        # This rank's tokens of the prompts, and which of its rows are the last ones of requests.
        rows = cp_indices(self.seqlens, rank, world, layout="interleaved", block_size=page_size)
        own = cp_positions(self.seqlens, rank, world, layout="interleaved", block_size=page_size)
        owner = torch.arange(len(prompts)).repeat_interleave(torch.tensor(self.seqlens))[rows]
        last = own == torch.tensor(self.seqlens)[owner] - 1
        ids = torch.tensor([token for prompt in prompts for token in prompt])[rows]
        self._ids, self._own = ids[None].to(device), own[None].to(device)  # [1, rows]
        self._slots = self.pages.slots(owner.to(device), own.to(device))
        self._last_rows, self._last_requests = last.nonzero()[:, 0].to(device), owner[last].to(device)

    @torch.inference_mode()
    def prefill(self) -> torch.Tensor:
        """Logits ``[B, vocab]`` of the last token of every prompt, on all ranks."""
        self.rewind()
        step = Step(self.attention, self.pages, self._slots, seqlens=self.seqlens)
        hidden = self._forward(self._ids, self._own, step)[0]  # [rows, hidden]
        # One rank has the last token of a request: the sum over ranks gives it to all.
        last = hidden.new_zeros(len(self.seqlens), hidden.size(1))
        last[self._last_requests] = hidden[self._last_rows]
        self.attention.sum(last)
        return self.model.lm_head(last)

    def rewind(self) -> None:
        """Back to the end of the prompts: later keys are overwritten."""
        self.positions.copy_(torch.tensor(self.seqlens))

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Appends one token to every request, ``[B]``, and returns the logits of the next, ``[B, vocab]``."""
        self.tokens.copy_(tokens)
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self._logits

    def _step(self) -> torch.Tensor:
        slots = self.pages.slots(self.requests, self.positions)
        step = Step(self.attention, self.pages, slots, lens=(self.positions + 1).int())
        hidden = self._forward(self.tokens[:, None], self.positions[:, None], step)
        self.positions += 1
        return self.model.lm_head(hidden[:, 0])

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """Hidden states ``[..., hidden]`` in front of the LM head."""
        return self.model.model(input_ids=ids, position_ids=positions, use_cache=False, step=step).last_hidden_state

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures a decode step in a CUDA graph, which later steps replay. All ranks capture together."""
        # What the first calls allocate and agree upon must not happen in a capture.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.rewind()
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.rewind()
        self.attention.barrier()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of NCCL ask for events meanwhile: only calls of this thread may end the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._step()
        self._graph = graph
