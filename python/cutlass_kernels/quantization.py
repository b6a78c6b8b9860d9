"""Packing of boolean tensors into bits.

The attention functions take custom masks in this form with ``bitorder="little"``: bit ``i % 8`` of byte ``i // 8`` is
element ``i``.
"""

from __future__ import annotations

from ._masks.mask_packing import packbits, segment_packbits

__all__ = ["packbits", "segment_packbits"]
