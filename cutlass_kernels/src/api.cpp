// The launching half of the C++ API: validate -> choose a kernel -> schedule -> launch.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda_failure.h"
#include "device.h"
#include "mask_extents.h"
#include "merge/merge_pieces.h"
#include "registry.h"
#include "schedule.h"

namespace cutlass_kernels {
namespace {

/// The kernel for the current device, its tile, and how tiles' keys are split.
struct Choice {
  const KernelEntry* entry = nullptr;
  TileShape tile;
  SplitRule rule;
};

TileShape tile_of(const KernelEntry& entry, const AttentionParams& params, int compute_capability) {
  TileShape tile = entry.tile(params, compute_capability);
  tile.persistent = entry.counts_tiles;
  return tile;
}

/// Tiles of a head, at most, or numbers that they have.
std::int64_t tiles(const AttentionParams& params, const TileShape& tile) {
  const int tile_rows = tile.rows;
  if (!needs_list(params)) return tile_numbers(params, tile_rows, tile.persistent);
  if (params.qo_indptr_host == nullptr) {
    return schedule_capacity(params.total_q, params.batch_size, tile_rows);
  }
  std::int64_t count = 0;
  for (int b = 0; b < params.batch_size; ++b) {
    const std::int64_t rows = params.qo_indptr_host[b + 1] - params.qo_indptr_host[b];
    count += (std::max<std::int64_t>(rows, 0) + tile_rows - 1) / tile_rows;
  }
  return std::max<std::int64_t>(count,
                                1);  // a list has an entry, if only one that says there is no tile
}

/// Keys of the longest request, at most.
std::int64_t most_keys(const AttentionParams& params) {
  if (params.max_kv_len > 0) return params.max_kv_len;
  // total_kv of pages is an estimate, which must not decide what becomes of a fixed size.
  const bool estimated = params.pages.page_size > 0;
  if (!estimated || (params.total_kv > 0 && params.fixed_split_size <= 0)) return params.total_kv;
  const PageTable& pages = params.pages;
  const std::int64_t entries = pages.table_stride > 0 ? pages.table_width : pages.num_indices;
  return entries * pages.page_size;
}

/// Keys that a tile sees, at most, by the mask alone.
std::int64_t keys_of_tile(const AttentionParams& params, const TileShape& tile) {
  if (params.window_left >= 0 && params.causal) {
    return std::int64_t(params.window_left) + tile.rows;
  }
  if (params.chunk_size > 0) return std::int64_t(params.chunk_size) + tile.rows;
  return std::numeric_limits<std::int64_t>::max();
}

/// Bounds that hold on any device count this many blocks that run at once.
constexpr int kMostBlocks = 512;

/// Results of pieces take no more, unless fixed_split_size asks for it: the smallest workspace in common use holds them.
constexpr std::size_t kMostPartialBytes = 16 << 20;

/// Whether the last block of a tile merges its pieces, `pieces` of them or about so many. With more rows than it has warps, or
/// many pieces, a kernel of its own, which has a block for each row, is sooner done with it.
bool block_merges(const AttentionParams& params, const TileShape& tile, std::int64_t pieces) {
  constexpr std::int64_t kMostRows = 4, kMostPieces = 64;
  const std::int64_t tokens = (params.total_q + params.batch_size - 1) / params.batch_size;
  return tile.merges && tokens * tile.packed_heads <= kMostRows && pieces <= kMostPieces;
}

/// Counters with which blocks merge the results of so many rows.
std::int64_t merge_counters(const AttentionParams& params, const TileShape& tile,
                            std::int64_t partial_rows) {
  return (partial_rows + 1) / 2 * (params.num_qo_heads / tile.packed_heads);
}

/// Whether most numbers of the tiles of a batch without a list, in order of length, are nobody's.
bool wastes_numbers(const AttentionParams& params, const TileShape& tile) {
  return numbers_by_length(params, tile.rows) > 4 * numbers_in_order(params, tile.rows);
}

/// How the keys of tiles are split; `multiprocessors` 0 stands for any device. Only tiles of packed heads, which serve short
/// queries, are.
SplitRule split_rule(const AttentionParams& params, const TileShape& tile, int multiprocessors) {
  SplitRule rule;
  if (tile.packed_heads == 0 || params.disable_split_kv || params.stats != nullptr) return rule;
  const bool without_list = is_batch(params) && !needs_list(params);
  if (without_list && (!tile.splits_without_list || wastes_numbers(params, tile))) return rule;
  const std::int64_t count =
      without_list ? numbers_by_length(params, tile.rows) : tiles(params, tile);
  if (params.fixed_split_size > 0) {
    const std::int64_t pieces =
        (most_keys(params) + params.fixed_split_size - 1) / params.fixed_split_size;
    rule.fixed = params.fixed_split_size;
    rule.most_pieces = int(std::clamp<std::int64_t>(pieces, 1, 32767));
    if (rule.most_pieces == 1) return rule;
    rule.extra_tiles = count * (rule.most_pieces - 1);
    rule.split_tiles = count;
    rule.partial_rows = params.total_q * rule.most_pieces;
  } else {
    const int blocks = multiprocessors == 0
                           ? kMostBlocks
                           : std::min(multiprocessors * tile.blocks_per_sm, kMostBlocks);
    std::int64_t keys = most_keys(params);  // 0 where the host does not know
    if (without_list) keys = std::min(keys, keys_of_tile(params, tile));
    const std::int64_t rows = std::min<std::int64_t>(tile.rows, params.total_q);
    const std::int64_t room =
        kMostPartialBytes / std::max<std::size_t>(partial_bytes(params, rows), 1);
    rule.wave = blocks / (params.num_qo_heads / tile.packed_heads);
    rule.most_waves = tile.most_waves;
    rule.least_piece = tile.least_piece;
    rule.most_slots = int(std::min<std::int64_t>(rule.most_waves * rule.wave, room));
    rule.most_pieces = rule.most_slots;
    if (keys > 0) {
      rule.most_pieces = int(std::min<std::int64_t>(rule.most_pieces, keys / rule.least_piece));
    }
    if (rule.most_pieces < 2) return SplitRule{};
    rule.extra_tiles = rule.most_slots;
    rule.split_tiles = std::min<std::int64_t>((rule.most_slots + 1) / 2, count);
    rule.partial_rows =
        std::min<std::int64_t>(rule.most_slots * rows, params.total_q * rule.most_pieces);
  }
  // A bound for any device counts them: another device may have fewer pieces, and so merge in blocks.
  const std::int64_t pieces =
      multiprocessors == 0 ? 1 : rule.wave / std::max<std::int64_t>(count, 1);
  if (block_merges(params, tile, pieces)) {
    rule.merge_counters = merge_counters(params, tile, rule.partial_rows);
  }
  return rule;
}

/// Whether runs may have a custom mask. Before a run is known, any option that shares the mask's tiles stands for it.
bool may_be_masked(const AttentionParams& params) {
  return params.mask.words != nullptr || params.alibi.slopes != nullptr ||
         params.logits_scale.data != nullptr || params.output_scale.data != nullptr;
}

std::size_t extents_bytes(std::int64_t capacity) {
  return std::size_t(capacity) * sizeof(MaskExtent);
}

/// Bytes of the header, the list, the split tiles and their counters; rounded up, so that what follows is aligned.
std::size_t list_bytes(std::int64_t capacity, const SplitRule& rule) {
  const std::size_t bytes = sizeof(ScheduleHeader) + std::size_t(capacity) * sizeof(WorkItem) +
                            std::size_t(rule.split_tiles) * sizeof(SplitTile) +
                            std::size_t(rule.merge_counters) * sizeof(std::int32_t);
  return (bytes + 15) / 16 * 16;
}

/// The same of a schedule that has been made.
std::size_t schedule_bytes(const Schedule& schedule) {
  SplitRule rule;
  rule.split_tiles = schedule.split_capacity;
  rule.merge_counters = schedule.num_merge_counters;
  return list_bytes(schedule.capacity, rule);
}

Status choose_here(Backend backend, const AttentionParams& params, Choice* choice) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  std::vector<std::string> reasons;
  choice->entry = choose(backend, params, device.compute_capability, &reasons);
  if (choice->entry != nullptr) {
    choice->tile = tile_of(*choice->entry, params, device.compute_capability);
    choice->rule = split_rule(params, choice->tile, device.multiprocessors);
    return Status::success();
  }
  std::string text;
  for (const std::string& reason : reasons) text += (text.empty() ? "" : " ") + reason;
  return Status::unsupported(std::move(text));
}

/// A block computes one tile of one head at least. Blocks are counted in 32 bits, and running blocks count up to one more
/// each (65536 are more than any device has).
Status check_tiles(const AttentionParams& params, std::int64_t tiles) {
  const std::int64_t blocks = (tiles + 1) * params.num_qo_heads;
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 65536;
  if (blocks <= kMost) return Status::success();
  return Status::invalid("total_q=" + std::to_string(params.total_q) +
                         " with num_qo_heads=" + std::to_string(params.num_qo_heads) + " makes " +
                         std::to_string(blocks) + " tiles, more than the " + std::to_string(kMost) +
                         " of one call: split the batch.");
}

Status too_small(const char* what, const AttentionParams& params, std::size_t needed,
                 std::size_t got) {
  return {StatusCode::kWorkspaceTooSmall,
          std::string(what) + " of " + std::to_string(params.batch_size) +
              " requests with total_q=" + std::to_string(params.total_q) +
              " needs a workspace of " + std::to_string(needed) + " bytes, got " +
              std::to_string(got) + "; workspace_size() tells how many."};
}

Status schedule_for(const Choice& choice, const AttentionParams& params, void* workspace,
                    std::size_t workspace_bytes, cudaStream_t stream, Schedule* schedule,
                    const VectorCopies& copies = {}) {
  const TileShape& tile = choice.tile;
  const SplitRule& rule = choice.rule;
  const std::int64_t capacity = tiles(params, tile) + rule.extra_tiles;
  if (Status status = check_tiles(params, capacity); !status.ok()) return status;
  if (rule.partial_rows > std::numeric_limits<std::int32_t>::max()) {
    return Status::invalid("fixed_split_size=" + std::to_string(params.fixed_split_size) +
                           " splits total_q=" + std::to_string(params.total_q) + " rows into " +
                           std::to_string(rule.partial_rows) + ", too many to count: enlarge it.");
  }
  const std::size_t needed = list_bytes(capacity, rule);
  if (workspace == nullptr || workspace_bytes < needed) {
    return too_small("The schedule", params, needed, workspace == nullptr ? 0 : workspace_bytes);
  }
  auto* header = static_cast<ScheduleHeader*>(workspace);
  auto* list = reinterpret_cast<WorkItem*>(header + 1);
  auto* split_tiles = reinterpret_cast<SplitTile*>(list + capacity);
  auto* counters = reinterpret_cast<std::int32_t*>(split_tiles + rule.split_tiles);
  if (Status status = copy_vectors(copies, stream); !status.ok()) return status;
  Status status = launch_schedule(params, tile.rows, rule, static_cast<std::int32_t>(capacity),
                                  header, list, split_tiles, counters, stream);
  if (!status.ok()) return status;
  *schedule = Schedule{};
  schedule->work_list = list;
  schedule->capacity = static_cast<std::int32_t>(capacity);
  schedule->tile_rows = tile.rows;
  schedule->tile_kind = tile.kind;
  schedule->packed_heads = tile.packed_heads;
  schedule->next_tile = header->next_tile;
  schedule->split_capacity = static_cast<std::int32_t>(rule.split_tiles);
  schedule->split_list = split_tiles;
  schedule->partial_bytes = partial_bytes(params, rule.partial_rows);
  if (rule.merge_counters > 0) {
    schedule->merge_counters = counters;
    schedule->num_merge_counters = static_cast<std::int32_t>(rule.merge_counters);
  }
  return status;
}

/// The memory that a call may use, from where nothing else lies yet; 16-byte aligned.
struct Room {
  char* data;
  std::size_t bytes;

  /// The next `wanted` bytes; null if there are not so many.
  void* take(std::size_t wanted) {
    if (data == nullptr || bytes < wanted) return nullptr;
    void* taken = data;
    const std::size_t step = std::min((wanted + 15) / 16 * 16, bytes);
    data += step;
    bytes -= step;
    return taken;
  }
};

/// Pieces into which the keys of every tile of a single request are split.
int pieces_of_single(const SplitRule& rule, const AttentionParams& params, std::int64_t tiles) {
  return pieces_of(rule, params.total_kv, tiles, tiles * params.total_kv);
}

/// Parts into which the keys of tiles without a list are split: of each, or of all requests of a batch together.
std::int64_t parts_without_list(const SplitRule& rule, const AttentionParams& params,
                                const TileShape& tile) {
  return is_batch(params) ? parts_of_batch(rule, params, tile.rows)
                          : pieces_of_single(rule, params, tiles(params, tile));
}

/// Rows of the results of so many parts; 0 if nothing is split.
std::int64_t partial_rows_without_list(const AttentionParams& params, const TileShape& tile,
                                       std::int64_t parts) {
  if (!is_batch(params)) return parts > 1 ? params.total_q * parts : 0;
  const std::int64_t rows = std::min<std::int64_t>(tile.rows, params.total_q);  // rows_of_piece()
  return parts > params.batch_size ? tiles_of_longest(params, tile.rows) * parts * rows : 0;
}

/// A single request has no list, and some batches have none. Tiles are counted with the caller's counters, or with zeros in the
/// workspace, or dealt out beforehand; keys are split if there is room for the results, or must be where their size is fixed.
Status schedule_without_list(const Choice& choice, const AttentionParams& params, Room* room,
                             cudaStream_t stream, Schedule* schedule) {
  const TileShape& tile = choice.tile;
  const std::int64_t count = tiles(params, tile);
  if (Status status = check_tiles(params, count); !status.ok()) return status;
  *schedule = Schedule{};
  schedule->next_tile = params.schedule.next_tile;
  schedule->tile_rows = tile.rows;
  schedule->tile_kind = tile.kind;
  schedule->packed_heads = tile.packed_heads;
  if (choice.entry->counts_tiles && schedule->next_tile == nullptr) {
    if (void* header = room->take(sizeof(ScheduleHeader)); header != nullptr) {
      const cudaError_t error = cudaMemsetAsync(header, 0, sizeof(ScheduleHeader), stream);
      if (error != cudaSuccess) return cuda_failure("Clearing the tile counters", error);
      schedule->next_tile = static_cast<ScheduleHeader*>(header)->next_tile;
    }
  }
  schedule->capacity = static_cast<std::int32_t>(count);
  const std::int64_t parts = parts_without_list(choice.rule, params, tile);
  const std::int64_t rows = partial_rows_without_list(params, tile, parts);
  if (rows == 0) return Status::success();
  const std::size_t partial = partial_bytes(params, rows);
  const std::size_t got = room->bytes;
  schedule->partial_o = static_cast<float*>(room->take(partial));
  if (schedule->partial_o == nullptr) {
    return choice.rule.fixed > 0 ? too_small("Splitting the keys", params, partial, got)
                                 : Status::success();
  }
  const std::int64_t longest =
      is_batch(params) ? tiles_of_longest(params, tile.rows) : count;  // tiles
  schedule->pieces = static_cast<std::int32_t>(parts);
  schedule->least_piece = tile.least_piece;
  schedule->capacity = static_cast<std::int32_t>(longest * parts);
  schedule->split_capacity = static_cast<std::int32_t>(longest * params.batch_size);
  schedule->partial_bytes = partial;
  if (block_merges(params, tile, parts / params.batch_size) &&
      merge_counters(params, tile, rows) <= params.schedule.num_merge_counters) {
    schedule->merge_counters = params.schedule.merge_counters;
  }
  return Status::success();
}

/// The most that a kernel of `backend` asks for: of the list and of partial results.
std::size_t most_bytes(const AttentionParams& params, Backend backend, bool with_partial) {
  if (!contradiction(params, /*with_tensors=*/false).empty()) return 0;
  std::size_t most = 0;
  for (const KernelEntry& entry : registry()) {
    if (!fits(entry.info, backend, params)) continue;
    // No device is asked: compute capability 0 gives the smallest tiles, the longest list.
    const TileShape tile = tile_of(entry, params, 0);
    const SplitRule rule = split_rule(params, tile, 0);
    const std::int64_t count = tiles(params, tile);
    std::size_t bytes = entry.counts_tiles ? sizeof(ScheduleHeader) : 0;
    std::int64_t rows = rule.partial_rows;
    if (needs_list(params)) {
      bytes = list_bytes(count + rule.extra_tiles, rule);
    } else {
      // Of a batch, no more parts than all devices have room for.
      rows = rule.most_pieces <= 1 ? 0
             : is_batch(params)
                 ? rule.most_slots * std::min<std::int64_t>(tile.rows, params.total_q)
                 : params.total_q * rule.most_pieces;
    }
    if (with_partial) {
      bytes += partial_bytes(params, rows);
      if (entry.uses_extents && may_be_masked(params)) {
        bytes += extents_bytes(count + rule.extra_tiles);
      }
    }
    most = std::max(most, bytes);
  }
  return most;
}

/// Bytes of the results of pieces, and of what masks leave of tiles' keys, on the current device.
std::size_t partial_bytes_of(const Choice& choice, const AttentionParams& params, bool masked) {
  std::int64_t rows = choice.rule.partial_rows;
  if (!needs_list(params)) {
    rows = partial_rows_without_list(params, choice.tile,
                                     parts_without_list(choice.rule, params, choice.tile));
  }
  std::size_t bytes = partial_bytes(params, rows);
  if (choice.entry->uses_extents && masked) {
    bytes += extents_bytes(tiles(params, choice.tile) + choice.rule.extra_tiles);
  }
  return bytes;
}

}  // namespace

std::size_t workspace_size(const AttentionParams& params, Backend backend) {
  return most_bytes(params, backend, /*with_partial=*/true);
}

std::size_t schedule_size(const AttentionParams& params, Backend backend) {
  return most_bytes(params, backend, /*with_partial=*/false);
}

Status partial_size(const AttentionParams& params, Backend backend, std::size_t* bytes) {
  *bytes = 0;
  std::string fault = contradiction(params, /*with_tensors=*/false);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  Choice choice;
  if (Status status = choose_here(backend, params, &choice); !status.ok()) return status;
  *bytes = partial_bytes_of(choice, params, may_be_masked(params));
  return Status::success();
}

Status call_size(const AttentionParams& params, Backend backend, std::size_t* bytes) {
  *bytes = 0;
  std::string fault = contradiction(params, /*with_tensors=*/false);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (params.total_q == 0) return Status::success();
  Choice choice;
  if (Status status = choose_here(backend, params, &choice); !status.ok()) return status;
  *bytes = partial_bytes_of(choice, params, params.mask.words != nullptr);
  if (!needs_list(params)) return Status::success();
  const std::int64_t capacity = tiles(params, choice.tile) + choice.rule.extra_tiles;
  *bytes += list_bytes(capacity, choice.rule);
  return Status::success();
}

bool prefers_list(const AttentionParams& params, Backend backend) {
  Choice choice;
  if (!is_batch(params) || needs_list(params) || params.total_q == 0 ||
      !contradiction(params, /*with_tensors=*/false).empty() ||
      !choose_here(backend, params, &choice).ok()) {
    return false;
  }
  const TileShape& tile = choice.tile;
  const std::int64_t needed = numbers_in_order(params, tile.rows);
  if (params.stats != nullptr) {  // no keys are split: only far more blocks count
    return !choice.entry->counts_tiles && numbers_by_length(params, tile.rows) > 64 * needed;
  }
  const bool wastes = wastes_numbers(params, tile);
  if (wastes && !choice.entry->counts_tiles) return true;
  if (tile.packed_heads == 0 || (!wastes && tile.splits_without_list)) return false;
  // The tile with a list is the same.
  AttentionParams listed = params;
  listed.max_qo_len = 0;
  Device device;
  if (!current_device(&device).ok()) return false;
  const SplitRule rule = split_rule(listed, tile, device.multiprocessors);
  return rule.most_pieces > 1 && slots_for(rule, needed) >= 2 * needed;
}

Status make_schedule(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream, Schedule* schedule, Backend backend) {
  return make_schedule(params, workspace, workspace_bytes, stream, schedule, backend, {});
}

Status make_schedule(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream, Schedule* schedule, Backend backend,
                     const VectorCopies& copies) {
  if (schedule == nullptr)
    return Status::invalid("make_schedule() needs a place for the schedule: got null.");
  std::string fault = contradiction(params, /*with_tensors=*/false);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  *schedule = Schedule{};
  if (!needs_list(params) || params.total_q == 0) return copy_vectors(copies, stream);
  if (params.qo_indptr == nullptr || params.kv_indptr == nullptr) {
    return Status::invalid("A schedule of " + std::to_string(params.batch_size) +
                           " requests needs qo_indptr and kv_indptr.");
  }
  if (params.pages.page_size > 0 && params.pages.table_stride == 0 &&
      params.pages.num_indices > 0 &&
      (params.pages.indices == nullptr || params.pages.last_page_len == nullptr)) {
    return Status::invalid("A schedule of pages needs indices and last_page_len.");
  }
  if (Status status = check_aligned("The workspace", workspace); !status.ok()) return status;
  Choice choice;
  if (Status status = choose_here(backend, params, &choice); !status.ok()) return status;
  return schedule_for(choice, params, workspace, workspace_bytes, stream, schedule, copies);
}

Status attention(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                 cudaStream_t stream, Backend backend) {
  std::string fault = contradiction(params, /*with_tensors=*/true);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (params.total_q == 0) return Status::success();
  if (Status status = check_aligned("The workspace", workspace); !status.ok()) return status;
  if (reinterpret_cast<std::uintptr_t>(params.schedule.next_tile) % 8 != 0) {
    return Status::invalid(
        "schedule.next_tile starts at an address that is no multiple of 8 bytes.");
  }

  Choice choice;
  if (Status status = choose_here(backend, params, &choice); !status.ok()) return status;
  Room room{static_cast<char*>(workspace), workspace == nullptr ? 0 : workspace_bytes};
  // A schedule that the caller made decided the tiles; the kernel refuses those it does not have.
  AttentionParams scheduled = params;
  if (params.mask.words != nullptr) {  // it replaces these
    scheduled.causal = false;
    scheduled.chunk_size = 0;
  }
  if (params.schedule.work_list != nullptr) {
    if (params.schedule.capacity <= 0) {
      return Status::invalid("schedule.capacity=" + std::to_string(params.schedule.capacity) +
                             " must be positive: make_schedule() fills it.");
    }
    // The schedule may lie at the start of this workspace: the kernel reads it while it writes partial results.
    const auto* header = static_cast<const ScheduleHeader*>(params.schedule.work_list) - 1;
    if (header == workspace) room.take(schedule_bytes(params.schedule));
  } else if (needs_list(params)) {
    Status status =
        schedule_for(choice, params, workspace, workspace_bytes, stream, &scheduled.schedule);
    if (!status.ok()) return status;
    room.take(list_bytes(scheduled.schedule.capacity, choice.rule));
  } else {
    Status status = schedule_without_list(choice, params, &room, stream, &scheduled.schedule);
    if (!status.ok()) return status;
  }
  Schedule& schedule = scheduled.schedule;
  if (schedule.split_capacity > 0) {
    if (params.stats != nullptr) {
      return Status::invalid(
          "stats are not merged, but the schedule may split keys: make it with disable_split_kv.");
    }
    if (schedule.partial_o == nullptr) {
      const std::size_t got = room.bytes;
      schedule.partial_o = static_cast<float*>(room.take(schedule.partial_bytes));
      if (schedule.partial_o == nullptr) {
        return too_small("Splitting the keys", params, schedule.partial_bytes, got);
      }
    }
    const std::size_t rows = schedule.partial_bytes / partial_row_bytes(params);
    schedule.partial_max_sum = schedule.partial_o + rows * params.num_qo_heads * params.head_dim_vo;
  }
  if (Status status = check_tiles(params, schedule.capacity); !status.ok()) return status;
  if (params.mask.words != nullptr && choice.entry->uses_extents) {
    // Without room for them all keys are computed.
    void* extents = room.take(extents_bytes(schedule.capacity));
    if (extents != nullptr) {
      Status status = launch_mask_extents(scheduled, static_cast<MaskExtent*>(extents), stream);
      if (!status.ok()) return status;
      schedule.mask_extents = extents;
    }
  }
  Status status = choice.entry->launch(scheduled, stream);
  const bool merges = schedule.split_capacity > 0 && schedule.merge_counters == nullptr;
  return status.ok() && merges ? launch_merge_pieces(scheduled, stream) : status;
}

}  // namespace cutlass_kernels
