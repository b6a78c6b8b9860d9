"""Direct calls of ``attention()`` with q_rope and k_rope: what kernels are launched with, on a stand-in for the GPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from environment import choose_backend
from recorded_calls import BF16, E4M3, HALF, INTS, view

from cutlass_kernels import mla
from cutlass_kernels._core import native
from cutlass_kernels._core.call_table import Call

NOWHERE = (0, 0, 0)


def arguments(q: torch.Tensor, k: torch.Tensor, **others: Any) -> tuple[Any, ...]:
    call = Call(**{"q": q, "k": k, "v": k[..., :512], "causal": True, **others})
    return tuple(call)


def queries(form: str, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor | None]:
    q = torch.zeros(6, 16, 576).to(dtype)
    first, last = q[..., :512], q[..., 512:]
    return {"whole": (q, None), "views": (first, last), "apart": (first.contiguous(), last.contiguous())}[form]


def cache(form: str, dtype: torch.dtype = BF16, *sizes: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    k = torch.zeros(*(sizes or (10, 16)), 1, 576).to(dtype)
    first, last = k[..., :512], k[..., 512:]
    return {"whole": (k, None), "views": (first, last), "apart": (first.contiguous(), last.contiguous())}[form]


def paged() -> dict[str, Any]:
    return dict(
        cu_seqlens_q=torch.tensor([0, 2, 6], dtype=INTS),
        page_table=torch.arange(8, dtype=INTS).view(2, 4),
        seqused_k=torch.tensor([50, 64], dtype=INTS),
    )


@pytest.mark.parametrize("q_form", ["whole", "views", "apart"])
@pytest.mark.parametrize("k_form", ["whole", "views", "apart"])
def test_pages_are_read_where_they_lie(gpu, q_form, k_form):
    (q, q_rope), (k, k_rope) = queries(q_form), cache(k_form)
    result = gpu.module.attention(*arguments(q, k, q_rope=q_rope, k_rope=k_rope, **paged()))
    assert result.shape == (6, 16, 512)
    launch = gpu.launched()
    assert launch["head_dims"] == (576, 512)
    assert launch["q"] == view(q)
    assert launch["k"] == launch["v"] == (k.data_ptr(), k.stride(1), k.stride(2))
    assert launch["pages"]["k_stride_page"] == k.stride(0)
    assert launch["scales"][0] == pytest.approx(576**-0.5)
    q_at, k_at, page = launch["ropes"]
    assert q_at == (view(q_rope) if q_form == "apart" else NOWHERE)
    if k_form == "apart":
        assert (k_at, page) == ((k_rope.data_ptr(), k_rope.stride(1), k_rope.stride(2)), k_rope.stride(0))
    else:
        assert (k_at, page) == (NOWHERE, 0)


def test_latent_kernels_write_the_lse_of_flash_mla(gpu):
    (q, _), (k, _) = queries("whole"), cache("whole")
    lse = dict(return_lse=True, lse_base=math.e, flash_mla_lse=True)
    _, found = gpu.module.attention(*arguments(q, k, **paged(), **lse))
    launch = gpu.launched()
    assert launch["flash_mla_lse"] and launch["lse"][0] == found.data_ptr()
    q, k = q[..., :256].contiguous(), k[..., :256].contiguous()
    for others, served in ((lse, False), (lse | dict(flash_mla_lse=False), True)):
        assert gpu.accepts(gpu.module.attention, *arguments(q, k, **paged(), **others), planned=True) is served


@pytest.mark.parametrize("form", ["views", "apart"])
def test_ragged_and_dense_keys(gpu, form):
    q, q_rope = queries(form)
    k, k_rope = cache(form, BF16, 30)
    lens = dict(cu_seqlens_q=torch.tensor([0, 2, 6], dtype=INTS), cu_seqlens_k=torch.tensor([0, 9, 30], dtype=INTS))
    assert gpu.accepts(gpu.module.attention, *arguments(q, k, q_rope=q_rope, k_rope=k_rope, **lens))
    k, k_rope = cache(form, BF16, 2, 15)
    q, q_rope = (x.unflatten(0, (2, 3)) for x in (q, q_rope))
    gpu.module.attention(*arguments(q, k, q_rope=q_rope, k_rope=k_rope))
    launch = gpu.launched()
    assert launch["ropes"][1] == (
        (k_rope.data_ptr(), k_rope.stride(1), k_rope.stride(2)) if form == "apart" else NOWHERE
    )
    fewer = q_rope[:, :2].contiguous()
    assert not gpu.accepts(gpu.module.attention, *arguments(q, k, q_rope=fewer, k_rope=k_rope))


def test_views_of_one_row_need_no_kernel_that_reads_them_apart(gpu):
    for q_form, k_form, served in (("views", "views", True), ("apart", "views", False), ("views", "apart", False)):
        (q, q_rope), (k, k_rope) = queries(q_form, HALF), cache(k_form, HALF)
        call = arguments(q, k, q_rope=q_rope, k_rope=k_rope, **paged())
        assert gpu.accepts(gpu.module.attention, *call, planned=True) is served


def test_values_of_their_own_are_left_to_python(gpu):
    (q, q_rope), (k, k_rope) = queries("apart"), cache("apart")
    call = arguments(q, k, v=torch.zeros_like(k), q_rope=q_rope, k_rope=k_rope, **paged())
    assert not gpu.accepts(gpu.module.attention, *call, planned=True)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=INTS)


def listed(**others: Any) -> dict[str, Any]:
    """Six rows, each with a list of 128 keys that lies in a wider tensor."""
    return dict(kv_indices_per_token=ints(6, 1, 200)[..., :128], causal=False) | others


@pytest.mark.parametrize("layout", ["pages", "rows", "HND pages", "HND rows"])
def test_listed_keys_are_slots_of_pages(gpu, layout):
    (q, q_rope), (k, k_rope) = queries("apart"), cache("apart", BF16, *([] if "pages" in layout else [160]))
    token = -3
    lists = listed(topk_length=ints(6), max_logits=torch.zeros(6, 16), return_lse=True, flash_mla_lse=True)
    if layout.startswith("HND"):
        k, k_rope, token = k.transpose(-3, -2), k_rope.transpose(-3, -2), -2
        lists["kv_layout"] = "HND"
    out, lse = gpu.module.attention(*arguments(q, k, q_rope=q_rope, k_rope=k_rope, **lists))
    assert out.shape == (6, 16, 512) and lse.shape == (6, 16)
    launch = gpu.launched()
    pages, slots = launch["pages"], 16 if "pages" in layout else 1
    indices = lists["kv_indices_per_token"]
    assert (pages["page_size"], pages["slots_per_page"], pages["num_pages"]) == (1, slots, 160 // slots)
    assert (pages["indices"], pages["table_stride"], pages["table_width"]) == (indices.data_ptr(), 200, 128)
    assert (launch["batch_size"], launch["most"], launch["totals"]) == (6, (1, 128), (6, 6 * 128))
    assert launch["indptrs"] == (0, 0) and launch["seqused"] == (0, lists["topk_length"].data_ptr())
    first = k.stride(0 if "pages" in layout else token)
    assert pages["k_stride_page"] == pages["v_stride_page"] == first
    assert launch["k"][:2] == launch["v"][:2] == (k.data_ptr(), k.stride(token))
    assert launch["ropes"][1][:2] == (k_rope.data_ptr(), k_rope.stride(token))
    assert launch["ropes"][2] == k_rope.stride(0 if "pages" in layout else token)
    assert launch["max_logits"] == lists["max_logits"].data_ptr() and launch["flash_mla_lse"]


def test_rows_of_requests_are_requests_with_listed_keys(gpu):
    (q, _), (k, _) = queries("whole"), cache("whole")
    gpu.module.attention(*arguments(q.unflatten(0, (3, 2)), k, **listed()))
    launch = gpu.launched()
    assert (launch["batch_size"], launch["most"]) == (6, (1, 128)) and launch["seqused"] == (0, 0)
    for rows, lengths, shared in ((1, 6, 1), (2, 6, 1), (2, 3, 2)):  # of rows, or of requests
        lists = listed(topk_length=ints(lengths))
        assert gpu.module.attention(*arguments(q.unflatten(0, (-1, rows)), k, **lists)) is not None
        launch = gpu.launched()
        assert launch["seqused"] == (0, lists["topk_length"].data_ptr()) and launch["rows_per_length"] == shared


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_listed_keys_of_512_columns(gpu, backend):
    """K = V. In pages, the kernels here have none of head dimension 512."""
    q, k = torch.zeros(6, 16, 512).to(HALF), torch.zeros(10, 16, 1, 512).to(HALF)
    gpu.module.attention(*arguments(q, k, backend=backend, **listed()))
    launch = gpu.launched()
    assert (launch["backend"], launch["head_dims"]) == (backend, (512, 512))
    assert launch["k"][:2] == launch["v"][:2] == (k.data_ptr(), 512) and launch["ropes"] == (NOWHERE, NOWHERE, 0)
    accepts = functools.partial(gpu.accepts, gpu.module.attention, planned=True)
    assert not accepts(*arguments(q, k, v=torch.zeros_like(k), backend=backend, **listed()))
    assert not accepts(*arguments(q, k, backend=backend, **paged()))


@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("lengths", ["each", "of requests", "none"])
@pytest.mark.parametrize(
    ("dtype", "wanted", "backend"), [(BF16, "auto", "fa3"), (BF16, "fa2", "fa2"), (E4M3, "auto", "fa2")]
)
def test_trtllm_lists_reach_every_backend(gpu, monkeypatch, rope, lengths, dtype, wanted, backend):
    choose_backend(monkeypatch, wanted)
    monkeypatch.setattr(native, "attention", gpu.module.attention)
    query, cache = torch.zeros(3, 2, 16, 512 + rope).to(BF16), torch.zeros(10, 16, 512 + rope).to(dtype)
    given: dict[str, Any] = dict(sinks=torch.zeros(16), bmm1_scale=0.5, return_lse=True, sparse_mla_top_k=40)
    if lengths == "each":
        given["sparse_mla_top_k_lens"] = ints(6)
    out, lse = mla.trtllm_batch_decode_with_kv_cache_mla(
        query,
        cache,
        torch.empty(0),
        128,
        512,
        rope,
        ints(3, 2, 40),
        ints(3) if lengths == "of requests" else None,
        40,
        **given,
    )
    assert out.shape == (3, 2, 16, 512) and lse.shape == (6, 16)
    launch = gpu.launched()
    assert (launch["backend"], launch["head_dims"]) == (backend, (512 + rope, 512))
    assert launch["pages"]["slots_per_page"] == 16 and (launch["seqused"][1] != 0) == (lengths != "none")


@pytest.mark.parametrize(
    "change",
    [
        dict(kv_indices_per_token=ints(5, 1, 128)),
        dict(kv_indices_per_token=ints(6, 2, 128)),
        dict(kv_indices_per_token=ints(6, 128)),
        dict(kv_indices_per_token=ints(6, 1, 256)[..., ::2]),
        dict(kv_indices_per_token=ints(1, 1, 128).expand(6, 1, 128)),
        dict(kv_indices_per_token=ints(6, 1, 128).long()),
        dict(topk_length=ints(3)),
        dict(topk_length=ints(6).long()),
        dict(max_logits=torch.zeros(6, 8)),
        dict(max_logits=torch.zeros(16, 6).t()),
        dict(max_logits=torch.zeros(6, 16, dtype=HALF)),
        dict(page_table=ints(6, 4)),
        dict(kv_indptr=ints(7)),
        dict(kv_indices=ints(7)),
        dict(kv_last_page_len=ints(6)),
        dict(cu_seqlens_q=ints(7)),
        dict(cu_seqlens_k=ints(7)),
        dict(seqused_q=ints(6)),
        dict(seqused_k=ints(6)),
        dict(kv_shard=(2, 0, 1)),
        dict(max_seqlen_q=1),
        dict(max_seqlen_k=128),
        dict(causal=True),
        dict(window=(5, -1)),
        dict(chunk_size=8),
        dict(alibi_slopes=torch.zeros(16)),
        dict(kv_format="v3.2"),
        dict(extra_k=torch.zeros(3, 16, 1, 576, dtype=torch.bfloat16)),
        dict(extra_indices_per_token=ints(6, 1, 8)),
        dict(extra_topk_length=ints(6)),
    ],
    ids=lambda change: "-".join(change),
)
def test_other_lists_are_left_to_python(gpu, change):
    (q, _), (k, _) = queries("whole"), cache("whole")
    accepts = functools.partial(gpu.accepts, gpu.module.attention, planned=True)
    assert accepts(*arguments(q, k, **listed()))
    assert not accepts(*arguments(q, k, **listed(**change)))
    assert not accepts(*arguments(q, k[:, :0], **listed()))


@pytest.mark.parametrize("name", ["topk_length", "max_logits"])
def test_what_goes_with_listed_keys_is_left_to_python_without(gpu, name):
    (q, _), (k, _) = queries("whole"), cache("whole", BF16, 6, 30)
    dense = dict(topk_length=ints(6), max_logits=torch.zeros(6, 16))
    q = q.unflatten(0, (6, 1))
    assert gpu.accepts(gpu.module.attention, *arguments(q, k), planned=True)
    assert not gpu.accepts(gpu.module.attention, *arguments(q, k, **{name: dense[name]}), planned=True)
