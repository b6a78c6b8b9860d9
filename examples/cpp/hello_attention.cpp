// Causal self-attention of one sequence: 1024 tokens, 8 query heads on 2 key heads, float16.
//
// The library takes plain device pointers and strides, allocates nothing and answers with a Status.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdio>
#include <vector>

#include "cutlass_kernels/attention.h"

namespace ck = cutlass_kernels;

int main() {
  constexpr int kTokens = 1024;
  constexpr int kHeads = 8;
  constexpr int kKvHeads = 2;
  constexpr int kHeadDim = 64;

  std::printf("cutlass_kernels %s has %zu kernels.\n", ck::version(), ck::list_kernels().size());

  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("There is no GPU here to run one of them.\n");
    return 0;
  }

  // q [tokens, heads, dim]; k and v [tokens, kv_heads, dim]. Zero queries and keys weigh all
  // visible keys alike, so row i of the output is the mean of the first i + 1 values. Value j is
  // j / tokens.
  std::vector<__half> values(kTokens * kKvHeads * kHeadDim);
  for (int token = 0; token < kTokens; ++token) {
    for (int i = 0; i < kKvHeads * kHeadDim; ++i) {
      values[token * kKvHeads * kHeadDim + i] = __float2half(float(token) / kTokens);
    }
  }
  const std::size_t q_bytes = sizeof(__half) * kTokens * kHeads * kHeadDim;
  const std::size_t kv_bytes = sizeof(__half) * kTokens * kKvHeads * kHeadDim;
  void *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr;
  if (cudaMalloc(&q, q_bytes) != cudaSuccess || cudaMalloc(&k, kv_bytes) != cudaSuccess ||
      cudaMalloc(&v, kv_bytes) != cudaSuccess || cudaMalloc(&o, q_bytes) != cudaSuccess) {
    std::printf("The GPU has no %zu bytes left.\n", 2 * (q_bytes + kv_bytes));
    return 1;
  }
  cudaMemset(q, 0, q_bytes);
  cudaMemset(k, 0, kv_bytes);
  cudaMemcpy(v, values.data(), kv_bytes, cudaMemcpyHostToDevice);

  ck::AttentionParams params;
  params.q_dtype = params.kv_dtype = params.o_dtype = ck::DType::kFloat16;
  params.num_qo_heads = kHeads;
  params.num_kv_heads = kKvHeads;
  params.head_dim_qk = params.head_dim_vo = kHeadDim;
  params.total_q = params.total_kv = kTokens;
  params.q = {q, kHeads * kHeadDim, kHeadDim};  // strides in elements: of a token, of a head
  params.k = {k, kKvHeads * kHeadDim, kHeadDim};
  params.v = {v, kKvHeads * kHeadDim, kHeadDim};
  params.o = {o, kHeads * kHeadDim, kHeadDim};
  params.causal = true;
  params.sm_scale = 1.0f / std::sqrt(float(kHeadDim));

  // A single sequence needs no workspace, so the pointer is null.
  const ck::Status status = ck::attention(params, nullptr, 0, /*stream=*/nullptr);
  if (!status.ok()) {
    std::printf("%s\n", status.message.c_str());
    return 1;
  }

  std::vector<__half> output(kTokens * kHeads * kHeadDim);
  if (const cudaError_t error = cudaMemcpy(output.data(), o, q_bytes, cudaMemcpyDeviceToHost); error != cudaSuccess) {
    std::printf("The GPU failed: %s\n", cudaGetErrorString(error));
    return 1;
  }
  for (int token : {0, 1, 511, 1023}) {
    std::printf("row %4d: %.4f, expected %.4f\n", token, __half2float(output[token * kHeads * kHeadDim]),
                token / 2.0 / kTokens);
  }
  for (void* buffer : {q, k, v, o}) cudaFree(buffer);
  return 0;
}
