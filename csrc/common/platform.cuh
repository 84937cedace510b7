// Types, conversions, approximate functions, 16-byte memory accesses and asynchronous copies of the kernels.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace mlbench {

using uint4v = ::uint4;
using float2v = ::float2;

using half = ::__half;
using bfloat = ::__nv_bfloat16;

// The block's dynamic shared memory, 16-byte aligned; its content is undefined.
__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(128) unsigned char mlbench_dynamic_shared_memory[];
  return mlbench_dynamic_shared_memory;
}

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bfloat value) { return __bfloat162float(value); }

// Rounds to the nearest T, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ half from_float<half>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ bfloat from_float<bfloat>(float value) {
  return __float2bfloat16_rn(value);
}

// Two 16-bit numbers in one register; `low` has the lower address in memory.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack2<half>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <>
__device__ __forceinline__ uint32_t pack2<bfloat>(float low, float high) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <class T>
__device__ __forceinline__ float2v unpack2(uint32_t bits);
template <>
__device__ __forceinline__ float2v unpack2<half>(uint32_t bits) {
  const __half2_raw raw{static_cast<unsigned short>(bits & 0xFFFFu), static_cast<unsigned short>(bits >> 16)};
  return __half22float2(__half2(raw));
}
template <>
__device__ __forceinline__ float2v unpack2<bfloat>(uint32_t bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xFFFF0000u)};
}

// One instruction each, with relative errors of about 2^-22 (ex2, lg2) and 2^-11 (tanh) by the PTX manual; with ftz
// subnormal inputs and outputs count as zero. exp2_fast(-infinity) = 0 and log2_fast(0) = -infinity.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float tanh_fast(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes at a 16-byte aligned address of shared or global memory.
__device__ __forceinline__ uint4v load16(const void* pointer) { return *static_cast<const uint4v*>(pointer); }
__device__ __forceinline__ void store16(void* pointer, uint4v value) { *static_cast<uint4v*>(pointer) = value; }

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Starts to copy 16 bytes from global to shared memory (zeros if not `valid`; then `global` is not read). The thread
// that called sees them after cp_async_wait, the others after a barrier that follows it.
__device__ __forceinline__ void cp_async16(void* shared, const void* global, bool valid = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// Closes the group of this thread's copies since the last commit.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all of this thread's groups but the latest N.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace mlbench
