// The forward kernel; attention.cuh has its data flow.
#pragma once

#include "attention/products.cuh"
#include "attention/scores.cuh"

namespace mlbench::attention {

// Blocks (of `tiles` warps) that are to share a multiprocessor: as many as the registers of its four quarters allow
// without spills. A thread has 96 registers if there are 17 to 20 warps, 128 with 13 to 16, 168 with 9 to 12.
constexpr int forward_blocks(int tiles) { return tiles == 6 ? 2 : 20 / tiles; }

inline size_t forward_shared_bytes(int head_dim, int max_query, int max_key) {
  const size_t rows = kTile * (tiles_of(max_query) + 2 * tiles_of(max_key));
  return kMaskBytes + rows * (head_dim + kPadding) * 2;
}

// lse of the lane's two rows; every position up to max_query is written.
__device__ inline void store_logsumexp(const Parameters& p, const Block& block, int first, const float (&lse)[2]) {
  if (lane_of_thread() % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + 8 * r;
    if (i < p.queries.max_length) block.logsumexp(p)[i] = lse[r];
  }
}

// One head of one sentence; queries and keys <= 16 kTiles.
template <class T, int kHeadDim, int kTiles>
__global__ void __launch_bounds__(32 * kTiles, forward_blocks(kTiles)) short_attention_forward(Parameters p) {
  const Block block(p);
  uint32_t* query_bits = reinterpret_cast<uint32_t*>(shared_memory());
  uint32_t* key_bits = query_bits + kMaskWords;
  T* Q = reinterpret_cast<T*>(key_bits + kMaskWords);
  T* K = Q + kTile * tiles_of(p.queries.max_length) * kRow<kHeadDim>;
  T* V = K + kTile * tiles_of(p.keys.max_length) * kRow<kHeadDim>;
  const int queries = block.queries.length, keys = block.keys.length;

  write_visible(query_bits, p.queries, block.sentence, queries);
  write_visible(key_bits, p.keys, block.sentence, keys);
  __syncthreads();
  load_rows<T, kHeadDim>(Q, block.rows<const T>(p.query, block.queries), p.query.position_stride, queries, query_bits);
  load_rows<T, kHeadDim>(K, block.rows<const T>(p.key, block.keys), p.key.position_stride, keys, key_bits);
  cp_async_commit();
  load_rows<T, kHeadDim>(V, block.rows<const T>(p.value, block.keys), p.value.position_stride, keys, key_bits);
  cp_async_commit();

  const Mask mask{query_bits, key_bits, p.is_causal != 0, block.causal_shift()};
  const int tile = warp_of_thread();
  const Rows rows(mask, tile);
  const uint32_t active = mask.key_tiles<kTiles>(tile);
  const Dropout dropout(p, block);

  cp_async_wait<1>();
  __syncthreads();   // Q and K are there
  Accumulators<kTiles> S = {};
  float top[2] = {0.0f, 0.0f}, sum[2] = {0.0f, 0.0f};
  if (active != 0) {
    multiply_transposed<T, kHeadDim>(S, Q + kTile * tile * kRow<kHeadDim>, K, active);
    hide(S, mask, rows, active);
    softmax_numerator(S, p.scale * kLog2E, active, top, sum);
    for_each_dropped(S, dropout, rows, active, [](float& weight) { weight = 0.0f; });
  }

  cp_async_wait<0>();
  __syncthreads();   // V is there
  Accumulators<kHeadDim / kTile> O = {};
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1)) continue;
    Fragment P;
    round_to_a<T>(P, S[t]);
    multiply_rows<T, kHeadDim>(O, P, V + kTile * t * kRow<kHeadDim>);
  }

  float lse[2], normalizer[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool sees_nothing = sum[r] == 0.0f;
    lse[r] = sees_nothing ? INFINITY : (top[r] + log2_fast(sum[r])) * kLn2;
    normalizer[r] = sees_nothing ? 0.0f : dropout.gain() / sum[r];
  }
  scale_rows(O, normalizer[0], normalizer[1]);
  T* output = block.rows<T>(p.output, block.queries) + kTile * tile * p.output.position_stride;
  store_rows<T, kHeadDim>(output, p.output.position_stride, queries - kTile * tile, O);
  store_logsumexp(p, block, rows.first, lse);
}

// One warp for each query tile.
template <class T>
bool launch_forward(const Parameters& p, int64_t head_dim, Stream stream) {
  const int query_tiles = tiles_of(p.queries.max_length), key_tiles = tiles_of(p.keys.max_length);
  return dispatch_head_dim(head_dim, [&](auto d) {
    if (p.batch == 0 || p.heads == 0 || query_tiles == 0) return;
    dispatch_tiles(query_tiles > key_tiles ? query_tiles : key_tiles, [&](auto tiles) {
      launch(short_attention_forward<T, d, tiles>, Dim3(p.batch * p.heads), 32 * query_tiles,
             forward_shared_bytes(d, p.queries.max_length, p.keys.max_length), stream, p);
    });
  });
}

}  // namespace mlbench::attention
