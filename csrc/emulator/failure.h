// How a launch fails: with a message that Python raises (tests/helpers/cuda_host.py).
#pragma once

#include <dlfcn.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <source_location>
#include <string>

namespace mlbench::emulator {

using Site = std::source_location;

// A launch that went wrong, and why.
struct Failure {
  std::string message;
};

// Ends the launch from the stack of a thread, adding which it is, or from that of the launch; block.h has it.
[[noreturn]] void abandon(std::string message);

// Ends the launch with a formatted message that names the place.
[[noreturn]] __attribute__((format(printf, 3, 4))) inline void fail(const char* file, unsigned line, const char* format,
                                                                    ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  abandon(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

#define MLBENCH_FAIL(site, ...) \
  ::mlbench::emulator::fail((site).file_name(), static_cast<unsigned>((site).line()), __VA_ARGS__)

// A place in the source: a file and line or, where only that is known, an address of code.
struct Place {
  const char* file;
  uint32_t line;
  const void* code;

  static Place of(const Site& site) { return {site.file_name(), site.line(), nullptr}; }

  // "file:line", or "[0x1234]" with the offset in the library, which addr2line turns into a line.
  std::string text() const {
    if (file != nullptr) return std::string(file) + ":" + std::to_string(line);
    Dl_info library{};
    dladdr(code, &library);
    const auto offset = static_cast<const char*>(code) - static_cast<const char*>(library.dli_fbase) - 1;
    char text[32];
    std::snprintf(text, sizeof text, "[0x%tx]", offset);
    return text;
  }
};

}  // namespace mlbench::emulator
