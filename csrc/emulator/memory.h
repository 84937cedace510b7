// A block's shared memory and the asynchronous copies into it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "emulator/failure.h"
#include "emulator/watch.h"

namespace mlbench::emulator {

// What a block may have on compute capability 8.0, the smallest that the binary is compiled for.
inline constexpr size_t kMaxSharedBytes = 163 * 1024;

// Memory between two guards, as a block sees its dynamic shared memory. Both hold NaNs in every format: what was never
// written is 0xFFFF.., the guards are 0xFFFE.., so that reading either poisons a result and writing a guard shows.
class SharedMemory {
 public:
  static constexpr size_t kGuardBytes = 4096;

  explicit SharedMemory(size_t bytes) : bytes_(bytes), words_((bytes + 2 * kGuardBytes + 15) / 16 + 1) {
    fill(data() - kGuardBytes, kGuardBytes, 0xFFFEu);
    fill(data() + bytes_, kGuardBytes, 0xFFFEu);
    poison();
  }

  unsigned char* data() { return reinterpret_cast<unsigned char*>(words_.data()) + kGuardBytes; }
  size_t size() const { return bytes_; }
  void poison() { std::memset(data(), 0xFF, bytes_); }

  bool contains(const void* pointer, size_t bytes) {
    const auto at = reinterpret_cast<uintptr_t>(pointer), begin = reinterpret_cast<uintptr_t>(data());
    return at >= begin && at + bytes <= begin + bytes_;
  }

  bool intact() {
    return is_filled(data() - kGuardBytes, kGuardBytes, 0xFFFEu) && is_filled(data() + bytes_, kGuardBytes, 0xFFFEu);
  }

 private:
  struct alignas(16) Word {
    unsigned char bytes[16];
  };

  static void fill(unsigned char* at, size_t bytes, uint16_t pattern) {
    for (size_t i = 0; i + 1 < bytes; i += 2) std::memcpy(at + i, &pattern, 2);
  }
  static bool is_filled(const unsigned char* at, size_t bytes, uint16_t pattern) {
    for (size_t i = 0; i + 1 < bytes; i += 2) {
      if (std::memcmp(at + i, &pattern, 2) != 0) return false;
    }
    return true;
  }

  size_t bytes_;
  std::vector<Word> words_;
};

// One cp.async of 16 bytes that was issued and not yet waited for; `source` is null for zeros.
struct Copy {
  void* target;
  const void* source;
  unsigned group;
  Place place;
  bool done = false;

  MLBENCH_UNWATCHED void run() {
    if (done) return;
    done = true;
    watch.touch(target, 16, true, place);
    if (source != nullptr) {
      std::memcpy(target, source, 16);
    } else {
      std::memset(target, 0, 16);
    }
  }
};

}  // namespace mlbench::emulator
