#include "fa3/tensor_map.h"
#include "common/element_bytes.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <atomic>

#include "cuda_failure.h"
#include "registry/registry.h"

namespace cutlass_kernels::fa3 {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found through the runtime: linking to libcuda would keep the library from loading on a machine
// without a driver.
cudaError_t find_encode(EncodeTiled* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  *encode = reinterpret_cast<EncodeTiled>(function);
  return cudaSuccess;
}

// The same, looked up once for all devices. A failure is not remembered: the next call looks again.
cudaError_t encode_function(EncodeTiled* encode) {
  static std::atomic<EncodeTiled> found{nullptr};
  *encode = found.load(std::memory_order_relaxed);
  if (*encode != nullptr) return cudaSuccess;
  const cudaError_t error = find_encode(encode);
  if (error == cudaSuccess) found.store(*encode, std::memory_order_relaxed);
  return error;
}

CUtensorMapDataType map_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;  // fp8: bytes are only moved
  }
}

// Encodes a map; boxes are 128 bytes of columns, swizzled, by box_rows by box_depth.
template <int kRank>
Status encode(const char* name, const void* data, DType dtype, const cuuint64_t (&sizes)[kRank],
              const cuuint64_t (&strides)[kRank - 1], int box_rows, CUtensorMap* map, int box_depth = 1) {
  EncodeTiled function = nullptr;
  if (const cudaError_t error = encode_function(&function); error != cudaSuccess) {
    return cuda_failure("Finding cuTensorMapEncodeTiled in the driver", error);
  }
  cuuint32_t box[kRank];
  cuuint32_t steps[kRank];
  std::fill_n(box, kRank, 1);
  std::fill_n(steps, kRank, 1);
  box[0] = cuuint32_t(128 / size_of(dtype));
  box[1] = cuuint32_t(box_rows);
  box[2] = cuuint32_t(box_depth);
  const auto make = [&] {
    return function(map, map_type(dtype), kRank, const_cast<void*>(data), sizes, strides, box, steps,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = make();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // The first CUDA call of this thread: the driver's functions, unlike the runtime's, do not make the device's
    // context its own.
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaSetDevice(device);
    if (error != cudaSuccess) return cuda_failure("Making the GPU's context current", error);
    result = make();
  }
  if (result == CUDA_SUCCESS) return Status::success();
  std::string text = "The driver refuses to describe " + std::string(name) + " to TMA (error " +
                     std::to_string(int(result)) + "); strides in bytes:";
  for (const cuuint64_t stride : strides) text += " " + std::to_string(stride);
  return {StatusCode::kCudaError, text + ". fa2 needs no such description."};
}

// Strides that are never used, along a dimension of size one, may be anything; the encoder wants them in range all
// the same.
cuuint64_t stride_bytes(DType dtype, std::int64_t size, std::int64_t stride) {
  return size > 1 ? size_of(dtype) * stride : 16;
}

}  // namespace

Status make_tensor_map(const char* name, const RowsOfTensor& tensor, DType dtype, int box_rows, CUtensorMap* map) {
  const cuuint64_t token_bytes = stride_bytes(dtype, tensor.tokens, tensor.stride_token);
  const cuuint64_t head_bytes = stride_bytes(dtype, tensor.heads, tensor.stride_head);
  const cuuint64_t sizes[5] = {cuuint64_t(tensor.head_dim), kMapRows, cuuint64_t(tensor.heads),
                               cuuint64_t(tensor.tokens) + 1, cuuint64_t(kMapRows) + 1};
  const cuuint64_t strides[4] = {token_bytes, head_bytes, token_bytes, (cuuint64_t(1) << 34) - token_bytes};
  return encode<5>(name, tensor.data, dtype, sizes, strides, box_rows, map);
}

Status make_packed_tensor_map(const char* name, const RowsOfTensor& tensor, DType dtype, int box_heads, int box_rows,
                              CUtensorMap* map) {
  const cuuint64_t token_bytes = stride_bytes(dtype, tensor.tokens, tensor.stride_token);
  const cuuint64_t head_bytes = stride_bytes(dtype, tensor.heads, tensor.stride_head);
  const cuuint64_t sizes[5] = {cuuint64_t(tensor.head_dim), cuuint64_t(tensor.heads), kMapRows,
                               cuuint64_t(tensor.tokens) + 1, cuuint64_t(kMapRows) + 1};
  const cuuint64_t strides[4] = {head_bytes, token_bytes, token_bytes, (cuuint64_t(1) << 34) - token_bytes};
  return encode<5>(name, tensor.data, dtype, sizes, strides, box_heads, map, box_rows);
}

Status make_output_map(const RowsOfTensor& tensor, DType dtype, int tile_heads, int box_panels, CUtensorMap* map) {
  const int tiles = tensor.heads / tile_heads;
  const int columns = 128 / size_of(dtype);
  const cuuint64_t sizes[5] = {cuuint64_t(columns), cuuint64_t(tile_heads), cuuint64_t(tensor.head_dim / columns),
                               cuuint64_t(tiles), cuuint64_t(std::max<std::int64_t>(tensor.tokens, 1))};
  const cuuint64_t strides[4] = {stride_bytes(dtype, tensor.heads, tensor.stride_head), 128,
                                 stride_bytes(dtype, tiles, tile_heads * tensor.stride_head),
                                 stride_bytes(dtype, tensor.tokens, tensor.stride_token)};
  return encode<5>("out", tensor.data, dtype, sizes, strides, 16 /* rows of a warp */, map, box_panels);
}

Status make_tensor_map(const char* name, const PagesOfTensor& tensor, DType dtype, int box_rows, CUtensorMap* map) {
  const cuuint64_t sizes[4] = {cuuint64_t(tensor.head_dim), cuuint64_t(tensor.page_size), cuuint64_t(tensor.heads),
                               cuuint64_t(tensor.pages)};
  const cuuint64_t strides[3] = {stride_bytes(dtype, tensor.page_size, tensor.stride_slot),
                                 stride_bytes(dtype, tensor.heads, tensor.stride_head),
                                 stride_bytes(dtype, tensor.pages, tensor.stride_page)};
  return encode<4>(name, tensor.data, dtype, sizes, strides, box_rows, map);
}

}  // namespace cutlass_kernels::fa3
