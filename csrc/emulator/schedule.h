// The order in which the threads of a block run between the points where they wait for one another.
#pragma once

#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

namespace mlbench::emulator {

inline constexpr unsigned kWarpSize = 32;

// Chooses who runs next: seed 0 always the lowest index, 1 always the highest, any other at random.
//
// At random the choice among warps stays with a favourite until it must wait, for 64 choices on average at most, so
// that one warp can run far ahead of another; lanes are chosen anew each time.
class Schedule {
 public:
  explicit Schedule(uint64_t seed) : seed_(seed), state_(seed) {}

  bool random() const { return seed_ > 1; }

  // SplitMix64 (Steele, Lea and Flood 2014).
  uint32_t draw() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
  }

  unsigned choose_warp(uint32_t candidates) {
    if (!random()) return choose(candidates);
    if (draw() % 64 == 0 || !((candidates >> favourite_) & 1u)) favourite_ = choose(candidates);
    return favourite_;
  }

  unsigned choose_lane(uint32_t candidates) { return choose(candidates); }

  // The order of `count` blocks: ascending, descending or shuffled.
  std::vector<uint64_t> order(uint64_t count) {
    std::vector<uint64_t> result(count);
    for (uint64_t i = 0; i < count; ++i) result[i] = seed_ == 1 ? count - 1 - i : i;
    for (uint64_t i = count; random() && i > 1; --i) std::swap(result[i - 1], result[draw() % i]);
    return result;
  }

 private:
  // The index of the lowest, of the highest or of any set bit.
  unsigned choose(uint32_t candidates) {
    if (seed_ == 1) return 31u - static_cast<unsigned>(std::countl_zero(candidates));
    const unsigned skipped = random() ? draw() % static_cast<unsigned>(std::popcount(candidates)) : 0;
    for (unsigned i = 0; i < skipped; ++i) candidates &= candidates - 1;
    return static_cast<unsigned>(std::countr_zero(candidates));
  }

  uint64_t seed_;
  uint64_t state_;
  unsigned favourite_ = 0;
};

}  // namespace mlbench::emulator
