"""What wrappers with plans have in common: how much room a plan needs is found by planning a copy."""

from __future__ import annotations

from typing import Any

from .copying import Part

LEAST_WORKSPACE = 16  # bytes: no plan is told that it needs an empty buffer


class DryRun(Part):
    """A wrapper whose plan() ends before it writes anything where ``dry_run`` is set."""

    _dry_run = False
    _needed = (LEAST_WORKSPACE, LEAST_WORKSPACE)  # what a dry run found
    _use_cuda_graph: bool

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether index data is kept in the buffers given to the constructor."""
        return self._use_cuda_graph

    def plan(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    def workspace_size(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Bytes ``(float_workspace, int_workspace)`` that plan() with the same arguments, and its runs, need.

        The float workspace holds the partial results of KV splits; latent attention takes its memory from PyTorch. Both
        sizes are at least 16, so that a buffer of this size has an address. Arguments are checked as in plan(). Nothing
        is planned or written.

        If qo_indptr is a CUDA tensor, its last element is read back: unlike plan(), this waits for the device.
        """
        probe = Part.__copy__(self)  # which plans nothing, and so leaves what it shares
        probe._dry_run = True
        type(self).plan(probe, *args, **kwargs)  # not a function that is bound to this wrapper
        return probe._needed
