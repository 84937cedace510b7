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
//
// Files: block.cuh (a head of a sentence: rows, masks, loads and stores), products.cuh (16 x 16 tiles on the tensor
// cores), scores.cuh (softmax and dropout in registers), forward.cuh and backward.cuh (the kernels), attention.cu (what
// torch calls). This one holds what all of them share.
#pragma once

#include <type_traits>

#include "common/launch.cuh"
#include "common/platform.cuh"

namespace mlbench::attention {

constexpr int kMaxLength = 128;
constexpr int kTile = 16;     // rows of a warp; depth of one mma
constexpr int kPadding = 8;   // elements (16 bytes) behind each row in shared memory
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2 = 0.693147180559945309f;

__host__ __device__ constexpr int tiles_of(int length) { return (length + kTile - 1) / kTile; }

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

// Calls run(the head dimension as a constant); false if there is no kernel for it.
template <class Run>
bool dispatch_head_dim(int64_t head_dim, Run run) {
  if (head_dim == 32) run(std::integral_constant<int, 32>{});
  if (head_dim == 64) run(std::integral_constant<int, 64>{});
  return head_dim == 32 || head_dim == 64;
}

// Calls run(kTiles as a constant), kTiles >= tiles. A kernel has registers for kTiles tiles of keys; 49 to 64 positions
// share that of 80, 97 to 112 that of 128: they would need almost as many.
template <class Run>
void dispatch_tiles(int tiles, Run run) {
  if (tiles <= 2) return run(std::integral_constant<int, 2>{});
  if (tiles <= 3) return run(std::integral_constant<int, 3>{});
  if (tiles <= 5) return run(std::integral_constant<int, 5>{});
  if (tiles <= 6) return run(std::integral_constant<int, 6>{});
  return run(std::integral_constant<int, 8>{});
}

// One block for each head of each sentence; T is half or bfloat. False if no kernel has this head dimension.
template <class T>
bool launch_forward(const Parameters& p, int64_t head_dim, Stream stream);
template <class T>
bool launch_backward(const Parameters& p, int64_t head_dim, Stream stream);

}  // namespace mlbench::attention
