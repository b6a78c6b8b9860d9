"""A KV cache in pages for Hugging Face transformers (5.17 and newer): new tokens are written into pages, and attention
reads them there, through the wrapper for decode where there are few new tokens, else through that for prefill.

    from cutlass_kernels.integrations.paged_cache import PagedCache
    cache = PagedCache(model.config, batch=4, max_tokens=4096, device=model.device, dtype=model.dtype)
    model.set_attn_implementation(cache.register())
    logits = model(prompt, past_key_values=cache, use_cache=True).logits

Served: sequences of equal length, causal attention, no sliding windows, no padding, no backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin

from .._decode_paged import BatchDecodeWithPagedKVCacheWrapper
from ..page import append_paged_kv_cache
from ..prefill import BatchPrefillWithPagedKVCacheWrapper
from .transformers import no_mask

NAME = "cutlass_kernels_paged"
MOST_DECODED = 8  # new tokens per sequence
WORKSPACE_BYTES = 32 << 20
_numbers = itertools.count()


class PagedCache(Cache):
    """Keys and values of all layers of a model, in pages that lie in random order, one page table for all layers.

    Args:
        config: the model's configuration.
        batch: sequences, which grow together.
        max_tokens: the most that a sequence may hold.
        device, dtype: those of the model.
        page_size: tokens of a page.
        backend: of this library, as in its wrappers.

    Raises:
        RuntimeError: a forward pass that would exceed ``max_tokens``.
        NotImplementedError: attention that this cache does not serve.

    Example:
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
        self.heads = (text.num_attention_heads, text.num_key_value_heads)
        self.head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self.batch, self.max_tokens, self.page_size = batch, max_tokens, page_size
        self.device, self.dtype = torch.device(device), dtype
        self.length = 0  # of every sequence
        self._each = -(-max_tokens // page_size)  # pages that a sequence may have
        self._table = torch.randperm(batch * self._each, dtype=torch.int32).view(batch, self._each)
        shape = (batch * self._each, 2, page_size, self.heads[1], self.head_dim)
        super().__init__(layers=[_Layer(self, shape) for _ in range(text.num_hidden_layers)])

        def workspace() -> torch.Tensor:
            return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)

        self._decode = BatchDecodeWithPagedKVCacheWrapper(workspace(), backend=backend)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace(), backend=backend)
        self._planned: tuple[float | None] | None = None  # the scale of the plan of this pass, if there is one yet
        self._name: str | None = None

    def register(self) -> str:
        """Makes an attention known to transformers that reads this cache, and returns its name, which no other has.

        The name outlives the cache, whose pages it does not keep: a model that still uses it then raises.
        """
        if self._name is None:
            self._name = f"{NAME}_{next(_numbers)}"
            AttentionInterface.register(self._name, functools.partial(_attend, weakref.ref(self)))
            AttentionMaskInterface.register(self._name, no_mask)
        return self._name

    def begin(self, new: int) -> None:
        """Makes room for ``new`` more tokens of every sequence, once per forward pass."""
        if self.length + new > self.max_tokens:
            raise RuntimeError(
                f"this cache holds {self.length} of at most {self.max_tokens} tokens per sequence, too many for {new} "
                "more: make it with a larger max_tokens."
            )
        first, self.length, self._planned = self.length, self.length + new, None
        used = -(-self.length // self.page_size)
        self._rows = torch.arange(self.batch + 1, dtype=torch.int32) * new
        self._indptr = torch.arange(self.batch + 1, dtype=torch.int32) * used
        self._indices = self._table[:, :used].reshape(-1)
        self._last = torch.full((self.batch,), (self.length - 1) % self.page_size + 1, dtype=torch.int32)
        owner = torch.arange(self.batch, dtype=torch.int32).repeat_interleave(new)
        position = torch.arange(first, self.length, dtype=torch.int32).repeat(self.batch)
        tensors = (owner, position, self._indices, self._indptr, self._last)
        self._places = [x.to(self.device, non_blocking=True) for x in tensors]

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
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """What transformers calls: q is ``[batch, heads, tokens, dim]``, the output ``[batch, tokens, heads, dim]``."""
        unserved = (attention_mask, sliding_window, softcap, more.get("s_aux"), more.get("position_bias"))
        if any(given is not None for given in unserved) or dropout > 0.0 or not getattr(module, "is_causal", True):
            raise NotImplementedError(
                "PagedCache serves plain causal attention, without masks, windows, soft caps, sinks and dropout: use "
                "attn_implementation='cutlass_kernels' with transformers' own cache."
            )
        new = query.size(2)
        q = query.transpose(1, 2).flatten(0, 1)
        layer = self.layers[module.layer_idx]
        wrapper = self._decode if new <= MOST_DECODED else self._prefill
        if self._planned != (scaling,):
            self._plan(new, scaling)
        out = wrapper.run(q, layer.pages)
        assert isinstance(out, torch.Tensor)
        return out.unflatten(0, (self.batch, new)), None

    def _plan(self, new: int, scale: float | None) -> None:
        """One plan for all layers of a pass, which scale logits alike in every model there is."""
        sizes = (*self.heads, self.head_dim, self.page_size)
        options: dict[str, Any] = {"sm_scale": scale, "q_data_type": self.dtype}
        table = (self._indptr, self._indices, self._last)
        if new <= MOST_DECODED:
            self._decode.plan(*table, *sizes, q_len_per_req=new, **options)
        else:
            self._prefill.plan(self._rows, *table, *sizes, causal=True, **options)
        self._planned = (scale,)


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
