// Philox4x32: 128 random bits from a 128-bit counter and a 64-bit key, without state.
//
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Ten rounds are the authors'
// default; seven are the fewest that pass their statistical tests (BigCrush), and enough for dropout.
#pragma once

#include "common/platform.cuh"

namespace mlbench {

// The block of random bits number (c0, c1, c2, c3) of the key (key0, key1).
template <int kRounds>
__device__ __forceinline__ uint4v philox4x32(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2,
                                             uint32_t c3) {
  constexpr uint32_t kMultiplier0 = 0xD2511F53u, kMultiplier1 = 0xCD9E8D57u;
  constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const uint32_t high0 = __umulhi(kMultiplier0, c0), low0 = kMultiplier0 * c0;
    const uint32_t high1 = __umulhi(kMultiplier1, c2), low1 = kMultiplier1 * c2;
    c0 = high1 ^ c1 ^ key0;
    c1 = low1;
    c2 = high0 ^ c3 ^ key1;
    c3 = low0;
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return {c0, c1, c2, c3};
}

__device__ __forceinline__ uint4v philox4x32_7(uint32_t key0, uint32_t key1, uint32_t c0, uint32_t c1, uint32_t c2,
                                               uint32_t c3) {
  return philox4x32<7>(key0, key1, c0, c1, c2, c3);
}

}  // namespace mlbench
