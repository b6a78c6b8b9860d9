// About how long a device takes for a problem with tiles of one shape: what heuristics compare.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/mask.h"
#include "cutlass_kernels/params.h"
#include "device.h"
#include "plan/packing.h"
#include "plan/split.h"
#include "plan/tile_shape.h"

namespace cutlass_kernels {

// What a tile's time depends on. The unit of time is that in which the backend's fastest tile computes one logit.
struct TileSpeed {
  int block_rows;              // of a thread block
  double per_key;              // and row
  int start;                   // keys that take as long as the start and the end of a thread block
  int masked;                  // keys, on average and at most, that a row computes although a causal mask hides them
  double per_partial_row = 0;  // of a head, written and combined where keys are split
  double alone = 1;            // of its time, what a thread block takes that has its SM to itself
};

// If all requests are as long, in waves of equal thread blocks. (In fa2, a last wave of one thread block per SM takes
// as long as of two: 28/4 heads, 8 x 512 rows over 8k, 3.4 waves, as long as 32/8, 3.9.)
inline double estimated_time(const AttentionParams& params, const TileShape& shape, const TileSpeed& speed,
                             const Device& device) {
  // Fewer rows than requests leave some without any.
  const std::int64_t rows = (params.total_q + params.batch_size - 1) / params.batch_size;
  const std::int64_t keys = all_keys(params) / params.batch_size;
  const std::int64_t tiles = (rows + shape.rows - 1) / shape.rows * params.batch_size;
  const SplitRule rule = split_rule(params, shape, TileSource::kList, device);
  const std::int64_t splits = likely_splits(rule, params, tiles);
  const std::int64_t blocks = tiles * (params.num_qo_heads / std::max(shape.packed_heads, 1)) * splits;
  const std::int64_t sms = device.multiprocessors / shape.blocks_per_tile;
  const std::int64_t whole_waves = (blocks - 1) / (sms * shape.blocks_per_sm);
  const std::int64_t last_per_sm = (blocks - whole_waves * sms * shape.blocks_per_sm + sms - 1) / sms;
  double waves = double(whole_waves + 1);
  if (shape.blocks_per_sm > 1) {
    waves -= (1 - speed.alone) * double(shape.blocks_per_sm - last_per_sm) / (shape.blocks_per_sm - 1);
  }
  double computed = double(most_keys_of_row(params, keys));
  if (hides_later_keys(params)) computed += std::min(speed.masked, shape.rows / 2) - rows / 2;
  const double per_key = shape.blocks_per_sm * speed.block_rows * speed.per_key;
  const double partial_rows = splits > 1 ? double(blocks) * speed.block_rows : 0;
  return waves * per_key * (computed / double(splits) + speed.start) + partial_rows * speed.per_partial_row;
}

}  // namespace cutlass_kernels
