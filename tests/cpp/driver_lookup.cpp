// fa3/tensor_map.cpp with a stand-in of the CUDA runtime, whose look-up of the driver's function fails twice: once as a
// call, once for the symbol. The driver's function fails once, too: in a thread without a context, as the first CUDA
// call of one is.
#include <cuda_runtime_api.h>

#include <cstdio>

#include "cuda_failure.h"
#include "fa3/tensor_map.h"

namespace {

int lookups = 0;
int maps = 0;
bool has_context = false;

CUresult encode(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                CUtensorMapFloatOOBfill) {
  if (!has_context) return CUDA_ERROR_INVALID_CONTEXT;
  ++maps;
  return CUDA_SUCCESS;
}

cudaError_t find(void** function, cudaDriverEntryPointQueryResult* found) {
  ++lookups;
  *found = lookups == 2 ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  *function = lookups > 2 ? reinterpret_cast<void*>(&encode) : nullptr;
  return lookups == 1 ? cudaErrorInitializationError : cudaSuccess;
}

}  // namespace

extern "C" {
#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  return find(function, found);
}
#else
cudaError_t cudaGetDriverEntryPoint(const char*, void** function, unsigned long long,
                                    cudaDriverEntryPointQueryResult* found) {
  return find(function, found);
}
#endif
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) {
  has_context = true;
  return cudaSuccess;
}
}

namespace cutlass_kernels {
Status cuda_failure(const char* what, cudaError_t) { return {StatusCode::kCudaError, what}; }
}  // namespace cutlass_kernels

int main() {
  using namespace cutlass_kernels;
  const fa3::RowsOfTensor rows{&lookups, 128, 64, 5, 2, 64};
  const fa3::PagesOfTensor pages{&lookups, 128, 64, 1024, 8, 2, 3, 64};
  CUtensorMap map;
  for (int call = 1; call <= 6; ++call) {
    const Status status = call % 2 == 1 ? fa3::make_tensor_map("q", rows, DType::kFloat16, 64, &map)
                                        : fa3::make_tensor_map("k", pages, DType::kFloat16, 8, &map);
    const bool refused =
        status.code == StatusCode::kCudaError && status.message.find("cuTensorMapEncodeTiled") != std::string::npos;
    if (call <= 2 ? !refused : !status.ok()) {
      std::printf("Call %d: '%s'\n", call, status.message.c_str());
      return 1;
    }
  }
  std::printf("%d look-ups, %d maps\n", lookups, maps);
  return 0;
}
