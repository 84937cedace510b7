// C entry points of the attention kernels on the emulator; tests/csrc/test_attention_kernels.py calls them.
#include "attention/backward.cuh"
#include "attention/forward.cuh"

using mlbench::attention::Parameters;

// The size of Parameters, which the tests' copy of the structure must have.
extern "C" size_t mlbench_attention_parameters_bytes() { return sizeof(Parameters); }

// Both return whether there is a kernel for this head dimension.
extern "C" bool mlbench_attention_forward(const Parameters* p, int head_dim, bool is_bfloat16) {
  return is_bfloat16 ? mlbench::attention::launch_forward<mlbench::bfloat>(*p, head_dim, {})
                     : mlbench::attention::launch_forward<mlbench::half>(*p, head_dim, {});
}

extern "C" bool mlbench_attention_backward(const Parameters* p, int head_dim, bool is_bfloat16) {
  return is_bfloat16 ? mlbench::attention::launch_backward<mlbench::bfloat>(*p, head_dim, {})
                     : mlbench::attention::launch_backward<mlbench::half>(*p, head_dim, {});
}
