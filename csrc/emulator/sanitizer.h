// What g++ calls where -fsanitize=alignment,bounds,null,shift finds something that the language leaves undefined: an
// address that its type does not allow (a GPU faults), an index outside of an array, a shift by too many bits.
//
// These functions take the place of libubsan, which would end the process where the emulator ends the launch. Only what
// they read of the compiler's descriptions is declared.
#pragma once

#include "emulator/block.h"

namespace mlbench::emulator {

struct SanitizerPlace {
  const char* file;
  uint32_t line;
  uint32_t column;
};

struct SanitizerType {
  uint16_t kind;
  uint16_t info;
  char name[1];  // longer, ends with a null
};

struct SanitizerMismatch {
  SanitizerPlace place;
  const SanitizerType* type;
  unsigned char log_alignment;
  unsigned char access;
};

struct SanitizerBounds {
  SanitizerPlace place;
  const SanitizerType* array;
  const SanitizerType* index;
};

struct SanitizerShift {
  SanitizerPlace place;
};

}  // namespace mlbench::emulator

#define MLBENCH_HANDLER extern "C" __attribute__((used, noreturn)) inline void

MLBENCH_HANDLER __ubsan_handle_type_mismatch_v1_abort(mlbench::emulator::SanitizerMismatch* what, uintptr_t address) {
  mlbench::emulator::fail(what->place.file, what->place.line,
                          "address %p for %s, which needs a multiple of %u, not null", reinterpret_cast<void*>(address),
                          what->type->name, 1u << what->log_alignment);
}

MLBENCH_HANDLER __ubsan_handle_out_of_bounds_abort(mlbench::emulator::SanitizerBounds* what, uintptr_t index) {
  mlbench::emulator::fail(what->place.file, what->place.line, "index %td is outside of %s",
                          static_cast<ptrdiff_t>(index), what->array->name);
}

MLBENCH_HANDLER __ubsan_handle_shift_out_of_bounds_abort(mlbench::emulator::SanitizerShift* what, uintptr_t,
                                                         uintptr_t) {
  mlbench::emulator::fail(what->place.file, what->place.line, "shift by too many bits");
}

#undef MLBENCH_HANDLER
