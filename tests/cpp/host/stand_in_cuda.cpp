#include "stand_in_cuda.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <map>
#include <utility>

namespace stand_in {
Device device;
int current_device = 64;
std::vector<Launch> launches;
int launches_until_failure = -1;
bool has_driver = true;
int driver_version = 13000;
bool is_capturing = false;

namespace {

std::map<const void*, std::string>& kernel_names() {
  static std::map<const void*, std::string> names;  // filled before main() begins
  return names;
}

CUresult encode_nothing(...) { return CUDA_SUCCESS; }

cudaError_t record(Launch launch) {
  if (launches_until_failure >= 0 && launches_until_failure-- == 0) return cudaErrorLaunchFailure;
  launches.push_back(std::move(launch));
  return cudaSuccess;
}

}  // namespace
}  // namespace stand_in

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  stand_in::kernel_names()[host] = name;
}
cudaError_t __cudaGetKernel(void**, const void*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, std::size_t, cudaStream_t) {
  return cudaErrorNotSupported;  // <<<>>> is not used: launches go through cudaLaunchKernelEx()
}
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, std::size_t*, void*) { return cudaErrorNotSupported; }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  stand_in::Launch launch;
  launch.kernel = stand_in::kernel_names()[kernel];
  launch.blocks = config->gridDim.x;
  const char* first = static_cast<const char*>(arguments[0]);
  launch.params.assign(first, first + stand_in::Launch::kParamBytes);
  return stand_in::record(std::move(launch));
}

cudaError_t cudaMemsetAsync(void* destination, int, std::size_t bytes, cudaStream_t) {
  stand_in::Launch launch;
  launch.kernel = "memset";
  launch.destination = destination;
  launch.bytes = bytes;
  return stand_in::record(std::move(launch));
}

cudaError_t cudaMemcpyAsync(void* destination, const void*, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
  stand_in::Launch launch;
  launch.kernel = "memcpy";
  launch.destination = destination;
  launch.bytes = bytes;
  return stand_in::record(std::move(launch));
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaSetDevice(int index) {
  stand_in::current_device = index;
  return cudaSuccess;
}

// As of CUDA 13; the library calls it with three arguments.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, std::size_t*) {
  *status = stand_in::is_capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = stand_in::is_capturing ? 1 : 0;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = stand_in::driver_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* index) {
  *index = stand_in::current_device;
  return stand_in::driver_version < 13000 ? cudaErrorInsufficientDriver : cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = stand_in::device.compute_capability / 10;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = stand_in::device.compute_capability % 10;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = stand_in::device.multiprocessors;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = stand_in::device.shared_memory_per_block;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = stand_in::device.l2_bytes;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned int, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = stand_in::has_driver ? reinterpret_cast<void*>(&stand_in::encode_nothing) : nullptr;
  if (result != nullptr) {
    *result = stand_in::has_driver ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t) { return "an error of the stand-in"; }
const char* cudaGetErrorString(cudaError_t) { return "no GPU"; }

}  // extern "C"
