"""Releases of serving engines that the plug-ins are made for, and what an entry point does under any other.

The contract of an attention backend moves between releases of both engines. A plug-in registers itself with the release
that its tests ran on. With another one it says so and leaves the engine as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import metadata

# By distribution: the release, of which later fixes are served, too. The extras of pyproject.toml pin the same.
SERVED = {"vllm": "0.33", "sglang": "0.5.23"}
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}

log = logging.getLogger("cutlass_kernels.integrations")


def register_with(engine: str, register: Callable[[], None]) -> bool:
    """Calls ``register`` if the installed release of ``engine`` is served. What goes wrong is logged, never raised.

    Engines call entry points while they start, for every user who has both packages installed.
    """
    try:
        installed = metadata.version(engine)
        if not is_served(engine, installed):
            log.warning(
                "cutlass_kernels serves %s %s, and %s is installed: its attention backend is not registered.",
                TITLES[engine],
                SERVED[engine],
                installed,
            )
            return False
        register()
    except Exception as error:
        log.warning("cutlass_kernels could not register its attention backend with %s: %r.", TITLES[engine], error)
        return False
    return True


def is_served(engine: str, version: str) -> bool:
    """Whether a version such as "0.33.1+cu130" is a release of ``SERVED``."""
    wanted = SERVED[engine].split(".")
    return version.split("+")[0].split(".")[: len(wanted)] == wanted
