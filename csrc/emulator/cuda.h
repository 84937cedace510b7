// The part of CUDA C++ that the kernels use, on the host: words, built-in functions, memory and the launch.
//
// common/platform.cuh and common/mma.cuh say what each mlbench:: function does; here is only how the host does it.
#pragma once

#include <math.h>

#include <algorithm>
#include <initializer_list>
#include <mutex>
#include <type_traits>

#include "emulator/block.h"
#include "emulator/numbers.h"
#include "emulator/sanitizer.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

using std::max;
using std::min;

inline int __popc(unsigned bits) { return std::popcount(bits); }
inline int __clz(int bits) { return std::countl_zero(static_cast<unsigned>(bits)); }
inline int __ffs(int bits) { return bits == 0 ? 0 : std::countr_zero(static_cast<unsigned>(bits)) + 1; }
inline int __popcll(unsigned long long bits) { return std::popcount(bits); }
inline unsigned __brev(unsigned bits) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= ((bits >> i) & 1u) << (31 - i);
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((static_cast<uint64_t>(a) * b) >> 32); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}

namespace mlbench::emulator {

template <class T>
struct Shuffle {
  T value;
  unsigned source;
  T result;
};

// Each lane of `mask` gets the value of the lane it names; naming a lane outside of the mask is an error.
template <class T>
T shuffle(const char* name, uint32_t mask, T value, unsigned source, const Site& site) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  Shuffle<T> own{value, source, value};
  Block::current().collective(name, mask, own, site, [&](auto& lanes) {
    for (Shuffle<T>* lane : lanes) {
      if (lane == nullptr) continue;
      if (lanes[lane->source] == nullptr)
        MLBENCH_FAIL(site, "%s reads lane %u, which mask 0x%08x lacks", name, lane->source, mask);
      lane->result = lanes[lane->source]->value;
    }
  });
  return own.result;
}

struct Vote {
  bool value;
  unsigned result;
};

inline unsigned ballot(const char* name, uint32_t mask, bool value, const Site& site) {
  Vote own{value, 0};
  Block::current().collective(name, mask, own, site, [](auto& lanes) {
    unsigned result = 0;
    for (unsigned i = 0; i < kWarpSize; ++i)
      result |= static_cast<unsigned>(lanes[i] != nullptr && lanes[i]->value) << i;
    for (Vote* lane : lanes) {
      if (lane != nullptr) lane->result = result;
    }
  });
  return own.result;
}

inline unsigned this_lane() { return threadIdx.x % kWarpSize; }

}  // namespace mlbench::emulator

inline void __syncthreads(const std::source_location& site = std::source_location::current()) {
  mlbench::emulator::Block::current().synchronize("__syncthreads", site);
}

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu,
                       const std::source_location& site = std::source_location::current()) {
  char nothing = 0;
  mlbench::emulator::Block::current().collective("__syncwarp", mask, nothing, site,
                                                 [](auto&) { mlbench::emulator::watch.pass_warp(threadIdx.x / 32); });
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              const std::source_location& site = std::source_location::current()) {
  const unsigned lane = mlbench::emulator::this_lane(), size = static_cast<unsigned>(width);
  return mlbench::emulator::shuffle("__shfl_sync", mask, value,
                                    lane / size * size + static_cast<unsigned>(source) % size, site);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  const std::source_location& site = std::source_location::current()) {
  const unsigned lane = mlbench::emulator::this_lane(), size = static_cast<unsigned>(width);
  const unsigned source = lane ^ static_cast<unsigned>(bits);
  return mlbench::emulator::shuffle("__shfl_xor_sync", mask, value, source / size > lane / size ? lane : source, site);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   const std::source_location& site = std::source_location::current()) {
  const unsigned lane = mlbench::emulator::this_lane(), size = static_cast<unsigned>(width);
  return mlbench::emulator::shuffle("__shfl_down_sync", mask, value, lane % size + delta < size ? lane + delta : lane,
                                    site);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 const std::source_location& site = std::source_location::current()) {
  const unsigned lane = mlbench::emulator::this_lane(), size = static_cast<unsigned>(width);
  return mlbench::emulator::shuffle("__shfl_up_sync", mask, value, lane % size >= delta ? lane - delta : lane, site);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              const std::source_location& site = std::source_location::current()) {
  return mlbench::emulator::ballot("__ballot_sync", mask, predicate != 0, site);
}

inline int __any_sync(unsigned mask, int predicate,
                      const std::source_location& site = std::source_location::current()) {
  return mlbench::emulator::ballot("__any_sync", mask, predicate != 0, site) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      const std::source_location& site = std::source_location::current()) {
  return mlbench::emulator::ballot("__all_sync", mask, predicate != 0, site) == mask;
}

namespace mlbench {

// Tells the emulator, for its own lifetime, what global memory there is: then 16-byte accesses elsewhere abort.
class GlobalMemory {
 public:
  struct Buffer {
    const void* data;
    size_t bytes;
  };

  GlobalMemory(std::initializer_list<Buffer> buffers) : buffers_(buffers), outer_(current_) { current_ = this; }
  GlobalMemory(const GlobalMemory&) = delete;
  GlobalMemory& operator=(const GlobalMemory&) = delete;
  ~GlobalMemory() { current_ = outer_; }

  // Whether the bytes lie in one of the buffers, or nobody said what buffers there are.
  static bool allows(const void* pointer, size_t bytes) {
    if (current_ == nullptr) return true;
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    return std::any_of(current_->buffers_.begin(), current_->buffers_.end(), [&](const Buffer& buffer) {
      const auto begin = reinterpret_cast<uintptr_t>(buffer.data);
      return at >= begin && at + bytes <= begin + buffer.bytes;
    });
  }

 private:
  static inline const GlobalMemory* current_ = nullptr;

  std::vector<Buffer> buffers_;
  const GlobalMemory* outer_;
};

namespace emulator {

inline void check_aligned(const char* name, const void* pointer, const Site& site) {
  if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0)
    MLBENCH_FAIL(site, "%s of %p, which is not 16-byte aligned", name, pointer);
}

inline void check_shared(const char* name, const void* pointer, const Site& site) {
  check_aligned(name, pointer, site);
  SharedMemory& shared = Block::current().shared();
  if (!shared.contains(pointer, 16)) {
    MLBENCH_FAIL(site, "%s at byte %td of the block's %zu bytes of shared memory", name,
                 static_cast<const unsigned char*>(pointer) - shared.data(), shared.size());
  }
}

inline void check_global(const char* name, const void* pointer, const Site& site) {
  check_aligned(name, pointer, site);
  if (!GlobalMemory::allows(pointer, 16)) MLBENCH_FAIL(site, "%s of %p, which is in no buffer", name, pointer);
}

inline void check_any(const char* name, const void* pointer, const Site& site) {
  check_aligned(name, pointer, site);
  if (!Block::current().shared().contains(pointer, 16)) check_global(name, pointer, site);
}

// Global state of the launches: one at a time, all under the same schedule until it is set anew.
inline std::mutex launching;
inline uint64_t schedule_seed = 0;
inline std::string failure, fetched_failure;

inline void check_launch(const dim3& grid, unsigned threads, size_t shared_bytes, const Site& site) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7FFFFFFFu || grid.y > 65535 || grid.z > 65535) {
    MLBENCH_FAIL(site, "launch with a grid of (%u, %u, %u) blocks", grid.x, grid.y, grid.z);
  }
  if (threads == 0 || threads > kMaxThreads) MLBENCH_FAIL(site, "launch with %u threads in a block", threads);
  if (shared_bytes > kMaxSharedBytes)
    MLBENCH_FAIL(site, "launch with %zu bytes of shared memory in a block", shared_bytes);
}

// Runs `kernel` for every block of the grid, one block after the other.
inline void run_grid(const dim3& grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel,
                     const Site& site) {
  check_launch(grid, threads, shared_bytes, site);
  gridDim = grid;
  blockDim = {threads, 1, 1};
  Schedule schedule(schedule_seed);
  Block block(threads, shared_bytes, schedule, kernel);
  for (const uint64_t index : schedule.order(static_cast<uint64_t>(grid.x) * grid.y * grid.z)) {
    blockIdx = {static_cast<unsigned>(index % grid.x), static_cast<unsigned>(index / grid.x % grid.y),
                static_cast<unsigned>(index / grid.x / grid.y)};
    block.run();
  }
}

// Runs the grid, or keeps why it failed; after a failure launches do nothing until somebody asked for it.
inline void launch(const dim3& grid, unsigned threads, size_t shared_bytes, const std::function<void()>& kernel,
                   const Site& site) {
  const std::lock_guard<std::mutex> lock(launching);
  if (!failure.empty()) return;
  try {
    run_grid(grid, threads, shared_bytes, kernel, site);
  } catch (const Failure& caught) {
    failure = caught.message;
    std::fprintf(stderr, "emulator: %s\n", failure.c_str());
  }
}

}  // namespace emulator
}  // namespace mlbench

// Which order later launches run threads and blocks in: 0 ascending, 1 descending, else random from this seed.
extern "C" __attribute__((visibility("default"), used)) inline void mlbench_emulator_schedule(uint64_t seed) {
  mlbench::emulator::schedule_seed = seed;
}

// Whether later launches look for races (they do at first); without, only the schedule shows them.
extern "C" __attribute__((visibility("default"), used)) inline void mlbench_emulator_watch(bool enabled) {
  mlbench::emulator::watch.enable(enabled);
}

// Why a launch failed since the last call, empty if none did. The text is valid until the next call.
extern "C" __attribute__((visibility("default"), used)) inline const char* mlbench_emulator_failure() {
  mlbench::emulator::fetched_failure = std::exchange(mlbench::emulator::failure, {});
  return mlbench::emulator::fetched_failure.c_str();
}
