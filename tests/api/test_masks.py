"""Visibility: causal, window, custom bits, multi-item scoring, and how they combine, in every kind of call."""

from __future__ import annotations

import random

import oracle
import pytest
import torch
from compare import assert_close, assert_lse_close
from mask_problems import KINDS, batch_for, check, flat, packed_per_request, run
from problems import Options, expect, indptr, make_batch, wrapper_of

import cutlass_kernels as ck
from cutlass_kernels._core.problems import MultiItem
from cutlass_kernels._masks import mask_packing


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-5, 0, 1, 16, 69, 70, 10**6])
def test_window(target, kind, causal, window_left):
    # Without causal only the left side is limited; any negative number means no limit.
    check(target, kind, batch_for(kind, target), Options(causal=causal, window_left=window_left))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window_left", [-1, 0, 5])
def test_causal_with_more_rows_than_keys(target, kind, window_left):
    batch = batch_for(kind, target, (80, 7, 3), (30, 1, 3))
    out, lse = run(target, kind, batch, Options(causal=True, window_left=window_left))
    assert torch.count_nonzero(out[:50]) == 0 and bool((lse[:50] == -torch.inf).all())
    want = expect(batch, Options(causal=True, window_left=window_left))
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 12])
def test_custom_mask(target, kind, packed, causal, window_left):
    # The mask overrides causal; the window still applies. The lengths leave bits over in the last byte.
    batch = batch_for(kind, target, (33, 1, 9), (71, 43, 9))
    options = Options(causal=causal, window_left=window_left, custom_masks=batch.random_masks())
    masks = options.custom_masks
    given = {"packed_custom_mask": packed_per_request(masks)} if packed else {"custom_mask": flat(masks)}
    check(target, kind, batch, options, needs=["custom_mask"], **given)


def test_single_custom_mask_in_two_dimensions(target):
    batch = batch_for("single", target)
    options = Options(custom_masks=batch.random_masks())
    check(target, "single", batch, options, needs=["custom_mask"], custom_mask=options.custom_masks[0])
    transposed = options.custom_masks[0].T.contiguous().T
    assert not transposed.is_contiguous()
    check(target, "single", batch, options, needs=["custom_mask"], custom_mask=transposed)


def test_a_mask_of_numbers_shows_what_is_not_0(target):
    batch = batch_for("single", target)
    options = Options(custom_masks=batch.random_masks())
    numbers = options.custom_masks[0].to(torch.int32) * 6
    check(target, "single", batch, options, needs=["custom_mask"], custom_mask=numbers)


def test_custom_mask_of_many_heads(target):
    # The reference then takes other blocks of rows, which begin at any bit of a byte.
    batch = make_batch([100], [9], 192, 192, 16, device=target.device)
    options = Options(custom_masks=batch.random_masks())
    check(target, "single", batch, options, needs=["custom_mask"], custom_mask=options.custom_masks[0])


def test_seed_position_of_the_mask(target):
    batch = batch_for("single", target)
    options = Options(custom_masks=batch.random_masks())
    want = expect(batch, options)
    out = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, options.custom_masks[0])
    assert_close(out, want.out, want.baseline)
    bits = oracle.pack_bits(options.custom_masks[0], "little").to(target.device)
    out = ck.single_prefill_with_kv_cache(batch.q, batch.k, batch.v, None, bits)
    assert_close(out, want.out, want.baseline)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_mask_wins_over_plain(target, kind):
    batch = batch_for(kind, target)
    masks, others = batch.random_masks(), batch.random_masks(0.3)
    both = dict(custom_mask=flat(others), packed_custom_mask=packed_per_request(masks))
    check(target, kind, batch, Options(custom_masks=masks), needs=["custom_mask"], **both)


@pytest.mark.parametrize("kind", KINDS)
def test_mask_made_by_packbits(target, kind):
    batch = batch_for(kind, target)
    masks = batch.random_masks()
    lengths = [m.numel() for m in masks]
    bits, _ = ck.segment_packbits(flat(masks), indptr(lengths, target.device), bitorder="little")
    check(target, kind, batch, Options(custom_masks=masks), needs=["custom_mask"], packed_custom_mask=bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_packed_mask_at_any_address(target, kind, first):
    # Kernels read words of 32 bits. Here neither the address nor the end of the storage is a multiple of four bytes.
    batch = batch_for(kind, target, (33, 1, 9), (71, 43, 9))
    masks = batch.random_masks()
    packed = packed_per_request(masks)
    buffer = torch.full((first + packed.numel(),), 255, dtype=torch.uint8, device=target.device)
    buffer[first:] = packed
    options = Options(custom_masks=masks)
    check(target, kind, batch, options, needs=["custom_mask"], packed_custom_mask=buffer[first:])


@pytest.mark.parametrize("size", [0, 1, 3, 4, 5, 8])
@pytest.mark.parametrize("first", [0, 1, 4])
def test_whole_words(size, first):
    buffer = torch.arange(first + size, dtype=torch.uint8)
    bits = buffer[first:]
    words = mask_packing.whole_words(bits)
    assert words.data_ptr() % 4 == 0 and torch.equal(words[:size], bits)
    assert words.numel() == max((size + 3) // 4 * 4, 4)  # all of which may be read
    assert (words is bits) == (size > 0 and size % 4 == 0 and first % 4 == 0)


@pytest.mark.parametrize("count", [1, 8, 9, 32, 33, 100])
def test_packed_masks_of_ours_are_whole_words(count):
    bits = ck.packbits(torch.ones(count, dtype=torch.bool), bitorder="little")
    bounds = torch.tensor([0, count, 2 * count])
    segments, _ = ck.segment_packbits(torch.ones(2 * count, dtype=torch.bool), bounds, "little")
    for packed in (bits, segments):
        words = mask_packing.whole_words(packed)
        assert words.data_ptr() == packed.data_ptr() and words.numel() == (packed.numel() + 3) // 4 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_the_mask_blanks(target, kind):
    batch = batch_for(kind, target)
    masks = batch.random_masks()
    masks[0][[0, 5, 32]] = False
    masks[-1][:] = False
    out, lse = run(target, kind, batch, Options(), needs=["custom_mask"], custom_mask=flat(masks))
    want = expect(batch, Options(custom_masks=masks))
    assert bool((lse[-1] == -torch.inf).all()) and torch.count_nonzero(out[-1]) == 0
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_masks_of_empty_requests(target, kind):
    # Requests without keys or rows take no bits; the ones behind them must still find theirs.
    batch = make_batch([3, 4, 0, 7], [0, 13, 5, 11], 4, 2, 64, device=target.device)
    masks = batch.random_masks()
    for given in ({"custom_mask": flat(masks)}, {"packed_custom_mask": packed_per_request(masks)}):
        check(target, kind, batch, Options(custom_masks=masks), needs=["custom_mask"], **given)


def test_paged_mask_where_an_empty_request_has_a_last_page_len(target):
    # (0 - 1) * page + last_page_len must count as no keys, not as a negative number of them.
    batch = make_batch([3, 4], [0, 13], 4, 2, 64, device=target.device)
    paged = batch.paged(8)
    paged.last_page_len[0] = 5
    masks = batch.random_masks()
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace(), "NHD")
    wrapper.plan(batch.qo_indptr(), *paged.table(), *batch.heads, 8, custom_mask=flat(masks))
    want = expect(batch, Options(custom_masks=masks))
    out, lse = wrapper.run(batch.q, paged.cache, return_lse=True)
    assert_close(out, want.out, want.baseline)
    assert_lse_close(lse, want.lse)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_written_as_a_custom_mask(target, kind):
    batch = batch_for(kind, target)
    masks = []
    for n, m in zip(batch.qo_lens, batch.kv_lens):
        masks.append(torch.tril(torch.ones(n, m, dtype=torch.bool, device=target.device), diagonal=m - n))
    by_mask = run(target, kind, batch, Options(), needs=["custom_mask"], custom_mask=flat(masks))
    by_flag = run(target, kind, batch, Options(causal=True))
    torch.testing.assert_close(by_mask[0], by_flag[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(by_mask[1], by_flag[1], rtol=1e-5, atol=1e-3)


def item_positions(prefix: int, items: list[int]) -> oracle.MultiItem:
    """A delimiter (0) before each item, then 1, 2, ... inside it, and a closing delimiter."""
    places: list[int] = []
    for length in items:
        places += [0, *range(1, length + 1)]
    return oracle.MultiItem(prefix, (*places, 0))


def multi_item_arguments(items: list[oracle.MultiItem], device: str) -> dict:
    width = max(len(x.token_pos) for x in items) + 2
    table = torch.zeros(len(items), width, dtype=torch.int32)
    for b, x in enumerate(items):
        table[b, : len(x.token_pos)] = torch.tensor(x.token_pos, dtype=torch.int32)
    longest = torch.tensor([max(x.token_pos) for x in items], dtype=torch.int32)
    return dict(
        prefix_len_ptr=torch.tensor([x.prefix_len for x in items], dtype=torch.int32).to(torch.uint32).to(device),
        token_pos_in_items_ptr=table.reshape(-1).to(torch.uint16).to(device),
        token_pos_in_items_len=width,
        max_item_len_ptr=longest.to(torch.uint16).to(device),
    )


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("window_left", [-1, 6])
@pytest.mark.parametrize("cached", [0, 5, 14])
def test_multi_item_scoring(target, kind, window_left, cached):
    # `cached` keys are already there, so the rows start inside the prefix, or behind it.
    items = [item_positions(10, [4, 3, 6]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    batch = make_batch([m - cached for m in kv_lens], kv_lens, 4, 2, 64, device=target.device)
    options = Options(causal=True, window_left=window_left, multi_items=items)
    check(target, kind, batch, options, needs=["multi_item"], **multi_item_arguments(items, target.device))


def test_items_as_bits():
    items = [item_positions(10, [4, 3, 6]), item_positions(5, []), item_positions(0, [2]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    qo_lens = [kv_lens[0], 0, kv_lens[2], 7]
    given = multi_item_arguments(items, "cpu")
    rule = mask_packing.keys_of_items(
        MultiItem(
            given["prefix_len_ptr"],
            given["token_pos_in_items_ptr"],
            given["token_pos_in_items_len"],
            given["max_item_len_ptr"],
        )
    )
    bits, offsets = mask_packing.mask_of_rule(
        rule, torch.tensor(qo_lens), torch.tensor(kv_lens), 0, torch.device("cpu")
    )
    for b, (n, m) in enumerate(zip(qo_lens, kv_lens)):
        want = oracle.pack_bits(oracle.visible(n, m, multi_item=items[b]), "little")
        assert torch.equal(bits[offsets[b] : offsets[b + 1]], want)


def test_rows_behind_their_items_as_bits():
    """They count as delimiters, which see the prefix only, and not as rows of the next request."""
    positions = torch.tensor([0, 1, 2, 0, 5, 6, 7, 0]).to(torch.uint16)  # four of each request
    items = MultiItem(torch.tensor([3, 2]).to(torch.uint32), positions, 4, torch.tensor([2, 7]).to(torch.uint16))
    lens = torch.tensor([9, 6])
    bits, offsets = mask_packing.mask_of_rule(mask_packing.keys_of_items(items), lens, lens, 0, torch.device("cpu"))
    for b, (prefix, places) in enumerate(((3, (0, 1, 2, 0, 0, 0)), (2, (5, 6, 7, 0)))):
        want = oracle.visible(int(lens[b]), int(lens[b]), multi_item=oracle.MultiItem(prefix, places))
        assert torch.equal(bits[offsets[b] : offsets[b + 1]], oracle.pack_bits(want, "little"))


@pytest.mark.parametrize("known", range(9))
def test_positions_that_end_early_as_bits(known):
    """Rows whose positions lie behind the end of the tensor are causal, wherever it ends."""
    places = [0, 1, 2, 0, 5, 6, 7, 0]  # four of each request
    positions = torch.tensor(places[:known], dtype=torch.int32).to(torch.uint16)
    items = MultiItem(torch.tensor(3).to(torch.uint32), positions, 4, torch.tensor([2, 7]).to(torch.uint16))
    lens = torch.tensor([7, 7])
    rule = mask_packing.keys_of_items(mask_packing.of_requests(items, 2))
    bits, offsets = mask_packing.mask_of_rule(rule, lens, lens, 0, torch.device("cpu"))
    for b in range(2):
        own = [places[4 * b + i] if 4 * b + i < known else i + 1 for i in range(4)]
        want = oracle.visible(7, 7, multi_item=oracle.MultiItem(3, tuple(own)))
        assert torch.equal(bits[offsets[b] : offsets[b + 1]], oracle.pack_bits(want, "little"))


def test_plain_masks_as_bits():
    qo_lens, kv_lens = torch.tensor([3, 0, 7, 5]), torch.tensor([9, 4, 7, 2])
    for rule, causal in ((mask_packing.every_key, False), (mask_packing.keys_before, True)):
        bits, offsets = mask_packing.mask_of_rule(rule, qo_lens, kv_lens, 0, torch.device("cpu"))
        for b, (n, m) in enumerate(zip(qo_lens.tolist(), kv_lens.tolist())):
            want = oracle.pack_bits(oracle.visible(n, m, causal=causal), "little")
            assert torch.equal(bits[offsets[b] : offsets[b + 1]], want)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_positions_that_are_too_few_for_their_items(target):
    items = [item_positions(10, [4, 3])]
    needed = len(items[0].token_pos)
    batch = make_batch([3, 0], [10 + needed, 50], 2, 2, 64, device=target.device)  # no row of the second has a position
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace(), backend=target.backend)
    given = multi_item_arguments(items * 2, "cpu")

    def plan(**changes):
        wrapper.plan(batch.qo_indptr(), batch.kv_indptr(), *batch.heads, **(given | changes))

    plan(token_pos_in_items_len=needed)
    with pytest.raises(ValueError, match="pad token_pos_in_items"):
        plan(token_pos_in_items_len=needed - 1)
    with pytest.raises(ValueError, match="but there are 2 requests"):
        plan(prefix_len_ptr=given["prefix_len_ptr"][:1])


@pytest.mark.parametrize("kind", ["ragged", "paged"])
@pytest.mark.parametrize("told", ["once", "each"])
def test_positions_end_early(target, kind, told):
    """Requests whose positions lie behind the end of the tensor are causal; one prefix length may be that of all."""
    behind = 9
    items = [item_positions(10, [4, 3, 6]), oracle.MultiItem(10, tuple(range(1, behind + 1)))]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    batch = make_batch([m - 5 for m in kv_lens], kv_lens, 4, 2, 64, device=target.device)
    given = multi_item_arguments(items[:1], target.device)
    given["token_pos_in_items_ptr"] = given["token_pos_in_items_ptr"][: len(items[0].token_pos)].clone()
    prefix = torch.tensor(10, dtype=torch.int32).to(torch.uint32).to(target.device)
    given["prefix_len_ptr"] = prefix if told == "once" else prefix.view(1).expand(2).contiguous()
    check(target, kind, batch, Options(causal=True, multi_items=items), needs=["multi_item"], **given)


@pytest.mark.parametrize("told", [False, True])
def test_items_of_lengths_on_the_device(kernel_backend, told):
    # Their mask has no size that the host knows: lengths are read back, unless it is told them.
    items = [item_positions(10, [4, 3, 6]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    batch = make_batch(kv_lens, kv_lens, 4, 2, 64, device="cuda:0")
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0"), backend=kernel_backend
    )
    indptrs = batch.qo_indptr("cuda:0"), batch.kv_indptr("cuda:0")
    more = dict(seq_lens=lens, seq_lens_q=lens) if told else {}
    wrapper.plan(*indptrs, *batch.heads, **multi_item_arguments(items, "cuda:0"), **more)
    want = expect(batch, Options(multi_items=items))
    assert_close(wrapper.run(batch.q, batch.k, batch.v), want.out, want.baseline)


@pytest.mark.parametrize("lengths_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("seed", range(6))
def test_workspaces_of_items_are_as_large_as_promised(kernel_backend, lengths_on, dtype, seed):
    if kernel_backend == "fa2" and dtype == torch.float8_e4m3fn:
        pytest.skip("fa2 has no fp8 tensor cores and refuses fp8 batches")
    draw = random.Random(seed)
    qo_lens = [[265, 256, 183], [1, 31, 1, 1]][seed] if seed < 2 else draw.choices([1, 2, 31, 100, 300], k=4)
    items = [item_positions(draw.randint(1, 2000), draw.choices([1, 7, 30], k=3)) for _ in qo_lens]
    kv_lens = [max(n, x.prefix_len + len(x.token_pos)) for n, x in zip(qo_lens, items)]
    batch = make_batch(
        qo_lens, kv_lens, *draw.choice([(8, 1), (32, 1), (4, 4)]), draw.choice([64, 128]), device="cuda:0"
    )
    pages = batch.paged(16)
    vectors = (batch.qo_indptr(), *pages.table())
    plan = (*(x.to(lengths_on) for x in vectors), *batch.heads, 16)
    options = dict(q_data_type=dtype, kv_data_type=dtype, o_data_type=torch.float16, causal=True)
    options |= multi_item_arguments(items, "cuda:0")
    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0")
    wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(memory, backend=kernel_backend)
    room = [torch.empty(n, dtype=torch.uint8, device="cuda:0") for n in wrapper.workspace_size(*plan, **options)]
    wrapper.reset_workspace_buffer(*room)
    wrapper.plan(*plan, **options)
    wrapper.run(batch.q.to(dtype), pages.cache.nan_to_num().to(dtype), return_lse=True)


@pytest.mark.parametrize("lengths_on", ["cpu", "cuda:0"])
def test_plans_with_masks_do_not_synchronise(kernel_backend, lengths_on):
    items = [item_positions(10, [4, 3, 6]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    batch = make_batch(kv_lens, kv_lens, 4, 2, 64, device="cuda:0")
    masks = batch.random_masks()
    plain, packed, positions = flat(masks), packed_per_request(masks), multi_item_arguments(items, "cuda:0")
    want, want_items = expect(batch, Options(custom_masks=masks)).out, expect(batch, Options(multi_items=items)).out
    wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(
        torch.zeros(64 << 20, dtype=torch.uint8, device="cuda:0"), backend=kernel_backend
    )
    bounds = batch.qo_indptr(lengths_on), batch.kv_indptr(lengths_on)
    given = [(dict(custom_mask=plain), want), (dict(packed_custom_mask=packed), want)]
    if lengths_on == "cpu":
        given.append((positions, want_items))
    outs = []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for kwargs, _ in given:
            wrapper.plan(*bounds, *batch.heads, **kwargs)
            outs.append(wrapper.run(batch.q, batch.k, batch.v))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out, (_, expected) in zip(outs, given):
        assert_close(out, expected)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_masks_come_and_go_with_plans(target, kind):
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    wrapper, table, rest, data = wrapper_of(kind, target, batch)
    masked = (Options(custom_masks=batch.random_masks()) for _ in range(3))
    for options in (Options(causal=True), next(masked), Options(), next(masked), next(masked), Options(causal=True)):
        mask = {} if options.custom_masks is None else {"custom_mask": flat(options.custom_masks)}
        wrapper.plan(batch.qo_indptr(), *table, *rest, **options.plan_kwargs(), **mask)
        want = expect(batch, options)
        for _ in range(2):
            out, lse = wrapper.run(batch.q, *data, return_lse=True)
            assert_close(out, want.out, want.baseline)
            assert_lse_close(lse, want.lse)


def test_multi_item_replaces_the_custom_mask(target):
    items = [item_positions(10, [4, 3])]
    kv_len = 10 + len(items[0].token_pos)
    batch = make_batch([kv_len], [kv_len], 2, 2, 64, device=target.device)
    given = multi_item_arguments(items, target.device) | {"custom_mask": flat(batch.random_masks(0.2))}
    check(target, "ragged", batch, Options(multi_items=items), needs=["multi_item"], **given)


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_with_a_narrow_window(target, kind):
    # Whole tiles on both sides of the band are invisible.
    batch = batch_for(kind, target, (150, 3, 130), (700, 400, 130))
    check(target, kind, batch, Options(causal=True, window_left=20))


@pytest.mark.parametrize("kind", KINDS)
def test_custom_mask_over_many_tiles(target, kind):
    # Rows of an odd number of bits, so that every row starts at another bit of a byte.
    batch = batch_for(kind, target, (300, 5, 131), (203, 77, 131))
    options = Options(window_left=150, custom_masks=batch.random_masks())
    check(target, kind, batch, options, needs=["custom_mask"], custom_mask=flat(options.custom_masks))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_plan_copies_what_it_gets_on_the_cpu(target, kind):
    batch = make_batch([6, 5], [9, 5], 4, 2, 64, device=target.device)
    paged = batch.paged(4)
    if kind == "ragged":
        wrapper = ck.BatchPrefillWithRaggedKVCacheWrapper(target.workspace())
        table, rest, data = (batch.kv_indptr(),), batch.heads, (batch.k, batch.v)
    else:
        wrapper = ck.BatchPrefillWithPagedKVCacheWrapper(target.workspace())
        table, rest, data = paged.table(), (*batch.heads, 4), (paged.cache,)
    # Pinned where there is a GPU: copies from such memory are still under way when plan() returns.
    pin = target.device != "cpu"
    masks = batch.random_masks()
    bits = torch.cat([oracle.pack_bits(m, "little") for m in masks])
    prefix = torch.tensor([3, 2]).to(torch.uint32)
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2, 0, 0] * 2, dtype=torch.int32).to(torch.uint16)
    longest = torch.tensor([2, 2]).to(torch.uint16)
    bits, prefix, positions = (x.pin_memory() if pin else x for x in (bits, prefix, positions))
    items = dict(
        prefix_len_ptr=prefix, token_pos_in_items_ptr=positions, token_pos_in_items_len=10, max_item_len_ptr=longest
    )
    for given in (dict(packed_custom_mask=bits), items):
        wrapper.plan(batch.qo_indptr(), *table, *rest, **given)
        want = wrapper.run(batch.q, *data)
        wrapper.plan(batch.qo_indptr(), *table, *rest, **given)
        for x in given.values():
            if isinstance(x, torch.Tensor):
                x.view(torch.uint8).zero_()
        assert torch.equal(wrapper.run(batch.q, *data), want)
        wrapper.plan(batch.qo_indptr(), *table, *rest, **given)
        assert not torch.equal(wrapper.run(batch.q, *data), want)
