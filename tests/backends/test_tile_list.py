"""The order of work: every tile of every request once, longest first."""

from __future__ import annotations

import pytest
from problems import indptr


@pytest.mark.parametrize("tile_rows", [1, 16, 64, 128])
@pytest.mark.parametrize(
    "qo_lens,kv_lens",
    [
        ([], []),
        ([0], [5]),
        ([1], [0]),
        ([64], [64]),
        ([65, 0, 1, 300], [65, 7, 1000, 300]),
        ([100, 3], [20, 2]),
        ([1] * 50, list(range(50))),
    ],
)
def test_every_tile_once_longest_first(extension, qo_lens, kv_lens, tile_rows):
    from cutlass_kernels import _C

    tiles = _C.schedule_on_host(indptr(qo_lens).tolist(), indptr(kv_lens).tolist(), tile_rows)
    wanted = [(b, t) for b, rows in enumerate(qo_lens) for t in range(-(-rows // tile_rows))]
    assert sorted(tiles) == wanted

    def keys_of_the_last_row(item: tuple[int, int]) -> int:
        b, tile = item
        last = min((tile + 1) * tile_rows, qo_lens[b]) - 1
        return max(last + kv_lens[b] - qo_lens[b] + 1, 0)

    costs = [keys_of_the_last_row(item) for item in tiles]
    assert costs == sorted(costs, reverse=True)
