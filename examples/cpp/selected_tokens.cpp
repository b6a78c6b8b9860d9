// Sparse latent attention, as DeepSeek V3.2 and GLM-5 decode: each query row sees tokens that an indexer has selected.
// A list names them as slots of the cache, page * page size + offset, in any order. -1 is no token.
//
// Four query rows, 16 heads, bfloat16, pages of 64 tokens, lists of 192. The cache comes in two formats: 576 columns of
// bfloat16 (1152 bytes per token), and vLLM's fp8_ds_mla, which the library writes here (656 bytes). Lists and counts
// stay on the GPU, so a step can be captured into a CUDA graph and replayed with others. The program computes the
// result on the CPU, too, and compares.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <vector>

#include "cutlass_kernels/append.h"
#include "cutlass_kernels/attention.h"

namespace ck = cutlass_kernels;

namespace {

constexpr int kRows = 4;
constexpr int kHeads = 16;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kCacheDim = kLatentDim + kRopeDim;
constexpr int kPageSize = 64;
constexpr int kPages = 8;
constexpr int kSlots = kPages * kPageSize;
constexpr int kTopK = 192;  // entries of a list
// A token of fp8_ds_mla: 512 e4m3, a scale for each 128 of them, and the position in bfloat16.
constexpr int kQuantizedBytes = 656;
constexpr int kGroup = 128;
// DeepSeek's models are trained with 192 columns, before the absorption.
const float kScale = 1.0f / std::sqrt(192.0f);

/// Addresses of a step, all on the GPU.
struct Step {
  const void* q;               // [kRows, kHeads, kCacheDim], absorbed
  const void* cache;           // [kPages, kPageSize, kCacheDim], or bytes [kPages, kPageSize, kQuantizedBytes]
  const std::int32_t* slots;   // [kRows, kTopK]
  const std::int32_t* counts;  // [kRows]: so many entries of a list count, from the left
  void* out;                   // [kRows, kHeads, kLatentDim]
};

/// Rows with lists are requests of one row, and the lists are a page table whose entries name slots.
ck::AttentionParams describe(const Step& step, ck::DType cache_dtype) {
  ck::AttentionParams params;
  params.q_dtype = params.o_dtype = ck::DType::kBFloat16;
  params.kv_dtype = cache_dtype;
  params.num_qo_heads = kHeads;
  params.num_kv_heads = 1;
  params.head_dim_qk = kCacheDim;
  params.head_dim_vo = kLatentDim;
  params.batch_size = params.total_q = kRows;
  params.max_qo_len = 1;
  params.max_kv_len = kTopK;
  params.seqused_k = step.counts;
  params.pages.indices = step.slots;
  params.pages.table_stride = params.pages.table_width = kTopK;
  params.pages.slots_per_page = kPageSize;
  params.pages.page_size = 1;  // keys of an entry
  params.pages.num_pages = kPages;
  // In elements; of quantized tokens in bytes.
  const int stride = cache_dtype == ck::DType::kLatentV32 ? kQuantizedBytes : kCacheDim;
  params.pages.k_stride_page = params.pages.v_stride_page = kPageSize * stride;
  params.q = {step.q, kHeads * kCacheDim, kCacheDim};
  params.k = params.v = {step.cache, stride, stride};
  params.o = {step.out, kHeads * kLatentDim, kLatentDim};
  params.sm_scale = kScale;
  return params;
}

/// Stores tokens [count, kCacheDim] of bfloat16 in slots of a quantized cache, by one kernel.
ck::Status store(const __nv_bfloat16* tokens, const std::int64_t* slots, int count, void* cache, cudaStream_t stream) {
  ck::AppendQuantizedParams params;
  params.cache_dtype = ck::DType::kLatentV32;
  params.num_tokens = count;
  params.slots = slots;
  params.first = tokens;
  params.others = tokens + kLatentDim;
  params.first_stride = params.others_stride = kCacheDim;
  params.first_columns = kLatentDim;
  params.others_columns = kRopeDim;
  params.cache = cache;
  params.stride_page = kPageSize * kQuantizedBytes;
  params.stride_token = kQuantizedBytes;
  params.page_size = kPageSize;
  params.num_pages = kPages;
  return ck::append_quantized_by_slot(params, stream);
}

std::vector<__nv_bfloat16> random(std::size_t count, unsigned seed) {
  std::vector<__nv_bfloat16> numbers(count);
  for (__nv_bfloat16& number : numbers) {
    seed = seed * 1664525u + 1013904223u;
    number = __float2bfloat16(float(seed >> 8) / (1 << 23) - 1.0f);
  }
  return numbers;
}

/// The problem on the host.
struct Problem {
  std::vector<__nv_bfloat16> q = random(std::size_t(kRows) * kHeads * kCacheDim, 1);
  std::vector<__nv_bfloat16> tokens = random(std::size_t(kSlots) * kCacheDim, 2);
  std::vector<std::int32_t> slots;
  std::vector<std::int32_t> counts = {kTopK, 100, 1, 0};

  Problem() {
    for (int i = 0; i < kRows * kTopK; ++i) slots.push_back(i % 7 == 3 ? -1 : i * 37 % kSlots);
  }

  /// Columns of keys [kSlots, kCacheDim] as numbers, of one row and head.
  std::vector<double> expected(const std::vector<float>& keys, int row, int head) const {
    std::vector<double> sums(kLatentDim, 0.0);
    double denominator = 0.0;
    for (int i = 0; i < counts[row]; ++i) {
      const int slot = slots[row * kTopK + i];
      if (slot < 0) continue;
      const float* key = &keys[std::size_t(slot) * kCacheDim];
      double dot = 0.0;
      for (int d = 0; d < kCacheDim; ++d) {
        dot += double(__bfloat162float(q[(std::size_t(row) * kHeads + head) * kCacheDim + d])) * key[d];
      }
      const double weight = std::exp(dot * kScale);
      denominator += weight;
      for (int d = 0; d < kLatentDim; ++d) sums[d] += weight * key[d];
    }
    for (double& sum : sums) sum = denominator > 0.0 ? sum / denominator : 0.0;
    return sums;
  }

  double largest_error(const std::vector<float>& keys, const std::vector<__nv_bfloat16>& out) const {
    double largest = 0.0;
    for (int i = 0; i < kRows * kHeads; ++i) {
      const std::vector<double> want = expected(keys, i / kHeads, i % kHeads);
      for (int d = 0; d < kLatentDim; ++d) {
        const double error = std::fabs(double(__bfloat162float(out[std::size_t(i) * kLatentDim + d])) - want[d]);
        largest = std::isnan(error) ? INFINITY : std::max(largest, error);
      }
    }
    return largest;
  }
};

std::vector<float> numbers_of(const std::vector<__nv_bfloat16>& tokens) {
  std::vector<float> numbers(tokens.size());
  std::transform(tokens.begin(), tokens.end(), numbers.begin(), [](__nv_bfloat16 x) { return __bfloat162float(x); });
  return numbers;
}

/// What tokens of kQuantizedBytes stand for.
std::vector<float> numbers_of(const std::vector<char>& cache) {
  std::vector<float> numbers(std::size_t(kSlots) * kCacheDim);
  for (int slot = 0; slot < kSlots; ++slot) {
    const char* token = &cache[std::size_t(slot) * kQuantizedBytes];
    float* columns = &numbers[std::size_t(slot) * kCacheDim];
    float scales[kLatentDim / kGroup];
    std::memcpy(scales, token + kLatentDim, sizeof scales);
    for (int d = 0; d < kLatentDim; ++d) {
      __nv_fp8_e4m3 number;
      std::memcpy(&number, token + d, 1);
      columns[d] = float(number) * scales[d / kGroup];
    }
    for (int d = 0; d < kRopeDim; ++d) {
      __nv_bfloat16 number;
      std::memcpy(&number, token + kLatentDim + sizeof scales + 2 * d, 2);
      columns[kLatentDim + d] = __bfloat162float(number);
    }
  }
  return numbers;
}

void stop_on(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("The GPU failed: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

/// A copy on the GPU, freed at the end of its scope.
template <class T>
struct OnDevice {
  T* data = nullptr;
  std::size_t bytes;

  explicit OnDevice(const std::vector<T>& host) : bytes(host.size() * sizeof(T)) {
    stop_on(cudaMalloc(reinterpret_cast<void**>(&data), bytes));
    stop_on(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice));
  }
  OnDevice(const OnDevice&) = delete;
  ~OnDevice() { cudaFree(data); }
  void copy_to(std::vector<T>* host) const { stop_on(cudaMemcpy(host->data(), data, bytes, cudaMemcpyDeviceToHost)); }
};

/// Attends to a cache; the result replaces what is in `out`.
ck::Status attend(const Problem& problem, const void* cache, ck::DType cache_dtype, std::vector<__nv_bfloat16>* out) {
  std::fill(out->begin(), out->end(), __float2bfloat16(NAN));
  const OnDevice<__nv_bfloat16> q(problem.q), dev_out(*out);
  const OnDevice<std::int32_t> slots(problem.slots), counts(problem.counts);
  const ck::AttentionParams params = describe({q.data, cache, slots.data, counts.data, dev_out.data}, cache_dtype);
  const OnDevice<char> workspace(std::vector<char>(ck::workspace_size(params), 0x5a));
  const ck::Status status = ck::attention(params, workspace.data, workspace.bytes, nullptr);
  if (status.ok()) dev_out.copy_to(out);  // waits for the default stream
  return status;
}

}  // namespace

int main() {
  const Problem problem;
  std::vector<__nv_bfloat16> out(std::size_t(kRows) * kHeads * kLatentDim);
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    // The library looks for a GPU before it reads anything.
    const Step step = {problem.q.data(), problem.tokens.data(), problem.slots.data(), problem.counts.data(),
                       out.data()};
    const ck::Status status = ck::attention(describe(step, ck::DType::kBFloat16), nullptr, 0, nullptr);
    std::printf("There is no GPU here: %s\n", status.message.c_str());
    return status.ok() ? 1 : 0;
  }

  const OnDevice<__nv_bfloat16> tokens(problem.tokens);
  ck::Status status = attend(problem, tokens.data, ck::DType::kBFloat16, &out);
  if (!status.ok()) return std::printf("%s\n", status.message.c_str()), 1;
  double largest = problem.largest_error(numbers_of(problem.tokens), out);
  std::printf("Largest difference from the CPU's result: %.5f with 1152 bytes per token, ", largest);

  std::vector<std::int64_t> every_slot(kSlots);
  std::iota(every_slot.begin(), every_slot.end(), 0);
  const OnDevice<std::int64_t> slots(every_slot);
  std::vector<char> bytes(std::size_t(kSlots) * kQuantizedBytes);
  const OnDevice<char> cache(bytes);
  status = store(tokens.data, slots.data, kSlots, cache.data, nullptr);
  if (status.ok()) status = attend(problem, cache.data, ck::DType::kLatentV32, &out);
  if (status.code == ck::StatusCode::kUnsupported) {  // Hopper's kernels read such tokens
    std::printf("none with 656: %s\n", status.message.c_str());
    return largest < 1e-2 ? 0 : 1;
  }
  if (!status.ok()) return std::printf("%s\n", status.message.c_str()), 1;
  cache.copy_to(&bytes);
  const double quantized = problem.largest_error(numbers_of(bytes), out);
  std::printf("%.5f with 656\n", quantized);
  return largest < 1e-2 && quantized < 1e-2 ? 0 : 1;
}
