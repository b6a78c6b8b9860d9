"""A KV cache in pages for Hugging Face transformers (5.17 and newer): new tokens are written into pages, and attention
reads them there.

    from cutlass_kernels.integrations.paged_cache import PagedCache
    cache = PagedCache(model.config, batch=4, max_tokens=4096, device=model.device, dtype=model.dtype)
    model.set_attn_implementation(cache.register())
    logits = model(prompt, past_key_values=cache, use_cache=True).logits

Served: sequences of equal length, causal attention with sliding windows, soft caps and sinks; no padding, no backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from .._attend.plan_free import attention
from ..page import append_paged_kv_cache

NAME = "cutlass_kernels_paged"
_numbers = itertools.count()


class PagedCache(Cache):
    """Keys and values of all layers of a model, in pages that lie in random order, one page table for all layers.

    Args:
        config: the model's configuration.
        batch: sequences, which grow together.
        max_tokens: the most that a sequence may hold.
        device, dtype: those of the model.
        page_size: tokens of a page.
        backend: as in ``attention()``.

    Raises:
        RuntimeError: a forward pass that would exceed ``max_tokens``.
        NotImplementedError: attention that this cache does not serve.

    Examples:
        >>> cache = PagedCache(model.config, 1, 512, model.device, model.dtype)
        >>> model.set_attn_implementation(cache.register())
        >>> logits = model(ids, past_key_values=cache, use_cache=True).logits
    """

    def __init__(
        self,
        config: Any,
        batch: int,
        max_tokens: int,
        device: torch.device | str,
        dtype: torch.dtype,
        page_size: int = 16,
        backend: str = "auto",
    ) -> None:
        text = config.get_text_config(decoder=True)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.batch, self.max_tokens, self.page_size = batch, max_tokens, page_size
        self.device, self.dtype, self.backend = torch.device(device), dtype, backend
        self.length = 0  # of every sequence
        self._each = -(-max_tokens // page_size)  # pages that a sequence may have
        self._table = torch.randperm(batch * self._each, dtype=torch.int32).view(batch, self._each).to(self.device)
        shape = (batch * self._each, 2, page_size, text.num_key_value_heads, head_dim)
        super().__init__(layers=[_Layer(self, shape) for _ in range(text.num_hidden_layers)])
        self._name: str | None = None

    def register(self) -> str:
        """Makes an attention known to transformers that reads this cache, and returns its name, which no other has.

        The name outlives the cache, whose pages it does not keep: a model that still uses it then raises.
        """
        if self._name is None:
            self._name = f"{NAME}_{next(_numbers)}"
            AttentionInterface.register(self._name, functools.partial(_attend, weakref.ref(self)))
            AttentionMaskInterface.register(self._name, _mask)
        return self._name

    def begin(self, new: int) -> None:
        """Makes room for ``new`` more tokens of every sequence, once per forward pass."""
        if self.length + new > self.max_tokens:
            raise RuntimeError(
                f"this cache holds {self.length} of at most {self.max_tokens} tokens per sequence, too many for {new} "
                "more: make it with a larger max_tokens."
            )
        first, self.length = self.length, self.length + new
        used = -(-self.length // self.page_size)
        indptr = torch.arange(self.batch + 1, dtype=torch.int32) * used
        last = torch.full((self.batch,), (self.length - 1) % self.page_size + 1, dtype=torch.int32)
        owner = torch.arange(self.batch, dtype=torch.int32).repeat_interleave(new)
        position = torch.arange(first, self.length, dtype=torch.int32).repeat(self.batch)
        tensors = (owner, position, indptr, last)
        owner, position, indptr, last = (x.to(self.device, non_blocking=True) for x in tensors)
        self._places = [owner, position, self._table[:, :used].reshape(-1), indptr, last]
        self._lengths = torch.full((self.batch,), self.length, dtype=torch.int32, device=self.device)

    def write(self, pages: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the new keys and values ``[batch, heads, tokens, dim]`` of a layer into its pages."""
        owner, position, indices, indptr, last = self._places
        new_keys, new_values = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))
        append_paged_kv_cache(new_keys, new_values, owner, position, pages, indices, indptr, last)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls: q is ``[batch, heads, tokens, dim]``, the output ``[batch, tokens, heads, dim]``."""
        unserved = attention_mask is not None or more.get("position_bias") is not None or dropout > 0.0
        if unserved or not getattr(module, "is_causal", True):
            raise NotImplementedError(
                "PagedCache serves causal attention, without masks, position biases and dropout: use "
                "attn_implementation='cutlass_kernels' with transformers' own cache."
            )
        pages = self.layers[module.layer_idx].pages
        out = attention(
            query.transpose(1, 2),
            pages[:, 0],
            pages[:, 1],
            page_table=self._table,
            seqused_k=self._lengths,
            max_seqlen_k=self.length,
            causal=True,
            window=(-1 if sliding_window is None else sliding_window - 1, -1),
            logits_soft_cap=softcap,
            sm_scale=scaling,
            sinks=None if s_aux is None else s_aux.detach().reshape(-1).float(),
            backend=self.backend,
        )
        assert isinstance(out, torch.Tensor)
        return out, None


def _mask(
    q_length: int,
    kv_length: int,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    config: Any = None,
    **_: Any,
) -> None:
    """No mask, or an error: pages hold no padding, and windows come with each call."""
    if attention_mask is not None and not bool(attention_mask[:, -kv_length:].all()):
        what = "padding"
    elif not allow_is_causal_skip:
        what = "a packed, blockwise or custom mask"
    elif local_size is not None and local_size != getattr(config, "sliding_window", None):
        what = "chunked attention"
    else:
        return
    raise NotImplementedError(
        f"PagedCache does not serve {what}: use attn_implementation='cutlass_kernels' with transformers' own cache."
    )


def _attend(cache: weakref.ref[PagedCache], *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    alive = cache()
    if alive is None:
        raise RuntimeError("the PagedCache of this attention is gone: make another, and set its implementation.")
    return alive.attend(*args, **options)


class _Layer(CacheLayerMixin):
    """The pages of one layer."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: PagedCache, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.cache = cache
        self.pages = torch.empty(shape, dtype=cache.dtype, device=cache.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values, and returns them: attention reads the pages."""
        if self is self.cache.layers[0]:
            self.cache.begin(key_states.size(2))
        self.cache.write(self.pages, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.max_tokens

    def reset(self) -> None:
        self.cache.length = 0
