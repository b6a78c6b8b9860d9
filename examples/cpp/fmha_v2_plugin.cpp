// Attention as a TensorRT plugin calls it: a class that is told sizes once, and pointers at every enqueue().
//
// A batch of three requests, 8 query heads on 2 key heads, float16, keys and values in pages of 16 tokens. Lengths and
// block tables stay on the GPU, where the kernel reads them, and so the same enqueue() can be captured into a CUDA
// graph and replayed with other lengths. The program computes the result on the CPU, too, and compares.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "cutlass_kernels/fmha_v2.h"

namespace ck = cutlass_kernels;

namespace {

constexpr int kHeads = 8;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kPageSize = 16;
constexpr int kMaxPages = 8;  // columns of the block table
constexpr int kWindowLeft = 40;

/// What a plugin keeps between calls. Nothing here is allocated on the GPU.
class PagedAttention {
 public:
  enum Input { kQ, kPool, kBlockTables, kCumSeqLensQ, kCumSeqLensKv, kSinks, kInputs };

  PagedAttention(int batch_size, int total_q, int max_q_len, int max_kv_len, int num_pages) {
    params_.layout = ck::FmhaV2Layout::kQPagedKvNhd;
    params_.dtype = params_.o_dtype = ck::DType::kFloat16;
    params_.batch_size = batch_size;
    params_.num_qo_heads = kHeads;
    params_.num_kv_heads = kKvHeads;
    params_.head_dim = kHeadDim;
    params_.total_q = total_q;
    params_.max_q_len = max_q_len;
    params_.max_kv_len = max_kv_len;
    params_.max_pages = kMaxPages;
    params_.page_size = kPageSize;
    params_.num_pages = num_pages;
    params_.mask_mode = ck::FmhaV2Mask::kSlidingWindow;
    params_.window_left = kWindowLeft;
    workspace_size_ = ck::fmha_v2_workspace_size(params_);
  }

  std::size_t workspace_size() const { return workspace_size_; }

  ck::Status enqueue(const void* const* inputs, void* const* outputs, void* workspace, cudaStream_t stream) const {
    // TensorRT shares one workspace among its layers, so that its contents are arbitrary here. The counters in front
    // are the only part that must be cleared.
    if (workspace != nullptr) {
      const cudaError_t error = cudaMemsetAsync(workspace, 0, ck::kFmhaV2CounterBytes, stream);
      if (error != cudaSuccess) {
        return {ck::StatusCode::kCudaError,
                std::string("Clearing the counters failed: ") + cudaGetErrorString(error) + "."};
      }
    }
    ck::FmhaV2Params params = params_;
    params.q = inputs[kQ];
    params.kv = inputs[kPool];
    params.block_tables = static_cast<const std::int32_t*>(inputs[kBlockTables]);
    params.cum_seq_lens_q = static_cast<const std::int32_t*>(inputs[kCumSeqLensQ]);
    params.cum_seq_lens_kv = static_cast<const std::int32_t*>(inputs[kCumSeqLensKv]);
    params.sinks = static_cast<const float*>(inputs[kSinks]);
    params.out = outputs[0];
    return ck::fmha_v2(params, workspace, workspace_size_, stream);
  }

 private:
  ck::FmhaV2Params params_;
  std::size_t workspace_size_;
};

/// The batch on the host.
struct Batch {
  std::vector<std::int32_t> cum_q = {0, 20, 21, 61};
  std::vector<std::int32_t> cum_kv = {0, 100, 101, 149};
  std::vector<std::int32_t> tables;  // [3, kMaxPages]; entries that no key refers to are no page numbers
  int num_pages = 0;
  std::vector<__half> q;     // [61, kHeads, kHeadDim]
  std::vector<__half> pool;  // [num_pages, 2, kPageSize, kKvHeads, kHeadDim]
  std::vector<float> sinks;  // [kHeads]

  Batch() {
    const int requests = int(cum_q.size()) - 1;
    tables.assign(std::size_t(requests) * kMaxPages, -1);
    for (int b = 0; b < requests; ++b) {
      const int pages = (cum_kv[b + 1] - cum_kv[b] + kPageSize - 1) / kPageSize;
      for (int i = 0; i < pages; ++i) tables[b * kMaxPages + i] = num_pages++;
    }
    std::reverse(tables.begin(), tables.begin() + (cum_kv[1] + kPageSize - 1) / kPageSize);
    q = random(std::size_t(cum_q.back()) * kHeads * kHeadDim, 1);
    pool = random(std::size_t(num_pages) * 2 * kPageSize * kKvHeads * kHeadDim, 2);
    for (int head = 0; head < kHeads; ++head) sinks.push_back(0.25f * float(head) - 1.0f);
  }

  static std::vector<__half> random(std::size_t count, unsigned seed) {
    std::vector<__half> numbers(count);
    for (__half& number : numbers) {
      seed = seed * 1664525u + 1013904223u;
      number = __float2half(float(seed >> 8) / (1 << 23) - 1.0f);
    }
    return numbers;
  }

  /// Element d of a key (which 0) or of a value (1) of request b.
  float cached(int b, int which, int key, int kv_head, int d) const {
    const std::size_t page = std::size_t(tables[b * kMaxPages + key / kPageSize]);
    const std::size_t slot = (page * 2 + which) * kPageSize + key % kPageSize;
    return __half2float(pool[(slot * kKvHeads + kv_head) * kHeadDim + d]);
  }

  /// Row i of request b, of one head.
  std::vector<double> expected(int b, int i, int head) const {
    const int q_len = cum_q[b + 1] - cum_q[b];
    const int position = i + (cum_kv[b + 1] - cum_kv[b]) - q_len;
    const int kv_head = head / (kHeads / kKvHeads);
    const __half* row = &q[(std::size_t(cum_q[b] + i) * kHeads + head) * kHeadDim];
    std::vector<double> sums(kHeadDim, 0.0);
    double denominator = std::exp(double(sinks[head]));
    for (int key = std::max(position - kWindowLeft, 0); key <= position; ++key) {
      double dot = 0.0;
      for (int d = 0; d < kHeadDim; ++d) {
        dot += double(__half2float(row[d])) * cached(b, 0, key, kv_head, d);
      }
      const double weight = std::exp(dot / std::sqrt(double(kHeadDim)));
      denominator += weight;
      for (int d = 0; d < kHeadDim; ++d) sums[d] += weight * cached(b, 1, key, kv_head, d);
    }
    for (double& sum : sums) sum /= denominator;
    return sums;
  }

  double largest_error(const std::vector<__half>& out) const {
    double largest = 0.0;
    for (int b = 0; b + 1 < int(cum_q.size()); ++b) {
      for (int i = 0; i < cum_q[b + 1] - cum_q[b]; ++i) {
        for (int head = 0; head < kHeads; ++head) {
          const std::vector<double> want = expected(b, i, head);
          const std::size_t at = (std::size_t(cum_q[b] + i) * kHeads + head) * kHeadDim;
          for (int d = 0; d < kHeadDim; ++d) {
            const double error = std::fabs(double(__half2float(out[at + d])) - want[d]);
            largest = std::isnan(error) ? INFINITY : std::max(largest, error);
          }
        }
      }
    }
    return largest;
  }
};

/// A copy on the GPU; null where the GPU refuses.
template <class T>
void* on_device(const std::vector<T>& host) {
  void* data = nullptr;
  const std::size_t bytes = host.size() * sizeof(T);
  if (cudaMalloc(&data, bytes) != cudaSuccess) return nullptr;
  if (cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice) != cudaSuccess) return nullptr;
  return data;
}

}  // namespace

int main() {
  const Batch batch;
  const PagedAttention plugin(/*batch_size=*/3, batch.cum_q.back(), /*max_q_len=*/40,
                              /*max_kv_len=*/128, batch.num_pages);
  std::vector<__half> out(batch.q.size(), __float2half(NAN));

  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    // Nothing is read before the library has found out that nobody can.
    const void* inputs[PagedAttention::kInputs] = {batch.q.data(),     batch.pool.data(),   batch.tables.data(),
                                                   batch.cum_q.data(), batch.cum_kv.data(), batch.sinks.data()};
    void* outputs[] = {out.data()};
    const ck::Status status = plugin.enqueue(inputs, outputs, nullptr, nullptr);
    std::printf("There is no GPU here: %s\n", status.message.c_str());
    return status.ok() ? 1 : 0;
  }

  const void* inputs[PagedAttention::kInputs] = {on_device(batch.q),      on_device(batch.pool),
                                                 on_device(batch.tables), on_device(batch.cum_q),
                                                 on_device(batch.cum_kv), on_device(batch.sinks)};
  void* outputs[] = {on_device(out)};
  void* workspace = on_device(std::vector<char>(plugin.workspace_size(), 0x5a));  // others' data
  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess || outputs[0] == nullptr || workspace == nullptr ||
      std::count(inputs, inputs + PagedAttention::kInputs, nullptr) > 0) {
    std::printf("The GPU has no memory left.\n");
    return 1;
  }
  for (int call = 0; call < 2; ++call) {  // the second finds a workspace that the first wrote to
    const ck::Status status = plugin.enqueue(inputs, outputs, workspace, stream);
    if (!status.ok()) {
      std::printf("%s\n", status.message.c_str());
      return 1;
    }
  }
  cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) {
    error = cudaMemcpy(out.data(), outputs[0], out.size() * sizeof(__half), cudaMemcpyDeviceToHost);
  }
  if (error != cudaSuccess) {
    std::printf("The GPU failed: %s\n", cudaGetErrorString(error));
    return 1;
  }
  const double largest = batch.largest_error(out);
  std::printf("Largest difference from the CPU's result: %.5f\n", largest);
  for (const void* input : inputs) cudaFree(const_cast<void*>(input));
  cudaFree(outputs[0]);
  cudaFree(workspace);
  cudaStreamDestroy(stream);
  return largest < 2e-3 ? 0 : 1;
}
