"""Attention of vLLM computed by this library: a plug-in, chosen by vLLM's option ``--attention-backend CUSTOM``.

    pip install "cutlass_kernels[vllm]"
    vllm serve <model> --attention-backend CUSTOM

``register`` is the entry point of ``vllm.general_plugins``. It imports nothing of vLLM but the registry; the backend is
imported when it is chosen.
"""

from __future__ import annotations

from .._engines import log, register_with

BACKEND = f"{__name__}.backend.CutlassKernelsBackend"


def register() -> None:
    """Makes the backend known to vLLM as ``CUSTOM``, once or several times in a process."""
    register_with("vllm", _register)


def _register() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND:
        log.warning(
            "%s is registered as vLLM's CUSTOM attention backend, so that of cutlass_kernels is not: name the plug-in "
            "to load in VLLM_PLUGINS.",
            custom.get_path(),
        )
        return
    register_backend(custom, BACKEND)
