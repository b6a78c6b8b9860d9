"""Calls that must be refused, with words that the message must hold."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from guards import Guarded
from problems import make_batch

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
    """One small batch and every kind of call on it."""

    def __init__(self, target, dtype=torch.float16, kv_dtype=None):
        self.target = target
        self.batch = make_batch([5, 9], [20, 9], 4, 2, 64, dtype=dtype, kv_dtype=kv_dtype, device=target.device)
        self.data = self.batch.paged(16)
        self.qkv = (self.batch.q, self.batch.k, self.batch.v)

    def single(self, **kwargs):
        return ck.single_prefill_with_kv_cache(*self.qkv, **kwargs)

    def decode(self, **kwargs):
        return ck.single_decode_with_kv_cache(self.batch.q[0], *self.qkv[1:], **kwargs)

    def ragged(self, kv_layout="NHD", **kwargs):
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(self.target.workspace(), kv_layout)
        wrapper.plan(
            *(kwargs.pop("bounds", None) or (self.batch.qo_indptr(), self.batch.kv_indptr())),
            *(kwargs.pop("heads", None) or self.batch.heads),
            **kwargs,
        )
        return wrapper

    def paged(self, kv_layout="NHD", **kwargs):
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(self.target.workspace(), kv_layout)
        table = kwargs.pop("table", None) or (self.batch.qo_indptr(), *self.data.table())
        wrapper.plan(*table, *(kwargs.pop("heads", None) or self.batch.heads), kwargs.pop("page_size", 16), **kwargs)
        return wrapper

    def plans(self, **kwargs):
        return [lambda: self.ragged(**kwargs), lambda: self.paged(**kwargs)]
