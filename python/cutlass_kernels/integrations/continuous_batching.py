"""Continuous batching of Hugging Face transformers (5.17 and newer) on this library.

    from cutlass_kernels.integrations.continuous_batching import register
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())
    outputs = model.generate_batch(prompts, generation_config)

Prompts and appends read keys that transformers has gathered from its pages, as sequences one behind another. Batches of
decode steps alone, where transformers hands over a block table, read the pages.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedModel,
    modeling_flash_attention_utils,
)
from transformers.generation.continuous_batching import PagedAttentionCache

from .. import flash_attn
from . import transformers as dense
from ._transformers_masks import mask

# Newer versions take names with "flash" in them alone, and hand block tables to names with "flash" before a 2 or 3.
FLASH_NAME = f"{dense.NAME}_flash_attention_3"
PAGED_NAME = f"paged|{dense.NAME}"


def register() -> str:
    """Makes an ``attn_implementation`` for continuous batching known to transformers, and returns its name.

    Versions in which the model writes into the paged cache accept FlashAttention alone, by its name. They look up the
    functions of an implementation in ``modeling_flash_attention_utils._lazy_imports``, which finds those of
    ``cutlass_kernels.flash_attn`` under this name from here on. Other names are looked up as before. Models that list
    the implementations they allow, as gpt-oss does, allow this name, too.

    Raises:
        ImportError: transformers is not installed, or older than 5.17.

    Examples:
        >>> model.set_attn_implementation(register())
        >>> outputs = model.generate_batch([[1, 2, 3], [4, 5]], GenerationConfig(max_new_tokens=8))
    """
    if not _model_writes():
        AttentionInterface.register(PAGED_NAME, attention)
        return PAGED_NAME
    AttentionInterface.register(FLASH_NAME, attention)
    AttentionMaskInterface.register(FLASH_NAME, mask)
    lookup = modeling_flash_attention_utils._lazy_imports
    if not hasattr(lookup, "__wrapped__"):
        modeling_flash_attention_utils._lazy_imports = _with_own_functions(lookup)
    check = PreTrainedModel._check_and_adjust_attn_implementation
    if not hasattr(check, "__wrapped__"):
        PreTrainedModel._check_and_adjust_attn_implementation = _with_own_name(check)
    return FLASH_NAME


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q is ``[1, heads, rows, dim]``, the output ``[1, rows, heads, dim]``.

    Without a paged cache among ``options``, this is the attention of any other forward pass.
    """
    cache = options.get("cache")
    if not isinstance(cache, PagedAttentionCache):
        return dense.attention(module, query, key, value, attention_mask, **options)
    options["is_causal"] = True
    if not _model_writes():
        key, value = _write(module, key, value, cache, options)
    if options.get("k_cache") is not None:
        return _decode(query, key, value, options), None
    return dense.attention(module, query, key, value, None, **options)


def _decode(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """One new token of each sequence, which is written into the pages first."""
    q, k, v = (x.permute(2, 0, 1, 3) for x in (query, key, value))
    batch, window, sinks = q.size(0), options.get("sliding_window"), options.get("s_aux")
    lengths = options["cu_seq_lens_k"][: batch + 1].diff().to(torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q,
        options["k_cache"],
        options["v_cache"],
        k,
        v,
        cache_seqlens=lengths - 1,
        page_table=options["block_table"],
        softmax_scale=options.get("scaling"),
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        softcap=options.get("softcap") or 0.0,
        s_aux=None if sinks is None else sinks.detach().reshape(-1).float(),
    )
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1)


def _write(
    module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, cache: Any, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes new keys and values, and returns those that the sequences see: what newer models do by themselves."""
    is_sliding = bool(getattr(module, "sliding_window", None))
    lengths, most = options["cu_seq_lens_k"], options["max_seqlen_k"]
    if isinstance(lengths, dict):
        layer_type = "sliding_attention" if is_sliding else "full_attention"
        lengths, most = lengths[layer_type], most[layer_type]
    if is_sliding:
        options["sliding_window"] = module.sliding_window
    options |= {"cu_seq_lens_k": lengths, "max_length_k": most, "max_length_q": options["max_seqlen_q"]}
    places = {name: options[name] for name in ("read_index", "write_index")}
    keys, values = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, **places)
    return keys.transpose(0, 1).unsqueeze(0), values.transpose(0, 1).unsqueeze(0)


@functools.lru_cache(1)
def _model_writes() -> bool:
    """Whether models of this version of transformers write into the paged cache, not attention."""
    return "read_index" not in inspect.signature(PagedAttentionCache.update).parameters


def _with_own_functions(lookup: Any) -> Any:
    @functools.wraps(lookup)
    def found(implementation: str | None, *args: Any, **options: Any) -> tuple[Any, ...]:
        if implementation != FLASH_NAME:
            return lookup(implementation, *args, **options)
        padding = (modeling_flash_attention_utils._pad_input, modeling_flash_attention_utils._unpad_input)
        # 0: keys are split where that is faster, as for new tokens over a long past.
        functions = (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)
        splitting = (functools.partial(function, num_splits=0) for function in functions)
        return *splitting, flash_attn.flash_attn_with_kvcache, *padding

    return found


def _with_own_name(check: Any) -> Any:
    """A model with a list of FlashAttentions gets its first one in place of a name that is not on the list."""

    @functools.wraps(check)
    def checked(model: Any, attn_implementation: str | None = None, *args: Any, **options: Any) -> str:
        listed = getattr(model, "_compatible_flash_implementations", None)
        if attn_implementation == FLASH_NAME and listed is not None and FLASH_NAME not in listed:
            model._compatible_flash_implementations = [*listed, FLASH_NAME]
        return check(model, attn_implementation, *args, **options)

    return checked
