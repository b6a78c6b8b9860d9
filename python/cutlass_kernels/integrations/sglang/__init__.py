"""Attention of SGLang computed by this library: a plug-in, chosen by ``--attention-backend cutlass_kernels``.

    pip install "cutlass_kernels[sglang]"
    sglang serve --model-path <model> --attention-backend cutlass_kernels

``register`` is the entry point of ``sglang.srt.plugins``. The backend is imported when it is chosen.
"""

from __future__ import annotations

from typing import Any

from .._engines import register_with

NAME = "cutlass_kernels"


def register() -> None:
    """Adds the backend to SGLang's choices, once or several times in a process."""
    register_with("sglang", _register)


def _register() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(create)
    for choices in (ATTENTION_BACKEND_CHOICES, DRAFT_ATTENTION_BACKEND_CHOICES):
        if NAME not in choices:
            choices.append(NAME)


def create(model_runner: Any) -> Any:
    """The backend of a model runner, as SGLang asks its registry for it."""
    from .backend import CutlassKernelsBackend

    return CutlassKernelsBackend(model_runner)
