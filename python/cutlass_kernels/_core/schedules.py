"""Schedules that calls without a plan share."""

from __future__ import annotations

from typing import Any

from .native import _C


class Schedule:
    """Who computes what in a step: made by the first call of ``attention()`` that it is passed to, used by the others.

    The layers of a model attend to requests of the same lengths. Pass one schedule to all of them, and a new one in the
    next step: the list that balances the work of unequal requests (latent attention of batches) or keeps their results
    apart (``batch_invariant``) is then written once per step instead of once per layer. Results are the same without.

    The calls that share a schedule differ in their tensors alone; sizes, options, the device, and the numbers in
    ``seqused_k`` and other lengths are the same. The first call on a stream makes it for that stream, and the first in
    each capture of a CUDA graph for that graph, at every replay anew, so that it follows new lengths; keep the object
    until the capture ends. Where no kernel needs a schedule, or PyTorch computes, it stays empty.

    Examples:
        >>> schedule = cutlass_kernels.Schedule()
        >>> q, k = torch.randn(2, 1, 16, 576, dtype=torch.float16), torch.randn(2, 100, 1, 576, dtype=torch.float16)
        >>> lens = torch.tensor([100, 7], dtype=torch.int32)
        >>> for _ in range(2):  # layers
        ...     out = cutlass_kernels.attention(q, k, k[..., :512], seqused_k=lens, schedule=schedule)
    """

    __slots__ = ("_shared", "_strict")

    def __init__(self, *, _strict: bool = True) -> None:
        self._strict = _strict  # other sizes are refused; else they renew it
        self._shared: Any = None  # made by the first call

    def __reduce__(self) -> tuple[Any, tuple[bool]]:
        return _empty, (self._strict,)  # a copy is made by its own first call

    def renew(self) -> None:
        """Makes it the schedule of a next step: the first call behind this one makes it anew."""
        if self._shared is not None:
            self._shared.renew()


def _empty(strict: bool) -> Schedule:
    return Schedule(_strict=strict)


def shared(schedule: Any) -> Any:
    """What the compiled module takes for the argument ``schedule``."""
    if schedule is None:
        return None
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule has type {type(schedule).__name__}: pass a cutlass_kernels.Schedule(), or None.")
    if schedule._shared is None and _C is not None:
        schedule._shared = _C.SharedSchedule(schedule._strict)
    return schedule._shared
