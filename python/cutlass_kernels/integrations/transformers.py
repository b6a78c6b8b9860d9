"""Attention of Hugging Face transformers (5.17 and newer) computed by this library.

    from cutlass_kernels.integrations.transformers import register
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=register())

Served: equally long sequences with or without a dynamic KV cache, sliding windows, soft caps, sinks, full attention.
There is no padding and no backward: what is not served raises NotImplementedError.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from .._native import PER_THREAD_STREAM
from .._tracing import cache_of_real_tensors
from ..prefill import BatchPrefillWithRaggedKVCacheWrapper, single_prefill_with_kv_cache

NAME = "cutlass_kernels"


def register(name: str = NAME) -> str:
    """Makes ``attn_implementation=name`` known to transformers, and returns the name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, no_mask)
    return name


def no_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    **_: Any,
) -> None:
    """The mask of a batch that needs none, or an error. (Without a function transformers ignores the mask.)"""
    last_row, last_key = q_offset + q_length, kv_offset + kv_length
    static = isinstance(q_offset, torch.Tensor) or (allow_is_causal_skip and last_row != last_key)
    if static or (attention_mask is not None and attention_mask.size(-1) < kv_length):
        _refuse("a static KV cache", "use a dynamic one (cache_implementation=None)")
    if attention_mask is not None and not bool(attention_mask[:, -kv_length:].all()):
        _refuse("padding", "run sequences of equal length together, or attn_implementation='sdpa'")
    if not allow_is_causal_skip and not allow_is_bidirectional_skip:
        _refuse("a packed, blockwise or custom mask", "use attn_implementation='sdpa'")
    if local_size is not None and local_size != getattr(config, "sliding_window", None):
        _refuse("chunked attention", "use attn_implementation='sdpa'")


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: q, k, v are ``[batch, heads, tokens, dim]``, the output ``[batch, tokens, heads, dim]``.

    One sequence, or one step of several, is computed without copies, as heads of one request. The prefill of a batch
    goes through the ragged wrapper, planned once for all layers.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    unserved = (attention_mask, more.get("position_bias"), more.get("cache"))
    if any(given is not None for given in unserved):
        _refuse("four-dimensional masks, position_bias and paged caches", "use attn_implementation='sdpa'")
    given = (query, key, value) if s_aux is None else (query, key, value, s_aux)
    if dropout > 0.0 or (torch.is_grad_enabled() and any(x.requires_grad for x in given)):
        _refuse("training (there is no backward and no dropout)", "call the model under torch.inference_mode()")
    if sliding_window is not None and not causal:
        _refuse("a sliding window that is not causal", "use attn_implementation='sdpa'")
    (batch, num_qo_heads, q_len, _), (num_kv_heads, kv_len) = query.shape, key.shape[1:3]
    window_left = -1 if sliding_window is None else sliding_window - 1
    folded = batch == 1 or q_len == 1
    sinks = None if s_aux is None else s_aux.detach().float().repeat(batch if folded else 1)
    options = dict[str, Any](causal=causal, window_left=window_left, logits_soft_cap=softcap, sm_scale=scaling)
    if folded:
        q, k, v = query.flatten(0, 1).transpose(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        out = single_prefill_with_kv_cache(q, k, v, kv_layout="HND", sinks=sinks, **options)
        return out.unflatten(1, (batch, num_qo_heads)).transpose(0, 1), None
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    stream = torch.cuda.current_stream(query.device).cuda_stream if query.is_cuda else 0
    thread = threading.get_ident() if stream == PER_THREAD_STREAM else 0
    lengths, sizes = (batch, q_len, kv_len), (num_qo_heads, num_kv_heads, q.size(-1), v.size(-1))
    wrapper = _planned((stream, thread), q.device, q.dtype, lengths, sizes, tuple(options.items()))
    out = wrapper.run(q, k, v, sinks=sinks)
    assert isinstance(out, torch.Tensor)
    return out.unflatten(0, (batch, q_len)), None


@cache_of_real_tensors(maxsize=4)
def _planned(
    stream: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
    lengths: tuple[int, int, int],
    sizes: tuple[int, int, int, int],
    options: tuple[tuple[str, Any], ...],
) -> BatchPrefillWithRaggedKVCacheWrapper:
    """A wrapper planned for ``lengths`` (batch, rows, keys). Its tile list is ready on ``stream`` (handle, thread).

    Its workspaces have the size of this plan: 8 MiB less for the list than a wrapper takes by itself, and room for the
    partial results where the keys of few rows are split.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"attn_implementation='{NAME}' plans the first prefill of {lengths[0]} sequences of {lengths[1]} tokens, "
            "which no CUDA graph can capture: call the model once with these sizes before the capture."
        )
    place = dict[str, Any](dtype=torch.uint8, device=device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(16, **place), "NHD")
    qo_indptr, kv_indptr = (torch.arange(lengths[0] + 1, dtype=torch.int32) * length for length in lengths[1:])
    num_qo_heads, num_kv_heads, head_dim, head_dim_vo = sizes
    values = dict[str, Any](head_dim_vo=head_dim_vo, q_data_type=dtype, **dict(options))
    needed = wrapper.workspace_size(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, **values)
    wrapper.reset_workspace_buffer(*(torch.empty(max(size, 16), **place) for size in needed))
    wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, **values)
    return wrapper


def _refuse(what: str, remedy: str) -> None:
    raise NotImplementedError(f"attn_implementation='{NAME}' does not serve {what}: {remedy}.")
