// Small kernels that show what the emulator of csrc/emulator does; test_emulator.py says what each must give.
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/philox.cuh"

namespace {

using namespace mlbench;

constexpr unsigned kAll = 0xFFFFFFFFu;

template <class Parameters>
void run(void (*kernel)(Parameters), Parameters parameters, int threads = 32, size_t shared_bytes = 0,
         Dim3 grid = Dim3{1, 1, 1}) {
  launch(kernel, grid, threads, shared_bytes, Stream{}, parameters);
}

struct Integers {
  const int* in;
  int* out;
};

__global__ void write_indices(Integers p) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int* out = p.out + 5 * (block * blockDim.x + threadIdx.x);
  out[0] = static_cast<int>(blockIdx.x);
  out[1] = static_cast<int>(blockIdx.y);
  out[2] = static_cast<int>(blockIdx.z);
  out[3] = static_cast<int>(threadIdx.x);
  out[4] = static_cast<int>(blockDim.x);
}

// Row r of `out` (one column a lane) is the result of the r-th call.
__global__ void call_warp_functions(Integers p) {
  const unsigned lane = threadIdx.x;
  const int value = p.in[lane];
  int* out = p.out + lane;
  *out = __shfl_sync(kAll, value, static_cast<int>(lane * 7));
  *(out += 32) = __shfl_sync(kAll, value, 2, 8);
  *(out += 32) = __shfl_xor_sync(kAll, value, 5);
  *(out += 32) = __shfl_down_sync(kAll, value, 3);
  *(out += 32) = __shfl_up_sync(kAll, value, 3, 16);
  *(out += 32) = static_cast<int>(__ballot_sync(kAll, value > 0));
  *(out += 32) = __any_sync(kAll, value == p.in[3]);
  *(out += 32) = __all_sync(kAll, value == p.in[3]);
  out += 32;
  if (lane < 8) {
    *out = static_cast<int>(__ballot_sync(0x000000FFu, value > 0));
  } else {
    *out = __shfl_xor_sync(0xFFFFFF00u, value, 1);
  }
}

struct Matrices {
  const uint16_t* in;
  uint32_t* out;
};

// Loads four 8 x 8 matrices that lie row after row, with the kind of ldmatrix that the template says.
template <int kMatrices, bool kTransposed>
__global__ void load_four(Matrices p) {
  auto* shared = reinterpret_cast<uint16_t*>(shared_memory());
  const unsigned lane = threadIdx.x;
  store16(shared + 8 * lane, load16(p.in + 8 * lane));
  __syncwarp();
  uint32_t r[kMatrices];
  const uint16_t* row = shared + 8 * lane;
  if constexpr (kMatrices == 4 && kTransposed) ldmatrix_x4_trans(r, row);
  if constexpr (kMatrices == 4 && !kTransposed) ldmatrix_x4(r, row);
  if constexpr (kMatrices == 2 && kTransposed) ldmatrix_x2_trans(r, lane < 16 ? row : nullptr);
  if constexpr (kMatrices == 2 && !kTransposed) ldmatrix_x2(r, lane < 16 ? row : nullptr);
  for (int i = 0; i < kMatrices; ++i) p.out[kMatrices * lane + i] = r[i];
}

struct Fragments {
  const uint32_t* a;
  const uint32_t* b;
  float* c;
};

template <class T>
__global__ void multiply_fragments(Fragments p) {
  const unsigned lane = threadIdx.x;
  uint32_t a[4], b[2];
  float c[4];
  for (int i = 0; i < 4; ++i) a[i] = p.a[4 * lane + i];
  for (int i = 0; i < 2; ++i) b[i] = p.b[2 * lane + i];
  for (int i = 0; i < 4; ++i) c[i] = p.c[4 * lane + i];
  mma_m16n8k16<T>(c, a, b);
  for (int i = 0; i < 4; ++i) p.c[4 * lane + i] = c[i];
}

struct Rows {
  const uint16_t* a;  // 16 x 16
  const uint16_t* b;  // kTransposed ? 16 x 8 : 8 x 16
  float* c;  // 16 x 8
};

// C = A B or C = A B^T by the addresses that the head of mma.cuh says.
template <bool kTransposed>
__global__ void multiply_rows(Rows p) {
  auto* shared_a = reinterpret_cast<uint16_t*>(shared_memory());
  uint16_t* shared_b = shared_a + 16 * 16;
  const unsigned lane = threadIdx.x;
  cp_async16(shared_a + 8 * lane, p.a + 8 * lane);
  if (lane < 16) cp_async16(shared_b + 8 * lane, p.b + 8 * lane);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  uint32_t a[4], b[2];
  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  ldmatrix_x4(a, shared_a + lane % 16 * 16 + 8 * (lane / 16));
  if constexpr (kTransposed) {
    ldmatrix_x2_trans(b, shared_b + lane % 16 * 8);
  } else {
    ldmatrix_x2(b, shared_b + lane % 8 * 16 + 8 * (lane % 16 / 8));
  }
  mma_m16n8k16<half>(c, a, b);
  for (unsigned i = 0; i < 4; ++i) p.c[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = c[i];
}

// Each thread passes its number to its opposite through shared memory, with or without the barrier that this needs.
template <bool kBarrier, bool kWarpOnly>
__global__ void reverse(Integers p) {
  auto* shared = reinterpret_cast<int*>(shared_memory());
  shared[threadIdx.x] = p.in[threadIdx.x];
  if constexpr (kBarrier && kWarpOnly) __syncwarp();
  if constexpr (kBarrier && !kWarpOnly) __syncthreads();
  const unsigned last = (kWarpOnly ? 32 : blockDim.x) - 1;
  p.out[threadIdx.x] = shared[threadIdx.x ^ last];
}

// Copies two groups of 16 bytes a thread, the second only half; waits for all but the latest kPending groups.
template <int kPending>
__global__ void copy_asynchronously(Integers p) {
  auto* shared = reinterpret_cast<int*>(shared_memory());
  int* first = shared + 8 * threadIdx.x;
  cp_async16(first, p.in + 8 * threadIdx.x);
  cp_async_commit();
  cp_async16(first + 4, p.in + 8 * threadIdx.x + 4, threadIdx.x % 2 == 0);
  cp_async_commit();
  cp_async_wait<kPending>();
  for (int i = 0; i < 8; ++i) p.out[8 * threadIdx.x + i] = first[i];
  cp_async_wait<0>();
}

struct Unwritten {
  float* out;
};

// Reads shared memory that nobody wrote and behind its end; leaves numbers for the next block to find.
__global__ void read_unwritten(Unwritten p) {
  unsigned char* shared = shared_memory();
  float* out = p.out + 6 * blockIdx.x;
  for (size_t i = 0; i < 2; ++i) {
    const unsigned char* at = shared + 64 * i;
    out[3 * i] = *reinterpret_cast<const float*>(at);
    out[3 * i + 1] = to_float(*reinterpret_cast<const half*>(at));
    out[3 * i + 2] = to_float(*reinterpret_cast<const bfloat*>(at));
  }
  *reinterpret_cast<float*>(shared) = 1.0f;
}

struct Order {
  int* next;
  int* out;
};

// Writes in which order the threads run after a barrier.
__global__ void write_order(Order p) {
  __syncthreads();
  p.out[(*p.next)++] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

struct Nothing {
  void* pointer;
};

__global__ void barrier_in_branches(Nothing) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void shuffles_in_branches(Nothing) {
  if (threadIdx.x % 2 == 0) {
    __shfl_sync(kAll, 1, 0);
  } else {
    __shfl_xor_sync(kAll, 1, 1);
  }
}

__global__ void barrier_against_ballot(Nothing) {
  if (threadIdx.x == 40) {
    __ballot_sync(kAll, 1);
  } else {
    __syncthreads();
  }
}

__global__ void ballot_after_return(Nothing) {
  if (threadIdx.x == 3) return;
  __ballot_sync(kAll, 1);
}

__global__ void write_where_others_write(Nothing) {
  auto* shared = reinterpret_cast<int*>(shared_memory());
  shared[threadIdx.x % 8] = static_cast<int>(threadIdx.x);
}

__global__ void read_then_overwrite(Nothing) {
  auto* shared = reinterpret_cast<int*>(shared_memory());
  if (threadIdx.x < 16) shared[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  const int neighbour = shared[(threadIdx.x + 1) % 16];
  if (threadIdx.x < 16) shared[threadIdx.x] = neighbour;
}

__global__ void load_before_all_stored(Nothing) {
  unsigned char* row = shared_memory() + 16 * (threadIdx.x % 4);
  if (threadIdx.x < 4) store16(row, uint4v{0, 0, 0, 0});
  uint32_t r[4];
  ldmatrix_x4(r, row);
}

__global__ void wait_only_for_own_copies(Nothing p) {
  unsigned char* shared = shared_memory();
  if (threadIdx.x < 4) cp_async16(shared + 16 * threadIdx.x, p.pointer);
  cp_async_commit();
  cp_async_wait<0>();
  if (shared[(threadIdx.x + 16) % 64] == 1) __syncwarp();
}

__global__ void mask_without_caller(Nothing) { __syncwarp(0x0000FFFFu); }

__global__ void shuffle_from_outside(Nothing) {
  if (threadIdx.x < 16) __shfl_sync(0x0000FFFFu, 1, 20);
}

__global__ void load_unaligned(Nothing p) { load16(static_cast<char*>(p.pointer) + 8); }

__global__ void load_elsewhere(Nothing p) { load16(static_cast<char*>(p.pointer) + 64); }

__global__ void matrix_outside(Nothing) {
  uint32_t r[4];
  ldmatrix_x4(r, shared_memory() + 16 * threadIdx.x);
}

__global__ void write_outside(Nothing) { shared_memory()[64] = 1; }

__global__ void copy_without_wait(Nothing p) {
  if (threadIdx.x == 0) cp_async16(shared_memory(), p.pointer);
}

__global__ void index_outside(Nothing) {
  int values[4] = {1, 2, 3, 4};
  for (unsigned i = 0; i < threadIdx.x % 8; ++i) values[i] += static_cast<int>(i);
  __syncwarp();
}

__global__ void read_odd(Nothing p) {
  const auto* word = reinterpret_cast<const uint32_t*>(static_cast<char*>(p.pointer) + 2);
  if (*word == 1) __syncwarp();
}

alignas(16) char memory_of_64_bytes[96];

void run_wrong(void (*kernel)(Nothing), int threads = 32, size_t shared_bytes = 64) {
  const GlobalMemory memory{{memory_of_64_bytes, 64}};
  run(kernel, Nothing{memory_of_64_bytes}, threads, shared_bytes);
}

}  // namespace

extern "C" {

void indices(int* out, int x, int y, int z, int threads) {
  const Dim3 grid{static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)};
  run(write_indices, Integers{nullptr, out}, threads, 0, grid);
}

void warp_functions(const int* in, int* out) { run(call_warp_functions, Integers{in, out}); }

void matrices(const uint16_t* in, uint32_t* out, int count, int transposed) {
  if (count == 4) run(transposed ? load_four<4, true> : load_four<4, false>, Matrices{in, out}, 32, 512);
  if (count == 2) run(transposed ? load_four<2, true> : load_four<2, false>, Matrices{in, out}, 32, 512);
}

void product(const uint32_t* a, const uint32_t* b, float* c, int is_bfloat) {
  run(is_bfloat ? multiply_fragments<bfloat> : multiply_fragments<half>, Fragments{a, b, c});
}

void product_of_rows(const uint16_t* a, const uint16_t* b, float* c, int transposed) {
  run(transposed ? multiply_rows<true> : multiply_rows<false>, Rows{a, b, c}, 32, 1024);
}

void reverse_block(const int* in, int* out, int threads, int barrier) {
  run(barrier ? reverse<true, false> : reverse<false, false>, Integers{in, out}, threads, 4 * threads);
}

void reverse_warps(const int* in, int* out, int threads, int barrier) {
  run(barrier ? reverse<true, true> : reverse<false, true>, Integers{in, out}, threads, 4 * threads);
}

void copy(const int* in, int* out, int threads, int pending) {
  const auto kernel = pending == 0   ? copy_asynchronously<0>
                      : pending == 1 ? copy_asynchronously<1>
                                     : copy_asynchronously<2>;
  run(kernel, Integers{in, out}, threads, 32 * threads);
}

void unwritten(float* out, int blocks) {
  run(read_unwritten, Unwritten{out}, 1, 64, Dim3{static_cast<unsigned>(blocks)});
}

void order(int* out, int blocks, int threads) {
  int next = 0;
  run(write_order, Order{&next, out}, threads, 0, Dim3{static_cast<unsigned>(blocks)});
}

void philox(const uint32_t* in, uint32_t* out, int count, int rounds) {
  for (int i = 0; i < count; ++i, in += 6, out += 4) {
    const uint4v bits = rounds == 7 ? philox4x32_7(in[0], in[1], in[2], in[3], in[4], in[5])
                                    : philox4x32<10>(in[0], in[1], in[2], in[3], in[4], in[5]);
    out[0] = bits.x, out[1] = bits.y, out[2] = bits.z, out[3] = bits.w;
  }
}

void widen(const uint16_t* in, float* out, int count, int is_bfloat) {
  for (int i = 0; i < count; ++i) out[i] = is_bfloat ? to_float(bfloat{in[i]}) : to_float(half{in[i]});
}

void narrow(const float* in, uint16_t* out, int count, int is_bfloat) {
  for (int i = 0; i < count; ++i) out[i] = is_bfloat ? from_float<bfloat>(in[i]).bits : from_float<half>(in[i]).bits;
}

void pack(const float* in, uint32_t* bits, float* out) {
  bits[0] = pack2<half>(in[0], in[1]);
  bits[1] = pack2<bfloat>(in[0], in[1]);
  const float2v first = unpack2<half>(bits[0]), second = unpack2<bfloat>(bits[1]);
  out[0] = first.x, out[1] = first.y, out[2] = second.x, out[3] = second.y;
}

void wrong_write_where_others_write() { run_wrong(write_where_others_write); }
void wrong_read_then_overwrite() { run_wrong(read_then_overwrite, 64); }
void wrong_load_before_all_stored() { run_wrong(load_before_all_stored); }
void wrong_wait_only_for_own_copies() { run_wrong(wait_only_for_own_copies); }
void wrong_barrier_in_branches() { run_wrong(barrier_in_branches, 64); }
void wrong_shuffles_in_branches() { run_wrong(shuffles_in_branches); }
void wrong_barrier_against_ballot() { run_wrong(barrier_against_ballot, 64); }
void wrong_ballot_after_return() { run_wrong(ballot_after_return); }
void wrong_ballot_of_half_a_warp() { run_wrong(ballot_after_return, 2); }
void wrong_mask_without_caller() { run_wrong(mask_without_caller); }
void wrong_shuffle_from_outside() { run_wrong(shuffle_from_outside); }
void wrong_load_unaligned() { run_wrong(load_unaligned); }
void wrong_load_elsewhere() { run_wrong(load_elsewhere); }
void wrong_matrix_outside() { run_wrong(matrix_outside); }
void wrong_write_outside() { run_wrong(write_outside); }
void wrong_copy_without_wait() { run_wrong(copy_without_wait); }
void wrong_index_outside() { run_wrong(index_outside); }
void wrong_read_odd() { run_wrong(read_odd); }
void wrong_shared_bytes() { run_wrong(write_outside, 32, 200 * 1024); }
void wrong_threads() { run_wrong(write_outside, 1025); }

}  // extern "C"
