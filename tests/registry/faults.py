"""What does not hold yet. Entries are deleted when issue 52 is mended; nothing is added without an issue."""

from __future__ import annotations

from .entry import ENTRIES

# Issue 52, fault 4: the reference and whatever joins tensors compute in the dtype of autocast, or raise.
# On the CPU.
UNDER_AUTOCAST = {name for name, entry in ENTRIES.items() if entry.attends or "rope" in name or name == "merge_state"}
