"""The problems that ``check`` computes twice: once by a compiled kernel, once by the reference in float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .._compute import request_facts, selection
from .._core.checks import FP8_DTYPES
from .._core.problems import Logits, Mask, Output, Problem, RaggedKv
from ..integrations._key_ranges import Kind, pattern
from ..prefill import BatchPrefillWithRaggedKVCacheWrapper, single_prefill_with_kv_cache
from .comparison import plain_attention

Pair = tuple[torch.Tensor, torch.Tensor]  # output, LSE


@dataclass(frozen=True)
class Case:
    """Lengths, heads and options of one problem. One length each is a single request, more are a ragged batch.

    ``form`` is how the tensors lie in memory: "NHD", "HND", or "packed" (slices of one projection, where all heads and
    lengths agree). ``less_dim`` is how far the head dimension stays below that of the kernel, which pads it. A kernel
    of latent attention, which pads nothing, has one head of keys, and values that are columns of these.
    """

    name: str
    qo_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    sinks: bool = False
    chunk: int = 0
    form: str = "NHD"
    less_dim: int = 0
    quick: bool = False


CASES = (
    Case("full", (65,), (200,), quick=True),
    Case("causal", (257,), (257,), options={"causal": True}, quick=True),
    Case("append", (33,), (400,), group=4, options={"causal": True}, quick=True),
    Case("decode", (1,), (1000,), group=8, options={"causal": True}),
    Case("long keys", (17,), (5000,), group=3),
    Case("rows without keys", (100,), (37,), options={"causal": True}, quick=True),
    Case("no keys", (9,), (0,), group=2),
    Case("no rows", (0,), (50,)),
    Case("causal window", (300,), (300,), options={"causal": True, "window_left": 31}, quick=True),
    Case("window", (70,), (300,), group=2, options={"window_left": 100}),
    Case("window of one", (128,), (200,), options={"causal": True, "window_left": 0}),
    Case("causal chunks", (300,), (420,), chunk=64),
    Case("soft cap", (90,), (150,), options={"logits_soft_cap": 2.0, "causal": True}, quick=True),
    Case("scale", (90,), (150,), options={"sm_scale": 0.5}),
    Case("sinks", (90,), (150,), group=4, options={"causal": True}, sinks=True, quick=True),
    Case(
        "sinks, window, cap",
        (130,),
        (300,),
        options={"causal": True, "window_left": 40, "logits_soft_cap": 5.0},
        sinks=True,
    ),
    Case("HND", (50,), (333,), group=2, options={"causal": True}, form="HND"),
    Case("packed projection", (129,), (129,), options={"causal": True}, form="packed"),
    Case("padded head dim", (77,), (190,), group=2, options={"causal": True}, less_dim=8),
    Case("ragged", (1, 0, 77, 130, 5), (13, 40, 0, 260, 5), group=3, options={"causal": True}, quick=True),
    Case("ragged, full", (64, 3, 128), (64, 500, 1)),
    Case("ragged decode", (1,) * 33, tuple(range(0, 660, 20)), group=8),
    Case(
        "ragged, all options",
        (40, 200, 9),
        (300, 200, 4),
        group=2,
        options={"causal": True, "window_left": 63, "logits_soft_cap": 10.0},
        sinks=True,
    ),
    Case("ragged HND", (40, 20), (100, 20), options={"causal": True}, form="HND"),
)


@dataclass
class Inputs:
    """Tensors of a case; keys and values token-major."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


def draw(case: Case, kernel: dict[str, Any], device: torch.device) -> Inputs:
    """N(0, 1) inputs for ``case`` in the types and head dimensions of ``kernel``; the same on every device."""
    generator = torch.Generator().manual_seed(len(case.name) + sum(case.qo_lens) + sum(case.kv_lens))
    q_dtype, kv_dtype = (getattr(torch, kernel[name]) for name in ("q_dtype", "kv_dtype"))
    latent = _is_latent(kernel["head_dim_qk"])
    less_dim, num_kv_heads = (0, 1) if latent else (case.less_dim, case.num_kv_heads)
    dim_qk, dim_vo = (kernel[name] - less_dim for name in ("head_dim_qk", "head_dim_vo"))
    num_qo_heads = case.num_kv_heads * case.group
    rows, keys = sum(case.qo_lens), sum(case.kv_lens)

    def randn(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(tokens, heads, dim, generator=generator).to(dtype).to(device)

    q = randn(rows, num_qo_heads, dim_qk, q_dtype)
    k = randn(keys, num_kv_heads, dim_qk, kv_dtype)
    v = k[..., :dim_vo] if latent else randn(keys, num_kv_heads, dim_vo, kv_dtype)
    if case.form == "packed" and dim_qk == dim_vo and q_dtype == kv_dtype:
        q, k, v = torch.stack([q, k, v], 1).unbind(1)
    sinks = torch.randn(num_qo_heads, generator=generator).to(device) if case.sinks else None
    return Inputs(q, k, v, sinks)


def _is_latent(head_dim_qk: int) -> bool:
    return head_dim_qk > request_facts.MOST_SEPARATE_COLUMNS


def compute(case: Case, inputs: Inputs, backend: str) -> Pair:
    """Output and LSE of ``case`` by ``backend``, through the public functions wherever they reach."""
    q, k, v = inputs.q, inputs.k, inputs.v
    o_dtype = torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype
    if case.chunk:
        return _chunked(case.chunk, q, k, v, o_dtype, backend)
    layout = "NHD"
    if case.form == "HND":
        k, layout = k.transpose(0, 1).contiguous(), "HND"
        v = k[..., : v.size(2)] if _is_latent(q.size(2)) else v.transpose(0, 1).contiguous()
    if len(case.qo_lens) == 1:
        more: dict[str, Any] = {"o_dtype": o_dtype, "sinks": inputs.sinks, "backend": backend, "return_lse": True}
        out, lse = single_prefill_with_kv_cache(q, k, v, kv_layout=layout, **more, **case.options)
        return out, lse
    workspace = torch.empty(64 << 20, dtype=torch.uint8, device=q.device)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, layout, backend=backend)
    wrapper.plan(
        _offsets(case.qo_lens),
        _offsets(case.kv_lens),
        q.size(1),
        inputs.k.size(1),
        q.size(2),
        head_dim_vo=v.size(2),
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
        o_data_type=o_dtype,
        **case.options,
    )
    out, lse = wrapper.run(q, k, v, return_lse=True, sinks=inputs.sinks)
    return out, lse


def expected(case: Case, inputs: Inputs) -> Pair:
    """The same by the reference, from inputs converted to float32."""
    return compute(case, Inputs(inputs.q.float(), inputs.k.float(), inputs.v.float(), inputs.sinks), "reference")


def plain(case: Case, inputs: Inputs) -> torch.Tensor:
    """The output by plain PyTorch in the type of the queries, which are of 16 bits."""
    q, k, v = inputs.q, inputs.k, inputs.v
    outs = []
    for rows, keys, values in zip(q.split(case.qo_lens), k.split(case.kv_lens), v.split(case.kv_lens)):
        outs.append(
            plain_attention(
                rows,
                keys,
                values,
                _hidden(case, len(rows), len(keys)).to(q.device),
                q.dtype,
                sm_scale=case.options.get("sm_scale"),
                soft_cap=case.options.get("logits_soft_cap", 0.0),
                sinks=inputs.sinks,
            )
        )
    return torch.cat(outs)


def _hidden(case: Case, qo_len: int, kv_len: int) -> torch.Tensor:
    """Bool ``[qo_len, kv_len]``: which keys a row does not see."""
    causal = case.options.get("causal", False) or case.chunk > 0
    kind = Kind(causal, case.options.get("window_left", -1), -1, case.chunk)
    return ~pattern(kind, qo_len, kv_len, torch.device("cpu"))


def _chunked(chunk: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o_dtype: torch.dtype, backend: str) -> Pair:
    """Causal chunks of a chosen backend, which no public function offers."""
    out = torch.empty(q.size(0), q.size(1), v.size(2), dtype=o_dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    problem = Problem(
        q, RaggedKv(k, v), Logits(q.size(2) ** -0.5), Output(out, lse), Mask(causal=True, chunk_size=chunk)
    )
    selection.compute(problem, selection.select(backend, request_facts.Request.from_problem(problem)))
    return out, lse


def _offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)
