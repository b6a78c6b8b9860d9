// A call of attention as the compiled module reads it, from any function. The arguments of a direct call (direct.h) are
// rows of Call in call_table.py, in the order of that function. Each row has one reader. A function says which rows it
// has, and what differs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "call_arguments.h"  // kQ, kK, ..., kArguments: the rows of Call in call_table.py, in their order
#include "cutlass_kernels/params.h"
#include "direct.h"

namespace cutlass_kernels {

// Rows that attention() has not: those of single requests and runs, and those of trtllm_fmha_v2_prefill.
enum { kLse = kArguments, kWindowLeft, kOptions, kFirstOfFused };
enum { kQkv = kFirstOfFused, kInputLayout, kBatchSize, kMaskMode, kSaveStats, kSkipSoftmax, kRows };

/// Keys, values, or the last columns of keys.
struct Keys {
  Tensor tensor;
  Matrix rows;              // of all requests, or of a page
  std::int64_t count = 1;   // of requests or pages, where the tensor has a dimension of them
  std::int64_t stride = 0;  // from one request to the next, in rows, or from one page to the next, in elements
};

struct Results {
  py::object out, lse;
  bool with_lse = false;

  py::object returned() const { return with_lse ? py::object(py::make_tuple(out, lse)) : out; }
};

/// What reads and checks returns false where the call is one for Python.
struct Call {
  const Torch& torch = Torch::get();
  /// By row. Null: the function has no such argument, and what would be read of it stays as it is.
  std::array<PyObject*, kRows> given{};
  AttentionParams params;
  Tensor q, out;
  Keys k, v, k_rope;
  Matrix queries;
  std::optional<DType> token_dtype;  // of a quantized latent cache, in the place of the dtype of its bytes
  int token_bytes = 0;               // as they are stored
  Backend backend = Backend::kAuto;
  int device = 0;
  bool hnd = false;                  // keys and values have heads before tokens
  bool takes_device_scales = false;  // descales may be tensors
  bool zero = false;                 // new outputs have rows that no kernel writes: they are zeros

  /// The arguments of a function, in its order.
  template <std::size_t kCount>
  void take(const int (&order)[kCount], PyObject* const* objects, Py_ssize_t count) {
    expect(count == Py_ssize_t(kCount));
    for (std::size_t i = 0; i < kCount; ++i) given[std::size_t(order[i])] = objects[i];
  }

  bool is_given(int row) const { return given[std::size_t(row)] != nullptr && given[std::size_t(row)] != Py_None; }
  PyObject* at(int row) const { return given[std::size_t(row)]; }

  /// q, k and v, in one tensor each.
  bool read_tensors();
  /// Types, devices and queries of those tensors: [heads, dim] is one row.
  bool read_queries();
  /// [tokens, heads, dim] of all requests.
  bool read_ragged_keys() { return read_keys_by(&read_ragged); }
  /// [batch, tokens, heads, dim] as rows, `stride` of them from one request to the next.
  bool read_dense_keys() { return read_keys_by(&read_dense); }
  /// [pages, page_size, heads, dim]. Pages of one token may lack their dimension.
  bool read_pages();
  bool read_mask();
  bool read_logits();
  /// The place of the output, and its type, which `params` has by default.
  bool read_output();
  /// Results where they were given, or new ones. The last to be read: it allocates.
  bool prepare(Results* results);

  bool read_lengths_of(int row, std::int64_t count, const std::int32_t** lengths) const {
    return !is_given(row) || read_lengths(torch, at(row), count, device, lengths);
  }
  /// Plans and enqueues it, on the current stream of its device: what the function returns.
  py::object launch(const Results& results, SharedSchedule* schedule = nullptr) const;

 private:
  using Read = bool(const Tensor& tensor, bool hnd, Keys* keys);
  static Read read_ragged, read_dense, read_in_pages;
  bool read_keys_by(Read* read);
  bool read_max_logits();
  bool read_descale(int row, double* number, DeviceScale* scale) const;
};

/// The tensor number `index` along the second dimension.
Tensor part_of(const Tensor& tensor, int index);
/// Keys and values in pages: [pages, 2, page_size, heads, dim] of both, or two tensors in a tuple.
bool read_cache(const Torch& torch, PyObject* object, Tensor* k, Tensor* v);
/// [heads, dim], [rows, heads, dim], or [batch, rows, heads, dim] whose rows follow one another.
bool read_rows(const Tensor& tensor, Matrix* matrix);
/// Whether the columns of `rope` lie right behind those of `x`, row by row: two views of one tensor.
bool is_behind(const Matrix& rope, const Matrix& x, int item_bytes);

}  // namespace cutlass_kernels
