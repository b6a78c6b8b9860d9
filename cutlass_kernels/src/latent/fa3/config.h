// The tile of multi-head latent attention: 64 rows, of tokens and heads, against KV blocks of 64 keys.
#pragma once

#include "fa3/config.h"
#include "latent/dims.h"
#include "merge/combine_splits.h"
#include "schedule/even_shares.h"

namespace cutlass_kernels::mla {

// What fa3 asks of a tile (fa3/config.h).
struct Tile {
  static constexpr int kHeadDimQk = kLatentDim + kRopeDim;
  static constexpr int kHeadDimVo = kLatentDim;
  static constexpr int kConsumers =
      1;  // of rows: two warpgroups have half of the columns of O each
  static constexpr int kBlockM = fa3::kWarpgroupRows;
  static constexpr int kBlockN = 64;
  static constexpr int kStages = 2;
  static constexpr int kCtasPerSm = 1;
  static constexpr int kCtasPerTile = 1;
  static constexpr int kThreads = 3 * 128;
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = 232;
  static constexpr bool kPacked = true;
  static constexpr bool kSharesKeys = true;  // with the tiles of other heads, and of other tokens
  static constexpr bool kShares = true;
  static_assert(kBlockN == EvenShares::kBlockKeys);
  static_assert(kHeadDimVo <= kMostCombinedColumns);
};

}  // namespace cutlass_kernels::mla
