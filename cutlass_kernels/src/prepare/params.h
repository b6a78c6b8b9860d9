// What the preparing kernel is given.
#pragma once

#include <cstdint>

#include "common/fast_divisor.h"
#include "cutlass_kernels/prepare.h"
#include "prepare/rotation.h"

namespace cutlass_kernels {

/// A tensor and its copy. A row is a token with all its heads; in pages, one of the page of an entry of the page table.
struct Part {
  const char* from;
  char* to;
  std::int64_t stride_page;  // of `from`, in bytes
  std::int64_t stride_token;
  std::int64_t stride_head;
  const std::int32_t* indices;
  int rows;
  int heads;
  int head_dim;
  DType dtype;
  bool rotated;
  int log2_team;      // threads that copy a row,
  int lanes;          // so many of them a head,
  int heads_at_once;  // so many heads at a time
  unsigned first_block;
};

enum PartIndex { kQ, kK, kV, kParts };

struct PrepareKernelParams {
  Part parts[kParts];
  int batch_size;
  int total_q;
  int total_kv;
  int window_left;
  const std::int32_t* qo_indptr;
  const std::int32_t* kv_indptr;
  PageTable pages;
  FastDivisor page_size;
  std::int32_t* tables;
  std::uint64_t turns[kMaxRotatedDim / 2];
};

}  // namespace cutlass_kernels
