"""Direct calls of ``attention()`` with q_rope and k_rope: what kernels are launched with, on a stand-in for the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from recorded_calls import BF16, HALF, INTS, view

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
