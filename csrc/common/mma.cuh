// Tensor-core products of 16-bit matrices with float32 accumulation, and the loads that feed them.
//
// Every lane of a warp must call these together. Lane l is in group g = l / 4 and has place t = l % 4 in it. In the
// fragments of mma.m16n8k16 (PTX manual, "Matrix Fragments for mma.m16n8k16") lane l holds, two numbers a register,
//   A (16 x 16, rows):    a[0] = A[g][2t, 2t+1],   a[1] = A[g+8][2t, 2t+1],   a[2] = A[g][2t+8, 2t+9],
//                         a[3] = A[g+8][2t+8, 2t+9]
//   B (16 x 8, columns):  b[0] = B[2t, 2t+1][g],   b[1] = B[2t+8, 2t+9][g]
//   C (16 x 8, float32):  c[0], c[1] = C[g][2t, 2t+1],   c[2], c[3] = C[g+8][2t, 2t+1]
// ldmatrix loads 8 x 8 matrices: lane l says where row l % 8 of matrix l / 8 lies in shared memory (16 bytes, 16-byte
// aligned); then r[i] of lane l is M_i[g][2t, 2t+1], transposed M_i[2t, 2t+1][g].
// So
//   A stored by rows:               a = ldmatrix_x4, lane l gives &A[l % 16][8 * (l / 16)]
//   B stored by columns (B = K^T):  b = ldmatrix_x2, lane l < 16 gives &K[l % 8][8 * (l / 8)]
//   B stored by rows (B = V):       b = ldmatrix_x2_trans, lane l < 16 gives &V[l][0]
#pragma once

#include "common/platform.cuh"

namespace mlbench {

// C += A B.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<half>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<bfloat>(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four matrices; every lane's address counts.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Two matrices; the addresses of lanes 0 to 15 count.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}

}  // namespace mlbench
