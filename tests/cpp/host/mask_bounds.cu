// Bounds of masks beside the same in 64 bits: windows, chunks and lengths may be as large as their type.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "checks.h"
#include "common/mask.h"
#include "plan_checks.h"
#include "random.h"

namespace {

constexpr int kMost = std::numeric_limits<std::int32_t>::max();

int any_number(Random& random, int least) {
  switch (random.in(0, 3)) {
    case 0:
      return kMost - random.in(0, 9000);
    case 1:
      return random.log_in(1, kMost - 1);
    default:
      return random.in(least, 40);
  }
}

struct Bounds {
  std::int64_t begin, end;
};

Bounds exact(const ck::IntervalMask& mask, std::int64_t row) {
  const std::int64_t position = row + mask.offset, chunk = mask.chunk_size;
  Bounds keys{0, mask.total};
  if (mask.window_left >= 0) keys.begin = std::max(keys.begin, position - mask.window_left);
  if (mask.window_right >= 0) keys.end = std::min(keys.end, position + mask.window_right + 1);
  if (chunk > 0) {
    const std::int64_t first = position < 0 ? 0 : position / chunk * chunk;
    keys.begin = std::max(keys.begin, first);
    keys.end = std::min(keys.end, position < 0 ? 0 : first + chunk);
  }
  keys.end = std::max<std::int64_t>(keys.end, 0);
  return keys;
}

}  // namespace

void check_mask_bounds() {
  Random random(5);
  for (int i = 0; i < 100000; ++i) {
    const int keys = any_number(random, 1), rows = random.log_in(1, 5000);
    const int chunk = random.in(0, 1) == 0 ? any_number(random, 1) : 0;
    const int right = any_number(random, -1);
    const ck::IntervalMask mask{keys,
                                keys,
                                keys - rows,
                                right == 0 || chunk > 0,
                                any_number(random, -1),
                                chunk,
                                ck::FastDivisor(std::uint32_t(chunk)),
                                right};
    const int row = random.in(0, rows - 1);
    const Bounds want = exact(mask, row);
    require(mask.begin_of_all(row) == want.begin && mask.end_of_all<true>(row) == want.end,
            "a row sees other keys: row " + std::to_string(row) + " of " + std::to_string(rows) + ", " +
                std::to_string(keys) + " keys, chunks of " + std::to_string(chunk) + ", window (" +
                std::to_string(mask.window_left) + ", " + std::to_string(right) + ")");
  }
}
