// How the keys of a request are split where its results must not depend on the others of its batch: by its own lengths.
//
// Few requests need splits enough to fill the device, many need none, and here both get the same: as many as fill the
// device with one request, unless they would be so short that many requests lose too much time to starting splits and
// to their partial results: 5 to 15 % in decodes, 40 % in appends of 64 rows.
#pragma once

#include <cstdint>
#include <tuple>

#ifdef __CUDACC__
#define CK_HOST_DEVICE __host__ __device__
#else
#define CK_HOST_DEVICE
#endif

namespace cutlass_kernels {

struct OwnSplits {
  std::int32_t most = 1;          ///< splits that fill the device with one tile; 1: nothing is split
  std::int32_t tile_rows = 1;     ///< TileShape::rows
  std::int32_t most_rows = 0;     ///< a request with more rows is not split
  std::int32_t least_keys = 1;    ///< of a split
  std::int32_t keys_per_row = 0;  ///< of a split, at least so many for each row of the tile
  std::int32_t most_keys = 0;     ///< that rows of one tile see, whatever the length
  std::int32_t partial_rows = 0;  ///< rows times splits of a request, at most

  CK_HOST_DEVICE int tiles(int rows) const {
    return rows <= tile_rows ? 1 : int(unsigned(rows - 1) / unsigned(tile_rows)) + 1;
  }

  /// Splits of each tile of a request of so many rows and keys: no fewer than of one with more rows or fewer keys.
  CK_HOST_DEVICE int of(int rows, int keys) const {
    if (rows <= 0 || rows > most_rows || most <= 1) return 1;
    if (keys > most_keys) keys = most_keys;
    const int own_rows = rows < tile_rows ? rows : tile_rows;
    int least = least_keys;
    if (least < own_rows * keys_per_row) least = own_rows * keys_per_row;
    int count = keys / least;
    if (count > most / tiles(rows)) count = most / tiles(rows);
    if (count > partial_rows / rows) count = partial_rows / rows;
    return count < 1 ? 1 : count;
  }

  bool operator==(const OwnSplits& other) const {
    const auto all = [](const OwnSplits& own) {
      return std::tie(own.most, own.tile_rows, own.most_rows, own.least_keys, own.keys_per_row, own.most_keys,
                      own.partial_rows);
    };
    return all(*this) == all(other);
  }
};

}  // namespace cutlass_kernels
