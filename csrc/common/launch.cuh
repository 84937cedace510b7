// How a kernel is started.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/platform.cuh"

namespace mlbench {

using Dim3 = ::dim3;

using Stream = cudaStream_t;

// Throws std::runtime_error (which torch raises as RuntimeError) naming the call that failed and CUDA's reason.
inline void check_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // an error that is not sticky must not show up in a later call
  throw std::runtime_error(std::string("mlbench: ") + call + " failed: " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

// Puts kernel<<<grid, threads, shared_bytes>>>(arguments...) into `stream`; kernels take one parameter struct by value.
template <class... Arguments>
void launch(void (*kernel)(Arguments...), Dim3 grid, int threads, size_t shared_bytes, Stream stream,
            std::type_identity_t<Arguments>... arguments) {
  constexpr size_t kWithoutAsking = 48 * 1024;
  if (shared_bytes > kWithoutAsking) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               "cudaFuncSetAttribute for more than 48 KiB of shared memory");
  }
  kernel<<<grid, static_cast<unsigned>(threads), shared_bytes, stream>>>(arguments...);
  check_cuda(cudaGetLastError(), "a kernel launch");
}

}  // namespace mlbench
