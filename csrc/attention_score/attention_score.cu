// mlbench::attention_score and mlbench::attention_score_backward for CUDA tensors: the operators that
// mlbench_core/ops/pytorch/attention_score.py defines, on the kernels of attention_score.cuh.
#include "attention_score/attention_score.cuh"

#include <cstdint>
#include <limits>
#include <tuple>

#include "common/torch_abi.cuh"

namespace mlbench::score {
namespace {

// The tensor if its rows are as the kernels read them, otherwise a copy.
Tensor with_aligned_rows(const Tensor& tensor) {
  const int64_t elements = 16 / static_cast<int64_t>(tensor.element_size());
  const auto starts_aligned = [](const Tensor& t) { return reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0; };
  if (tensor.stride(2) == 1 && tensor.stride(0) % elements == 0 && tensor.stride(1) % elements == 0 &&
      starts_aligned(tensor)) {
    return tensor;
  }
  const Tensor dense = torch::stable::contiguous(tensor);
  return starts_aligned(dense) ? dense : torch::stable::clone(dense);
}

// Bias or v in float32, copied if it has another type or is not dense.
Tensor as_float(const Tensor& weights) {
  const Tensor dense = torch::stable::contiguous(torch::stable::to(weights, ScalarType::Float));
  return reinterpret_cast<uintptr_t>(dense.data_ptr()) % 16 == 0 ? dense : torch::stable::clone(dense);
}

Rows rows_of(const Tensor& tensor) { return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1)}; }

// The operators' inputs, checked and as the kernels read them.
struct Inputs {
  Tensor query, keys, bias, v;
  int batch, query_count, key_count, features;
};

int checked_size(const Tensor& tensor, int64_t dimension, const char* name) {
  const int64_t size = tensor.size(dimension);
  require(size > 0 && size <= std::numeric_limits<int32_t>::max() / 2,
          std::string(name) + " has a dimension of size " + std::to_string(size) + ", which the kernels cannot take");
  return static_cast<int>(size);
}

Inputs checked(const Tensor& query, const Tensor& keys, const Tensor& bias, const Tensor& v) {
  require(query.dim() == 3 && keys.dim() == 3, "query and keys must be of shape (batch, positions, H)");
  const int64_t batch = query.size(0), features = query.size(2);
  require_shape(keys, {batch, keys.size(1), features}, "keys");
  require_shape(bias, {features}, "bias");
  require_shape(v, {features}, "v");
  require(features % 8 == 0, "H is " + std::to_string(features) + "; the kernels need a multiple of 8");
  require_dtype(keys, query.scalar_type(), "keys");
  const int32_t device = query.get_device_index();
  require_device(keys, device, "keys");
  require_device(bias, device, "bias");
  require_device(v, device, "v");
  return {with_aligned_rows(query),
          with_aligned_rows(keys),
          as_float(bias),
          as_float(v),
          checked_size(query, 0, "query"),
          checked_size(query, 1, "query"),
          checked_size(keys, 1, "keys"),
          checked_size(query, 2, "query")};
}

void require_grid(int64_t blocks) {
  require(blocks <= std::numeric_limits<int32_t>::max(), "the tensors are too large: " + std::to_string(blocks) +
                                                             " blocks, and CUDA launches fewer than 2^31");
}

Tensor attention_score(Tensor query, Tensor keys, Tensor bias, Tensor v) {
  const DeviceGuard guard(query.get_device_index());
  const Inputs in = checked(query, keys, bias, v);
  Tensor scores = empty(query, {in.batch, in.query_count, in.key_count}, ScalarType::Float);
  const ForwardParameters parameters{rows_of(in.query), rows_of(in.keys), data<float>(in.bias), data<float>(in.v),
                                     data<float>(scores), in.batch, in.query_count, in.key_count, in.features};
  require_grid(forward_blocks(parameters));
  const Stream stream = current_stream(query.get_device_index());
  dispatch_float(query.scalar_type(), "query",
                 [&](auto type) { launch_forward<typename decltype(type)::type>(parameters, stream); });
  return scores;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_score_backward(Tensor grad, Tensor query, Tensor keys, Tensor bias,
                                                                    Tensor v) {
  const DeviceGuard guard(query.get_device_index());
  const Inputs in = checked(query, keys, bias, v);
  require_device(grad, query.get_device_index(), "grad");
  require_dtype(grad, ScalarType::Float, "grad");
  require_shape(grad, {in.batch, in.query_count, in.key_count}, "grad");
  const Tensor delta = torch::stable::contiguous(grad);

  Tensor grad_query = empty(query, {in.batch, in.query_count, in.features}, query.scalar_type());
  Tensor grad_keys = empty(query, {in.batch, in.key_count, in.features}, query.scalar_type());
  Tensor grad_bias = empty(query, {in.features}, ScalarType::Float);
  Tensor grad_v = empty(query, {in.features}, ScalarType::Float);
  const int64_t chunks = chunk_count(in.query_count);
  const Tensor partial_weights = empty(query, {2, in.batch * chunks, in.features}, ScalarType::Float);
  const Tensor partial_keys =
      empty(query, {chunks > 1 ? chunks : 0, in.batch, in.key_count, in.features}, ScalarType::Float);

  const BackwardParameters parameters{rows_of(in.query),
                                      rows_of(in.keys),
                                      data<float>(in.bias),
                                      data<float>(in.v),
                                      data<float>(delta),
                                      grad_query.data_ptr(),
                                      grad_keys.data_ptr(),
                                      data<float>(grad_bias),
                                      data<float>(grad_v),
                                      data<float>(partial_weights),
                                      chunks > 1 ? data<float>(partial_keys) : nullptr,
                                      in.batch,
                                      in.query_count,
                                      in.key_count,
                                      in.features};
  require_grid(backward_blocks(parameters));
  const Stream stream = current_stream(query.get_device_index());
  dispatch_float(query.scalar_type(), "query",
                 [&](auto type) { launch_backward<typename decltype(type)::type>(parameters, stream); });
  return {grad_query, grad_keys, torch::stable::to(grad_bias, bias.scalar_type()),
          torch::stable::to(grad_v, v.scalar_type())};
}

}  // namespace
}  // namespace mlbench::score

STABLE_TORCH_LIBRARY_IMPL(mlbench, CUDA, m) {
  m.impl("attention_score", TORCH_BOX(&mlbench::score::attention_score));
  m.impl("attention_score_backward", TORCH_BOX(&mlbench::score::attention_score_backward));
}
