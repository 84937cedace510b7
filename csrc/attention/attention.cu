// mlbench::short_attention and mlbench::short_attention_backward on CUDA: checks of the arguments, outputs, launches.
// Schema, reference, fake tensors and autograd are Python's (mlbench_core/ops/pytorch/attention.py).
#include "attention/attention.cuh"

#include <cmath>
#include <tuple>

#include "common/torch_abi.cuh"

namespace mlbench::attention {
namespace {

using OptionalTensor = std::optional<Tensor>;

constexpr int kBytes = 2;                    // of an element
constexpr int kAlignment = 16 / kBytes;      // elements

std::string text(int64_t number) { return std::to_string(number); }

// The layout of a call: padded (batch, max_length, heads, d) or packed (rows, heads, d).
struct Layout {
  bool is_packed;
  int64_t batch, heads, head_dim, max_query, max_key;
};

Layout layout_of(const Tensor& query, const OptionalTensor& query_starts, const OptionalTensor& key_starts,
                 int64_t max_query, int64_t max_key) {
  require(query_starts.has_value() == key_starts.has_value(),
          "give both query_starts and key_starts (packed) or neither");
  const bool is_packed = query_starts.has_value();
  const int64_t dim = is_packed ? 3 : 4;
  require(query.dim() == dim, "query must have " + text(dim) + " dimensions in the " +
                                  (is_packed ? "packed" : "padded") + " layout, not " + text(query.dim()));
  require(max_query >= 0 && max_query <= kMaxLength && max_key >= 0 && max_key <= kMaxLength,
          "max_query and max_key must be in 0 .. " + text(kMaxLength) + ", not " + text(max_query) + " and " +
              text(max_key) + "; use scaled_dot_product_attention for longer sentences");
  const int64_t batch = is_packed ? query_starts->numel() - 1 : query.size(0);
  require(batch >= 0, "query_starts must have batch + 1 entries, not none");
  return {is_packed, batch, query.size(dim - 2), query.size(dim - 1), max_query, max_key};
}

// `tensor` as the kernels take it; throws unless it fits `query` (dtype, device), `length` rows, and 16-byte accesses.
Strided strided(const Tensor& tensor, const Tensor& query, const Layout& layout, int64_t length, const char* name) {
  require_device(tensor, query.get_device_index(), name);
  require_dtype(tensor, query.scalar_type(), name);
  if (layout.is_packed) {
    require_shape(tensor, {tensor.dim() == 3 ? tensor.size(0) : -1, layout.heads, layout.head_dim}, name);
  } else {
    require_shape(tensor, {layout.batch, length, layout.heads, layout.head_dim}, name);
  }
  const int64_t last = tensor.dim() - 1;
  const auto is_aligned = [&](int64_t dim) { return tensor.size(dim) <= 1 || tensor.stride(dim) % kAlignment == 0; };
  bool aligned = tensor.stride(last) == 1 && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim < last; ++dim) aligned = aligned && is_aligned(dim);
  require(aligned || tensor.numel() == 0,
          std::string(name) + " must have stride(-1) = 1 and rows aligned to 16 bytes; call contiguous()");
  return {tensor.data_ptr(), layout.is_packed ? 0 : tensor.stride(0), tensor.stride(last - 2), tensor.stride(last - 1)};
}

Sentences sentences(const OptionalTensor& starts, const OptionalTensor& padding, const Tensor& query,
                    const Layout& layout, int64_t max_length, const char* name) {
  if (starts.has_value()) {
    const std::string starts_name = std::string(name) + "_starts", padding_name = std::string(name) + "_padding";
    require_device(*starts, query.get_device_index(), starts_name.c_str());
    require_dtype(*starts, ScalarType::Int, starts_name.c_str());
    require_shape(*starts, {layout.batch + 1}, starts_name.c_str());
    require(starts->is_contiguous(), starts_name + " must be contiguous");
    require(!padding.has_value(), padding_name + " must be None in the packed layout");
  }
  if (padding.has_value()) {
    const std::string padding_name = std::string(name) + "_padding";
    require_device(*padding, query.get_device_index(), padding_name.c_str());
    require_dtype(*padding, ScalarType::Bool, padding_name.c_str());
    require_shape(*padding, {layout.batch, max_length}, padding_name.c_str());
    require(padding->stride(1) == 1 || max_length <= 1, padding_name + " must have stride(-1) = 1; call contiguous()");
  }
  return {data_or_null<int32_t>(starts), data_or_null<uint8_t>(padding), padding.has_value() ? padding->stride(0) : 0,
          static_cast<int32_t>(max_length)};
}

// The drop rate as the number of 65,536ths that the kernels compare 16 random bits with.
uint32_t threshold_of(double dropout_p, const OptionalTensor& seed, const Tensor& query) {
  require(dropout_p >= 0.0 && dropout_p < 1.0, "dropout_p must be in [0, 1), not " + std::to_string(dropout_p));
  const double threshold = std::floor(dropout_p * 65536.0 + 0.5);
  require(threshold < 65536.0, "dropout_p = " + std::to_string(dropout_p) + " would drop every weight");
  if (threshold > 0.0) {
    require(seed.has_value(), "dropout needs a seed: an int64 tensor of one element on the device");
    require_device(*seed, query.get_device_index(), "seed");
    require_dtype(*seed, ScalarType::Long, "seed");
    require(seed->numel() == 1, "seed must have one element, not " + text(seed->numel()));
  }
  return static_cast<uint32_t>(threshold);
}

// What both passes share.
Parameters parameters_of(const Tensor& query, const Tensor& key, const Tensor& value,
                         const OptionalTensor& query_starts, const OptionalTensor& key_starts,
                         const OptionalTensor& query_padding, const OptionalTensor& key_padding, bool is_causal,
                         double scale, double dropout_p, const OptionalTensor& seed, int64_t offset,
                         const Layout& layout) {
  require(std::isfinite(scale) && scale > 0.0, "scale must be positive, not " + std::to_string(scale));
  require(layout.batch * layout.heads <= INT32_MAX, "batch * heads must be below 2^31");
  Parameters p{};
  p.query = strided(query, query, layout, layout.max_query, "query");
  p.key = strided(key, query, layout, layout.max_key, "key");
  p.value = strided(value, query, layout, layout.max_key, "value");
  p.queries = sentences(query_starts, query_padding, query, layout, layout.max_query, "query");
  p.keys = sentences(key_starts, key_padding, query, layout, layout.max_key, "key");
  require(key.size(0) == value.size(0), "key and value must have the same number of rows");
  p.threshold = threshold_of(dropout_p, seed, query);
  p.seed = p.threshold > 0 ? data<int64_t>(*seed) : nullptr;
  p.batch = static_cast<int32_t>(layout.batch);
  p.heads = static_cast<int32_t>(layout.heads);
  p.is_causal = is_causal;
  p.scale = static_cast<float>(scale);
  p.offset = static_cast<uint32_t>(offset);
  return p;
}

// A dense tensor of query's shape, time-first if query is.
Tensor output_like(const Tensor& query, const Layout& layout) {
  if (!layout.is_packed && query.stride(0) < query.stride(1)) {
    const std::vector<int64_t> shape{layout.max_query, layout.batch, layout.heads, layout.head_dim};
    return torch::stable::transpose(empty(query, shape, query.scalar_type()), 0, 1);
  }
  return empty(query, {query.sizes().begin(), query.sizes().end()}, query.scalar_type());
}

void require_head_dim(bool is_known, const Layout& layout) {
  require(is_known, "head dimension must be 32 or 64, not " + text(layout.head_dim));
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                           const OptionalTensor& query_starts, const OptionalTensor& key_starts,
                                           int64_t max_query, int64_t max_key, const OptionalTensor& query_padding,
                                           const OptionalTensor& key_padding, bool is_causal, double scale,
                                           double dropout_p, const OptionalTensor& seed, int64_t offset) {
  const Layout layout = layout_of(query, query_starts, key_starts, max_query, max_key);
  Parameters p = parameters_of(query, key, value, query_starts, key_starts, query_padding, key_padding, is_causal,
                               scale, dropout_p, seed, offset, layout);
  const DeviceGuard guard(query.get_device_index());
  const Tensor output = output_like(query, layout);
  const Tensor logsumexp = empty(query, {layout.batch, layout.heads, max_query}, ScalarType::Float);
  p.output = strided(output, query, layout, max_query, "output");
  p.logsumexp = data<float>(logsumexp);
  const Stream stream = current_stream(query.get_device_index());
  dispatch_half(query.scalar_type(), "query", [&]<class T>(Type<T>) {
    require_head_dim(launch_forward<T>(p, layout.head_dim, stream), layout);
  });
  return {output, logsumexp};
}

void backward(const Tensor& grad_output, const Tensor& query, const Tensor& key, const Tensor& value,
                              const Tensor& logsumexp, const OptionalTensor& query_starts,
                              const OptionalTensor& key_starts, int64_t max_query, int64_t max_key,
                              const OptionalTensor& query_padding, const OptionalTensor& key_padding, bool is_causal,
                              double scale, double dropout_p, const OptionalTensor& seed, int64_t offset,
                              const Tensor& grad_query, const Tensor& grad_key, const Tensor& grad_value) {
  const Layout layout = layout_of(query, query_starts, key_starts, max_query, max_key);
  Parameters p = parameters_of(query, key, value, query_starts, key_starts, query_padding, key_padding, is_causal,
                               scale, dropout_p, seed, offset, layout);
  p.grad_output = strided(grad_output, query, layout, max_query, "grad_output");
  p.grad_query = strided(grad_query, query, layout, max_query, "grad_query");
  p.grad_key = strided(grad_key, query, layout, max_key, "grad_key");
  p.grad_value = strided(grad_value, query, layout, max_key, "grad_value");
  require_device(logsumexp, query.get_device_index(), "logsumexp");
  require_dtype(logsumexp, ScalarType::Float, "logsumexp");
  require_shape(logsumexp, {layout.batch, layout.heads, max_query}, "logsumexp");
  require(logsumexp.is_contiguous(), "logsumexp must be contiguous");
  p.logsumexp = data<float>(logsumexp);
  const DeviceGuard guard(query.get_device_index());
  const Stream stream = current_stream(query.get_device_index());
  dispatch_half(query.scalar_type(), "query", [&]<class T>(Type<T>) {
    require_head_dim(launch_backward<T>(p, layout.head_dim, stream), layout);
  });
}

}  // namespace
}  // namespace mlbench::attention

STABLE_TORCH_LIBRARY_IMPL(mlbench, CUDA, m) {
  m.impl("short_attention", TORCH_BOX(&mlbench::attention::forward));
  m.impl("short_attention_backward", TORCH_BOX(&mlbench::attention::backward));
}
