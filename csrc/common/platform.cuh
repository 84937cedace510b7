// What the kernels need that differs between nvcc and the host: types, conversions, approximate functions, 16-byte
// memory accesses and asynchronous copies. Kernels include this and its neighbours instead of CUDA's headers, and so
// compile with nvcc for a GPU and, with MLBENCH_HOST, with g++ on the emulator of csrc/emulator.
//
// Beside these, kernels may use threadIdx.x, blockIdx, blockDim.x, gridDim, __syncthreads(), __syncwarp(mask),
// __shfl_sync and its family, __ballot_sync, __any_sync, __all_sync, __popc, __clz, __ffs, __umulhi, min and max.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef MLBENCH_HOST
#include "emulator/cuda.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

namespace mlbench {

using uint4v = ::uint4;
using float2v = ::float2;

#ifdef MLBENCH_HOST

#define MLBENCH_SITE , const std::source_location& site = std::source_location::current()

// The block's dynamic shared memory, 16-byte aligned; its content is undefined.
inline unsigned char* shared_memory() { return emulator::Block::current().shared().data(); }

inline float to_float(float value) { return value; }
inline float to_float(half value) { return emulator::float_of(value); }
inline float to_float(bfloat value) { return emulator::float_of(value); }

// Rounds to the nearest T, ties to even.
template <class T>
T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline half from_float<half>(float value) {
  return emulator::half_of(value);
}
template <>
inline bfloat from_float<bfloat>(float value) {
  return emulator::bfloat_of(value);
}

// Two 16-bit numbers in one register; `low` has the lower address in memory.
template <class T>
uint32_t pack2(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template <class T>
float2v unpack2(uint32_t bits) {
  return {to_float(T{static_cast<uint16_t>(bits)}), to_float(T{static_cast<uint16_t>(bits >> 16)})};
}

inline float exp2_fast(float x) { return ::exp2f(x); }
inline float log2_fast(float x) { return ::log2f(x); }
inline float tanh_fast(float x) { return ::tanhf(x); }

MLBENCH_UNWATCHED inline uint4v load16(const void* pointer MLBENCH_SITE) {
  emulator::check_any("load16", pointer, site);
  emulator::watch.touch(pointer, 16, false, emulator::Place::of(site));
  return *static_cast<const uint4v*>(pointer);
}
MLBENCH_UNWATCHED inline void store16(void* pointer, uint4v value MLBENCH_SITE) {
  emulator::check_any("store16", pointer, site);
  emulator::watch.touch(pointer, 16, true, emulator::Place::of(site));
  *static_cast<uint4v*>(pointer) = value;
}

// The copy is carried out at the wait that asks for it, at random schedules sometimes at once: both are allowed.
inline void cp_async16(void* shared, const void* global, bool valid = true MLBENCH_SITE) {
  emulator::check_shared("cp_async16", shared, site);
  if (valid) emulator::check_global("cp_async16", global, site);
  emulator::Block& block = emulator::Block::current();
  emulator::Copy copy{shared, valid ? global : nullptr, block.copy_group(), emulator::Place::of(site)};
  emulator::watch.touch(shared, 16, true, copy.place);
  if (block.schedule().random() && block.schedule().draw() % 2 == 0) copy.run();
  block.copies().push_back(copy);
}
inline void cp_async_commit() { ++emulator::Block::current().copy_group(); }
template <int N>
void cp_async_wait() {
  emulator::Block& block = emulator::Block::current();
  std::deque<emulator::Copy>& copies = block.copies();
  while (!copies.empty() && copies.front().group + N < block.copy_group()) {
    copies.front().run();
    copies.pop_front();
  }
}

#undef MLBENCH_SITE

#else  // nvcc

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

#endif

}  // namespace mlbench
