// GNMT's additive attention score, forward and backward, without ever storing a tanh.
//
//   e[b][t][s] = sum_h v[h] tanh(x),   x = q[b][t][h] + k[b][s][h] + bias[h],   for queries t, keys s, features h.
//
// With d = the gradient of e:
//
//   u[t][s][h] = d[t][s] (1 - tanh(x)^2)
//   grad_q[t][h] = v[h] sum_s u,   grad_k[s][h] = v[h] sum_t u,
//   grad_bias[h] = v[h] sum_b,t,s u,   grad_v[h] = sum_b,t,s d tanh(x)
//
// Shapes: q (batch, queries, H), k (batch, keys, H), of type T (half, bfloat or float), in any strides with the
// features next to one another and every row starting at a multiple of 16 bytes; bias and v (H,) and e, d (batch,
// queries, keys) float. H is a multiple of 8. All sums are in float32, in an order that depends on the shapes alone: no
// atomics.
//
// What it costs, for GNMT's batch = 128, queries = keys = 50, H = 1024 in half precision:
//
//                 tanh       float32 work beside it        read       written
//   forward       327.7 M    add, fma        0.98 GFLOP    26.2 MB    1.3 MB
//   backward      327.7 M    add, 4 fma      2.95 GFLOP    27.5 MB    26.2 MB + 1.0 MB of partial sums
//
// tanh.approx runs in the special function unit, which does 16 a clock on each SM where 128 float32 operations run: a
// warp's 32 tanh occupy it for 8 issue slots of the warp's scheduler. That bounds both passes, not memory, as long as
// the tanh and all that belongs to it take fewer than 8 slots. (On sm_80, with 64 float32 operations a clock, each of
// them takes the time of two slots, and the five of the backward pass are the bound.) Both kernels are built around
// this: values stay in registers over many tanh, many tanh are under way at once, and few are computed that are not
// needed (none in the forward pass). Not tried, for want of a GPU: tanh.approx.f16x2, two at once but rounded to half.
//
// score_forward: data flow. A warp computes a tile of 4 queries x 4 keys over all features, on its own: no shared
// memory, no barrier. A lane reads 8 neighbouring features of the 8 rows in 16-byte pieces (rows that neighbouring
// warps read too, so mostly from L1), adds 4 x 4 x 8 products to its 16 sums, and goes on 256 features further. At the
// end 16 shuffles leave the sum of pair i over all lanes in lanes 2 i and 2 i + 1. Eight warps, 2 x 4 tiles = 8 queries
// x 16 keys of one sentence, are a block. For each tanh: 3 slots, and 2 for addresses, reading and widening (counted in
// the code for sm_90).
//
// score_backward: data flow. A block takes up to 128 features, one for each thread, and up to 64 queries of one
// sentence (a chunk; GNMT's sentences have one). A thread computes all pairs of its queries and keys for its feature,
// so that no two threads add to the same number. Keys come in tiles of 16 (and of 4 for what is left of a sentence),
// which stay in registers with their gradients while the thread goes through the queries; gradients of queries are
// carried from tile to tile in shared memory. For each tanh: 6 slots, and 1 for reading d, q and the carried sums.
// Shared memory, for R queries and F threads:
//
//   float shifted[R][F]    q + bias, widened once                      each thread touches only its own column
//   float sums[R][F]       sum_s u so far                              likewise
//   float delta[R][16]     d for the tile of keys, 0 beyond the last   read by all; barriers before and after a change
//
// 4 R (2 F + 16) bytes: 54 KB at R = 50 (four blocks an SM), at most 68 KB. Sums over batch for bias and v go to a
// buffer, a row for each (sentence, chunk), as do gradients of keys where there is more than one chunk; sum_rows adds
// the rows up.
//
// How exact: tanhf for float inputs, so that results agree with the formula to float32 precision. For half and bfloat
// inputs tanh.approx.f32, whose relative error is at most 2^-11: half a unit in the last place of half, a sixteenth of
// one of bfloat. So a score is off by at most 2^-11 sum_h |v[h]|, as if each x's tanh had been rounded to half;
// 1 - tanh^2 by at most 2^-10, which is much of it only where the tanh is saturated and the gradient all but 0.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/launch.cuh"
#include "common/platform.cuh"

namespace mlbench::score {

// Rows of features, by sentence and position; strides in elements.
struct Rows {
  const void* data;
  int64_t sentence_stride;
  int64_t row_stride;

  template <class T>
  __device__ __forceinline__ const T* at(int sentence, int row) const {
    return static_cast<const T*>(data) + sentence * sentence_stride + row * row_stride;
  }
};

struct ForwardParameters {
  Rows query;
  Rows keys;
  const float* bias;
  const float* v;
  float* scores;  // (batch, queries, keys)
  int batch, query_count, key_count, features;
};

struct BackwardParameters {
  Rows query;
  Rows keys;
  const float* bias;
  const float* v;
  const float* delta;     // gradient of the scores, (batch, queries, keys)
  void* grad_query;       // T (batch, queries, H)
  void* grad_keys;        // T (batch, keys, H)
  float* grad_bias;       // (H,)
  float* grad_v;          // (H,)
  float* partial_weights; // (2, batch * chunks, H): addends of grad_bias, of grad_v
  float* partial_keys;    // (chunks, batch, keys, H): addends of grad_keys; null if there is one chunk
  int batch, query_count, key_count, features;
};

// Column sums of one or two matrices of the same shape.
struct SumParameters {
  const float* rows;  // (matrices, count, columns)
  void* first;        // T (columns,)
  void* second;       // likewise, of the second matrix
  int64_t count;
  int64_t columns;
};

constexpr int kWarp = 32;

// Forward: the features that a lane reads at once, a warp's tile, and how many tiles of queries and keys make a block.
template <class T>
constexpr int kLaneFeatures = 16 / sizeof(T);
constexpr int kTile = 4;
constexpr int kQueryTiles = 2;
constexpr int kKeyTiles = 4;
constexpr int kForwardThreads = kQueryTiles * kKeyTiles * kWarp;
constexpr int kBlockQueries = kQueryTiles * kTile;
constexpr int kBlockKeys = kKeyTiles * kTile;

// Backward: the most features and queries of a block; the keys of a tile, and of the small tiles at a sentence's end.
constexpr int kBackwardThreads = 128;
constexpr int kChunkQueries = 64;
constexpr int kKeys = 16;
constexpr int kFewKeys = 4;

template <class Integer>
__host__ __device__ constexpr Integer ceil_div(Integer a, Integer b) {
  return (a + b - 1) / b;
}

// Into how many chunks, all of the same number of queries but the last, the backward kernel divides a sentence.
__host__ __device__ constexpr int chunk_count(int queries) { return ceil_div(queries, kChunkQueries); }

// Four neighbouring floats, read at once.
__device__ __forceinline__ void read4(const float* from, float (&to)[4]) {
  const uint4v words = load16(from);
  to[0] = __uint_as_float(words.x);
  to[1] = __uint_as_float(words.y);
  to[2] = __uint_as_float(words.z);
  to[3] = __uint_as_float(words.w);
}

template <class T>
__device__ __forceinline__ float tanh_of(float x) {
  return tanh_fast(x);
}

template <>
__device__ __forceinline__ float tanh_of<float>(float x) {
  return tanhf(x);
}

// As many neighbouring features as 16 bytes hold, widened.
template <class T>
__device__ __forceinline__ void read_features(const T* from, float (&to)[kLaneFeatures<T>]) {
  const uint4v packed = load16(from);
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2v pair = unpack2<T>(words[i]);
    to[2 * i] = pair.x;
    to[2 * i + 1] = pair.y;
  }
}

template <>
__device__ __forceinline__ void read_features<float>(const float* from, float (&to)[4]) {
  read4(from, to);
}

// N floats, a multiple of four.
template <int N>
__device__ __forceinline__ void read_floats(const float* from, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    float four[4];
    read4(from + i, four);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[i + j] = four[j];
  }
}

// Sums of 16 numbers over the lanes of a warp, of number i in lanes 2 i and 2 i + 1: lanes at a distance divide the
// numbers between them, which halves their count each time.
__device__ __forceinline__ float sum_over_lanes(float (&numbers)[kTile * kTile], int lane) {
#pragma unroll
  for (int round = 1; round <= 4; ++round) {
    const int count = kTile * kTile >> round;
    const bool upper = (lane & (2 * count)) != 0;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float given = upper ? numbers[i] : numbers[i + count];
      const float kept = upper ? numbers[i + count] : numbers[i];
      numbers[i] = kept + __shfl_xor_sync(0xFFFFFFFFu, given, 2 * count);
    }
  }
  return numbers[0] + __shfl_xor_sync(0xFFFFFFFFu, numbers[0], 1);
}

// Adds to a lane's 16 sums what its features from `feature` on give.
template <class T>
__device__ __forceinline__ void add_features(const ForwardParameters& p, int sentence, int first_query, int first_key,
                                             int feature, float (&sums)[kTile * kTile]) {
  constexpr int kFeatures = kLaneFeatures<T>;
  float query[kTile][kFeatures], key[kTile][kFeatures], bias[kFeatures], v[kFeatures];
  // Rows beyond the last are read as the last, and not used.
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    read_features(p.query.at<T>(sentence, min(first_query + i, p.query_count - 1)) + feature, query[i]);
    read_features(p.keys.at<T>(sentence, min(first_key + i, p.key_count - 1)) + feature, key[i]);
  }
  read_floats(p.bias + feature, bias);
  read_floats(p.v + feature, v);
#pragma unroll
  for (int i = 0; i < kTile; ++i) {
    if (first_query + i >= p.query_count) continue;
#pragma unroll
    for (int f = 0; f < kFeatures; ++f) query[i][f] += bias[f];
#pragma unroll
    for (int j = 0; j < kTile; ++j) {
      if (first_key + j >= p.key_count) continue;
#pragma unroll
      for (int f = 0; f < kFeatures; ++f) sums[kTile * i + j] += v[f] * tanh_of<T>(query[i][f] + key[j][f]);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kForwardThreads, 2) score_forward(ForwardParameters p) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int blocks_of_keys = ceil_div(p.key_count, kBlockKeys);
  const int blocks_of_queries = ceil_div(p.query_count, kBlockQueries);
  const int sentence = blockIdx.x / (blocks_of_keys * blocks_of_queries);
  const int block = blockIdx.x % (blocks_of_keys * blocks_of_queries);
  const int first_query = block / blocks_of_keys * kBlockQueries + warp / kKeyTiles * kTile;
  const int first_key = block % blocks_of_keys * kBlockKeys + warp % kKeyTiles * kTile;
  if (first_query >= p.query_count || first_key >= p.key_count) return;  // the whole warp; there is no barrier

  float sums[kTile * kTile] = {};
  for (int feature = kLaneFeatures<T> * lane; feature < p.features; feature += kLaneFeatures<T> * kWarp) {
    add_features<T>(p, sentence, first_query, first_key, feature, sums);
  }
  __syncwarp(0xFFFFFFFFu);
  const float score = sum_over_lanes(sums, lane);
  const int query = first_query + lane / 2 / kTile;
  const int key = first_key + lane / 2 % kTile;
  if (lane % 2 == 0 && query < p.query_count && key < p.key_count) {
    p.scores[(static_cast<int64_t>(sentence) * p.query_count + query) * p.key_count + key] = score;
  }
}

// What a block of score_backward works on.
struct Share {
  int sentence;
  int chunk;
  int first_query;
  int queries;  // of this chunk
  int feature;  // of this thread; beyond the last it works on the last, and does not write
  bool writes;
};

__device__ __forceinline__ Share share_of_block(const BackwardParameters& p, int chunks) {
  const int slices = ceil_div(p.features, static_cast<int>(blockDim.x));
  const int feature = blockIdx.x % slices * blockDim.x + threadIdx.x;
  const int place = blockIdx.x / slices;
  const int chunk = place % chunks;
  const int chunk_queries = ceil_div(p.query_count, chunks);
  const int first_query = chunk * chunk_queries;
  return {place / chunks,
          chunk,
          first_query,
          min(chunk_queries, p.query_count - first_query),
          min(feature, p.features - 1),
          feature < p.features};
}

// Copies d of the share's queries and the kTileKeys keys from first_key on to shared memory, 0 beyond the last key.
template <int kTileKeys>
__device__ __forceinline__ void stage_delta(const BackwardParameters& p, const Share& share, int first_key,
                                            float* delta) {
  const float* from =
      p.delta + (static_cast<int64_t>(share.sentence) * p.query_count + share.first_query) * p.key_count;
  for (int i = threadIdx.x; i < share.queries * kTileKeys; i += blockDim.x) {
    const int key = first_key + i % kTileKeys;
    delta[i] = key < p.key_count ? from[static_cast<int64_t>(i / kTileKeys) * p.key_count + key] : 0.0f;
  }
}

template <class T>
__device__ __forceinline__ void write_key_gradient(const BackwardParameters& p, const Share& share, int64_t row,
                                                   float gradient) {
  const int64_t at = row * p.features + share.feature;
  if (p.partial_keys == nullptr) {
    static_cast<T*>(p.grad_keys)[at] = from_float<T>(gradient);
  } else {
    const int64_t all_keys = static_cast<int64_t>(p.batch) * p.key_count * p.features;
    p.partial_keys[share.chunk * all_keys + at] = gradient;
  }
}

// All pairs of the share's queries with the kTileKeys keys from first_key on, for this thread's feature. Adds sum_s u
// to `sums` and sum_t,s d tanh to `sum_v`, and writes v sum_t u for each key. There is no branch among the pairs of a
// query, so that their tanh overlap.
template <class T, int kTileKeys>
__device__ __forceinline__ void backward_of_keys(const BackwardParameters& p, const Share& share, int first_key,
                                                 float v, const float* shifted, float* delta, float* sums,
                                                 float& sum_v) {
  __syncthreads();  // everyone is done with the deltas of the keys before
  stage_delta<kTileKeys>(p, share, first_key, delta);
  __syncthreads();
  const int count = min(kTileKeys, p.key_count - first_key);
  float key[kTileKeys], sum_keys[kTileKeys];
#pragma unroll
  for (int j = 0; j < kTileKeys; ++j) {
    key[j] = j < count ? to_float(p.keys.at<T>(share.sentence, first_key + j)[share.feature]) : 0.0f;
    sum_keys[j] = 0.0f;
  }
  for (int t = 0; t < share.queries; ++t) {
    const int own = t * blockDim.x + threadIdx.x;
    const float query = shifted[own];
    float d[kTileKeys];
    read_floats(delta + t * kTileKeys, d);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < kTileKeys; ++j) {
      const float y = tanh_of<T>(query + key[j]);
      const float slope = 1.0f - y * y;
      sum += d[j] * slope;
      sum_keys[j] += d[j] * slope;
      sum_v += d[j] * y;
    }
    sums[own] += sum;
  }
  if (!share.writes) return;
  const int64_t first_row = static_cast<int64_t>(share.sentence) * p.key_count + first_key;
#pragma unroll
  for (int j = 0; j < kTileKeys; ++j) {
    if (j < count) write_key_gradient<T>(p, share, first_row + j, v * sum_keys[j]);
  }
}

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 4) score_backward(BackwardParameters p) {
  const int chunks = chunk_count(p.query_count);
  const Share share = share_of_block(p, chunks);
  float* shifted = reinterpret_cast<float*>(shared_memory());
  float* sums = shifted + share.queries * blockDim.x;
  float* delta = sums + share.queries * blockDim.x;

  const float bias = p.bias[share.feature];
  const float v = p.v[share.feature];
#pragma unroll 4
  for (int t = 0; t < share.queries; ++t) {
    const int own = t * blockDim.x + threadIdx.x;
    shifted[own] = to_float(p.query.at<T>(share.sentence, share.first_query + t)[share.feature]) + bias;
    sums[own] = 0.0f;
  }
  float sum_v = 0.0f;
  int first_key = 0;
  for (; p.key_count - first_key > kKeys - kFewKeys; first_key += kKeys) {
    backward_of_keys<T, kKeys>(p, share, first_key, v, shifted, delta, sums, sum_v);
  }
  for (; first_key < p.key_count; first_key += kFewKeys) {
    backward_of_keys<T, kFewKeys>(p, share, first_key, v, shifted, delta, sums, sum_v);
  }
  if (!share.writes) return;
  float sum_bias = 0.0f;
  const int64_t first_row = static_cast<int64_t>(share.sentence) * p.query_count + share.first_query;
  for (int t = 0; t < share.queries; ++t) {
    const float gradient = v * sums[t * blockDim.x + threadIdx.x];
    static_cast<T*>(p.grad_query)[(first_row + t) * p.features + share.feature] = from_float<T>(gradient);
    sum_bias += gradient;
  }
  const int64_t rows = static_cast<int64_t>(p.batch) * chunks;
  const int64_t row = static_cast<int64_t>(share.sentence) * chunks + share.chunk;
  p.partial_weights[row * p.features + share.feature] = sum_bias;
  p.partial_weights[(rows + row) * p.features + share.feature] = sum_v;
}

// Column sums: block (x, y) sums 32 columns of matrix y. Each warp adds up every so-many-th row, then the first warp
// adds up the warps' sums, which lie in shared memory as float[warps][32].
template <class T>
__global__ void __launch_bounds__(1024) sum_rows(SumParameters p) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const float* rows = p.rows + blockIdx.y * p.count * p.columns;
  float* sums = reinterpret_cast<float*>(shared_memory());

  float sum = 0.0f;
  if (column < p.columns) {
    for (int64_t row = warp; row < p.count; row += warps) sum += rows[row * p.columns + column];
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (warp != 0 || column >= p.columns) return;
  float total = 0.0f;
  for (int other = 0; other < warps; ++other) total += sums[other * kWarp + lane];
  static_cast<T*>(blockIdx.y == 0 ? p.first : p.second)[column] = from_float<T>(total);
}

// The number of blocks of either kernel; both must be below 2^31.
inline int64_t forward_blocks(const ForwardParameters& p) {
  return static_cast<int64_t>(p.batch) * ceil_div(p.query_count, kBlockQueries) * ceil_div(p.key_count, kBlockKeys);
}

inline int backward_threads(int features) { return min(kBackwardThreads, ceil_div(features, kWarp) * kWarp); }

inline int64_t backward_blocks(const BackwardParameters& p) {
  return static_cast<int64_t>(p.batch) * chunk_count(p.query_count) *
         ceil_div(p.features, backward_threads(p.features));
}

template <class T>
void launch_forward(const ForwardParameters& p, Stream stream) {
  const Dim3 grid(static_cast<unsigned>(forward_blocks(p)));
  launch(score_forward<T>, grid, kForwardThreads, 0, stream, p);
}

template <class T>
void launch_sum_rows(const SumParameters& p, int matrices, Stream stream) {
  const int threads = kWarp * static_cast<int>(p.count < 32 ? p.count : 32);
  const Dim3 grid(static_cast<unsigned>(ceil_div<int64_t>(p.columns, kWarp)), matrices);
  launch(sum_rows<T>, grid, threads, threads * sizeof(float), stream, p);
}

template <class T>
void launch_backward(const BackwardParameters& p, Stream stream) {
  const int chunks = chunk_count(p.query_count);
  const int threads = backward_threads(p.features);
  const size_t shared_bytes = sizeof(float) * ceil_div(p.query_count, chunks) * (2 * threads + kKeys);
  launch(score_backward<T>, Dim3(static_cast<unsigned>(backward_blocks(p))), threads, shared_bytes, stream, p);

  const int64_t rows = static_cast<int64_t>(p.batch) * chunks;
  launch_sum_rows<float>({p.partial_weights, p.grad_bias, p.grad_v, rows, p.features}, 2, stream);
  if (p.partial_keys == nullptr) return;
  const int64_t columns = static_cast<int64_t>(p.batch) * p.key_count * p.features;
  launch_sum_rows<T>({p.partial_keys, p.grad_keys, nullptr, chunks, columns}, 1, stream);
}

}  // namespace mlbench::score
