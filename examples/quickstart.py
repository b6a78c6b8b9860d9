"""The examples of FlashInfer's API pages, with the import changed and the device a parameter.

    python examples/quickstart.py                  every page, on the GPU if there is one
    python examples/quickstart.py --layers 1 single_prefill ragged

Each function is the example of one page (one class of it, where a page has several) as it stands there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

import cutlass_kernels as flashinfer

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"
NUM_LAYERS = 32 if torch.cuda.is_available() else 2  # the pages have 32


def single_prefill() -> None:
    """flashinfer.prefill.single_prefill_with_kv_cache"""
    qo_len = 128
    kv_len = 4096
    num_qo_heads = 32
    num_kv_heads = 4
    head_dim = 128
    q = torch.randn(qo_len, num_qo_heads, head_dim).half().to(DEVICE)
    k = torch.randn(kv_len, num_kv_heads, head_dim).half().to(DEVICE)
    v = torch.randn(kv_len, num_kv_heads, head_dim).half().to(DEVICE)
    o = flashinfer.single_prefill_with_kv_cache(q, k, v, causal=True, allow_fp16_qk_reduction=True)
    print(o.shape)
    assert o.shape == torch.Size([128, 32, 128])
    mask = torch.tril(
        torch.full((qo_len, kv_len), True, device=DEVICE),
        diagonal=(kv_len - qo_len),
    )
    print("mask", tuple(mask.shape))
    o_custom = flashinfer.single_prefill_with_kv_cache(q, k, v, custom_mask=mask)
    print("custom mask equals causal:", torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3))
    assert torch.allclose(o, o_custom, rtol=1e-3, atol=1e-3)


def single_decode() -> None:
    """flashinfer.decode.single_decode_with_kv_cache"""
    kv_len = 4096
    num_qo_heads = 32
    num_kv_heads = 32
    head_dim = 128
    q = torch.randn(num_qo_heads, head_dim).half().to(DEVICE)
    k = torch.randn(kv_len, num_kv_heads, head_dim).half().to(DEVICE)
    v = torch.randn(kv_len, num_kv_heads, head_dim).half().to(DEVICE)
    o = flashinfer.single_decode_with_kv_cache(q, k, v)
    print(o.shape)
    assert o.shape == torch.Size([32, 128])


def paged() -> None:
    """flashinfer.prefill.BatchPrefillWithPagedKVCacheWrapper"""
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)
    prefill_wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=DEVICE)
    paged_kv_indices = torch.arange(max_num_pages).int().to(DEVICE)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=DEVICE)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=DEVICE)
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(DEVICE)
    kv_cache_at_layer = torch.randn(
        num_layers, max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE
    )
    # create auxiliary data structures for batch prefill attention
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
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, kv_cache)
        outputs.append(o)

    print(outputs[0].shape)
    assert outputs[0].shape == torch.Size([100, 64, 128])

    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (page_size * (paged_kv_indptr[1:] - paged_kv_indptr[:-1] - 1) + paged_kv_last_page_len).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device=DEVICE),
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
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, kv_cache)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)
    print("custom mask equals causal: True")


def ragged() -> None:
    """flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper"""
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    # allocate 128MB workspace buffer
    workspace_buffer = torch.empty(128 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)
    prefill_wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    nnz_kv = 100
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=DEVICE)
    kv_indptr = qo_indptr.clone()
    q_at_layer = torch.randn(num_layers, nnz_qo, num_qo_heads, head_dim).half().to(DEVICE)
    k_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(DEVICE)
    v_at_layer = torch.randn(num_layers, nnz_kv, num_kv_heads, head_dim).half().to(DEVICE)
    # create auxiliary data structures for batch prefill attention
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
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.run(q, k, v)
        outputs.append(o)

    print(outputs[0].shape)
    assert outputs[0].shape == torch.Size([100, 64, 128])

    # below is another example of creating custom mask for batch prefill attention
    mask_arr = []
    qo_len = (qo_indptr[1:] - qo_indptr[:-1]).cpu().tolist()
    kv_len = (kv_indptr[1:] - kv_indptr[:-1]).cpu().tolist()
    for i in range(batch_size):
        mask_i = torch.tril(
            torch.full((qo_len[i], kv_len[i]), True, device=DEVICE),
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
        # compute batch prefill attention, reuse auxiliary data structures
        o_custom = prefill_wrapper.run(q, k, v)
        outputs_custom_mask.append(o_custom)
        assert torch.allclose(o_custom, outputs[i], rtol=1e-3, atol=1e-3)

    print(outputs_custom_mask[0].shape)
    assert outputs_custom_mask[0].shape == torch.Size([100, 64, 128])
    print("custom mask equals causal: True")


def shared_prefix_decode() -> None:
    """flashinfer.cascade.BatchDecodeWithSharedPrefixPagedKVCacheWrapper"""
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 8
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    batch_size = 7
    shared_prefix_len = 8192
    unique_kv_page_indices = torch.arange(max_num_pages).int().to(DEVICE)
    unique_kv_page_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=DEVICE)
    # 1 <= kv_last_page_len <= page_size
    unique_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=DEVICE)
    unique_kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch decode attention
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
        q = torch.randn(batch_size, num_qo_heads, head_dim).half().to(DEVICE)
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        unique_kv_data = unique_kv_data_at_layer[i]
        # compute batch decode attention, reuse auxiliary data structures for all layers
        o = wrapper.forward(q, k_shared, v_shared, unique_kv_data)
        outputs.append(o)

    # clear auxiliary data structures
    wrapper.end_forward()
    print(outputs[0].shape)
    assert outputs[0].shape == torch.Size([7, 64, 128])


def shared_prefix_prefill() -> None:
    """flashinfer.cascade.BatchPrefillWithSharedPrefixPagedKVCacheWrapper"""
    num_layers = NUM_LAYERS
    num_qo_heads = 64
    num_kv_heads = 16
    head_dim = 128
    max_num_pages = 128
    page_size = 16
    # allocate 16MB workspace buffer
    workspace_buffer = torch.empty(16 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)
    prefill_wrapper = flashinfer.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(workspace_buffer, "NHD")
    shared_prefix_len = 8192
    nnz_qo = 100
    qo_indptr = torch.tensor([0, 33, 44, 55, 66, 77, 88, nnz_qo], dtype=torch.int32, device=DEVICE)
    paged_kv_indices = torch.arange(max_num_pages).int().to(DEVICE)
    paged_kv_indptr = torch.tensor([0, 17, 29, 44, 48, 66, 100, 128], dtype=torch.int32, device=DEVICE)
    # 1 <= paged_kv_last_page_len <= page_size
    paged_kv_last_page_len = torch.tensor([1, 7, 14, 4, 3, 1, 16], dtype=torch.int32, device=DEVICE)
    kv_data_at_layer = [
        torch.randn(max_num_pages, 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        for _ in range(num_layers)
    ]
    shared_k_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        for _ in range(num_layers)
    ]
    shared_v_data_at_layer = [
        torch.randn(shared_prefix_len, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
        for _ in range(num_layers)
    ]
    # create auxiliary data structures for batch prefill attention
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
        q = torch.randn(nnz_qo, num_qo_heads, head_dim).half().to(DEVICE)
        kv_data = kv_data_at_layer[i]
        k_shared = shared_k_data_at_layer[i]
        v_shared = shared_v_data_at_layer[i]
        # compute batch prefill attention, reuse auxiliary data structures
        o = prefill_wrapper.forward(q, k_shared, v_shared, kv_data, causal=True)
        outputs.append(o)

    # clear auxiliary data structures
    prefill_wrapper.end_forward()
    print(outputs[0].shape)
    assert outputs[0].shape == torch.Size([100, 64, 128])


def fmha_v2() -> None:
    """flashinfer.prefill.trtllm_fmha_v2_prefill (a page without an example: its layouts, on one batch)"""
    num_qo_heads = 16
    num_kv_heads = 16
    head_dim = 128
    page_size = 32
    lengths = [33, 64, 100]
    batch_size = len(lengths)
    cum_seq_lens = torch.tensor([0, *lengths]).cumsum(0).int().to(DEVICE)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    workspace_buffer = torch.zeros(16 * 1024 * 1024, dtype=torch.uint8, device=DEVICE)
    qkv = torch.randn(sum(lengths), 3, num_qo_heads, head_dim).half().to(DEVICE)
    q, k, v = qkv.unbind(1)

    # the same keys and values in pages, one row of block_tables per request
    pages_per_request = [-(-length // page_size) for length in lengths]
    block_tables = torch.zeros(batch_size, max(pages_per_request), dtype=torch.int32, device=DEVICE)
    pool = torch.zeros(sum(pages_per_request), 2, page_size, num_kv_heads, head_dim, dtype=torch.float16, device=DEVICE)
    page = start = 0
    for b, length in enumerate(lengths):
        for first in range(0, length, page_size):
            block_tables[b, first // page_size] = page
            tokens = slice(start + first, start + min(first + page_size, length))
            pool[page, :, : tokens.stop - tokens.start] = qkv[tokens, 1:].transpose(0, 1)
            page += 1
        start += length

    layouts: dict[str, torch.Tensor | tuple[torch.Tensor, ...]] = {
        "PACKED_QKV": qkv,
        "CONTIGUOUS_Q_KV": (q.contiguous(), qkv[:, 1:].contiguous()),
        "SEPARATE_Q_K_V": (q.contiguous(), k.contiguous(), v.contiguous()),
        "Q_PAGED_KV_NHD": (q.contiguous(), pool),
        "Q_PAGED_KV_HND": (q.contiguous(), pool.transpose(2, 3).contiguous()),
    }
    outputs = {}
    for input_layout, tensors in layouts.items():
        outputs[input_layout] = flashinfer.prefill.trtllm_fmha_v2_prefill(
            tensors,
            input_layout,
            workspace_buffer,
            seq_lens,
            max(lengths),
            max(lengths),
            head_dim**-0.5,
            1.0,
            batch_size,
            cum_seq_lens,
            cum_seq_lens,
            block_tables=block_tables if "PAGED" in input_layout else None,
            mask_mode="causal",
        )
        print(input_layout, outputs[input_layout].shape)
        assert torch.allclose(outputs[input_layout], outputs["PACKED_QKV"], rtol=1e-3, atol=1e-3)
    print("all layouts agree: True")


PAGES: dict[str, Callable[[], None]] = {
    page.__name__: page
    for page in (single_prefill, single_decode, paged, ragged, shared_prefix_decode, shared_prefix_prefill, fmha_v2)
}


def main() -> None:
    global DEVICE, NUM_LAYERS
    parser = argparse.ArgumentParser(description="Runs the examples of FlashInfer's API pages on this library.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"default: all of {', '.join(PAGES)}")
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="layers of the batch examples (%(default)s)")
    parser.add_argument("--device", default=DEVICE, help="where the tensors live (%(default)s)")
    arguments = parser.parse_args()
    unknown = set(arguments.pages) - set(PAGES)
    if unknown or arguments.layers < 1:
        parser.error(f"there is no page {sorted(unknown)}" if unknown else "--layers must be at least 1")
    DEVICE, NUM_LAYERS = arguments.device, arguments.layers
    for name in arguments.pages or PAGES:
        print(f"--- {PAGES[name].__doc__}, on {DEVICE}")
        torch.manual_seed(0)
        start = time.perf_counter()
        PAGES[name]()
        print(f"{name}: ok, {time.perf_counter() - start:.1f} s\n")


if __name__ == "__main__":
    main()
