// 16-bit floating-point numbers on the host: bits, and conversions that round to nearest, ties to even.
#pragma once

#include <bit>
#include <cstdint>

namespace mlbench {

// IEEE 754 binary16: 1 sign, 5 exponent and 10 fraction bits.
struct alignas(2) half {
  uint16_t bits;
};

// The upper half of a binary32: 1 sign, 8 exponent and 7 fraction bits.
struct alignas(2) bfloat {
  uint16_t bits;
};

namespace emulator {

inline float float_of(half value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t rest = value.bits & 0x7FFFu;
  if (rest >= 0x7C00u) return std::bit_cast<float>(sign | 0x7F800000u | (rest << 13));  // infinity or NaN
  // Read as a binary32 the exponent is too small by 127 - 15, which one exact product puts right, subnormals too.
  const float magnitude = std::bit_cast<float>(rest << 13) * 0x1p112f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

inline float float_of(bfloat value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// The quotient of value / 2^shift to the nearest integer, ties to even.
inline uint32_t shift_to_even(uint32_t value, uint32_t shift) {
  return (value + (1u << (shift - 1)) - 1u + ((value >> shift) & 1u)) >> shift;
}

inline half half_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t rest = bits & 0x7FFFFFFFu;
  uint32_t result;
  if (rest > 0x7F800000u) {
    result = 0x7FFFu;  // NaN, as __float2half_rn writes it
  } else if (rest >= 0x47800000u) {
    result = 0x7C00u;  // 65536 and above
  } else if (rest >= 0x38800000u) {
    result = shift_to_even(rest - 0x38000000u, 13);  // normal; may round up to infinity
  } else if (rest >= 0x33000000u) {
    // Subnormal: a multiple of 2^-24.
    result = shift_to_even((rest & 0x007FFFFFu) | 0x00800000u, 126u - (rest >> 23));
  } else {
    result = 0u;  // below half of the smallest subnormal
  }
  return {static_cast<uint16_t>(sign | result)};
}

inline bfloat bfloat_of(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return {0x7FFFu};  // NaN, as __float2bfloat16_rn writes it
  return {static_cast<uint16_t>((static_cast<uint64_t>(bits) + 0x7FFFu + ((bits >> 16) & 1u)) >> 16)};
}

}  // namespace emulator
}  // namespace mlbench
