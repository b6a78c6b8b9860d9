"""`mla_decode`: latent attention (MLA) in its absorbed form, a few tokens per request over a paged cache."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from typing import Any

import api
import torch
from backend import ALL, FP8, Backend, Operation, Workload, module, needs_module
from inputs import Inputs, make_inputs, make_latent_pages
from lengths import tokens, varied
from problem import OfProblem, Problem
from timing import Timed

from .prefill import page_table

CKV, KPE = 512, 64  # columns of keys: the latent ones, which are the values, and those of the position
SCALE = (CKV + KPE) ** -0.5  # logits of variance 1, for keys and queries drawn from N(0, 1)


@dataclass(frozen=True)
class MlaDecode(OfProblem):
    """Decode steps over a latent cache; ``kv_dtype`` is the element type of the cache, if not that of the queries."""

    kv_dtype: str

    @property
    def detail(self) -> str:
        return f"{self.problem.detail}, cache of {self.kv_dtype}"

    @property
    def features(self) -> frozenset[str]:
        return self.problem.features | (FP8 if self.kv_dtype.startswith("float8") else frozenset())

    @property
    def bytes(self) -> float:
        """Of the cache, once: keys, whose first columns are the values."""
        return float(sum(self.problem.kv_lens) * (CKV + KPE) * getattr(torch, self.kv_dtype).itemsize)


def _inputs(case: MlaDecode, device: torch.device) -> Inputs:
    """Those of the problem without pages, values being the first columns of the keys; and the pages of these keys."""
    x = make_inputs(dataclasses.replace(case.problem, page_size=0), device)
    k = x.k.to(getattr(torch, case.kv_dtype))
    return dataclasses.replace(x, k=k, v=k[..., :CKV], pages=make_latent_pages(case.problem, k))


def _by_request(case: MlaDecode, x: Inputs) -> torch.Tensor:
    """Queries ``[batch, tokens, heads, 576]``."""
    return x.q.view(len(case.problem.qo_lens), -1, *x.q.shape[1:])


def _caches(x: Inputs) -> list[torch.Tensor]:
    """Copies of the cache ``[pages, page_size, 1, 576]``: calls take turns, so that none of it is found in L2."""
    assert x.pages is not None
    return [cache.unsqueeze(2) for cache in x.pages.copies if isinstance(cache, torch.Tensor)]


def _table_and_lengths(x: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """The page table and the KV lengths, on the device."""
    assert x.pages is not None
    return page_table(x.pages).to(x.q.device), x.kv_indptr_device.diff()


# --- who attends -------------------------------------------------------------------------------------------------


def attention(library: Any, name: str, case: MlaDecode, x: Inputs) -> Timed:
    """attention(), which reads page table and lengths on the device; one schedule for all calls, as layers share it."""
    shared = {"schedule": library.Schedule()} if hasattr(library, "Schedule") else {}
    q, (table, lengths) = _by_request(case, x), _table_and_lengths(x)
    pairs = itertools.cycle([(cache, cache[..., :CKV]) for cache in _caches(x)])
    call = functools.partial(
        library.attention,
        page_table=table,
        seqused_k=lengths,
        max_seqlen_k=max(case.problem.kv_lens),
        causal=case.problem.causal,
        sm_scale=SCALE,
        backend=name,
        **shared,
    )
    return Timed(lambda: call(q, *next(pairs)), output=lambda out: out.flatten(0, 1))


def _refused(library: Any, name: str, case: MlaDecode, device: torch.device) -> str | None:
    """Why this library does not serve ``case``. A latent cache of fp8 needs a kernel of its own: none is copied."""
    if case.features & FP8 and name != "reference":
        types = (case.problem.dtype, case.kv_dtype, CKV + KPE)
        readers = [k for k in library.list_kernels() if (k["q_dtype"], k["kv_dtype"], k["head_dim_qk"]) == types]
        if not any(name in ("auto", reader["backend"]) for reader in readers):
            kernel = "kernel" if name == "auto" else f"{name} kernel"
            return f"no {kernel} reads a latent cache of {case.kv_dtype}"
    return api.refused(library, name, case, device, case.kv_dtype)


def flash_mla(case: MlaDecode, x: Inputs) -> Timed:
    """FlashMLA, whose metadata are computed once."""
    library, causal = module("flash_mla"), case.problem.causal
    q, (table, lengths) = _by_request(case, x), _table_and_lengths(x)
    caches = itertools.cycle(_caches(x))
    metadata = library.get_mla_metadata(lengths, q.size(1) * q.size(2), 1)
    call = library.flash_mla_with_kvcache
    return Timed(
        lambda: call(q, next(caches), table, lengths, CKV, *metadata, SCALE, causal),
        output=lambda returned: returned[0].flatten(0, 1),
    )


def _only_pages_of_64(case: MlaDecode, device: torch.device) -> str | None:
    return None if case.problem.page_size == 64 else "FlashMLA has pages of 64 tokens"


def flashinfer(name: str, case: MlaDecode, x: Inputs) -> Timed:
    """The wrapper, planned once; keys are two views of the cache."""
    library, p = module("flashinfer"), case.problem
    assert x.pages is not None
    wrapper = library.mla.BatchMLAPagedAttentionWrapper(api.workspace(x.q.device), backend=name)
    wrapper.plan(
        qo_indptr=x.qo_indptr,
        kv_indptr=x.pages.indptr,
        kv_indices=x.pages.indices,
        kv_len_arr=x.kv_indptr.diff(),
        num_heads=p.num_qo_heads,
        head_dim_ckv=CKV,
        head_dim_kpe=KPE,
        page_size=p.page_size,
        causal=p.causal,
        sm_scale=SCALE,
        q_data_type=getattr(torch, p.dtype),
        kv_data_type=getattr(torch, case.kv_dtype),
    )
    q_nope, q_pe = x.q.split([CKV, KPE], -1)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if case.features & FP8 else {}
    pairs = itertools.cycle([cache.squeeze(2).split([CKV, KPE], -1) for cache in _caches(x)])

    def call() -> torch.Tensor:
        ckv, kpe = next(pairs)
        out: torch.Tensor = wrapper.run(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv, kpe_cache=kpe, **scales)
        return out

    return Timed(call)


# --- workloads ---------------------------------------------------------------------------------------------------


def mla_decode(dtype: str) -> list[MlaDecode]:
    """DeepSeek's 128 heads, and the 64 and 16 of 2 and 8 tensor-parallel ranks, over pages of 64.

    Of fp8 the cache is meant; queries are bfloat16 then.
    """
    cases: list[MlaDecode] = []
    for heads, count, batches in (
        (128, 1, ((128, 4096), (128, 8192), (128, 16384))),
        (128, 2, ((128, 4096), (128, 8192), (128, 16384))),
        (64, 1, ((128, 4096), (128, 8192), (128, 16384))),
        (16, 1, ((1, 4096), (1, 16384), (64, 4096), (64, 16384))),
    ):
        for batch, keys in batches:
            cases.append(_case(heads, count, f"{batch} x {tokens(keys)}", (keys,) * batch, dtype))
    return cases


def mla_decode_varied(dtype: str) -> list[MlaDecode]:
    """The same over caches of random lengths, uniform and log-normal ones."""
    return [
        _case(heads, count, f"{batch} x {tokens(keys)} {kind}", varied(kind, batch, keys), dtype)
        for heads, count, batch, keys in (
            (128, 1, 128, 4096),
            (128, 1, 64, 4096),
            (128, 1, 256, 1024),
            (128, 2, 128, 4096),
            (16, 1, 64, 4096),
            (16, 1, 256, 1024),
        )
        for kind in ("uniform", "log-normal")
    ]


def _case(heads: int, count: int, label: str, kv_lens: tuple[int, ...], dtype: str) -> MlaDecode:
    """``count`` tokens of each request over caches of these lengths."""
    problem = Problem(
        f"{heads} heads, {count} token{'s' if count > 1 else ''}",
        label,
        (count,) * len(kv_lens),
        tuple(max(keys, count) for keys in kv_lens),
        heads,
        1,
        CKV + KPE,
        CKV,
        causal=count > 1,
        dtype="bfloat16" if dtype.startswith("float8") else dtype,
        page_size=64,
    )
    return MlaDecode(problem, dtype)


_SERVED = ALL - {"window", "soft_cap", "sinks"}
OPERATION = Operation(
    "latent attention (MLA), absorbed: one or two tokens per request over pages of 576 columns, 16-bit or e4m3",
    ("us", "TFLOP/s", "TB/s"),
    api.our_columns(attention, _refused),
    [
        Backend("flash_mla", False, _SERVED, needs_module("flash_mla"), flash_mla, _only_pages_of_64),
        *(
            Backend(
                f"flashinfer_{name}",
                False,
                _SERVED | FP8,
                needs_module("flashinfer"),
                functools.partial(flashinfer, name),
            )
            for name in ("fa2", "fa3")
        ),
    ],
    {
        "mla-decode": Workload(
            "128 requests of 128 and 64 heads over 4k to 16k keys; 1 and 64 of 16 heads",
            mla_decode,
            ("us", "TFLOP/s", "TB/s"),
        ),
        "mla-decode-varied": Workload(
            "the same over caches of random lengths, uniform and log-normal ones",
            mla_decode_varied,
            ("us", "TFLOP/s", "TB/s"),
        ),
    },
    "mla-decode",
    ("fa3", "fa2", "auto", "flash_mla", "flashinfer_fa2", "flashinfer_fa3"),
    _inputs,
)
