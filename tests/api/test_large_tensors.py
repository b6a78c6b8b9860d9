"""Tensors of more than 2^31 elements: offsets of pages and rows are 64-bit numbers."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from plan_free_problems import page_table
from problems import Options, expect, indptr, make_batch
from targets import Target
from wrapper_problems import Wrapped

import cutlass_kernels as ck

BEYOND = 2**31
HEADS, DIM = 8, 128
CAUSAL = Options(causal=True)


def room(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    if free < gib << 30:
        pytest.skip(f"needs {gib} GiB of free GPU memory, has {free / 2**30:.0f}")


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("form", ["stacked", "tuple"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_cache(kernel_backend, page_size, form, kv_layout):
    room(12)
    batch = make_batch((40, 3), (200, 70), 16, HEADS, DIM, device="cuda:0", dtype=torch.bfloat16)
    w = Wrapped(Target("cuda:0", kernel_backend), "paged", batch, page_size, kv_layout, form)
    w.pages = paged = batch.paged(page_size, kv_layout, form, spare=0)
    used = paged.indices.numel()
    stacked = form == "stacked"
    pages = BEYOND // (page_size * HEADS * DIM * (2 if stacked else 1)) + used
    inner = paged.k_cache.shape[1:]
    # Nothing but the last pages is written: the others are what the memory held before.
    if stacked:
        cache = torch.empty(pages, 2, *inner, dtype=torch.bfloat16, device="cuda:0")
        cache[-used:] = paged.cache
        assert cache[-used:].storage_offset() >= BEYOND
    else:
        cache = tuple(torch.empty(pages, *inner, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
        cache[0][-used:], cache[1][-used:] = paged.k_cache, paged.v_cache
    paged.indices += pages - used
    w.kv = (cache,)
    w.plan(CAUSAL).check()


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("is_apart", [False, True])
def test_latent_cache(kernel_backend, page_size, is_apart):
    room(14)
    batch = make_batch((2, 3), (200, 70), 16, 1, 576, device="cuda:0", dtype=torch.bfloat16)
    batch = dataclasses.replace(batch, v=batch.k[..., :512])
    paged = batch.paged(page_size, form="split", spare=0)
    used = paged.indices.numel()
    widths = (512, 64) if is_apart else (576,)
    parts = []
    for width, written in zip(widths, paged.k_cache.split(widths, -1)):
        pages = BEYOND // (page_size * widths[0]) + used
        cache = torch.empty(pages, page_size, 1, width, dtype=torch.bfloat16, device="cuda:0")
        cache[-used:] = written
        parts.append(cache)
    table = page_table(paged, 2).to("cuda:0")
    table = torch.where(table < used, table + (pages - used), table).to(torch.int32)
    lens = torch.tensor(batch.kv_lens, dtype=torch.int32, device="cuda:0")
    whose = dict(cu_seqlens_q=batch.qo_indptr("cuda:0"), max_seqlen_q=3, page_table=table, seqused_k=lens)
    ropes = dict(k_rope=parts[1]) if is_apart else {}
    out, lse = ck.attention(
        batch.q, parts[0], parts[0][..., :512], **whose, **ropes, causal=True, return_lse=True, backend=kernel_backend
    )
    want = expect(batch, CAUSAL)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3])
def test_states(count):
    room(16)
    tokens = BEYOND // (count * HEADS * DIM) + 50
    v = torch.empty(tokens, count, HEADS, DIM, dtype=torch.bfloat16, device="cuda:0")
    s = torch.zeros(tokens, count, HEADS, device="cuda:0")
    last = slice(-40, None)
    v[last], s[last] = torch.randn(v[last].shape).to(v), torch.randn(s[last].shape).to(s)
    out, lse = ck.merge_states(v, s)
    want, want_lse = oracle.merge(v[last], s[last])
    assert_close(out[last], want)
    assert_lse_close(lse[last], want_lse)
    if count == 2:
        del out
        pair = v[:, 0], s[:, 0], v[:, 1], s[:, 1]
        out, lse = ck.merge_state(*pair)
        assert_close(out[last], want)
        assert_lse_close(lse[last], want_lse)


@pytest.mark.gpu
def test_append():
    room(12)
    pages = BEYOND // (16 * HEADS * DIM) + 9
    cache = tuple(torch.zeros(pages, 16, HEADS, DIM, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
    k, v = (torch.randn(20, HEADS, DIM).to(cache[0]) for _ in range(2))
    table = [torch.tensor(x, dtype=torch.int32, device="cuda:0") for x in ([pages - 1, pages - 3], [0, 2], [4])]
    places = ck.get_batch_indices_positions(indptr([20], "cuda:0"), table[2] + 16, 20)
    ck.append_paged_kv_cache(k, v, *places, cache, *table)
    for new, pages_of in zip((k, v), cache):
        assert torch.equal(pages_of[-1], new[:16]) and torch.equal(pages_of[-3, :4], new[16:])
        assert torch.count_nonzero(pages_of[:-3].view(torch.int16)) == 0


def test_ragged_rows(kernel_backend):
    room(24)
    batch = make_batch((40,), (200,), 16, HEADS, DIM, device="cuda:0", dtype=torch.bfloat16)
    keys = BEYOND // (HEADS * DIM) + 200
    rows = BEYOND // (16 * DIM) + 40
    k, v = (torch.empty(keys, HEADS, DIM, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
    q, out = (torch.empty(rows, 16, DIM, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
    k[-200:], v[-200:], q[-40:] = batch.k, batch.v, batch.q
    # Rows and keys in front belong to a request without keys, and to one without rows.
    first = rows - 40
    w = Wrapped(Target("cuda:0", kernel_backend), "ragged", batch)
    vectors = indptr([first, 0, 40]), indptr([0, keys - 200, 200])
    w.wrapper.plan(*vectors, *w.sizes, causal=True, q_data_type=torch.bfloat16)
    w.wrapper.run(q, k, v, out=out)
    w.check(out[-40:], CAUSAL)
    assert int(torch.count_nonzero(out[::4099][:200])) == 0 and int(torch.count_nonzero(out[first - 1])) == 0


@pytest.mark.parametrize("keys", [(1 << 30) - 1, (1 << 29) + 77])
def test_a_mask_over_nearly_all_keys_that_there_can_be(kernel_backend, keys):
    """All pages are one. A row sees a key at either end of them and some between."""
    room(4)
    page = 1 << 16
    torch.manual_seed(0)
    q = torch.randn(1, 1, 64, dtype=torch.float16, device="cuda:0")
    k, v = torch.randn(2, 1, page, 1, 64, dtype=torch.float16, device="cuda:0")
    bits = torch.zeros((keys + 7) // 8, dtype=torch.uint8, device="cuda:0")
    seen = [0, 5, page, 1 << 29, keys - 8192, keys - 1]
    for key in seen:
        bits[key // 8] |= 1 << key % 8
    table = torch.zeros(1, -(-keys // page), dtype=torch.int32, device="cuda:0")
    lens = torch.tensor([keys], dtype=torch.int32, device="cuda:0")
    given = dict(page_table=table, seqused_k=lens, packed_custom_mask=bits, backend=kernel_backend)
    out, lse = ck.attention(q, k, v, **given, return_lse=True)
    at = torch.tensor([key % page for key in seen], device="cuda:0")
    want = oracle.attention(q, k[0, at], v[0, at])
    torch.testing.assert_close(out.double(), want.out.double(), atol=2e-3, rtol=2e-3)
    assert_lse_close(lse, want.lse)
