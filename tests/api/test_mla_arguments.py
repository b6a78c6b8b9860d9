"""Places that calls of latent attention write to, and arguments that must fit the plan."""

from __future__ import annotations

import pytest
import torch
from compare import assert_bitwise
from mla_problems import SCALE, make

from cutlass_kernels import mla

INT32 = torch.int32


def decode(problem, query, **options):
    """The plan-free function over the pages of a problem."""
    given = (torch.empty(0), 128, 512, 64, problem.table, problem.lens, 320)
    return mla.trtllm_batch_decode_with_kv_cache_mla(query, problem.cache, *given, bmm1_scale=SCALE, **options)


@pytest.mark.parametrize("return_lse", [False, True])
def test_trtllm_decode_writes_an_lse_of_any_strides(return_lse):
    problem = make([3, 3], [30, 9], 16, 16)
    query = problem.q.unflatten(0, (2, 3))
    out, want = decode(problem, query, return_lse=True)
    lse = torch.empty(2, 16, 3).transpose(1, 2)  # no view joins its first two dimensions
    lse.fill_(torch.nan)
    found = decode(problem, query, lse=lse, return_lse=return_lse)
    assert_bitwise(found[0] if return_lse else found, out)
    assert not return_lse or found[1] is lse
    assert_bitwise(lse.reshape(6, 16), want)


@pytest.mark.parametrize(
    ("lse", "words"),
    [
        (torch.zeros(2, 3, 15), "lse has shape"),
        (torch.zeros(3, 3, 16), "lse has shape"),
        (torch.zeros(6, 16).half(), "dtype torch.float16"),
        (torch.zeros(2, 16, 3).transpose(1, 2).double(), "dtype torch.float64"),
    ],
)
def test_trtllm_decode_checks_the_lse_before_it_writes(lse, words):
    problem = make([3, 3], [30, 9], 16, 16)
    out = torch.zeros(2, 3, 16, 512, dtype=problem.q.dtype)
    with pytest.raises(ValueError, match=words):
        decode(problem, problem.q.unflatten(0, (2, 3)), out=out, lse=lse)
    assert not out.any()


@pytest.mark.parametrize("columns", [512, 600])
def test_trtllm_decode_leaves_rows_behind_the_last_request(columns):
    problem = make([1, 3], [30, 9], 4, 16)
    query = torch.cat([problem.q, torch.zeros_like(problem.q)])
    call = dict(cum_seq_lens_q=problem.batch.qo_indptr("cpu"), max_q_len=3)
    want = decode(problem, problem.q, return_lse=True, **call)
    out, lse = torch.full((8, 4, columns), 7.0).to(query.dtype)[..., :512], torch.full((8, 4), 7.0)
    assert decode(problem, query, out=out, lse=lse, **call) is out
    for place, first in zip((out, lse), want):
        assert_bitwise(place[:4], first)
        assert (place[4:] == 7).all()


def test_trtllm_decode_of_requests_without_rows():
    problem = make([1, 1], [30, 9], 4, 16)
    with pytest.raises(ValueError, match=r"query has shape \(2, 0, 4, 576\): each request must have at least one row"):
        decode(problem, problem.q.new_zeros(2, 0, 4, 576))
