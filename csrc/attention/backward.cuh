// The backward kernel; attention.cuh has its data flow.
#pragma once

#include "attention/products.cuh"
#include "attention/scores.cuh"

namespace mlbench::attention {

// As forward_blocks().
constexpr int backward_blocks(int tiles) { return tiles == 3 ? 6 : 15 / tiles; }

inline size_t backward_shared_bytes(int head_dim, int max_query, int max_key) {
  const size_t queries = kTile * tiles_of(max_query), keys = kTile * tiles_of(max_key);
  const size_t row = head_dim + kPadding;
  const size_t value = keys * row, weights = queries * (keys + kPadding);
  return kMaskBytes + 2 * ((2 * queries + keys) * row + (value > weights ? value : weights));
}

// log2(e) lse of the lane's two rows; +inf beyond the sentence.
__device__ inline void load_logsumexp(const Parameters& p, const Block& block, int first, float (&lse2)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + 8 * r;
    lse2[r] = i < block.queries.length ? block.logsumexp(p)[i] * kLog2E : INFINITY;
  }
}

// A dropped weight is kept as -P, so that one draw serves D(P) and D(dP).
__device__ inline float kept(float p) { return p < 0.0f ? 0.0f : p; }

// dS = P (D(dP) - delta), delta = rowsum(P D(dP)), in the place of dP.
template <int kTiles>
__device__ void softmax_gradient(Accumulators<kTiles>& dP, const Accumulators<kTiles>& P, float gain,
                                 uint32_t active) {
  float delta[2] = {0.0f, 0.0f};
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float p = P[t][i / 4][i % 4];
      float& x = dP[t][i / 4][i % 4];
      x = p < 0.0f ? 0.0f : gain * x;
      delta[i % 4 / 2] += fabsf(p) * x;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) delta[r] = sum_over_row(delta[r]);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = dP[t][i / 4][i % 4];
      x = fabsf(P[t][i / 4][i % 4]) * (x - delta[i % 4 / 2]);
    }
  }
}

// c (16 keys, d) += W^T X over all query tiles; W (queries, keys) and X (queries, d) in shared memory.
template <class T, int kHeadDim>
__device__ void multiply_weights(Accumulators<kHeadDim / kTile>& c, const T* W, int stride, const T* X,
                                 const Mask& mask, int key_tile, int query_tiles) {
  for (int q = 0; q < query_tiles; ++q) {
    if (!mask.is_active(q, key_tile)) continue;
    Fragment a;
    load_a_transposed(a, W + kTile * q * stride + kTile * key_tile, stride);
    multiply_rows<T, kHeadDim>(c, a, X + kTile * q * kRow<kHeadDim>);
  }
}

// One head of one sentence; queries and keys <= 16 kTiles. Every row of dQ, dK and dV is written.
template <class T, int kHeadDim, int kTiles>
__global__ void __launch_bounds__(32 * kTiles, backward_blocks(kTiles)) short_attention_backward(Parameters p) {
  const Block block(p);
  const int query_tiles = tiles_of(p.queries.max_length), key_tiles = tiles_of(p.keys.max_length);
  uint32_t* query_bits = reinterpret_cast<uint32_t*>(shared_memory());
  uint32_t* key_bits = query_bits + kMaskWords;
  T* Q = reinterpret_cast<T*>(key_bits + kMaskWords);
  T* dO = Q + kTile * query_tiles * kRow<kHeadDim>;
  T* K = dO + kTile * query_tiles * kRow<kHeadDim>;
  T* V = K + kTile * key_tiles * kRow<kHeadDim>;
  T* W = V;   // (queries, keys): D(P), then dS
  const int weights_row = kTile * key_tiles + kPadding;
  const int queries = block.queries.length, keys = block.keys.length;

  write_visible(query_bits, p.queries, block.sentence, queries);
  write_visible(key_bits, p.keys, block.sentence, keys);
  __syncthreads();
  load_rows<T, kHeadDim>(Q, block.rows<const T>(p.query, block.queries), p.query.position_stride, queries, query_bits);
  load_rows<T, kHeadDim>(K, block.rows<const T>(p.key, block.keys), p.key.position_stride, keys, key_bits);
  cp_async_commit();
  load_rows<T, kHeadDim>(dO, block.rows<const T>(p.grad_output, block.queries), p.grad_output.position_stride, queries,
                         query_bits);
  load_rows<T, kHeadDim>(V, block.rows<const T>(p.value, block.keys), p.value.position_stride, keys, key_bits);
  cp_async_commit();

  const Mask mask{query_bits, key_bits, p.is_causal != 0, block.causal_shift()};
  const int tile = warp_of_thread();   // of queries, then of keys
  const Rows rows(mask, tile);
  const uint32_t active = mask.key_tiles<kTiles>(tile);
  const Dropout dropout(p, block);
  float lse2[2];
  load_logsumexp(p, block, rows.first, lse2);

  cp_async_wait<1>();
  __syncthreads();   // Q and K are there
  Accumulators<kTiles> P = {};
  if (active != 0) {
    multiply_transposed<T, kHeadDim>(P, Q + kTile * tile * kRow<kHeadDim>, K, active);
    hide(P, mask, rows, active);
    exponentiate(P, p.scale * kLog2E, lse2, active);
    for_each_dropped(P, dropout, rows, active, [](float& weight) { weight = -weight; });
  }

  cp_async_wait<0>();
  __syncthreads();   // dO and V are there
  Accumulators<kTiles> dP = {};
  if (active != 0) {
    multiply_transposed<T, kHeadDim>(dP, dO + kTile * tile * kRow<kHeadDim>, V, active);
    softmax_gradient(dP, P, dropout.gain(), active);
  }

  __syncthreads();   // V has served
  T* weights = W + kTile * tile * weights_row;
  Fragment dS[kTiles];
  Accumulators<kHeadDim / kTile> dQ = {};
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) P[t][i / 4][i % 4] = kept(P[t][i / 4][i % 4]);
    Fragment dropped;
    round_to_a<T>(dropped, P[t]);
    store_a(weights + kTile * t, weights_row, dropped);
    round_to_a<T>(dS[t], dP[t]);
    multiply_rows<T, kHeadDim>(dQ, dS[t], K + kTile * t * kRow<kHeadDim>);
  }
  scale_rows(dQ, p.scale, p.scale);
  T* grad_query = block.rows<T>(p.grad_query, block.queries) + kTile * tile * p.grad_query.position_stride;
  store_rows<T, kHeadDim>(grad_query, p.grad_query.position_stride, queries - kTile * tile, dQ);

  __syncthreads();   // D(P) is there
  Accumulators<kHeadDim / kTile> dV = {};
  multiply_weights<T, kHeadDim>(dV, W, weights_row, dO, mask, tile, query_tiles);
  scale_rows(dV, dropout.gain(), dropout.gain());
  T* grad_value = block.rows<T>(p.grad_value, block.keys) + kTile * tile * p.grad_value.position_stride;
  store_rows<T, kHeadDim>(grad_value, p.grad_value.position_stride, keys - kTile * tile, dV);

  __syncthreads();   // D(P) has served
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (active >> t & 1) store_a(weights + kTile * t, weights_row, dS[t]);
  }
  __syncthreads();   // dS is there
  Accumulators<kHeadDim / kTile> dK = {};
  multiply_weights<T, kHeadDim>(dK, W, weights_row, Q, mask, tile, query_tiles);
  scale_rows(dK, p.scale, p.scale);
  T* grad_key = block.rows<T>(p.grad_key, block.keys) + kTile * tile * p.grad_key.position_stride;
  store_rows<T, kHeadDim>(grad_key, p.grad_key.position_stride, keys - kTile * tile, dK);
}

// One warp for each tile of the longer side.
template <class T>
bool launch_backward(const Parameters& p, int64_t head_dim, Stream stream) {
  const int query_tiles = tiles_of(p.queries.max_length), key_tiles = tiles_of(p.keys.max_length);
  const int longer = query_tiles > key_tiles ? query_tiles : key_tiles;
  return dispatch_head_dim(head_dim, [&](auto d) {
    if (p.batch == 0 || p.heads == 0 || longer == 0) return;
    dispatch_tiles(longer, [&](auto tiles) {
      launch(short_attention_backward<T, d, tiles>, Dim3(p.batch * p.heads), 32 * longer,
             backward_shared_bytes(d, p.queries.max_length, p.keys.max_length), stream, p);
    });
  });
}

}  // namespace mlbench::attention
