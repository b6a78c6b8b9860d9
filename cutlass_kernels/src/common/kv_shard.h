// How many of the first keys of a request a device holds, where its keys are spread over devices (KvShard).
#pragma once

#include <cstdint>

#include "cutlass_kernels/params.h"
#include "plan/launch_params.h"

namespace cutlass_kernels {

/// Of the first `keys` keys; `rounds` is keys / (world * block), rounded down.
CK_HOST_DEVICE inline std::int32_t keys_held(const KvShard& shard, std::int32_t keys, std::int32_t rounds) {
  const std::int32_t rest = keys - (rounds * shard.world + shard.rank) * shard.block;
  return rounds * shard.block + (rest < 0 ? 0 : rest < shard.block ? rest : shard.block);
}

CK_HOST_DEVICE inline std::int32_t keys_held(const KvShard& shard, std::int32_t keys) {
  const std::uint32_t period = std::uint32_t(shard.world) * std::uint32_t(shard.block);
  return keys_held(shard, keys, std::int32_t(std::uint32_t(keys) / period));
}

}  // namespace cutlass_kernels
