// How the keys of a request are split where its results must not depend on the others of its batch: by its own lengths.
//
// Few requests need splits enough to fill the device, many need none, and here both get the same: as many as fill the
// device with one request, unless they would be so short that many requests lose more than 5 to 15 % of their time to
// starting splits and to their partial results.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CK_HOST_DEVICE __host__ __device__
#else
#define CK_HOST_DEVICE
#endif

namespace cutlass_kernels {

struct OwnSplits {
  std::int32_t most = 1;  ///< splits that fill the device with one request; 1: nothing is split
  std::int32_t tile_rows = 0;     ///< a request with more rows has tiles enough, and is not split
  std::int32_t least_keys = 1;    ///< of a split
  std::int32_t keys_per_row = 0;  ///< of a split, at least so many for each row of the request
  std::int32_t most_keys = 0;     ///< that rows of one tile see, whatever the length
  std::int32_t partial_rows = 0;  ///< rows times splits of a request, at most

  /// Splits of a request of so many rows and keys: no fewer than of one with more rows or fewer keys.
  CK_HOST_DEVICE int of(int rows, int keys) const {
    if (rows <= 0 || rows > tile_rows || most <= 1) return 1;
    if (keys > most_keys) keys = most_keys;
    int least = least_keys;
    if (least < rows * keys_per_row) least = rows * keys_per_row;
    int count = keys / least;
    if (count > most) count = most;
    if (count > partial_rows / rows) count = partial_rows / rows;
    return count < 1 ? 1 : count;
  }
};

}  // namespace cutlass_kernels
