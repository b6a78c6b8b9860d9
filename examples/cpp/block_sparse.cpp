// Block-sparse attention: each block of query rows sees some blocks of keys. A row block is a request of a paged batch,
// a block of keys is a page. A pattern is then a page list per request.
//
// 512 tokens in blocks of 64, 4 query heads on 2 key heads, float16, under a causal mask. First one pattern for all
// heads, then a pattern per key head. A pattern is planned once, and runs in every layer. The program computes the
// result on the CPU, too, and compares.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cutlass_kernels/attention.h"

namespace ck = cutlass_kernels;

namespace {

constexpr int kTokens = 512;
constexpr int kBlock = 64;  // rows of a row block, and keys of a block of keys
constexpr int kBlocks = kTokens / kBlock;
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kGroup = kHeads / kKvHeads;  // query heads that share a key head
constexpr int kHeadDim = 64;
const float kScale = 1.0f / std::sqrt(float(kHeadDim));

/// Whether row block i sees block j of the keys.
using Pattern = bool (*)(int i, int j);

bool first_and_last_three(int i, int j) { return j == 0 || (i - 2 <= j && j <= i); }
bool every_third(int i, int j) { return j <= i && (i - j) % 3 == 0; }

/// Patterns as lists: row block i of pattern p is request p * kBlocks + i. Block j of the keys is page p * kBlocks + j.
///
/// One pattern: tensors are [kTokens, heads, kHeadDim], and a request has all heads.
///
/// A pattern per key head: tensors are [heads, kTokens, kHeadDim], and a request has the query heads that share the key
/// head. To the library they are a tensor of kGroup heads, in which key head p begins at row p * kGroup * kTokens.
struct Lists {
  int count;                                // of patterns
  std::vector<std::int32_t> qo_indptr;      // [requests + 1]
  std::vector<std::int32_t> kv_indptr;      // [requests + 1], in entries of `pages`
  std::vector<std::int32_t> pages;          // blocks of keys
  std::vector<std::int32_t> block_lengths;  // [requests], all kBlock

  explicit Lists(const std::vector<Pattern>& patterns) : count(int(patterns.size())), kv_indptr{0} {
    for (int p = 0; p < count; ++p) {
      for (int i = 0; i < kBlocks; ++i) {
        for (int j = 0; j < kBlocks; ++j) {  // causal: the block on the diagonal comes last
          if (patterns[p](i, j)) pages.push_back(p * kBlocks + j);
        }
        qo_indptr.push_back(p * kGroup * kTokens + i * kBlock);
        kv_indptr.push_back(std::int32_t(pages.size()));
      }
    }
    qo_indptr.push_back(qo_indptr.back() + kBlock);
    block_lengths.assign(qo_indptr.size() - 1, kBlock);
  }

  /// What make_plan() needs: sizes and strides.
  ck::AttentionParams sizes() const {
    ck::AttentionParams params;
    params.q_dtype = params.kv_dtype = params.o_dtype = ck::DType::kFloat16;
    params.num_qo_heads = kHeads / count;
    params.num_kv_heads = kKvHeads / count;
    params.head_dim_qk = params.head_dim_vo = kHeadDim;
    params.batch_size = count * kBlocks;
    params.total_q = qo_indptr.back();
    params.total_kv = std::int64_t(pages.size()) * kBlock;
    params.max_qo_len = kBlock;
    params.max_kv_len = kTokens;
    params.pages.page_size = kBlock;
    params.pages.num_pages = count * kBlocks;
    params.pages.num_indices = std::int64_t(pages.size());
    if (count == 1) {
      params.q = {nullptr, kHeads * kHeadDim, kHeadDim};
      params.k = {nullptr, kKvHeads * kHeadDim, kHeadDim};
    } else {
      params.q = {nullptr, kHeadDim, kTokens * kHeadDim};
      params.k = {nullptr, kHeadDim, kHeadDim};
    }
    params.v = params.k;
    params.o = {nullptr, params.q.stride_token, params.q.stride_head};
    params.pages.k_stride_page = params.pages.v_stride_page = kBlock * params.k.stride_token;
    params.causal = true;
    params.sm_scale = kScale;
    return params;
  }
};

/// Tensors on the host.
struct Tensors {
  std::vector<Pattern> patterns;
  std::vector<__half> q = random(std::size_t(kTokens) * kHeads * kHeadDim, 1);
  std::vector<__half> k = random(std::size_t(kTokens) * kKvHeads * kHeadDim, 2);
  std::vector<__half> v = random(std::size_t(kTokens) * kKvHeads * kHeadDim, 3);

  static std::vector<__half> random(std::size_t count, unsigned seed) {
    std::vector<__half> numbers(count);
    for (__half& number : numbers) {
      seed = seed * 1664525u + 1013904223u;
      number = __float2half(float(seed >> 8) / (1 << 23) - 1.0f);
    }
    return numbers;
  }

  /// Where the elements of a token and of one of so many heads begin.
  std::size_t at(int token, int head, int heads) const {
    const int row = patterns.size() == 1 ? token * heads + head : head * kTokens + token;
    return std::size_t(row) * kHeadDim;
  }

  /// A row of one head.
  std::vector<double> expected(int row, int head) const {
    const int kv_head = head / kGroup;
    const Pattern sees = patterns.size() == 1 ? patterns[0] : patterns[kv_head];
    const __half* query = &q[at(row, head, kHeads)];
    std::vector<double> sums(kHeadDim, 0.0);
    double denominator = 0.0;
    for (int key = 0; key <= row; ++key) {
      if (!sees(row / kBlock, key / kBlock)) continue;
      const std::size_t columns = at(key, kv_head, kKvHeads);
      double dot = 0.0;
      for (int d = 0; d < kHeadDim; ++d) {
        dot += double(__half2float(query[d])) * __half2float(k[columns + d]);
      }
      const double weight = std::exp(dot * kScale);
      denominator += weight;
      for (int d = 0; d < kHeadDim; ++d) sums[d] += weight * __half2float(v[columns + d]);
    }
    for (double& sum : sums) sum /= denominator;
    return sums;
  }

  double largest_error(const std::vector<__half>& out) const {
    double largest = 0.0;
    for (int row = 0; row < kTokens; ++row) {
      for (int head = 0; head < kHeads; ++head) {
        const std::vector<double> want = expected(row, head);
        for (int d = 0; d < kHeadDim; ++d) {
          const double got = __half2float(out[at(row, head, kHeads) + d]);
          const double error = std::fabs(got - want[d]);
          largest = std::isnan(error) ? INFINITY : std::max(largest, error);
        }
      }
    }
    return largest;
  }
};

/// A copy on the GPU, freed at the end of its scope.
template <class T>
struct OnDevice {
  T* data = nullptr;

  explicit OnDevice(const std::vector<T>& host) {
    const std::size_t bytes = host.size() * sizeof(T);
    if (cudaMalloc(reinterpret_cast<void**>(&data), bytes) != cudaSuccess ||
        cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
      std::printf("The GPU has no memory left.\n");
      std::exit(1);
    }
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data); }
};

/// Two layers. False where they fail, or where the result differs from the CPU's.
bool run(const char* name, const Tensors& host, cudaStream_t stream) {
  const Lists lists(host.patterns);
  ck::AttentionParams params = lists.sizes();
  std::vector<__half> out(host.q.size(), __float2half(NAN));
  const OnDevice<__half> q(host.q), k(host.k), v(host.v), o(out);
  const OnDevice<std::int32_t> qo_indptr(lists.qo_indptr), kv_indptr(lists.kv_indptr);
  const OnDevice<std::int32_t> pages(lists.pages), block_lengths(lists.block_lengths);
  params.q.data = q.data;
  params.k.data = k.data;
  params.v.data = v.data;
  params.o.data = o.data;
  params.qo_indptr = qo_indptr.data;
  params.kv_indptr = kv_indptr.data;
  params.pages.indices = pages.data;
  params.pages.last_page_len = block_lengths.data;
  params.seqused_q = block_lengths.data;  // there may be rows of other heads behind a request

  ck::Plan plan;
  ck::Status status = ck::make_plan(params, &plan);
  const OnDevice<char> workspace(std::vector<char>(plan.workspace_size(), 0x5a));
  if (status.ok()) {
    status = ck::make_schedule(plan, params, workspace.data, plan.workspace_size(), stream);
  }
  for (int layer = 0; layer < 2 && status.ok(); ++layer) {
    status = ck::attention(plan, params, workspace.data, plan.workspace_size(), stream);
  }
  if (!status.ok()) {
    std::printf("%s\n", status.message.c_str());
    return false;
  }
  cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) {
    error = cudaMemcpy(out.data(), o.data, out.size() * sizeof(__half), cudaMemcpyDeviceToHost);
  }
  if (error != cudaSuccess) {
    std::printf("The GPU failed: %s\n", cudaGetErrorString(error));
    return false;
  }
  const double largest = host.largest_error(out);
  std::printf("%s: largest difference from the CPU's result: %.5f\n", name, largest);
  return largest < 2e-3;
}

}  // namespace

int main() {
  const std::vector<Pattern> one = {first_and_last_three};
  const std::vector<Pattern> per_key_head = {first_and_last_three, every_third};
  static_assert(kKvHeads == 2);

  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    ck::Plan plan;
    const ck::Status status = ck::make_plan(Lists(one).sizes(), &plan);
    std::printf("There is no GPU here: %s\n", status.message.c_str());
    return status.ok() ? 1 : 0;
  }

  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess) {
    std::printf("The GPU has no stream left.\n");
    return 1;
  }
  const bool alike = run("One pattern", {one}, stream);
  const bool apart = run("A pattern per key head", {per_key_head}, stream);
  cudaStreamDestroy(stream);
  return alike && apart ? 0 : 1;
}
