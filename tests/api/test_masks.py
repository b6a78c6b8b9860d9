"""Visibility: causal, window, custom bits, multi-item scoring, and how they combine, in every kind of call."""

from __future__ import annotations

import random

import oracle
import pytest
import torch
from captures import no_waiting
from compare import assert_close
from problems import Options, expect, indptr, make_batch
from targets import Target
from wrapper_problems import KINDS, Wrapped, batch_for, check, flat, packed_per_request, run

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
    w = Wrapped(target, kind, batch, 8).plan(Options(causal=True, window_left=window_left))
    out, lse = w.run(return_lse=True)
    assert torch.count_nonzero(out[:50]) == 0 and bool((lse[:50] == -torch.inf).all())
    w.check((out, lse))


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [-1, 12])
def test_custom_mask(target, kind, packed, causal, window_left):
    # The mask overrides causal; the window still applies. The lengths leave bits over in the last byte.
    batch = batch_for(kind, target, (33, 1, 9), (71, 43, 9))
    options = Options(causal=causal, window_left=window_left, custom_masks=batch.random_masks())
    given = {"packed_custom_mask": packed_per_request(options.custom_masks)} if packed else {}
    check(target, kind, batch, options, **given)


def test_single_custom_masks_of_other_forms(target):
    batch = batch_for("single", target)
    (mask,) = masks = batch.random_masks()
    transposed = mask.T.contiguous().T
    assert not transposed.is_contiguous()
    for given in (mask, transposed, mask.to(torch.int32) * 6):  # of numbers, what is not 0 is seen
        check(target, "single", batch, Options(custom_masks=masks), custom_mask=given)


def test_custom_mask_of_many_heads(target):
    # The reference then takes other blocks of rows, which begin at any bit of a byte.
    batch = make_batch([100], [9], 192, 192, 16, device=target.device)
    check(target, "single", batch, Options(custom_masks=batch.random_masks()))


def test_seed_position_of_the_mask(target):
    w = Wrapped(target, "single", batch_for("single", target))
    (mask,) = masks = w.batch.random_masks()
    bits = oracle.pack_bits(mask, "little").to(target.device)
    for given in ((mask,), (None, bits)):
        w.check(ck.single_prefill_with_kv_cache(w.batch.q, *w.kv, *given), Options(custom_masks=masks))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_mask_wins_over_plain(target, kind):
    batch = batch_for(kind, target)
    masks, others = batch.random_masks(), batch.random_masks(0.3)
    both = dict(custom_mask=flat(others), packed_custom_mask=packed_per_request(masks))
    check(target, kind, batch, Options(custom_masks=masks), **both)


@pytest.mark.parametrize("kind", KINDS)
def test_mask_made_by_packbits(target, kind):
    batch = batch_for(kind, target)
    masks = batch.random_masks()
    lengths = [m.numel() for m in masks]
    bits, _ = ck.segment_packbits(flat(masks), indptr(lengths, target.device), bitorder="little")
    check(target, kind, batch, Options(custom_masks=masks), packed_custom_mask=bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_packed_mask_at_any_address(target, kind, first):
    # Kernels read words of 32 bits. Here neither the address nor the end of the storage is a multiple of four bytes.
    batch = batch_for(kind, target, (33, 1, 9), (71, 43, 9))
    masks = batch.random_masks()
    packed = packed_per_request(masks)
    buffer = torch.full((first + packed.numel(),), 255, dtype=torch.uint8, device=target.device)
    buffer[first:] = packed
    check(target, kind, batch, Options(custom_masks=masks), packed_custom_mask=buffer[first:])


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
    w = Wrapped(target, kind, batch, 8).plan(Options(custom_masks=masks))
    out, lse = w.run(return_lse=True)
    assert bool((lse[-1] == -torch.inf).all()) and torch.count_nonzero(out[-1]) == 0
    w.check((out, lse))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_masks_of_empty_requests(target, kind):
    # Requests without keys or rows take no bits; the ones behind them must still find theirs.
    batch = make_batch([3, 4, 0, 7], [0, 13, 5, 11], 4, 2, 64, device=target.device)
    masks = batch.random_masks()
    for given in ({"custom_mask": flat(masks)}, {"packed_custom_mask": packed_per_request(masks)}):
        check(target, kind, batch, Options(custom_masks=masks), **given)


def test_paged_mask_where_an_empty_request_has_a_last_page_len(target):
    # (0 - 1) * page + last_page_len must count as no keys, not as a negative number of them.
    w = Wrapped(target, "paged", batch_for("paged", target, (3, 4), (0, 13)), 8)
    w.pages.last_page_len[0] = 5
    w.plan(Options(custom_masks=w.batch.random_masks())).check()


@pytest.mark.parametrize("kind", KINDS)
def test_causal_written_as_a_custom_mask(target, kind):
    batch = batch_for(kind, target)
    lens = zip(batch.qo_lens, batch.kv_lens)
    masks = [torch.ones(n, m, dtype=torch.bool, device=target.device).tril(m - n) for n, m in lens]
    by_mask = run(target, kind, batch, Options(), custom_mask=flat(masks))
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
    check(target, kind, batch, options, **multi_item_arguments(items, target.device))


def check_bits(rule, qo_lens: list[int], kv_lens: list[int], wanted: list[dict]) -> None:
    """The bits of a rule are those of the oracle, for each request by its own arguments."""
    lens = torch.tensor(qo_lens), torch.tensor(kv_lens)
    bits, offsets = mask_packing.mask_of_rule(rule, *lens, 0, torch.device("cpu"))
    for b, (n, m, given) in enumerate(zip(qo_lens, kv_lens, wanted)):
        want = oracle.pack_bits(oracle.visible(n, m, **given), "little")
        assert torch.equal(bits[offsets[b] : offsets[b + 1]], want)


def uints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32).to(torch.uint16)


def test_items_as_bits():
    items = [item_positions(10, [4, 3, 6]), item_positions(5, []), item_positions(0, [2]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    rule = mask_packing.keys_of_items(MultiItem(*multi_item_arguments(items, "cpu").values()))
    check_bits(rule, [kv_lens[0], 0, kv_lens[2], 7], kv_lens, [dict(multi_item=x) for x in items])


def test_rows_behind_their_items_as_bits():
    """They count as delimiters, which see the prefix only, and not as rows of the next request."""
    positions = uints(0, 1, 2, 0, 5, 6, 7, 0)  # four of each request
    items = MultiItem(torch.tensor([3, 2]).to(torch.uint32), positions, 4, uints(2, 7))
    wanted = [oracle.MultiItem(3, (0, 1, 2, 0, 0, 0)), oracle.MultiItem(2, (5, 6, 7, 0))]
    check_bits(mask_packing.keys_of_items(items), [9, 6], [9, 6], [dict(multi_item=x) for x in wanted])


@pytest.mark.parametrize("known", range(9))
def test_positions_that_end_early_as_bits(known):
    """Rows whose positions lie behind the end of the tensor are causal, wherever it ends."""
    places = [0, 1, 2, 0, 5, 6, 7, 0]  # four of each request
    items = MultiItem(torch.tensor(3).to(torch.uint32), uints(*places[:known]), 4, uints(2, 7))
    own = [[places[i] if i < known else i % 4 + 1 for i in range(4 * b, 4 * b + 4)] for b in range(2)]
    rule = mask_packing.keys_of_items(mask_packing.of_requests(items, 2))
    check_bits(rule, [7, 7], [7, 7], [dict(multi_item=oracle.MultiItem(3, tuple(x))) for x in own])


def test_plain_masks_as_bits():
    for rule, causal in ((mask_packing.every_key, False), (mask_packing.keys_before, True)):
        check_bits(rule, [3, 0, 7, 5], [9, 4, 7, 2], [dict(causal=causal)] * 4)


@pytest.mark.runs_nothing("calls are refused before a backend computes")
def test_positions_that_are_too_few_for_their_items(target):
    items = [item_positions(10, [4, 3])]
    needed = len(items[0].token_pos)
    batch = make_batch([3, 0], [10 + needed, 50], 2, 2, 64, device=target.device)  # no row of the second has a position
    w, given = Wrapped(target, "ragged", batch), multi_item_arguments(items * 2, "cpu")
    w.plan(**given | dict(token_pos_in_items_len=needed))
    with pytest.raises(ValueError, match="pad token_pos_in_items"):
        w.plan(**given | dict(token_pos_in_items_len=needed - 1))
    with pytest.raises(ValueError, match="but there are 2 requests"):
        w.plan(**given | dict(prefix_len_ptr=given["prefix_len_ptr"][:1]))


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
    check(target, kind, batch, Options(causal=True, multi_items=items), **given)


@pytest.mark.parametrize("told", [False, True])
def test_items_of_lengths_on_the_device(kernel_backend, told):
    # Their mask has no size that the host knows: lengths are read back, unless it is told them.
    items = [item_positions(10, [4, 3, 6]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    batch = make_batch(kv_lens, kv_lens, 4, 2, 64, device="cuda:0")
    lens = torch.tensor(kv_lens, dtype=torch.int32)
    more = dict(seq_lens=lens, seq_lens_q=lens) if told else {}
    w = Wrapped(Target("cuda:0", kernel_backend), "ragged", batch)
    w.plan(Options(multi_items=items), "cuda:0", **multi_item_arguments(items, "cuda:0"), **more).check(w.run())


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
    w = Wrapped(Target("cuda:0", kernel_backend), "paged", batch)
    plan = (*w.vectors(lengths_on), *w.sizes)
    options = dict(q_data_type=dtype, kv_data_type=dtype, o_data_type=torch.float16, causal=True)
    options |= multi_item_arguments(items, "cuda:0")
    room = [torch.empty(n, dtype=torch.uint8, device="cuda:0") for n in w.wrapper.workspace_size(*plan, **options)]
    w.wrapper.reset_workspace_buffer(*room)
    w.wrapper.plan(*plan, **options)
    w.wrapper.run(batch.q.to(dtype), w.kv[0].nan_to_num().to(dtype), return_lse=True)


@pytest.mark.parametrize("lengths_on", ["cpu", "cuda:0"])
def test_plans_with_masks_do_not_synchronise(kernel_backend, lengths_on):
    items = [item_positions(10, [4, 3, 6]), item_positions(12, [1, 9])]
    kv_lens = [x.prefix_len + len(x.token_pos) for x in items]
    batch = make_batch(kv_lens, kv_lens, 4, 2, 64, device="cuda:0")
    masks = batch.random_masks()
    plain, packed, positions = flat(masks), packed_per_request(masks), multi_item_arguments(items, "cuda:0")
    want, want_items = expect(batch, Options(custom_masks=masks)).out, expect(batch, Options(multi_items=items)).out
    w = Wrapped(Target("cuda:0", kernel_backend), "ragged", batch)
    bounds = w.vectors(lengths_on)
    given = [(dict(custom_mask=plain), want), (dict(packed_custom_mask=packed), want)]
    if lengths_on == "cpu":
        given.append((positions, want_items))
    outs = []
    with no_waiting():
        for kwargs, _ in given:
            w.wrapper.plan(*bounds, *batch.heads, **kwargs)
            outs.append(w.run())
    for out, (_, expected) in zip(outs, given):
        assert_close(out, expected)


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_masks_come_and_go_with_plans(target, kind):
    batch = batch_for(kind, target, (133, 1, 9), (171, 43, 9))
    w = Wrapped(target, kind, batch, 8)
    masked = (Options(custom_masks=batch.random_masks()) for _ in range(3))
    for options in (Options(causal=True), next(masked), Options(), next(masked), next(masked), Options(causal=True)):
        w.plan(options)
        for _ in range(2):
            w.check()


def test_multi_item_replaces_the_custom_mask(target):
    items = [item_positions(10, [4, 3])]
    kv_len = 10 + len(items[0].token_pos)
    batch = make_batch([kv_len], [kv_len], 2, 2, 64, device=target.device)
    given = multi_item_arguments(items, target.device) | {"custom_mask": flat(batch.random_masks(0.2))}
    check(target, "ragged", batch, Options(multi_items=items), **given)


@pytest.mark.parametrize("kind", KINDS)
def test_long_rows_with_a_narrow_window(target, kind):
    # Whole tiles on both sides of the band are invisible.
    batch = batch_for(kind, target, (150, 3, 130), (700, 400, 130))
    check(target, kind, batch, Options(causal=True, window_left=20))


@pytest.mark.parametrize("kind", KINDS)
def test_custom_mask_over_many_tiles(target, kind):
    # Rows of an odd number of bits, so that every row starts at another bit of a byte.
    batch = batch_for(kind, target, (300, 5, 131), (203, 77, 131))
    check(target, kind, batch, Options(window_left=150, custom_masks=batch.random_masks()))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_plan_copies_what_it_gets_on_the_cpu(target, kind):
    w = Wrapped(target, kind, batch_for(kind, target, (6, 5), (9, 5)), 4)
    # Pinned where there is a GPU: copies from such memory are still under way when plan() returns.
    pin = target.device != "cpu"
    bits = torch.cat([oracle.pack_bits(m, "little") for m in w.batch.random_masks()])
    prefix, positions = torch.tensor([3, 2]).to(torch.uint32), uints(*[0, 1, 2, 0, 1, 0, 1, 2, 0, 0] * 2)
    bits, prefix, positions = (x.pin_memory() if pin else x for x in (bits, prefix, positions))
    items = dict(
        prefix_len_ptr=prefix, token_pos_in_items_ptr=positions, token_pos_in_items_len=10, max_item_len_ptr=uints(2, 2)
    )
    for given in (dict(packed_custom_mask=bits), items):
        want = w.plan(**given).run()
        w.plan(**given)
        for x in given.values():
            if isinstance(x, torch.Tensor):
                x.view(torch.uint8).zero_()
        assert torch.equal(w.run(), want)
        assert not torch.equal(w.plan(**given).run(), want)


# --- masks that show a range of keys to every row: kernels compute it without looking at the bits ---

# (rows, keys, ranges that all rows see): none, one that begins or ends inside a word of 32 keys, one of several blocks,
# all, the longer of two, and one over the end of the 8192 keys that are looked at together.
RANGES = [
    (150, 300, []),
    (150, 300, [(0, 64)]),
    (150, 300, [(31, 97)]),
    (150, 511, [(128, 384)]),
    (70, 300, [(0, 300)]),
    (130, 1000, [(40, 200), (300, 901)]),
    (130, 1000, [(64, 640), (700, 1000)]),
    (40, 8500, [(8000, 8450)]),
    (40, 8500, [(0, 8192)]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window_left", [-1, 180])
@pytest.mark.parametrize("shape", RANGES, ids=str)
def test_ranges_that_every_row_sees(target, kind, head_dim, window_left, shape):
    rows, keys, ranges = shape
    if target.device == "cpu" and (head_dim, kind) != (64, "ragged"):
        pytest.skip("the reference looks at every bit: one kind of call and head dimension will do")
    lengths = ((rows,), (keys,)) if kind == "single" else ((7, rows, 0, 1), (33, keys, 5, 40))
    batch = make_batch(*lengths, 4, 2, head_dim, device=target.device)
    masks = batch.random_masks(0.7)
    long = masks[0 if kind == "single" else 1]
    long[:, -20:] = False  # keys that no row sees
    for begin, end in ranges:
        long[:, begin:end] = True
    check(target, kind, batch, Options(window_left=window_left, custom_masks=masks))


@pytest.mark.parametrize("kind", ["ragged", "paged"])
def test_values_that_no_row_sees_beside_a_range_that_all_see(target, kind):
    batch = make_batch((90, 3), (400, 20), 4, 2, 64, device=target.device)
    masks = batch.random_masks(0.7)
    masks[0][:, :256] = True
    masks[0][:, [260, 300, 399]] = False
    batch.v[[260, 300, 399]] = torch.nan
    check(target, kind, batch, Options(custom_masks=masks))
