// Watches every access to shared memory: finds races under any schedule, and accesses beside the block's memory.
//
// g++ calls the functions at the end of this file before each access to memory (-fsanitize=thread); they take the place
// of that sanitizer's own library. Two accesses to one byte, of which at least one writes, must be ordered: by the
// program order of one thread, by a __syncthreads between them, or by a __syncwarp between them if their threads are of
// one warp. Shuffles, votes, ldmatrix and mma order nothing. A cp.async writes when it is issued and when it is done.
//
// Of each byte are kept its last writer and its last reader, or that there were several in the interval. A __syncwarp
// with a partial mask counts as one of the whole warp; what it leaves unordered is not found.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "emulator/failure.h"

// Not watched itself.
#define MLBENCH_UNWATCHED __attribute__((no_sanitize("thread")))

namespace mlbench::emulator {

class Watch {
 public:
  // Begins with a block whose shared memory is `bytes` at `shared`, between two guards.
  void start(const void* shared, size_t bytes, size_t guard_bytes) {
    if (shadow_.size() < bytes) shadow_.resize(bytes);
    shadow_data_ = shadow_.data();
    bytes_ = bytes;
    guard_bytes_ = guard_bytes;
    begin_ = enabled_ ? reinterpret_cast<uintptr_t>(shared) : 0;
    pass_barrier();
  }
  void stop() { begin_ = 0; }
  // Whether blocks that start later are watched; they are until somebody says otherwise.
  void enable(bool enabled) { enabled_ = enabled; }

  void set_thread(unsigned thread) { thread_ = thread; }
  void pass_barrier() { ++interval_; }
  void pass_warp(unsigned warp) { ++warp_intervals_[warp]; }

  // The running thread reads or writes; far from the block's shared memory nothing happens.
  MLBENCH_UNWATCHED __attribute__((noinline)) void touch(const void* pointer, size_t count, bool writes,
                                                         const Place& place) {
    const uintptr_t first = reinterpret_cast<uintptr_t>(pointer) - begin_;
    if (begin_ == 0 || first + guard_bytes_ >= bytes_ + 2 * guard_bytes_) return;
    if (first >= bytes_ || count > bytes_ - first) report_outside(static_cast<ptrdiff_t>(first), writes, place);
    const Access now{interval_, warp_intervals_[thread_ / 32], thread_ / 32, thread_ % 32, place};
    Byte* byte = shadow_data_ + first;
    for (size_t i = 0; i < count; ++i, ++byte) {
      if (!byte->write.ordered(now)) report_race(first + i, byte->write, "wrote", now, writes);
      if (!writes) {
        byte->read.add(now);
      } else {
        if (!byte->read.ordered(now)) report_race(first + i, byte->read, "read", now, writes);
        byte->write = now;
      }
    }
  }

 private:
  static constexpr uint32_t kSeveral = 0xFFFFFFFFu;

  struct Access {
    uint32_t interval;  // counts the barriers of the blocks; 0 is before all
    uint32_t warp_interval;  // counts the __syncwarps of the warp
    uint32_t warp;
    uint32_t lane;
    Place place;

    // Whether this access and a later one are of one thread, or a barrier lies between them.
    MLBENCH_UNWATCHED bool ordered(const Access& now) const {
      if (interval != now.interval) return true;
      return warp == now.warp && (warp_interval != now.warp_interval || lane == now.lane);
    }

    // Makes this the last read, or the last of several that are not ordered.
    MLBENCH_UNWATCHED void add(const Access& now) {
      const bool same_interval = interval == now.interval, same_warp = warp == now.warp;
      const bool same_warp_interval = warp_interval == now.warp_interval, same_lane = lane == now.lane;
      *this = now;
      if (same_interval && !same_warp) warp = kSeveral;
      if (same_interval && same_warp && same_warp_interval && !same_lane) lane = kSeveral;
    }

    std::string who() const {
      if (warp == kSeveral) return "several threads";
      if (lane == kSeveral) return "several threads of warp " + std::to_string(warp);
      return "thread " + std::to_string(warp * 32 + lane);
    }
  };

  struct Byte {
    Access write, read;
  };

  [[noreturn]] void report_outside(ptrdiff_t offset, bool writes, const Place& place) {
    stop();
    abandon(place.text() + ": " + (writes ? "writes" : "reads") + " at byte " + std::to_string(offset) +
            " of the block's " + std::to_string(bytes_) + " bytes of shared memory");
  }

  [[noreturn]] void report_race(size_t offset, const Access& before, const char* did, const Access& now, bool writes) {
    stop();
    abandon(now.place.text() + ": race in byte " + std::to_string(offset) + " of shared memory: " + before.who() + " " +
            did + " it at " + before.place.text() + ", this thread " + (writes ? "writes" : "reads") +
            " it, and no barrier orders the two");
  }

  bool enabled_ = true;
  uintptr_t begin_ = 0;  // of the shared memory; 0: not watching
  size_t bytes_ = 0;
  size_t guard_bytes_ = 0;
  unsigned thread_ = 0;
  uint32_t interval_ = 0;
  uint32_t warp_intervals_[32] = {};
  std::vector<Byte> shadow_;
  Byte* shadow_data_ = nullptr;
};

inline Watch watch;

}  // namespace mlbench::emulator

#define MLBENCH_HOOK(name, bytes, writes)                                                              \
  extern "C" __attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_##name(const void* pointer) {  \
    mlbench::emulator::watch.touch(pointer, bytes, writes, {nullptr, 0, __builtin_return_address(0)}); \
  }
MLBENCH_HOOK(read1, 1, false)
MLBENCH_HOOK(read2, 2, false)
MLBENCH_HOOK(read4, 4, false)
MLBENCH_HOOK(read8, 8, false)
MLBENCH_HOOK(read16, 16, false)
MLBENCH_HOOK(write1, 1, true)
MLBENCH_HOOK(write2, 2, true)
MLBENCH_HOOK(write4, 4, true)
MLBENCH_HOOK(write8, 8, true)
MLBENCH_HOOK(write16, 16, true)
MLBENCH_HOOK(unaligned_read2, 2, false)
MLBENCH_HOOK(unaligned_read4, 4, false)
MLBENCH_HOOK(unaligned_read8, 8, false)
MLBENCH_HOOK(unaligned_read16, 16, false)
MLBENCH_HOOK(unaligned_write2, 2, true)
MLBENCH_HOOK(unaligned_write4, 4, true)
MLBENCH_HOOK(unaligned_write8, 8, true)
MLBENCH_HOOK(unaligned_write16, 16, true)
MLBENCH_HOOK(vptr_read, 8, false)
#undef MLBENCH_HOOK

extern "C" {
__attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_read_range(const void* pointer, size_t bytes) {
  mlbench::emulator::watch.touch(pointer, bytes, false, {nullptr, 0, __builtin_return_address(0)});
}
__attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_write_range(const void* pointer, size_t bytes) {
  mlbench::emulator::watch.touch(pointer, bytes, true, {nullptr, 0, __builtin_return_address(0)});
}
__attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_vptr_update(void*, void*) {}
__attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_func_entry(void*) {}
__attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_func_exit() {}
__attribute__((used)) MLBENCH_UNWATCHED inline void __tsan_init() {}
}
