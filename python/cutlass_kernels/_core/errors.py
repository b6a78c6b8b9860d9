"""What the package raises beyond Python's own errors, and warnings that point at the line of the caller."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch

# Between a caller and this package may be frames of torch: compiled functions, operators, modules.
_OWN = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (os.path.dirname(__file__), torch.__file__))


class BackendError(ValueError, RuntimeError):
    """The requested backend cannot serve the request; the message holds every reason."""


class QueryTypeError(BackendError, AssertionError):
    """A ``BackendError`` about fp8 queries, which callers of FlashInfer expect as an AssertionError."""


class PerformanceWarning(UserWarning):
    """A request on a CUDA device is computed by PyTorch, because no kernel serves it."""


def warn(text: str, category: type[Warning]) -> None:
    """``warnings.warn`` for the innermost line that is neither of this package nor of torch."""
    level, frame = 2, sys._getframe(1)  # warn()'s caller
    while _is_own(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN)
