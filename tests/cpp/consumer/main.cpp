// Uses the installed library. On any machine: lists the kernels, asks for the workspace, and sees
// sentences instead of crashes where nothing can run. With a GPU: computes a ragged causal batch
// with each kernel and compares it with a loop on the host. Exit status 0 if all is as documented.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "appending.h"
#include "cutlass_kernels/attention.h"
#include "cutlass_kernels/merge.h"
#include "cutlass_kernels/prepare.h"
#include "cutlass_kernels/version.h"
#include "fused.h"
#include "spread.h"
#include "support.h"

namespace {

bool is_fp8(ck::DType dtype) { return dtype == ck::DType::kFloat8E4M3 || dtype == ck::DType::kFloat8E5M2; }

ck::AttentionParams problem(const ck::KernelInfo& kernel) {
  ck::AttentionParams params;
  params.q_dtype = kernel.q_dtype;
  params.o_dtype = is_fp8(kernel.q_dtype) ? ck::DType::kFloat16 : kernel.q_dtype;
  params.kv_dtype = kernel.kv_dtype;
  params.num_qo_heads = 4;
  params.num_kv_heads = is_latent(kernel) ? 1 : 2;
  params.head_dim_qk = kernel.head_dim_qk;
  params.head_dim_vo = kernel.head_dim_vo;
  params.batch_size = 2;
  params.total_q = 70 + 130;
  params.total_kv = 200 + 130;
  params.causal = true;
  return params;
}

/// Copies of 8-bit keys and values of one request.
ck::PrepareParams copies(void* keys, void* values, void* key_copy, void* value_copy) {
  ck::PrepareParams params;
  params.q_dtype = params.dtype = ck::DType::kFloat16;
  params.kv_dtype = ck::DType::kFloat8E4M3;
  params.num_qo_heads = params.num_kv_heads = 1;
  params.head_dim_qk = params.head_dim_vo = 64;
  params.total_q = params.total_kv = 5;
  params.k = {keys, 64, 64};
  params.v = {values, 64, 64};
  params.k_copy = key_copy;
  params.v_copy = value_copy;
  return params;
}

/// Two states of one token with two heads of eight elements, merged into the first.
ck::MergeStateParams merge_in_place(float* v, float* s, const float* v_other, const float* s_other) {
  ck::MergeStateParams params;
  params.sizes = {ck::DType::kFloat32, 1, 2, 8};
  params.v_a = {v, 16, 8};
  params.s_a = {s, 2, 1};
  params.v_b = {v_other, 16, 8};
  params.s_b = {s_other, 2, 1};
  params.merged_v = {v, 16, 8};
  params.merged_s = {s, 2, 1};
  return params;
}

void check_memory_kernels_without_gpu() {
  ck::MergeStateParams two = merge_in_place(nullptr, nullptr, nullptr, nullptr);
  require_refusal(ck::merge_state(two, nullptr), "v_a is null");
  two.mask = &two;  // never read
  two.mask_bytes = 3;
  require_refusal(ck::merge_state(two, nullptr), "mask_bytes=3");
  ck::MergeStatesParams many;
  many.sizes = {ck::DType::kFloat16, 0, 2, 64};
  require(ck::merge_states(many, nullptr).ok(), "there is nothing to merge");
  many.num_states = -1;
  require_refusal(ck::merge_states(many, nullptr), "num_states=-1");
  many.sizes.head_dim = 12;
  require_refusal(ck::merge_states(many, nullptr), "head_dim=12");
  many.sizes.dtype = ck::DType::kFloat8E4M3;
  require_refusal(ck::merge_states(many, nullptr), "dtype=float8_e4m3fn");
  check_appending_without_gpu();
  check_ranks_without_gpu();
}

/// Addresses that are no multiples of what they must be: always kInvalidArgument, whatever the sizes.
void check_misaligned_memory() {
  alignas(16) static char memory[64];  // never read
  static const std::int32_t indptr[3] = {0, 70, 200};
  ck::AttentionParams params = problem(ck::list_kernels().front());
  params.qo_indptr = params.kv_indptr = indptr;
  params.q = params.k = params.v = {memory, 256, 256};
  params.o = {memory, 1024, 256};
  for (const std::size_t bytes : {std::size_t(0), std::size_t(1) << 30}) {
    require_refusal(ck::attention(params, memory + 8, bytes, nullptr), "8 bytes after a multiple of 16");
    require_refusal(ck::attention(params, memory + 4, bytes, nullptr), "16-byte aligned");
  }
  params.q.data = memory + 8;
  require_refusal(ck::attention(params, nullptr, 0, nullptr), "q starts at an address");

  require_refusal(ck::prepare(copies(memory, memory, memory + 8, memory), nullptr), "k_copy");
  require_refusal(ck::prepare(copies(memory, memory + 4, memory, memory), nullptr), "v lies at");
  auto* floats = reinterpret_cast<float*>(memory);
  require_refusal(ck::merge_state(merge_in_place(floats + 1, floats, floats, floats), nullptr), "v_a has an address");
  ck::MergeStateParams masked = merge_in_place(floats, floats, floats, floats);
  masked.mask = memory + 2;
  masked.mask_bytes = 4;
  require_refusal(ck::merge_state(masked, nullptr), "mask starts at an address");
}

void check_without_gpu() {
  require(std::string(ck::version()) == CK_VERSION, "library and headers have the same version");
  check_memory_kernels_without_gpu();
  check_misaligned_memory();
  check_fmha_v2_without_gpu();
  const ck::AttentionParams empty;
  for (const ck::Backend backend : {ck::Backend::kAuto, ck::Backend::kFa2, ck::Backend::kFa3}) {
    require(!ck::not_supported_reasons(backend, empty, 90).empty(), "no sizes are a reason");
    require(ck::workspace_size(empty, backend) == 0, "no sizes need no workspace");
    ck::Plan plan;
    require_refusal(ck::make_plan(empty, &plan, backend), "num_qo_heads");
    require_refusal(ck::attention(empty, nullptr, 0, nullptr, backend), "num_qo_heads");
  }
  ck::PrepareParams narrow = copies(nullptr, nullptr, nullptr, nullptr);
  require(ck::prepare(narrow, nullptr).ok(), "there is nothing to copy");
  narrow.head_dim_qk = 12;
  require(ck::prepare(narrow, nullptr).code == ck::StatusCode::kInvalidArgument,
          "head dimensions of copies are multiples of 8");
  for (const ck::KernelInfo& kernel : ck::list_kernels()) {
    // Those of pages alone: tests/cpp/host.
    if ((kernel.features & ck::kFeatureRaggedKv) == 0) continue;
    const ck::AttentionParams params = problem(kernel);
    const std::size_t bytes = ck::workspace_size(params, kernel.backend);
    std::printf("%s: %s, head_dim %d, workspace %zu bytes\n", kernel.name.c_str(), ck::to_string(kernel.q_dtype),
                kernel.head_dim_qk, bytes);
    require(bytes > 0, "a batch needs a workspace");

    const int served = kernel.min_compute_capability;
    require(ck::not_supported_reasons(kernel.backend, params, served).empty(), "the kernel serves its own problem");
    require(!ck::not_supported_reasons(kernel.backend, params, 70).empty(), "no kernel serves Volta");

    ck::AttentionParams single = params;
    single.batch_size = 1;
    const bool counts_tiles = kernel.backend == ck::Backend::kFa3;
    // Of few tiles, and of fa2's tiles for Hopper, keys would be split.
    single.disable_split_kv = is_latent(kernel) || !counts_tiles;
    require(ck::workspace_size(single, kernel.backend) == (counts_tiles ? 16 : 0),
            "a single request may use counters on fa3, and nothing on fa2");

    if (!is_latent(kernel)) {
      // A view that tensor maps cannot describe.
      ck::AttentionParams broadcast = single;
      broadcast.k = {nullptr, 64, 0};
      broadcast.k.data = &broadcast;  // never read
      require(ck::not_supported_reasons(kernel.backend, broadcast, served).empty() != counts_tiles,
              "fa2 reads a broadcast head, fa3 refuses it");
    } else {
      ck::AttentionParams apart = single;
      apart.v.data = &apart;  // never read
      require(!ck::not_supported_reasons(kernel.backend, apart, served).empty(),
              "latent values are columns of the keys");
    }

    // Sizes that were forgotten.
    ck::AttentionParams forgotten = single;
    forgotten.total_kv = ck::AttentionParams{}.total_kv;
    require_refusal(ck::attention(forgotten, nullptr, 0, nullptr), "total_kv is not set");
    forgotten.total_q = ck::AttentionParams{}.total_q;
    require_refusal(ck::attention(forgotten, nullptr, 0, nullptr), "total_q is not set");
    forgotten = params;
    forgotten.pages.page_size = 16;
    static const std::int32_t page_indptr[3] = {};  // never read
    alignas(16) static char tensor[16];
    forgotten.q.data = forgotten.k.data = forgotten.v.data = tensor;
    forgotten.o = {tensor, 64, 16};
    forgotten.qo_indptr = forgotten.kv_indptr = page_indptr;
    require_refusal(ck::attention(forgotten, nullptr, 0, nullptr), "num_pages is not set");
    forgotten.pages.num_pages = 4;
    require_refusal(ck::attention(forgotten, nullptr, 0, nullptr), "num_indices is not set");

    // No tensors.
    ck::Status status = ck::attention(single, nullptr, 0, nullptr);
    require(status.code == ck::StatusCode::kInvalidArgument && !status.message.empty(), "null tensors are refused");

    // No workspace, or no GPU to ask about.
    static const std::int32_t indptr[3] = {0, 70, 200};  // never read: the call fails before any launch
    ck::AttentionParams planned = params;
    planned.qo_indptr = planned.kv_indptr = indptr;
    ck::Plan plan;
    status = ck::make_plan(planned, &plan);
    if (status.ok()) status = ck::make_schedule(plan, planned, nullptr, 0, nullptr);
    require(!status.ok() && !status.message.empty(), "a schedule without workspace is refused");
    std::printf("  %s\n", status.message.c_str());
  }
}

}  // namespace

#ifdef CONSUMER_HAS_CUDA_RUNTIME
#include <cuda_runtime_api.h>

namespace {

/// The rows and keys of the batch as one request: the same with a workspace and without, time and again.
void check_single(ck::AttentionParams params, const Buffer& dev_o, const Buffer& workspace, std::size_t elements,
                  ck::Backend backend) {
  params.batch_size = 1;
  params.disable_split_kv = true;
  params.qo_indptr = params.kv_indptr = nullptr;
  const std::size_t bytes = ck::workspace_size(params, backend);
  std::vector<std::uint16_t> first(elements), again(elements);
  for (int call = 0; call < 4; ++call) {
    require(cudaMemset(dev_o.data, 0xff, elements * 2) == cudaSuccess, "clearing the output");
    void* given = call % 2 == 0 ? nullptr : workspace.data;
    const ck::Status status = ck::attention(params, given, given == nullptr ? 0 : bytes, nullptr, backend);
    require(status.ok(), status.message);
    dev_o.copy_to((call == 0 ? first : again).data(), elements * 2);
    require(call == 0 || first == again, "a workspace does not change the result");
  }
}

/// The batch once more, with its lengths on the device and no list of tiles.
void check_device_lengths(ck::AttentionParams params, const Buffer& dev_o, const std::vector<std::uint16_t>& o,
                          double tolerance, ck::Backend backend) {
  const std::int32_t rows[2] = {70, 130}, keys[2] = {200, 130};
  const Buffer dev_rows(sizeof rows), dev_keys(sizeof keys);
  dev_rows.copy_from(rows, sizeof rows);
  dev_keys.copy_from(keys, sizeof keys);
  params.seqused_q = static_cast<const std::int32_t*>(dev_rows.data);
  params.seqused_k = static_cast<const std::int32_t*>(dev_keys.data);
  params.max_qo_len = 130;
  params.max_kv_len = 200;
  const Buffer workspace(ck::workspace_size(params, backend));
  require(cudaMemset(dev_o.data, 0xff, o.size() * 2) == cudaSuccess, "clearing the output");
  const ck::Status status =
      ck::attention(params, workspace.data, ck::workspace_size(params, backend), nullptr, backend);
  require(status.ok(), status.message);
  std::vector<std::uint16_t> again(o.size());
  dev_o.copy_to(again.data(), again.size() * 2);
  for (std::size_t i = 0; i < o.size(); ++i) {
    const double a = from_bits(o[i], params.o_dtype), b = from_bits(again[i], params.o_dtype);
    require(std::fabs(a - b) <= tolerance, "lengths on the device give the same result");
  }
}

void check_on_gpu(const ck::KernelInfo& kernel) {
  const std::int32_t qo_indptr[3] = {0, 70, 200};
  const std::int32_t kv_indptr[3] = {0, 200, 330};
  ck::AttentionParams params = problem(kernel);
  const int heads = params.num_qo_heads;
  const int kv_heads = params.num_kv_heads;
  const int dqk = params.head_dim_qk;
  const int dvo = params.head_dim_vo;
  params.sm_scale = 1.0f / std::sqrt(static_cast<float>(dqk));

  const auto q = random_bits(params.total_q * heads * dqk, kernel.q_dtype, 1);
  const auto k = random_bits(params.total_kv * kv_heads * dqk, kernel.kv_dtype, 2);
  // Latent values are columns of the keys.
  const int value_stride = is_latent(kernel) ? dqk : dvo;
  const auto v = is_latent(kernel) ? k : random_bits(params.total_kv * kv_heads * dvo, kernel.kv_dtype, 3);
  std::vector<std::uint16_t> o(params.total_q * heads * dvo);
  std::vector<float> lse(params.total_q * heads);
  const std::size_t bytes = ck::workspace_size(params, kernel.backend);
  const Buffer dev_q(q.size() * 2), dev_k(k.size() * 2), dev_v(v.size() * 2), dev_o(o.size() * 2);
  const Buffer dev_lse(lse.size() * 4), dev_qo(sizeof qo_indptr), dev_kv(sizeof kv_indptr), workspace(bytes);
  dev_q.copy_from(q.data(), q.size() * 2);
  dev_k.copy_from(k.data(), k.size() * 2);
  dev_v.copy_from(v.data(), v.size() * 2);
  dev_qo.copy_from(qo_indptr, sizeof qo_indptr);
  dev_kv.copy_from(kv_indptr, sizeof kv_indptr);

  params.qo_indptr = static_cast<const std::int32_t*>(dev_qo.data);
  params.kv_indptr = static_cast<const std::int32_t*>(dev_kv.data);
  params.q = {dev_q.data, heads * dqk, dqk};
  params.k = {dev_k.data, kv_heads * dqk, dqk};
  params.v = {is_latent(kernel) ? dev_k.data : dev_v.data, kv_heads * value_stride, value_stride};
  params.o = {dev_o.data, heads * dvo, dvo};
  params.lse = static_cast<float*>(dev_lse.data);
  params.lse_stride_token = heads;
  params.lse_stride_head = 1;
  const ck::Status status = ck::attention(params, workspace.data, bytes, nullptr, kernel.backend);
  require(status.ok(), status.message);
  require(cudaDeviceSynchronize() == cudaSuccess, "the kernel ran");
  dev_o.copy_to(o.data(), o.size() * 2);
  dev_lse.copy_to(lse.data(), lse.size() * 4);
  check_single(params, dev_o, workspace, o.size(), kernel.backend);
  // Outputs lie in [-1, 1]; rounding P and O costs 2^-11 each in float16, 2^-8 in bfloat16.
  const double tolerance = kernel.q_dtype == ck::DType::kFloat16 ? 1.0 / 512 : 1.0 / 64;
  if (!is_latent(kernel)) check_fused(params, dev_o, o, lse, tolerance, kernel.backend);
  check_device_lengths(params, dev_o, o, tolerance, kernel.backend);

  double worst = 0.0;
  double worst_lse = 0.0;
  auto note = [](double& largest, double error) { largest = std::isnan(error) ? INFINITY : std::max(largest, error); };
  for (int request = 0; request < 2; ++request) {
    const int qo_len = qo_indptr[request + 1] - qo_indptr[request];
    const int kv_len = kv_indptr[request + 1] - kv_indptr[request];
    for (int row = 0; row < qo_len; ++row) {
      const int visible = row + kv_len - qo_len + 1;
      const int token = qo_indptr[request] + row;
      for (int head = 0; head < heads; ++head) {
        const int kv_head = head / (heads / kv_heads);
        std::vector<double> p(visible);
        double sum = 0.0;
        for (int key = 0; key < visible; ++key) {
          double dot = 0.0;
          for (int d = 0; d < dqk; ++d) {
            dot += double(from_bits(q[(token * heads + head) * dqk + d], kernel.q_dtype)) *
                   from_bits(k[((kv_indptr[request] + key) * kv_heads + kv_head) * dqk + d], kernel.kv_dtype);
          }
          sum += p[key] = std::exp(dot * params.sm_scale);  // inputs in [-1, 1): no overflow
        }
        for (int d = 0; d < dvo; ++d) {
          double expected = 0.0;
          for (int key = 0; key < visible; ++key) {
            expected +=
                p[key] / sum *
                from_bits(v[((kv_indptr[request] + key) * kv_heads + kv_head) * value_stride + d], kernel.kv_dtype);
          }
          note(worst, std::fabs(expected - from_bits(o[(token * heads + head) * dvo + d], kernel.q_dtype)));
        }
        note(worst_lse, std::fabs(std::log2(sum) - lse[token * heads + head]));
      }
    }
  }
  std::printf("%s on the GPU: largest error %.2e (allowed %.2e), of the LSE %.2e\n", kernel.name.c_str(), worst,
              tolerance, worst_lse);
  require(worst <= tolerance && worst_lse <= 1e-2, "the GPU agrees with the host");
}

void check_copies_on_gpu() {
  constexpr int kElements = 5 * 64;
  const std::vector<std::uint8_t> ones(kElements, 0x38);  // in E4M3
  std::vector<std::uint16_t> copied(kElements);
  const Buffer keys(kElements), values(kElements), key_copy(2 * kElements), value_copy(2 * kElements);
  keys.copy_from(ones.data(), kElements);
  values.copy_from(ones.data(), kElements);
  const ck::Status status = ck::prepare(copies(keys.data, values.data, key_copy.data, value_copy.data), nullptr);
  require(status.ok(), status.message);
  for (const Buffer* copy : {&key_copy, &value_copy}) {
    copy->copy_to(copied.data(), 2 * kElements);
    for (const std::uint16_t bits : copied) {
      require(from_bits(bits, ck::DType::kFloat16) == 1.0f, "copies hold the same numbers");
    }
  }
}

void check_merging_on_gpu() {
  const std::vector<float> ones(16, 1.0f), threes(16, 3.0f), zeros(2, 0.0f);
  std::vector<float> merged(16), lse(2);
  const Buffer v(64), s(8), v_other(64), s_other(8);
  v.copy_from(ones.data(), 64);
  s.copy_from(zeros.data(), 8);
  v_other.copy_from(threes.data(), 64);
  s_other.copy_from(zeros.data(), 8);
  const ck::Status status =
      ck::merge_state(merge_in_place(static_cast<float*>(v.data), static_cast<float*>(s.data),
                                     static_cast<float*>(v_other.data), static_cast<float*>(s_other.data)),
                      nullptr);
  require(status.ok(), status.message);
  v.copy_to(merged.data(), 64);
  s.copy_to(lse.data(), 8);
  for (const float x : merged) require(x == 2.0f, "equal weights give the mean");
  for (const float x : lse) require(x == 1.0f, "two equal sums give twice the sum");
}

void check_on_gpu_if_any() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("No GPU: nothing computed.\n");
    return;
  }
  int major = 0;
  int minor = 0;
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0);
  for (const ck::KernelInfo& kernel : ck::list_kernels()) {
    if (is_fp8(kernel.kv_dtype)) continue;  // test_fp8.py, test_fp8_cache.py
    if (!ck::not_supported_reasons(kernel.backend, problem(kernel), 10 * major + minor).empty()) continue;
    check_on_gpu(kernel);
    check_spread_on_gpu(kernel);
  }
  check_copies_on_gpu();
  check_merging_on_gpu();
  check_appending_on_gpu();
}

}  // namespace
#else
namespace {
void check_on_gpu_if_any() { std::printf("Built without the CUDA runtime: nothing computed.\n"); }
}  // namespace
#endif

int main() {
  require(!ck::list_kernels().empty(), "the library has kernels");
  check_without_gpu();
  check_on_gpu_if_any();
  std::printf("OK\n");
  return 0;
}
