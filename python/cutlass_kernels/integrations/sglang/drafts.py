"""Draft models: their backends for several steps, and how SGLang's factory finds them.

The factory knows backends by name, in a table that plug-ins cannot extend; a hook of SGLang's adds a row to it.
"""

from __future__ import annotations

from typing import Any

from .backend import CutlassKernelsBackend


class MultiStepDraftBackend:
    """A backend per step of a draft model: step i reads the keys of the steps before it."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        if topk > 1:
            raise NotImplementedError(
                f"cutlass_kernels does not serve drafts with topk={topk}: add --speculative-draft-attention-backend "
                "triton; the target model may stay with cutlass_kernels."
            )
        self.topk, self.speculative_num_steps = topk, speculative_num_steps
        self.kv_index_translator = model_runner.kv_index_translator
        self.attn_backends = [CutlassKernelsBackend(model_runner, step=i) for i in range(speculative_num_steps - 1)]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

        step = build_inner_fb_view(forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(step, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing is recorded: lengths and tables are written before each replay."""


def with_our_row(
    factory: Any, backend_name: str, backend_map: dict[str, Any], error_template: str, stamps_children: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook before ``DraftBackendFactory._create_backend``: its arguments with one more backend in the table.

    Backends of several steps come with ``stamps_children``, which those of a draft extension do not.
    """
    from . import NAME

    def make() -> tuple[str, Any]:
        if stamps_children:
            backend = MultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
            return NAME, backend
        return NAME, CutlassKernelsBackend(factory.draft_model_runner)

    return (factory, backend_name, {**backend_map, NAME: make}, error_template, stamps_children), {}
