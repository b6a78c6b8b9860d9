"""Warnings that point at the line of the caller, however deep in the package they arise."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import torch

# Between a caller and this package may be frames of torch: compiled functions, operators, modules.
_OWN = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__))


def warn(text: str, category: type[Warning]) -> None:
    """``warnings.warn`` for the innermost line that is neither of this package nor of torch."""
    level, frame = 2, sys._getframe(1)  # warn()'s caller
    while _is_own(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN)
