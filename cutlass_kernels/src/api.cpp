// The launching half of the C++ API: validate -> choose a kernel -> schedule -> launch.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda_failure.h"
#include "device.h"
#include "registry.h"
#include "schedule.h"

namespace cutlass_kernels {
namespace {

/// The kernel for the current device, and the query rows of its tiles.
struct Choice {
  const KernelEntry* entry = nullptr;
  int tile_rows = 0;
};

Status choose_here(Backend backend, const AttentionParams& params, Choice* choice) {
  Device device;
  if (Status status = current_device(&device); !status.ok()) return status;
  std::vector<std::string> reasons;
  choice->entry = choose(backend, params, device.compute_capability, &reasons);
  if (choice->entry != nullptr) {
    choice->tile_rows = choice->entry->tile_rows(params, device.compute_capability);
    return Status::success();
  }
  std::string text;
  for (const std::string& reason : reasons) text += (text.empty() ? "" : " ") + reason;
  return Status::unsupported(std::move(text));
}

std::int64_t tiles(const AttentionParams& params, int tile_rows) {
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

/// A single request without offsets needs no list: its tiles follow from total_q and total_kv.
bool needs_list(const AttentionParams& params) {
  return params.batch_size > 1 || params.qo_indptr != nullptr;
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

Status check_aligned(const void* workspace) {
  if (reinterpret_cast<std::uintptr_t>(workspace) % 16 == 0) return Status::success();
  return Status::invalid("The workspace must be 16-byte aligned.");
}

Status schedule_for(int tile_rows, const AttentionParams& params, void* workspace,
                    std::size_t workspace_bytes, cudaStream_t stream, Schedule* schedule) {
  const std::int64_t capacity = tiles(params, tile_rows);
  if (Status status = check_tiles(params, capacity); !status.ok()) return status;
  const std::size_t needed = kCounterBytes + static_cast<std::size_t>(capacity) * sizeof(WorkItem);
  if (workspace == nullptr || workspace_bytes < needed) {
    return {StatusCode::kWorkspaceTooSmall,
            "The schedule of " + std::to_string(params.batch_size) + " requests with total_q=" +
                std::to_string(params.total_q) + " needs a workspace of " + std::to_string(needed) +
                " bytes, got " + std::to_string(workspace == nullptr ? 0 : workspace_bytes) +
                "; workspace_size() tells how many."};
  }
  if (Status status = check_aligned(workspace); !status.ok()) return status;
  auto* counters = static_cast<std::int32_t*>(workspace);
  auto* list = reinterpret_cast<WorkItem*>(static_cast<char*>(workspace) + kCounterBytes);
  Status status = launch_schedule(params.qo_indptr, params.kv_indptr, params.batch_size,
                                  params.total_q, tile_rows, static_cast<std::int32_t>(capacity),
                                  list, stream, counters, params.pages);
  if (status.ok()) *schedule = {list, static_cast<std::int32_t>(capacity), tile_rows, counters};
  return status;
}

/// A single request has no list: the caller's counters, or zeros in the workspace, or none.
Status schedule_single(const Choice& choice, const AttentionParams& params, void* workspace,
                       std::size_t workspace_bytes, cudaStream_t stream, Schedule* schedule) {
  const std::int64_t count = (params.total_q + choice.tile_rows - 1) / choice.tile_rows;
  std::int32_t* counters = params.schedule.next_tile;
  if (choice.entry->counts_tiles && counters == nullptr && workspace != nullptr &&
      workspace_bytes >= kCounterBytes) {
    if (Status status = check_aligned(workspace); !status.ok()) return status;
    const cudaError_t error = cudaMemsetAsync(workspace, 0, kCounterBytes, stream);
    if (error != cudaSuccess) return cuda_failure("Clearing the tile counters", error);
    counters = static_cast<std::int32_t*>(workspace);
  }
  *schedule = {nullptr, static_cast<std::int32_t>(count), choice.tile_rows, counters};
  return Status::success();
}

}  // namespace

std::size_t workspace_size(const AttentionParams& params, Backend backend) {
  if (!contradiction(params, /*with_tensors=*/false).empty()) return 0;
  std::int64_t capacity = 0;
  bool counters = false;
  for (const KernelEntry& entry : registry()) {
    if (!fits(entry.info, backend, params)) continue;
    counters |= needs_list(params) || entry.counts_tiles;
    // No device is asked: compute capability 0 gives the smallest tiles, the longest list.
    if (needs_list(params)) {
      capacity = std::max(capacity, tiles(params, entry.tile_rows(params, 0)));
    }
  }
  return (counters ? kCounterBytes : 0) + static_cast<std::size_t>(capacity) * sizeof(WorkItem);
}

Status make_schedule(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                     cudaStream_t stream, Schedule* schedule, Backend backend) {
  if (schedule == nullptr)
    return Status::invalid("make_schedule() needs a place for the schedule: got null.");
  std::string fault = contradiction(params, /*with_tensors=*/false);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  *schedule = Schedule{};
  if (!needs_list(params) || params.total_q == 0) return Status::success();
  if (params.qo_indptr == nullptr || params.kv_indptr == nullptr) {
    return Status::invalid("A schedule of " + std::to_string(params.batch_size) +
                           " requests needs qo_indptr and kv_indptr.");
  }
  Choice choice;
  if (Status status = choose_here(backend, params, &choice); !status.ok()) return status;
  return schedule_for(choice.tile_rows, params, workspace, workspace_bytes, stream, schedule);
}

Status attention(const AttentionParams& params, void* workspace, std::size_t workspace_bytes,
                 cudaStream_t stream, Backend backend) {
  std::string fault = contradiction(params, /*with_tensors=*/true);
  if (!fault.empty()) return Status::invalid(std::move(fault));
  if (params.total_q == 0) return Status::success();

  Choice choice;
  if (Status status = choose_here(backend, params, &choice); !status.ok()) return status;
  // A schedule that the caller made decided the tiles; the kernel refuses those it does not have.
  AttentionParams scheduled = params;
  if (params.schedule.work_list != nullptr) {
    if (params.schedule.capacity <= 0) {
      return Status::invalid("schedule.capacity=" + std::to_string(params.schedule.capacity) +
                             " must be positive: make_schedule() fills it.");
    }
  } else if (needs_list(params)) {
    Status status = schedule_for(choice.tile_rows, params, workspace, workspace_bytes, stream,
                                 &scheduled.schedule);
    if (!status.ok()) return status;
  } else {
    Status status =
        schedule_single(choice, params, workspace, workspace_bytes, stream, &scheduled.schedule);
    if (!status.ok()) return status;
  }
  if (Status status = check_tiles(params, scheduled.schedule.capacity); !status.ok()) return status;
  return choice.entry->launch(scheduled, stream);
}

}  // namespace cutlass_kernels
