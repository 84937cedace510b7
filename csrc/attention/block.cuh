// A head of a sentence, which one block works on: where its rows are, which of them are visible, and their way between
// global and shared memory.
#pragma once

#include "attention/attention.cuh"

namespace mlbench::attention {

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

  // Its max_query values of lse.
  __device__ float* logsumexp(const Parameters& p) const {
    return p.logsumexp + static_cast<int64_t>(head_index) * p.queries.max_length;
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

// Sums of products, 16 x 16 and 16 x (16 n), in the registers of a warp: [half][2 r + e] is element e of a lane's row r
// in the left or right 8 columns.
using Accumulator = float[2][4];
template <int n>
using Accumulators = Accumulator[n];

// ---- Masks ----------------------------------------------------------------------------------------------------------

constexpr int kMaskWords = kMaxLength / 32;
constexpr size_t kMaskBytes = 2 * kMaskWords * sizeof(uint32_t);   // of queries and keys

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
__device__ void store_rows(T* rows, int64_t stride, int count, const Accumulators<kHeadDim / kTile>& c) {
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

}  // namespace mlbench::attention
