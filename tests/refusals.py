"""Calls that must be refused, with words that the message must hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guards import Guarded
from wrapper_problems import CLASSES, batch_for

import cutlass_kernels as ck


def refuse(error: type | tuple[type, ...], call: Callable[[], Any], *words: Any) -> str:
    """``call`` raises this kind of error, in a sentence that holds all the words.

    A word is a regular expression for whole words and numbers: the "2" of "int32" is none, nor the "out" of "without".
    """
    assert words, "any sentence would do: say what must be in it"
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert " " in message.strip("'\""), f"not a sentence: {message!r}"
    for word in words:
        assert re.search(rf"(?<!\w)(?:{word})(?!\w)", message), f"{word!r} is not in {message!r}"
    return message


def facts(x: Guarded) -> tuple[str, str]:
    """What a refusal of ``x`` says of it."""
    return re.escape(str(tuple(x.tensor.shape))), str(x.tensor.dtype)


class Calls:
    """One small batch, in NHD and of float16 unless said, and every kind of call on it with some arguments replaced."""

    def __init__(self, target, dtype=torch.float16):
        self.target, self.device = target, target.device
        self.batch = batch_for("paged", target, (5, 9), (20, 9), dtype=dtype)
        self.data = self.batch.paged(16)
        self.qkv = self.q, self.k, self.v = self.batch.q, self.batch.k, self.batch.v
        self.vectors = {
            "ragged": dict(qo_indptr=self.batch.qo_indptr(), kv_indptr=self.batch.kv_indptr()),
            "paged": dict(zip(("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"), self.data.table()))
            | dict(qo_indptr=self.batch.qo_indptr(), page_size=16),
        }

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def single(self, **given):
        return ck.single_prefill_with_kv_cache(**dict(zip("qkv", self.qkv)) | given)

    def decode(self, **given):
        return ck.single_decode_with_kv_cache(**dict(q=self.q[0], k=self.k, v=self.v) | given)

    def padded(self, **given):
        q, k, v = (x[:4] for x in self.qkv)
        return ck.batch_decode_with_shared_prefix_padded_kv_cache(q, k, v, k[None], v[None], **given)

    def make(self, kind, workspace=None, **constructor):
        return CLASSES[kind](self.target.workspace() if workspace is None else workspace, **constructor)

    def plan(self, kind, kv_layout="NHD", heads=(4, 2, 64), **given):
        wrapper = self.make(kind, kv_layout=kv_layout)
        sizes = dict(zip(("num_qo_heads", "num_kv_heads", "head_dim_qk"), heads))
        wrapper.plan(**self.vectors[kind] | sizes | given)
        return wrapper

    def ragged(self, **given):
        return self.plan("ragged", **given)

    def paged(self, **given):
        return self.plan("paged", **given)

    def kv_of(self, kind):
        return (self.k, self.v) if kind == "ragged" else (self.data.cache,)

    def pages_with(self, wrong):
        """The second page number is wrong."""
        indices = self.data.indices.clone()
        indices[1] = wrong
        return indices

    def run(self, kind, q=None, kv=None, plan=None, **given):
        kv = self.kv_of(kind) if kv is None else kv
        return self.plan(kind, **(plan or {})).run(self.q if q is None else q, *kv, **given)


Row = tuple[dict[str, Any], Any, str]  # arguments, the error, and a regular expression of its words


def rows(error: Any, words: str, **values: Any) -> list[Row]:
    """A row for each argument; ``words`` may hold {name} and {value}."""
    shown = {name: re.escape(repr(value)) if "{value}" in words else "" for name, value in values.items()}
    return [({x: y}, error, words.replace("{name}", x).replace("{value}", shown[x])) for x, y in values.items()]
