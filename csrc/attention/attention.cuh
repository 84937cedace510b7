// Fused attention for short sentences (at most 128 queries and 128 keys): forward and backward kernels.
//
//   O = D(softmax(scale Q K^T + mask)) V,   D: dropout from Philox bits (see common/philox.cuh)
//
// Shapes. One block computes one head of one sentence: Q, O (queries, d) and K, V (keys, d), 16-bit, rows of any
// stride; lse (batch, heads, max_query), float32. d is 32 or 64. A sentence is (first row, length), so padded and
// packed batches and slices of the fused projection of Q, K and V share one kernel. A tile is 16 rows; warp w owns
// query tile w (and key tile w in the second half of the backward kernel). Every sum has a fixed order and there are no
// atomics: results are the same bits each time.
//
// Data flow, forward. Q, K, V: global -> shared (cp.async; rows that are padding become zeros and are not read).
// Each warp: S = Q K^T (16 x keys, float32, in registers) -> hide padding and the future -> P = exp2(c (S - max S)),
// c = scale log2(e) -> dropout -> O = P V, P rounded to 16 bits as the operand of the second product -> O / sum P.
// Saved for the backward pass: lse = ln sum exp(scale S) alone.
//
// Data flow, backward (5 products). Q, K, V, dO: global -> shared. Each warp, 16 queries: S again,
// P = exp(scale S - lse), dP = D(dO V^T), delta = rowsum(P dP), dS = P (dP - delta), dQ = scale dS K. Then D(P) and dS,
// 16-bit, go through shared memory one after the other, and each warp, 16 keys: dV = D(P)^T dO, dK = scale dS^T Q.
//
// Tiles (16 queries x 16 keys) that are wholly padding or wholly in the future are neither computed nor stored.
//
// Shared memory in bytes (q, k: lengths rounded up to 16):
//   forward   32 + 2 (d + 8) (q + 2 k)                                     d = 64, q = k = 80: 34,592
//   backward  32 + 2 (d + 8) (2 q + k) + 2 max((d + 8) k, q (k + 8))       d = 64, q = k = 80: 48,672
// The first 32 bytes are bit masks of the visible queries and keys. Rows of d elements are padded to d + 8, rows of k
// to k + 8: an odd number of 16-byte units, so the 8 rows that ldmatrix reads at once lie in different banks. In the
// backward kernel D(P), then dS, lie where V was. At most 90,144 bytes (d = 64, 128 positions), which every GPU of
// compute capability 8.0 and above has.
//
// Counts for 8,192 tokens in sentences of 80 (102.4 sentences), 16 heads of 64, self attention, nothing hidden:
//   forward   reads Q, K, V, writes O: 4 * 8192 * 1024 * 2 bytes = 67.1 MB, lse 0.5 MB;  2 products of
//             2 * 80 * 80 * 64 FLOPs in 1638.4 heads: 2.7 GFLOP
//   backward  reads Q, K, V, dO, writes dQ, dK, dV: 7 * 16.8 MB = 117.4 MB, lse 0.5 MB;  5 products: 6.7 GFLOP
#pragma once

#include <type_traits>

#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/philox.cuh"
#include "common/platform.cuh"

namespace mlbench::attention {

constexpr int kMaxLength = 128;
constexpr int kTile = 16;      // rows of a warp; depth of one mma
constexpr int kMaskWords = kMaxLength / 32;
constexpr int kPadding = 8;    // elements (16 bytes) behind each row in shared memory

// Blocks (of `tiles` warps) that are to share a multiprocessor: as many as the registers of its four quarters allow
// without spills. A thread has 96 registers if there are 17 to 20 warps, 128 with 13 to 16, 168 with 9 to 12.
constexpr int forward_blocks(int tiles) { return tiles == 6 ? 2 : 20 / tiles; }
constexpr int backward_blocks(int tiles) { return tiles == 3 ? 6 : 15 / tiles; }

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

// ---- Parameters -----------------------------------------------------------------------------------------------------

// A tensor (sentence, position, head, d): strides in elements, the last one is 1. Packed: stride of sentences 0.
struct Strided {
  void* data;
  int64_t sentence_stride, position_stride, head_stride;
};

// Where the rows of each sentence are: `starts` (batch + 1) if packed, else null; `padding` (batch, max_length),
// nonzero = padding, or null.
struct Sentences {
  const int32_t* starts;
  const uint8_t* padding;
  int64_t padding_stride;
  int32_t max_length;
};

struct Parameters {
  Strided query, key, value, output;                       // output: forward only
  Strided grad_output, grad_query, grad_key, grad_value;   // backward only
  float* logsumexp;                                        // (batch, heads, max_query)
  Sentences queries, keys;
  const int64_t* seed;                                     // of the dropout mask; null without dropout
  int32_t batch, heads;
  int32_t is_causal;
  float scale;                                             // > 0
  uint32_t threshold;                                      // drop rate * 65536
  uint32_t offset;
};

// ---- A head of a sentence -------------------------------------------------------------------------------------------

struct Span {
  int64_t start;
  int length;
};

__device__ inline Span span_of(const Sentences& sentences, int sentence) {
  if (sentences.starts == nullptr) return {0, sentences.max_length};
  const int start = sentences.starts[sentence];
  const int length = sentences.starts[sentence + 1] - start;
  return {start, length < sentences.max_length ? length : sentences.max_length};
}

// What one block works on: sentence b, head h.
struct Block {
  int sentence, head, head_index;   // head_index = b * heads + h
  Span queries, keys;

  __device__ explicit Block(const Parameters& p)
      : sentence(blockIdx.x / p.heads),
        head(blockIdx.x % p.heads),
        head_index(blockIdx.x),
        queries(span_of(p.queries, sentence)),
        keys(span_of(p.keys, sentence)) {}

  // Row 0 of this sentence and head.
  template <class T>
  __device__ T* rows(const Strided& tensor, const Span& span) const {
    return static_cast<T*>(tensor.data) + sentence * tensor.sentence_stride + span.start * tensor.position_stride +
           head * tensor.head_stride;
  }

  // Query i sees key j <= i + causal_shift(): the last query and the last key are at the same position.
  __device__ int causal_shift() const { return keys.length - queries.length; }
};

__device__ inline int lane_of_thread() { return threadIdx.x % 32; }
__device__ inline int warp_of_thread() { return threadIdx.x / 32; }

// Place of a lane in the accumulator of an mma: element e of row r (r = 0, 1) is (row + 8 r, column + e).
struct Lane {
  int row = lane_of_thread() / 4;
  int column = 2 * (lane_of_thread() % 4);
};

__host__ __device__ constexpr int tiles_of(int length) { return (length + kTile - 1) / kTile; }

// ---- Masks ----------------------------------------------------------------------------------------------------------

// Bit i of the 128 says that position i is inside the sentence and no padding. All warps share the work.
__device__ inline void write_visible(uint32_t* bits, const Sentences& sentences, int sentence, int length) {
  for (int word = warp_of_thread(); word < kMaskWords; word += blockDim.x / 32) {
    const int i = 32 * word + lane_of_thread();
    const bool inside = i < length;
    const bool padding =
        inside && sentences.padding != nullptr && sentences.padding[sentence * sentences.padding_stride + i] != 0;
    const uint32_t visible = __ballot_sync(0xFFFFFFFFu, inside && !padding);
    if (lane_of_thread() == 0) bits[word] = visible;
  }
}

__device__ inline bool is_visible(const uint32_t* bits, int i) { return (bits[i / 32] >> (i % 32)) & 1; }

// The 16 bits of one tile.
__device__ inline uint32_t tile_bits(const uint32_t* bits, int tile) {
  return (bits[tile / 2] >> (kTile * (tile % 2))) & 0xFFFFu;
}

// Which of the sentence's pairs (query tile, key tile) have anything to compute.
struct Mask {
  const uint32_t* query_bits;
  const uint32_t* key_bits;
  bool is_causal;
  int shift;

  __device__ bool is_active(int query_tile, int key_tile) const {
    const bool in_future = is_causal && kTile * key_tile > kTile * query_tile + kTile - 1 + shift;
    return !in_future && tile_bits(query_bits, query_tile) != 0 && tile_bits(key_bits, key_tile) != 0;
  }

  // Whether every query of the one tile sees every key of the other.
  __device__ bool is_full(int query_tile, int key_tile) const {
    const bool in_past = !is_causal || kTile * key_tile + kTile - 1 <= kTile * query_tile + shift;
    return in_past && (tile_bits(query_bits, query_tile) & tile_bits(key_bits, key_tile)) == 0xFFFFu;
  }

  // Bit t: key tile t is active for this query tile.
  template <int kTiles>
  __device__ uint32_t key_tiles(int query_tile) const {
    uint32_t active = 0;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) active |= static_cast<uint32_t>(is_active(query_tile, t)) << t;
    return active;
  }

  // The last key that query i sees, -1 if the query is padding.
  __device__ int last_key(int i) const {
    if (!is_visible(query_bits, i)) return -1;
    return is_causal ? i + shift : kMaxLength - 1;
  }

  // Bit j: key 16 tile + j is visible to a query whose last key is `last`.
  __device__ uint32_t seen(int key_tile, int last) const {
    const int end = last - kTile * key_tile;
    const uint32_t past = end < 0 ? 0u : end < kTile ? (2u << end) - 1 : 0xFFFFu;
    return tile_bits(key_bits, key_tile) & past;
  }
};

// ---- Rows between global and shared memory --------------------------------------------------------------------------

template <int kHeadDim>
constexpr int kRow = kHeadDim + kPadding;   // elements from one row in shared memory to the next

// Starts to copy rows 0 .. 16 ceil(length / 16) - 1 (global, d wide) to shared memory; invisible rows become zeros.
template <class T, int kHeadDim>
__device__ void load_rows(T* shared, const T* rows, int64_t stride, int length, const uint32_t* visible) {
  constexpr int kThreads = kHeadDim / 8;   // of a row, 16 bytes each
  const int column = threadIdx.x % kThreads * 8;
  for (int row = threadIdx.x / kThreads; row < kTile * tiles_of(length); row += blockDim.x / kThreads) {
    cp_async16(shared + row * kRow<kHeadDim> + column, rows + row * stride + column, is_visible(visible, row));
  }
}

// The four lanes of a row hold words (lane, n): afterwards lane t holds words n = t of lanes 0 .. 3, in order.
__device__ inline void transpose_in_row(uint32_t (&words)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = lane_of_thread() & bit;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n & bit) continue;
      const uint32_t received = __shfl_xor_sync(0xFFFFFFFFu, upper ? words[n] : words[n | bit], bit);
      (upper ? words[n] : words[n | bit]) = received;
    }
  }
}

// Stores a warp's 16 x d accumulators, rounded to T, to global rows 0 .. count - 1 (of its 16), 16 bytes a time.
template <class T, int kHeadDim>
__device__ void store_rows(T* rows, int64_t stride, int count, const float (&c)[kHeadDim / kTile][2][4]) {
  const Lane lane;
#pragma unroll
  for (int column = 0; column < kHeadDim; column += 32) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t words[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float(&pair)[4] = c[column / kTile + n / 2][n % 2];
        words[n] = pack2<T>(pair[2 * r], pair[2 * r + 1]);
      }
      transpose_in_row(words);
      const int row = lane.row + 8 * r;
      if (row < count) {
        store16(rows + row * stride + column + 4 * lane.column, uint4v{words[0], words[1], words[2], words[3]});
      }
    }
  }
}

// ---- Products of 16 x 16 tiles --------------------------------------------------------------------------------------
// Operands of mma.m16n8k16: A is 16 x 16 (rows x depth), B 16 x 16 (depth x columns, two mma side by side).

using Fragment = uint32_t[4];

// Addresses that the lanes give to ldmatrix for a 16 x 16 tile: its four 8 x 8 matrices by columns, or by rows.
template <class T>
__device__ const T* by_columns(const T* tile, int stride) {
  const int lane = lane_of_thread();
  return tile + lane % 16 * stride + lane / 16 * 8;
}

template <class T>
__device__ const T* by_rows(const T* tile, int stride) {
  const int lane = lane_of_thread();
  return tile + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8;
}

// A from M (rows, depth), A from M^T (depth, rows), B from M^T (columns, depth), B from M (depth, columns).
template <class T>
__device__ void load_a(Fragment& a, const T* tile, int stride) {
  ldmatrix_x4(a, by_columns(tile, stride));
}
template <class T>
__device__ void load_a_transposed(Fragment& a, const T* tile, int stride) {
  ldmatrix_x4_trans(a, by_rows(tile, stride));
}
template <class T>
__device__ void load_b_transposed(Fragment& b, const T* tile, int stride) {
  ldmatrix_x4(b, by_rows(tile, stride));
}
template <class T>
__device__ void load_b(Fragment& b, const T* tile, int stride) {
  ldmatrix_x4_trans(b, by_columns(tile, stride));
}

// c += A B.
template <class T>
__device__ void multiply(float (&c)[2][4], const Fragment& a, const Fragment& b) {
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  mma_m16n8k16<T>(c[0], a, left);
  mma_m16n8k16<T>(c[1], a, right);
}

// A from accumulators: the layouts agree, so the product of one mma is the operand of the next without a move.
template <class T>
__device__ void round_to_a(Fragment& a, const float (&c)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack2<T>(c[i / 2][i % 2 * 2], c[i / 2][i % 2 * 2 + 1]);
}

// Writes A to a tile (rows, depth) of shared memory.
template <class T>
__device__ void store_a(T* tile, int stride, const Fragment& a) {
  const Lane lane;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    *reinterpret_cast<uint32_t*>(tile + (lane.row + i % 2 * 8) * stride + lane.column + i / 2 * 8) = a[i];
  }
}

// c[t] += X Y_t^T for each active tile t; X (16, d) and Y (16 tiles, d) in shared memory.
template <class T, int kHeadDim, int kTiles>
__device__ void multiply_transposed(float (&c)[kTiles][2][4], const T* x, const T* y, uint32_t active) {
  Fragment a[kHeadDim / kTile];
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kTile) load_a(a[d / kTile], x + d, kRow<kHeadDim>);
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    if (!(active >> t & 1)) continue;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += kTile) {
      Fragment b;
      load_b_transposed(b, y + kTile * t * kRow<kHeadDim> + d, kRow<kHeadDim>);
      multiply<T>(c[t], a[d / kTile], b);
    }
  }
}

// c (16, d) += A Y; Y (16, d) in shared memory.
template <class T, int kHeadDim>
__device__ void multiply_rows(float (&c)[kHeadDim / kTile][2][4], const Fragment& a, const T* y) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kTile) {
    Fragment b;
    load_b(b, y + d, kRow<kHeadDim>);
    multiply<T>(c[d / kTile], a, b);
  }
}

template <int kColumns>
__device__ void scale_rows(float (&c)[kColumns][2][4], float row0, float row1) {
#pragma unroll
  for (int i = 0; i < kColumns * 8; ++i) c[i / 8][i / 4 % 2][i % 4] *= i % 4 < 2 ? row0 : row1;
}

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
// A warp's 16 x keys scores: s[tile][half][2 r + e] is row r, element e of the 8 keys 16 tile + 8 half.

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
__device__ void hide(float (&s)[kTiles][2][4], const Mask& mask, const Rows& rows, uint32_t active) {
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
__device__ void exponentiate(float (&s)[kTiles][2][4], float c, const float (&shift)[2], uint32_t active) {
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
__device__ void softmax_numerator(float (&s)[kTiles][2][4], float c, uint32_t active, float (&top)[2],
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
__device__ void for_each_dropped(float (&x)[kTiles][2][4], const Dropout& dropout, const Rows& rows, uint32_t active,
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

// ---- Forward --------------------------------------------------------------------------------------------------------

inline size_t forward_shared_bytes(int head_dim, int max_query, int max_key) {
  const size_t rows = kTile * (tiles_of(max_query) + 2 * tiles_of(max_key));
  return 2 * kMaskWords * sizeof(uint32_t) + rows * (head_dim + kPadding) * 2;
}

__device__ inline float* logsumexp_of(const Parameters& p, const Block& block) {
  return p.logsumexp + static_cast<int64_t>(block.head_index) * p.queries.max_length;
}

// lse of the lane's two rows; every position up to max_query is written.
__device__ inline void store_logsumexp(const Parameters& p, const Block& block, int first, const float (&lse)[2]) {
  if (lane_of_thread() % 4 != 0) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + 8 * r;
    if (i < p.queries.max_length) logsumexp_of(p, block)[i] = lse[r];
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
  float S[kTiles][2][4] = {};
  float top[2] = {0.0f, 0.0f}, sum[2] = {0.0f, 0.0f};
  if (active != 0) {
    multiply_transposed<T, kHeadDim>(S, Q + kTile * tile * kRow<kHeadDim>, K, active);
    hide(S, mask, rows, active);
    softmax_numerator(S, p.scale * kLog2E, active, top, sum);
    for_each_dropped(S, dropout, rows, active, [](float& p) { p = 0.0f; });
  }

  cp_async_wait<0>();
  __syncthreads();   // V is there
  float O[kHeadDim / kTile][2][4] = {};
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

// ---- Backward -------------------------------------------------------------------------------------------------------

inline size_t backward_shared_bytes(int head_dim, int max_query, int max_key) {
  const size_t queries = kTile * tiles_of(max_query), keys = kTile * tiles_of(max_key);
  const size_t row = head_dim + kPadding;
  const size_t value = keys * row, weights = queries * (keys + kPadding);
  return 2 * kMaskWords * sizeof(uint32_t) + 2 * ((2 * queries + keys) * row + (value > weights ? value : weights));
}

// log2(e) lse of the lane's two rows; +inf beyond the sentence.
__device__ inline void load_logsumexp(const Parameters& p, const Block& block, int first, float (&lse2)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int i = first + 8 * r;
    lse2[r] = i < block.queries.length ? logsumexp_of(p, block)[i] * kLog2E : INFINITY;
  }
}

// A dropped weight is kept as -P, so that one draw serves D(P) and D(dP).
__device__ inline float kept(float p) { return p < 0.0f ? 0.0f : p; }

// dS = P (D(dP) - delta), delta = rowsum(P D(dP)), in the place of dP.
template <int kTiles>
__device__ void softmax_gradient(float (&dP)[kTiles][2][4], const float (&P)[kTiles][2][4], float gain,
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
__device__ void multiply_weights(float (&c)[kHeadDim / kTile][2][4], const T* W, int stride, const T* X,
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
  float P[kTiles][2][4] = {};
  if (active != 0) {
    multiply_transposed<T, kHeadDim>(P, Q + kTile * tile * kRow<kHeadDim>, K, active);
    hide(P, mask, rows, active);
    exponentiate(P, p.scale * kLog2E, lse2, active);
    for_each_dropped(P, dropout, rows, active, [](float& x) { x = -x; });
  }

  cp_async_wait<0>();
  __syncthreads();   // dO and V are there
  float dP[kTiles][2][4] = {};
  if (active != 0) {
    multiply_transposed<T, kHeadDim>(dP, dO + kTile * tile * kRow<kHeadDim>, V, active);
    softmax_gradient(dP, P, dropout.gain(), active);
  }

  __syncthreads();   // V has served
  T* weights = W + kTile * tile * weights_row;
  Fragment dS[kTiles];
  float dQ[kHeadDim / kTile][2][4] = {};
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
  float dV[kHeadDim / kTile][2][4] = {};
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
  float dK[kHeadDim / kTile][2][4] = {};
  multiply_weights<T, kHeadDim>(dK, W, weights_row, Q, mask, tile, query_tiles);
  scale_rows(dK, p.scale, p.scale);
  T* grad_key = block.rows<T>(p.grad_key, block.keys) + kTile * tile * p.grad_key.position_stride;
  store_rows<T, kHeadDim>(grad_key, p.grad_key.position_stride, keys - kTile * tile, dK);
}

// ---- Launches -------------------------------------------------------------------------------------------------------
// A kernel has registers for kTiles tiles of keys; 49 to 64 positions share that of 80, 97 to 112 that of 128.

using Kernel = void (*)(Parameters);

template <class T, int kHeadDim>
Kernel forward_kernel(int tiles) {
  if (tiles <= 2) return short_attention_forward<T, kHeadDim, 2>;
  if (tiles <= 3) return short_attention_forward<T, kHeadDim, 3>;
  if (tiles <= 5) return short_attention_forward<T, kHeadDim, 5>;
  if (tiles <= 6) return short_attention_forward<T, kHeadDim, 6>;
  return short_attention_forward<T, kHeadDim, 8>;
}

template <class T, int kHeadDim>
Kernel backward_kernel(int tiles) {
  if (tiles <= 2) return short_attention_backward<T, kHeadDim, 2>;
  if (tiles <= 3) return short_attention_backward<T, kHeadDim, 3>;
  if (tiles <= 5) return short_attention_backward<T, kHeadDim, 5>;
  if (tiles <= 6) return short_attention_backward<T, kHeadDim, 6>;
  return short_attention_backward<T, kHeadDim, 8>;
}

// Calls run(the head dimension as a constant); false if there is no kernel for it.
template <class Run>
bool dispatch_head_dim(int64_t head_dim, Run run) {
  if (head_dim == 32) run(std::integral_constant<int, 32>{});
  if (head_dim == 64) run(std::integral_constant<int, 64>{});
  return head_dim == 32 || head_dim == 64;
}

// One block for each head of each sentence, one warp for each query tile. False if no kernel has this head dimension.
template <class T>
bool launch_forward(const Parameters& p, int64_t head_dim, Stream stream) {
  const int query_tiles = tiles_of(p.queries.max_length), key_tiles = tiles_of(p.keys.max_length);
  const int tiles = query_tiles > key_tiles ? query_tiles : key_tiles;
  return dispatch_head_dim(head_dim, [&](auto d) {
    if (p.batch * p.heads * query_tiles == 0) return;
    launch(forward_kernel<T, d>(tiles), Dim3(p.batch * p.heads), 32 * query_tiles,
           forward_shared_bytes(d, p.queries.max_length, p.keys.max_length), stream, p);
  });
}

// The same with one warp for each tile of the longer side.
template <class T>
bool launch_backward(const Parameters& p, int64_t head_dim, Stream stream) {
  const int query_tiles = tiles_of(p.queries.max_length), key_tiles = tiles_of(p.keys.max_length);
  const int tiles = query_tiles > key_tiles ? query_tiles : key_tiles;
  return dispatch_head_dim(head_dim, [&](auto d) {
    if (p.batch * p.heads * tiles == 0) return;
    launch(backward_kernel<T, d>(tiles), Dim3(p.batch * p.heads), 32 * tiles,
           backward_shared_bytes(d, p.queries.max_length, p.keys.max_length), stream, p);
  });
}

}  // namespace mlbench::attention
