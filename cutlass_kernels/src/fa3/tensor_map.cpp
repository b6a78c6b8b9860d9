#include "fa3/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda_failure.h"

namespace cutlass_kernels::fa3 {
namespace {

// The driver's function, found through the runtime: linking to libcuda would keep the library from loading on a machine
// without a driver.
cudaError_t find_encode(decltype(&cuTensorMapEncodeTiled)* encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                             12000, cudaEnableDefault, &found);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess) return error;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  *encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  return cudaSuccess;
}

}  // namespace

Status make_tensor_map(const char* name, const RowsOfTensor& tensor, DType dtype, int box_rows,
                       CUtensorMap* map) {
  struct Encode {
    decltype(&cuTensorMapEncodeTiled) function = nullptr;
    cudaError_t error;
    Encode() : error(find_encode(&function)) {}
  };
  static const Encode encode;  // the same for every device
  if (encode.error != cudaSuccess) {
    return cuda_failure("Finding cuTensorMapEncodeTiled in the driver", encode.error);
  }

  // Strides that are never used (of one token or head) may be anything; the encoder wants them in range all the same.
  const cuuint64_t token_bytes = tensor.tokens > 1 ? 2 * tensor.stride_token : 16;
  const cuuint64_t head_bytes = tensor.heads > 1 ? 2 * tensor.stride_head : 16;
  const cuuint64_t sizes[5] = {cuuint64_t(tensor.head_dim), kMapRows, cuuint64_t(tensor.heads),
                               cuuint64_t(tensor.tokens) + 1, cuuint64_t(kMapRows) + 1};
  const cuuint64_t strides[4] = {token_bytes, head_bytes, token_bytes,
                                 (cuuint64_t(1) << 34) - token_bytes};
  const cuuint32_t box[5] = {64, cuuint32_t(box_rows), 1, 1, 1};
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode.function(
      map,
      dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      5, const_cast<void*>(tensor.data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return Status::success();
  return {StatusCode::kCudaError, std::string("The driver refuses to describe ") + name +
                                      " to TMA (error " + std::to_string(int(result)) +
                                      "): stride_token=" + std::to_string(tensor.stride_token) +
                                      ", stride_head=" + std::to_string(tensor.stride_head) +
                                      "; fa2 needs no such description."};
}

}  // namespace cutlass_kernels::fa3
