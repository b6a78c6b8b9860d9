"""Every argument of every function, given a senseless value, is refused with a sentence, or has no effect.

No bare assertion, no signature of a compiled function, and no error of an attribute, an index or an operator that a
tensor or a number would have had.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from registry.multi_gpu import group_of_one
from small_calls import HEADS, PAGE, Calls, ints

import cutlass_kernels as ck
from cutlass_kernels import distributed

FAULTS = "incompatible function arguments|unsupported operand|not supported between"
VALUES = ["nonsense", "", 1.5, -3, [1], (1, 2), {"a": 1}, None, object(), torch.zeros(2, 3), ints(1, 2, 3)]

Attempt = tuple[str, Callable[..., Any], Callable[..., Any]]  # name, whose parameters, call with some replaced


@pytest.fixture
def calls(target, the_targets_backend) -> Calls:
    return Calls(target)


def given_to(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
    return lambda **replaced: function(**(given | replaced))


def functions(calls: Calls) -> Iterator[Attempt]:
    for name, call in (
        ("single_prefill_with_kv_cache", calls.single),
        ("single_decode_with_kv_cache", calls.decode),
        ("batch_decode_with_shared_prefix_padded_kv_cache", calls.padded),
        ("trtllm_fmha_v2_prefill", calls.fused),
        ("append_paged_kv_cache", calls.append),
        ("append_paged_kv_cache_by_slot", calls.append_by_slot),
    ):
        yield name, getattr(ck, name), call
    v, s = torch.ones(3, 4, 64), torch.ones(3, 4)
    for function, given in (
        (ck.get_seq_lens, dict(kv_indptr=ints(0, 2), kv_last_page_len=ints(4), page_size=16)),
        (ck.get_batch_indices_positions, dict(append_indptr=ints(0, 5), seq_lens=ints(5), nnz=5)),
        (ck.merge_state, dict(v_a=v, s_a=s, v_b=v, s_b=s)),
        (ck.merge_states, dict(v=v[:, None], s=s[:, None])),
        (ck.merge_state_in_place, dict(v=v, s=s, v_other=v, s_other=s)),
        (ck.packbits, dict(x=torch.ones(5))),
        (ck.segment_packbits, dict(x=torch.ones(5), indptr=ints(0, 5))),
        (ck.fmha_v2_stats_to_lse, dict(stats=torch.ones(3, 4, 2), head_dim=64, bmm1_scale=1.0)),
        (ck.explain, {}),
    ):
        yield function.__name__, function, given_to(function, **given)
    pool = dict(layout="Q_PAGED_KV_NHD", qkv=(calls.q, calls.cache), block_tables=calls.pages.table()[1][None])
    yield "fused paged", ck.trtllm_fmha_v2_prefill, given_to(calls.fused, **pool)


def wrappers(calls: Calls) -> Iterator[Attempt]:
    decode = calls.planned("decode")
    fast = dict(self=decode, num_qo_heads=4, num_kv_heads=2) | calls.plans["decode"]
    yield "fast_decode_plan", ck.fast_decode_plan, given_to(ck.fast_decode_plan, **fast)
    workspace = dict(float_workspace_buffer=calls.target.workspace(16))
    for kind in calls.plans:
        planned = calls.planned(kind)
        data = dict(q=calls.q[:1] if kind == "decode" else calls.q)
        data |= dict(k=calls.k, v=calls.v) if kind == "ragged" else dict(paged_kv_cache=calls.cache)
        yield f"{kind}.plan", planned.plan, lambda kind=kind, **replaced: calls.planned(kind, **replaced)
        yield f"{kind}.run", planned.run, given_to(planned.run, **data)
        yield f"{kind}.forward", planned.forward, given_to(planned.forward, **data)
        other = calls.wrapper(kind)
        yield f"{kind}.reset", other.reset_workspace_buffer, given_to(other.reset_workspace_buffer, **workspace)
        yield kind, type(planned), given_to(type(planned), **workspace)
    index = [torch.zeros(n, dtype=torch.int32, device=calls.target.device) for n in (2, 2, 2, 1)]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = dict(zip(names, index)) | workspace | dict(use_cuda_graph=True)
    cls = ck.BatchPrefillWithPagedKVCacheWrapper
    yield "paged for graphs", cls, given_to(cls, **buffers)


def cascades(calls: Calls) -> Iterator[Attempt]:
    cls, made = ck.MultiLevelCascadeAttentionWrapper, calls.cascade()
    workspace = dict(num_levels=1, float_workspace_buffer=calls.target.workspace(16))
    names = ("paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len")
    table = {name: [x] for name, x in zip(names, calls.pages.table())}
    sizes = dict(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=PAGE)
    yield "cascade", cls, given_to(cls, **workspace)
    yield "cascade.plan", made.plan, given_to(made.plan, qo_indptr_arr=[ints(0, 5)], **table, **sizes)
    made = calls.cascade()
    yield "cascade.run", made.run, given_to(made.run, q=calls.q, paged_kv_cache=calls.cache)
    index = [[torch.zeros(n, dtype=torch.int32, device=calls.target.device)] for n in (2, 2, 2, 1)]
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    buffers = {f"{name}_arr": x for name, x in zip(names, index)}
    yield "cascade for graphs", cls, given_to(cls, **workspace, **buffers, use_cuda_graph=True)


def shared_prefixes(calls: Calls) -> Iterator[Attempt]:
    indptr, indices, last = calls.pages.table()
    tensors = dict(q=calls.q, k_shared=calls.k, v_shared=calls.v, unique_kv_data=calls.cache)
    prefill = ck.BatchPrefillWithSharedPrefixPagedKVCacheWrapper
    batch = dict(zip(("qo_indptr", "paged_kv_indptr", "paged_kv_indices"), (ints(0, 5), indptr, indices)))
    batch |= dict(paged_kv_last_page_len=last, num_qo_heads=4, num_kv_heads=2, head_dim=64)

    def begin(**replaced: Any) -> Any:
        wrapper = prefill(calls.target.workspace())
        wrapper.begin_forward(**(batch | replaced))
        wrapper.forward(**tensors)
        return wrapper

    yield "shared prefill.begin_forward", prefill(calls.target.workspace()).begin_forward, begin
    forward = begin().forward
    yield "shared prefill.forward", forward, given_to(forward, **tensors)
    decode = ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(calls.target.workspace())
    names = ("unique_kv_indptr", "unique_kv_indices", "unique_kv_last_page_len")
    plan = dict(zip(names, calls.pages.table())) | dict(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=PAGE)
    yield "shared decode.begin_forward", decode.begin_forward, given_to(decode.begin_forward, **plan)
    other = ck.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(calls.target.workspace())
    other.begin_forward(*calls.pages.table(), *HEADS, PAGE)
    yield "shared decode.forward", other.forward, given_to(other.forward, **tensors | dict(q=calls.q[:1]))


@pytest.mark.parametrize("attempts", [functions, wrappers, cascades, shared_prefixes])
def test_refusals_are_sentences(calls, attempts):
    faults = []
    for name, function, call in attempts(calls):
        call()
        for parameter, facts in inspect.signature(function).parameters.items():
            if facts.kind in (facts.VAR_KEYWORD, facts.VAR_POSITIONAL):
                continue
            for value in VALUES:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        call(**{parameter: value})
                except Exception as error:
                    text = str(error)
                    fault = isinstance(error, (AttributeError, IndexError)) or " " not in text
                    if fault or re.search(FAULTS, text):
                        faults.append(f"{name}({parameter}={value!r}): {type(error).__name__}: {text[:100]}")
    assert not faults, "\n".join(faults)


@pytest.mark.runs_nothing("refuses all of them")
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_index_tensors_are_of_integers(calls, dtype):
    wrong = torch.zeros(1, 2).to(dtype)
    wrapper = ck.VariableBlockSparseAttentionWrapper(calls.target.workspace())
    blocks = torch.ones(1, 2, 2, dtype=torch.bool)
    decode = (calls.q, calls.cache, torch.empty(0), calls.pages.table()[1][None], ints(20), 20, 0.1)
    for call, told in (
        (lambda: ck.segment_packbits(torch.ones(5), wrong[0]), "indptr has shape .* it must be an integer vector"),
        (lambda: wrapper.plan(blocks, wrong, wrong, 1, 1, 64), "block_row_sz is .* of integers"),
        (
            lambda: ck.xqa_batch_decode_with_kv_cache(*decode, q_len_per_req=5, mask=wrong),
            "mask is .* pass packed bits",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            call()


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_flags_of_functions_of_groups():
    q, state = torch.zeros(5, 4, 64).half(), (torch.zeros(5, 4, 64), torch.zeros(5, 4))
    caches, lens = [torch.zeros(1, 8, 2, 64).half() for _ in "kv"], torch.tensor([3], dtype=torch.int32)
    with group_of_one() as group:
        for words, call in (
            ("return_lse=2", lambda **x: distributed.dcp_decode(q[None, :1], *caches, group, seqused_k=lens, **x)),
            ("return_lse=2", lambda **x: distributed.dcp_combine(*state, group, **x)),
            ("return_lse=2", lambda **x: distributed.cp_prefill(q, q, q, group, **x)),
            ("dim=0.5", lambda **x: distributed.cp_split(state[0], group, **x)),
        ):
            name, value = words.split("=")
            with pytest.raises((ValueError, TypeError), match=words):
                call(**{name: float(value) if "." in value else int(value)})
