"""Where calls that may be repeated are kept: by keys made here, and once more by what the compiled module reads itself.

A key of tensors' attributes takes Python 2 us to make and to compare. The compiled module reads all of it in 0.1 us
where torch describes tensors to it (DLPack's exchange API, from torch 2.10 on), and then makes the call, too. It knows
only what was found by a key before, so it never says anything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from . import _args, _streams

MOST = 64  # calls remembered together

API: Any = getattr(
    torch.Tensor, "__dlpack_c_exchange_api__", None
)  # None where there is nothing that could describe tensors
if type(API).__name__ != "PyCapsule":
    API = None


class Calls(dict[Any, Any]):
    """Calls by their keys.

    ``again(q, k, v, out, lse, sinks, return_lse, *others)`` makes one that was given to :meth:`found`, with other
    tensors of the same kind: its results, or None where none is like it. ``others`` are all else that it depends on,
    objects that never change.
    """

    again: Callable[..., Any] = staticmethod(lambda *args: None)
    find: Callable[..., Any] = staticmethod(lambda *args: None)  # what was given for such a call, which is not made
    _remember: Callable[..., None] | None = None

    @property
    def has_found(self) -> bool:
        """Whether there may be calls for :attr:`again`."""
        return self._remember is not None

    def found(self, repeat: Any, direct: Any, *args: Any) -> None:
        """Keeps what a key has found for :attr:`again`, which makes the call by ``direct`` (see ``_cuda.Call.direct``),
        or by ``repeat`` where that is None."""
        if self._remember is None:
            make = _maker()
            if make is None:
                return
            self.again, self.find, self._remember = make()
        self._remember(repeat, direct, *args)

    def __reduce__(self) -> Any:  # a copy shares no functions with this, as these know this one's calls
        return Calls, (), None, None, iter(self.items())


@functools.cache
def _maker() -> Callable[[], tuple[Callable[..., Any], ...]] | None:
    """What makes the functions of new tables; None where there is nothing that could."""
    if _args._C is None or API is None:
        return None
    make: Callable[[], tuple[Callable[..., Any], ...]] | None = _args._C.repeats(
        API, torch.Tensor, torch.empty_like, _streams.current_device, _streams.stream_of, MOST
    )
    return make
