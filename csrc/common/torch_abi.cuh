// What the bindings (csrc/*/*.cu) need of torch beyond its stable ABI headers: the current CUDA stream, outputs on the
// device of an input, checks of arguments, and the choice of a kernel by dtype. Only for nvcc.
//
// The stable ABI (torch/csrc/stable, torch/headeronly) lets one binary serve several versions of torch.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/launch.cuh"

namespace mlbench {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// Throws std::runtime_error with the message, put together from its parts only then, if the condition does not hold.
template <class... Parts>
void require(bool condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  message << "mlbench: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// The stream that torch.cuda.current_stream(device) is.
//
// The function lives in libtorch_cuda, which the CPU build of torch lacks and this library must not need in order to
// load. Where a CUDA tensor exists it is loaded.
inline Stream current_stream(int32_t device_index) {
  using GetStream = int32_t (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol = library == nullptr ? nullptr : dlsym(library, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream>(symbol);
  }();
  require(get_stream != nullptr, "this torch has no aoti_torch_get_current_cuda_stream (it is built without CUDA)");
  void* stream = nullptr;
  require(get_stream(device_index, &stream) == 0, "torch gave no current CUDA stream");
  return static_cast<Stream>(stream);
}

// Throws unless the tensor is on the CUDA device of that index.
inline void require_device(const Tensor& tensor, int32_t device_index, const char* name) {
  require(tensor.is_cuda() && tensor.get_device_index() == device_index, name, " must be on CUDA device ",
          device_index);
}

// Throws unless the tensor has that dtype.
inline void require_dtype(const Tensor& tensor, ScalarType dtype, const char* name) {
  require(tensor.scalar_type() == dtype, name, " must be of ", torch::headeronly::toString(dtype), ", not ",
          torch::headeronly::toString(tensor.scalar_type()));
}

// "(2, 3)" of the sizes 2 and 3.
template <class Sizes>
std::string shape_text(const Sizes& sizes) {
  std::string text;
  for (const int64_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "(" + text + ")";
}

// Throws unless the tensor has that shape.
inline void require_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  const auto sizes = tensor.sizes();
  if (std::equal(shape.begin(), shape.end(), sizes.begin(), sizes.end())) return;
  require(false, name, " must be of shape ", shape_text(shape), ", not ", shape_text(sizes));
}

// An uninitialised contiguous tensor on the device of `like`.
inline Tensor empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  return torch::stable::new_empty(like, shape, dtype);
}

// An optional tensor's data, null where there is none.
template <class T>
const T* data_or_null(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->data_ptr()) : nullptr;
}

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
struct Type {
  using type = T;
};

// Calls run(Type<half>{}) or run(Type<bfloat>{}) by the dtype.
template <class Run>
auto dispatch_half(ScalarType dtype, const char* name, Run&& run) {
  if (dtype == ScalarType::Half) return run(Type<half>{});
  if (dtype == ScalarType::BFloat16) return run(Type<bfloat>{});
  throw std::runtime_error(std::string("mlbench: ") + name + " must be of Half or BFloat16, not " +
                           torch::headeronly::toString(dtype));
}

// Calls run(Type<half>{}), run(Type<bfloat>{}) or run(Type<float>{}) by the dtype.
template <class Run>
auto dispatch_float(ScalarType dtype, const char* name, Run&& run) {
  if (dtype == ScalarType::Float) return run(Type<float>{});
  return dispatch_half(dtype, name, run);
}

}  // namespace mlbench
