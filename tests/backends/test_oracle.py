"""The measuring instruments: the oracle against PyTorch's own attention, and comparisons that must fail."""

from __future__ import annotations

import math

import oracle
import pytest
import torch
from compare import assert_bitwise, assert_close, assert_lse_close
from pairs import every
from problems import Options, expect, make_batch
from torch.nn.functional import scaled_dot_product_attention


def tensors(n: int, m: int, heads: int = 4, kv_heads: int = 2, dim: int = 16):
    q = torch.randn(n, heads, dim, dtype=torch.float64)
    k, v = torch.randn(2, m, kv_heads, dim, dtype=torch.float64)
    return q, k, v


def torch_attention(q, k, v, bias, scale=None):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    args = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(*args, attn_mask=bias, scale=scale).transpose(0, 1)


@pytest.mark.pairwise
@every(options=[{}, {"causal": True}, {"causal": True, "window_left": 3}, {"window_left": 2}], scale=[None, 0.0, 0.7])
@pytest.mark.parametrize("n,m", [(1, 1), (5, 9), (9, 9)])
def test_against_torch(n, m, options, scale):
    q, k, v = tensors(n, m)
    mask = oracle.visible(n, m, **options)
    want = torch_attention(q, k, v, mask, scale)
    got = oracle.attention(q, k, v, mask=mask, sm_scale=scale)
    torch.testing.assert_close(got.out, want)


def test_alibi_against_a_bias_in_torch():
    q, k, v = tensors(5, 9)
    slopes = torch.tensor(oracle.alibi_slopes(4), dtype=torch.float64)
    bias = slopes[:, None, None] * (torch.arange(9)[None, :] - torch.arange(5)[:, None]).double()
    torch.testing.assert_close(oracle.attention(q, k, v, alibi="relative").out, torch_attention(q, k, v, bias))
    # The forms differ by a constant per row, which the softmax does not see but the LSE does.
    decode = oracle.attention(q, k, v, alibi="decode")
    torch.testing.assert_close(decode.out, oracle.attention(q, k, v, alibi="relative").out)
    assert not torch.allclose(decode.lse, oracle.attention(q, k, v, alibi="relative").lse)


def test_alibi_slopes():
    assert oracle.alibi_slopes(1) == [2.0**-8]
    assert oracle.alibi_slopes(8) == [2.0 ** -(h + 1) for h in range(8)]
    assert oracle.alibi_slopes(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]


def test_rotation_is_a_complex_product():
    x = torch.randn(7, 16, dtype=torch.float64)
    positions = torch.arange(-2, 5)
    freq = 1e4 ** (-torch.arange(8).double() / 8) / 2.0
    turned = torch.complex(x[:, :8], x[:, 8:]) * torch.exp(1j * positions[:, None].double() * freq)
    torch.testing.assert_close(oracle.rotate(x, positions, 2.0), torch.cat([turned.real, turned.imag], dim=1))


def test_sink_is_a_key_without_value():
    q, k, v = tensors(3, 6, 2, 2)
    sinks = torch.tensor([0.5, -1.0])
    got = oracle.attention(q, k, v, sinks=sinks)
    for h in range(2):
        scores = torch.cat([q[:, h] @ k[:, h].T / 4, sinks[h].double().expand(3, 1)], dim=1)
        torch.testing.assert_close(got.out[:, h], torch.softmax(scores, dim=1)[:, :6] @ v[:, h])
        torch.testing.assert_close(got.lse[:, h], torch.logsumexp(scores, dim=1) / math.log(2))


def test_rows_without_keys():
    q, k, v = tensors(5, 2)
    got = oracle.attention(q, k, v, mask=oracle.visible(5, 2, causal=True))
    assert torch.count_nonzero(got.out[:3]) == 0 and bool((got.lse[:3] == -torch.inf).all())
    assert not bool(torch.isnan(got.out).any())


def test_hidden_nan_stays_out():
    q, k, v = tensors(3, 6)
    k[2], v[4] = torch.nan, torch.nan
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[:, [2, 4]] = False
    assert not bool(torch.isnan(oracle.attention(q, k, v, mask=mask).out).any())


def test_multi_item_mask():
    # Prefix of two, a delimiter, an item of two, a delimiter: items see the prefix and themselves.
    mask = oracle.visible(6, 6, multi_item=oracle.MultiItem(2, (0, 1, 2, 0)))
    expected = ["100000", "110000", "110000", "110100", "110110", "110000"]
    assert ["".join(str(int(x)) for x in row) for row in mask] == expected


def test_chunked_mask():
    for causal, expected in [
        (True, ["111000", "111100", "000010", "000011"]),
        (False, ["111100", "111100", "000011", "000011"]),
    ]:
        mask = oracle.visible(4, 6, causal=causal, chunk_size=4)
        assert ["".join(str(int(x)) for x in row) for row in mask] == expected


def test_merging_parts_gives_the_whole():
    q, k, v = tensors(4, 9)
    parts = [oracle.attention(q, k[a:b], v[a:b]) for a, b in ((0, 3), (3, 3), (3, 9))]
    out, lse = oracle.merge(torch.stack([p.out for p in parts], 1), torch.stack([p.lse for p in parts], 1))
    whole = oracle.attention(q, k, v)
    torch.testing.assert_close(out, whole.out)
    torch.testing.assert_close(lse, whole.lse)


def test_stats_say_the_lse():
    q, k, v = tensors(4, 9)
    for scale in (0.25, 0.6):
        got = oracle.attention(q, k, v, sm_scale=scale)
        natural = got.stats[..., 0] * math.sqrt(16) * scale + got.stats[..., 1].log()
        torch.testing.assert_close(natural * oracle.LOG2E, got.lse)


@every(kv_layout=["NHD", "HND"], form=["stacked", "tuple"])
def test_pages_hold_the_batch(kv_layout, form):
    batch = make_batch([2, 0, 3], [9, 4, 0], 2, 2, 16)
    paged = batch.paged(4, kv_layout, form)
    lists = [x.tolist() for x in paged.table()]
    for (_, k, v), (gk, gv) in zip(
        batch.requests(), oracle.gather_pages(paged.k_cache, paged.v_cache, *lists, kv_layout)
    ):
        assert torch.equal(k, gk) and torch.equal(v, gv)


def test_comparisons_fail_when_they_should():
    batch = make_batch([8], [20], 2, 2, 16)
    want = expect(batch, Options(causal=True))
    good = want.out.half()
    assert_close(good, want.out, want.baseline)

    def wrong(change, match):
        bad = good.clone()
        change(bad)
        with pytest.raises(AssertionError, match=match):
            assert_close(bad, want.out, want.baseline)

    wrong(lambda x: x[0, 0].fill_(torch.nan), "NaN positions")
    wrong(lambda x: x[3, 1, :1].fill_(torch.inf), r"\+inf positions")
    wrong(lambda x: x[2, 1].add_(0.1), "beyond atol")
    # Everywhere a little too far: inside the tolerance, but worse than the type explains.
    wrong(lambda x: x.add_(torch.where(x > 0, 7e-4, -7e-4).half()), "exceeds")
    with pytest.raises(AssertionError, match="exactly 0"):
        assert_close(torch.full((2, 4), 1e-7), torch.zeros(2, 4))
    with pytest.raises(AssertionError, match="-inf positions"):
        assert_lse_close(torch.full((2, 4), -5e4), torch.full((2, 4), -torch.inf).double())
    with pytest.raises(AssertionError, match="dtype"):
        assert_lse_close(torch.zeros(2, 4).double(), torch.zeros(2, 4).double())
    with pytest.raises(AssertionError, match="shape"):
        assert_close(good[:1], want.out)
    with pytest.raises(AssertionError, match="bitwise"):
        assert_bitwise(good, good + 1)
