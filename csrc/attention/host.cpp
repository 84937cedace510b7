// C entry points of the attention kernels on the emulator; tests/csrc/test_attention_kernels.py calls them.
#include "attention/attention.cuh"

namespace {

using mlbench::attention::Parameters;

template <class T>
bool forward(const Parameters& p, int head_dim) {
  if (head_dim == 32) mlbench::attention::launch_forward<T, 32>(p, {});
  if (head_dim == 64) mlbench::attention::launch_forward<T, 64>(p, {});
  return head_dim == 32 || head_dim == 64;
}

template <class T>
bool backward(const Parameters& p, int head_dim) {
  if (head_dim == 32) mlbench::attention::launch_backward<T, 32>(p, {});
  if (head_dim == 64) mlbench::attention::launch_backward<T, 64>(p, {});
  return head_dim == 32 || head_dim == 64;
}

}  // namespace

// The size of Parameters, which the tests' copy of the structure must have.
extern "C" size_t mlbench_attention_parameters_bytes() { return sizeof(Parameters); }

// Both return whether there is a kernel for this head dimension.
extern "C" bool mlbench_attention_forward(const Parameters* p, int head_dim, bool is_bfloat16) {
  return is_bfloat16 ? forward<mlbench::bfloat>(*p, head_dim) : forward<mlbench::half>(*p, head_dim);
}

extern "C" bool mlbench_attention_backward(const Parameters* p, int head_dim, bool is_bfloat16) {
  return is_bfloat16 ? backward<mlbench::bfloat>(*p, head_dim) : backward<mlbench::half>(*p, head_dim);
}
