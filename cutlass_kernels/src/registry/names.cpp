// Names of the enumerations.
#include "cutlass_kernels/types.h"
#include "registry/backends.h"

namespace cutlass_kernels {

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kFloat8E5M2:
      return "float8_e5m2";
    case DType::kLatentV32:
      return "latent_v32";
    case DType::kLatentV32Nope:
      return "latent_v32_nope";
    case DType::kLatentV4:
      return "latent_v4";
    case DType::kLatentV41ByPage:
      return "latent_v41_by_page";
    case DType::kLatentV41ByToken:
      return "latent_v41_by_token";
  }
  return "unknown dtype";
}

const char* to_string(Backend backend) {
  if (backend == Backend::kAuto) return "auto";
  for (const BackendName& entry : backends()) {
    if (entry.backend == backend) return entry.name;
  }
  return "unknown backend";
}

}  // namespace cutlass_kernels
