// One CUDA block on the host: its threads are fibers that wait for one another at barriers and warp collectives.
//
// Between two such points a thread runs alone and undisturbed. Which of the threads that may go on runs next is the
// schedule's choice, so a kernel that needs an order it does not enforce gives different results under different
// schedules. A wait that can never end, and arrivals that do not fit together, end the launch with a message.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "emulator/failure.h"
#include "emulator/fiber.h"
#include "emulator/memory.h"
#include "emulator/schedule.h"
#include "emulator/watch.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline dim3 threadIdx{0, 0, 0}, blockIdx{0, 0, 0}, blockDim, gridDim;

namespace mlbench::emulator {

inline constexpr unsigned kMaxThreads = 1024;

class Block {
 public:
  Block(unsigned threads, size_t shared_bytes, Schedule& schedule, std::function<void()> kernel)
      : threads_(threads), memory_(shared_bytes), schedule_(schedule), kernel_(std::move(kernel)) {}

  // The block that runs; there is none outside of a launch.
  static Block& current() { return *current_; }
  static bool in_kernel() { return current_ != nullptr; }

  SharedMemory& shared() { return memory_; }
  Schedule& schedule() { return schedule_; }
  std::deque<Copy>& copies() { return threads_[running_].copies; }
  unsigned& copy_group() { return threads_[running_].copy_group; }

  // Runs the block that blockIdx says from its first to its last thread.
  void run() {
    memory_.poison();
    finished_ = 0;
    at_barrier_ = 0;
    gone_.fill(0xFFFFFFFFu);
    for (unsigned i = 0; i < threads_.size(); ++i) {
      threads_[i].copy_group = 0;
      threads_[i].fiber.start(&Block::enter);
      gone_[i / kWarpSize] &= ~(1u << (i % kWarpSize));
      make_ready(i);
    }
    current_ = this;
    watch.start(memory_.data(), memory_.size(), SharedMemory::kGuardBytes);
    choose();
    Fiber::change(caller_, threads_[running_].fiber);
    watch.stop();
    current_ = nullptr;
    if (!failure_.empty()) throw Failure{failure_};
    if (!memory_.intact()) throw Failure{place() + "wrote outside of its shared memory"};
  }

  // Ends the block at once, from one of its threads.
  [[noreturn]] void abandon(const std::string& message) {
    failure_ = place() + "thread " + std::to_string(running_) + ", " + message;
    Fiber::change(threads_[running_].fiber, caller_);
    std::abort();  // nobody comes back to an abandoned block
  }

  // Waits until every thread of the block that has not returned arrives at the same barrier.
  void synchronize(const char* name, const Site& site) {
    wait(State::kBlock, {name, 0, nullptr, site});
    release_block();
    go_on();
  }

  // Waits until every lane in `mask` arrives with the same operation; the last runs `action` for all of them, which
  // gets the argument of each lane (null where the mask has none).
  template <class Argument, class Action>
  void collective(const char* name, uint32_t mask, Argument& argument, const Site& site, Action action) {
    wait(State::kWarp, {name, mask, &argument, site});
    if (all_lanes_arrived()) {
      const unsigned first = running_ / kWarpSize * kWarpSize;
      std::array<Argument*, kWarpSize> lanes{};
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if ((mask >> lane) & 1u) lanes[lane] = static_cast<Argument*>(threads_[first + lane].at.argument);
      }
      action(lanes);
      for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if (lanes[lane] != nullptr) make_ready(first + lane);
      }
    }
    go_on();
  }

 private:
  static std::string place() {
    return "block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) + ", " +
           std::to_string(blockIdx.z) + "), ";
  }

  enum class State : uint8_t { kReady, kWarp, kBlock, kReturned };

  // Where a thread waits.
  struct Arrival {
    const char* name = "";
    uint32_t mask = 0;
    void* argument = nullptr;
    Site site = Site::current();

    // The same operation with the same mask at the same place (equal literals of one library share their address).
    bool fits(const Arrival& other) const {
      return name == other.name && mask == other.mask && site.file_name() == other.site.file_name() &&
             site.line() == other.site.line() && site.column() == other.site.column();
    }
  };

  struct Thread {
    Fiber fiber;
    State state = State::kReturned;
    Arrival at;
    std::deque<Copy> copies;
    unsigned copy_group = 0;
  };

  static void enter() {
    Block& block = current();
    block.kernel_();
    current().leave();
  }

  // Ends the running thread: it counts as arrived at every later barrier of the block.
  [[noreturn]] void leave() {
    if (!copies().empty())
      MLBENCH_FAIL(Site::current(), "returns with %zu cp.async it never waited for", copies().size());
    stop(State::kReturned);
    ++finished_;
    const unsigned first = running_ / kWarpSize * kWarpSize;
    for (unsigned i = first; i < first + kWarpSize && i < threads_.size(); ++i) {
      if (threads_[i].state == State::kWarp && ((threads_[i].at.mask >> (running_ - first)) & 1u)) {
        MLBENCH_FAIL(threads_[i].at.site, "returned, but thread %u waits for it in %s with mask 0x%08x", i,
                     threads_[i].at.name, threads_[i].at.mask);
      }
    }
    if (finished_ == threads_.size()) {
      Fiber::change(threads_[running_].fiber, caller_);
    } else {
      release_block();
      go_on();
    }
    std::abort();  // nobody switches back to a thread that has returned
  }

  void wait(State state, const Arrival& arrival) {
    threads_[running_].at = arrival;
    if (state == State::kWarp) check_lanes();
    stop(state);
    if (state == State::kBlock) check_barrier();
  }

  // The mask names the caller and only threads that can still come, and those that wait came for the same.
  void check_lanes() {
    const Arrival& own = threads_[running_].at;
    const unsigned warp = running_ / kWarpSize;
    if (!((own.mask >> (running_ % kWarpSize)) & 1u)) {
      MLBENCH_FAIL(own.site, "%s with mask 0x%08x, which does not name the calling lane", own.name, own.mask);
    }
    if ((own.mask & gone_[warp]) != 0) {
      MLBENCH_FAIL(own.site, "%s with mask 0x%08x, but the lanes 0x%08x have returned or do not exist", own.name,
                   own.mask, own.mask & gone_[warp]);
    }
    for (uint32_t others = own.mask & waiting_[warp]; others != 0; others &= others - 1) {
      const unsigned other = warp * kWarpSize + static_cast<unsigned>(std::countr_zero(others));
      check_fit("divergent warp", own, other);
    }
  }

  void check_barrier() {
    if (at_barrier_ > 1) check_fit("divergent barrier", threads_[running_].at, first_at_barrier_);
  }

  void check_fit(const char* what, const Arrival& own, unsigned other) const {
    const Arrival& at = threads_[other].at;
    if (own.fits(at)) return;
    MLBENCH_FAIL(own.site, "%s: arrives at %s with mask 0x%08x while thread %u waits in %s with mask 0x%08x at %s:%u",
                 what, own.name, own.mask, other, at.name, at.mask, at.site.file_name(),
                 static_cast<unsigned>(at.site.line()));
  }

  bool all_lanes_arrived() const { return (threads_[running_].at.mask & ~waiting_[running_ / kWarpSize]) == 0; }

  // Opens the block's barrier if all threads that have not returned wait at it.
  void release_block() {
    if (at_barrier_ == 0 || at_barrier_ + finished_ < threads_.size()) return;
    at_barrier_ = 0;
    watch.pass_barrier();
    for (unsigned i = 0; i < threads_.size(); ++i) {
      if (threads_[i].state == State::kBlock) make_ready(i);
    }
  }

  void make_ready(unsigned thread) {
    const unsigned warp = thread / kWarpSize;
    const uint32_t lane = 1u << (thread % kWarpSize);
    threads_[thread].state = State::kReady;
    ready_[warp] |= lane;
    waiting_[warp] &= ~lane;
    ready_warps_ |= 1u << warp;
  }

  // Takes the running thread out of those that may be chosen.
  void stop(State state) {
    const unsigned warp = running_ / kWarpSize;
    const uint32_t lane = 1u << (running_ % kWarpSize);
    threads_[running_].state = state;
    ready_[warp] &= ~lane;
    if (ready_[warp] == 0) ready_warps_ &= ~(1u << warp);
    if (state == State::kWarp) waiting_[warp] |= lane;
    if (state == State::kBlock && at_barrier_++ == 0) first_at_barrier_ = running_;
    if (state == State::kReturned) gone_[warp] |= lane;
  }

  void choose() {
    const unsigned warp = schedule_.choose_warp(ready_warps_);
    running_ = warp * kWarpSize + schedule_.choose_lane(ready_[warp]);
    threadIdx.x = running_;
    watch.set_thread(running_);
  }

  // Gives the processor to the thread that the schedule chooses; returns when it is this thread's turn again.
  void go_on() {
    if (ready_warps_ == 0) report_deadlock();
    const unsigned self = running_;
    choose();
    if (running_ != self) Fiber::change(threads_[self].fiber, threads_[running_].fiber);
  }

  // Says where the threads wait, one line for each run of neighbours that wait alike.
  [[noreturn]] void report_deadlock() {
    std::string message = "deadlock: every thread that has not returned waits for another";
    const Arrival* last = nullptr;
    for (unsigned i = 0; i < threads_.size(); ++i) {
      const Arrival* at = threads_[i].state == State::kReturned ? nullptr : &threads_[i].at;
      if (at != nullptr && (last == nullptr || !at->fits(*last))) {
        message += "\n  from thread " + std::to_string(i) + " on in " + at->name + ", " + at->site.file_name() + ":" +
                   std::to_string(at->site.line());
      }
      last = at;
    }
    abandon(message);
  }

  static inline Block* current_ = nullptr;

  std::vector<Thread> threads_;
  Fiber caller_;
  SharedMemory memory_;
  Schedule& schedule_;
  std::function<void()> kernel_;
  std::string failure_;
  // One bit a lane of each warp: may run, waits for lanes of its warp, has returned or never was.
  std::array<uint32_t, kMaxThreads / kWarpSize> ready_{}, waiting_{}, gone_{};
  uint32_t ready_warps_ = 0;
  unsigned running_ = 0;
  unsigned first_at_barrier_ = 0;
  size_t at_barrier_ = 0;
  size_t finished_ = 0;
};

[[noreturn]] inline void abandon(std::string message) {
  if (Block::in_kernel()) Block::current().abandon(message);
  throw Failure{std::move(message)};
}

}  // namespace mlbench::emulator
