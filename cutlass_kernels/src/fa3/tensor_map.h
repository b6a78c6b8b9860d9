// Tensor maps: how TMA sees a [tokens, heads, dim] tensor whose requests lie one after the other.
//
// A request's rows must end at its last one: TMA fills what lies outside a map with zeros on load (a neighbour's V
// may be infinite, and 0 * inf is not 0) and leaves it alone on store. A map per request would need the lengths on
// the host, so the end of the request is a coordinate:
//
//   coordinates (d, row, head, end, wrap), sizes (dim, R, heads, tokens + 1, R + 1), R = 2^30,
//   strides (1, token, head, token, 2^34 bytes - token)
//
// Row i of a request of n rows that ends before token `end` has row = R - n + i, so that the row after its last, R,
// is out of bounds, and wrap = R, which takes R tokens off again: R * (2^34 - token) = -R * token modulo 2^64. The
// address is data + (end - n + i) * token. (Shifting the map's base address by -R tokens instead is illegal: TMA
// touches it.)
#pragma once

#include <cuda.h>

#include <cstdint>
#include <string>

#include "cutlass_kernels/params.h"
#include "cutlass_kernels/status.h"

namespace cutlass_kernels::fa3 {

struct RowsOfTensor {
  const void* data;
  std::int64_t stride_token;  // elements
  std::int64_t stride_head;
  std::int64_t tokens;
  int heads;
  int head_dim;
};

constexpr int kMapRows = 1 << 30;  // R: no request may be longer

/// A map of boxes of 128 bytes (64 columns of 16 bits, 128 of fp8), swizzled, by `box_rows` rows.
Status make_tensor_map(const char* name, const RowsOfTensor& tensor, DType dtype, int box_rows, CUtensorMap* map);

/// The same with rows and heads exchanged, coordinates (d, head, row, end, wrap), and boxes of `box_heads` heads by
/// `box_rows` rows: rows of packed heads.
Status make_packed_tensor_map(const char* name, const RowsOfTensor& tensor, DType dtype, int box_heads, int box_rows,
                              CUtensorMap* map);

/// The output of packed heads, a token to a tile: coordinates (d, head of the tile, panel of 64 columns, tile, token),
/// and boxes of 16 heads, a warp's rows, by `box_panels` panels.
Status make_output_map(const RowsOfTensor& tensor, DType dtype, int tile_heads, int box_panels, CUtensorMap* map);

/// A cache of pages: coordinates (d, slot, head, page). A page outside the cache reads as zeros.
struct PagesOfTensor {
  const void* data;
  std::int64_t stride_slot;  // elements
  std::int64_t stride_head;
  std::int64_t stride_page;
  int page_size;
  int heads;
  std::int64_t pages;
  int head_dim;
};

/// As above; box_rows divides the page size.
Status make_tensor_map(const char* name, const PagesOfTensor& tensor, DType dtype, int box_rows, CUtensorMap* map);

// ---- Problems that fa3 does not serve although the contract allows them: TMA addresses tensors through tensor maps,
// whose strides and sizes have limits.

/// Why no tensor map can describe a tensor of `params`; empty if maps can. A tensor that is not known yet (null,
/// strides of 0) is not judged.
std::string refusal(const AttentionParams& params);

/// The same, calling params.q and params.k by other names.
std::string refusal(const AttentionParams& params, const char* q_name, const char* k_name);

/// The same for e4m3 tensors, whose kernels read pages through maps alone.
std::string fp8_refusal(const AttentionParams& params);

}  // namespace cutlass_kernels::fa3
