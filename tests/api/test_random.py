"""Random combinations of sizes, layouts, strides, masks and options over all kinds of calls.

Every run draws new ones with a seed that it prints (``conftest.py``). A failure prints its case: fix it, and keep the
case as ``@example(case=Case(...))`` of that test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import Guarded
from hypothesis import given
from hypothesis import strategies as st
from problems import Batch, Options, expect, make_batch

import cutlass_kernels as ck


@dataclass
class Case:
    qo_lens: list[int]
    kv_lens: list[int]
    num_kv_heads: int
    group: int
    head_dim: int
    dtype: torch.dtype
    kv_layout: str
    options: dict[str, Any]
    mask: str
    sinks: bool
    pitch: int
    page_size: int
    form: str
    seed: int

    def needs(self) -> set[str]:
        found = set()
        if self.mask == "custom":
            found.add("custom_mask")
        if self.options.get("pos_encoding_mode") == "ALIBI":
            found.add("alibi")
        if self.options.get("pos_encoding_mode") == "ROPE_LLAMA":
            found.add("rope")
        return found


def lengths(maximum: int) -> st.SearchStrategy[int]:
    tiles = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]).filter(lambda n: n <= maximum)
    return st.one_of(tiles, st.integers(0, maximum))


@st.composite
def cases(draw, batch_max: int = 4, empty: bool = True) -> Case:
    size = draw(st.integers(1, batch_max))
    least = 0 if empty else 1
    qo_lens = [max(draw(lengths(100)), least) for _ in range(size)]
    kv_lens = [max(draw(lengths(200)), least) for _ in range(size)]
    options: dict[str, Any] = {}
    mask = draw(st.sampled_from(["none", "causal", "causal", "custom"]))
    if mask == "causal":
        options["causal"] = True
    if draw(st.booleans()):
        options["window_left"] = draw(st.one_of(st.integers(0, 20), st.integers(0, 150)))
    if draw(st.booleans()):
        options["logits_soft_cap"] = draw(st.sampled_from([1.0, 5.0, 30.0]))
    if draw(st.booleans()):
        options["sm_scale"] = draw(st.sampled_from([0.0, 0.02, 0.2, 0.5]))
    mode = draw(st.sampled_from(["NONE", "NONE", "ALIBI", "ROPE_LLAMA"]))
    if mode != "NONE":
        options["pos_encoding_mode"] = mode
    if mode == "ROPE_LLAMA" and draw(st.booleans()):
        options |= {"rope_scale": draw(st.sampled_from([0.5, 4.0])), "rope_theta": draw(st.sampled_from([1e3, 5e5]))}
    return Case(
        qo_lens,
        kv_lens,
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        draw(st.sampled_from([16, 40, 64, 64, 80, 128])),
        draw(st.sampled_from([torch.float16, torch.bfloat16])),
        draw(st.sampled_from(["NHD", "HND"])),
        options,
        mask,
        draw(st.booleans()),
        draw(st.sampled_from([0, 8, 16])),
        draw(st.sampled_from([1, 2, 5, 8, 16, 64])),
        draw(st.sampled_from(["stacked", "tuple"])),
        draw(st.integers(0, 2**31)),
    )


def build(case: Case, target) -> tuple[Batch, Options, dict[str, Any]]:
    batch = make_batch(
        case.qo_lens,
        case.kv_lens,
        case.num_kv_heads * case.group,
        case.num_kv_heads,
        case.head_dim,
        dtype=case.dtype,
        device=target.device,
        seed=case.seed,
    )
    masks = batch.random_masks() if case.mask == "custom" else None
    given: dict[str, Any] = {} if masks is None else {"custom_mask": torch.cat([m.reshape(-1) for m in masks])}
    return batch, Options(**case.options, custom_masks=masks), given


def pitched(x: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same values with a wider pitch; NaN between the rows."""
    return Guarded(x.shape, x.dtype, x.device, (x.shape[1] * (x.shape[2] + pitch), x.shape[2] + pitch, 1), x).tensor


def lse_tolerance(case: Case) -> float | None:
    """None is the usual one. Rotated keys are rounded to 16 bits, and where fp32 and fp64 rotations round differently,
    one element of size 4 moves by a unit in the last place, and the logit with it, whatever the backend does right."""
    if case.options.get("pos_encoding_mode") != "ROPE_LLAMA":
        return None
    scale = case.options.get("sm_scale", case.head_dim**-0.5)
    return 1e-3 + torch.finfo(case.dtype).eps * 16 * scale * 1.4427


def compare(case: Case, out: torch.Tensor, lse: torch.Tensor, batch: Batch, options: Options) -> None:
    want = expect(batch, options)
    assert_close(out, want.out, want.baseline, dtype=case.dtype)
    assert_lse_close(lse, want.lse, atol=lse_tolerance(case))


@given(case=cases(batch_max=1))
def test_single(target, case):
    batch, options, given_mask = build(case, target)
    q, k, v = (pitched(x, case.pitch) for x in (batch.q, batch.k, batch.v))
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        if case.seed % 2:
            k, v = k.contiguous(), v.contiguous()
    out, lse = target.attempt(
        lambda backend: ck.single_prefill_with_kv_cache(
            q, k, v, kv_layout=case.kv_layout, return_lse=True, backend=backend, **options.plan_kwargs(), **given_mask
        ),
        case.needs(),
    )
    compare(case, out, lse, batch, options)


def finish(case: Case, batch: Batch, options: Options, target, call, needs) -> None:
    """``call(backend, run_kwargs)`` into guarded outputs, some with gaps."""
    rows, heads, dim = batch.q.shape
    strides = (heads * (dim + case.pitch), dim + case.pitch, 1)
    out = Guarded((rows, heads, dim), case.dtype, target.device, strides)
    lse = Guarded((rows, heads), torch.float32, target.device)
    run_kwargs: dict[str, Any] = {"out": out.tensor, "lse": lse.tensor, "return_lse": True}
    if case.sinks:
        options.sinks = torch.linspace(-2, 4, heads, device=target.device)
        run_kwargs["sinks"] = options.sinks
    target.attempt(lambda backend: call(backend, run_kwargs), needs)
    compare(case, out.tensor, lse.tensor, batch, options)
    out.check("out")
    lse.check("lse")


@given(case=cases())
def test_ragged(target, case):
    batch, options, given_mask = build(case, target)
    q, k, v = (pitched(x, case.pitch) for x in (batch.q, batch.k, batch.v))
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)

    def call(backend, run_kwargs):
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), case.kv_layout, backend=backend)
        wrapper.plan(
            batch.qo_indptr(),
            batch.kv_indptr(),
            *batch.heads,
            q_data_type=case.dtype,
            **options.plan_kwargs(),
            **given_mask,
        )
        return wrapper.run(q, k, v, **run_kwargs)

    finish(case, batch, options, target, call, case.needs())


@given(case=cases())
def test_paged(target, case):
    batch, options, given_mask = build(case, target)
    paged = batch.paged(case.page_size, case.kv_layout, case.form)
    q = pitched(batch.q, case.pitch)

    def call(backend, run_kwargs):
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), case.kv_layout, backend=backend)
        wrapper.plan(
            batch.qo_indptr(),
            *paged.table(),
            *batch.heads,
            case.page_size,
            q_data_type=case.dtype,
            **options.plan_kwargs(),
            **given_mask,
        )
        return wrapper.run(q, paged.cache, **run_kwargs)

    finish(case, batch, options, target, call, [*case.needs(), "paged"])


@given(case=cases(batch_max=1, empty=False))
def test_decode_is_the_last_row_of_prefill(target, case):
    case.qo_lens = [1]
    case.options.pop("causal", None)
    case.mask = "none"
    batch, options, _ = build(case, target)
    k, v = (pitched(x, case.pitch) for x in (batch.k, batch.v))
    if case.kv_layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    out, lse = ck.single_decode_with_kv_cache(
        batch.q[0],
        k,
        v,
        kv_layout=case.kv_layout,
        use_tensor_cores=case.seed % 2 == 0,
        return_lse=True,
        **options.plan_kwargs(),
    )
    want = expect(batch, options, decode=True)
    assert_close(out, want.out[0], want.baseline[0], dtype=case.dtype)
    assert_lse_close(lse, want.lse[0], atol=lse_tolerance(case))


@given(
    lens=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    bitorder=st.sampled_from(["big", "little"]),
    seed=st.integers(0, 2**31),
)
def test_segment_packbits(lens, bitorder, seed):
    import oracle
    from problems import indptr

    bounds = indptr(lens)
    x = torch.rand(int(bounds[-1]), generator=torch.Generator().manual_seed(seed)) < 0.5
    packed, places = ck.segment_packbits(x, bounds, bitorder)
    for b in range(len(lens)):
        want = oracle.pack_bits(x[int(bounds[b]) : int(bounds[b + 1])], bitorder)
        assert torch.equal(packed[int(places[b]) : int(places[b + 1])], want)


@pytest.mark.runs_nothing("merges states that no backend computed")
@given(
    rows=st.integers(1, 9),
    count=st.integers(1, 5),
    heads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_merge_states(target, rows, count, heads, seed):
    import oracle

    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, count, heads, 64, generator=generator).half().to(target.device)
    s = torch.randn(rows, count, heads, generator=generator) * 5
    s = torch.where(torch.rand(s.shape, generator=generator) < 0.2, -torch.inf, s).to(target.device)
    want, want_lse = oracle.merge(v, s)
    out, lse = ck.merge_states(v, s)
    assert_close(out, want)
    assert_lse_close(lse, want_lse, atol=1e-4)
