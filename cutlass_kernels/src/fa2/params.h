// What the fa2 kernel is given.
#pragma once

#include "common/logits.h"
#include "common/mask.h"
#include "cutlass_kernels/params.h"

namespace cutlass_kernels::fa2 {

struct KernelParams {
  AttentionParams attention;
  LogitsTransform transform;
  FastDivisor chunk;
  int group_size;
  int tiles;  // entries of the work list
  // Blocks are numbered by section of query heads, in a section longest tiles first, heads innermost. All
  // sections have section_heads heads but the last, which has last_heads.
  int sections;
  int section_heads;
  int last_heads;
  FastDivisor page_size;
};

}  // namespace cutlass_kernels::fa2
