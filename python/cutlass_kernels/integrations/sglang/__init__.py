"""Attention of SGLang computed by this library: a plug-in, chosen by ``--attention-backend cutlass_kernels``.

    pip install "cutlass_kernels[sglang]"
    sglang serve --model-path <model> --attention-backend cutlass_kernels

``register`` is the entry point of ``sglang.srt.plugins``. The backend is imported when it is chosen.
"""

from __future__ import annotations

from typing import Any

from .._engines import register_with

NAME = "cutlass_kernels"
DRAFT_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend"


def register() -> None:
    """Adds the backend to SGLang's choices, once or several times in a process."""
    register_with("sglang", _register)


def _register() -> None:
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(NAME)(create)
    if NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    for add in (
        choices.add_attention_backend_choices,
        choices.add_draft_attention_backend_choices,
        choices.add_deterministic_attention_backend_choices,
        choices.add_radix_supported_deterministic_attention_backend_choices,
    ):
        add([NAME])
    HookRegistry.register(DRAFT_FACTORY, _before_draft_backend, HookType.BEFORE)


def create(model_runner: Any) -> Any:
    """The backend of a model runner, as SGLang asks its registry for it."""
    from .backend import CutlassKernelsBackend

    return CutlassKernelsBackend(model_runner)


def _before_draft_backend(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from .drafts import with_our_row

    return with_our_row(*args, **kwargs)
