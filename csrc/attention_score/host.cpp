// The kernels of attention_score.cuh on the emulator, as C functions for tests. Pointers are to tensors in the shapes
// and layouts that the kernels' parameters describe; strides are (sentence, row), in elements.
#include <cstdint>

#include "attention_score/attention_score.cuh"

namespace {

using mlbench::GlobalMemory;
using namespace mlbench::score;

struct Sizes {
  int batch, queries, keys, features;
};

// Bytes from the first to the last element of rows.
size_t extent(const Rows& rows, int sentences, int count, int features, size_t element) {
  return ((sentences - 1) * rows.sentence_stride + (count - 1) * rows.row_stride + features) * element;
}

// Calls run(T{}) with the type of that number, which tests/csrc/test_attention_score_kernels.py shares.
template <class Run>
void dispatch(int dtype, Run&& run) {
  if (dtype == 0) return run(mlbench::half{});
  if (dtype == 1) return run(mlbench::bfloat{});
  return run(float{});
}

GlobalMemory inputs(const Rows& query, const Rows& keys, const float* bias, const float* v, const Sizes& s,
                    size_t element) {
  return {{query.data, extent(query, s.batch, s.queries, s.features, element)},
          {keys.data, extent(keys, s.batch, s.keys, s.features, element)},
          {bias, s.features * sizeof(float)},
          {v, s.features * sizeof(float)}};
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void attention_score(int dtype, const Sizes* sizes, const Rows* query, const Rows* keys, const float* bias,
                            const float* v, float* scores) {
  const Sizes& s = *sizes;
  dispatch(dtype, [&]<class T>(T) {
    const GlobalMemory memory = inputs(*query, *keys, bias, v, s, sizeof(T));
    launch_forward<T>({*query, *keys, bias, v, scores, s.batch, s.queries, s.keys, s.features}, {});
  });
}

EXPORT void attention_score_backward(int dtype, const Sizes* sizes, const Rows* query, const Rows* keys,
                                     const float* bias, const float* v, const float* delta, void* grad_query,
                                     void* grad_keys, float* grad_bias, float* grad_v, float* partial_weights,
                                     float* partial_keys) {
  const Sizes& s = *sizes;
  dispatch(dtype, [&]<class T>(T) {
    const GlobalMemory memory = inputs(*query, *keys, bias, v, s, sizeof(T));
    launch_backward<T>({*query, *keys, bias, v, delta, grad_query, grad_keys, grad_bias, grad_v, partial_weights,
                        chunk_count(s.queries) > 1 ? partial_keys : nullptr, s.batch, s.queries, s.keys, s.features},
                       {});
  });
}
