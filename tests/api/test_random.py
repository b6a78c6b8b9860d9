"""Random combinations of sizes, layouts, strides, masks and options over all kinds of calls.

Every run draws new ones with a seed that it prints (``conftest.py``). A failure prints its case: fix it, and keep the
case as ``@example(case=Case(...))`` of that test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from guards import Guarded
from hypothesis import given
from hypothesis import strategies as st
from problems import Options, indptr, make_batch
from wrapper_problems import Wrapped

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


def build(case: Case, target, kind: str) -> Wrapped:
    heads = (case.num_kv_heads * case.group, case.num_kv_heads, case.head_dim)
    batch = make_batch(case.qo_lens, case.kv_lens, *heads, dtype=case.dtype, device=target.device, seed=case.seed)
    masks = batch.random_masks() if case.mask == "custom" else None
    w = Wrapped(target, kind, batch, case.page_size, case.kv_layout, case.form)
    w.options = Options(**case.options, custom_masks=masks)
    w.batch.q = pitched(batch.q, case.pitch)
    if kind != "paged":
        hnd = case.kv_layout == "HND"
        w.kv = tuple(x.transpose(0, 1) if hnd else x for x in (pitched(x, case.pitch) for x in (batch.k, batch.v)))
    return w


def pitch_strides(x: torch.Tensor, pitch: int) -> tuple[int, int, int]:
    return x.shape[1] * (x.shape[2] + pitch), x.shape[2] + pitch, 1


def pitched(x: torch.Tensor, pitch: int) -> torch.Tensor:
    """The same values with a wider pitch; NaN between the rows."""
    return Guarded(x.shape, x.dtype, x.device, pitch_strides(x, pitch), x).tensor


def lse_tolerance(case: Case) -> float | None:
    """None is the usual one. Rotated keys are rounded to 16 bits, and where fp32 and fp64 rotations round differently,
    one element of size 4 moves by a unit in the last place, and the logit with it, whatever the backend does right."""
    if case.options.get("pos_encoding_mode") != "ROPE_LLAMA":
        return None
    scale = case.options.get("sm_scale", case.head_dim**-0.5)
    return 1e-3 + torch.finfo(case.dtype).eps * 16 * scale * 1.4427


def compare(case: Case, w: Wrapped, out: torch.Tensor, lse: torch.Tensor) -> None:
    want = w.expect()
    assert_close(out, want.out, want.baseline, dtype=case.dtype)
    assert_lse_close(lse, want.lse, atol=lse_tolerance(case))


@given(case=cases(batch_max=1))
def test_single(target, case):
    w = build(case, target, "single")
    if case.kv_layout == "HND" and case.seed % 2:
        w.kv = tuple(x.contiguous() for x in w.kv)
    compare(case, w, *w.plan(w.options).run(return_lse=True))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@given(case=cases())
def test_batches(target, kind, case):
    """Into guarded outputs, some with gaps."""
    w = build(case, target, kind)
    rows, heads, dim = w.batch.q.shape
    out = Guarded((rows, heads, dim), case.dtype, target.device, pitch_strides(w.batch.q, case.pitch))
    lse = Guarded((rows, heads), torch.float32, target.device)
    if case.sinks:
        w.options.sinks = torch.linspace(-2, 4, heads, device=target.device)
    w.plan(w.options).run(out=out.tensor, lse=lse.tensor, return_lse=True)
    compare(case, w, out.tensor, lse.tensor)
    out.check("out")
    lse.check("lse")


@given(case=cases(batch_max=1, empty=False))
def test_decode_is_the_last_row_of_prefill(target, case):
    case.qo_lens, case.mask = [1], "none"
    case.options.pop("causal", None)
    w = build(case, target, "single")
    given = dict(kv_layout=case.kv_layout, use_tensor_cores=case.seed % 2 == 0, return_lse=True)
    out, lse = ck.single_decode_with_kv_cache(w.batch.q[0], *w.kv, **given, **w.options.plan_kwargs())
    w.kind = "decode"
    compare(case, w, out[None], lse[None])


@given(
    lens=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    bitorder=st.sampled_from(["big", "little"]),
    seed=st.integers(0, 2**31),
)
def test_segment_packbits(lens, bitorder, seed):
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
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(rows, count, heads, 64, generator=generator).half().to(target.device)
    s = torch.randn(rows, count, heads, generator=generator) * 5
    s = torch.where(torch.rand(s.shape, generator=generator) < 0.2, -torch.inf, s).to(target.device)
    want, want_lse = oracle.merge(v, s)
    out, lse = ck.merge_states(v, s)
    assert_close(out, want)
    assert_lse_close(lse, want_lse, atol=1e-4)
