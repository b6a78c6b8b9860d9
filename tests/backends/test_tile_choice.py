"""The tile of a problem follows from its sizes and from the number of SMs of the device."""

from __future__ import annotations

import pytest

# H20, A100, H100 PCIe, H100 and H200, a device that does not exist yet
SMS = [78, 108, 114, 132, 160]


def tile_rows(head_dim: int, total_q: int, heads: int, multiprocessors: int) -> int:
    from cutlass_kernels import _C

    built = {(kernel["backend"], kernel["q_dtype"], kernel["head_dim_qk"]) for kernel in _C.list_kernels()}
    if ("fa3", "bfloat16", head_dim) not in built:
        pytest.skip(f"fa3 is built without head dimension {head_dim}")
    return _C.tile_rows("fa3", "bfloat16", heads, heads, head_dim, head_dim, 1, total_q, 90, multiprocessors)


@pytest.mark.parametrize("multiprocessors", SMS)
def test_one_warpgroup_tiles_up_to_half_as_many_large_tiles_as_sms(extension, multiprocessors):
    """hd128: tiles of 64 rows where tiles of 128 rows would leave more than half of the SMs idle."""
    half = multiprocessors // 2
    assert tile_rows(128, 128 * half, 1, multiprocessors) == 64
    assert tile_rows(128, 128 * (half + 1), 1, multiprocessors) == 128


@pytest.mark.parametrize("head_dim,small", [(64, 64), (96, 128)])
@pytest.mark.parametrize("multiprocessors", SMS)
def test_small_tiles_with_fewer_large_tiles_than_sms(extension, multiprocessors, head_dim, small):
    """hd64: three CTAs of 64 rows per SM, hd96: 128 rows, where tiles of 192 rows would not give every SM one."""
    assert tile_rows(head_dim, 192 * (multiprocessors - 1), 1, multiprocessors) == small
    assert tile_rows(head_dim, 192 * multiprocessors, 1, multiprocessors) == 192


def test_tiles_of_132_sms_are_those_that_were_measured(extension):
    """The thresholds of H100 and H200, with which benchmarks/results was measured: 67 tiles at hd128, 132 at hd64."""
    assert [tile_rows(128, 128 * tiles, 1, 132) for tiles in (66, 67)] == [64, 128]
    assert [tile_rows(64, 192 * tiles, 1, 132) for tiles in (131, 132)] == [64, 192]
