"""Direct calls of every kind, on the stand-in for a GPU of recorded_calls.py: all that can lie apart in memory does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from recorded_calls import BF16, CPU, CUDA, E4M3, E5M2, HALF, INTS, Gpu, rows_of
from recorded_runs import Batch

from cutlass_kernels._core.call_table import Call

FLOATS = (HALF, BF16, E4M3, E5M2, torch.float32)
FAR = 1 << 30  # elements that a stride spans at most, and rows
LAYOUTS = ["PACKED_QKV", "CONTIGUOUS_Q_KV", "SEPARATE_Q_K_V", "Q_PAGED_KV_HND", "Q_PAGED_KV_NHD"]
FORMS = ["ragged", "dense", "table", "indices", "latent", "latent lists"]


class Parameter(torch.nn.Parameter):
    """A subclass, which may stand for another tensor."""


@dataclass
class Direct:
    """A function of the compiled module, with arguments that it accepts, in their order."""

    gpu: Gpu
    function: Callable[..., Any]
    given: dict[str, Any]

    def __call__(self, **changes: Any) -> Any:
        assert not changes.keys() - self.given.keys()
        return self.function(*(self.given | changes).values())

    def accepts(self, planned: bool = False, **changes: Any) -> bool:
        assert not changes.keys() - self.given.keys()
        return self.gpu.accepts(self.function, *(self.given | changes).values(), planned=planned)

    def launched(self, **changes: Any) -> dict[str, Any]:
        """What a kernel is launched with."""
        assert self(**changes) is not None
        return self.gpu.launched()

    def changes(self, name: str, value: Any) -> dict[str, Any] | None:
        """The change of an argument, or of an option of a run; None where the function has no such argument."""
        if name in self.given:
            return {name: value}
        options = vars(self.given["options"]) if "options" in self.given else {}
        return dict(options=SimpleNamespace(**options | {name: value})) if name in options else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor, Callable[[Any], dict[str, Any]]]]:
        """Each tensor, also of a tuple: its name, the tensor, and the change that puts something else in its place."""
        for name, given in self.given.items():
            if isinstance(given, torch.Tensor):
                yield name, given, lambda other, name=name: {name: other}
            for i, x in enumerate(given if isinstance(given, tuple) else ()):
                if isinstance(x, torch.Tensor):
                    yield (
                        f"{name}[{i}]",
                        x,
                        lambda other, name=name, given=given, i=i: {name: (*given[:i], other, *given[i + 1 :])},
                    )


USUAL = dict(lse=(0, 0, 0), mask=(0, 0, 0), alibi=0, sinks=0, stats=0, causal=True, window_left=-1, chunk_size=0)
USUAL |= dict(skip_softmax_factor=0.0, scales=(0.125, 0.0, 1.0), device=0, stream=64)


def expect(launched: dict[str, Any], **facts: Any) -> None:
    """What a kernel is launched with, beside what is usual."""
    for name, want in (USUAL | facts).items():
        assert launched[name] == want, name


def single(gpu: Gpu, dtype: torch.dtype = HALF, decode: bool = False, **changes: Any) -> Direct:
    arguments = dict(
        q=rows_of(4, 64, dtype=dtype, every=2) if decode else rows_of(5, 4, 64, dtype=dtype, every=2, wide=64),
        k=rows_of(20, 2, 64, dtype=dtype, every=3),
        v=rows_of(20, 2, 128, dtype=dtype, every=2),
        out=None,
        lse=None,
        sinks=None,
        return_lse=False,
        causal=not decode,
        kv_layout="NHD",
        window_left=-1,
        logits_soft_cap=None,
        sm_scale=None,
        q_scale=None,
        k_scale=None,
        v_scale=None,
        backend="auto",
    )
    assert not changes.keys() - arguments.keys()
    return Direct(gpu, gpu.module.single_decode if decode else gpu.module.single_prefill, arguments | changes)


def run(gpu: Gpu, page_size: int = 0, hnd: bool = False, dim_vo: int = 128, **changes: Any) -> Direct:
    batch = Batch(gpu, page_size)
    batch.request.head_dim_vo = dim_vo
    return Direct(gpu, batch.run(hnd=hnd), batch.arguments(**changes))


def pages_of(layout: str, dtype: torch.dtype = HALF, page: int = 16) -> torch.Tensor:
    """A pool of ten pages."""
    return rows_of(10, 2, *((2, page) if layout.endswith("HND") else (page, 2)), 64, dtype=dtype)


def fused(gpu: Gpu, layout: str, dtype: torch.dtype = HALF, page: int = 16, **changes: Any) -> Direct:
    """Two requests of 5 and 3 rows, of 20 and 10 keys but for packed tensors."""
    q = rows_of(8, 4, 64, dtype=dtype, every=2, wide=64)
    packed, paged = layout == "PACKED_QKV", layout.startswith("Q_PAGED")
    qkv = {
        "PACKED_QKV": rows_of(8, 3, 4, 64, dtype=dtype, wide=64),
        "CONTIGUOUS_Q_KV": (q, rows_of(30, 2, 2, 64, dtype=dtype, every=3)),
        "SEPARATE_Q_K_V": (q, rows_of(30, 2, 64, dtype=dtype, every=3), rows_of(30, 2, 128, dtype=dtype, every=2)),
    }
    arguments = dict(
        qkv=(q, pages_of(layout, dtype, page)) if paged else qkv[layout],
        input_layout=layout,
        max_q_len=5,
        max_kv_len=5 if packed else 20,
        bmm1_scale=0.1,
        bmm2_scale=1.0,
        batch_size=2,
        cum_seq_lens_q=torch.tensor([0, 5, 8], dtype=INTS),
        cum_seq_lens_kv=torch.tensor([0, 5, 8] if packed else [0, 20, 30], dtype=INTS),
        block_tables=torch.zeros(2, 3, dtype=INTS) if paged else None,
        out=None,
        out_dtype=None,
        sinks=None,
        logits_soft_cap_scale=None,
        mask_mode="causal",
        window_left=-1,
        chunked_attention_size=0,
        save_softmax_stats=False,
        skip_softmax_threshold_scale_factor=0,
        backend="auto",
    )
    assert not changes.keys() - arguments.keys()
    return Direct(gpu, gpu.module.fused_prefill, arguments | changes)


def attention(gpu: Gpu, form: str, **changes: Any) -> Direct:
    """``attention()`` of two requests of keys that lie in memory as ``form`` says."""

    def ints(n: int) -> torch.Tensor:
        return torch.zeros(n, dtype=INTS)

    q, page = rows_of(8, 4, 64, every=2, wide=64), (10, 16)
    if form.startswith("latent"):
        rows, k = torch.zeros(6, 16, 576).to(BF16), torch.zeros(*page, 1, 576).to(BF16)
        q, k, q_rope, k_rope = (x[..., y].contiguous() for y in (slice(512), slice(512, None)) for x in (rows, k))
        given = dict(q=q, k=k, v=k[..., :512], q_rope=q_rope, k_rope=k_rope)
        lists = dict(
            kv_indices_per_token=ints(6 * 40).view(6, 1, 40), topk_length=ints(6), max_logits=torch.zeros(6, 16)
        )
        pages = dict(cu_seqlens_q=ints(3), seqused_k=ints(2), page_table=torch.zeros(2, 4, dtype=INTS))
        given |= lists if form == "latent lists" else pages
        return Direct(gpu, gpu.module.attention, Call(**given | changes)._asdict())
    lead = {"ragged": (30,), "dense": (2, 15)}.get(form, page)
    k, v = rows_of(*lead, 2, 64, every=3), rows_of(*lead, 2, 64, every=2)
    keys = {
        "ragged": dict(cu_seqlens_k=ints(3), cu_seqlens_q=ints(3), seqused_q=ints(2)),
        "dense": dict(q=rows_of(2, 4, 4, 64, every=2), seqused_k=ints(2)),
        "table": dict(page_table=torch.zeros(2, 4, dtype=INTS), seqused_k=ints(2), cu_seqlens_q=ints(3)),
        "indices": dict(kv_indices=ints(7), kv_indptr=ints(3), kv_last_page_len=ints(2), cu_seqlens_q=ints(3)),
    }
    given = dict(q=q, k=k, v=v) | keys[form]
    return Direct(gpu, gpu.module.attention, Call(**given | changes)._asdict())


def faults(x: torch.Tensor) -> Iterator[tuple[str, dict[str, Any]]]:
    """Other facts of a tensor: of a whole tensor, and with the dimension behind the name."""
    for dtype in (*FLOATS, torch.float64, torch.int16, torch.int32, torch.int64, torch.uint8):
        if dtype != x.dtype:
            yield f"{dtype}", dict(dtype=dtype)
    yield "another GPU", dict(device=(CUDA, 1))
    yield "CPU", dict(device=(CPU, 0))
    yield "address", dict(data=x.data_ptr() + 8)
    yield "first dimension less", dict(shape=tuple(x.shape[1:]), strides=x.stride()[1:])
    yield "last dimension less", dict(shape=tuple(x.shape[:-1]), strides=x.stride()[:-1])
    yield "dimension before", dict(shape=(1, *x.shape), strides=(x.stride(0) * x.size(0), *x.stride()))
    yield "dimension behind", dict(shape=(*x.shape, 1), strides=(*x.stride(), 1))
    for d, (size, stride) in enumerate(zip(x.shape, x.stride())):
        for name, other in (("longer", 2 * size), ("shorter", size - 1), ("none", 0)):
            yield f"{name} {d}", dict(shape=(*x.shape[:d], other, *x.shape[d + 1 :]))
        for name, other in (("in one place", 0), ("reverse", -stride), ("unaligned", stride + 4), ("far", FAR + 8)):
            yield f"{name} {d}", dict(strides=(*x.stride()[:d], other, *x.stride()[d + 1 :]))


def with_places(call: Direct) -> Direct:
    """The call with places for its results, and sinks."""
    q = call.given.get("q", call.given.get("qkv"))
    q = q[0] if isinstance(q, tuple) else q if "q" in call.given else q[:, 0]
    v = call.given.get("v")
    if v is None:
        of_keys = call.given["k"] if "k" in call.given else call.given["qkv"]
        v = of_keys[-1] if isinstance(of_keys, tuple) else of_keys
    lead, heads = q.shape[:-2], q.shape[-2]
    dtype = BF16 if q.dtype == E4M3 else q.dtype
    places = dict(out=rows_of(*lead, heads, v.shape[-1], dtype=dtype, every=2), sinks=torch.zeros(heads))
    if "lse" in call.given:
        places["lse"] = torch.zeros(heads, *lead, 2)[..., 0].movedim(0, -1)
    return Direct(call.gpu, call.function, call.given | places)


def _turned(make: Callable[..., Direct], *page: int, **others: Any) -> Callable[[Gpu], Direct]:
    """The call with heads before tokens in its keys and values."""

    def made(gpu: Gpu) -> Direct:
        k, v = rows_of(*page, 64, every=2), rows_of(*page, 128, every=3)
        return make(gpu, **dict(k=(k, v)) if len(page) == 3 else dict(k=k, v=v), **others)

    return made


CALLS: dict[str, Callable[[Gpu], Direct]] = {
    "single_prefill": single,
    "single_prefill of HND": _turned(single, 2, 20, kv_layout="HND"),
    "single_decode": lambda gpu: single(gpu, decode=True),
    "run": run,
    "run of HND": _turned(run, 2, 30, hnd=True),
    "run of pages": lambda gpu: run(gpu, 16),
    "run of pages of HND": _turned(run, 12, 2, 16, page_size=16, hnd=True),
    "run of pages of one token": lambda gpu: run(gpu, 1, k=(rows_of(12, 2, 64, every=2), rows_of(12, 2, 128, every=2))),
    **{layout: partial(fused, layout=layout) for layout in LAYOUTS},
    **{f"attention, {form}": partial(attention, form=form) for form in FORMS},
}
