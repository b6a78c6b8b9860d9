// Decode steps of latent attention (MLA), as a serving engine makes them. The cache has 576 columns per token, which
// all heads share: keys are all of them, values are the first 512, in the same memory.
//
// Three requests, 16 query heads, float16, pages of 64 tokens. A step writes its new tokens to their slots and attends.
// The first step has one token per request. The second has three, two of them drafts. Slots, page table and lengths
// stay on the GPU, so a step can be captured into a CUDA graph and replayed with others. The program computes the
// result on the CPU, too, and compares.
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cutlass_kernels/append.h"
#include "cutlass_kernels/attention.h"

namespace ck = cutlass_kernels;

namespace {

constexpr int kRequests = 3;
constexpr int kHeads = 16;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kCacheDim = kLatentDim + kRopeDim;
constexpr int kPageSize = 64;
constexpr int kMaxPages = 3;  // columns of the page table
constexpr int kPages = kRequests * kMaxPages;
// DeepSeek's models are trained with 192 columns, before the absorption.
const float kScale = 1.0f / std::sqrt(192.0f);

/// Addresses of a step, all on the GPU. Each request has so many tokens.
struct Step {
  const void* new_latent;          // [kRequests * tokens, kLatentDim]
  const void* new_rope;            // [kRequests * tokens, kRopeDim]
  const std::int64_t* slots;       // [kRequests * tokens], page * kPageSize + place in the page
  const void* q;                   // [kRequests * tokens, kHeads, kLatentDim], absorbed
  const void* q_rope;              // [kRequests * tokens, kHeads, kRopeDim]
  void* cache;                     // [kPages, kPageSize, kCacheDim]
  const std::int32_t* page_table;  // [kRequests, kMaxPages]
  const std::int32_t* lengths;     // [kRequests], with the new tokens
  void* out;                       // [kRequests * tokens, kHeads, kLatentDim]
};

/// Steps of so many tokens per request. Nothing here is allocated on the GPU.
class LatentDecode {
 public:
  explicit LatentDecode(int tokens) {
    params_.q_dtype = params_.kv_dtype = params_.o_dtype = ck::DType::kFloat16;
    params_.num_qo_heads = kHeads;
    params_.num_kv_heads = 1;
    params_.head_dim_qk = kCacheDim;
    params_.head_dim_vo = kLatentDim;
    params_.batch_size = kRequests;
    params_.max_qo_len = tokens;  // without qo_indptr, of every request
    params_.total_q = kRequests * tokens;
    params_.max_kv_len = kMaxPages * kPageSize;
    params_.pages.page_size = kPageSize;
    params_.pages.num_pages = kPages;
    params_.pages.table_stride = params_.pages.table_width = kMaxPages;
    params_.pages.k_stride_page = params_.pages.v_stride_page = kPageSize * kCacheDim;
    params_.causal = true;  // drafts see the tokens before them
    params_.sm_scale = kScale;
    workspace_size_ = ck::workspace_size(params_);
  }

  std::size_t workspace_size() const { return workspace_size_; }

  /// Writes both parts of the new tokens side by side, in one kernel.
  ck::Status append(const Step& step, cudaStream_t stream) const {
    ck::AppendBySlotParams params;
    params.dtype = params.cache_dtype = ck::DType::kFloat16;
    params.num_kv_heads = 1;
    params.head_dim_qk = kLatentDim;
    params.head_dim_vo = kRopeDim;
    params.num_tokens = params_.total_q;
    params.slots = step.slots;
    params.k = {step.new_latent, kLatentDim, kLatentDim};
    params.v = {step.new_rope, kRopeDim, kRopeDim};
    params.k_cache = {step.cache, kCacheDim, kCacheDim};
    params.v_cache = {static_cast<__half*>(step.cache) + kLatentDim, kCacheDim, kCacheDim};
    params.page_size = kPageSize;
    params.num_pages = kPages;
    params.k_stride_page = params.v_stride_page = kPageSize * kCacheDim;
    return ck::append_paged_kv_cache_by_slot(params, stream);
  }

  ck::Status attend(const Step& step, void* workspace, cudaStream_t stream) const {
    ck::AttentionParams params = params_;
    // Queries come from two projections. In one tensor of 576 columns: leave q_rope null.
    params.q = {step.q, kHeads * kLatentDim, kLatentDim};
    params.q_rope = {step.q_rope, kHeads * kRopeDim, kRopeDim};
    // A cache in two tensors, [pages, 64, 512] and [pages, 64, 64]: k_rope and pages.k_rope_stride_page are the second.
    params.k = params.v = {step.cache, kCacheDim, kCacheDim};
    params.o = {step.out, kHeads * kLatentDim, kLatentDim};
    params.pages.indices = step.page_table;
    params.seqused_k = step.lengths;
    return ck::attention(params, workspace, workspace_size_, stream);
  }

 private:
  ck::AttentionParams params_;
  std::size_t workspace_size_;
};

std::vector<__half> random(std::size_t count, unsigned seed) {
  std::vector<__half> numbers(count);
  for (__half& number : numbers) {
    seed = seed * 1664525u + 1013904223u;
    number = __float2half(float(seed >> 8) / (1 << 23) - 1.0f);
  }
  return numbers;
}

/// The batch on the host.
struct Batch {
  std::vector<std::int32_t> lengths = {150, 64, 1};
  std::vector<std::int32_t> page_table;  // [kRequests, kMaxPages]
  std::vector<__half> cache = random(std::size_t(kPages) * kPageSize * kCacheDim, 1);
  // Of a step.
  int tokens = 0;
  std::vector<std::int64_t> slots;
  std::vector<__half> new_latent, new_rope, q, q_rope;

  Batch() {
    for (int page = 0; page < kPages; ++page) page_table.push_back(kPages - 1 - page);
  }

  std::int64_t slot(int b, int key) const {
    const int page = page_table[b * kMaxPages + key / kPageSize];
    return std::int64_t(page) * kPageSize + key % kPageSize;
  }

  /// New tokens at the end of every request.
  void begin_step(int count) {
    tokens = count;
    const std::size_t rows = std::size_t(kRequests) * tokens;
    new_latent = random(rows * kLatentDim, 10 + count);
    new_rope = random(rows * kRopeDim, 20 + count);
    q = random(rows * kHeads * kLatentDim, 30 + count);
    q_rope = random(rows * kHeads * kRopeDim, 40 + count);
    slots.clear();
    for (int b = 0; b < kRequests; ++b) {
      for (int i = 0; i < tokens; ++i) slots.push_back(slot(b, lengths[b]++));
    }
  }

  /// What LatentDecode::append() does on the GPU.
  void append() {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto place = cache.begin() + slots[i] * kCacheDim;
      std::copy_n(new_latent.begin() + i * kLatentDim, kLatentDim, place);
      std::copy_n(new_rope.begin() + i * kRopeDim, kRopeDim, place + kLatentDim);
    }
  }

  /// Row i of request b, of one head.
  std::vector<double> expected(int b, int i, int head) const {
    const std::size_t row = (std::size_t(b) * tokens + i) * kHeads + head;
    std::vector<double> sums(kLatentDim, 0.0);
    double denominator = 0.0;
    for (int key = 0; key <= lengths[b] - tokens + i; ++key) {
      const __half* columns = &cache[slot(b, key) * kCacheDim];
      double dot = 0.0;
      for (int d = 0; d < kCacheDim; ++d) {
        const __half query = d < kLatentDim ? q[row * kLatentDim + d] : q_rope[row * kRopeDim + d - kLatentDim];
        dot += double(__half2float(query)) * __half2float(columns[d]);
      }
      const double weight = std::exp(dot * kScale);
      denominator += weight;
      for (int d = 0; d < kLatentDim; ++d) sums[d] += weight * __half2float(columns[d]);
    }
    for (double& sum : sums) sum /= denominator;
    return sums;
  }

  double largest_error(const std::vector<__half>& out) const {
    double largest = 0.0;
    for (int row = 0; row < kRequests * tokens; ++row) {
      for (int head = 0; head < kHeads; ++head) {
        const std::vector<double> want = expected(row / tokens, row % tokens, head);
        const std::size_t at = (std::size_t(row) * kHeads + head) * kLatentDim;
        for (int d = 0; d < kLatentDim; ++d) {
          const double error = std::fabs(double(__half2float(out[at + d])) - want[d]);
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

/// A step of so many tokens per request. False where it fails, or where the result differs from the CPU's.
bool run_step(int tokens, Batch* batch, void* cache, const std::int32_t* page_table, cudaStream_t stream) {
  batch->begin_step(tokens);
  const LatentDecode layer(tokens);
  std::vector<__half> out(batch->q.size(), __float2half(NAN));
  const OnDevice<__half> new_latent(batch->new_latent), new_rope(batch->new_rope);
  const OnDevice<__half> q(batch->q), q_rope(batch->q_rope), dev_out(out);
  const OnDevice<std::int64_t> slots(batch->slots);
  const OnDevice<std::int32_t> lengths(batch->lengths);
  const OnDevice<char> workspace(std::vector<char>(layer.workspace_size(), 0x5a));
  const Step step = {new_latent.data, new_rope.data, slots.data,   q.data,      q_rope.data,
                     cache,           page_table,    lengths.data, dev_out.data};
  ck::Status status = layer.append(step, stream);
  if (status.ok()) status = layer.attend(step, workspace.data, stream);
  if (!status.ok()) {
    std::printf("%s\n", status.message.c_str());
    return false;
  }
  cudaError_t error = cudaStreamSynchronize(stream);
  if (error == cudaSuccess) {
    error = cudaMemcpy(out.data(), dev_out.data, out.size() * sizeof(__half), cudaMemcpyDeviceToHost);
  }
  if (error != cudaSuccess) {
    std::printf("The GPU failed: %s\n", cudaGetErrorString(error));
    return false;
  }
  batch->append();
  const double largest = batch->largest_error(out);
  std::printf("%d tokens per request: largest difference from the CPU's result: %.5f\n", tokens, largest);
  return largest < 2e-3;
}

}  // namespace

int main() {
  Batch batch;
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    // The library looks for a GPU before it reads anything.
    batch.begin_step(1);
    std::vector<__half> out(batch.q.size());
    const Step step = {batch.new_latent.data(), batch.new_rope.data(), batch.slots.data(),
                       batch.q.data(),          batch.q_rope.data(),   batch.cache.data(),
                       batch.page_table.data(), batch.lengths.data(),  out.data()};
    const ck::Status status = LatentDecode(1).attend(step, nullptr, nullptr);
    std::printf("There is no GPU here: %s\n", status.message.c_str());
    return status.ok() ? 1 : 0;
  }

  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess) {
    std::printf("The GPU has no stream left.\n");
    return 1;
  }
  const OnDevice<__half> cache(batch.cache);
  const OnDevice<std::int32_t> page_table(batch.page_table);
  const bool first = run_step(1, &batch, cache.data, page_table.data, stream);
  const bool second = first && run_step(3, &batch, cache.data, page_table.data, stream);
  cudaStreamDestroy(stream);
  return second ? 0 : 1;
}
