"""The examples of the API pages, with the device and the number of layers as parameters."""

from __future__ import annotations

import pytest
import torch

import cutlass_kernels as flashinfer

# The GPU gets the sizes of the pages; a CPU gets fewer layers and heads, and a shorter cache.
PLACES = [
    pytest.param(("cpu", 1, 8), id="cpu"),
    pytest.param(("cuda:0", 4, 1), id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLACES)
def place(request):
    return request.param


def test_single_prefill_page(place):
    device, _, shrink = place
    qo_len = 128
    kv_len = 4096 // shrink
    num_qo_heads = 32 // shrink * 2
    num_kv_heads = 4
    head_dim = 128
    q = torch.randn(qo_len, num_qo_heads, head_dim).half().to(device)
    k = torch.randn(kv_len, num_kv_heads, head_dim).half().to(device)
    v = torch.randn(kv_len, num_kv_heads, head_dim).half().to(device)
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, allow_fp16_qk_reduction=True)
    assert o.shape == torch.Size([128, num_qo_heads, 128])
    mask = torch.tril(
        torch.full((qo_len, kv_len), True, device=device),
        diagonal=(kv_len - qo_len),
    )
    o_custom = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    assert torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)


def test_single_decode_page(place):
    device, _, shrink = place
    kv_len = 4096 // shrink
    num_qo_heads = 32
    num_kv_heads = 32
    head_dim = 128
    q = torch.randn(num_qo_heads, head_dim).half().to(device)
    k = torch.randn(kv_len, num_kv_heads, head_dim).half().to(device)
    v = torch.randn(kv_len, num_kv_heads, head_dim).half().to(device)
    o = flashinfer.single_decode_with_kv_cache(q, k, v)
    assert o.shape == torch.Size([32, 128])


@pytest.mark.parametrize("backend", ["auto"])
def test_paged_wrapper_page(place, backend):
    device, num_layers, shrink = place
    num_qo_heads = 64 // shrink
    num_kv_heads = 16 // shrink
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD", backend=backend)
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    paged_kv_indices = torch.arange(max_num_pages).int().to(device)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(device)
    kv_cache_at_layer = torch.randn(
        num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device
    )
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, num_qo_heads, 128])

    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (page_size * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device=device),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        custom_mask=mask,
    )
    for i in range(num_layers):
        q = q_at_layer[i]
        kv_cache = kv_cache_at_layer[i]
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)


def test_ragged_wrapper_page(place):
    device, num_layers, shrink = place
    num_qo_heads = 64 // shrink
    num_kv_heads = 16 // shrink
    head_dim = 128
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    kv_indptr = qo_indptr.clone()
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(device)
    k_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(device)
    v_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(device)
    prefill_wrapper.plan(
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        causal=True,
    )
    outputs = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)
    assert outputs[0].shape == torch.Size([100, num_qo_heads, 128])

    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device=device),
            diagonal=(kv_len[i] - qo_len[i]),
        )
        mask_arr.append(mask_i.flatten())
    mask = torch.cat(mask_arr, dim=0)
    prefill_wrapper.plan(qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim, custom_mask=mask)
    outputs_custom_mask = []
    for i in range(num_layers):
        q = q_at_layer[i]
        k = k_at_layer[i]
        v = v_at_layer[i]
        o_custom = prefill_wrapper.run(q, k, v)
        outputs_custom_mask.append(o_custom)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)
    assert outputs_custom_mask[0].shape == torch.Size([100, num_qo_heads, 128])


def test_shared_prefix_decode_page(place):
    device, num_layers, shrink = place
    num_qo_heads = 64 // shrink
    num_kv_heads = 8 // shrink
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    shared_prefix_len = 8192 // shrink
    unique_kv_page_indices = torch.arange(max_num_pages).int().to(device)
    unique_kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    # 1 <= kv_last_page_len <= page_size
    unique_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    unique_kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    wrapper.begin_forward(
        unique_kv_page_indptr,
        unique_kv_page_indices,
        unique_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        data_type=torch.float16,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(batch_size, num_qo_heads, head_dim).half().to(device)
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        unique_kv_data = unique_kv_data_at_layer[i]
        o = wrapper.forward(q, k_shared, v_shared, unique_kv_data)
        outputs.append(o)
    wrapper.end_forward()
    assert outputs[0].shape == torch.Size([7, num_qo_heads, 128])


def test_shared_prefix_prefill_page(place):
    device, num_layers, shrink = place
    num_qo_heads = 64 // shrink
    num_kv_heads = 16 // shrink
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=device)
    prefill_wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    shared_prefix_len = 8192 // shrink
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=device)
    paged_kv_indices = torch.arange(max_num_pages).int().to(device)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=device)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=device)
    kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=device)
        for _ in range(num_layers)
    ]
    prefill_wrapper.begin_forward(
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
    )
    outputs = []
    for i in range(num_layers):
        q = torch.randn(nnz_qo, num_qo_heads, head_dim).half().to(device)
        kv_data = kv_data_at_layer[i]
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        o = prefill_wrapper.forward(q, k_shared, v_shared, kv_data, causal=True)
        outputs.append(o)
    prefill_wrapper.end_forward()
    assert outputs[0].shape == torch.Size([100, num_qo_heads, 128])
