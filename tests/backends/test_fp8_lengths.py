"""Sums of e4m3 products: an error that does not grow with the number of keys (docs/conventions.md states it).

Tensor cores add such products with about 14 bits and truncate, so that one long sum of numbers of one sign shrinks."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from fused_problems import Mode, call
from problems import Batch

import cutlass_kernels as ck

pytestmark = [pytest.mark.gpu, pytest.mark.hopper]

DEVICE, E4M3 = "cuda:0", torch.float8_e4m3fn
DIMS, LENGTHS = [64, 128, 256], [1 << 10, 1 << 14, 1 << 17]
# Rows: those of few heads share a tile, whose keys may be split; more of them fill tiles of their own.
ROWS = {"packed": 64, "tiles": 400}


def tensors(rows: int, keys: int, dim: int, heads: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, heads, dim, device=DEVICE) for n in (rows, keys, keys))
    return q.to(E4M3), k.to(E4M3), (v + 1).to(E4M3)


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, window: int) -> tuple[torch.Tensor, ...]:
    """Output and base-2 LSE in fp64, head by head."""
    rows, keys = len(q), len(k)
    last = torch.arange(keys - rows, keys, device=DEVICE)[:, None]
    key = torch.arange(keys, device=DEVICE)[None]
    hidden = torch.zeros(rows, keys, dtype=torch.bool, device=DEVICE)
    if causal:
        hidden |= key > last
    if window >= 0:
        hidden |= key < last - window
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
    q, k, v = tensors(rows, keys, dim)
    return (q, k, v), exact(q, k, v, causal, window)


@pytest.fixture(autouse=True)
def free_memory():
    yield
    problem.cache_clear()


def ragged(q, k, v, causal=False, window=-1, split=True, lse=True, backend="fa3"):
    memory = torch.zeros(256 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(memory, backend=backend)
    offsets = (torch.tensor([0, len(x)], dtype=torch.int32) for x in (q, k))
    types = dict(q_data_type=q.dtype, kv_data_type=E4M3, o_data_type=torch.float16)
    options = dict(causal=causal, window_left=window, disable_split_kv=not split)
    wrapper.plan(*offsets, q.shape[1], k.shape[1], q.shape[2], **types, **options)
    return wrapper.run(q, k, v, return_lse=lse)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("keys", LENGTHS)
def test_of_all_keys(keys, dim, rows, split):
    given, want = problem(ROWS[rows], keys, dim)
    check(*ragged(*given, split=split), want)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [-1, 70_000])
def test_of_keys_in_a_mask(dim, rows, window):
    given, want = problem(ROWS[rows], 1 << 17, dim, True, window)
    check(*ragged(*given, causal=True, window=window), want)


@pytest.mark.parametrize("growth", [0.0, 4.0], ids=["even", "growing"])  # of logits: P then has to be taken again
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dim", DIMS)
def test_outputs_do_not_depend_on_an_lse(dim, rows, growth):
    q, k, v = tensors(ROWS[rows], 2000, dim)
    k = (k.float() * (1 + growth * torch.rand(2000, 1, 1, device=DEVICE))).to(E4M3)
    assert torch.equal(ragged(q, k, v, lse=False), ragged(q, k, v)[0])


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("rows", [4, 64])  # few are for kernels that read e4m3
@pytest.mark.parametrize("keys", LENGTHS)
def test_caches_become_16_bits(keys, rows, dim, backend):
    """Keys and values of e4m3 below fp16 queries."""
    (q, k, v), want = problem(rows, keys, dim)
    check(*ragged(q.half(), k, v, backend=backend), want, most_bias=1e-3)


@pytest.mark.parametrize("keys", LENGTHS)
def test_latent_caches_become_16_bits(keys):
    torch.manual_seed(0)
    latent = torch.randn(keys, 1, 576, device=DEVICE).add(1).to(E4M3)
    queries = torch.randn(4, 4, 576, device=DEVICE).half()
    values = latent[..., :512]
    want = exact(queries, latent.expand(-1, 4, -1), values.expand(-1, 4, -1), False, -1)
    offsets = torch.tensor([0, keys], dtype=torch.int32, device=DEVICE)
    out, lse = ck.attention(queries, latent, values, cu_seqlens_k=offsets, backend="fa2", return_lse=True)
    check(out, lse, want, most_bias=1e-3)


@pytest.mark.parametrize("dim", DIMS)
def test_of_pages_fused(dim):
    (q, k, v), want = problem(400, 1 << 16, dim)
    batch = Batch([len(q)], [len(k)], q, k, v)
    out = call(batch, "Q_PAGED_KV_HND", Mode("padding"), out_dtype=torch.float16)
    check(out, None, want)


def test_of_keys_on_several_devices():
    (q, k, v), want = problem(400, 1 << 16, 128)
    parts = [ragged(q, k[i::2].contiguous(), v[i::2].contiguous()) for i in range(2)]
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


def compare(out: torch.Tensor, q, k, v, scales, sm_scale: float, sinks: torch.Tensor | None = None) -> None:
    group = q.size(1) // k.size(1)
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
    torch.manual_seed(0)
    rows, keys, heads, kv_heads, dim = 511, 4144, 24, 8, 64
    q, k = (torch.randn(n, h, dim, device=DEVICE).to(E4M3) for n, h in ((rows, heads), (keys, kv_heads)))
    v = (torch.randn(keys, kv_heads, dim, device=DEVICE) + 1).to(E4M3)
    scales = [torch.rand(h, device=DEVICE) + 0.5 for h in (heads, kv_heads, kv_heads)]
    sinks = torch.randn(heads, device=DEVICE)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(128 << 20, dtype=torch.uint8, device=DEVICE), backend="fa3"
    )
    offsets = (torch.tensor([0, n], dtype=torch.int32) for n in (rows, keys))
    types = dict(q_data_type=E4M3, kv_data_type=E4M3, o_data_type=torch.float16)
    wrapper.plan(*offsets, heads, kv_heads, dim, **types)
    out = wrapper.run(q, k, v, **dict(zip(("q_scale", "k_scale", "v_scale"), scales)), sinks=sinks)
    compare(out, q, k, v, scales, dim**-0.5, sinks)


def test_scales_of_the_fused_prefill():
    torch.manual_seed(0)
    rows, keys, heads, kv_heads, dim = 292, 3475, 20, 4, 256
    q, k = (torch.randn(n, h, dim, device=DEVICE).to(E4M3) for n, h in ((rows, heads), (keys, kv_heads)))
    v = (torch.randn(keys, kv_heads, dim, device=DEVICE) + 1).to(E4M3)
    batch = Batch([rows], [keys], q, k, v)
    out = call(batch, "Q_PAGED_KV_HND", Mode("padding", bmm2=2.5), out_dtype=torch.float16)
    ones = torch.ones(1)
    compare(out, q, k, v, (ones.expand(heads), ones.expand(kv_heads), ones.expand(kv_heads) * 2.5), dim**-0.5)
