// The result of every call that can fail: a code and one sentence. No exception leaves the library.
#pragma once

#include <string>
#include <utility>

namespace cutlass_kernels {

enum class StatusCode {
  kOk,
  kInvalidArgument,    ///< the request contradicts itself or the documentation
  kUnsupported,        ///< a valid request that no compiled kernel serves on this device
  kWorkspaceTooSmall,  ///< the sentence says how many bytes are needed
  kCudaError,          ///< the CUDA runtime refused; the sentence quotes it
};

struct [[nodiscard]] Status {
  StatusCode code = StatusCode::kOk;
  std::string message;

  bool ok() const { return code == StatusCode::kOk; }

  static Status success() { return {}; }
  static Status invalid(std::string text) { return {StatusCode::kInvalidArgument, std::move(text)}; }
  static Status unsupported(std::string text) { return {StatusCode::kUnsupported, std::move(text)}; }
};

}  // namespace cutlass_kernels
