// Softmax and dropout of a warp's 16 x keys scores in registers: s[tile][half][2 r + e] is row r, element e of the 8
// keys from 16 tile + 8 half on. Tiles whose bit in `active` is 0 are neither read nor meant.
#pragma once

#include "attention/block.cuh"
#include "common/philox.cuh"

namespace mlbench::attention {

// ---- Dropout --------------------------------------------------------------------------------------------------------

// The Philox bits of one head. One draw decides on the eight weights of one row that a lane holds in 32 neighbouring
// keys: field 2 n + e, 16 bits, belongs to element e of their n-th group of 8 keys.
struct Dropout {
  uint32_t threshold, offset, head_index;
  uint32_t key0 = 0, key1 = 0;

  __device__ Dropout(const Parameters& p, const Block& block)
      : threshold(p.threshold), offset(p.offset), head_index(block.head_index) {
    if (threshold == 0) return;
    const uint64_t seed = static_cast<uint64_t>(*p.seed);
    key0 = static_cast<uint32_t>(seed);
    key1 = static_cast<uint32_t>(seed >> 32);
  }

  __device__ bool is_on() const { return threshold != 0; }

  // What a kept weight is multiplied by, 1 / (1 - drop rate).
  __device__ float gain() const { return 65536.0f / (65536.0f - static_cast<float>(threshold)); }

  __device__ uint4v draw(int query, int key_word) const {
    const uint32_t column = 4 * key_word + lane_of_thread() % 4;
    return philox4x32_7(key0, key1, column, query, head_index, offset);
  }

  __device__ bool keeps(const uint4v& bits, int n, int e) const {
    const uint32_t word = n == 0 ? bits.x : n == 1 ? bits.y : n == 2 ? bits.z : bits.w;
    return (e == 0 ? word << 16 : word) >= threshold << 16;   // compares 16 bits; those below decide nothing
  }
};

// ---- Rows of scores -------------------------------------------------------------------------------------------------

__device__ inline float max_over_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 2));
}

__device__ inline float sum_over_row(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

// The two rows of a lane.
struct Rows {
  int tile;
  int first;         // position of row 0 in the sentence; row r is first + 8 r
  int last_key[2];

  __device__ Rows(const Mask& mask, int query_tile)
      : tile(query_tile),
        first(kTile * query_tile + Lane().row),
        last_key{mask.last_key(first), mask.last_key(first + 8)} {}
};

// s = -inf where the row does not see the key.
template <int kTiles>
__device__ void hide(Accumulators<kTiles>& s, const Mask& mask, const Rows& rows, uint32_t active) {
  const Lane lane;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1) || mask.is_full(rows.tile, t)) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t seen = mask.seen(t, rows.last_key[r]) >> lane.column;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!(seen >> (i / 2 * 8 + i % 2) & 1)) s[t][i / 2][2 * r + i % 2] = -INFINITY;
      }
    }
  }
}

// s = exp2(c s - shift of the row).
template <int kTiles>
__device__ void exponentiate(Accumulators<kTiles>& s, float c, const float (&shift)[2], uint32_t active) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[t][i / 4][i % 4];
      x = exp2_fast(c * x - shift[i % 4 / 2]);
    }
  }
}

// s = exp2(c (s - max s)) and the sum over each row; returns c max s (0 if the row sees nothing) in `top`.
template <int kTiles>
__device__ void softmax_numerator(Accumulators<kTiles>& s, float c, uint32_t active, float (&top)[2],
                                  float (&sum)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = -INFINITY;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (!(active >> t & 1)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) m = fmaxf(m, s[t][i / 2][2 * r + i % 2]);
    }
    m = max_over_row(m);
    top[r] = m == -INFINITY ? 0.0f : c * m;
  }
  exponentiate(s, c, top, active);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float l = 0.0f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (!(active >> t & 1)) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) l += s[t][i / 2][2 * r + i % 2];
    }
    sum[r] = sum_over_row(l);
  }
}

// Calls change(x) for each weight x that dropout drops.
template <int kTiles, class Change>
__device__ void for_each_dropped(Accumulators<kTiles>& x, const Dropout& dropout, const Rows& rows, uint32_t active,
                                 Change change) {
  if (!dropout.is_on()) return;
#pragma unroll
  for (int word = 0; 2 * word < kTiles; ++word) {
    if (!(active >> 2 * word & 3)) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint4v bits = dropout.draw(rows.first + 8 * r, word);
#pragma unroll
      for (int f = 0; f < 8; ++f) {
        const int t = 2 * word + f / 4;
        if (t < kTiles && !dropout.keeps(bits, f / 2, f % 2)) change(x[t][f / 2 % 2][2 * r + f % 2]);
      }
    }
  }
}

}  // namespace mlbench::attention
