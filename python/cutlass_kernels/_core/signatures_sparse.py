"""Signatures, for type checkers, of the block-sparse wrappers: see ``signatures``."""

from __future__ import annotations

from typing import Any, Literal, Protocol, overload

from torch import Tensor

from .signatures import Either, Pair, Scale

# fmt: off


class Blocks(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Scale = None, scale_k: Scale = None, scale_v: Scale = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: Literal[False] = False,
        enable_pdl: bool | None = None,
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Scale = None, scale_k: Scale = None, scale_v: Scale = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: Literal[True] = ...,
        enable_pdl: bool | None = None,
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, scale_q: Scale = None, scale_k: Scale = None, scale_v: Scale = None,
        out: Tensor | None = None, lse: Tensor | None = None, return_lse: bool = ...,
        enable_pdl: bool | None = None,
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...


class VariableBlocks(Protocol):
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: Literal[False] = False, enable_pdl: bool | None = None,
    ) -> Tensor: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: Literal[True] = ..., enable_pdl: bool | None = None,
    ) -> Pair: ...
    @overload
    def run(
        self: Any, q: Tensor, k: Tensor, v: Tensor, out: Tensor | None = None, lse: Tensor | None = None,
        return_lse: bool = ..., enable_pdl: bool | None = None,
    ) -> Either: ...
    def run(self: Any, *args: Any, **kwargs: Any) -> Any: ...
