"""Lists of keys that the compiled module leaves to Python become lists that it takes (a stand-in for a GPU)."""

from __future__ import annotations

from typing import Any

import pytest
import quantized_caches
import torch
from quantized_caches import LAYOUTS

from cutlass_kernels._attend import checked_calls
from cutlass_kernels._core.call_table import Call

INT32, BF16 = torch.int32, torch.bfloat16


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=INT32)


def values_of(k: torch.Tensor, **others: Any) -> dict[str, Any]:
    return dict(k=k, v=k[..., :512], **others)


def call(**changes: Any) -> Call:
    given = values_of(torch.zeros(10, 16, 1, 576, dtype=BF16), q=torch.zeros(6, 16, 576, dtype=BF16), sm_scale=0.1)
    given |= dict(kv_indices_per_token=ints(6, 1, 40), topk_length=ints(6), max_logits=torch.zeros(6, 16))
    return Call(**given | changes, return_lse=True, flash_mla_lse=True)


def tokens(size: int) -> dict[str, Any]:
    k = torch.zeros(10, 16, 1, size, dtype=torch.uint8)
    return dict(k=k, v=k)


NARROW = torch.zeros(6, 16, 512, dtype=BF16)
REQUESTS = torch.zeros(3, 2, 16, 576, dtype=BF16)


@pytest.mark.parametrize(
    "change",
    [
        {},
        dict(topk_length=None, max_logits=None),
        dict(q=REQUESTS, topk_length=ints(3)),
        dict(q=REQUESTS, k_descale=torch.ones(3, 1), v_descale=torch.ones(3, 1)),
        dict(kv_indices_per_token=ints(6, 1, 80)[..., ::2]),
        dict(kv_indices_per_token=ints(1, 1, 40).expand(6, -1, -1)),
        dict(topk_length=ints(12)[::2]),
        dict(max_logits=torch.zeros(6, 20)[:, :16]),
        dict(max_seqlen_q=1, max_seqlen_k=40),
        dict(window=[-1, -3], causal=0),
        values_of(torch.zeros(1, 160, 576, dtype=BF16), kv_layout="HND"),
        tokens(656),
        tokens(656) | dict(kv_format="v3.2"),
        tokens(656) | dict(q=NARROW),
        tokens(584) | dict(q=NARROW),
        *(tokens(528) | dict(q=NARROW, kv_format=name) for name in ("v3.2_nope", "v4.1_pages", "v4.1_tokens")),
    ],
    ids=lambda change: "-".join(change) or "as it is",
)
def test_what_is_checked_is_taken(gpu, change):
    ready = checked_calls.checked(call(**change))
    assert gpu.accepts(gpu.module.attention, *ready[:-2], None, ready.backend, planned=True)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(
    ("page_size", "padding", "start", "taken"),
    [
        (1, 1, 0, set(LAYOUTS) - {"v4"}),  # 584 bytes are no multiple of 16
        (1, 16, 16, set(LAYOUTS)),
        (2, 1, 0, set(LAYOUTS)),
        (2, 16, 8, set()),
        (7, 1, 0, set(LAYOUTS) - {"v4"}),
        (7, 576, 16, set(LAYOUTS)),
        (64, 16, 32, set(LAYOUTS)),
    ],
)
def test_pages_of_tokens_lie_at_multiples_of_16_bytes(gpu, page_size, padding, start, taken, layers):
    for name, layout in LAYOUTS.items():
        cache = quantized_caches.empty(name, 10, page_size, layers=layers, padding=padding, start=start).view
        q = torch.zeros(6, 16, layout.columns, dtype=BF16)
        ready = checked_calls.checked(call(q=q, k=cache, v=cache, kv_format=name))
        accepted = gpu.accepts(gpu.module.attention, *ready[:-2], None, ready.backend, planned=True)
        assert accepted == (name in taken), name


@pytest.mark.parametrize(
    ("name", "columns", "dtype", "token"),
    [
        ("v3.2", 576, "latent_v32", 656),
        ("v3.2", 512, "latent_v32_nope", 656),  # its 528 first bytes
        ("v3.2_nope", 512, "latent_v32_nope", 528),
        ("v4", 512, "latent_v4", 576),
        ("v4.1_pages", 512, "latent_v41_by_page", 512),
        ("v4.1_tokens", 512, "latent_v41_by_token", 528),
    ],
)
@pytest.mark.parametrize("kind", ["one cache", "two caches", "HND"])
def test_kernels_are_given_the_format(gpu, name, columns, dtype, token, kind):
    caches = [quantized_caches.empty(name, pages, 16, padding=576).view for pages in (10, 4)]
    given = dict(q=torch.zeros(6, 16, columns, dtype=BF16), kv_format=name)
    if kind == "HND":
        caches, given["kv_layout"] = [x.transpose(1, 2) for x in caches], "HND"
    elif kind == "two caches":
        given |= dict(extra_k=caches[1], extra_indices_per_token=ints(6, 1, 30), max_logits=None)
    ready = checked_calls.checked(call(k=caches[0], v=caches[0], **given))
    assert gpu.module.attention(*ready[:-2], None, ready.backend) is not None
    launch = gpu.launched()
    assert launch["dtypes"] == ("bfloat16", dtype, "bfloat16") and launch["head_dims"] == (columns, 512)
    # The cache whose lists have lengths is to be the second.
    first = caches[1] if kind == "two caches" else caches[0]
    assert launch["k"][:2] == launch["v"][:2] == (first.data_ptr(), token)
    assert launch["pages"]["k_stride_page"] == first.stride(0)
