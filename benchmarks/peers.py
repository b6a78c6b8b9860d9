"""Who is measured: our backends through the public API, and the libraries they are compared with.

A backend says which features it honours (the names in ``features`` of a case) and makes a callable for a case. A case
that it does not honour is shown as "-" and not approximated. To add an operation, add a table of backends for it.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import check
import fused
import prefix
import torch
import torch.nn.functional as F
from fused import Fused
from prefix import SharedPrefix
from report import UNITS
from shapes import Case, Host, Inputs, Pages, Prefill, make_inputs
from states import Merge, States, make_states
from timing import Timed

import cutlass_kernels as ck

WORKSPACE_BYTES = 128 << 20


@dataclass(frozen=True)
class Backend:
    """One column of the results; ``make(case, inputs)`` returns what to time."""

    name: str
    ours: bool
    honours: frozenset[str]
    missing: Callable[[torch.device], str | None]  # why it cannot run at all
    make: Callable[[Any, Any], Timed]
    refuses: Callable[[Any, torch.device], str | None] = lambda case, device: None  # what features do not express

    def why_not(self, case: Case, device: torch.device) -> str | None:
        """Why this backend does not run ``case``; None if it does."""
        reason = self.missing(device)
        if reason is None and case.features - self.honours:
            reason = f"does not honour {', '.join(sorted(case.features - self.honours))}"
        return reason if reason is not None else self.refuses(case, device)


ALL = frozenset({"causal", "ragged", "append", "gqa", "window", "soft_cap", "sinks", "head_dim_vo", "paged"})
FP8 = frozenset({"fp8"})
ONLY_OURS = frozenset({"custom_mask", "alibi"}) | FP8  # measured against ourselves: no peer is asked


# --- ours --------------------------------------------------------------------------------------------------------


def _problem(case: Case) -> Prefill:
    assert not isinstance(case, Merge)
    return case if isinstance(case, Prefill) else case.problem


def _refused_by_us(name: str, case: Case, device: torch.device) -> str | None:
    problem = _problem(case)
    explanation = ck.explain(
        device=device,
        q_dtype=problem.dtype,
        num_qo_heads=problem.num_qo_heads,
        num_kv_heads=problem.num_kv_heads,
        head_dim_qk=problem.head_dim_qk,
        head_dim_vo=problem.head_dim_vo,
        features=problem.features & {"causal", "window", "soft_cap", "sinks", "paged", "custom_mask", "alibi"},
    )
    if name != "auto":
        return " ".join(explanation.reasons[name]) or None
    if device.type == "cuda" and explanation.selected == "reference":
        return "no kernel serves this case, so auto would time the PyTorch reference"
    return None


def _options(case: Prefill) -> dict[str, Any]:
    """Options that plan() and single_prefill have in FlashInfer's API, which is also ours."""
    return {"causal": case.causal, "window_left": case.window_left, "logits_soft_cap": case.soft_cap or None}


def _our_options(case: Prefill, x: Inputs) -> dict[str, Any]:
    options = _options(case)
    if x.mask is not None:
        options["packed_custom_mask"] = ck.packbits(x.mask.flatten(), bitorder="little")
    return {**options, "pos_encoding_mode": "ALIBI"} if case.alibi else options


def _wrapper(library: Any, case: Prefill, x: Inputs, name: str) -> Any:
    kind = "BatchPrefillWithPagedKVCacheWrapper" if case.page_size else "BatchPrefillWithRaggedKVCacheWrapper"
    return getattr(library, kind)(_workspace(x.q.device), "NHD", backend=name)


def _plan(wrapper: Any, case: Prefill, indices: tuple[torch.Tensor, ...], **options: Any) -> Callable[[], None]:
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, *([case.page_size] if case.page_size else []))
    options |= {"head_dim_vo": case.head_dim_vo, "q_data_type": getattr(torch, case.dtype)}
    if case.fp8:
        options["o_data_type"] = torch.bfloat16
    return functools.partial(wrapper.plan, *indices, *sizes, **options)


def _workspace(device: torch.device) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES if device.type == "cuda" else 1 << 20, dtype=torch.uint8, device=device)


def _ours(name: str, case: Prefill, x: Inputs) -> Timed:
    if case.single and not case.page_size:
        options = {**_our_options(case, x), "o_dtype": torch.bfloat16 if case.fp8 else None}
        single = functools.partial(
            ck.single_prefill_with_kv_cache, x.q, x.k, x.v, sinks=x.sinks, backend=name, **options
        )
        return Timed(single)
    wrapper = _wrapper(ck, case, x, name)
    _plan(wrapper, case, x.indices(on_device=False), **_our_options(case, x))()
    return Timed(functools.partial(wrapper.run, *x.run_arguments, sinks=x.sinks))


def _ours_host(name: str, case: Host, x: Inputs) -> Timed:
    return _host(case, x, ck, name)


def _host(case: Host, x: Inputs, library: Any, name: str) -> Timed:
    """The calls of FlashInfer's API, which is also ours."""
    problem = case.problem
    if case.call == "fmha_v2":
        return _fused(library, Fused(problem, "CONTIGUOUS_Q_KV"), x)
    if case.call == "single_prefill":
        return Timed(functools.partial(library.single_prefill_with_kv_cache, x.q, x.k, x.v, backend=name, causal=True))
    wrapper = _wrapper(library, problem, x, name)
    plan = _plan(wrapper, problem, x.indices(on_device=case.indptr != "cpu"), causal=True)
    if case.call.endswith("_plan"):
        return Timed(plan)
    plan()
    return Timed(functools.partial(wrapper.run, *x.run_arguments))


def _decode(library: Any, case: Prefill, x: Inputs, options: dict[str, Any]) -> Timed:
    """The wrapper for decode, on copies of the cache in turn; without pages single_decode."""
    if x.pages is None:
        single = functools.partial(library.single_decode_with_kv_cache, x.q[0], x.k, x.v)
        single = functools.partial(single, **{k: v for k, v in options.items() if library is ck or k != "backend"})
        return Timed(single, output=lambda out: out.unsqueeze(0))
    pages = x.pages
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(_workspace(x.q.device), "NHD", **options)
    sizes = (case.num_qo_heads, case.num_kv_heads, case.head_dim_qk, case.page_size)
    dtype = getattr(torch, case.dtype)
    wrapper.plan(pages.indptr, pages.indices, pages.last_page_len, *sizes, q_data_type=dtype, kv_data_type=dtype)
    caches = itertools.cycle(pages.copies)
    return Timed(lambda: wrapper.run(x.q, next(caches)))


def _our_decode(name: str, case: Prefill, x: Inputs) -> Timed:
    return _decode(ck, case, x, {"backend": name})


def _our_contiguous(case: Fused, x: Inputs) -> Timed:
    """What the layouts are measured by: fa3 on three contiguous tensors, planned beforehand."""
    problem = fused.without_pages(case.problem)
    wrapper = _wrapper(ck, problem, x, "fa3")
    _plan(wrapper, problem, (x.qo_indptr, x.kv_indptr), **_options(problem))()
    return Timed(functools.partial(wrapper.run, x.q, x.k, x.v))


def _fused(library: Any, case: Fused, x: Inputs) -> Timed:
    return Timed(functools.partial(library.trtllm_fmha_v2_prefill, **fused.arguments(case, x)))


def _levels(library: Any, case: SharedPrefix, x: Inputs) -> Timed:
    """The cascade: the prefix once for all requests, the rest of each, and the merge of both."""
    p, dtype = case.problem, getattr(torch, case.problem.dtype)
    assert x.pages is not None
    wrapper = library.MultiLevelCascadeAttentionWrapper(2, _workspace(x.q.device), "NHD")
    sizes = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.page_size)
    wrapper.plan(*prefix.levels(case, x), *sizes, causal=False, q_data_type=dtype)
    return Timed(functools.partial(wrapper.run, x.q, x.pages.cache))


def _shared(case: SharedPrefix, x: Inputs) -> Timed:
    """The wrapper for one shared prefix, which lies outside the pages."""
    p, dtype = case.problem, getattr(torch, case.problem.dtype)
    assert x.pages is not None
    _, offsets, indices, last = prefix.levels(case, x)
    wrapper = ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(_workspace(x.q.device), "NHD")
    sizes = (p.num_qo_heads, p.num_kv_heads, p.head_dim_qk, p.page_size)
    wrapper.begin_forward(offsets[1], indices[1], last[1], *sizes, data_type=dtype)
    shared = (x.k[: case.prefix].contiguous(), x.v[: case.prefix].contiguous())
    return Timed(functools.partial(wrapper.forward, x.q, *shared, x.pages.cache))


def _plain(case: SharedPrefix, x: Inputs, repeats: bool) -> Timed:
    """Decode that knows of no prefix: the same pages in every request, or copies of them."""
    assert x.pages is not None
    indices = prefix.repeated(case, x) if repeats else x.pages.indices
    wrapper = ck.BatchDecodeWithPagedKVCacheWrapper(_workspace(x.q.device), "NHD")
    return Timed(functools.partial(prefix.planned(wrapper, case, x, indices).run, x.q, x.pages.cache))


def _our_backends(make: Callable[[str, Any, Inputs], Timed]) -> list[Backend]:
    names = ("fa2", "fa3", "auto", "reference")
    return [
        Backend(
            name,
            True,
            ALL | ONLY_OURS,
            lambda device: None,
            functools.partial(make, name),
            functools.partial(_refused_by_us, name),
        )
        for name in names
    ]


def _merge(library: Any, case: Merge, x: States) -> Timed:
    """The calls of FlashInfer's API, which is also ours."""
    call = functools.partial(getattr(library, case.group), *x.arguments)
    return Timed(call, output=lambda returned: returned[0])


def _no_merge_kernels(device: torch.device) -> str | None:
    if device.type != "cuda" or ck.list_kernels():
        return _needs_cuda(device)
    return "this installation has no compiled kernels, so PyTorch would merge"


# --- torch -------------------------------------------------------------------------------------------------------


def _needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


def _dense(x: torch.Tensor, batch: int) -> torch.Tensor:
    """``[tokens, heads, dim]`` as ``[batch, heads, length, dim]``, the same memory."""
    return x.view(batch, -1, *x.shape[1:]).transpose(1, 2)


def _sdpa(backends: list[Any], case: Prefill, x: Inputs) -> Timed:
    from torch.nn.attention import sdpa_kernel

    batch = len(case.qo_lens)
    q, k, v = _dense(x.q, batch), _dense(x.k, batch), _dense(x.v, batch)
    grouped: dict[str, Any] = {"enable_gqa": True} if "gqa" in case.features else {}

    return Timed(
        functools.partial(F.scaled_dot_product_attention, q, k, v, is_causal=case.causal, **grouped),
        functools.partial(sdpa_kernel, backends),
        lambda out: out.transpose(1, 2).flatten(0, 1),
    )


def _torch_cudnn(case: Prefill, x: Inputs) -> Timed:
    return _sdpa([torch.nn.attention.SDPBackend.CUDNN_ATTENTION], case, x)


def _torch_fa2(case: Prefill, x: Inputs) -> Timed:
    """SDPA where it has the options; else the operator beneath it, which has windows and unequal lengths."""
    if not case.features & {"ragged", "append", "window"}:
        return _sdpa([torch.nn.attention.SDPBackend.FLASH_ATTENTION], case, x)
    window = {"window_size_left": case.window_left, "window_size_right": 0 if case.causal else -1}
    options = window if case.window_left >= 0 else {}
    longest = max(case.qo_lens), max(case.kv_lens)
    arguments = (x.q, x.k, x.v, x.qo_indptr_device, x.kv_indptr_device, *longest, 0.0, case.causal, False)
    call = functools.partial(torch.ops.aten._flash_attention_forward, *arguments, **options)
    return Timed(call, output=lambda returned: returned[0])


def _torch_host(case: Host, x: Inputs) -> Timed:
    return _sdpa([torch.nn.attention.SDPBackend.FLASH_ATTENTION], case.problem, x)


def _torch_merge(case: Merge, x: States) -> Timed:
    def call() -> tuple[torch.Tensor, torch.Tensor]:
        scaled = x.s * math.log(2.0)
        weights = torch.softmax(scaled, 1).unsqueeze(-1)
        return (weights * x.v).sum(1).to(x.v.dtype), torch.logsumexp(scaled, 1) / math.log(2.0)

    return Timed(call, output=lambda returned: returned[0])


def _only_single(case: Host, device: torch.device) -> str | None:
    return None if case.call == "single_prefill" else "has no such call"


# --- FlashInfer --------------------------------------------------------------------------------------------------


@functools.cache
def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # not only ImportError: a broken installation must not stop the others
        return f"{name} cannot be imported: {error}"


def _needs_module(name: str, device: torch.device) -> str | None:
    reason = _needs_cuda(device)
    if reason is None and isinstance(_module(name), str):
        reason = _module(name)
    return reason


def _flashinfer(name: str, case: Prefill, x: Inputs) -> Timed:
    library = _module("flashinfer")
    if case.single and not case.page_size:
        single = library.single_prefill_with_kv_cache
        return Timed(functools.partial(single, x.q, x.k, x.v, backend=name, **_options(case)))
    wrapper = _wrapper(library, case, x, name)
    _plan(wrapper, case, x.indices(on_device=True), **_options(case))()
    return Timed(functools.partial(wrapper.run, *x.run_arguments))


def _flashinfer_host(name: str, case: Host, x: Inputs) -> Timed:
    inner = "flashinfer.prefill" if case.call == "fmha_v2" else "flashinfer"
    return _host(case, x, _module(inner), name)


def _flashinfer_backends(make: Callable[[str, Any, Inputs], Timed]) -> list[Backend]:
    missing = functools.partial(_needs_module, "flashinfer")
    honours = ALL - {"sinks"}  # those are another wrapper's there, compiled at run time
    return [
        Backend(f"flashinfer_{name}", False, honours, missing, functools.partial(make, name)) for name in ("fa2", "fa3")
    ]


# --- FlashAttention-3 --------------------------------------------------------------------------------------------


def _flash_attn_3(case: Prefill, x: Inputs) -> Timed:
    library = _module("flash_attn_interface")
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
            page_table=_page_table(x.pages).to(x.q.device),
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


def _page_table(pages: Pages) -> torch.Tensor:
    """``[batch, most pages]``, one row of page numbers per request."""
    rows = pages.indices.split(pages.indptr.diff().tolist())
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


# --- tables ------------------------------------------------------------------------------------------------------


def _table(backends: list[Backend]) -> dict[str, Backend]:
    return {backend.name: backend for backend in backends}


PREFILL = _table(
    [
        *_our_backends(_ours),
        Backend("torch_fa2", False, ALL - {"soft_cap", "sinks", "head_dim_vo", "paged"}, _needs_cuda, _torch_fa2),
        Backend("cudnn", False, frozenset({"causal", "gqa", "head_dim_vo"}), _needs_cuda, _torch_cudnn),
        *_flashinfer_backends(_flashinfer),
        Backend(
            "flash_attn_3",
            False,
            (ALL | FP8) - {"sinks"},
            functools.partial(_needs_module, "flash_attn_interface"),
            _flash_attn_3,
        ),
    ]
)
HOST = _table(
    [
        *_our_backends(_ours_host),
        Backend("torch_fa2", False, frozenset({"causal", "gqa"}), _needs_cuda, _torch_host, _only_single),
        *_flashinfer_backends(_flashinfer_host),
    ]
)

# FlashInfer has two kernels for decode: of its own, and that of prefill.
DECODE = _table(
    [
        *_our_backends(_our_decode),
        *(
            Backend(
                name,
                False,
                frozenset({"causal", "ragged", "append", "gqa", "paged"}),
                functools.partial(_needs_module, "flashinfer"),
                functools.partial(
                    lambda with_tensor_cores, case, x: _decode(
                        _module("flashinfer"), case, x, {"use_tensor_cores": with_tensor_cores}
                    ),
                    tensor_cores,
                ),
            )
            for name, tensor_cores in (("flashinfer", False), ("flashinfer_tc", True))
        ),
    ]
)
MERGE = _table(
    [
        Backend("auto", True, frozenset(), _no_merge_kernels, functools.partial(_merge, ck)),
        Backend("torch", False, frozenset(), _needs_cuda, _torch_merge),
        Backend(
            "flashinfer",
            False,
            frozenset(),
            functools.partial(_needs_module, "flashinfer"),
            lambda case, x: _merge(_module("flashinfer"), case, x),
        ),
    ]
)


FUSED = _table(
    [
        Backend(
            "auto",
            True,
            ALL | FP8,
            _needs_cuda,
            lambda case, x: _fused(ck, case, x),
            functools.partial(_refused_by_us, "auto"),
        ),
        Backend("contiguous", True, ALL | FP8, _needs_cuda, _our_contiguous, functools.partial(_refused_by_us, "fa3")),
        Backend(
            "flashinfer",
            False,
            frozenset({"causal", "gqa", "paged"}) | FP8,
            functools.partial(_needs_module, "flashinfer"),
            lambda case, x: _fused(_module("flashinfer.prefill"), case, x),
        ),
    ]
)


SHARED_PREFIX = _table(
    [
        *(
            Backend(name, True, ALL, _needs_cuda, make, functools.partial(_refused_by_us, "auto"))
            for name, make in (
                ("levels", functools.partial(_levels, ck)),
                ("shared", _shared),
                ("plain", functools.partial(_plain, repeats=True)),
                ("copies", functools.partial(_plain, repeats=False)),
            )
        ),
        Backend(
            "flashinfer",
            False,
            ALL,
            functools.partial(_needs_module, "flashinfer"),
            lambda case, x: _levels(_module("flashinfer"), case, x),
        ),
    ]
)


@dataclass(frozen=True)
class Operation:
    """What the command line can measure. The first of ``units`` is that of :meth:`figure`."""

    about: str
    units: tuple[str, ...]
    backends: dict[str, Backend]
    default_workloads: tuple[str, ...]
    default_backends: tuple[str, ...]
    host_clock: bool = False

    @property
    def unit(self) -> str:
        return self.units[0]

    @property
    def higher_is_better(self) -> bool:
        return UNITS[self.unit].higher_is_better

    def figure(self, case: Case, seconds: float) -> float:
        return UNITS[self.unit].figure(case.work, case.bytes, seconds)

    def inputs(self, case: Case, device: torch.device) -> Any:
        if isinstance(case, Merge):
            return make_states(case, device)
        inputs = make_inputs(_problem(case), device)
        if isinstance(case, SharedPrefix):
            prefix.share(case, inputs)
        return inputs

    def expect(self, case: Case, inputs: Any) -> check.Expected:
        """What the result must be."""
        if isinstance(case, Merge):
            return check.expect_merged(inputs)
        return check.expect(_problem(case), inputs)


_PEERS = ("torch_fa2", "cudnn", "flashinfer_fa2", "flashinfer_fa3", "flash_attn_3")
OPERATIONS: dict[str, Operation] = {
    "prefill": Operation(
        "one request through single_prefill_with_kv_cache, batches and pages through run() of the wrappers",
        ("TFLOP/s", "GB/s", "us"),
        PREFILL,
        ("paper",),
        ("fa2", "fa3", *_PEERS),
    ),
    "decode": Operation(
        "a token per request through the wrapper for decode, one request through single_decode_with_kv_cache",
        ("us", "TB/s"),
        DECODE,
        ("decode",),
        ("auto", "flashinfer", "flashinfer_tc"),
    ),
    "merge": Operation(
        "attention states through merge_state and merge_states",
        ("TB/s", "us"),
        MERGE,
        ("merge",),
        ("auto", "torch", "flashinfer"),
    ),
    "fused": Operation(
        "trtllm_fmha_v2_prefill, beside fa3 on contiguous tensors",
        ("TFLOP/s", "us"),
        FUSED,
        ("fused",),
        ("auto", "contiguous", "flashinfer"),
    ),
    "shared_prefix": Operation(
        "decode over a shared prefix: in levels, by the wrapper for one prefix, and without knowing of it",
        ("us",),
        SHARED_PREFIX,
        ("shared-prefix",),
        ("levels", "shared", "plain", "copies", "flashinfer"),
    ),
    "host": Operation(
        "the host's time per call",
        ("us",),
        HOST,
        ("calls",),
        ("auto", "torch_fa2", "flashinfer_fa2", "flashinfer_fa3"),
        host_clock=True,
    ),
}
