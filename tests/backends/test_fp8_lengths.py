"""Sums of e4m3 products: an error that does not grow with the number of keys (docs/conventions.md states it).

Tensor cores add such products with about 14 bits and truncate, so that one long sum of numbers of one sign shrinks."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from compare import assert_bitwise
from fused_problems import Mode, call
from pairs import every
from planned_runs import attend, wrapped
from problems import Batch, Options

import cutlass_kernels as ck

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

DEVICE, E4M3 = "cuda:0", torch.float8_e4m3fn
DIMS, LENGTHS = [64, 128, 256], [1 << 10, 1 << 14, 1 << 17]
# Rows: those of few heads share a tile, whose keys may be split; more of them fill tiles of their own.
ROWS = {"packed": 64, "tiles": 400}


def tensors(rows: int, keys: int, dim: int, heads: int = 4, kv_heads: int = 4) -> Batch:
    """One request, whose values have a mean of 1."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, dim, device=DEVICE) for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads)))
    return Batch([rows], [keys], q.to(E4M3), k.to(E4M3), (v + 1).to(E4M3))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> tuple[torch.Tensor, ...]:
    """Output and base-2 LSE in fp64, head by head."""
    rows, keys = len(q), len(k)
    last = torch.arange(keys - rows, keys, device=DEVICE)[:, None]
    key = torch.arange(keys, device=DEVICE)[None]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=DEVICE)
    if options.causal:
        hidden |= key > last
    if options.window_left >= 0:
        hidden |= key < last - options.window_left
    outs, lses = [], []
    for h in range(q.shape[1]):
        s = (q[:, h].double() @ k[:, h].double().T / math.sqrt(q.shape[2])).masked_fill(hidden, -math.inf)
        outs.append(torch.softmax(s, -1) @ v[:, h].double())
        lses.append(torch.logsumexp(s, -1) / math.log(2))
    return torch.stack(outs, 1), torch.stack(lses, 1)


# At 1k keys, where it is largest since the fewest P take part: 0.0013. O is divided by sums of P as rounded, so that
# rounding to 3 bits, alone a bias of 0.0007, has no direction.
MOST_ERROR, MOST_BIAS = 0.0015, 5e-4


def check(
    out: torch.Tensor, lse: torch.Tensor | None, want: tuple[torch.Tensor, ...], most_bias: float = MOST_BIAS
) -> None:
    wrong = out.double() - want[0]
    error = float(wrong.norm() / want[0].norm())
    bias = float(wrong.mean() / want[0].mean())
    assert error < MOST_ERROR and abs(bias) < most_bias, f"error {error:.5f}, bias {bias:+.5f}"
    if lse is not None:
        assert float((lse.double() - want[1]).abs().max()) < 5e-3


@functools.cache
def problem(rows: int, keys: int, dim: int, causal: bool = False, window: int = -1):
    batch, options = tensors(rows, keys, dim), Options(causal=causal, window_left=window)
    return batch, options, exact(batch.q, batch.k, batch.v, options)


@pytest.fixture(autouse=True)
def free_memory():
    yield
    problem.cache_clear()


def ragged(batch: Batch, options: Options | None = None, split=True, backend="fa3"):
    memory = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
    of = wrapped(backend, batch, workspace=memory)
    return of.plan(options, o_data_type=torch.float16, disable_split_kv=not split)


@every(split=[False, True], rows=ROWS, dim=DIMS, keys=LENGTHS)
def test_of_all_keys(keys, dim, rows, split):
    batch, options, want = problem(rows, keys, dim)
    check(*ragged(batch, options, split).run(return_lse=True), want)


@every(rows=ROWS, dim=DIMS, window=[-1, 70_000])
def test_of_keys_in_a_mask(dim, rows, window):
    batch, options, want = problem(rows, 1 << 17, dim, True, window)
    check(*ragged(batch, options).run(return_lse=True), want)


@every(growth={"even": 0.0, "growing": 4.0}, rows=ROWS, dim=DIMS)  # of logits: P then has to be taken again
def test_outputs_do_not_depend_on_an_lse(dim, rows, growth):
    batch = tensors(rows, 2000, dim)
    batch.k = (batch.k.float() * (1 + growth * torch.rand(2000, 1, 1, device=DEVICE))).to(E4M3)
    of = ragged(batch)
    assert_bitwise(of.run(return_lse=False), of.run(return_lse=True)[0])


@every(backend=["fa2", "fa3"], dim=DIMS, rows=[4, 64], keys=LENGTHS)  # few rows are for kernels that read e4m3
def test_caches_become_16_bits(keys, rows, dim, backend):
    """Keys and values of e4m3 below fp16 queries."""
    batch, options, want = problem(rows, keys, dim)
    batch = dataclasses.replace(batch, q=batch.q.half())
    check(*ragged(batch, options, backend=backend).run(return_lse=True), want, most_bias=1e-3)


@every(keys=LENGTHS)
def test_latent_caches_become_16_bits(keys):
    torch.manual_seed(0)
    latent = torch.randn(keys, 1, 576, device=DEVICE).add(1).to(E4M3)
    queries = torch.randn(4, 4, 576, device=DEVICE).half()
    values = latent[..., :512]
    want = exact(queries, latent.expand(-1, 4, -1), values.expand(-1, 4, -1), Options())
    offsets = torch.tensor([0, keys], dtype=torch.int32, device=DEVICE)
    out, lse = ck.attention(queries, latent, values, cu_seqlens_k=offsets, backend="fa2", return_lse=True)
    check(out, lse, want, most_bias=1e-3)


@every(dim=DIMS)
def test_of_pages_fused(dim):
    batch, _, want = problem(400, 1 << 16, dim)
    check(call(batch, "Q_PAGED_KV_HND", Mode("padding"), out_dtype=torch.float16), None, want)


def test_of_keys_on_several_devices():
    batch, _, want = problem(400, 1 << 16, 128)
    k, v = (x.unflatten(0, (-1, 2)).transpose(0, 1).contiguous() for x in (batch.k, batch.v))
    parts = [ragged(Batch([400], [1 << 15], batch.q, k[i], v[i])).run(return_lse=True) for i in range(2)]
    check(*ck.merge_state(*parts[0], *parts[1]), want)


def rounded(s: torch.Tensor, v: torch.Tensor, sink: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in fp64, and the same with P rounded to e4m3, relative to 16 as kernels do it, and divided by the sums
    of P that is not rounded."""
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top) * 16
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top) * 16
    return p @ v / total, p.float().to(E4M3).double() @ v / total


def compare(out: torch.Tensor, batch: Batch, scales, sinks: torch.Tensor | None = None) -> None:
    q, k, v = batch.q, batch.k, batch.v
    group, sm_scale = q.size(1) // k.size(1), q.size(2) ** -0.5
    wants, bases = [], []
    for h in range(q.size(1)):
        q_scale, k_scale, v_scale = (float(x[h if len(x) == q.size(1) else h // group]) for x in scales)
        s = q[:, h].double() @ k[:, h // group].double().T * (sm_scale * q_scale * k_scale)
        want, base = rounded(s, v[:, h // group].double() * v_scale, None if sinks is None else sinks[h].double())
        wants.append(want)
        bases.append(base)
    want, base = torch.stack(wants, 1), torch.stack(bases, 1)
    error = lambda x: float((x.double() - want).norm() / want.norm())  # noqa: E731
    assert error(out) < 1.2 * error(base), f"{error(out):.5f}, P rounded alone {error(base):.5f}"


def test_scales_of_heads_and_sinks():
    """Once 1.6 times the error of P rounded to e4m3: sums of 14 bits."""
    batch = tensors(511, 4144, 64, 24, 8)
    scales = [torch.rand(h, device=DEVICE) + 0.5 for h in (24, 8, 8)]
    options = Options(sinks=torch.randn(24, device=DEVICE))
    run = dict(zip(("q_scale", "k_scale", "v_scale"), scales))
    out, _ = attend("fa3", batch, options, run=run, o_data_type=torch.float16)
    compare(out, batch, scales, options.sinks)


def test_scales_of_the_fused_prefill():
    batch = tensors(292, 3475, 256, 20, 4)
    out = call(batch, "Q_PAGED_KV_HND", Mode("padding", bmm2=2.5), out_dtype=torch.float16)
    compare(out, batch, [torch.ones(20), torch.ones(4), torch.full((4,), 2.5)])
