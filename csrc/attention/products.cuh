// Products of 16 x 16 tiles on the tensor cores.
//
// Operands of mma.m16n8k16 (layouts: common/mma.cuh): A is 16 x 16 (rows x depth), B is 16 x 16 (depth x columns) or
// two mma side by side, as are the two halves of an Accumulator.
#pragma once

#include "attention/block.cuh"
#include "common/mma.cuh"

namespace mlbench::attention {

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
__device__ void multiply(Accumulator& c, const Fragment& a, const Fragment& b) {
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  mma_m16n8k16<T>(c[0], a, left);
  mma_m16n8k16<T>(c[1], a, right);
}

// A from accumulators: the layouts agree, so the product of one mma is the operand of the next without a move.
template <class T>
__device__ void round_to_a(Fragment& a, const Accumulator& c) {
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
__device__ void multiply_transposed(Accumulators<kTiles>& c, const T* x, const T* y, uint32_t active) {
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
__device__ void multiply_rows(Accumulators<kHeadDim / kTile>& c, const Fragment& a, const T* y) {
#pragma unroll
  for (int d = 0; d < kHeadDim; d += kTile) {
    Fragment b;
    load_b(b, y + d, kRow<kHeadDim>);
    multiply<T>(c[d / kTile], a, b);
  }
}

// Multiplies the two rows of each lane.
template <int kColumns>
__device__ void scale_rows(Accumulators<kColumns>& c, float row0, float row1) {
#pragma unroll
  for (int i = 0; i < kColumns * 8; ++i) c[i / 8][i / 4 % 2][i % 4] *= i % 4 < 2 ? row0 : row1;
}

}  // namespace mlbench::attention
