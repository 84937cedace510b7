// Fibers: stacks of their own between which one operating-system thread switches by hand.
//
// A CUDA thread of the emulator is a fiber. On x86-64 a switch is the ten instructions below (a few nanoseconds);
// elsewhere, or with MLBENCH_EMULATOR_UCONTEXT, it is swapcontext, which makes a system call each time.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#if !defined(__x86_64__) && !defined(MLBENCH_EMULATOR_UCONTEXT)
#define MLBENCH_EMULATOR_UCONTEXT
#endif

#ifdef MLBENCH_EMULATOR_UCONTEXT
#include <ucontext.h>
#endif

namespace mlbench::emulator {

// One stack, mapped lazily, above a page that may not be touched: an overflow ends in a segmentation fault
// instead of in the neighbour's variables.
class Stack {
 public:
  static constexpr size_t kBytes = 256 * 1024;

  Stack() : guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
    void* memory = mmap(nullptr, guard_ + kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, guard_, PROT_NONE) != 0) {
      std::perror("emulator: no memory for a thread's stack");
      std::abort();
    }
    memory_ = static_cast<unsigned char*>(memory);
  }
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;
  ~Stack() { munmap(memory_, guard_ + kBytes); }

  unsigned char* bottom() const { return memory_ + guard_; }
  unsigned char* top() const { return bottom() + kBytes; }

 private:
  size_t guard_;
  unsigned char* memory_ = nullptr;
};

#ifdef MLBENCH_EMULATOR_UCONTEXT

class Fiber {
 public:
  // Makes the next switch to this fiber call `entry`, which must never return.
  void start(void (*entry)()) {
    if (!stack_) stack_ = std::make_unique<Stack>();
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_->bottom();
    context_.uc_stack.ss_size = Stack::kBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }

  // Stops `from` here and goes on in `to` where that one stopped.
  static void change(Fiber& from, Fiber& to) { swapcontext(&from.context_, &to.context_); }

 private:
  std::unique_ptr<Stack> stack_;
  ucontext_t context_{};
};

#else

// mlbench_change_stack(save, load): pushes the registers that a callee must keep, stores the stack pointer in
// *save, and takes up the stack `load`, which an earlier call (or Fiber::start) left in the same state.
// Without .globl the symbol stays local to the object file.
asm(R"(
    .text
    .type mlbench_change_stack, @function
mlbench_change_stack:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size mlbench_change_stack, . - mlbench_change_stack
)");
extern "C" void mlbench_change_stack(void** save, void* load);

class Fiber {
 public:
  // Makes the next switch to this fiber call `entry`, which must never return.
  void start(void (*entry)()) {
    if (!stack_) stack_ = std::make_unique<Stack>();
    // What mlbench_change_stack pops: six registers and the return address; then a null return address of `entry`,
    // which finds the stack pointer as after a call (8 below a multiple of 16).
    auto** slot = reinterpret_cast<void**>(stack_->top());
    *--slot = nullptr;
    *--slot = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--slot = nullptr;
    stack_pointer_ = slot;
  }

  // Stops `from` here and goes on in `to` where that one stopped.
  static void change(Fiber& from, Fiber& to) { mlbench_change_stack(&from.stack_pointer_, to.stack_pointer_); }

 private:
  std::unique_ptr<Stack> stack_;
  void* stack_pointer_ = nullptr;
};

#endif

}  // namespace mlbench::emulator
