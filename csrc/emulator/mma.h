// The warp matrix instructions on the host: matrices are put together from the lanes' fragments and taken apart again.
// common/mma.cuh has the layouts.
#pragma once

#include "emulator/cuda.h"

namespace mlbench::emulator {

inline constexpr uint32_t kFullWarp = 0xFFFFFFFFu;

template <int kMatrices>
struct MatrixLoad {
  const uint16_t* row;
  uint32_t (&result)[kMatrices];
};

// Each lane has touched its own row; that another one then moves the numbers is only how it is done here.
MLBENCH_UNWATCHED inline uint32_t element(const uint16_t* row, unsigned column) { return row[column]; }

template <int kMatrices, bool kTransposed>
void load_matrices(const char* name, uint32_t (&result)[kMatrices], const void* row, const Site& site) {
  if (this_lane() < 8 * kMatrices) {
    check_shared(name, row, site);
    watch.touch(row, 16, false, Place::of(site));
  }
  MatrixLoad<kMatrices> own{static_cast<const uint16_t*>(row), result};
  Block::current().collective(name, kFullWarp, own, site, [](auto& lanes) {
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
      const unsigned group = lane / 4, place = 2 * (lane % 4);
      for (unsigned i = 0; i < kMatrices; ++i) {
        const auto at = [&](unsigned r, unsigned c) { return element(lanes[8 * i + r]->row, c); };
        lanes[lane]->result[i] =
            kTransposed ? at(place, group) | at(place + 1, group) << 16 : at(group, place) | at(group, place + 1) << 16;
      }
    }
  });
}

struct Product {
  float (&c)[4];
  const uint32_t (&a)[4];
  const uint32_t (&b)[2];
};

template <class T>
float part(uint32_t bits, unsigned index) {
  return float_of(T{static_cast<uint16_t>(bits >> (16 * index))});
}

// C += A B. The products are exact in double and summed there; then each element is rounded to float32.
template <class T>
MLBENCH_UNWATCHED void multiply(const std::array<Product*, kWarpSize>& lanes) {
  float a[16][16], b[8][16];
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const unsigned group = lane / 4, place = 2 * (lane % 4);
    for (unsigned i = 0; i < 2; ++i) {
      a[group][place + i] = part<T>(lanes[lane]->a[0], i);
      a[group + 8][place + i] = part<T>(lanes[lane]->a[1], i);
      a[group][place + 8 + i] = part<T>(lanes[lane]->a[2], i);
      a[group + 8][place + 8 + i] = part<T>(lanes[lane]->a[3], i);
      b[group][place + i] = part<T>(lanes[lane]->b[0], i);
      b[group][place + 8 + i] = part<T>(lanes[lane]->b[1], i);
    }
  }
  for (unsigned lane = 0; lane < kWarpSize; ++lane) {
    const unsigned group = lane / 4, place = 2 * (lane % 4);
    for (unsigned i = 0; i < 4; ++i) {
      const float* row = a[group + 8 * (i / 2)];
      const float* column = b[place + i % 2];
      double sum = lanes[lane]->c[i];
      for (unsigned k = 0; k < 16; ++k) sum += static_cast<double>(row[k]) * static_cast<double>(column[k]);
      lanes[lane]->c[i] = static_cast<float>(sum);
    }
  }
}

}  // namespace mlbench::emulator

namespace mlbench {

template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const std::source_location& site = std::source_location::current()) {
  emulator::Product own{c, a, b};
  emulator::Block::current().collective("mma_m16n8k16", emulator::kFullWarp, own, site, emulator::multiply<T>);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row,
                        const std::source_location& site = std::source_location::current()) {
  emulator::load_matrices<4, false>("ldmatrix_x4", r, row, site);
}

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row,
                              const std::source_location& site = std::source_location::current()) {
  emulator::load_matrices<4, true>("ldmatrix_x4_trans", r, row, site);
}

inline void ldmatrix_x2(uint32_t (&r)[2], const void* row,
                        const std::source_location& site = std::source_location::current()) {
  emulator::load_matrices<2, false>("ldmatrix_x2", r, row, site);
}

inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* row,
                              const std::source_location& site = std::source_location::current()) {
  emulator::load_matrices<2, true>("ldmatrix_x2_trans", r, row, site);
}

}  // namespace mlbench
