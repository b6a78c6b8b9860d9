"""`prefill`: one request through single_prefill_with_kv_cache, batches and pages through run() of the wrappers."""

from __future__ import annotations

import functools
from typing import Any

import api
import torch
import torch.nn.functional as F
from backend import ALL, FP8, Backend, Operation, module, needs_cuda, needs_module
from inputs import Inputs, Pages
from problem import Problem
from timing import Timed

from .prefill_workloads import WORKLOADS

# --- ours --------------------------------------------------------------------------------------------------------


def _options(library: Any, case: Problem, x: Inputs) -> dict[str, Any]:
    options = api.options(case)
    if x.mask is not None:
        options["packed_custom_mask"] = library.packbits(x.mask.flatten(), bitorder="little")
    return {**options, "pos_encoding_mode": "ALIBI"} if case.alibi else options


def ours(library: Any, name: str, case: Problem, x: Inputs) -> Timed:
    if case.single and not case.page_size:
        options = {**_options(library, case, x), "o_dtype": torch.bfloat16 if case.fp8 else None}
        call = library.single_prefill_with_kv_cache
        return Timed(functools.partial(call, x.q, x.k, x.v, sinks=x.sinks, backend=name, **options))
    wrapper = api.wrapper(library, case, x, name)
    api.plan(wrapper, case, x.indices(on_device=False), **_options(library, case, x))()
    return Timed(functools.partial(wrapper.run, *x.run_arguments, sinks=x.sinks))


# --- torch -------------------------------------------------------------------------------------------------------


def _dense(x: torch.Tensor, batch: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` as ``[batch, heads, length, dim]``, the same memory."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def sdpa(backends: list[Any], case: Problem, x: Inputs) -> Timed:
    """scaled_dot_product_attention with one of its kernels."""
    from torch.nn.attention import sdpa_kernel

    batch = len(case.qo_lens)
    q, k, v = _dense(x.q, batch), _dense(x.k, batch), _dense(x.v, batch)
    grouped: dict[str, Any] = {"enable_gqa": True} if "gqa" in case.features else {}

    return Timed(
        functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=case.causal, **grouped),
        functools.partial(sdpa_kernel, backends),
        lambda out: out.transpose(1, 2).flatten(0, 1),
    )


def torch_cudnn(case: Problem, x: Inputs) -> Timed:
    return sdpa([torch.nn.attention.SDPBackend.CUDNN_ATTENTION], case, x)


def torch_fa2(case: Problem, x: Inputs) -> Timed:
    """SDPA where it has the options; else the operator beneath it, which has windows and unequal lengths."""
    if not case.features & {"ragged", "append", "window"}:
        return sdpa([torch.nn.attention.SDPBackend.FLASH_ATTENTION], case, x)
    window = {"window_size_left": case.window_left, "window_size_right": 0 if case.causal else -1}
    options = window if case.window_left >= 0 else {}
    longest = max(case.qo_lens), max(case.kv_lens)
    arguments = (x.q, x.k, x.v, x.qo_indptr_device, x.kv_indptr_device, *longest, 0.0, case.causal, False)
    call = functools.partial(torch.ops.aten._flash_attention_forward, *arguments, **options)
    return Timed(call, output=lambda returned: returned[0])


# --- FlashInfer --------------------------------------------------------------------------------------------------


def flashinfer(name: str, case: Problem, x: Inputs) -> Timed:
    library = module("flashinfer")
    if case.single and not case.page_size:
        single = library.single_prefill_with_kv_cache
        return Timed(functools.partial(single, x.q, x.k, x.v, backend=name, **api.options(case)))
    wrapper = api.wrapper(library, case, x, name)
    api.plan(wrapper, case, x.indices(on_device=True), **api.options(case))()
    return Timed(functools.partial(wrapper.run, *x.run_arguments))


# --- FlashAttention-3 --------------------------------------------------------------------------------------------


def flash_attn_3(case: Problem, x: Inputs) -> Timed:
    library = module("flash_attn_interface")
    options: dict[str, Any] = {"causal": case.causal, "softcap": case.soft_cap}
    if case.window_left >= 0:
        options["window_size"] = (case.window_left, 0 if case.causal else -1)
    batch = len(case.qo_lens)
    if x.pages is not None:
        k, v = x.pages.cache.unbind(1) if isinstance(x.pages.cache, torch.Tensor) else x.pages.cache
        function = functools.partial(
            library.flash_attn_with_kvcache,
            x.q,
            k,
            v,
            cache_seqlens=x.kv_indptr_device.diff(),
            page_table=page_table(x.pages).to(x.q.device),
            cu_seqlens_q=x.qo_indptr_device,
            max_seqlen_q=max(case.qo_lens),
            **options,
        )
    elif case.dense:
        q, k, v = (t.view(batch, -1, *t.shape[1:]) for t in (x.q, x.k, x.v))
        function = functools.partial(library.flash_attn_func, q, k, v, **options)
    else:
        lengths = (x.qo_indptr_device, x.kv_indptr_device)
        longest = {"max_seqlen_q": max(case.qo_lens), "max_seqlen_k": max(case.kv_lens)}
        function = functools.partial(library.flash_attn_varlen_func, x.q, x.k, x.v, *lengths, **longest, **options)

    def output(returned: Any) -> torch.Tensor:
        out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned  # older versions add the LSE
        return out.flatten(0, -3)

    return Timed(function, output=output)


def page_table(pages: Pages) -> torch.Tensor:
    """``[batch, most pages]``, one row of page indices per request."""
    rows = pages.indices.split(pages.indptr.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


PEERS = [
    Backend("torch_fa2", False, ALL - {"soft_cap", "sinks", "head_dim_vo", "paged"}, needs_cuda, torch_fa2),
    Backend("cudnn", False, frozenset({"causal", "gqa", "head_dim_vo"}), needs_cuda, torch_cudnn),
    *api.flashinfer_columns(flashinfer),
    Backend("flash_attn_3", False, (ALL | FP8) - {"sinks"}, needs_module("flash_attn_interface"), flash_attn_3),
]
OPERATION = Operation(
    "one request through single_prefill_with_kv_cache, batches and pages through run() of the wrappers",
    ("TFLOP/s", "GB/s", "us"),
    api.our_columns(ours),
    PEERS,
    WORKLOADS,
    "paper",
    ("fa2", "fa3", *(peer.name for peer in PEERS)),
)
